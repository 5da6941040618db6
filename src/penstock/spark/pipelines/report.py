"""report: one row a channel, or a page with plots: rates, sizes, lag, gaps, top keys.

Spark reads the records two or three times and hands back sums: by size, by slot of time, by key.  What the page shows
is drawn from those, so it is as large for a billion records as for a thousand.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.batch import payload_text
from penstock.disk import disk_for, save_atomically
from penstock.disk.plain import make_folders
from penstock.errors import OptionsError
from penstock.log.sidecar import sidecar_of
from penstock.spark import lake
from penstock.spark.pipelines.audit import audit_logs
from penstock.spark.pipelines.page import ChannelPart, Lag, Report, TopKey, render
from penstock.spark.pipelines.run import load
from penstock.spark.source.names import USES
from penstock.spark.source.options import SourceOptions, local_path
from penstock.spark.source.plan import SourceChannel, find_channels

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["gather", "report", "write_report"]

SLOTS: Final = 120
DAY: Final = 86_400_000_000
ROUND_SECONDS: Final = (
    1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400,
)  # fmt: skip
SECOND: Final = 1_000_000
"""Microseconds of the shortest slot: a thousand records within one of them are no billion a second."""
TOP_KEYS: Final = 12
SILENCES: Final = 3


def report(frame: DataFrame) -> DataFrame:
    """Say of each channel how many records and bytes it has, of how many kinds, from when to when."""
    from pyspark.sql import functions as F  # noqa: N812

    _check(frame)
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


def write_report(
    spark: SparkSession,
    source: str,
    page: str,
    *,
    title: str | None = None,
    table: str | None = None,
    check: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Write the page about channels, or about a table of the lake, as one file; return what is on it.

    ``table`` is one that is filled from these channels: how far it is behind is shown with the cursors.  ``check``
    reads every log as ``audit`` does and shows what it found.
    """
    page = local_path(page)
    if os.path.isdir(page):
        raise OptionsError(f"{page}: this is a folder, not a page")
    of_lake = lake.open_table(source) is not None
    if of_lake and (check or table is not None):
        raise OptionsError(
            f"{source}: this is a table of the lake; only channels are checked, or compared with a table"
        )
    held = None if table is None else lake.read(spark, table).groupBy("channel").agg({"position": "max"})
    make_folders(os.path.dirname(os.path.abspath(page)))
    frame = load(spark, source, options)
    found = gather(frame, title=title or os.path.basename(os.path.abspath(local_path(source))))
    if not of_lake:
        channels = _channels(source, options)
        _add_empty(found, channels)
        cursors = _cursors(channels)
        if table is not None and held is not None:
            who = os.path.basename(local_path(table))
            named = {channel.label for channel in channels}
            cursors += [(row[0], who, row[1] + 1) for row in held.collect() if row[0] in named]
        found.lags = _lags(frame, cursors)
        if check:
            checks = {name: value for name, value in (options or {}).items() if name in USES["a check of logs"]}
            found.checks = [
                {**msgspec.structs.asdict(item), "ok": item.ok} for item in audit_logs(spark, source, checks)
            ]
    save_atomically(disk_for(page), page, render(found).encode())
    return found


def gather(frame: DataFrame, *, title: str = "channels") -> Report:
    """Add up what a page shows of a DataFrame of records."""
    _check(frame)
    frame = _timed(frame)
    parts: dict[str, ChannelPart] = {}
    kinds: dict[str, set[int | None]] = {}
    for row in _by_size(frame).collect():
        part = parts.setdefault(row["channel"], ChannelPart(row["channel"]))
        kinds.setdefault(part.name, set()).add(row["kind"])
        part.records += row["records"]
        part.bytes += row["bytes"] or 0
        part.largest = max(part.largest, row["largest"] or 0)
        part.timeless += row["timeless"]
        part.sizes = {**part.sizes, row["step"]: part.sizes.get(row["step"], 0) + row["records"]}
        if row["first"] is not None:
            first, last = row["first"] / 1e6, row["last"] / 1e6
            part.first_time = first if part.first_time is None else min(first, part.first_time)
            part.last_time = last if part.last_time is None else max(last, part.last_time)
    for part in parts.values():
        part.kinds = len(kinds[part.name] - {None})
    found = Report(title=title, made=time.time(), channels=[parts[name] for name in sorted(parts)])
    _add_times(frame, found)
    found.keys = _top_keys(frame)
    return found


def _add_empty(found: Report, channels: Sequence[SourceChannel]) -> None:
    """Add the channels of which there is no record to show: that they are there is worth knowing."""
    known = {part.name for part in found.channels}
    count = len(found.slots)
    found.channels += [
        ChannelPart(channel.label, slot_records=[0] * count, slot_bytes=[0] * count)
        for channel in channels
        if channel.label not in known
    ]
    found.channels.sort(key=lambda part: part.name)


