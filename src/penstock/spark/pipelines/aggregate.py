"""aggregate: how much of what, when."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import OptionsError
from penstock.spark import lake
from penstock.spark.lake.checkpoint import checkpoint_here
from penstock.spark.pipelines.run import Progress, Summary, fit_table, follow, stream, version_of
from penstock.spark.source.options import local_path, path_here

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["aggregate", "aggregate_stream", "duration_micros"]

UNITS: Final = {
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}


def aggregate(frame: DataFrame, *, every: str | None = "1 hour", by: Sequence[str] = ("channel", "kind")) -> DataFrame:
    """Count records and bytes for each window of time and each value of ``by``; ``every=None`` for all time.

    Columns: window_start, window_end, those of ``by``, records, bytes, first_position, last_position.  Records
    without a time have no window and are counted under null.
    """
    from pyspark.sql import functions as F  # noqa: N812

    by = list(dict.fromkeys(by))
    _check(frame, by)
    if every is not None:
        # Not Spark's window(): that drops rows without a time in silence.
        length = duration_micros(every)
        start = F.expr(f"unix_micros(timestamp) - pmod(unix_micros(timestamp), {length}L)")
        frame = frame.withColumn("window_start", F.timestamp_micros(start))
        frame = frame.withColumn("window_end", F.timestamp_micros(start + F.lit(length)))
    keys = [*(["window_start", "window_end"] if every is not None else []), *by]
    return frame.groupBy(*keys).agg(*_sums()).orderBy(*keys)


def aggregate_stream(
    spark: SparkSession,
    channels: str,
    table: str,
    checkpoint: str,
    *,
    every: str = "1 hour",
    by: Sequence[str] = ("channel", "kind"),
    watermark: str = "10 minutes",
    trigger: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Count as ``aggregate`` does while records come in, and add each window to a table once, when it is closed.

    A window is closed when a record is seen that is ``watermark`` younger than its end; what comes later than that
    is left out, as are records without a time, and the summary counts them as Spark does: once for a window, key and
    task.  Windows that are still open are in no table: they wait in the checkpoint.  ``rows`` of the summary are those
    that were added to the table, ``read`` the records.
    """
    from pyspark.sql import functions as F  # noqa: N812

    table, checkpoint = path_here(spark, table), checkpoint_here(spark, checkpoint)
    app = "aggregate-" + hashlib.sha256(os.path.abspath(local_path(checkpoint)).encode()).hexdigest()[:16]
    duration_micros(every), duration_micros(watermark, "watermark")
    by = list(dict.fromkeys(by))
    frame = stream(spark, channels, options)
    _check(frame, by)
    # Spark drops rows whose time is null and tells nobody; in 1970 they are late, which it counts.
    timed = frame.withColumn("timestamp", F.coalesce(F.col("timestamp"), F.timestamp_micros(F.lit(0))))
    counted = timed.withWatermark("timestamp", watermark).groupBy(F.window("timestamp", every), *by).agg(*_sums())
    names = ["window.start as window_start", "window.end as window_end", *by]
    result = counted.selectExpr(*names, "records", "bytes", "first_position", "last_position")
    fit_table(result, table)
    before = version_of(table)

    def write(closed: DataFrame, batch: int) -> None:
        if not lake.append(closed, table, app=app, batch=batch, query=lake.query_of(checkpoint)):
            closed.write.format("noop").mode("overwrite").save()  # a replayed batch still has to bring the state along

    query = result.writeStream.outputMode("append").foreachBatch(write).option("checkpointLocation", checkpoint)
    summary = follow(query.trigger(**(trigger or {"availableNow": True})).start(), on_progress)
    summary.read, summary.rows = summary.rows, lake.committed_records(table, app, before)
    return summary


def _check(frame: DataFrame, by: Sequence[str]) -> None:
    missing = [name for name in (*by, "position", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to aggregate by")


def _sums() -> list[Column]:
    from pyspark.sql import functions as F  # noqa: N812

    return [
        F.count("*").alias("records"),
        F.sum(F.length("payload")).alias("bytes"),
        F.min("position").alias("first_position"),
        F.max("position").alias("last_position"),
    ]


def duration_micros(text: str, option: str = "every") -> int:
    """Return a length of time in microseconds; ``option`` is what an error names.

    >>> duration_micros("15 minutes"), duration_micros("1 day")
    (900000000, 86400000000)
    """
    number, _, unit = text.strip().partition(" ")
    unit = unit.strip().lower().removesuffix("s")
    if not number.isdecimal() or not int(number) or unit not in UNITS:
        raise OptionsError(f"{option}={text!r}: use a number and one of {', '.join(UNITS)}, such as '15 minutes'")
    return int(number) * UNITS[unit]
