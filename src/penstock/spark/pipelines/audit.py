"""audit: whether a table holds what the channels hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["audit"]


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
