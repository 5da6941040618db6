"""How fast are the stores, and against what?

Every contender keeps the same entries (key, value, version, and the cursor of the batch).  ``apply`` puts N keys in
random order, each key once, then once more over the first pass; ``load`` opens what was written and makes it ready to
be read by key.  The CPU column counts all threads of the process: on a busy machine it says more than the rate.
"""

from __future__ import annotations

import gc
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

import numpy as np

from penstock.batch import Spans, UpdateBatch
from penstock.store import AppendLogOptions, AppendLogStore, LmdbOptions, LmdbStore, RocksOptions, RocksStore
from penstock.types import KvUpdate, VersionToken, WatchCursor

Row = tuple[str, bytes, int]
Apply = Callable[[Any, int], None]
VALUE = bytes(range(100))
MAP_BYTES = 1 << 32


def rows_of(count: int, seed: int) -> list[Row]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [(f"route.svc-{n // 1000:06d}.{n:08d}", VALUE, n) for n in order]


def columns_of(rows: list[Row], size: int) -> Iterator[UpdateBatch]:
    """Yield the rows as a watch would deliver them: columns over one buffer."""
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        buffer = b"".join(key.encode() + value + VersionToken.of(n).raw for key, value, n in part)
        step = len(buffer) // len(part)  # all of one length
        starts = np.arange(len(part), dtype=np.int64) * step
        ends = np.cumsum([0, step - len(VALUE) - 8, len(VALUE), 8])
        spans = [Spans(starts + ends[i], np.full(len(part), ends[i + 1] - ends[i], np.int64)) for i in range(3)]
        yield UpdateBatch(buffer, np.zeros(len(part), np.uint8), *spans)


# --- The contenders: open(path, sync) -> (apply(batch, cursor), close), and load(path) -> how many entries


class Penstock:
    columns = True

    def __init__(self, name: str, opened: Callable[[str, bool], Any]) -> None:
        self.name, self._open = name, opened
        self.load = self.read_all if name == "append log" else None  # an engine reads nothing when it is opened

    def open(self, path: str, sync: bool) -> tuple[Apply, Callable[[], None]]:
        store = self._open(path, sync)
        return lambda batch, cursor: store.apply(batch, WatchCursor.of(cursor)), store.close

    def read_all(self, path: str) -> int:
        with self._open(path, False) as store:
            return store.count()


class RawRocks:
    """rocksdict's own WriteBatch, nothing else: no old values read, no digest, no count, one family."""

    name, columns, load = "rocksdict WriteBatch, raw", False, None

    def open(self, path: str, sync: bool) -> tuple[Apply, Callable[[], None]]:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(256 << 20)
        db = rocksdict.Rdict(path, options)
        writing = rocksdict.WriteOptions()
        writing.sync = sync

        def apply(rows: list[Row], cursor: int) -> None:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value, n in rows:
                batch.put(key.encode(), b"\x08" + n.to_bytes(8, "big") + value)
            batch.put(b"cursor", cursor.to_bytes(8, "big"))
            db.write(batch, writing)

        return apply, db.close


class Sqlite:
    name, columns = "sqlite3, WAL", False

    def open(self, path: str, sync: bool) -> tuple[Apply, Callable[[], None]]:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("pragma journal_mode=wal")
        db.execute(f"pragma synchronous={'full' if sync else 'off'}")
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
    """It cannot sync: dbm has no way to ask for it that works everywhere."""

    name, columns, load = "shelve", False, None

    def open(self, path: str, sync: bool) -> tuple[Apply, Callable[[], None]]:
        db = shelve.open(path)  # noqa: SIM115

        def apply(rows: list[Row], cursor: int) -> None:
            for key, value, n in rows:
                db[key] = (value, n)
            db["cursor"] = cursor
            db.sync()

        return apply, db.close


class DiskCache:
    name, columns, load = "diskcache", False, None

    def open(self, path: str, sync: bool) -> tuple[Apply, Callable[[], None]]:
        import diskcache

        cache = diskcache.Cache(path, sqlite_synchronous=2 if sync else 0, eviction_policy="none", size_limit=1 << 40)

        def apply(rows: list[Row], cursor: int) -> None:
            with cache.transact():
                for key, value, n in rows:
                    cache.set(key, (value, n))
                cache.set("cursor", cursor)

        return apply, cache.close


ENGINES: dict[str, Callable[[str], Any]] = {
    "append log": AppendLogStore.open,
    "RocksDB": lambda path: RocksStore.open(path, RocksOptions()),
    "LMDB": lambda path: LmdbStore.open(path, LmdbOptions(sync="none", map_bytes=MAP_BYTES)),
}

CONTENDERS: list[Any] = [
    Penstock(
        "append log",
        lambda path, sync: AppendLogStore.open(path, AppendLogOptions(sync="always" if sync else "none")),
    ),
    Penstock("RocksDB", lambda path, sync: RocksStore.open(path, RocksOptions(sync=sync))),
    Penstock(
        "RocksDB, digest on demand",
        lambda path, sync: RocksStore.open(path, RocksOptions(sync=sync, running_digest=False)),
    ),
    Penstock("LMDB", lambda path, sync: LmdbStore.open(path, LmdbOptions(sync=sync, map_bytes=MAP_BYTES))),
    RawRocks(),
    Sqlite(),
    Shelve(),
    DiskCache(),
]


