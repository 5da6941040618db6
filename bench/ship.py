"""Shipping segments against a plain put of the same files, and reading them back by URL, with Spark too.

python bench/ship.py [--mb 512] [--quick] [--spark] [--json]
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _table
from penstock.disk import ObjectOptions, ObjectStore, object_store_for
from penstock.log.detect import open_log
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.ship import Shipper
from penstock.ship.remote import ShippedLog
from penstock.testing.s3 import S3Server

SEGMENT = 16 << 20
REPEATS = 5


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def pieces_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(256 << 10):
            yield data


def plain_put(store: ObjectStore, name: str, files: list[Path]) -> None:
    """Put the files through the same store: into a folder each is synced, as shipping does."""
    for path in files:
        store.put(f"{name}/{path.name}", pieces_of(path))


def library_put(store: ObjectStore, name: str, files: list[Path], *, sync: bool) -> None:
    """Put the files by the library's own store of a folder, which syncs nothing; with ``sync`` as one would by hand."""
    from obstore.store import LocalStore

    folder = Path(store.url) / name
    folder.mkdir(parents=True)
    library = LocalStore(folder)
    for path in files:
        library.put(path.name, path)
    for path in [*(folder / path.name for path in files), folder] if sync else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def scan(log: Any) -> int:
    count, at = 0, log.first_position
    while len(batch := log.read(at)):
        count, at = count + len(batch), batch.next_position
    return count


def parquet_of(path: Path, store: ObjectStore) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    with open_log(str(path)) as log:
        at = log.first_position
        tables = []
        while len(batch := log.read(at)):
            payloads = [bytes(payload) for payload in batch.to_payloads()]
            columns = {"position": pa.array(batch.positions), "payload": pa.array(payloads, pa.binary())}
            tables.append(pa.table(columns))
            at = batch.next_position
    buffer = io.BytesIO()
    parquet.write_table(pa.concat_tables(tables), buffer, compression="zstd")
    store.put("table.parquet", [buffer.getvalue()])


def parquet_scan(store: ObjectStore) -> int:
    import pyarrow as pa
    from pyarrow import parquet

    data = b"".join(bytes(piece) for piece in store.stream("table.parquet"))
    return int(parquet.read_table(pa.BufferReader(data)).num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--s3-mb", type=int, default=64, help="on the S3 server of the tests, which is slow")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--spark", action="store_true", help="scan with Spark as well, which takes seconds to start")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.mb, args.s3_mb = 8, 8
    rows, repeats = [], 1 if args.quick else REPEATS
    with tempfile.TemporaryDirectory() as name, S3Server() as s3:
        folder = Path(name)
        rows += measure(folder / "a", "folder", object_store_for(folder / "objects"), args.mb, repeats)
        objects = object_store_for(f"s3://{s3.bucket}/bench", ObjectOptions(config=s3.options()))
        rows += measure(folder / "b", "S3 (moto)", objects, args.s3_mb, repeats)
        if args.spark:
            os.environ.update(s3.environment)  # for Spark's workers, which have that of Java
            rows += measure_spark(folder / "b" / "log", f"s3://{s3.bucket}/bench/log", args.s3_mb)
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"Measured on {_table.machine()}, load {os.getloadavg()[0]:.0f}; a message log of 1000-byte entries in "
        f"segments of 16 MiB; medians of {repeats} turns.\n"
    )
    print("| work | MB/s | CPU | against | |")
    print("|---|---:|---:|---|---:|")
    for row in rows:
        print(f"| {row['work']} | {row['rate']:.0f} | {row['cpu']:.2f} s | {row['against']} | {row['times']} |")


