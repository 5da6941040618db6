"""What do ten thousand channels, a thousand micro-batches and a partitioned lake cost?

Three questions, each as a ratio in one run:

- channels: planning and exporting n and 10 n channels of a few records, and the offset a stream keeps for them
- batches: a stream of many small batches into a table, with compaction on and off: how long the first and the last
  hundred batches take, how many files there are at the end, and how long reading them takes
- partitions: the same records into a table by date and into one without folders, and one day read from both

    python bench/spark_lake.py [--quick] [--json] [--folder DIR]
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import statistics
import tempfile
import time
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import _table
from penstock.log.xchannel import Writer
from penstock.spark import lake, session
from penstock.spark.source.table import ExportSource, PenstockSource

DAY = 86_400 * 10**9


def timed(work: Any, clock: Any = time.perf_counter) -> tuple[float, Any]:
    begin = clock()
    found = work()
    return clock() - begin, found


def many_channels(room: str, count: int) -> dict[str, Any]:
    """Plan and export channels of five records, as the driver and one task do; in processor time of this process."""
    folder = f"{room}/channels-{count}"
    for number in range(count):
        os.makedirs(f"{folder}/{number // 100:03}", exist_ok=True)
        with Writer.open(f"{folder}/{number // 100:03}/device-{number:05}", region_bytes=4096) as writer:
            writer.append_many([b"%d" % n for n in range(5)])
    schema = StructType().add("payload", "binary")
    reader: Any = PenstockSource({"path": folder, "partitions": "2"}).streamReader(schema)
    start = reader.initialOffset()
    planned, end = timed(lambda: reader.latestOffset(start, ReadAllAvailable()), time.process_time)
    parted, tasks = timed(lambda: reader.partitions(start, end), time.process_time)
    export: Any = ExportSource({"path": folder, "table": f"{room}/out-{count}", "partitions": "2"}).reader(schema)
    parts = export.partitions()
    exported, rows = timed(
        lambda: [row for part in parts for batch in export.read(part) for row in batch.to_pylist()], time.process_time
    )
    assert sum(row["records"] for row in rows) == 5 * count
    return {
        "offset_bytes": len(json.dumps(end)),
        "plan_seconds": planned + parted,
        "export_seconds": exported,
        "tasks": [len(task.spans) for task in tasks],
    }


def many_batches(spark: Any, room: str, name: str, batches: int, compaction: lake.Compaction | None) -> dict[str, Any]:
    """Ingest one batch after another of a hundred records each."""
    with Writer.open(f"{room}/ticks-{name}") as writer:
        writer.append_many([b"%020d" % n for n in range(100 * batches)])
    ends: list[float] = []
    table = f"{room}/table-{name}"
    begin = time.perf_counter()
    query = lake.ingest(
        spark, f"{room}/ticks-{name}", table, f"{room}/checkpoint-{name}",
        options={"maxRecordsPerTrigger": 100, "partitions": 1}, compaction=compaction,
        on_commit=lambda batch, files: ends.append(time.perf_counter()),
    )  # fmt: skip
    query.awaitTermination()
    if query.exception() is not None:
        raise query.exception()
    took = [after - before for before, after in itertools.pairwise(ends)]
    part = max(len(took) // 10, 1)
    read, count = min(
        timed(lambda: lake.read(spark, table).selectExpr("count(*)", "sum(length(payload))").collect()[0][0])
        for _ in range(3)
    )
    assert count == 100 * batches
    found = lake.open_table(table)
    assert found is not None
    return {
        "batches": len(ends),
        "seconds": time.perf_counter() - begin,
        "first_ms": statistics.median(took[:part]) * 1000,
        "last_ms": statistics.median(took[-part:]) * 1000,
        "files": len(found.file_uris()),
        "read_seconds": read,
    }


def partitions(spark: Any, room: str, megabytes: int) -> dict[str, Any]:
    """Ingest thirty days of records into a table with folders and into one without."""
    count = megabytes * 1_000_000 // 216
    with Writer.open(f"{room}/days", region_bytes=4 << 20) as writer:
        for day in range(30):
            numbers = range(count // 30)
            writer.append_many([b"%0200d" % n for n in numbers], timestamp_ns=[day * DAY + n for n in numbers])
    found: dict[str, Any] = {}
    for name, by in (("first", ()), ("plain", ()), ("by date", ("date",))):  # the first pays for what is new to the JVM
        table = f"{room}/{name}"

        def ingest(table: str = table, by: tuple[str, ...] = by) -> None:
            query = lake.ingest(
                spark, f"{room}/days", table, f"{table}-checkpoint", partition_by=by,
                options={"partitionBytes": f"{max(megabytes // 8, 1)}m"},
            )  # fmt: skip
            query.awaitTermination()
            if query.exception() is not None:
                raise query.exception()

        took, _ = timed(ingest)
        low = dt.datetime(1970, 1, 8, tzinfo=dt.UTC)
        whole = lake.read(spark, table)
        where: list[Any] = [("timestamp", ">=", low), ("timestamp", "<", low + dt.timedelta(days=1))]
        if by:
            where = [("date", "=", low.date())]
        expected = count // 30
        everything = min(
            timed(lambda frame=whole: frame.where("timestamp >= '1970-01-08' and timestamp < '1970-01-09'").count())[0]
            for _ in range(3)
        )
        skipped, rows = min(
            timed(lambda table=table, w=where: lake.read(spark, table, where=w).count()) for _ in range(3)
        )
        assert rows == expected, (rows, expected)
        opened = len(lake.read(spark, table, where=where).inputFiles())
        found[name] = {
            "ingest_records_per_second": count / took,
            "files": len(whole.inputFiles()),
            "opened": opened,
            "one_day_by_spark_seconds": everything,
            "one_day_by_statistics_seconds": skipped,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures mean little")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--batches", type=int, default=1_000, help="how many micro-batches")
    parser.add_argument("--only", choices=["channels", "batches", "partitions"], help="one of the questions")
    options = parser.parse_args()
    channels = (30, 300) if options.quick else (1_000, 10_000)
    batches = 20 if options.quick else options.batches
    found: dict[str, Any] = {"machine": _table.machine(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="penstock-bench-") as room:
        asked = {options.only} if options.only else {"channels", "batches", "partitions"}
        for count in channels if "channels" in asked else ():
            found[f"{count} channels"] = many_channels(room, count)
        if asked & {"batches", "partitions"}:
            spark = session("bench", master="local[2]", memory="2g")
            spark.range(1).count()
            if "partitions" in asked:
                found["partitions"] = partitions(spark, room, 16 if options.quick else 256)
            plan = lake.Compaction(every=20, min_files=8, target_bytes=8 << 20)
            if "batches" in asked:
                many_batches(
                    spark, room, "first", max(batches // 20, 2), plan
                )  # nobody pays for what is new to the JVM
                found["with compaction"] = many_batches(spark, room, "joined", batches, plan)
                found["without"] = many_batches(spark, room, "left", batches, None)
            spark.stop()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"Measured on {found['machine']}, load {found['load']:.1f} when it began.\n")
    if "channels" in asked:
        show_channels(found, channels)
    if "batches" in asked:
        show_batches(found)
    if "partitions" in asked:
        show_partitions(found)


def show_channels(found: dict[str, Any], channels: tuple[int, int]) -> None:
    few, many = (found[f"{count} channels"] for count in channels)
    head = ["", *(f"{count:,} channels" for count in channels), f"times, for {channels[1] // channels[0]}× as many"]
    rows = [
        (
            name.replace("_seconds", ", CPU s"),
            f"{few[name]:,.3g}",
            f"{many[name]:,.3g}",
            f"{many[name] / few[name]:.1f}×",
        )
        for name in ("plan_seconds", "export_seconds")
    ]
    sizes = [one["offset_bytes"] / count for one, count in zip((few, many), channels, strict=True)]
    rows.append(("offset bytes a channel", *(f"{size:.1f}" for size in sizes), ""))
    shares = [f"{len(one['tasks'])} of {min(one['tasks']):,} to {max(one['tasks']):,}" for one in (few, many)]
    rows.append(("tasks, of so many channels", *shares, ""))
    print(_table.markdown(head, rows))


def show_batches(found: dict[str, Any]) -> None:
    on, off = found["with compaction"], found["without"]
    head = [f"{on['batches']:,} batches of 100 records", "with compaction", "without"]
    rows = [
        ("a batch, median of the first tenth", f"{on['first_ms']:.0f} ms", f"{off['first_ms']:.0f} ms"),
        ("a batch, median of the last tenth", f"{on['last_ms']:.0f} ms", f"{off['last_ms']:.0f} ms"),
        ("all of it", f"{on['seconds']:.0f} s", f"{off['seconds']:.0f} s"),
        ("files at the end", f"{on['files']:,}", f"{off['files']:,}"),
        ("reading the table", f"{on['read_seconds']:.2f} s", f"{off['read_seconds']:.2f} s"),
    ]
    print("\n" + _table.markdown(head, rows))


def show_partitions(found: dict[str, Any]) -> None:
    plain, dated = found["partitions"]["plain"], found["partitions"]["by date"]
    head = ["thirty days", "one folder", "by date"]
    rows = [
        ("ingest", *(f"{_table.rate(one['ingest_records_per_second'])}" for one in (plain, dated))),
        ("files", *(f"{one['files']:,}" for one in (plain, dated))),
        ("files opened for one day", *(f"{one['opened']:,}" for one in (plain, dated))),
        ("one day, all files given to Spark", *(f"{one['one_day_by_spark_seconds']:.2f} s" for one in (plain, dated))),
        ("one day, by `where=`", *(f"{one['one_day_by_statistics_seconds']:.2f} s" for one in (plain, dated))),
    ]
    print("\n" + _table.markdown(head, rows))


if __name__ == "__main__":
    main()
