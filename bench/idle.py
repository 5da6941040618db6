"""What a follower costs while nothing happens, and how soon it has the first record after a silence.

python bench/idle.py [--quick]

One child process for each kind of follower waits; its processor time is read from outside after it has settled.  Then
this process writes one record every 300 to 400 ms with the time in it, and the child says how late it got each: not
at the same distance each time, which would meet the same moment of a follower that looks now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.fold import follow
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log import aio, open_log
from penstock.log.detect import open_writer
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.filechannel import FileChannel
from penstock.log.xchannel import Reader
from penstock.store import AppendLogStore

HERE = str(Path(__file__).resolve())
SILENCE_SECONDS = 0.3


def tail(path: str) -> Iterator[bytes]:
    """log.tail() in a thread."""
    with open_log(path) as log:
        for batch in log.tail():
            yield from batch.to_payloads()


async def tail_on_loop(path: str) -> AsyncIterator[bytes]:
    """log.aio.tail() on an event loop."""
    with open_log(path) as log:
        async for batch in aio.tail(log):
            for payload in batch.to_payloads():
                yield payload


async def reader_on_loop(path: str) -> AsyncIterator[bytes]:
    """``async for record in reader`` of a channel."""
    with Reader.open(path, start="latest") as reader:
        async for record in reader:
            yield bytes(record.payload)


def receiver(path: str) -> Iterator[bytes]:
    """A named receiver beside the owner of a queue."""
    with FileChannel.attach(path) as channel:
        yield from channel.ack_rx("idle", start="latest")


async def receiver_on_loop(path: str) -> AsyncIterator[bytes]:
    """The same on an event loop."""
    with FileChannel.attach(path) as channel:
        async for message in channel.ack_rx("idle", start="latest"):
            yield message


def group(path: str) -> Iterator[bytes]:
    """A worker of a group."""
    with FileChannel.attach(path) as channel, channel.group("idle") as workers:
        for job in workers:
            yield bytes(job.payload)
            job.ack()


async def group_on_loop(path: str) -> AsyncIterator[bytes]:
    """The same on an event loop."""
    with FileChannel.attach(path) as channel, channel.group("idle") as workers:
        async for job in workers:
            yield bytes(job.payload)
            job.ack()


async def watch(path: str) -> AsyncIterator[bytes]:
    """A watch of an embedded bucket."""
    connection = EmbeddedConnection(path)
    await connection.connect()
    bucket = await connection.store("state")
    watched = await bucket.watcher.watch_all()
    while True:
        for update in await watched.next_batch():
            yield update.value


async def fold(path: str) -> AsyncIterator[bytes]:
    """A fold that follows a log of envelopes."""
    news: asyncio.Queue[int] = asyncio.Queue()
    with open_log(path) as log, AppendLogStore.open(path + "-fold.snap", sync="none") as store:
        work = asyncio.create_task(follow(log, store, on_applied=lambda _: news.put_nowait(0)))
        while not work.done():
            await news.get()
            found = store.get("k")
            if found is not None:
                yield found.value


KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "channel, tail": ("xchannel", tail),
    "channel, tail on a loop": ("xchannel", tail_on_loop),
    "channel, reader on a loop": ("xchannel", reader_on_loop),
    "queue, tail": ("filechannel", tail),
    "queue, tail on a loop": ("filechannel", tail_on_loop),
    "queue, named receiver": ("filechannel", receiver),
    "queue, receiver on a loop": ("filechannel", receiver_on_loop),
    "queue, worker of a group": ("filechannel", group),
    "queue, worker on a loop": ("filechannel", group_on_loop),
    "message log, tail": ("messagelog", tail),
    "message log, tail on a loop": ("messagelog", tail_on_loop),
    "bucket, watch": ("bucket", watch),
    "message log, fold": ("envelopes", fold),
}


def child(kind: str, path: str) -> None:
    """Follow, and print how late each record came."""
    found = KINDS[kind][1](path)

    def late(payload: bytes) -> None:
        print((time.monotonic_ns() - int(payload)) / 1000, flush=True)

    async def on_loop() -> None:
        async for payload in found:
            late(payload)

    print("ready", flush=True)
    if isinstance(found, AsyncIterator):
        asyncio.run(on_loop())
    else:
        for payload in found:
            late(payload)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, idle_seconds: float, records: int) -> list[str]:
    """Return the row of one kind."""
    made = KINDS[kind][0]
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        path = folder + "/log"
        loop = asyncio.new_event_loop()
        close: Callable[[], object]
        if made == "bucket":
            connection = EmbeddedConnection(path)
            loop.run_until_complete(connection.connect())
            bucket = loop.run_until_complete(connection.store_with_config(StoreConfig(name="state")))

            def write(payload: bytes) -> None:
                loop.run_until_complete(bucket.writer.put("k", payload))

            def close() -> object:
                return loop.run_until_complete(connection.shutdown())
        else:
            envelopes = made == "envelopes"
            writer = open_writer(path, format="messagelog" if envelopes else made, **_content(envelopes))
            close = writer.close

            def write(payload: bytes) -> None:
                writer.append(encode_envelope(Envelope(b"k", payload)) if envelopes else payload)

        write(b"%d" % time.monotonic_ns())
        process = subprocess.Popen([sys.executable, HERE, "--child", kind, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            process.stdout.readline()
            time.sleep(1.5)
            before = cpu_seconds(process.pid)
            time.sleep(idle_seconds)
            used = (cpu_seconds(process.pid) - before) / idle_seconds
            lates = list[float]()
            for _ in range(records):
                sent = b"%d" % time.monotonic_ns()
                write(sent)
                lates.append(float(process.stdout.readline()))
                time.sleep(SILENCE_SECONDS + random.uniform(0, 0.1))
            if made in ("bucket", "envelopes") or "group" in kind or "worker" in kind:
                lates = lates[1:]  # the first line was the record from before
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            close()
            loop.close()
        return [kind, f"{used:.2%}", f"{statistics.median(lates):,.0f} µs", f"{max(lates):,.0f} µs"]


def _content(envelopes: bool) -> dict[str, Any]:
    return {"content": "envelope/1"} if envelopes else {}


def main() -> None:
    """Print a table of every kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    seconds, records = (1.0, 3) if arguments.quick else (6.0, 40)
    print("| follower | of a core while idle | late, median | late, most |")
    print("|---|---:|---:|---:|")
    for kind in KINDS:
        if arguments.only in kind:
            print("| " + " | ".join(measure(kind, seconds, records)) + " |", flush=True)


if __name__ == "__main__":
    main()
