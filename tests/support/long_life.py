"""A process that lives long: every kind of log, a bucket, a fold, a broker and channels at work, and what they hold.

Each round does a little of everything and leaves nothing behind that a later round has to pay for; ``sample`` says what
the process holds.  Over many rounds memory, descriptors, threads and disk must be flat.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.channels import ChannelManager
from penstock.fold import follow
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log.detect import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.filechannel import FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Reader, Writer
from penstock.mqtt import Client, ClientOptions, MqttServer, ServerOptions
from penstock.store import AppendLogStore

REOPEN_EVERY = 25
"""After so many rounds everything is closed and opened again."""

Work = Callable[[int], Coroutine[Any, Any, None]]


class Sample(msgspec.Struct):
    """What the process held at one moment."""

    seconds: float
    rounds: int
    memory_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int


def sample(folder: Path, seconds: float, rounds: int) -> Sample:
    """Look at this process and at its folder."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    disk = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk += os.stat(f"{where}/{name}").st_blocks * 512
    descriptors = len(os.listdir("/proc/self/fd"))
    return Sample(seconds, rounds, resident, descriptors, threading.active_count(), disk)


def slope(samples: list[Sample], what: str) -> float:
    """Return by how much a figure grows in an hour, from the straight line that fits its samples best."""
    times = np.array([one.seconds for one in samples]) / 3600
    values = np.array([getattr(one, what) for one in samples], dtype=float)
    return float(np.polyfit(times, values, 1)[0])


@contextlib.asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[list[Work]]:
    """Open all there is, and yield what a round does."""
    async with contextlib.AsyncExitStack() as stack:
        works = [
            await stack.enter_async_context(made(folder))
            for made in (_channel, _queue, _message_log, _bucket, _fold, _broker, _channels)
        ]
        yield works


@contextlib.asynccontextmanager
async def _channel(folder: Path) -> AsyncIterator[Work]:
    path = str(folder / "ticks")
    numbers = itertools.count()
    with (
        Writer.open(path, region_bytes=65_536, roll_bytes=1 << 18, keep_files=3, sync="interval") as writer,
        Reader.open(path, name="soak") as reader,
    ):

        async def work(_: int) -> None:
            payloads = [next(numbers).to_bytes(8, "little") * 8 for _ in range(200)]
            writer.append_many(payloads)
            got = list[bytes]()
            while len(batch := reader.read_batch()):
                got += batch.to_payloads()
            reader.ack()
            assert got[-200:] == payloads

        yield work


@contextlib.asynccontextmanager
async def _queue(folder: Path) -> AsyncIterator[Work]:
    path = str(folder / "jobs")
    with FileChannel.open(path, segment_bytes=1 << 16, keep_bytes=1 << 20, policy="drop_oldest") as queue:

        async def work(number: int) -> None:
            queue.append_many([os.urandom(100) for _ in range(100)])
            receiver = queue.ack_rx("billing")
            while len(receiver.recv_many()):
                receiver.ack()
            receiver.close()
            group = queue.group("workers", lease_seconds=60)
            if jobs := group.take_many(100):
                group.ack(jobs)
            if number % 7 == 0:
                queue.ack_rx(f"visitor-{number % 3}", start="latest").close()
                queue.forget(f"visitor-{number % 3}")

        yield work


@contextlib.asynccontextmanager
async def _message_log(folder: Path) -> AsyncIterator[Work]:
    path = str(folder / "ops")
    with MessageLog.open(path, segment_bytes=1 << 16, max_messages=2000) as log:

        async def work(_: int) -> None:
            log.append_many([b"%0100d" % number for number in range(100)], sender="ann@localhost")
            with open_log(path) as reader:
                assert len(reader.read(reader.next_position - 50))

        yield work


@contextlib.asynccontextmanager
async def _bucket(folder: Path) -> AsyncIterator[Work]:
    connection = EmbeddedConnection(str(folder / "buckets"), checkpoint_bytes=1 << 18)
    await connection.connect()
    config = StoreConfig(name="state", max_age_seconds=2.0, max_bytes=1 << 20, discard="old")
    bucket = await connection.store_with_config(config)
    seen = await bucket.watcher.watch_all()

    async def work(number: int) -> None:
        for key in range(40):
            await bucket.writer.put(f"room.{(number * 40 + key) % 500}", b"%064d" % number)
        await bucket.writer.put_with_ttl(f"lease.{number % 50}", b"held", 0.5)
        last = 0
        while last < bucket.bucket.revision:
            batch = await seen.next_batch()
            last = int(batch.revisions()[-1])
        passing = await bucket.watcher.watch_prefix("lease.")
        await passing.aclose()
        assert len(await bucket.reader.keys("room.")) <= 500

    try:
        yield work
    finally:
        await seen.aclose()
        await connection.shutdown()


@contextlib.asynccontextmanager
async def _fold(folder: Path) -> AsyncIterator[Work]:
    path = str(folder / "changes")
    with (
        MessageLog.open(path, content="envelope/1", segment_bytes=1 << 16, max_messages=5000) as log,
        AppendLogStore.open(str(folder / "fold.snap"), compact_threshold_bytes=1 << 16) as store,
    ):

        async def work(number: int) -> None:
            log.append_many([encode_envelope(Envelope(b"k%d" % (n % 300), b"%032d" % number)) for n in range(100)])
            with open_log(path) as reader:
                await follow(reader, store, once=True)
            assert store.count() <= 300

        yield work


@contextlib.asynccontextmanager
async def _broker(folder: Path) -> AsyncIterator[Work]:
    del folder
    server = MqttServer(ServerOptions(port=0))
    await server.start()
    address = f"mqtt://{server.addresses['mqtt']}"

    async def work(number: int) -> None:
        # Twenty names in turn: some come back to a session that waits, some begin one.
        options = ClientOptions(client_id=f"device-{number % 20}", clean=number % 3 == 0, session_expiry=3600)
        async with Client(address, options) as client:
            await client.subscribe(f"plant/{number % 10}/#", qos=1)
            await client.publish(f"plant/{number % 10}/state", b"%d" % number, qos=1, retain=True)
            async for message in client.messages():
                if bytes(message.payload) == b"%d" % number:
                    break

    try:
        yield work
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def _channels(folder: Path) -> AsyncIterator[Work]:
    async with await ChannelManager.open(str(folder / "channels")) as manager:

        async def work(number: int) -> None:
            room = manager.channel(f"room{number % 5}")
            if number % 20 < 5:  # it left three rounds before
                await room.join("ann@localhost")
            await room.configure("ann@localhost", persist=True, max_persist_messages=50)
            await room.broadcast("ann@localhost", b"%0100d" % number)
            if number % 20 >= 15:
                await room.leave("ann@localhost")

        yield work


async def live(folder: Path, seconds: float, rounds: int, samples: int, pause_seconds: float = 0.0) -> list[Sample]:
    """Work for so long, or so many rounds if that is more; return ``samples`` looks, evenly spread."""
    loop = asyncio.get_running_loop()
    begun, found, number = loop.time(), list[Sample](), 0

    def share() -> float:
        return min((loop.time() - begun) / seconds if seconds else 1.0, number / rounds if rounds else 1.0)

    while share() < 1.0:
        async with everything(folder) as works:
            for _ in range(REOPEN_EVERY):
                for work in works:
                    await work(number)
                number += 1
                if pause_seconds:
                    await asyncio.sleep(pause_seconds)
            if share() * samples >= len(found) + 1:  # with everything open, always after the same number of rounds
                found.append(sample(folder, loop.time() - begun, number))
    return found
