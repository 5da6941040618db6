"""A broker as a user runs it: the command, its ready line, a signal at the end."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from command import PENSTOCK

__all__ = ["Served", "serve"]


class Served:
    """A running broker."""

    def __init__(self, process: subprocess.Popen[str], listeners: dict[str, str]) -> None:
        self.process, self.listeners = process, listeners

    def port(self, name: str = "mqtt") -> int:
        return int(self.listeners[name].rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)


@contextlib.contextmanager
def serve(*words: str | Path) -> Iterator[Served]:
    command = [*PENSTOCK, "mqtt", "serve", "--json", *map(str, words)]
    if "--port" not in words:
        command += ["--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            ready = json.loads(line)
            assert ready["event"] == "ready"
            yield Served(process, ready["listeners"])
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
