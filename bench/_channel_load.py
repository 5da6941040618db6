"""A load generator for channel servers: ours, the original, or a stub that shows what the generator itself can do.

One process, one thread, OpenSSL on the sockets themselves.  What producers send is encoded before the clock starts, and
of what comes back only line ends are counted (payloads have none in them), so that it can do more than a server:
producers keep ``--inflight`` broadcasts under way each, consumers count what they hear.  The stub runs in a process of
its own, decrypts and encrypts the same bytes, and looks at none of them.

    python bench/_channel_load.py --server 127.0.0.1:22622 [--tls] [--producers 1] [--consumers 1] [--seconds 5]
        [--payload 256] [--qos 1] [--password PW] [--persist] [--flush-ms N] [--stub] [--json]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.channels.wire.frames import Frame, decode_line, encode_frame
from penstock.net import make_development_certificate

CHANNEL: Final = "!bench1@localhost"
PIECE: Final = 64 << 10
READ: Final = 256 << 10
MANY: Final = 512
"""How many frames are encoded in advance; their ids come round again."""


class Wire:
    """A socket that does not block, with what is still to be written to it."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        self.socket, self.selector = sock, selector
        self.pending: deque[memoryview] = deque()
        self.waits = False
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def send(self, data: memoryview) -> None:
        for at in range(0, len(data), PIECE):
            self.pending.append(data[at : at + PIECE])
        if not self.waits:
            self.flush()

    def flush(self) -> None:
        pending, sock = self.pending, self.socket
        try:
            while pending:
                sent = sock.send(pending[0])
                if sent == len(pending[0]):
                    pending.popleft()
                else:
                    pending[0] = pending[0][sent:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        if bool(pending) != self.waits:
            self.waits = bool(pending)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
            self.selector.modify(sock, events, self)

    def read(self, room: bytearray, view: memoryview) -> None:
        """Take what is there, in pieces of a TLS record or of the whole room."""
        try:
            for _ in range(16):
                size = self.socket.recv_into(view)
                if not size:
                    raise SystemExit("the other side closed the connection")
                self.took(room, size)
                if size < 16_384:
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        self.answer()

    def answer(self) -> None:
        """Say what follows from all that was read, in one go."""

    def took(self, room: bytearray, size: int) -> None:
        raise NotImplementedError


def serve(selector: selectors.BaseSelector, room: bytearray, timeout: float) -> None:
    view = memoryview(room)
    for key, events in selector.select(timeout):
        if events & selectors.EVENT_WRITE:
            key.data.flush()
        if events & selectors.EVENT_READ:
            key.data.read(room, view)
            while getattr(key.fileobj, "pending", int)():  # what OpenSSL holds no selector tells
                key.data.read(room, view)


class Consumer(Wire):
    """Counts what it hears: two line ends each."""

    ends = 0

    @property
    def heard(self) -> int:
        return self.ends // 2

    def took(self, room: bytearray, size: int) -> None:
        self.ends += room.count(10, 0, size)


class Producer(Wire):
    """Keeps broadcasts under way, and remembers when each batch was sent."""

    def begin(self, payload: bytes, inflight: int, qos: int) -> None:
        frames = [
            encode_frame("BROADCAST", {"id": number, "channel": CHANNEL, "qos": qos}, payload)
            for number in range(1, MANY + 1)
        ]
        self.starts = [0, *np.cumsum([len(frame) for frame in frames]).tolist()]
        self.frames = memoryview(b"".join(frames))
        self.next = self.left = self.acked = self.got = 0
        self.latencies: list[tuple[float, int]] = []
        self.sent: deque[tuple[int, float]] = deque()
        self.inflight, self.running = inflight, True
        self.more(inflight)

    def more(self, count: int) -> None:
        self.left += count
        self.sent.append((count, time.perf_counter()))
        while count:
            taken = min(count, MANY - self.next)
            self.send(self.frames[self.starts[self.next] : self.starts[self.next + taken]])
            self.next = (self.next + taken) % MANY
            count -= taken

    def took(self, room: bytearray, size: int) -> None:
        count = room.count(10, 0, size)
        if room.find(b"ERROR", 0, size) >= 0:
            raise SystemExit(f"the server says {bytes(room[: min(size, 300)])!r}")
        self.got += count

    def answer(self) -> None:
        count, self.got = self.got, 0
        if not count:
            return
        now = time.perf_counter()
        self.acked += count
        self.left -= count
        while self.sent and count:
            many, when = self.sent[0]
            taken = min(many, count)
            self.latencies.append((now - when, taken))
            count -= taken
            if taken == many:
                self.sent.popleft()
            else:
                self.sent[0] = many - taken, when
        if self.running and self.left < self.inflight:
            self.more(self.inflight - self.left)


class Visitor:
    """A connection while things are set up: asks one thing at a time and waits."""

    def __init__(self, address: str, name: str, *, tls: bool, password: str | None) -> None:
        host, _, port = address.rpartition(":")
        self.socket: socket.socket = socket.create_connection((host, int(port)), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.rest = b""
        self.ask("CONNECT", heartbeat_interval=60_000, version=1)
        if password is None:
            self.ask("IDENTIFY", username=name)
        else:
            self.ask("AUTH", token=base64.b64encode(f"\0{name}\0{password}".encode()).decode())

    def ask(self, name: str, **fields: Any) -> Frame:
        self.socket.sendall(encode_frame(name, fields))
        while True:
            answer = self.frame()
            if answer.name == "ERROR":
                raise SystemExit(f"{name}: {answer.fields}")
            if answer.name not in ("EVENT", "PING"):
                return answer

    def frame(self) -> Frame:
        while b"\n" not in self.rest:
            read = self.socket.recv(READ)
            if not read:
                raise SystemExit("the server closed the connection")
            self.rest += read
        line, _, self.rest = self.rest.partition(b"\n")
        return decode_line(line)

    def heard_all(self) -> None:
        """Take the events of others that joined, which are there by now: there are no messages yet."""
        self.socket.settimeout(0.01)
        try:
            while True:
                self.frame()
        except TimeoutError:
            assert not self.rest


class StubClient(Wire):
    """Acknowledges and passes on without looking."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, stub: Stub) -> None:
        self.stub, self.ends, self.loaded = stub, 0, False
        super().__init__(sock, selector)

    def read(self, room: bytearray, view: memoryview) -> None:
        try:
            super().read(room, view)
        except (SystemExit, OSError):
            self.selector.unregister(self.socket)
            self.stub.clients.discard(self)
            self.stub.done = not self.stub.clients

    def took(self, room: bytearray, size: int) -> None:
        if not self.loaded and not room.startswith(b"BROADCAST"):
            if room.find(b"bench_consumer", 0, size) >= 0 and room.startswith((b"IDENTIFY", b"AUTH")):
                self.stub.consumers.append(self)
            self.send(memoryview(b"PUSH_ACK id=1\n"))
            return
        self.loaded = True
        self.ends += room.count(10, 0, size)

    def answer(self) -> None:
        count, self.ends = self.ends // 2, self.ends % 2
        while count:
            taken = min(count, MANY)
            self.send(self.stub.acks[: taken * self.stub.ack])
            for consumer in self.stub.consumers:
                consumer.send(self.stub.messages[: taken * self.stub.message])
            count -= taken


class Stub:
    """A server that costs nothing but TLS."""

    def __init__(self, payload: int, *, tls: bool) -> None:
        ack = b"BROADCAST_ACK id=100 seq=100000\n"
        fields = {"channel": CHANNEL, "from": "bench_producer_0@localhost", "seq": 10_000, "timestamp": 1767225600000}
        message = encode_frame("MESSAGE", fields, b"x" * payload)
        self.ack, self.message = len(ack), len(message)
        self.acks, self.messages = memoryview(ack * MANY), memoryview(message * MANY)
        self.clients: set[StubClient] = set()
        self.consumers: list[StubClient] = []
        self.done, self.tls = False, tls

    def run(self) -> None:
        selector, room = selectors.DefaultSelector(), bytearray(READ)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            files = make_development_certificate(folder)
            context.load_cert_chain(files.certificate, files.key)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            while not self.done:
                if self.clients:
                    serve(selector, room, 0.05)
                listener.settimeout(0.001 if self.clients else 20)
                if self.consumers and any(client.loaded for client in self.clients):
                    continue  # all of them are there
                try:
                    sock = listener.accept()[0]
                except TimeoutError:
                    continue
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.tls:
                    sock.settimeout(20)
                    sock = context.wrap_socket(sock, server_side=True)
                self.clients.add(StubClient(sock, selector, self))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    access = {"tls": args.tls, "password": args.password}
    makers = [Visitor(args.server, f"bench_producer_{n}", **access) for n in range(args.producers)]
    hearers = [Visitor(args.server, f"bench_consumer_{n}", **access) for n in range(args.consumers)]
    makers[0].ask("JOIN", id=1, channel=CHANNEL)
    if args.persist:
        makers[0].ask("SET_CHAN_CONFIG", id=2, channel=CHANNEL, persist=True, message_flush_interval=args.flush_ms)
    for visitor in [*makers[1:], *hearers]:
        visitor.ask("JOIN", id=1, channel=CHANNEL)
    makers[0].ask(
        "SET_CHAN_ACL", id=3, action="add", channel=CHANNEL, type="read",
        nids=[f"bench_consumer_{n}@localhost" for n in range(args.consumers)],
    )  # fmt: skip
    time.sleep(0.3)
    for visitor in [*makers, *hearers]:
        visitor.heard_all()
    selector, room = selectors.DefaultSelector(), bytearray(READ)
    consumers = [Consumer(visitor.socket, selector) for visitor in hearers]
    producers = [Producer(visitor.socket, selector) for visitor in makers]
    used, started = time.process_time(), time.perf_counter()
    for client in producers:
        client.begin(b"x" * args.payload, args.inflight, args.qos)
    while time.perf_counter() < started + args.seconds:
        serve(selector, room, 0.05)
    for client in producers:
        client.running = False
    deadline = time.perf_counter() + 30
    while any(client.left for client in producers) and time.perf_counter() < deadline:
        serve(selector, room, 0.05)
    seconds = time.perf_counter() - started
    acked = sum(client.acked for client in producers)
    while sum(client.heard for client in consumers) < acked * args.consumers and time.perf_counter() < deadline:
        serve(selector, room, 0.05)
    drained, used = time.perf_counter() - started, time.process_time() - used
    times = np.repeat(*map(np.array, zip(*[pair for client in producers for pair in client.latencies], strict=True)))
    p50, p99 = np.percentile(times * 1000, (50, 99))
    heard = sum(client.heard for client in consumers)
    for wire in [*producers, *consumers]:
        wire.socket.close()
    return {
        "acked": acked, "heard": heard, "lost": acked * args.consumers - heard, "per_second": round(acked / seconds),
        "heard_per_second": round(heard / drained), "reached_per_second": round(heard / args.consumers / drained),
        "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2),
        "generator_cpu_us": round(used * 1e6 / acked, 2),
    }  # fmt: skip


def processor_seconds(pid: int) -> float:
    """Return what a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def against_stub(args: argparse.Namespace) -> dict[str, Any]:
    """Measure with a stub of this file in another process."""
    words = [sys.executable, __file__, "--payload", str(args.payload), "--be-stub"]
    stub = subprocess.Popen(words + ["--tls"] * args.tls, stdout=subprocess.PIPE, env=os.environ)
    assert stub.stdout is not None
    try:
        args.server = f"127.0.0.1:{int(stub.stdout.readline())}"
        before = processor_seconds(stub.pid)
        found = measure(args)
        used = processor_seconds(stub.pid) - before
        return {**found, "cpu_us": round(used * 1e6 / found["acked"], 1)}
    finally:
        stub.terminate()
        stub.wait(20)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--server", default="127.0.0.1:22622")
    found.add_argument("--tls", action="store_true")
    found.add_argument("--producers", type=int, default=1)
    found.add_argument("--consumers", type=int, default=1)
    found.add_argument("--inflight", type=int, default=100)
    found.add_argument("--seconds", type=float, default=5.0)
    found.add_argument("--payload", type=int, default=256)
    found.add_argument("--qos", type=int, default=1)
    found.add_argument("--password")
    found.add_argument("--persist", action="store_true")
    found.add_argument("--flush-ms", type=int, default=0)
    found.add_argument("--stub", action="store_true")
    found.add_argument("--be-stub", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--json", action="store_true")
    return found


def main() -> None:
    args = parser().parse_args()
    if args.be_stub:
        Stub(args.payload, tls=args.tls).run()
        return
    found = against_stub(args) if args.stub else measure(args)
    print(json.dumps(found) if args.json else "  ".join(f"{name} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
