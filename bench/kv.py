"""How fast is an embedded bucket, beside SQLite and diskcache in the same run on the same disk?

    python bench/kv.py [--quick] [--json] [--keys N]

All sides keep 100-byte values under 20-byte keys in files that several processes may share.  The bucket is used
through its asyncio roles, revisions, history and watches included.  SQLite gets what that takes: a table of
keys and a table of changes, written in one transaction (WAL; one for each put, or one for many).  diskcache
keeps keys alone; it has no changes to watch.  Unsynced: sync="none", synchronous=OFF.  Synced: sync="always",
synchronous=FULL.  Each figure is the best of three rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _table import machine, markdown, rate
from penstock.kv import EmbeddedConnection, EmbeddedOptions, StoreConfig
from penstock.types import WatchCursor

VALUE = b"x" * 100
MANY = 1000
TASKS = 256


def key(n: int) -> str:
    return f"route.svc-{n:010d}"


class Penstock:
    """The embedded bucket, through its roles."""

    async def open(self, folder: Path, durable: bool) -> None:
        self.connection = EmbeddedConnection(folder, EmbeddedOptions(sync="always" if durable else "none"))
        await self.connection.connect()
        self.store = await self.connection.store_with_config(StoreConfig(name="b", max_bytes=-1))

    async def put(self, n: int) -> None:
        await self.store.writer.put(key(n), VALUE)

    async def put_at_once(self, numbers: range) -> None:
        await asyncio.gather(*(self.store.writer.put(key(n), VALUE) for n in numbers))

    async def put_many(self, numbers: range) -> None:
        await self.store.writer.put_many((key(n), VALUE) for n in numbers)

    async def get(self, n: int) -> None:
        assert await self.store.reader.get(key(n)) is not None

    async def scan(self) -> int:
        return len(await self.store.reader.scan())

    async def watch(self) -> int:
        found = 0
        async with await self.store.watcher.watch_all_from(WatchCursor.of(1)) as watch:
            while not watch.hydrated:
                found += len(await watch.next_batch())
        return found

    async def close(self) -> None:
        await self.connection.shutdown()


class Sqlite:
    """The same in two tables."""

    PUT = "insert into kv values (?, ?, ?) on conflict (key) do update set rev = excluded.rev, value = excluded.value"
    LOG = "insert into log (key, value) values (?, ?)"

    async def open(self, folder: Path, durable: bool) -> None:
        self.base = sqlite3.connect(folder / "kv.db", isolation_level=None)
        self.base.execute("pragma journal_mode=wal")
        self.base.execute(f"pragma synchronous={'full' if durable else 'off'}")
        self.base.execute("create table log (rev integer primary key autoincrement, key text, value blob)")
        self.base.execute("create table kv (key text primary key, rev integer, value blob) without rowid")

    async def put(self, n: int) -> None:
        self.base.execute("begin immediate")
        self._put(n)
        self.base.execute("commit")

    def _put(self, n: int) -> None:
        rev = self.base.execute(self.LOG, (key(n), VALUE)).lastrowid
        self.base.execute(self.PUT, (key(n), rev, VALUE))

    async def put_many(self, numbers: range) -> None:
        self.base.execute("begin immediate")
        for n in numbers:
            self._put(n)
        self.base.execute("commit")

    async def get(self, n: int) -> None:
        assert self.base.execute("select value, rev from kv where key = ?", (key(n),)).fetchone() is not None

    async def scan(self) -> int:
        return len(self.base.execute("select key, value, rev from kv order by rev").fetchall())

    async def watch(self) -> int:
        found, at = 0, 1
        while rows := self.base.execute(
            "select rev, key, value from log where rev > ? order by rev limit 65536", (at,)
        ).fetchall():
            found, at = found + len(rows), rows[-1][0]
        return found

    async def close(self) -> None:
        self.base.close()


class Diskcache:
    """A cache on SQLite, as it comes, without eviction."""

    async def open(self, folder: Path, durable: bool) -> None:
        import diskcache

        level = 2 if durable else 0
        self.cache = diskcache.Cache(str(folder / "cache"), eviction_policy="none", sqlite_synchronous=level)

    async def put(self, n: int) -> None:
        self.cache[key(n)] = VALUE

    async def put_many(self, numbers: range) -> None:
        with self.cache.transact():
            for n in numbers:
                self.cache[key(n)] = VALUE

    async def get(self, n: int) -> None:
        assert self.cache[key(n)] is not None

    async def scan(self) -> int:
        return len([self.cache[name] for name in self.cache])

    async def close(self) -> None:
        self.cache.close()


Work = Callable[[Any, int], Awaitable[int]]


async def fill(side: Any, keys: int) -> int:
    for start in range(0, keys, MANY):
        await side.put_many(range(start, min(start + MANY, keys)))
    return keys


async def put_one(side: Any, keys: int) -> int:
    for n in range(keys):
        await side.put(n)
    return keys


async def put_at_once(side: Any, keys: int) -> int:
    for start in range(0, keys, TASKS):
        await side.put_at_once(range(start, min(start + TASKS, keys)))
    return keys


async def get_one(side: Any, keys: int) -> int:
    for n in range(keys):
        await side.get(n * 7919 % keys)
    return keys


async def scan(side: Any, keys: int) -> int:
    found: int = await side.scan()
    assert found == keys, found
    return found


async def watch(side: Any, keys: int) -> int:
    found: int = await side.watch()
    assert found == keys - 1, found
    return found


QUESTIONS: list[tuple[str, Work, bool, float, bool]] = [
    # name, work, filled before, share of the keys, durable
    ("put, one at a time", put_one, False, 0.1, False),
    (f"put, {TASKS} tasks at once", put_at_once, False, 0.4, False),
    (f"put, {MANY} a call", fill, False, 1, False),
    ("put, one at a time, synced", put_one, False, 0.004, True),
    (f"put, {TASKS} tasks at once, synced", put_at_once, False, 0.02, True),
    ("get", get_one, True, 0.5, False),
    ("scan all keys", scan, True, 1, False),
    ("watch, changes behind a cursor", watch, True, 1, False),
]


def measure(kind: type, work: Work, keys: int, *, filled: bool, durable: bool) -> float:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))

    async def run() -> float:
        side = kind()
        await side.open(folder, durable)
        try:
            if filled:
                await fill(side, keys)
            began = time.perf_counter()
            count = await work(side, keys)
            return count / (time.perf_counter() - began)
        finally:
            await side.close()

    try:
        return asyncio.run(run())
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few keys, one round")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of a table")
    options = parser.parse_args()
    keys, rounds = (3000, 1) if options.quick else (options.keys, 3)
    sides: list[type] = [Penstock, Sqlite]
    try:
        import diskcache

        sides.append(Diskcache)
        names = ["penstock", f"SQLite {sqlite3.sqlite_version}", f"diskcache {diskcache.__version__}"]
    except ImportError:
        names = ["penstock", f"SQLite {sqlite3.sqlite_version}"]
    rows = []
    for name, work, filled, share, durable in QUESTIONS:
        row: list[float | None] = []
        for kind in sides:
            lone = work is put_at_once and not hasattr(kind, "put_at_once")
            if (work is watch and not hasattr(kind, "watch")) or (lone and not durable):
                row.append(None)
                continue
            task = put_one if lone else work
            count = max(int(keys * share), 20)
            row.append(max(measure(kind, task, count, filled=filled, durable=durable) for _ in range(rounds)))
        rows.append((name, row))
    if options.json:
        print(json.dumps({"keys": keys, "sides": names, "rows": rows}))
        return
    print(f"Embedded bucket, {keys} keys of 20 bytes with 100-byte values. {machine()}.\n")
    print(markdown(["", *names], [(name, *("-" if x is None else rate(x) for x in row)) for name, row in rows]))


if __name__ == "__main__":
    main()
