"""audit from the edge to the lake: edge → shipped → lake, per log and span, record by record.

A span is a segment as the manifest names it.  Two stages are compared by node, channel and position: a record is the
same when every column that both sides have is equal, not when hashes are.  What one side cannot have yet is counted as
``behind``, what the earlier side has let go as ``expired``; neither is a fault.  A fault names the first position that
differs, and how:

    missing     the later stage does not have it, though it has later ones
    changed     it has it otherwise
    repeated    it has it more than once
    unknown     it has it, and the earlier stage does not
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import NotFoundError, OptionsError
from penstock.ship import ShippedLog
from penstock.spark import lake
from penstock.spark.lake.committed import APP, reached
from penstock.spark.source.options import path_here, place_of
from penstock.spark.source.plan import SourceChannel, find_channels
from penstock.spark.source.shipped import holds_shipped

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["SpanCheck", "audit_loop", "by_log"]

IDENTITY: Final = ("node", "channel", "position")
ENDLESS: Final = (1 << 63) - 1
FAULTS: Final = ("missing", "changed", "repeated", "unknown")


class SpanCheck(msgspec.Struct):
    """What is to be said of one span of one log between two stages.

    >>> SpanCheck("shipped→lake", "edge-1", "ticks", 80, 96, 2, 1, missing=1, differs_at=88).ok
    False
    """

    stage: str
    node: str
    channel: str
    first: int
    next: int
    before: int
    """Records in the earlier stage."""
    after: int
    """Records in the later one."""
    missing: int = 0
    changed: int = 0
    repeated: int = 0
    unknown: int = 0
    behind: int = 0
    expired: int = 0
    differs_at: int | None = None
    """The first position at which there is a fault."""
    spans: int = 1
    bad_spans: int = 0

    @property
    def ok(self) -> bool:
        """Whether the later stage has what it should."""
        return not (self.missing or self.changed or self.repeated or self.unknown)


class _Bounds(msgspec.Struct, frozen=True):
    """Of a log between two stages: from where the earlier one has it, and to where the later one."""

    node: str
    channel: str
    first: int
    reached: int


def audit_loop(
    spark: SparkSession, shipped: str, *, edge: str | None = None, table: str | None = None
) -> list[SpanCheck]:
    """Compare logs on an edge node, what was shipped of them, and a table of the lake; one check a stage and span.

    ``edge`` is where the logs are on this machine, and ``table`` what was ingested from ``shipped``.
    """
    shipped = path_here(spark, place_of(shipped))
    if edge is None and table is None:
        raise OptionsError("give the logs of an edge node, a table, or both: something to compare with")
    if not holds_shipped(shipped):
        raise OptionsError(f"{shipped}: nothing was shipped here")
    channels = find_channels([shipped])
    if not channels:
        raise NotFoundError(f"{shipped}: nothing was shipped here")
    frame = spark.read.format("penstock").load(shipped)
    spans = _spans(spark, channels)
    found: list[SpanCheck] = []
    if edge is not None:
        local, names = _edge(spark, path_here(spark, place_of(edge)), channels)
        bounds = [_Bounds(name.node or "", name.label, *_ends(name, here)) for name, here in names]
        wanted = spark.createDataFrame([(item.node, item.channel) for item in bounds], "node string, channel string")
        found += _compare("edge→shipped", local, frame.join(wanted, ["node", "channel"], "leftsemi"), spans, bounds)
    if table is not None:
        held = lake.read(spark, table)
        if "node" not in held.columns:
            raise OptionsError(f"{table}: it has no column node: it was not made from shipped logs")
        found += _compare("shipped→lake", frame, held, spans, _lake_bounds(table, held, channels))
    return sorted(found, key=lambda item: (item.stage, item.node, item.channel, item.first))


def by_log(checks: Iterable[SpanCheck]) -> list[SpanCheck]:
    """Put the spans of each log together.

    >>> one = SpanCheck("edge→shipped", "a", "ticks", 80, 90, 5, 5)
    >>> two = SpanCheck("edge→shipped", "a", "ticks", 90, 99, 5, 4, missing=1, differs_at=93)
    >>> joined, = by_log([one, two])
    >>> joined.before, joined.differs_at, joined.spans, joined.bad_spans
    (10, 93, 2, 1)
    """
    logs: dict[tuple[str, str, str], SpanCheck] = {}
    for check in checks:
        key = check.stage, check.node, check.channel
        known = logs.get(key)
        if known is None:
            logs[key] = msgspec.structs.replace(check, bad_spans=int(not check.ok))
            continue
        for name in ("before", "after", *FAULTS, "behind", "expired"):
            setattr(known, name, getattr(known, name) + getattr(check, name))
        known.first, known.next = min(known.first, check.first), max(known.next, check.next)
        known.spans, known.bad_spans = known.spans + 1, known.bad_spans + int(not check.ok)
        places = [at for at in (known.differs_at, check.differs_at) if at is not None]
        known.differs_at = min(places, default=None)
    return list(logs.values())


# --- What the stages are


def _spans(spark: SparkSession, channels: list[SourceChannel]) -> DataFrame:
    rows = []
    for channel in channels:
        with channel.open() as log:
            assert isinstance(log, ShippedLog)
            entries = [*getattr(log, "older", ()), *log.entries(log.first_position, log.next_position)]
            rows += [(channel.node, channel.label, entry.first, entry.next) for entry in entries]
            rows.append((channel.node, channel.label, log.next_position, ENDLESS))
            rows.append((channel.node, channel.label, -1, log.first_position))
    return spark.createDataFrame(rows, "node string, channel string, first long, next long")


def _edge(
    spark: SparkSession, edge: str, channels: list[SourceChannel]
) -> tuple[DataFrame, list[tuple[SourceChannel, SourceChannel]]]:
    """Return the logs of an edge node with the node's name, and which shipped log each is: by its id."""
    from pyspark.sql import functions as F  # noqa: N812

    shipped = {channel.identity: channel for channel in channels if channel.identity}
    pairs = [(shipped[here.identity], here) for here in find_channels([edge]) if here.identity in shipped]
    if not pairs:
        raise OptionsError(f"{edge}: none of the logs here was shipped there")
    frame = spark.read.format("penstock").load(edge)
    rows = [(here.name, there.node, there.label) for there, here in pairs]
    names = spark.createDataFrame(rows, "here string, node string, there string")
    joined = frame.join(F.broadcast(names), F.col("channel") == F.col("here"))
    return joined.drop("channel", "here").withColumnRenamed("there", "channel"), pairs


