"""audit: whether logs are whole, a table holds what the channels hold, and a fold is the fold of its log."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow.compute as pc

from penstock.errors import OptionsError
from penstock.kernel import pgss
from penstock.log.detect import open_log
from penstock.spark.pipelines.fold import staged_latest, updates_of
from penstock.spark.source.options import local_path, path_here
from penstock.spark.source.plan import find_channels
from penstock.store import SnapshotStore, open_store
from penstock.store.digest import digest_text
from penstock.types import Op

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from penstock.spark.source.checking import LogCheck

__all__ = ["FoldCheck", "audit", "audit_fold", "audit_logs", "beginnings"]

COMPARED: Final = (("timestamp_ns", "bigint"), ("kind", "int"), ("key", "binary"), ("payload", "binary"))
"""What every record has and every table of records keeps, with Spark's types."""


class FoldCheck(msgspec.Struct):
    """A fold as its store has it, and as Spark computes it from the log up to the store's cursor.

    Of a log that retention has shortened, only the entries that it still has records of can be compared.

    >>> FoldCheck("a.snap", 80, 104, 1, 1, "ab", "ab").ok
    True
    """

    store: str
    first_position: int
    """Where the log begins."""
    cursor: int
    entries: int
    recomputed_entries: int
    digest: str
    recomputed_digest: str
    unchecked: int = 0
    """Entries written before the log begins now."""
    stale: int = 0
    """Of those, the ones that the log has a later change of."""

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return (self.entries, self.digest, 0) == (self.recomputed_entries, self.recomputed_digest, self.stale)


def audit_logs(spark: SparkSession, channels: str, options: Mapping[str, Any] | None = None) -> list[LogCheck]:
    """Replay logs on Spark and check checksums, gaps and order; one check a channel."""
    from penstock.spark.source.checking import CheckSource, Finding, join_findings

    spark.dataSource.register(CheckSource)
    told = {name: str(value) for name, value in (options or {}).items()}
    rows = spark.read.format("penstock-check").options(**told).load(path_here(spark, channels)).collect()
    return join_findings(msgspec.json.decode(bytes(row["finding"]), type=Finding) for row in rows)


def audit_fold(spark: SparkSession, log: str, store: str) -> FoldCheck:
    """Fold a log again, up to the cursor of a store, and compare number and digest of the entries.

    The digest is the one every store keeps: it has keys, values and versions in it, and no order.
    """
    log, store = local_path(log), local_path(store)
    with open_log(log) as reader:
        first, whole = reader.first_position, reader.first_position == reader.origin
    older: set[bytes] = set()
    with open_store(store) as held:
        cursor, entries, digest = held.cursor().token.as_int(), held.count(), held.digest()
        if not whole:
            entries, digest, older = _entries_since(held, first)
    if cursor is None:
        raise OptionsError(f"{store}: its cursor is no position of a log")
    found = FoldCheck(store, first, cursor, entries, 0, digest, "", unchecked=len(older))
    total = 0
    staging = f"{store}.penstock-staged-{uuid.uuid4().hex[:12]}"
    for batch in staged_latest(spark, log, staging, first, cursor):
        found.stale += len(older.intersection(batch.column("key").to_pylist()))
        live = updates_of(batch.filter(pc.equal(batch.column("op"), int(Op.PUT))))
        count, added = _digest(*(spans.to_list(live.buffer) for spans in (live.keys, live.values, live.versions)))
        found.recomputed_entries, total = found.recomputed_entries + count, total + added
    found.recomputed_digest = digest_text(total)
    return found


def _entries_since(store: SnapshotStore, first: int) -> tuple[int, str, set[bytes]]:
    """Return number and digest of the entries written at a position or later, and the keys of the others."""
    count = total = 0
    older: set[bytes] = set()
    for batch in store.scan():
        rows = zip(*(spans.to_list(batch.buffer) for spans in (batch.keys, batch.values, batch.versions)), strict=True)
        recent = []
        for key, value, version in rows:
            if int.from_bytes(version, "big") < first:
                older.add(key)
            else:
                recent.append((key, value, version))
        found, added = _digest(*map(list, zip(*recent, strict=True))) if recent else (0, 0)
        count, total = count + found, total + added
    return count, digest_text(total), older


def _digest(keys: list[bytes], values: list[bytes], versions: list[bytes]) -> tuple[int, int]:
    records: list[bytes | None] = [
        bytes((len(version),)) + version + value for version, value in zip(versions, values, strict=True)
    ]
    return pgss.digest_values(keys, records)


def beginnings(channels: str) -> dict[str, int]:
    """Return where each channel begins now, also one that has no record left."""
    found = {}
    for channel in find_channels([local_path(channels)]):
        with channel.open() as log:
            found[channel.name] = log.first_position
    return found


def audit(channels: DataFrame, table: DataFrame, begins: Mapping[str, int] | None = None) -> DataFrame:
    """Compare channels with a table made from them, by channel and position; one row a channel.

    ``missing`` records lie below the newest position the table has and are not in it;  ``behind`` ones lie above.
    ``repeated`` ones are in it more than once;  ``changed`` ones have another kind, time, key or payload there, as far
    as both frames have those columns.  ``expired`` ones are in the table only, below the channel's first position: the
    one ``begins`` names, or that of the first record.  ``unknown`` ones are in the table only, where the channel has
    no such record.  ``ok`` means that nothing is missing, repeated, changed or unknown.
    """
    from pyspark.sql import functions as F  # noqa: N812

    both = set(channels.dtypes) & set(table.dtypes)
    content = F.xxhash64(F.lit(0), *(name for name, kind in COMPARED if (name, kind) in both))
    there = channels.select("channel", "position", content.alias("in_channel"))
    held = (
        table.select("channel", "position", content.alias("content"))
        .groupBy("channel", "position")
        .agg(F.count("*").alias("copies"), F.min("content").alias("low"), F.max("content").alias("high"))
    )
    firsts = channels.groupBy("channel").agg(F.min("position").alias("first"))
    if begins:
        known = channels.sparkSession.createDataFrame(list(begins.items()), "channel string, first long")
        firsts = firsts.unionByName(known).groupBy("channel").agg(F.max("first").alias("first"))
    newest = table.groupBy("channel").agg(F.max("position").alias("newest"))
    joined = there.join(held, ["channel", "position"], "full")
    joined = joined.join(firsts, "channel", "left").join(newest, "channel", "left")
    present, absent = F.col("in_channel").isNotNull(), F.col("copies").isNull()
    stranger = ~present & (F.col("first").isNull() | (F.col("position") >= F.col("first")))
    other = (F.col("low") != F.col("in_channel")) | (F.col("high") != F.col("in_channel"))

    def count(condition: Column) -> Column:
        return F.coalesce(F.sum(F.when(condition, 1)), F.lit(0))

    above = F.col("newest").isNull() | (F.col("position") > F.col("newest"))
    counted = joined.groupBy("channel").agg(
        count(present).alias("in_channel"),
        F.coalesce(F.sum("copies"), F.lit(0)).alias("in_table"),
        count(present & absent & ~above).alias("missing"),
        count(present & absent & above).alias("behind"),
        F.coalesce(F.sum(F.col("copies") - 1), F.lit(0)).alias("repeated"),
        count(present & other).alias("changed"),
        count(~present & (F.col("position") < F.col("first"))).alias("expired"),
        count(stranger).alias("unknown"),
    )
    wrong = F.col("missing") + F.col("repeated") + F.col("changed") + F.col("unknown")
    return counted.withColumn("ok", wrong == 0).orderBy("channel")
