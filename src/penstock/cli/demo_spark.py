"""The Spark half of ``penstock demo``: a driver in a process of its own, which may be killed at any moment.

It streams the channels into the lake while they are written.  When the writers are done it folds, aggregates, audits
and reports.  Every step can be repeated: whoever starts it again gets what an undisturbed run would have given.

    python -m penstock.cli.demo_spark FOLDER READINGS REPORT
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cli.demo_readings import SITES
from penstock.log.xchannel import Writer
from penstock.spark import lake, session
from penstock.spark.columns import BASE, ENVELOPE
from penstock.spark.decode import decode_json, split_errors
from penstock.spark.pipelines.audit import audit
from penstock.spark.pipelines.fold import fold_into
from penstock.spark.pipelines.report import write_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Found", "main"]

BATCHES: Final = 20
"""Batches the stream makes of a long run."""

BATCH_RECORDS: Final = 4_000
"""Records of a batch in a short one: few batches, and still a middle to be killed in."""

FIELDS: Final = "celsius decimal(6,2), battery int"


class Found(msgspec.Struct):
    """What Spark has counted so far."""

    pid: int
    step: str = "starting Spark"
    lake: int = 0
    """Rows of the raw table."""
    distinct: int = 0
    """Different (channel, position) among them."""
    bad: int = 0
    """Payloads that are not what they should be."""
    devices: int = 0
    """Entries of the fold."""
    folded: int = 0
    """Records that went into it."""
    counted: int = 0
    """Readings, summed over the rows of the aggregate."""
    hundredths: int = 0
    """The sum of their temperatures."""
    audited: bool = False
    """Whether the audit found every channel's records in the lake, once."""
    done: bool = False


def main(folder: str, readings: int, report: str) -> None:
    """Do all of it."""
    found = Found(os.getpid(), lake=rows_of(f"{folder}/lake/raw"))
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
        say("auditing the lake against the channels")
        compare(spark, table, folder, found)
        say("writing the report")
        raw = f"{folder}/lake/raw"
        write_report(spark, f"{folder}/channels", report, title="Penstock demo: four sites", table=raw)
        spark.stop()
        found.done = True
        say("done")


def rows_of(table: str) -> int:
    """Return how many rows a table has: what an earlier driver committed."""
    existing = lake.open_table(table)
    return 0 if existing is None else sum(existing.get_add_actions().column("num_records").to_pylist())


def stream(spark: SparkSession, folder: str, readings: int, found: Found, say: Any) -> None:
    """Keep the raw table up to date until the writers have ended and it has all."""
    table = f"{folder}/lake/raw"

    def committed(_: int, files: list[lake.DataFile]) -> None:
        found.lake += sum(item.records for item in files)
        say()

    query = lake.ingest(
        spark,
        f"{folder}/channels",
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


def fold(spark: SparkSession, folder: str, found: Found) -> None:
    """Fold the newest state of every device into a store, one for each channel."""
    os.makedirs(f"{folder}/fold", exist_ok=True)
    found.devices = found.folded = 0
    for site in SITES:
        done = fold_into(spark, f"{folder}/channels/{site}", f"{folder}/fold/{site}.snap")
        found.folded += done.records
        found.devices += done.entries


def aggregate(table: DataFrame, folder: str, found: Found) -> None:
    """Count, add up and average what each device sent, into a table of its own."""
    from pyspark.sql import functions as F  # noqa: N812

    good, bad = split_errors(decode_json(table.where("op = 0"), FIELDS))
    per_device = good.groupBy(F.col("key").cast("string").alias("device")).agg(
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


def compare(spark: SparkSession, table: DataFrame, folder: str, found: Found) -> None:
    """Ask the audit whether every record of the channels is in the lake, and how many there are."""
    places = spark.read.format("penstock").schema("channel string, position long").load(f"{folder}/channels")
    rows = audit(places, table.select("channel", "position")).collect()
    found.lake = sum(row["in_table"] for row in rows)
    found.distinct = found.lake - sum(row["repeated"] for row in rows)
    found.audited = all(row["ok"] and not row["behind"] for row in rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
