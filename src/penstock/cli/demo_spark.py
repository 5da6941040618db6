"""The Spark half of ``penstock demo``: a driver in a process of its own, which may be killed at any moment.

It streams the channels into the lake while they are written.  When the writers are done it folds, aggregates, audits
and reports.  Every step can be repeated: whoever starts it again gets what an undisturbed run would have given.

    python -m penstock.cli.demo_spark FOLDER READINGS REPORT
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cli.demo_readings import LIMIT, PLACES
from penstock.log.detect import open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.xchannel import Writer
from penstock.node.ledger.reckon import note_lake
from penstock.spark import lake, session
from penstock.spark.decode import decode_json, split_errors
from penstock.spark.pipelines.audit import audit
from penstock.spark.pipelines.fold import fold_into
from penstock.spark.pipelines.report import write_report
from penstock.spark.source.columns import BASE, ENVELOPE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SparkCounts", "main"]

BATCHES: Final = 20
"""Batches the stream makes of a long run."""

BATCH_RECORDS: Final = 4_000
"""Records of a batch in a short one: few batches, and still a middle to be killed in."""

FIELDS: Final = "number bigint, celsius decimal(6,2), battery int"


class SparkCounts(msgspec.Struct):
    """What Spark has counted so far."""

    pid: int
    step: str = "starting Spark"
    lake: int = 0
    """Rows of the raw table."""
    distinct: int = 0
    """Different (channel, position) among them."""
    readings: int = 0
    """Different readings among them: one that was under way when the node was killed may have come twice."""
    bad: int = 0
    """Payloads that are not what they should be."""
    devices: int = 0
    """Entries of the fold."""
    folded: int = 0
    """Records that went into it."""
    counted: int = 0
    """Readings, summed over the rows of the aggregate."""
    alerts: int = 0
    """Devices that were above the limit."""
    hundredths: int = 0
    """The sum of their temperatures."""
    audited: bool = False
    """Whether the audit found every channel's records in the lake, once."""
    done: bool = False


def main(folder: str, readings: int, report: str) -> None:
    """Do all of it."""
    found = SparkCounts(os.getpid(), lake=rows_of(f"{folder}/lake/raw"))
    with Writer.open(f"{folder}/voices/spark") as voice:

        def say(step: str | None = None) -> None:
            found.step = step or found.step
            voice.append(msgspec.json.encode(found))

        say()
        scratch = f"{folder}/scratch"
        spark = session(
            "penstock demo",
            memory="1g",
            java_options=f"-Djava.io.tmpdir={scratch} -XX:+UseSerialGC",
            config={"spark.python.unix.domain.socket.enabled": "false"},  # names of such sockets must be short
        )
        say("streaming into the lake")
        stream(spark, folder, readings, found, say)
        table = lake.read(spark, f"{folder}/lake/raw")
        say("folding the latest of every device")
        fold(spark, folder, found)
        say("aggregating")
        aggregate(table, folder, found)
        say("telling which devices were too warm")
        tell(spark, folder, found)
        say("auditing the lake against the channels")
        compare(spark, table, folder, found)
        say("writing the report")
        raw = f"{folder}/lake/raw"
        write_report(spark, f"{folder}/node/logs", report, title="Penstock demo: four sites, a lab, a mill", table=raw)
        spark.stop()
        found.done = True
        say("done")


def rows_of(table: str) -> int:
    """Return how many rows a table has: what an earlier driver committed."""
    existing = lake.open_table(table)
    return 0 if existing is None else sum(existing.get_add_actions().column("num_records").to_pylist())


def stream(spark: SparkSession, folder: str, readings: int, found: SparkCounts, say: Any) -> None:
    """Keep the raw table up to date until the writers have ended and it has all."""
    table = f"{folder}/lake/raw"

    def committed(_: int, files: list[lake.DataFile]) -> None:
        found.lake += sum(item.records for item in files)
        say()

    query = lake.ingest(
        spark,
        f"{folder}/node/logs",
        table,
        f"{folder}/checkpoint",
        trigger={"processingTime": "500 milliseconds"},
        options={"maxRecordsPerTrigger": max(readings // BATCHES, BATCH_RECORDS)},
        columns=(*BASE, *ENVELOPE),
        on_commit=committed,
    )
    while not os.path.exists(f"{folder}/all-written"):
        if query.awaitTermination(1):
            break
        time.sleep(0.05)
    query.processAllAvailable()
    query.stop()


def fold(spark: SparkSession, folder: str, found: SparkCounts) -> None:
    """Fold the newest state of every device into a store, one for each channel."""
    os.makedirs(f"{folder}/fold", exist_ok=True)
    found.devices = found.folded = 0
    for place in PLACES:
        done = fold_into(spark, f"{folder}/node/logs/{place}", f"{folder}/fold/{place}.snap")
        found.folded += done.records
        found.devices += done.entries


def aggregate(table: DataFrame, folder: str, found: SparkCounts) -> None:
    """Count, add up and average what each device sent, into a table of its own."""
    from pyspark.sql import functions as F  # noqa: N812

    good, bad = split_errors(decode_json(table.where("op = 0"), FIELDS))
    once = good.dropDuplicates(["key", "number"])
    per_device = once.groupBy(F.col("key").cast("string").alias("device")).agg(
        F.count("*").alias("readings"),
        F.sum("celsius").alias("sum_celsius"),
        F.min("celsius").alias("coldest"),
        F.max("celsius").alias("warmest"),
        F.avg("celsius").alias("mean"),
    )
    lake.replace(per_device, f"{folder}/lake/devices")
    found.bad = bad.count()
    total = lake.read(table.sparkSession, f"{folder}/lake/devices").agg(F.sum("readings"), F.sum("sum_celsius"))
    counted, celsius = total.collect()[0]
    found.counted, found.hundredths = counted or 0, int((celsius or 0) * 100)
    found.readings = good.select("key", "number").distinct().count()


def tell(spark: SparkSession, folder: str, found: SparkCounts) -> None:
    """Write an alert for each device that was ever above the limit: a log that a feed of the node publishes."""
    devices = lake.read(spark, f"{folder}/lake/devices")
    rows = devices.where(f"warmest > {LIMIT / 100}").select("device", "warmest").collect()
    records = [encode_envelope(Envelope(row["device"].encode(), str(row["warmest"]).encode())) for row in rows]
    with contextlib.closing(open_writer(f"{folder}/node/alerts", format="messagelog", content=CONTENT)) as alerts:
        if records:
            alerts.append_many(records)
    found.alerts = len(rows)


def compare(spark: SparkSession, table: DataFrame, folder: str, found: SparkCounts) -> None:
    """Ask the audit whether every record of the channels is in the lake, and tell the ledger of the node."""
    places = spark.read.format("penstock").schema("channel string, position long").load(f"{folder}/node/logs")
    rows = [row.asDict() for row in audit(places, table.select("channel", "position")).collect()]
    note_lake(f"{folder}/node", rows)
    found.lake = sum(row["in_table"] for row in rows)
    found.distinct = found.lake - sum(row["repeated"] for row in rows)
    found.audited = all(row["ok"] and not row["behind"] for row in rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