def in_turns(
    works: dict[str, Callable[[str], object]], store: ObjectStore, repeats: int, room: int
) -> dict[str, tuple[float, float]]:
    """Return the median of each work; they take turns, each under a new name that is empty again afterwards."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(repeats):
        order = list(works.items())
        for name, work in order[number % len(order) :] + order[: number % len(order)]:
            place = f"turn{uuid.uuid4().hex[:8]}"
            _table.touch_memory(room)
            found[name].append(timed(functools.partial(work, place)))
            store.delete(info.key for info in list(store.objects()) if info.key.startswith(place))
            os.sync()
    return {
        name: (statistics.median(wall for wall, _ in took), statistics.median(cpu for _, cpu in took))
        for name, took in found.items()
    }


def measure(folder: Path, place: str, store: ObjectStore, megabytes: int, repeats: int) -> list[dict[str, Any]]:
    folder.mkdir()
    with MessageLog.open(folder / "log", MessageLogOptions(segment_bytes=SEGMENT, sync="none")) as writer:
        for _ in range(megabytes):
            writer.append_many([os.urandom(500).hex().encode() for _ in range(1000)])
        writer.roll()
    files = sorted(path for path in (folder / "log").glob("*.log") if path.stat().st_size)
    size = sum(path.stat().st_size for path in files) / 1e6
    os.sync()  # sealed segments are on disk when they are shipped; a shipper makes sure of that

    def ship(channel: str) -> None:
        with Shipper(folder / "log", store, node="bench", channel=channel) as shipper:
            while shipper.step():
                pass

    peers: dict[str, Callable[[str], object]] = {f"plain put to {place}": lambda name: plain_put(store, name, files)}
    if place == "folder":
        peers["plain put by obstore, synced"] = lambda name: library_put(store, name, files, sync=True)
        peers["plain put by obstore, not synced"] = lambda name: library_put(store, name, files, sync=False)
    found = in_turns({"ship": ship, **peers}, store, repeats, 2 * int(size * 1e6))
    shipped = found.pop("ship")
    ship("log")
    above = f"{store.url}/log"

    def read_shipped() -> None:
        with ShippedLog(above, store, ahead_bytes=32 << 20, ahead_after=1) as log:  # as open_shipped does
            assert scan(log) == megabytes * 1000

    def read_local() -> None:
        with open_log(str(folder / "log")) as log:
            assert scan(log) == megabytes * 1000

    remote, local = timed(read_shipped), timed(read_local)
    parquet_of(folder / "log", store)
    table = timed(lambda: parquet_scan(store))
    rows = [
        *(
            (f"ship to {place}", shipped, peer, f"{took[0] / shipped[0]:.2f}× as fast (≥ 0.8)")
            for peer, took in found.items()
        ),
        *((peer, took, "", "") for peer, took in found.items()),
        (f"scan by URL from {place}", remote, "local files", f"{local[0] / remote[0]:.2f}× as fast"),
        ("scan of local files", local, "", ""),
        (f"Parquet (zstd) from {place}", table, "scan by URL", f"{remote[0] / table[0]:.2f}× as fast"),
    ]
    return [
        {"work": work, "rate": size / time_[0], "cpu": time_[1], "against": against, "times": times}
        for work, time_, against, times in rows
    ]


def measure_spark(local: Path, url: str, megabytes: int) -> list[dict[str, Any]]:
    """Sum the payloads of the same log by URL and from its files, the best of three each."""
    from penstock.spark import session

    spark = session("bench", master="local[2]", memory="1g")

    def scan_with_spark(path: str) -> tuple[float, float]:
        def work() -> None:
            frame = spark.read.format("penstock").schema("payload binary").load(path)
            assert frame.selectExpr("sum(length(payload))").collect()[0][0] == megabytes * 1_000_000

        return min(timed(work) for _ in range(3))

    scan_with_spark(str(local))
    remote, here = scan_with_spark(url), scan_with_spark(str(local))
    spark.stop()
    size = float(megabytes)
    return [
        {"work": "Spark by URL from S3 (moto)", "rate": size / remote[0], "cpu": remote[1],
         "against": "Spark on local files", "times": f"{here[0] / remote[0]:.2f}× as fast"},
        {"work": "Spark on local files", "rate": size / here[0], "cpu": here[1], "against": "", "times": ""},
    ]  # fmt: skip


if __name__ == "__main__":
    main()
