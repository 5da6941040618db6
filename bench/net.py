"""What does the net floor cost: bytes of an idle connection, reads and writes a second, a connect that is turned away?

Idle connections are measured in a server process of their own: its resident memory before and after, divided by their
number; kernel buffers are not in it.  Throughput is one connection that echoes or swallows what another process sends.
The plain asyncio protocols beside ours show what the floor adds, and whether BufferedProtocol would be worth it.

    python bench/net.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import resource
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import uvloop

import _table
from penstock.net import (
    Admission,
    ConnectionLimits,
    Endpoint,
    Target,
    Tls,
    TlsFiles,
    WebSocketOptions,
    dial,
    listen,
    make_development_certificate,
)

SPAWN = mp.get_context("spawn")


class Quiet:
    """A core that only counts."""

    received_bytes = 0
    reads = 0

    def opened(self, connection: Any) -> None:
        self.connection = connection

    def received(self, data: bytes) -> None:
        Quiet.received_bytes += len(data)
        Quiet.reads += 1

    def congested(self) -> None: ...
    def writable(self) -> None: ...
    def expired(self) -> None: ...
    def closed(self, reason: str) -> None: ...


class Echo(Quiet):
    def received(self, data: bytes) -> None:
        self.connection.write(data)


class PlainEcho(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class PlainSink(asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        Quiet.received_bytes += len(data)


class BufferedSink(asyncio.BufferedProtocol):
    buffer = memoryview(bytearray(256 << 10))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        bytes(self.buffer[:nbytes])  # a core keeps what it is given, so it has to be copied
        Quiet.received_bytes += nbytes


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(pipe: Any, kind: str, files: tuple[str, str]) -> None:
    """Serve in a process of its own; answer questions over the pipe until it is told to end."""
    raise_file_limit()
    uvloop.run(_serve(pipe, kind, files))


async def _serve(pipe: Any, kind: str, files: tuple[str, str]) -> None:
    loop = asyncio.get_running_loop()
    if kind.startswith("plain-"):
        protocol: Callable[[], Any] = {"echo": PlainEcho, "sink": PlainSink, "buffered": BufferedSink}[kind[6:]]
        server = await loop.create_server(protocol, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
    else:
        name, _, wire = kind.partition("-")
        tls = Tls(TlsFiles(certificate=files[0], key=files[1])) if "tls" in wire else None
        websocket = WebSocketOptions() if "ws" in wire else None
        limits = ConnectionLimits(max_connections=1_000_000, max_per_address=None if name != "closed" else 1)
        listeners = await listen(
            [Endpoint(name="bench", tls=tls, websocket=websocket)],
            Echo if name == "echo" else Quiet,
            admission=Admission(limits),
        )
        pipe.send(int(listeners.addresses["bench"].rpartition(":")[2]))
    while True:
        question = await loop.run_in_executor(None, pipe.recv)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if question == "end":
            return
        refused = 0 if kind.startswith("plain-") else listeners.admission.refused
        connections = 0 if kind.startswith("plain-") else len(listeners.connections)
        pipe.send((resident(), Quiet.received_bytes, usage.ru_utime + usage.ru_stime, refused, connections))


class Server:
    def __init__(self, kind: str, files: tuple[str, str]) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, kind, files), daemon=True)
        self.process.start()
        self.port = self.pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.send("end")
        self.process.join(20)

    def ask(self) -> tuple[int, int, float, int, int]:
        self.pipe.send("figures")
        return self.pipe.recv()  # type: ignore[no-any-return]


def raise_file_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# --- Idle connections


async def idle(server: Server, kind: str, count: int, trusted: str) -> float:
    context = ssl.create_default_context(cafile=trusted)
    wire = kind.partition("-")[2]
    port = server.port
    before = server.ask()[0]
    kept: list[Any] = []
    if not wire:
        kept += [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    else:
        scheme = {"tls": "mqtts", "ws": "ws", "wstls": "wss"}[wire]
        target = Target.parse(f"{scheme}://localhost:{port}/" if "ws" in scheme else f"{scheme}://localhost:{port}")
        for _ in range(0, count, 50):
            kept += await asyncio.gather(*(dial(target, Quiet(), tls=context) for _ in range(50)))
    while server.ask()[4] < len(kept):
        await asyncio.sleep(0.1)
    after = server.ask()[0]
    for each in kept:
        each.close()
    return (after - before) / count


# --- Throughput


def push(port: int, total: int, size: int) -> float:
    """Send ``total`` bytes in sends of ``size`` and wait for the end of the stream; return the seconds."""
    block = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        begin = time.perf_counter()
        for _ in range(total // size):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65_536):
            pass
        return time.perf_counter() - begin


def ping_pong(port: int, count: int) -> float:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.perf_counter()
        for _ in range(count):
            sock.sendall(b"x" * 64)
            sock.recv(64)
        return time.perf_counter() - begin


def flood(port: int, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            try:
                sock.recv(1)
            except ConnectionResetError:
                pass
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    room = raise_file_limit() - 200
    count = 200 if options.quick else min(10_000, room)
    other_count = 100 if options.quick else min(2_000, room)
    total = (4 if options.quick else 1024) << 20
    rounds = 1 if options.quick else 3
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = make_development_certificate(folder)
        files = (made.certificate, made.key)
        for kind, number in (("quiet", count), ("quiet-ws", other_count), ("quiet-tls", other_count)):
            with Server(kind, files) as server:
                figures[f"idle {kind} {number}"] = uvloop.run(idle(server, kind, number, made.certificate))
        for kind in ("quiet", "plain-sink", "plain-buffered"):
            with Server(kind, files) as server:
                cpu = server.ask()[2]
                seconds = [push(server.port, total, 256 << 10) for _ in range(rounds)]
                cpu = (server.ask()[2] - cpu) / rounds
            figures[f"sink {kind}"] = total / statistics.median(seconds)
            figures[f"sink cpu {kind}"] = cpu / total
        for kind in ("echo", "plain-echo"):
            with Server(kind, files) as server:
                number = 200 if options.quick else 20_000
                cpu = server.ask()[2]
                seconds = [ping_pong(server.port, number) for _ in range(rounds)]
                figures[f"echo {kind}"] = number / statistics.median(seconds)
                figures[f"echo cpu {kind}"] = (server.ask()[2] - cpu) / number / rounds
        with Server("closed", files) as server, socket.create_connection(("127.0.0.1", server.port)):
            number = 200 if options.quick else 10_000
            cpu = server.ask()[2]
            figures["refused"] = number / flood(server.port, number)
            figures["refused cpu"] = (server.ask()[2] - cpu) / number
    if options.json:
        print(json.dumps(figures))
        return
    names = {"quiet": "TCP", "quiet-ws": "WebSocket", "quiet-tls": "TLS"}
    rows: list[list[object]] = [
        [f"{names[kind]}, {number} connections", f"{value:,.0f}"]
        for (_, kind, number), value in ((name.split(), value) for name, value in figures.items() if name[:4] == "idle")
    ]
    print(_table.markdown(["idle connection", "bytes of the process"], rows) + "\n")
    rows = [
        [
            "a stream into a core (asyncio.Protocol)",
            f"{figures['sink quiet'] / 1e9:.2f} GB/s",
            f"{figures['sink cpu quiet'] * 1e9:.2f} s/GB",
        ],
        [
            "bare asyncio.Protocol on uvloop",
            f"{figures['sink plain-sink'] / 1e9:.2f} GB/s",
            f"{figures['sink cpu plain-sink'] * 1e9:.2f} s/GB",
        ],
        [
            "bare BufferedProtocol, copied once",
            f"{figures['sink plain-buffered'] / 1e9:.2f} GB/s",
            f"{figures['sink cpu plain-buffered'] * 1e9:.2f} s/GB",
        ],
        [
            "64 B there and back through a core",
            _table.rate(figures["echo echo"]),
            f"{figures['echo cpu echo'] * 1e6:.1f} µs each",
        ],
        [
            "64 B there and back, bare asyncio.Protocol",
            _table.rate(figures["echo plain-echo"]),
            f"{figures['echo cpu plain-echo'] * 1e6:.1f} µs each",
        ],
        [
            "a connect that is turned away",
            _table.rate(figures["refused"]),
            f"{figures['refused cpu'] * 1e6:.0f} µs each",
        ],
    ]
    print(_table.markdown(["what", "rate", "CPU of the server"], rows))


if __name__ == "__main__":
    main()
