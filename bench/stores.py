"""How fast are the stores, and against what?

Every contender keeps the same entries (key, value, version, and the cursor of the batch) with the same
durability: written to the operating system when apply returns, no fsync.  ``apply`` puts N keys in random
order, each key once, then once more over the first pass; ``load`` opens what was written.  The CPU column
counts all threads of the process: on a busy machine it says more than the rate.

    python bench/stores.py            1 M keys, batches of 1, 100 and 10 000
    python bench/stores.py --quick    20 000 keys
    python bench/stores.py --json     one object a line
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shelve
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.batch import UpdateBatch
from penstock.store import AppendLogStore, LmdbOptions, LmdbStore, RocksOptions, RocksStore
from penstock.types import KvUpdate, WatchCursor

Row = tuple[str, bytes, int]
VALUE = bytes(range(100))


def rows_of(count: int, seed: int) -> list[Row]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [(f"route.svc-{n // 1000:06d}.{n:08d}", VALUE, n) for n in order]


def columns_of(rows: list[Row], size: int) -> list[UpdateBatch]:
    return [
        UpdateBatch.of(KvUpdate.put(key, value, n) for key, value, n in rows[at : at + size])
        for at in range(0, len(rows), size)
    ]


# --- The contenders: open(path) -> (apply(batch, cursor), close), and load(path) -> how many entries


class Penstock:
    columns = True

    def __init__(self, name: str, opened: Callable[[str], Any], kind: str = "") -> None:
        self.name, self._open, self.kind = name, opened, kind
        self.load = self.read_all if kind else None  # an engine reads nothing when it is opened

    def open(self, path: str) -> tuple[Callable[[Any, int], None], Callable[[], None]]:
        store = self._open(path)
        return lambda batch, cursor: store.apply(batch, WatchCursor.of(cursor)), store.close

    def read_all(self, path: str) -> int:
        with self._open(path) as store:
            return store.count()


class RawRocks:
    """rocksdict's own WriteBatch, nothing else: no old values read, no digest, no count."""

    name, columns = "rocksdict WriteBatch, raw", False

    def open(self, path: str) -> tuple[Callable[[Any, int], None], Callable[[], None]]:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(256 << 20)
        db = rocksdict.Rdict(path, options)

        def apply(rows: list[Row], cursor: int) -> None:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value, n in rows:
                batch.put(key.encode(), b"\x08" + n.to_bytes(8, "big") + value)
            batch.put(b"cursor", cursor.to_bytes(8, "big"))
            db.write(batch)

        return apply, db.close

    load = None


class Sqlite:
    name, columns = "sqlite3, WAL", False

    def open(self, path: str) -> tuple[Callable[[Any, int], None], Callable[[], None]]:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=off")
        db.execute("create table data (key text primary key, value blob, version integer) without rowid")
        db.execute("create table meta (name text primary key, cursor integer)")

        def apply(rows: list[Row], cursor: int) -> None:
            db.execute("begin")
            db.executemany("insert or replace into data values (?, ?, ?)", rows)
            db.execute("insert or replace into meta values ('cursor', ?)", (cursor,))
            db.execute("commit")

        return apply, db.close

    def load(self, path: str) -> int:
        db = sqlite3.connect(path)
        count = len({key: (value, n) for key, value, n in db.execute("select key, value, version from data")})
        db.close()
        return count


class Shelve:
    name, columns = "shelve", False

    def open(self, path: str) -> tuple[Callable[[Any, int], None], Callable[[], None]]:
        db = shelve.open(path)  # noqa: SIM115

        def apply(rows: list[Row], cursor: int) -> None:
            for key, value, n in rows:
                db[key] = (value, n)
            db["cursor"] = cursor
            db.sync()

        return apply, db.close

    load = None


class DiskCache:
    name, columns = "diskcache", False

    def open(self, path: str) -> tuple[Callable[[Any, int], None], Callable[[], None]]:
        import diskcache

        cache = diskcache.Cache(path, sqlite_synchronous=0, eviction_policy="none", size_limit=1 << 40)

        def apply(rows: list[Row], cursor: int) -> None:
            with cache.transact():
                for key, value, n in rows:
                    cache.set(key, (value, n))
                cache.set("cursor", cursor)

        return apply, cache.close

    load = None


