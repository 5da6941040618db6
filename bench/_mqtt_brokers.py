"""The brokers of bench/mqtt.py, each in its own process: ours, mosquitto, amqtt, and a stub that only copies bytes."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Broker:
    """A running broker; ``ports`` by the name of the wire."""

    name = ""
    missing = ""

    def __init__(self, folder: str, files: tuple[str, str]) -> None:
        self.folder, self.files = folder, files
        self.ports: dict[str, int] = {}
        self.process: subprocess.Popen[Any]

    def __enter__(self) -> Self:
        self.start()
        for port in self.ports.values():
            self._wait(port)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        raise NotImplementedError

    def _wait(self, port: int) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"{self.name} did not start on port {port}")


class Penstock(Broker):
    name = "penstock"
    words: tuple[str, ...] = ()

    def start(self) -> None:
        cert, key = self.files
        path = os.path.join(self.folder, "penstock.toml")  # nobody is dropped: mosquitto's queues have no bound either
        Path(path).write_text("[broker]\nmax_unsent_bytes = 1073741824\n")
        command = [sys.executable, "-m", "penstock.cli.main", "mqtt", "serve", "--json", "--port", "0",
                   "--ws-port", "0", "--tls-port", "0", "--cert", cert, "--key", key, "--config", path]  # fmt: skip
        command += self.words
        profile = os.environ.get("PENSTOCK_BENCH_PROFILE")
        if profile:
            command[1:3] = ["-m", "cProfile", "-o", profile, "-m", "penstock.cli.main"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("penstock did not start")
        names = {"mqtt": "tcp", "ws": "ws", "mqtts": "tls"}
        listeners = json.loads(line)["listeners"]
        self.ports = {names[name]: int(address.rpartition(":")[2]) for name, address in listeners.items()}


class Mosquitto(Broker):
    name = "mosquitto"
    missing = "" if shutil.which("mosquitto") else "mosquitto is not installed: apt-get install mosquitto"

    def start(self) -> None:
        cert, key = self.files
        self.ports = {"tcp": free_port(), "tls": free_port(), "ws": free_port()}
        path = os.path.join(self.folder, "mosquitto.conf")
        Path(path).write_text(
            f"""
            user {getpass.getuser()}
            allow_anonymous true
            persistence false
            log_type none
            max_inflight_messages 0
            max_queued_messages 0
            listener {self.ports["tcp"]} 127.0.0.1
            listener {self.ports["tls"]} 127.0.0.1
            certfile {cert}
            keyfile {key}
            listener {self.ports["ws"]} 127.0.0.1
            protocol websockets
            """.replace("            ", "")
        )
        self.process = subprocess.Popen(["mosquitto", "-c", path], stderr=subprocess.DEVNULL)


class Amqtt(Broker):
    name = "amqtt"
    missing = (
        ""
        if shutil.which("amqtt", path=str(Path(sys.executable).parent))
        else "amqtt is not installed: pip install amqtt"
    )

    def start(self) -> None:
        self.ports = {"tcp": free_port()}
        path = os.path.join(self.folder, "amqtt.yaml")
        Path(path).write_text(
            f"""
listeners:
  default:
    type: tcp
    bind: 127.0.0.1:{self.ports["tcp"]}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""
        )
        command = [str(Path(sys.executable).parent / "amqtt"), "-c", path]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Stub(Broker):
    """Copies what publishers send to all subscribers, unread: what the generator itself can do at most (QoS 0)."""

    name = "stub"

    def start(self) -> None:
        port = free_port()
        self.ports = {"tcp": port}
        self.process = subprocess.Popen([sys.executable, __file__, str(port)])


def copy_bytes(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    subscribers: dict[bytes, list[socket.socket]] = {}
    topics: dict[int, bytes] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                sock, _ = listener.accept()
                clients[sock.fileno()] = sock
                poll.register(sock, select.EPOLLIN)
                continue
            sock = clients[fd]
            data = sock.recv(1 << 18)
            if not data:
                poll.unregister(fd)
                clients.pop(fd).close()
                topics.pop(fd, None)
                for group in subscribers.values():
                    if sock in group:
                        group.remove(sock)
            elif data[0] == 0x10:
                sock.sendall(b"\x20\x02\x00\x00")
            elif data[0] == 0x82:
                size = int.from_bytes(data[4:6], "big")
                subscribers.setdefault(data[6 : 6 + size], []).append(sock)
                sock.sendall(b"\x90\x03\x00\x01\x00")
            else:
                if fd not in topics:
                    at = 2 if data[1] < 128 else 3
                    topics[fd] = data[at + 2 : at + 2 + int.from_bytes(data[at : at + 2], "big")]
                for each in subscribers.get(topics[fd], ()):
                    each.sendall(data)


BROKERS = {each.name: each for each in (Penstock, Mosquitto, Amqtt, Stub)}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    copy_bytes(int(sys.argv[1]))
