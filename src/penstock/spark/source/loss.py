"""How much lies between two positions of a log: records where positions count them, else bytes at most.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from penstock.log.face import LogReader
from penstock.log.xchannel.format import FIRST_SLOT, split_position
from penstock.ship import ShippedLog

__all__ = ["Extent", "extent_of", "extent_of_gone"]

Measure = Callable[[LogReader, int, int], "Extent"]


class Extent(msgspec.Struct, frozen=True):
    """So many records, and so many bytes of the log at most in which they cannot be counted.

    >>> Extent(3) + Extent(bytes=10)
    Extent(records=3, bytes=10)
    """

    records: int = 0
    bytes: int = 0

    def __add__(self, other: Extent) -> Extent:
        return Extent(self.records + other.records, self.bytes + other.bytes)

    def __bool__(self) -> bool:
        return bool(self.records or self.bytes)

    def __str__(self) -> str:
        said = [f"{self.records} records"] if self.records or not self.bytes else []
        return " and ".join([*said, *([f"at most {self.bytes} bytes"] if self.bytes else [])])

    def add_to(self, place: dict[str, Any]) -> None:
        """Count it in a place of an offset."""
        for name, more in (("lost", self.records), ("lost_bytes", self.bytes)):
            if more:
                place[name] = int(place.get(name, 0)) + more

    @classmethod
    def lost_in(cls, place: Mapping[str, Any]) -> Extent:
        """Return what a place of an offset has counted.

        >>> Extent.lost_in({"at": 5, "lost": 2})
        Extent(records=2, bytes=0)
        """
        return cls(int(place.get("lost", 0)), int(place.get("lost_bytes", 0)))


def extent_of(log: LogReader, start: int, end: int) -> Extent:
    """Return what lies between two positions of a log, whether it is still there or not."""
    if isinstance(log, ShippedLog):
        return _segments(log, start, end)
    return MEASURES[log.format](log, start, end) if start < end else Extent()


def extent_of_gone(format: str, start: int, end: int) -> Extent:
    """Return what lay between two positions of a log that is gone; of a channel of several files only the ends count.

    >>> extent_of_gone("messagelog", 5, 8), extent_of_gone("xchannel", 80, (1 << 40) + 200)
    (Extent(records=3, bytes=0), Extent(records=0, bytes=200))
    """
    if start >= end:
        return Extent()
    if format == "messagelog":
        return Extent(end - start)
    first, (last, high) = split_position(start)[0], split_position(end)
    return Extent(bytes=high if format == "xchannel" and first != last else end - start)


def _segments(log: ShippedLog, start: int, end: int) -> Extent:
    """Measure a shipped log by its manifest; a segment that is gone counts as the largest that is there."""
    there = log.entries(start, end)
    if there or log.format == "messagelog" or start >= end:
        return Extent(sum(entry.records for entry in there) or end - start)
    gone = split_position(end)[0] - split_position(start)[0] if log.format == "xchannel" else 0
    if not gone:
        return Extent(bytes=end - start)
    largest = max((entry.bytes for entry in log.entries(log.first_position, log.next_position)), default=0)
    return Extent(bytes=gone * largest)


def _numbers(log: LogReader, start: int, end: int) -> Extent:  # noqa: ARG001
    return Extent(end - start)


def _frames(log: LogReader, start: int, end: int) -> Extent:  # noqa: ARG001
    return Extent(bytes=end - start)


def _files(log: LogReader, start: int, end: int) -> Extent:
    """Measure by files: one that is gone counts as the largest that is there."""
    (first, low), (last, high) = split_position(start), split_position(end)
    if first == last:
        return Extent(bytes=high - low)
    names = ((str(file["file"]).removeprefix(log.path), int(file["bytes"])) for file in log.stat()["files"])
    sizes = {int(name[1:] or 0): size for name, size in names}
    largest = max(sizes.values(), default=0)
    whole = sum(max(sizes.get(number, largest) - FIRST_SLOT, 0) for number in range(first + 1, last))
    return Extent(bytes=max(sizes.get(first, largest) - low, 0) + whole + max(high - FIRST_SLOT, 0))


MEASURES: Final[dict[str, Measure]] = {"messagelog": _numbers, "filechannel": _frames, "xchannel": _files}
"""Positions of a message log are numbers of records, those of a queue bytes, those of a channel files and bytes."""
