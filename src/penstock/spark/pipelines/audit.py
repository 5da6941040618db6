"""audit: whether logs are whole, a table holds what the channels hold, and a fold is the fold of its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.compute as pc

from penstock.errors import OptionsError
from penstock.kernel import pgss
from penstock.log.detect import open_log
from penstock.spark.options import local_path
from penstock.spark.pipelines.fold import staged_latest, updates_of
from penstock.store import open_store
from penstock.store.digest import digest_text
from penstock.types import Op

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from penstock.spark.checking import LogCheck

__all__ = ["FoldCheck", "audit", "audit_fold", "audit_logs"]


class FoldCheck(msgspec.Struct):
    """A fold as its store has it, and as Spark computes it from the log up to the store's cursor.

    >>> FoldCheck("a.snap", 80, 104, 1, 1, "ab", "ab").ok
    True
    """

    store: str
    first_position: int
    """Where the log begins: behind its very first record the fold cannot be computed again, and will differ."""
    cursor: int
    entries: int
    recomputed_entries: int
    digest: str
    recomputed_digest: str

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return (self.entries, self.digest) == (self.recomputed_entries, self.recomputed_digest)


def audit_logs(spark: SparkSession, channels: str, options: Mapping[str, Any] | None = None) -> list[LogCheck]:
    """Replay logs on Spark and check checksums, gaps and order; one check a channel."""
    from penstock.spark.checking import CheckSource, Finding, join_findings

    spark.dataSource.register(CheckSource)
    told = {name: str(value) for name, value in (options or {}).items()}
    rows = spark.read.format("penstock-check").options(**told).load(channels).collect()
    return join_findings(msgspec.json.decode(bytes(row["finding"]), type=Finding) for row in rows)


def audit_fold(spark: SparkSession, log: str, store: str) -> FoldCheck:
    """Fold a log again, up to the cursor of a store, and compare number and digest of the entries.

    The digest is the one every store keeps: it has keys, values and versions in it, and no order.
    """
    log, store = local_path(log), local_path(store)
    with open_store(store) as held:
        cursor, entries, digest = held.cursor().token.as_int(), held.count(), held.digest()
    if cursor is None:
        raise OptionsError(f"{store}: its cursor is no position of a log")
    with open_log(log) as reader:
        first = reader.first_position
    count = total = 0
    for batch in staged_latest(spark, log, store, first, cursor):
        live = updates_of(batch.filter(pc.equal(batch.column("op"), int(Op.PUT))))
        keys, values, versions = (spans.to_list(live.buffer) for spans in (live.keys, live.values, live.versions))
        records: list[bytes | None] = [
            bytes((len(version),)) + version + value for version, value in zip(versions, values, strict=True)
        ]
        found, added = pgss.digest_values(keys, records)
        count, total = count + found, total + added
    return FoldCheck(store, first, cursor, entries, count, digest, digest_text(total))


def audit(channels: DataFrame, table: DataFrame) -> DataFrame:
    """Compare channels with a table made from them, by channel and position; one row a channel.

    ``missing`` records lie below the newest position the table has and are not in it;  ``behind`` ones lie above.
    ``repeated`` ones are in it more than once.  ``expired`` ones are in the table only, below the channel's first
    position;  ``unknown`` ones are in the table only, where the channel has no such record.  ``ok`` means that
    nothing is missing, repeated or unknown.
    """
    from pyspark.sql import functions as F  # noqa: N812

    there = channels.select("channel", "position").withColumn("in_channel", F.lit(1))
    held = table.groupBy("channel", "position").agg(F.count("*").alias("copies"))
    firsts = channels.groupBy("channel").agg(F.min("position").alias("first"))
    newest = table.groupBy("channel").agg(F.max("position").alias("newest"))
    joined = there.join(held, ["channel", "position"], "full")
    joined = joined.join(firsts, "channel", "left").join(newest, "channel", "left")
    present, absent = F.col("in_channel").isNotNull(), F.col("copies").isNull()
    stranger = ~present & (F.col("first").isNull() | (F.col("position") >= F.col("first")))

    def count(condition: Column) -> Column:
        return F.coalesce(F.sum(F.when(condition, 1)), F.lit(0))

    above = F.col("newest").isNull() | (F.col("position") > F.col("newest"))
    counted = joined.groupBy("channel").agg(
        count(present).alias("in_channel"),
        F.coalesce(F.sum("copies"), F.lit(0)).alias("in_table"),
        count(present & absent & ~above).alias("missing"),
        count(present & absent & above).alias("behind"),
        F.coalesce(F.sum(F.col("copies") - 1), F.lit(0)).alias("repeated"),
        count(~present & (F.col("position") < F.col("first"))).alias("expired"),
        count(stranger).alias("unknown"),
    )
    wrong = F.col("missing") + F.col("repeated") + F.col("unknown")
    return counted.withColumn("ok", wrong == 0).orderBy("channel")
