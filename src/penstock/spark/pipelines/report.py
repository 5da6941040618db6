"""report: one row a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["report"]


def report(frame: DataFrame) -> DataFrame:
    """Say of each channel how many records and bytes it has, of how many kinds, from when to when."""
    from pyspark.sql import functions as F  # noqa: N812

    return (
        frame.groupBy("channel")
        .agg(
            F.count("*").alias("records"),
            F.sum(F.length("payload")).alias("bytes"),
            F.countDistinct("kind").alias("kinds"),
            F.min("timestamp").alias("first_time"),
            F.max("timestamp").alias("last_time"),
            F.max(F.length("payload")).alias("largest"),
        )
        .orderBy("channel")
    )
