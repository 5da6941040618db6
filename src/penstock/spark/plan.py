"""Which spans of which channels are read, and by which task.  Pure: positions in, spans out; no Spark here.

The same bounds always give the same spans, so that a batch that Spark replays after a crash reads the same records.
"""

from __future__ import annotations

import bisect
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from penstock.disk import PosixDisk, ReadDisk, Stat
from penstock.disk.posix import PosixFile, folder_of
from penstock.errors import OptionsError
from penstock.log.detect import open_log
from penstock.log.face import Cuttable, LogReader
from penstock.log.find import find_logs
from penstock.log.sidecar import identity_of
from penstock.spark.filters import TOP, Filters

__all__ = ["Channel", "Span", "find_channels", "plan_channel", "plan_tasks", "pack", "share", "advance"]

SMALLEST_SPAN_BYTES: Final = 4 << 20
LISTING_SECONDS: Final = 0.02
MOST_FOLDERS: Final = 1000


class ListingDisk(PosixDisk):
    """The disk, remembering the names in a folder for a moment.

    Each channel of a folder lists it: without this, planning n channels would look at n × n names.  Whoever begins to
    plan forgets first, so nothing that was there when it began is missed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ListingDisk().list(folder)
    []
    """

    def __init__(self) -> None:
        self._listed: dict[str, tuple[float, list[str]]] = {}

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, at most LISTING_SECONDS old."""
        now = time.monotonic()
        when, names = self._listed.get(folder, (-math.inf, []))
        if now - when > LISTING_SECONDS:
            if len(self._listed) > MOST_FOLDERS:
                self._listed.clear()
            names = super().list(folder)
            self._listed[folder] = now, names
        return names

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name; one that was listed and is gone makes the listing old."""
        found = super().stat(path)
        if found is None:
            self._gone(path)
        return found

    def open(self, path: str) -> PosixFile:
        """Open a file for reading; one that was listed and is gone makes the listing old."""
        try:
            return super().open(path)
        except FileNotFoundError:
            self._gone(path)
            raise

    def forget(self) -> None:
        """Look again from here on."""
        self._listed.clear()

    def _gone(self, path: str) -> None:
        folder, name = folder_of(path), os.path.basename(path)
        _, names = self._listed.get(folder, (0.0, []))
        at = bisect.bisect_left(names, name)
        if at < len(names) and names[at] == name:
            self._listed.pop(folder, None)


LISTING: Final = ListingDisk()


class Channel(msgspec.Struct, frozen=True, order=True):
    """A channel as Spark sees it: a name that tells it from the others, and the log behind it.

    >>> Channel("ticks", "data/ticks", "xchannel", "").name
    'ticks'
    """

    name: str
    path: str
    format: str
    identity: str

    def open(self, disk: ReadDisk | None = None) -> LogReader:
        """Open the log behind it."""
        return open_log(self.path, format=self.format, disk=disk or LISTING)


class Span(msgspec.Struct, frozen=True):
    """A run of records of one channel, from ``start`` up to but not including ``end``; ``bytes`` is an estimate.

    >>> Span(Channel("ticks", "data/ticks", "xchannel", ""), 80, 128, 48).end
    128
    """

    channel: Channel
    start: int
    end: int
    bytes: int


def find_channels(paths: Iterable[str], format: str | None = None, disk: ReadDisk | None = None) -> list[Channel]:
    """Return every channel at and below these paths, by name.

    Two that would have one name are refused, and so is one that would have two: its records would be read twice.
    """
    LISTING.forget()
    disk = disk or LISTING
    channels: dict[str, Channel] = {}
    places: dict[str, Channel] = {}
    for path in paths:
        for found in find_logs(path, format=format, disk=disk):
            place = os.path.realpath(found.path)
            named, placed = channels.get(found.name), places.get(place)
            if named is not None and placed is not named:
                raise OptionsError(f"two channels are called {found.name}: {named.path} and {found.path}")
            if placed is not None and placed is not named:
                raise OptionsError(f"{found.path} would be read twice, as {placed.name} and as {found.name}")
            if named is None:
                _check_name(found.path)
                channel = Channel(found.name, found.path, found.format, identity_of(disk, found.path))
                channels[found.name] = places[place] = channel
    return sorted(channels.values())


def plan_channel(
    log: LogReader, channel: Channel, start: int, end: int, span_bytes: int, filters: Filters | None = None
) -> list[Span]:
    """Cut ``start`` to ``end`` of a channel into spans, leaving out those no record of which can pass.

    A log that cannot be cut without reading it is one span; one whose format has no kinds has no record of any.
    """
    if start >= end or (filters is not None and filters.kinds and not getattr(log, "has_kinds", True)):
        return []
    low, high = (0, TOP) if filters is None else (filters.low, filters.high)
    if not isinstance(log, Cuttable):
        spans = [Span(channel, start, end, int(log.stat().get("bytes", span_bytes)))]
    else:
        spans = _cut(log, channel, start, end, span_bytes)
        if low > start or high < end - 1:
            # The spans at both edges are cut finely, so that a narrow filter reads little.
            spans = [
                part
                for span in _inside(spans, low, high)
                for part in (
                    _merged(_inside(_cut(log, channel, span.start, span.end, 1), low, high))
                    if span.start < low or span.end > high + 1
                    else [span]
                )
            ]
    return _inside(spans, low, high)


