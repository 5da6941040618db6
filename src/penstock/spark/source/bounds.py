"""Where reading a channel begins and ends: as options say it, by position, by word or by time."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch
from penstock.errors import OptionsError
from penstock.log.envelope import CONTENT, open_envelopes
from penstock.log.face import Cuttable, LogReader
from penstock.ship import ShippedLog
from penstock.spark.source.options import SourceOptions, Where
from penstock.spark.source.plan import SourceChannel

__all__ = ["check_chosen", "check_named", "end_of", "position_at", "start_of"]

SPAN_BYTES: Final = 4 << 20
"""How finely a log is cut to be searched; the last piece is read."""
MOST_NAMED: Final = 8
PROBES: Final = 16
"""So many places, evenly spread, are looked at to see whether times grow at all."""


def start_of(channel: SourceChannel, options: SourceOptions, first: int, end: int) -> int:
    """Return where reading a channel begins that has records from ``first`` up to ``end``."""
    if options.start_ns is not None:
        with channel.open() as log:
            return position_at(log, first, end, options.start_ns)
    return _place(channel, options.start, "startingOffsets", first, end, first)


def end_of(channel: SourceChannel, options: SourceOptions, first: int, end: int) -> int:
    """Return where reading it ends."""
    if options.end_ns is not None:
        with channel.open() as log:
            return position_at(log, first, end, options.end_ns)
    if options.end == "latest":
        return end
    return min(_place(channel, options.end, "endingOffsets", first, end, end), end)


def check_named(options: SourceOptions, names: Iterable[str]) -> None:
    """Refuse positions of channels that are not there."""
    there = set(names)
    for option, where in (("startingOffsets", options.start), ("endingOffsets", options.end)):
        unknown = set(where) - there if isinstance(where, dict) else set()
        if unknown:
            raise OptionsError(f"{option} names channels that are not there: {', '.join(sorted(unknown))}")


def check_chosen(options: SourceOptions, found: Sequence[SourceChannel], known: Container[str] = ()) -> None:
    """Refuse names of channels and nodes that are not there; those that end with ``*`` may stand for none.

    ``known`` are channels that were there, and may be gone.
    """
    for option, chosen, there in (
        ("channels", options.filters.channels, {name for channel in found for name in (channel.name, channel.label)}),
        ("nodes", options.filters.nodes, {channel.node for channel in found if channel.node is not None}),
    ):
        unknown = sorted(name for name in chosen if not name.endswith("*") and name not in there and name not in known)
        if unknown:
            some = ", ".join(sorted(there)[:MOST_NAMED]) + (", …" if len(there) > MOST_NAMED else "") or "none"
            raise OptionsError(f"{option} names what is not there: {', '.join(unknown)}; there is {some}")


def position_at(log: LogReader, first: int, end: int, time_ns: int) -> int:
    """Return the first position whose record is not older than a time, ``end`` where all are.

    Where times grow it is found by bisection.  Where a clock was set back, as far as a few looks tell, all records
    before it are read.
    """
    if first >= end:
        return end
    low, cuts = first, [first]
    if isinstance(log, ShippedLog):  # its manifest knows the times of each segment
        entry = next(iter(log.entries(first, end, time_ns, None)), None)
        return end if entry is None else _first_not_older(log, max(entry.first, first), end, time_ns)
    if isinstance(log, Cuttable):
        cuts = [begin for begin, _ in log.cut(first, end, SPAN_BYTES)] or [first]
    seen: dict[int, int] = {}

    def older(index: int) -> bool:
        if index not in seen:
            batch = log.read(cuts[index], 1)
            seen[index] = int(times_of(batch, log)[0]) if len(batch) else time_ns
        return seen[index] < time_ns

    for index in range(0, len(cuts), max(1, len(cuts) // PROBES)):
        older(index)
    at, upto = 0, len(cuts)  # the last cut that begins with an older record is at or behind ``at``, before ``upto``
    while upto - at > 1:
        middle = (at + upto) // 2
        at, upto = (middle, upto) if older(middle) else (at, middle)
    found = [seen[index] for index in sorted(seen)]
    if found == sorted(found):
        low = cuts[at]
    return _first_not_older(log, low, end, time_ns)


def _first_not_older(log: LogReader, low: int, end: int, time_ns: int) -> int:
    """Read on from ``low`` to the first record that is not older than a time."""
    while low < end:
        batch = log.read(low)
        if not len(batch):
            break
        young = np.flatnonzero(times_of(batch, log) >= np.uint64(max(time_ns, 0)))
        if len(young):
            return min(int(batch.positions[int(young[0])]), end)
        low = batch.next_position
    return end


def times_of(batch: Batch, log: LogReader) -> NDArray[np.uint64]:
    """Return when each record was written or, in a format that keeps no time, when its event was."""
    if batch.timestamps is not None:
        return batch.timestamps
    if log.content != CONTENT:
        raise OptionsError(f"{log.path}: its records have no time, so none can be found by it")
    times = open_envelopes(batch, log.path).extra["event_time_ns"]
    assert isinstance(times, np.ndarray)
    return times


def _place(channel: SourceChannel, where: Where, option: str, first: int, end: int, otherwise: int) -> int:
    at = where.get(channel.name, otherwise) if isinstance(where, dict) else where
    match at:
        case "earliest":
            return first
        case "latest":
            return end
    assert isinstance(at, int)
    if at < 0 or at > end:
        raise OptionsError(f"{option}={at} of {channel.name}: it begins at {first} and ends at {end}")
    if first <= at < end:  # a position at which no record begins is refused by the log
        with channel.open() as log:
            log.read(at, 1)
    return at
