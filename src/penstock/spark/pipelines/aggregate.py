"""aggregate: how much of what, when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import OptionsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["aggregate"]


def aggregate(frame: DataFrame, *, every: str | None = "1 hour", by: Sequence[str] = ("channel", "kind")) -> DataFrame:
    """Count records and bytes for each window of time and each value of ``by``; ``every=None`` for all time.

    Columns: window_start, window_end, those of ``by``, records, bytes, first_position, last_position.  Records
    without a time have no window and are counted under null.
    """
    from pyspark.sql import functions as F  # noqa: N812

    missing = [name for name in (*by, "position", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to aggregate by")
    if every is not None:
        # window() drops rows without a time: they get their own group instead.
        frame = frame.withColumn("__window", F.when(F.col("timestamp").isNotNull(), F.window("timestamp", every)))
        frame = frame.withColumn("window_start", F.col("__window.start")).withColumn(
            "window_end", F.col("__window.end")
        )
    keys = [*(["window_start", "window_end"] if every is not None else []), *by]
    return (
        frame.groupBy(*keys)
        .agg(
            F.count("*").alias("records"),
            F.sum(F.length("payload")).alias("bytes"),
            F.min("position").alias("first_position"),
            F.max("position").alias("last_position"),
        )
        .orderBy(*keys)
    )
