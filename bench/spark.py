"""How fast does Spark read channels, and how fast do they reach the lake, against what Spark reads natively?

The same records lie in a channel, in Parquet (zstd and uncompressed), in lines of text and in lines of JSON.  Each path
computes the same aggregate over payload and position, or writes the same table, in one go or as a stream.  A source
that yields rows one at a time shows why none here does; one that yields the same Arrow batch again and again, and
pyarrow without Spark, show what nobody can pass.  Best of two to five turns (fewer where a turn is long), page
cache warm, first on one core and then on two.  The channel of small payloads has half the bytes of the other.

What a stream takes once it runs is told apart from its start: the same records in eight batches, and what the batches
from the third on took by the query's own progress, with the processor time of the JVM and all its Python processes in
that time.  ``--only going-on`` measures only that.

    python bench/spark.py [--quick] [--json] [--folder DIR] [--megabytes N] [--only going-on [--turns N]]
                          [--bytes 1000,100]
"""

from __future__ import annotations

import argparse
import datetime as dt
import glob
import json
import mmap
import multiprocessing
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import _table
from penstock.log.detect import open_log
from penstock.log.xchannel import Writer
from penstock.spark import lake, session
from penstock.spark.source.columns import BASE, arrow_schema, to_record_batch
from penstock.spark.source.export import parquet_writer

LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", np.uint8)
LONG_SECONDS = 8.0
NARROW = "position long, payload binary"
BATCHES = 8
STARTING = 2
"""Batches in which a stream still starts: interpreters, classes, compiled code."""
AGGREGATE = ("count(*)", "sum(length(payload))", "max(position)")


class RowSource(DataSource):
    """A source as one writes it without penstock: a task a file, header after header, a tuple a record."""

    @classmethod
    def name(cls) -> str:
        return "rows"

    def schema(self) -> str:
        return ", ".join(column.ddl for column in BASE)

    def reader(self, schema: Any) -> Any:
        return RowReader(self.options["path"], narrow=len(schema.fields) == 2)


