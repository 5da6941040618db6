"""How fast do channels keep members and messages, against SQLite with the same durability?

SQLite runs in the same run on the same disk: one database in WAL mode with synchronous=FULL, so a commit survives a
power cut like a save or a broadcast does here.  It does the same work: a row of metadata replaced per save, a row
inserted per message.  Both sides are measured from Python.  Turns alternate; every figure is the median of a few.

    python bench/channels.py [--quick] [--json] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import _table
from penstock.channels import ChannelManager, FileChannelStore, Limits, ManagerOptions, Nid, PersistedChannel
from penstock.channels.model import StoredConfig
from penstock.channels.postcard import encode

ANN = "ann@localhost"
PAYLOAD = b"x" * 256
MEMBERS = tuple(Nid(f"member{number:03}", "localhost") for number in range(10))
LIMITS = Limits(max_channels=1 << 30, max_channels_per_client=1 << 30, max_persist_messages=1 << 30)
OPTIONS = ManagerOptions(limits=LIMITS)


def snapshot(handler: str) -> PersistedChannel:
    return PersistedChannel(handler, MEMBERS[0], StoredConfig(100, 65_536, 1000, True, 0), members=MEMBERS)


# --- SQLite


def database(folder: str) -> sqlite3.Connection:
    connection = sqlite3.connect(os.path.join(folder, "channels.db"), isolation_level=None, timeout=60)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def tables(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS channels (handler TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS messages (channel INTEGER, seq INTEGER, time INTEGER, sender TEXT, payload BLOB,"
        " PRIMARY KEY (channel, seq)) WITHOUT ROWID"
    )


def sqlite_saves(folder: str, count: int) -> float:
    connection = database(folder)
    tables(connection)
    data = encode(snapshot("ops"))
    started = time.perf_counter()
    for _ in range(count):
        connection.execute("INSERT OR REPLACE INTO channels VALUES (?, ?)", ("ops", data))
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


def sqlite_saves_at_once(folder: str, channels: int, each: int) -> float:
    """One writer at a time is all SQLite has: threads with a connection each would only wait for its lock."""
    connection = database(folder)
    tables(connection)
    rows = [(f"ops/{number}", encode(snapshot(f"ops/{number}"))) for number in range(channels)]
    started = time.perf_counter()
    for _ in range(each):
        for row in rows:
            connection.execute("INSERT OR REPLACE INTO channels VALUES (?, ?)", row)
    rate = channels * each / (time.perf_counter() - started)
    connection.close()
    return rate


def sqlite_broadcasts(folder: str, count: int) -> float:
    connection = database(folder)
    tables(connection)
    started = time.perf_counter()
    for seq in range(count):
        row = (1, seq, time.time_ns() // 1_000_000, ANN, PAYLOAD)
        connection.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", row)
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


def sqlite_broadcasts_in_batches(folder: str, count: int, batch: int) -> float:
    """As an application that collects messages itself would write them."""
    connection = database(folder)
    tables(connection)
    started = time.perf_counter()
    for start in range(0, count, batch):
        now = time.time_ns() // 1_000_000
        rows = [(1, seq, now, ANN, PAYLOAD) for seq in range(start, min(start + batch, count))]
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", rows)
        connection.execute("COMMIT")
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


def sqlite_relaxed_broadcasts(folder: str, count: int) -> float:
    """synchronous=OFF with a sync every 100 ms: what a flush interval of 100 ms promises."""
    connection = database(folder)
    tables(connection)
    connection.execute("PRAGMA synchronous=OFF")
    wal = os.open(os.path.join(folder, "channels.db-wal"), os.O_RDWR)
    stop = threading.Event()

    def flush() -> None:
        while not stop.wait(0.1):
            os.fdatasync(wal)

    thread = threading.Thread(target=flush)
    thread.start()
    started = time.perf_counter()
    for seq in range(count):
        row = (1, seq, time.time_ns() // 1_000_000, ANN, PAYLOAD)
        connection.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", row)
    rate = count / (time.perf_counter() - started)
    stop.set()
    thread.join()
    os.close(wal)
    connection.close()
    return rate


def sqlite_restore(folder: str, count: int) -> float:
    from penstock.channels.postcard import decode

    connection = database(folder)
    tables(connection)
    connection.execute("BEGIN")
    rows = [(f"ops/{number}", encode(snapshot(f"ops/{number}"))) for number in range(count)]
    connection.executemany("INSERT OR REPLACE INTO channels VALUES (?, ?)", rows)
    connection.execute("COMMIT")
    connection.close()
    connection = database(folder)
    started = time.perf_counter()
    found = [decode(data) for (data,) in connection.execute("SELECT data FROM channels")]
    rate = len(found) / (time.perf_counter() - started)
    connection.close()
    return rate


# --- Penstock


def penstock_saves(folder: str, count: int) -> float:
    store = FileChannelStore(folder)
    channel = snapshot("ops")
    store.save(channel)
    started = time.perf_counter()
    for _ in range(count):
        store.save(channel)
    return count / (time.perf_counter() - started)


async def with_channels(folder: str, count: int, **settings: Any) -> tuple[ChannelManager, list[Any]]:
    manager = await ChannelManager.open(folder, OPTIONS)
    channels = [manager.channel(f"ops/{number}") for number in range(count)]
    for channel in channels:
        await channel.join(ANN)
    await asyncio.gather(*(channel.configure(ANN, persist=True, **settings) for channel in channels))
    for member in MEMBERS[1:]:
        await asyncio.gather(*(channel.join(member) for channel in channels))
    return manager, channels


def penstock_saves_at_once(folder: str, channels: int, each: int) -> float:
    """Members that leave and join again: through the rules, the core and the executor, one save each."""

    async def run() -> float:
        manager, opened = await with_channels(folder, channels)

        async def changes(channel: Any) -> None:
            for turn in range(each):
                await (channel.join if turn % 2 else channel.leave)(MEMBERS[-1])

        started = time.perf_counter()
        await asyncio.gather(*map(changes, opened))
        seconds = time.perf_counter() - started
        await manager.close()
        return channels * each / seconds

    return asyncio.run(run())


def penstock_broadcasts(folder: str, count: int, at_once: int, interval: int) -> float:
    async def run() -> float:
        manager, (ops,) = await with_channels(folder, 1, message_flush_interval=interval)
        await ops.broadcast(ANN, PAYLOAD)

        async def sender(turns: int) -> None:
            for _ in range(turns):
                await ops.broadcast(ANN, PAYLOAD)

        started = time.perf_counter()
        await asyncio.gather(*(sender(count // at_once) for _ in range(at_once)))
        seconds = time.perf_counter() - started
        await manager.close()
        return count // at_once * at_once / seconds

    return asyncio.run(run())


def penstock_broadcasts_in_batches(folder: str, count: int, batch: int, interval: int) -> float:
    async def run() -> float:
        manager, (ops,) = await with_channels(folder, 1, message_flush_interval=interval)
        await ops.broadcast(ANN, PAYLOAD)
        started = time.perf_counter()
        for _ in range(count // batch):
            await ops.broadcast_many(ANN, [PAYLOAD] * batch)
        seconds = time.perf_counter() - started
        await manager.close()
        return count // batch * batch / seconds

    return asyncio.run(run())


def penstock_restore(folder: str, count: int) -> float:
    store = FileChannelStore(folder)
    store.make_root()
    for number in range(count):  # laid out as a save leaves it, without waiting for 20,000 syncs
        channel = snapshot(f"ops/{number}")
        from penstock.channels import channel_hash

        os.makedirs(store.folder(channel_hash(channel.handler)))
        with open(store.folder(channel_hash(channel.handler)) + "/metadata.bin", "wb") as file:
            file.write(encode(channel))

    async def run() -> float:
        started = time.perf_counter()
        manager = await ChannelManager.open(folder, OPTIONS)
        seconds = time.perf_counter() - started
        assert len(manager.handlers()) == count
        await manager.close()
        return count / seconds

    return asyncio.run(run())


# --- The run


def measure(turns: int, folder: str | None, *sides: Callable[[str], float]) -> list[float]:
    """Return the median rate of each side; they take turns, each in a fresh folder."""
    rates: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, found in zip(sides, rates, strict=True):
            place = tempfile.mkdtemp(dir=folder)
            try:
                found.append(side(os.path.join(place, "data") if "penstock" in repr(side) else place))
            finally:
                shutil.rmtree(place)
    return [statistics.median(found) for found in rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds; its figures mean little")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--folder", help="where to write; its disk is what is measured")
    options = parser.parse_args()
    quick, folder = options.quick, options.folder
    turns = 1 if quick else 5
    few, many, restored = (20, 400, 200) if quick else (500, 20_000, 10_000)
    each = 4 if quick else 20

    from functools import partial

    class Named(partial):  # type: ignore[type-arg]
        def __repr__(self) -> str:
            return self.func.__name__

    questions = {
        "saves, one channel": (
            Named(penstock_saves, count=few),
            Named(sqlite_saves, count=few),
        ),
        "saves, 64 channels at once": (
            Named(penstock_saves_at_once, channels=64, each=each),
            Named(sqlite_saves_at_once, channels=64, each=each),
        ),
        "broadcasts with history, durable each, one at a time": (
            Named(penstock_broadcasts, count=few, at_once=1, interval=0),
            Named(sqlite_broadcasts, count=few),
        ),
        "broadcasts with history, durable each, 100 in flight": (
            Named(penstock_broadcasts, count=many, at_once=100, interval=0),
            Named(sqlite_broadcasts, count=few),
        ),
        "broadcasts with history in batches of 100, a batch durable at once": (
            Named(penstock_broadcasts_in_batches, count=many, batch=100, interval=0),
            Named(sqlite_broadcasts_in_batches, count=many, batch=100),
        ),
        "broadcasts with history in batches of 1,000, a batch durable at once": (
            Named(penstock_broadcasts_in_batches, count=10 * many, batch=1000, interval=0),
            Named(sqlite_broadcasts_in_batches, count=2 * many, batch=1000),
        ),
        "broadcasts with history, durable within 100 ms, one at a time": (
            Named(penstock_broadcasts, count=many, at_once=1, interval=100),
            Named(sqlite_relaxed_broadcasts, count=many),
        ),
        "broadcasts with history, durable within 100 ms, 100 in flight": (
            Named(penstock_broadcasts, count=many, at_once=100, interval=100),
            Named(sqlite_relaxed_broadcasts, count=many),
        ),
        f"restore of {restored:,} channels": (
            Named(penstock_restore, count=restored),
            Named(sqlite_restore, count=restored),
        ),
    }
    rows, figures = [], {}
    for name, sides in questions.items():
        ours, theirs = measure(turns, folder, *sides)
        figures[name] = {"penstock": ours, "sqlite": theirs, "ratio": ours / theirs}
        rows.append((name, _table.rate(ours), _table.rate(theirs), f"{ours / theirs:.2f}"))
    if options.json:
        print(json.dumps({"machine": _table.machine(), "figures": figures}))
        return
    table = _table.markdown(("what", "penstock", "SQLite", "ratio"), rows)
    note = "256-byte messages, 10 members a channel; SQLite: WAL, synchronous=FULL unless said otherwise."
    print(f"{table}\n\n{note}")


if __name__ == "__main__":
    main()