def _check(frame: DataFrame) -> None:
    missing = [name for name in ("channel", "position", "timestamp", "kind", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to report on")


def _timed(frame: DataFrame) -> DataFrame:
    """Let the time of the event stand in where a format keeps none of its own, as queues do."""
    from pyspark.sql import functions as F  # noqa: N812

    if "event_time_ns" not in frame.columns:
        return frame
    event = F.when(F.col("event_time_ns") > 0, F.timestamp_micros(F.expr("event_time_ns div 1000")))
    return frame.withColumn("timestamp", F.coalesce("timestamp", event))


def _by_size(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812

    length = F.coalesce(F.length("payload"), F.lit(0))
    power = F.length(F.bin(length)) - 1  # the digits of a number in base two: the power it is not below
    step = power * 4 + F.floor(length * 4 / F.pow(F.lit(2.0), power)).cast("int") - 3
    micros = F.unix_micros("timestamp")
    return frame.groupBy("channel", "kind", F.when(length == 0, 0).otherwise(step).alias("step")).agg(
        F.count("*").alias("records"),
        F.sum(length).alias("bytes"),
        F.max(length).alias("largest"),
        F.min(micros).alias("first"),
        F.max(micros).alias("last"),
        F.sum(F.col("timestamp").isNull().cast("int")).alias("timeless"),
    )


def _add_times(frame: DataFrame, found: Report) -> None:
    """Add up by slots of time, and find the silences between and within them."""
    from pyspark.sql import functions as F  # noqa: N812

    times = [moment for part in found.channels for moment in (part.first_time, part.last_time) if moment is not None]
    if not times:
        return
    low, high = int(min(times) * 1e6), int(max(times) * 1e6)
    width = _slot_width(high - low + 1)
    count = (high - low) // width + 1
    found.slots = [(low + width * (slot + 0.5)) / 1e6 for slot in range(count)]
    found.slot_seconds = width / 1e6
    micros = F.unix_micros("timestamp")
    sums = [
        F.count("*").alias("records"),
        F.sum(F.coalesce(F.length("payload"), F.lit(0))).alias("bytes"),
        F.min(micros).alias("first"),
        F.max(micros).alias("last"),
    ]
    delayed = "event_time_ns" in frame.columns
    if delayed:
        late = F.when(F.col("event_time_ns") > 0, F.col("timestamp_ns") - F.col("event_time_ns"))
        sums.append(F.percentile_approx(late, F.array(F.lit(0.5), F.lit(0.95)), 1000).alias("delay"))
    slot = F.floor((micros - F.lit(low)) / F.lit(width)).cast("int").alias("slot")
    rows = frame.where("timestamp is not null").groupBy("channel", slot).agg(*sums).collect()
    parts = {part.name: part for part in found.channels}
    for part in found.channels:
        part.slot_records, part.slot_bytes = [0] * count, [0] * count
    delays: list[tuple[int, float, float] | None] = [None] * count
    spans: dict[str, list[tuple[int, int]]] = {}
    for row in sorted(rows, key=lambda row: row["slot"]):
        place = min(max(row["slot"], 0), count - 1)
        part = parts[row["channel"]]
        part.slot_records[place] += row["records"]
        part.slot_bytes[place] += row["bytes"]
        spans.setdefault(part.name, []).append((row["first"], row["last"]))
        known = delays[place]
        if delayed and row["delay"] and (known is None or known[0] < row["records"]):  # of the busiest channel
            delays[place] = (row["records"], row["delay"][0] / 1e9, row["delay"][1] / 1e9)
    found.delays = [(None, None) if item is None else item[1:] for item in delays] if delayed else []
    for name, pieces in spans.items():
        quiet = [(before[1], after[0]) for before, after in itertools.pairwise(pieces)]
        quiet = sorted((pair for pair in quiet if pair[1] - pair[0] > width), key=lambda pair: pair[0] - pair[1])
        parts[name].silences = [(begin / 1e6, end / 1e6) for begin, end in quiet[:SILENCES]]


def _slot_width(length: int) -> int:
    """Return the microseconds of a slot: a round number of seconds, so that a steady rate is a straight line.

    >>> _slot_width(1) // SECOND, _slot_width(500 * SECOND) // SECOND, _slot_width(90 * 86400 * SECOND) // SECOND
    (1, 5, 86400)
    """
    least = -(-length // SLOTS)
    return next((size * SECOND for size in ROUND_SECONDS if size * SECOND >= least), -(-least // DAY) * DAY)


def _top_keys(frame: DataFrame) -> list[TopKey]:
    from pyspark.sql import functions as F  # noqa: N812

    if "key" not in frame.columns:
        return []
    counted = frame.where("key is not null").groupBy("channel", "key").agg(F.count("*").alias("count"))
    rows = counted.orderBy(F.desc("count"), "channel", "key").limit(TOP_KEYS).collect()
    return [TopKey(row["channel"], _key_text(bytes(row["key"])), row["count"]) for row in rows]


def _key_text(key: bytes) -> str:
    form, text = payload_text(key)
    return text if form == "payload" else f"base64 {text}"


def _channels(source: str, options: Mapping[str, Any] | None) -> list[SourceChannel]:
    """Return the channels that are reported on, those without a record too."""
    told = SourceOptions.of({**{key: str(value) for key, value in (options or {}).items()}, "path": source})
    return [channel for channel in find_channels(told.paths, told.format) if told.filters.takes(channel)]


def _cursors(channels: Sequence[SourceChannel]) -> list[tuple[str, str, int]]:
    """Return the named cursors beside the logs: channel, name, position."""
    found = []
    for channel in channels:
        sidecar = sidecar_of(disk_for(channel.path), channel.path)
        try:
            found += [(channel.name, name, position) for name, position in sorted(sidecar.cursors().items())]
        finally:
            sidecar.close()
    return found


def _lags(frame: DataFrame, cursors: list[tuple[str, str, int]]) -> list[Lag]:
    """Count, in one pass, what lies behind each cursor."""
    from pyspark.sql import functions as F  # noqa: N812

    if not cursors:
        return []
    sums = []
    for index, (channel, _, position) in enumerate(cursors):
        behind = (F.col("channel") == channel) & (F.col("position") >= position)
        micros = F.when(behind, F.unix_micros("timestamp"))
        sums += [F.count(F.when(behind, 1)).alias(f"n{index}"), (F.max(micros) - F.min(micros)).alias(f"t{index}")]
    row = frame.agg(*sums).collect()[0]
    return [
        Lag(channel, who, row[f"n{index}"], None if row[f"t{index}"] is None else row[f"t{index}"] / 1e6)
        for index, (channel, who, _) in enumerate(cursors)
    ]