def _ends(there: SourceChannel, here: SourceChannel) -> tuple[int, int]:
    """Return where the log begins on its node, and up to where it is shipped."""
    with there.open() as shipped, here.open() as local:
        return local.first_position, shipped.next_position


def _lake_bounds(table: str, held: DataFrame, channels: list[SourceChannel]) -> list[_Bounds]:
    """Return where the shipped logs begin, and up to where the table has them: as it says, or by its newest record."""
    from pyspark.sql import functions as F  # noqa: N812

    opened = lake.open_table(table)
    known = {channel.name: reached(opened, channel, APP) for channel in channels}
    newest: Mapping[tuple[str, str], int] = {}
    if any(at is None for at in known.values()):
        rows = held.groupBy("node", "channel").agg((F.max("position") + 1).alias("newest")).collect()
        newest = {(row["node"], row["channel"]): row["newest"] for row in rows}
    bounds = []
    for channel in channels:
        node, at = channel.node or "", known[channel.name]
        with channel.open() as log:
            end = newest.get((node, channel.label), -1) if at is None else at
            bounds.append(_Bounds(node, channel.label, log.first_position, end))
    return bounds


# --- The comparison


def _compare(
    stage: str, before: DataFrame, after: DataFrame, spans: DataFrame, bounds: list[_Bounds]
) -> list[SpanCheck]:
    from pyspark.sql import functions as F  # noqa: N812

    both = [name for name, kind in before.dtypes if (name, kind) in after.dtypes and name not in IDENTITY]
    there = before.select(*IDENTITY, F.struct(*both).alias("one"))
    found = (
        after.select(*IDENTITY, F.struct(*both).alias("other"))
        .groupBy(*IDENTITY)
        .agg(F.count("*").alias("copies"), F.first("other").alias("other"), F.count_distinct("other").alias("kinds"))
    )
    schema = "node string, channel string, begins long, reached long"
    known = before.sparkSession.createDataFrame([msgspec.structs.astuple(item) for item in bounds], schema)
    joined = there.join(found, list(IDENTITY), "full").join(F.broadcast(known), ["node", "channel"], "left")
    present, absent = F.col("one").isNotNull(), F.col("copies").isNull()
    late = F.col("reached").isNull() | (F.col("position") >= F.col("reached"))
    early = F.col("position") < F.col("begins")
    faults = {
        "missing": present & absent & ~late,
        "changed": present & ~absent & (~F.col("one").eqNullSafe(F.col("other")) | (F.col("kinds") > 1)),
        "repeated": F.col("copies") > 1,
        "unknown": ~present & (F.col("begins").isNull() | ~early),
    }
    anything = faults["missing"] | faults["changed"] | faults["repeated"] | faults["unknown"]

    def count(condition: Column) -> Column:
        return F.coalesce(F.sum(F.when(condition, 1)), F.lit(0))

    inside = [
        joined["node"] == spans["node"],
        joined["channel"] == spans["channel"],
        joined["position"] >= spans["first"],
        joined["position"] < spans["next"],
    ]
    placed = joined.join(F.broadcast(spans), inside, "left").select(joined["*"], spans["first"], spans["next"])
    rows = (
        placed.groupBy("node", "channel", "first", "next")
        .agg(
            count(present).alias("before"),
            F.coalesce(F.sum("copies"), F.lit(0)).alias("after"),
            *(count(condition).alias(name) for name, condition in faults.items()),
            count(present & absent & late).alias("behind"),
            count(~present & early).alias("expired"),
            F.min(F.when(anything, F.col("position"))).alias("differs_at"),
        )
        .collect()
    )
    return [SpanCheck(stage, **_row(row)) for row in rows]


def _row(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = row.asDict()
    found["node"], found["first"] = found["node"] or "", -1 if found["first"] is None else found["first"]
    found["next"] = -1 if found["next"] is None else found["next"]
    return found
