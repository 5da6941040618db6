"""How long single writes take at worst: p50, p99.9 and the longest of each writer, alone and beside something heavy.

python bench/stalls.py [--quick]

Every writer writes one small record at a time, with a pause of 200 µs between them.  Beside it runs, in the same
process where it would in practice, what may get in its way: a reader that scans everything again and again, compaction
of a large store, compression of sealed segments, a listing of all keys on the same event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log.detect import open_log
from penstock.log.filechannel import FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.store import AppendLogStore, LmdbStore
from penstock.types import KvUpdate, WatchCursor

PAUSE_SECONDS = 200e-6
PAYLOAD = b"x" * 100
Row = list[str]


def row(writer: str, beside: str, lates: list[float]) -> Row:
    """Return a row of the table."""
    found = np.array(lates) * 1000
    figures = [np.median(found), np.percentile(found, 99), np.percentile(found, 99.9), found.max()]
    return [writer, beside, f"{len(lates):,}", *(f"{figure:.3f} ms" for figure in figures)]


def timed(write: Callable[[], object], seconds: float, more: Callable[[], bool] = lambda: False) -> list[float]:
    """Write for so long, or for as long as ``more`` says; return how long each write took."""
    lates, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or more():
        began = time.perf_counter()
        write()
        lates.append(time.perf_counter() - began)
        time.sleep(PAUSE_SECONDS)
    return lates


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Do some work in a thread, again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def scan(path: str) -> None:
    """Read a log to its end."""
    with open_log(path) as log:
        position = log.first_position
        while len(batch := log.read(position)):
            position = batch.next_position


def logs(seconds: float, records: int) -> Iterator[Row]:
    """Every log alone and beside a reader that scans it."""
    for name, sync in (("channel", "none"), ("channel", "always"), ("queue", "none"), ("message log", "none")):
        with tempfile.TemporaryDirectory(prefix="stalls-") as folder:
            yield from one_log(folder + "/log", name, sync, seconds, records)


def one_log(path: str, name: str, sync: str, seconds: float, records: int) -> Iterator[Row]:
    """One log alone and beside a reader."""
    opened: Any = {
        "channel": lambda: Writer.open(path, sync=sync),
        "queue": lambda: FileChannel.open(path, sync=sync, compression="none"),
        "message log": lambda: MessageLog.open(path, sync=sync),
    }[name]()
    with opened as writer:
        writer.append_many([PAYLOAD] * records)
        said = f"{name}, sync={sync}"
        yield row(said, "nothing", timed(lambda: writer.append(PAYLOAD), seconds))
        with beside(lambda: scan(path)):
            yield row(said, "a reader that scans", timed(lambda: writer.append(PAYLOAD), seconds))


def compressed(seconds: float) -> Iterator[Row]:
    """A queue whose sealed segments are compressed meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="stalls-") as folder,
        FileChannel.open(folder + "/log", sync="none", segment_bytes=8 << 20, compression="snappy") as queue,
        FileChannel.attach(folder + "/log") as view,
    ):
        view.ack_rx("holds").close()  # so that nothing is collected
        chunk = [PAYLOAD * 100] * 50

        def fill() -> None:
            queue.append_many(chunk)
            time.sleep(0.005)

        with beside(fill):
            yield row("queue, sync=none", "100 MB/s and compression", timed(lambda: queue.append(PAYLOAD), seconds))


def stores(seconds: float, keys: int) -> Iterator[Row]:
    """Stores alone, beside a scan, and while they are compacted."""
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("append log", AppendLogStore, {"sync": "none", "compact_threshold_bytes": 1 << 40}),
        ("LMDB", LmdbStore, {"sync": False}),
    ]
    for name, kind, options in kinds:
        with tempfile.TemporaryDirectory(prefix="stalls-") as folder, kind.open(folder + "/store", **options) as store:
            for start in range(0, keys, 50_000):
                numbers = range(start, min(keys, start + 50_000))
                store.apply([KvUpdate.put(f"key{n:09}", b"v" * 30, n + 1) for n in numbers], WatchCursor.of(1))

            def apply(store: Any = store) -> None:
                store.apply([KvUpdate.put("key000000001", b"w" * 30, 1)], WatchCursor.of(2))

            said = f"{name}, {keys:,} keys"
            yield row(said, "nothing", timed(apply, seconds))
            with beside(lambda store=store: sum(len(batch) for batch in store.scan())):
                yield row(said, "a reader that scans", timed(apply, seconds))
            if name == "append log":
                thread = threading.Thread(target=lambda store=store: [store.compact() for _ in range(3)])
                thread.start()
                yield row(said, "compaction, three times", timed(apply, 0.0, thread.is_alive))
                thread.join()


def buckets(seconds: float, keys: int) -> Iterator[Row]:
    """Puts on an event loop that also lists all keys."""

    async def work(folder: str) -> list[Row]:
        connection = EmbeddedConnection(folder, sync="none")
        await connection.connect()
        bucket = await connection.store_with_config(StoreConfig(name="state", max_bytes=-1))
        await bucket.writer.put_many((f"key{number}", b"v" * 30) for number in range(keys))

        async def puts() -> tuple[list[float], list[float]]:
            lates, turns, until = [], [], time.perf_counter() + seconds
            while time.perf_counter() < until:
                began = time.perf_counter()
                await bucket.writer.put("key1", b"w" * 30)
                lates.append(time.perf_counter() - began)
                began = time.perf_counter()
                await asyncio.sleep(PAUSE_SECONDS)
                turns.append(max(0.0, time.perf_counter() - began - PAUSE_SECONDS))
            return lates, turns

        async def list_keys() -> None:
            while True:
                await bucket.reader.keys()

        said = f"bucket, {keys:,} keys"
        lates, turns = await puts()
        rows = [row(said, "nothing", lates), row("  a turn of its loop", "nothing", turns)]
        listing = asyncio.create_task(list_keys())
        lates, turns = await puts()
        rows += [row(said, "`keys` of all on the same loop", lates), row("  a turn of its loop", "the same", turns)]
        listing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listing
        await connection.shutdown()
        return rows

    with tempfile.TemporaryDirectory(prefix="stalls-") as folder:
        yield from asyncio.run(work(folder))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    seconds, records, keys = (0.5, 10_000, 20_000) if arguments.quick else (5.0, 500_000, 500_000)
    parts = (logs(seconds, records), compressed(seconds), stores(seconds, keys), buckets(seconds, keys // 10))
    print("| writer | beside it | writes | p50 | p99 | p99.9 | longest |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for found in itertools.chain(*parts):
        print("| " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