def plan_tasks(
    bounds: Iterable[tuple[Channel, int, int]], partition_bytes: int, partitions: int, filters: Filters | None = None
) -> list[tuple[Span, ...]]:
    """Cut each channel between its bounds and share the spans out to tasks.

    First every channel is measured in one piece, then those that are too much for a task are cut evenly.
    """
    whole: list[Span] = []
    for channel, start, end in bounds:
        if start < end:
            with channel.open() as log:
                whole += plan_channel(log, channel, start, end, TOP, filters)
    task_bytes = share(sum(span.bytes for span in whole), partition_bytes, partitions)
    spans: list[Span] = []
    for span in whole:
        parts = round(span.bytes / task_bytes)
        if parts < 2:
            spans.append(span)
            continue
        with span.channel.open() as log:
            spans += plan_channel(log, span.channel, span.start, span.end, -(-span.bytes // parts), filters)
    return pack(spans, task_bytes)


def pack(spans: Sequence[Span], task_bytes: int) -> list[tuple[Span, ...]]:
    """Share spans out to tasks in order: about ``task_bytes`` each, small channels together.

    >>> ticks = Channel("ticks", "ticks", "xchannel", "")
    >>> [len(task) for task in pack([Span(ticks, n, n + 1, 10) for n in range(5)], 20)]
    [2, 2, 1]
    """
    tasks: list[tuple[Span, ...]] = []
    held: list[Span] = []
    size = 0
    for span in spans:
        if held and size + span.bytes > task_bytes * 9 // 8:  # about, not at most: one task less may be one round less
            tasks.append(tuple(held))
            held, size = [], 0
        held.append(span)
        size += span.bytes
    return [*tasks, tuple(held)] if held else tasks


def share(total_bytes: int, partition_bytes: int, partitions: int) -> int:
    """Return how much one task should read: about ``partition_bytes``, in so many tasks that all cores end together.

    >>> share(1 << 30, 128 << 20, 2) == 128 << 20, share(100 << 20, 128 << 20, 2) == 50 << 20
    (True, True)
    >>> share(400 << 20, 128 << 20, 2) == 100 << 20  # four tasks, not three
    True
    """
    rounds = max(1, round(total_bytes / (partition_bytes * partitions)))
    return max(-(-total_bytes // (rounds * partitions)), min(SMALLEST_SPAN_BYTES, partition_bytes))


def advance(
    log: LogReader,
    start: int,
    end: int,
    max_records: int | None,
    max_bytes: int | None,
    first_bytes: int = TOP,
) -> tuple[int, int, int]:
    """Walk from ``start`` towards ``end`` until a limit is reached; return (position, records, bytes of payload).

    The first record is passed although it is larger than ``max_bytes``, if it is not larger than ``first_bytes``.
    """
    at, records, size = start, 0, 0
    while at < end and (max_records is None or records < max_records) and (max_bytes is None or size < max_bytes):
        batch = log.read(at, 65_536 if max_records is None else min(65_536, max_records - records))
        count = int(batch.positions.searchsorted(end))
        if max_bytes is not None and count:
            ends = batch.payloads.lengths[:count].cumsum()
            fitting = int(ends.searchsorted(max_bytes - size, "right"))
            if not records and not fitting and int(ends[0]) <= first_bytes:
                fitting = 1
            count = min(count, fitting)
            size += int(ends[count - 1]) if count else 0
        else:
            size += int(batch.payloads.lengths[:count].sum())
        if count < len(batch):
            at = min(int(batch.positions[count]), end)
            records += count
            break
        if not len(batch) and batch.next_position <= at:
            break
        at, records = min(batch.next_position, end), records + count
    return at, records, size


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise OptionsError(f"{os.fsencode(path)!r}: this name is not UTF-8, which Spark needs: rename it") from None


def _cut(log: Cuttable, channel: Channel, start: int, end: int, span_bytes: int) -> list[Span]:
    cuts = log.cut(start, end, span_bytes)
    ends = [begin for begin, _ in cuts[1:]] + [end]
    return [Span(channel, begin, until, size) for (begin, size), until in zip(cuts, ends, strict=True)]


def _inside(spans: Iterable[Span], low: int, high: int) -> list[Span]:
    return [span for span in spans if span.end > low and span.start <= high]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Join neighbouring spans into one."""
    if not spans:
        return []
    return [Span(spans[0].channel, spans[0].start, spans[-1].end, sum(span.bytes for span in spans))]