CONTENDERS: list[Any] = [
    Penstock("append log", AppendLogStore.open, "AppendLogStore"),
    Penstock("RocksDB", lambda path: RocksStore.open(path, RocksOptions())),
    Penstock("RocksDB, digest on demand", lambda path: RocksStore.open(path, RocksOptions(running_digest=False))),
    Penstock("LMDB", lambda path: LmdbStore.open(path, LmdbOptions(sync=False, map_bytes=1 << 32))),
    RawRocks(),
    Sqlite(),
    Shelve(),
    DiskCache(),
]


MEMORY = """
import sys
from pathlib import Path
from penstock import store
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
before = anonymous()
opened = getattr(store, sys.argv[1]).open(sys.argv[2])
print(anonymous() - before)
"""


def memory_of(kind: str, path: str) -> int | None:
    """Return the memory an open store takes in a process of its own, mapped files aside."""
    if not kind or not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-c", MEMORY, kind, path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


Work = list[tuple[str, list[Any]]]


def work_of(columns: bool, count: int, size: int) -> Work:
    """Return the batches of both passes, made before the clock starts: columns for ours, rows for the others."""
    passes = []
    for seed, name in enumerate(("insert", "overwrite")):
        rows = rows_of(count, seed)
        if not columns:
            batches: list[Any] = [rows[at : at + size] for at in range(0, count, size)]
        elif size > 1:
            batches = columns_of(rows, size)
        else:
            batches = [[KvUpdate.put(key, value, n)] for key, value, n in rows]
        passes.append((name, batches))
    return passes


def measure(contender: Any, work: Work, count: int, size: int, budget: float) -> dict[str, Any]:
    """Return updates a second for one contender and batch size; slow ones stop when their time is up."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/store"
        apply, close = contender.open(path)
        result: dict[str, Any] = {"store": contender.name, "batch": size}
        done = 0
        for name, batches in work:
            applied, start, cpu = 0, time.perf_counter(), time.process_time()
            for batch in batches:
                apply(batch, done + 1)
                done += 1
                applied += len(batch)
                if done % 8 == 0 and time.perf_counter() - start > budget:
                    break
            result[name] = applied / (time.perf_counter() - start)
            result[name + "_cpu_us"] = (time.process_time() - cpu) / applied * 1e6
            whole = applied == count
            if not whole:
                break
        close()
        if contender.load is not None and whole and size > 1:
            for name in ("reload", "load"):  # the first may have something to tidy
                start = time.perf_counter()
                assert contender.load(path) >= count
                result[name] = count / (time.perf_counter() - start)
            taken = memory_of(getattr(contender, "kind", ""), path)
            result["bytes_per_key"] = None if taken is None else round(taken / count)
        return result


def run(count: int, sizes: list[int], budget: float) -> Iterator[dict[str, Any]]:
    for size in sizes:
        share = count if size > 1 else max(1000, count // 5)
        for columns in (True, False):
            work = work_of(columns, share, size)
            for contender in CONTENDERS:
                if contender.columns is columns:
                    yield measure(contender, work, share, size, budget)


def table(results: list[dict[str, Any]]) -> str:
    def rate(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}"

    lines = [
        "| store | batch | insert/s | CPU µs | overwrite/s | CPU µs | open, rec/s | open again, rec/s | B/key |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results:
        cells = []
        for name in ("insert", "overwrite"):
            cpu = row.get(name + "_cpu_us")
            cells += [rate(row.get(name)), "" if cpu is None else f"{cpu:.2f}"]
        cells += [rate(row.get(name)) for name in ("reload", "load")]
        lines.append(f"| {row['store']} | {row['batch']} | {' | '.join(cells)} | {row.get('bytes_per_key') or ''} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="20 000 keys, for a test")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--batch", type=int, action="append", help="only these batch sizes")
    parser.add_argument("--seconds", type=float, default=20.0, help="the most one pass of one contender may take")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    count = min(20_000, arguments.keys) if arguments.quick else arguments.keys
    results = []
    for result in run(count, arguments.batch or [1, 100, 10_000], 2.0 if arguments.quick else arguments.seconds):
        results.append(result)
        if arguments.json:
            print(json.dumps(result), flush=True)
        else:
            print(".", end="", file=sys.stderr, flush=True)
    if arguments.json:
        return
    heading = f"{count:,} keys (a fifth of them in batches of 1), 100-byte values, no fsync.\n"
    if arguments.write:
        import _table  # beside this file

        _table.publish(
            "stores", f"Measured on {_table.machine()}. {heading}\n{table(results)}", write=not arguments.quick
        )
    else:
        print(f"{heading}\n{table(results)}")


if __name__ == "__main__":
    main()
