"""aggregate: how much of what, when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.errors import OptionsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["aggregate", "duration_micros"]

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

    missing = [name for name in (*by, "position", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to aggregate by")
    if every is not None:
        # Not Spark's window(): that drops rows without a time in silence.
        length = duration_micros(every)
        start = F.expr(f"unix_micros(timestamp) - pmod(unix_micros(timestamp), {length}L)")
        frame = frame.withColumn("window_start", F.timestamp_micros(start))
        frame = frame.withColumn("window_end", F.timestamp_micros(start + F.lit(length)))
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


def duration_micros(text: str) -> int:
    """Return a length of time in microseconds.

    >>> duration_micros("15 minutes"), duration_micros("1 day")
    (900000000, 86400000000)
    """
    number, _, unit = text.strip().partition(" ")
    unit = unit.strip().lower().removesuffix("s")
    if not number.isdigit() or not int(number) or unit not in UNITS:
        raise OptionsError(f"every={text!r}: use a number and one of {', '.join(UNITS)}, such as '15 minutes'")
    return int(number) * UNITS[unit]
