"""A load generator for channel servers: ours, the original, or a stub that shows what the generator itself can do.

One process with raw sockets, in which runs are encoded and cut below Python, so that it can do more than a server:
producers keep ``--inflight`` broadcasts under way each, consumers count what they hear.

    python bench/_channel_load.py --server 127.0.0.1:22622 [--tls] [--producers 1] [--consumers 1] [--seconds 5]
        [--payload 256] [--qos 1] [--password PW] [--persist] [--flush-ms N] [--stub] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import ssl
import time
from typing import Any, ClassVar

import numpy as np

from penstock import kernel
from penstock.channels.wire.cutter import AckRun, Cutter, MessageRun, cut_client_run
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.net import run

CHANNEL = "!bench1@localhost"
WIRE = kernel.channelwire


class Client(asyncio.Protocol):
    """A connection: requests one at a time while things are set up, runs while they are measured."""

    def __init__(self) -> None:
        self.cutter = Cutter(65_536, 1 << 20, cut_client_run)
        self.answers: asyncio.Queue[Frame] = asyncio.Queue()
        self.transport: Any
        self.heard = 0
        self.acked = 0
        self.latencies: list[tuple[float, int]] = []
        self.next_id = 1
        self.stopped = asyncio.Event()
        self.payloads: tuple[bytes, ...] = ()
        self.inflight = 0
        self.qos = 1
        self.sent: list[tuple[int, float]] = []  # first id after a batch, when it was sent
        self.running = False
        self.left = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        acks = 0
        for item in self.cutter.feed(data):
            if isinstance(item, MessageRun):
                self.heard += len(item.payloads)
            elif isinstance(item, AckRun):
                acks += len(item.ids)
            elif isinstance(item, Frame):
                if item.name == "PING":
                    self.transport.write(encode_frame("PONG", {"id": item.fields["id"]}))
                elif item.name == "MESSAGE":
                    self.heard += 1
                elif item.name == "BROADCAST_ACK":
                    acks += 1
                elif item.name != "EVENT":
                    self.answers.put_nowait(item)
            else:
                raise SystemExit(f"the server sent something else: {item}")
        if acks:
            self._acked(acks)

    def _acked(self, count: int) -> None:
        now = time.perf_counter()
        self.acked += count
        self.left -= count
        while self.sent and count:
            many, when = self.sent[0]
            taken = min(many, count)
            self.latencies.append((now - when, taken))
            count -= taken
            if taken == many:
                self.sent.pop(0)
            else:
                self.sent[0] = many - taken, when
        if self.running:
            self.send(self.inflight - self.left)
        elif not self.left:
            self.stopped.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.running:
            self.answers.put_nowait(Frame("ERROR", {"reason": f"connection lost: {exc}"}))
            self.running = False
            self.stopped.set()

    def send(self, count: int) -> None:
        if count <= 0:
            return
        if self.next_id + count >= 1 << 32:
            self.next_id = 1
        data = WIRE.encode_broadcasts(self.next_id, self.head, self.tail, self.payloads[:count])
        self.next_id += count
        self.left += count
        self.sent.append((count, time.perf_counter()))
        self.transport.write(data)

    def begin(self, payload: bytes, inflight: int, qos: int) -> None:
        self.head = f" channel={CHANNEL} length=".encode()
        self.tail = f" qos={qos}\n".encode()
        self.payloads, self.inflight, self.running = (payload,) * inflight, inflight, True
        self.send(inflight)

    async def ask(self, name: str, **fields: Any) -> Frame:
        self.transport.write(encode_frame(name, fields))
        async with asyncio.timeout(20):
            answer = await self.answers.get()
        if answer.name == "ERROR":
            raise SystemExit(f"{name}: {answer.fields}")
        return answer


async def connect(address: str, name: str, *, tls: bool, password: str | None) -> Client:
    host, _, port = address.rpartition(":")
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        Client, host, int(port), ssl=context, server_hostname="localhost" if tls else None
    )
    await client.ask("CONNECT", heartbeat_interval=60_000, version=1)
    if password is None:
        await client.ask("IDENTIFY", username=name)
    else:
        token = base64.b64encode(f"\0{name}\0{password}".encode()).decode()
        await client.ask("AUTH", token=token)
    return client


class Stub(asyncio.Protocol):
    """Acknowledges and passes on without looking: what is measured against it is the generator's own ceiling."""

    clients: ClassVar[list[Stub]] = []

    def connection_made(self, transport: Any) -> None:
        self.transport, self.cutter, self.seq = transport, Cutter(65_536, 1 << 20), 1
        self.clients.append(self)

    def data_received(self, data: bytes) -> None:
        for item in self.cutter.feed(data):
            if isinstance(item, Frame) and item.name == "BROADCAST":  # a run of one
                self.pass_on(np.array([item.fields["id"]], np.uint32).tobytes(), (item.payload,))
            elif not isinstance(item, Frame):
                self.pass_on(item.ids, tuple(item.payloads))  # type: ignore[union-attr]
            else:
                name = {"CONNECT": "PUSH_ACK", "IDENTIFY": "PUSH_ACK"}.get(item.name, "PUSH_ACK")
                self.transport.write(encode_frame(name, {"id": item.fields.get("id") or 1}))

    def pass_on(self, ids: Any, payloads: tuple[Any, ...]) -> None:
        self.transport.write(WIRE.encode_acks(ids, self.seq))
        head = b"MESSAGE channel=!bench1@localhost from=a@localhost length="
        told = WIRE.encode_messages(head, self.seq, 1, payloads)
        for other in self.clients:
            if other is not self:
                other.transport.write(told)
        self.seq += len(payloads)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    stub = None
    if args.stub:
        stub = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
        args.server = f"127.0.0.1:{stub.sockets[0].getsockname()[1]}"
    access = {"tls": args.tls, "password": args.password}
    producers = [await connect(args.server, f"bench_producer_{n}", **access) for n in range(args.producers)]
    consumers = [await connect(args.server, f"bench_consumer_{n}", **access) for n in range(args.consumers)]
    await producers[0].ask("JOIN", id=1, channel=CHANNEL)
    if args.persist:
        flush = args.flush_ms
        await producers[0].ask("SET_CHAN_CONFIG", id=2, channel=CHANNEL, persist=True, message_flush_interval=flush)
    for client in [*producers[1:], *consumers]:
        await client.ask("JOIN", id=1, channel=CHANNEL)
    await producers[0].ask(
        "SET_CHAN_ACL", id=3, action="add", channel=CHANNEL, type="read",
        nids=[f"bench_consumer_{n}@localhost" for n in range(args.consumers)],
    )  # fmt: skip
    await asyncio.sleep(0.2)
    started = time.perf_counter()
    for client in producers:
        client.begin(b"x" * args.payload, args.inflight, args.qos)
    await asyncio.sleep(args.seconds)
    for client in producers:
        client.running = False
    for client in producers:
        async with asyncio.timeout(30):
            await client.stopped.wait()
    seconds = time.perf_counter() - started
    acked = sum(client.acked for client in producers)
    deadline = time.perf_counter() + 20
    while sum(client.heard for client in consumers) < acked * args.consumers and time.perf_counter() < deadline:
        await asyncio.sleep(0.01)
    drained = time.perf_counter() - started
    times = np.repeat(*map(np.array, zip(*[pair for client in producers for pair in client.latencies], strict=True)))
    p50, p99 = np.percentile(times * 1000, (50, 99))
    heard = sum(client.heard for client in consumers)
    for client in [*producers, *consumers]:
        client.transport.close()
    if stub is not None:
        stub.close()
    return {
        "acked": acked, "heard": heard, "lost": acked * args.consumers - heard, "per_second": round(acked / seconds),
        "heard_per_second": round(heard / drained), "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2),
    }  # fmt: skip


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
    found.add_argument("--json", action="store_true")
    return found


def main() -> None:
    args = parser().parse_args()
    found = run(measure(args))
    print(json.dumps(found) if args.json else "  ".join(f"{name} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