class RowReader(DataSourceReader):
    def __init__(self, path: str, *, narrow: bool) -> None:
        self.path, self.narrow = path, narrow

    def partitions(self) -> list[InputPartition]:
        numbered = [name for name in glob.glob(f"{self.path}.*") if name.rpartition(".")[2].isdigit()]
        return [InputPartition(path) for path in [self.path, *numbered]]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        number = partition.value.removeprefix(self.path).lstrip(".") or "0"
        base, at, name = int(number) << 40, 0, os.path.basename(self.path)
        unpack, time_of, utc = struct.Struct("<BBHIQ").unpack_from, dt.datetime.fromtimestamp, dt.UTC
        with open(partition.value, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            while True:
                committed, kind, application, length, when = unpack(data, at)
                if not committed or kind == 3:
                    return
                if kind == 1:
                    payload = data[at + 16 : at + 16 + length]
                    if self.narrow:
                        yield base + at, payload
                    else:
                        yield name, base + at, time_of(when / 1e9, utc), when, application, None, payload
                at += (16 + length + 7) & ~7


class RepeatSource(DataSource):
    """A source that reads nothing: one Arrow batch again and again.  What Spark does with it is the ceiling of any."""

    @classmethod
    def name(cls) -> str:
        return "repeat"

    def schema(self) -> str:
        return ", ".join(column.ddl for column in BASE)

    def reader(self, schema: Any) -> Any:
        return RepeatReader(*(int(self.options[name]) for name in ("size", "count", "tasks")))


class RepeatReader(DataSourceReader):
    def __init__(self, size: int, count: int, tasks: int) -> None:
        self.size, self.count, self.tasks = size, count, tasks

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(n) for n in range(self.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = min(4_000_000 // self.size, 65_536)
        ends = pa.py_buffer(np.arange(0, (rows + 1) * self.size, self.size, np.int32))
        letters = pa.py_buffer(b"x" * (rows * self.size))  # made in no time: what it costs is what Spark does with it
        numbers = pa.array(np.arange(rows))
        made = {
            "channel": pa.repeat(pa.scalar("channel"), rows),
            "position": numbers,
            "timestamp": numbers.view(pa.timestamp("us", "UTC")),
            "timestamp_ns": numbers,
            "kind": pa.array(np.ones(rows, np.int32)),
            "key": pa.nulls(rows, pa.binary()),
            "payload": pa.Array.from_buffers(pa.binary(), rows, [None, ends, letters]),
        }
        schema = arrow_schema(BASE)
        batch = pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)
        left = self.count // self.tasks
        while left > 0:
            yield batch.slice(0, min(left, rows))
            left -= rows


def write_part(given: tuple[str, int, int, str]) -> None:
    """Write some records as the tasks of the lake do, without Spark."""
    path, start, end, target = given
    schema = arrow_schema(BASE)
    with open_log(path) as log, open(target, "wb") as sink:
        with parquet_writer(sink, schema) as writer:
            at, held, size = start, [], 0
            while at < end:
                batch = log.read(at)
                at = batch.next_position
                held.append(to_record_batch(batch[: int(batch.positions.searchsorted(end))], "channel", schema))
                size += held[-1].nbytes
                if size > 32_000_000 or at >= end:
                    writer.write_table(pa.Table.from_batches(held))
                    held, size = [], 0
        sink.flush()
        os.fsync(sink.fileno())


def payloads(size: int, count: int) -> list[bytes]:
    """Return a few thousand texts of that size, repeated: fast to make, and zstd finds little in them."""
    kinds = min(count, 20_000)
    data = LETTERS[np.random.default_rng(1).integers(0, 64, kinds * size)].tobytes()
    texts = [data[at : at + size] for at in range(0, kinds * size, size)]
    return (texts * (count // kinds + 1))[:count]


def prepare(folder: str, size: int, megabytes: int, *, only_streams: bool = False) -> dict[str, Any]:
    """Write the records in every form, or in those of streams alone."""
    count = megabytes * 1_000_000 // (size + 16)
    texts = payloads(size, count)
    channel = f"{folder}/channel"
    with Writer.open(channel, region_bytes=4 << 20, roll_bytes=64 << 20) as writer:  # binaryFile holds files whole
        writer.append_many(texts, kind=1)
    with open_log(channel) as log:
        size_on_disk = log.stat()["bytes"]
        schema = arrow_schema(BASE)
        for name in () if only_streams else ("zstd", "none"):
            os.mkdir(f"{folder}/{name}")
            at, part = log.first_position, 0
            while True:
                batches, held = [], 0
                while held < 128_000_000:
                    batch = log.read(at)
                    if not len(batch):
                        break
                    batches.append(to_record_batch(batch, "channel", schema))
                    held += int(batch.payloads.lengths.sum())
                    at = batch.next_position
                if not batches:
                    break
                pq.write_table(
                    pa.Table.from_batches(batches),
                    f"{folder}/{name}/{part}.parquet",
                    compression=name,
                    row_group_size=32_000_000 // size,
                )
                part += 1
    if not only_streams:
        with open(f"{folder}/lines.txt", "wb") as file:
            file.write(b"\n".join(texts))
    os.mkdir(f"{folder}/json")
    for part in range(8):
        with open(f"{folder}/json/{part}.json", "wb") as file:
            numbers = range(part * count // 8, (part + 1) * count // 8)
            file.write(b"".join(b'{"position":%d,"kind":1,"payload":"%s"}\n' % (n, texts[n]) for n in numbers))
    return {"folder": folder, "channel": channel, "count": count, "bytes": size_on_disk, "size": size}


def paths(spark: Any, made: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return what is measured: a name and the work."""
    folder, channel = made["folder"], made["channel"]
    spark.dataSource.register(RowSource)
    spark.dataSource.register(RepeatSource)

    def aggregate(frame: Any) -> Any:
        return frame.selectExpr(*AGGREGATE).collect()

    def fresh() -> str:
        path = tempfile.mkdtemp(dir=folder, prefix="out-")
        return f"{path}/table"

    def wait(query: Any) -> None:
        query.awaitTermination()
        if query.exception() is not None:
            raise query.exception()

    def into_parquet(stream: Any) -> None:
        path = fresh()
        sink = stream.writeStream.format("parquet").option("checkpointLocation", f"{path}-checkpoint")
        wait(sink.trigger(availableNow=True).start(path))

    def without_spark() -> None:
        path = os.path.dirname(fresh())
        with open_log(channel) as log:
            cuts = [begin for begin, _ in log.cut(log.first_position, log.next_position, 64_000_000)]  # type: ignore[attr-defined]
            ends = [*cuts[1:], log.next_position]
        cores = int(spark.sparkContext.master.removeprefix("local[").removesuffix("]"))
        with multiprocessing.get_context("spawn").Pool(cores) as pool:
            parts = enumerate(zip(cuts, ends, strict=True))
            pool.map(write_part, [(channel, begin, end, f"{path}/{n}.parquet") for n, (begin, end) in parts], 1)

    def into_lake() -> None:
        path = fresh()
        wait(lake.ingest(spark, channel, path, f"{path}-checkpoint"))

    json_schema = "position long, kind int, payload string"
    tasks = spark.read.format("penstock").load(channel).rdd.getNumPartitions()  # a task has its price too
    return {
        "penstock, two columns → aggregate": lambda: aggregate(
            spark.read.format("penstock").schema(NARROW).load(channel)
        ),
        "penstock, all columns → aggregate": lambda: aggregate(spark.read.format("penstock").load(channel)),
        "Parquet zstd → aggregate": lambda: aggregate(spark.read.parquet(f"{folder}/zstd")),
        "Parquet uncompressed → aggregate": lambda: aggregate(spark.read.parquet(f"{folder}/none")),
        "text lines → sum(length)": lambda: (
            spark.read.text(f"{folder}/lines.txt").selectExpr("count(*)", "sum(length(value))").collect()
        ),
        "binaryFile → sum(length)": lambda: (
            spark.read.format("binaryFile").option("pathGlobFilter", "channel*").load(folder)
            .where("length > 100000").selectExpr("sum(length(content))").collect()
        ),
        "Python rows, all columns → aggregate": lambda: aggregate(spark.read.format("rows").load(channel)),
        "Python rows, two columns → aggregate": lambda: aggregate(
            spark.read.format("rows").schema(NARROW).load(channel)
        ),
        "one Arrow batch again and again → aggregate": lambda: aggregate(
            spark.read.format("repeat").options(size=made["size"], count=made["count"], tasks=tasks).load()
        ),
        "pyarrow alone → Parquet zstd": without_spark,
        "penstock → lake (fused)": lambda: lake.ingest_once(spark, channel, fresh(), app="bench", batch=0),
        "penstock → Parquet zstd by Spark": lambda: spark.read.format("penstock").load(channel).write.parquet(fresh()),
        "Parquet zstd → Parquet zstd": lambda: spark.read.parquet(f"{folder}/zstd").write.parquet(fresh()),
        "penstock stream → lake (fused)": into_lake,
        "penstock stream → Parquet by Spark": lambda: into_parquet(
            spark.readStream.format("penstock").load(channel)
        ),
        "JSON file stream → Parquet by Spark": lambda: into_parquet(
            spark.readStream.schema(json_schema).json(f"{folder}/json")
        ),
    }  # fmt: skip


def streams(spark: Any, made: dict[str, Any]) -> dict[str, Callable[[str], Any]]:
    """Return the streams that go on for eight batches, each to be begun in a folder."""
    folder, channel = made["folder"], made["channel"]
    each = {"maxBytesPerTrigger": made["count"] * made["size"] // BATCHES + 1}

    def into_parquet(stream: Any, room: str) -> Any:
        sink = stream.writeStream.format("parquet").option("checkpointLocation", f"{room}/checkpoint")
        return sink.trigger(availableNow=True).start(f"{room}/table")

    json_schema = "position long, kind int, payload string"
    json_stream = spark.readStream.schema(json_schema).option("maxFilesPerTrigger", 1)
    return {
        "penstock stream → lake (fused)": lambda room: lake.ingest(
            spark, channel, f"{room}/table", f"{room}/checkpoint", options=each
        ),
        "penstock stream → Parquet by Spark": lambda room: into_parquet(
            spark.readStream.format("penstock").options(**each).load(channel), room
        ),
        "JSON file stream → Parquet by Spark": lambda room: into_parquet(json_stream.json(f"{folder}/json"), room),
    }


def going_on(begin: Callable[[str], Any], room: str) -> dict[str, float]:
    """Run a stream of eight batches; say how long the later ones took, by the progress of the query."""
    path = tempfile.mkdtemp(dir=room, prefix="out-")
    os.sync()
    busy: dict[int, float] = {}
    stop = threading.Event()
    began = time.perf_counter()
    query = begin(path)

    def watch() -> None:  # processor time when each batch had ended, to a few hundredths of a second
        while not stop.wait(0.05):
            last = query.lastProgress
            if last is not None and last["batchId"] not in busy:
                busy[last["batchId"]] = processor_seconds()

    thread = threading.Thread(target=watch)
    thread.start()
    query.awaitTermination()
    took = time.perf_counter() - began
    stop.set()
    thread.join()
    if query.exception() is not None:
        raise query.exception()
    batches = {one["batchId"]: one["durationMs"] for one in query.recentProgress if one["durationMs"].get("addBatch")}
    later = [batches[number] for number in sorted(batches) if number >= STARTING]
    last = max(batches)
    busy.setdefault(last, processor_seconds())
    shutil.rmtree(path)
    return {
        "batches": len(batches),
        "all": took,
        "wall": sum(one["triggerExecution"] for one in later) / 1000,
        "processor": busy[last] - busy[STARTING - 1],
        "share": len(later) / len(batches),
        **{name: sum(one.get(name, 0) for one in later) / 1000 for name in ("latestOffset", "addBatch", "walCommit")},
    }


def processor_seconds() -> float:
    """Return the processor time of this process and all below it, and of those below that have ended."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(folder.name)
        parents.setdefault(int(fields[1]), []).append(number)
        spent[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        number = waiting.pop()
        total += spent.get(number, 0.0)
        waiting += parents.get(number, [])
    return total


RATIOS = (
    (
        "scan against Spark's zstd Parquet",
        "penstock, two columns → aggregate",
        "Parquet zstd → aggregate",
        {1000: 1.0, 100: 0.6},
    ),
    ("scan against uncompressed Parquet", "penstock, two columns → aggregate", "Parquet uncompressed → aggregate", {}),
    ("scan against text lines", "penstock, two columns → aggregate", "text lines → sum(length)", {}),
    ("scan against binaryFile", "penstock, two columns → aggregate", "binaryFile → sum(length)", {}),
    (
        "scan of all columns against rows from Python",
        "penstock, all columns → aggregate",
        "Python rows, all columns → aggregate",
        {1000: 5.0, 100: 5.0},
    ),
    (
        "… and what no source can pass: Arrow batches that nobody has to read",
        "one Arrow batch again and again → aggregate",
        "Python rows, all columns → aggregate",
        {},
    ),
    (
        "scan of two columns against such rows",
        "penstock, two columns → aggregate",
        "Python rows, two columns → aggregate",
        {},
    ),
    (
        "lake against Spark's Parquet sink",
        "penstock → lake (fused)",
        "penstock → Parquet zstd by Spark",
        {1000: 2.0, 100: 2.0},
    ),
    (
        "stream to the lake against the JSON file stream",
        "penstock stream → lake (fused)",
        "JSON file stream → Parquet by Spark",
        {1000: 2.0, 100: 2.0},
    ),
    (
        "… and what no lake can pass: the same files written by pyarrow alone",
        "pyarrow alone → Parquet zstd",
        "JSON file stream → Parquet by Spark",
        {},
    ),
)
"""What is compared, the two paths, and the bar for each payload size, where there is one."""


def measure(work: Callable[[], Any], room: str, turns: int) -> float:
    """Return the best of a few turns, of two if they take long; what a turn wrote is removed before the next."""
    best, begun = float("inf"), time.perf_counter()
    for turn in range(turns):
        os.sync()  # nobody waits for what others have written
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
        for name in os.listdir(room):
            if name.startswith("out-"):
                shutil.rmtree(os.path.join(room, name))
        if turn and time.perf_counter() - begun > LONG_SECONDS:
            break
    return best


def measure_going_on(
    folder: str | None, sizes: tuple[int, ...], cores: tuple[int, ...], megabytes: dict[int, int], turns: int
) -> dict[str, Any]:
    """Measure the streams that go on, turn by turn behind a first one; the best of each by processor time."""
    found: dict[str, Any] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=folder, prefix="penstock-bench-") as room:
            made = prepare(room, size, megabytes[size], only_streams=True)
            for used in cores:
                spark = session("bench", master=f"local[{used}]", memory="2g")
                for turn in range(turns + 1):  # the first warms the JVM up for all of them alike
                    for name, begin in streams(spark, made).items():
                        one = {**going_on(begin, room), "MB": made["count"] * size / 1e6}
                        key = f"{name}, {size} B, {used} cores"
                        if turn and (key not in found or one["processor"] < found[key]["processor"]):
                            found[key] = one
                spark.stop()
    return found


def going_on_table(found: dict[str, Any]) -> str:
    """Return how fast streams go on, in megabytes of payload, and how many times faster than the JSON stream."""
    rows = []
    for key, one in found.items():
        size, (_, where) = one["MB"] * one["share"], key.split(", ", 1)
        peer = found[f"JSON file stream → Parquet by Spark, {where}"]
        rows.append(
            (
                key, f"{one['all']:.1f} s", f"{size / one['wall']:.0f} MB/s", f"{size / one['processor']:.0f} MB/s",
                f"{peer['wall'] / one['wall']:.2f}×", f"{peer['processor'] / one['processor']:.2f}×",
            )
        )  # fmt: skip
    head = (
        "a stream in eight batches", "all of it", "from the third batch on", "of processor time",
        "times the JSON stream", "by processor time",
    )  # fmt: skip
    return _table.markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run under a minute; its figures mean little")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the channel of 1000 B")
    parser.add_argument("--only", choices=["going-on"], help="only what streams take once they run")
    parser.add_argument("--turns", type=int, default=3, help="of the streams that go on")
    parser.add_argument("--bytes", default=None, help="payload sizes, with commas")
    options = parser.parse_args()
    quick = options.quick
    sizes = (100,) if quick else (1000, 100)
    if options.bytes:
        sizes = tuple(map(int, options.bytes.split(",")))
    cores = (2,) if quick else (1, 2)
    megabytes = {1000: options.megabytes, 100: 8 if quick else options.megabytes // 2}
    load = os.getloadavg()[0]
    later = measure_going_on(options.folder, sizes, cores, megabytes, 1 if quick else options.turns)
    if options.only:
        print(
            json.dumps(later, indent=1) if options.json else f"load {load:.1f} when it began\n\n{going_on_table(later)}"
        )
        return
    found: dict[str, Any] = {"machine": _table.machine(), "load": load, "megabytes": megabytes, "going on": later}
    made: dict[int, dict[str, Any]] = {}
    seconds: dict[str, dict[str, float]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="penstock-bench-") as room:
            made[size] = prepare(room, size, megabytes[size])
            for used in cores:
                fast = {"java_options": "-XX:TieredStopAtLevel=1"} if quick else {}
                spark = session("bench", master=f"local[{used}]", memory="2g", **fast)
                spark.read.format("penstock").load(made[size]["channel"]).limit(1).count()  # start the workers
                for name, work in paths(spark, made[size]).items():
                    took = measure(work, room, 1 if quick else 5)
                    seconds.setdefault(name, {})[f"{size}/{used}"] = took
                    found[f"{name}, {size} B, {used} cores"] = {
                        "seconds": took,
                        "records_per_second": made[size]["count"] / took,
                        "MB_per_second": made[size]["bytes"] / took / 1e6,
                    }
                spark.stop()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    head = ["path", *(f"{size} B, {used} core{'s' * (used > 1)}" for size in sizes for used in cores)]
    rows = []
    for name, by in seconds.items():
        cells = []
        for size in sizes:
            for used in cores:
                took = by[f"{size}/{used}"]
                cells.append(f"{_table.rate(made[size]['count'] / took)}, {made[size]['bytes'] / took / 1e6:.0f} MB/s")
        rows.append((name, *cells))
    heading = (
        f"Measured on {found['machine']}, load {found['load']:.1f} when it began; "
        f"channels of {' and '.join(str(megabytes[size]) for size in sizes)} MB, records and channel bytes a second.\n"
    )
    parts = [heading, _table.markdown(head, rows), "", *ratio_table(seconds, sizes, cores), "", going_on_table(later)]
    print("\n".join(parts))


def ratio_table(seconds: dict[str, dict[str, float]], sizes: tuple[int, ...], cores: tuple[int, ...]) -> list[str]:
    """Return how many times faster each path is than its peer, with the bar where there is one."""
    rows = []
    for what, ours, peer, bars in RATIOS:
        cells = []
        for size in sizes:
            for used in cores:
                times = seconds[peer][f"{size}/{used}"] / seconds[ours][f"{size}/{used}"]
                bar = f" (≥ {bars[size]:g})" if size in bars else ""
                cells.append(f"{times:.2f}×{bar}")
        rows.append((what, *cells))
    if len(cores) > 1:
        for name in ("penstock, two columns → aggregate", "penstock → lake (fused)"):
            cells = []
            for size in sizes:
                speed = seconds[name][f"{size}/{cores[0]}"] / seconds[name][f"{size}/{cores[-1]}"]
                cells += ["", f"{speed:.2f}×"]
            rows.append((f"{name}: {cores[0]} → {cores[-1]} cores", *cells))
    head = ["times as fast", *(f"{size} B, {used} core{'s' * (used > 1)}" for size in sizes for used in cores)]
    return [_table.markdown(head, rows)]


if __name__ == "__main__":
    main()