# --- Memory

MEMORY = """
import sys
from pathlib import Path
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
what, path = sys.argv[1:]
if what == "dict":
    from penstock.store import AppendLogStore
    from penstock.types import KvEntry
    with AppendLogStore.open(path, read_only=True) as store:
        before = anonymous()
        held = {}
        for batch in store.scan():
            for row in batch.to_pylist():
                held[row["key"]] = (row["value"], row["version"])
else:
    from penstock.store import AppendLogStore, LmdbStore, RocksStore
    kind = {"append log": AppendLogStore, "RocksDB": RocksStore, "LMDB": LmdbStore}[what]
    before = anonymous()
    held = kind.open(path)
    for number in range(0, 1000):
        held.get(f"route.svc-000000.{number:08d}")
print(anonymous() - before)
"""


def memory_of(what: str, path: str) -> int | None:
    """Return the memory an open store takes in a process of its own, mapped files aside."""
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-c", MEMORY, what, path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# --- Measuring

Work = list[tuple[str, list[Any]]]


def work_of(columns: bool, count: int, size: int) -> Work:
    """Return the batches of both passes, made before the clock starts: columns for ours, rows for the others."""
    passes = []
    for seed, name in enumerate(("insert", "overwrite")):
        rows = rows_of(count, seed)
        if not columns:
            batches: list[Any] = [rows[at : at + size] for at in range(0, count, size)]
        elif size > 1:
            batches = list(columns_of(rows, size))
        else:
            batches = [[KvUpdate.put(key, value, n)] for key, value, n in rows]
        passes.append((name, batches))
    return passes


def measure(contender: Any, work: Work, count: int, size: int, budget: float, *, sync: bool) -> dict[str, Any]:
    """Return updates a second for one contender and batch size; slow ones stop when their time is up."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/store"
        apply, close = contender.open(path, sync)
        result: dict[str, Any] = {"store": contender.name, "batch": size, "sync": sync}
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
        if whole and size > 1 and not sync:
            if contender.load is not None:
                for name in ("reload", "load"):  # the first may have something to tidy
                    start = time.perf_counter()
                    assert contender.load(path) >= count
                    result[name] = count / (time.perf_counter() - start)
            if contender.name in ENGINES:
                taken = memory_of(contender.name, path)
                result["bytes_per_key"] = None if taken is None else round(taken / count)
            if contender.name == "append log":
                taken = memory_of("dict", path)
                result["dict_bytes_per_key"] = None if taken is None else round(taken / count)
        return result


def run(count: int, sizes: list[int], budget: float, *, sync: bool = False) -> Iterator[dict[str, Any]]:
    for size in sizes:
        share = count if size > 1 else max(1000, count // 5)
        for columns in (True, False):
            work = work_of(columns, share, size)
            for contender in CONTENDERS:
                if contender.columns is columns and not (sync and contender.name == "shelve"):
                    yield measure(contender, work, share, size, budget, sync=sync)


# --- Tables


def table(results: list[dict[str, Any]]) -> str:
    """Return rates with what they are against: sqlite3 at the same batch size, and for RocksDB its own raw speed."""

    def cell(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else format(value, form)

    base = {row["batch"]: row for row in results if row["store"] == Sqlite.name}
    raw = {row["batch"]: row for row in results if row["store"] == RawRocks.name}
    head = ["store", "batch", *["insert/s", "× sqlite3", "CPU µs"], *["overwrite/s", "× sqlite3", "CPU µs"]]
    head += ["raw ÷ this", "open, rec/s", "open again, rec/s"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in results:
        cells = []
        for name in ("insert", "overwrite"):
            rate, against = row.get(name), base[row["batch"]].get(name)
            ratio = None if rate is None or against is None else rate / against
            cells += [cell(rate), cell(ratio, ".1f"), cell(row.get(name + "_cpu_us"), ".2f")]
        slower = raw[row["batch"]]["insert"] / row["insert"] if row["store"].startswith("RocksDB") else None
        cells += [cell(slower, ".1f"), cell(row.get("reload")), cell(row.get("load"))]
        lines.append(f"| {row['store']} | {row['batch']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(results: list[dict[str, Any]]) -> str:
    """Return what an open store takes, from the largest batch size that was measured whole."""
    found = {row["store"]: row["bytes_per_key"] for row in results if row.get("bytes_per_key") is not None}
    plain = [row["dict_bytes_per_key"] for row in results if row.get("dict_bytes_per_key") is not None]
    rows = [f"| {name} | {taken:,} |" for name, taken in found.items()]
    rows += [f"| a dict of str to (value, version) | {plain[-1]:,} |"] if plain else []
    return "\n".join(["| open store, 1,000 keys read | bytes/key in memory |", "|---|---:|", *rows])
