"""How fast is the message log, one entry at a time and in batches, beside SQLite with the same durability?

    python bench/messagelog.py [--quick] [--json] [--records N]

Both sides get the same entries (64-byte payloads, a 13-byte sender, number and time) in the same run on the same disk.
SQLite runs in WAL mode; without sync it has synchronous=OFF, with sync synchronous=FULL, one transaction for what the
message log takes in one call.  Each figure is the best of three rounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader

SENDER = "ann@localhost"
BATCH = 10_000


class Sqlite:
    """The same log as a table."""

    def __init__(self, folder: Path, durable: bool) -> None:
        self.base = sqlite3.connect(folder / "log.db", isolation_level=None)
        self.base.execute("pragma journal_mode=wal")
        self.base.execute(f"pragma synchronous={'full' if durable else 'off'}")
        self.base.execute("create table log (seq integer primary key, ms integer, sender text, payload blob)")

    def append(self, payload: bytes) -> None:
        self.base.execute(
            "insert into log (ms, sender, payload) values (?, ?, ?)", (time.time_ns() // 10**6, SENDER, payload)
        )

    def append_many(self, payloads: list[bytes]) -> None:
        ms = time.time_ns() // 10**6
        self.base.execute("begin")
        self.base.executemany(
            "insert into log (ms, sender, payload) values (?, ?, ?)", ((ms, SENDER, payload) for payload in payloads)
        )
        self.base.execute("commit")

    def read(self, first: int, limit: int) -> list[Any]:
        query = "select seq, ms, sender, payload from log where seq >= ? order by seq limit ?"
        return self.base.execute(query, (first, limit)).fetchall()

    def close(self) -> None:
        self.base.close()


def rate(work: Callable[[], int]) -> float:
    """Return how many entries a second ``work`` moves."""
    began = time.perf_counter()
    count = work()
    return count / (time.perf_counter() - began)


def appends(folder: Path, records: int, *, durable: bool, batch: int, product: bool) -> float:
    payloads = [b"%064d" % n for n in range(min(records, BATCH))]
    options = MessageLogOptions(sync="always" if durable else "none")
    log: Any = MessageLog.open(folder, options) if product else Sqlite(folder, durable)

    def work() -> int:
        if batch == 1:
            for n in range(records):
                log.append(payloads[n % len(payloads)], sender=SENDER) if product else log.append(
                    payloads[n % len(payloads)]
                )
            return records
        done = 0
        while done < records:
            part = payloads[:batch]
            log.append_many(part, sender=SENDER) if product else log.append_many(part)
            done += len(part)
        return done

    try:
        return rate(work)
    finally:
        log.close()


def reads(folder: Path, records: int, *, batch: int, product: bool, lookups: int, live: bool = False) -> float:
    """Range reads spread over the log: by the columns of a batch here, by rows there."""
    payloads = [b"%064d" % n for n in range(BATCH)]
    log: Any = (
        MessageLog.open(folder, MessageLogOptions(sync="none", segment_bytes=128 << 20 if live else 4 << 20))
        if product
        else Sqlite(folder, False)
    )
    for _ in range(max(records // BATCH, 1)):
        log.append_many(payloads, sender=SENDER) if product else log.append_many(payloads)
    reader: Any = MessageLogReader(folder) if product else log
    total = max(records // BATCH, 1) * BATCH

    def work() -> int:
        found, step = 0, 7919 * batch
        for n in range(lookups):
            first = n * step % (total - batch) + 1
            left = batch
            while left:
                part = reader.read(first, left)
                count = len(part)
                assert count, f"nothing at {first}"
                first, left, found = first + count, left - count, found + count
        return found

    try:
        return rate(work)
    finally:
        reader.close()
        log.close()


def best(rounds: int, measure: Callable[..., float], **arguments: Any) -> tuple[float, float]:
    """Return the best rate of each side, measured in turns: other work on the machine meets both."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for product in (True, False):
            folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
            try:
                found[product].append(measure(folder, product=product, **arguments))
            finally:
                shutil.rmtree(folder)
    return max(found[True]), max(found[False])


def questions(records: int) -> list[tuple[str, Callable[..., float], dict[str, Any]]]:
    few = max(records // 500, 20)
    return [
        ("append one, no sync", appends, {"records": records // 4, "durable": False, "batch": 1}),
        (f"append {BATCH} a call, no sync", appends, {"records": records, "durable": False, "batch": BATCH}),
        ("append one, synced", appends, {"records": few, "durable": True, "batch": 1}),
        (f"append {BATCH} a call, synced", appends, {"records": records, "durable": True, "batch": BATCH}),
        ("range read of 1, sealed", reads, {"records": records, "batch": 1, "lookups": max(records // 50, 10)}),
        ("range read of 1000, sealed", reads, {"records": records, "batch": 1000, "lookups": max(records // 2000, 5)}),
        (
            f"range read of {BATCH}, sealed",
            reads,
            {"records": records * 2, "batch": BATCH, "lookups": max(records // 20_000, 2)},
        ),
        (
            "range read of 1000, active",
            reads,
            {"records": records, "batch": 1000, "lookups": max(records // 2000, 5), "live": True},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few records, one round")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of a table")
    parser.add_argument("--write", action="store_true", help="accepted for make bench; the table goes to stdout")
    options = parser.parse_args()
    records, rounds = (20_000, 1) if options.quick else (options.records, 3)
    rows = []
    for name, measure, arguments in questions(records):
        ours, theirs = best(rounds, measure, **arguments)
        rows.append({"what": name, "penstock": ours, "sqlite": theirs, "ratio": ours / theirs})
    if options.json:
        print(json.dumps({"sqlite": sqlite3.sqlite_version, "records": records, "rows": rows}))
        return
    print(f"| message log, 64-byte payloads, entries/s | penstock | SQLite {sqlite3.sqlite_version} (WAL) | ratio |")
    print("|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row['what']} | {row['penstock']:,.0f} | {row['sqlite']:,.0f} | {row['ratio']:.1f} |")


if __name__ == "__main__":
    main()
