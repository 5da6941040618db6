"""A node as a user runs it: one process, real sockets."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command import PENSTOCK

PORTS = ("--port", "0", "--channels-port", "0", "--http-port", "0")


@contextmanager
def node(tmp_path: Path, *words: str, data: str = "data") -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [*PENSTOCK, "serve", "--data", str(tmp_path / data), *PORTS, "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            yield process, json.loads(line)
        finally:
            process.kill()


def ask(address: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()
