"""Which spans of which channels are read, and by which task.  Pure: positions in, spans out; no Spark here.

The same bounds always give the same spans, so that a batch that Spark replays after a crash reads the same records.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from penstock.disk import PosixDisk, ReadDisk, is_url, read_disk_for
from penstock.errors import CorruptionError, NotFoundError, OptionsError
from penstock.log.detect import detect, open_log
from penstock.log.face import Cuttable, LogReader, OnDamage
from penstock.log.find import Found, find_logs
from penstock.log.sidecar import identity_of
from penstock.ship import Head, ShippedLog
from penstock.ship.compacted import CompactedPart
from penstock.spark.source import shipped
from penstock.spark.source.filters import TOP, Filters
from penstock.spark.source.loss import Extent, extent_of

__all__ = [
    "Advance", "SourceChannel", "Span", "advance", "find_channels", "pack", "plan_channel", "plan_tasks", "share",
    "bounds_of",
]  # fmt: skip

SMALLEST_SPAN_BYTES: Final = 4 << 20
OPENING_BYTES: Final = 512 << 10
"""What could be read in the time that opening a log takes, about 1.5 ms: so much a span counts at least."""
OPENINGS: Final = 32
"""So many spans a task opens at least, however small partitionBytes is."""
MOST_RECORDS: Final = 65_536
PATTERN: Final = re.compile(r"[*?\[]")


class SourceChannel(msgspec.Struct, frozen=True, order=True):
    """A channel as Spark sees it: a name that tells it from the others, and the log behind it.

    >>> SourceChannel("ticks", "data/ticks", "xchannel", "").name
    'ticks'
    """

    name: str
    path: str
    format: str
    identity: str
    node: str | None = None
    """Of a shipped log: whose it is.  Its name begins with it."""

    @property
    def label(self) -> str:
        """What the column ``channel`` says: the name, without that of the node."""
        return self.name if self.node is None else self.name[len(self.node) + 1 :]

    def open(self, disk: ReadDisk | None = None, *, on_damage: OnDamage | None = None) -> LogReader:
        """Open the log behind it; a shipped one as it was when this process looked for it last."""
        if self.node is not None:
            known = shipped.kept(self.path) if on_damage is None else None
            return known or ShippedLog(self.path, on_damage=on_damage)
        return open_log(self.path, format=self.format, disk=disk, on_damage=on_damage)


def bounds_of(log: LogReader, *, lenient: bool) -> tuple[int, int]:
    """Return the first and the next position of a log; ``lenient`` where damage at its end is to be passed over.

    >>> from penstock.log.detect import open_writer
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, open_writer(folder + "/ticks") as writer:
    ...     position = writer.append(b"one")
    ...     with open_log(folder + "/ticks") as log:
    ...         bounds_of(log, lenient=False)
    (80, 104)
    """
    try:
        return log.first_position, log.next_position
    except CorruptionError:
        if not lenient or log.on_damage == "skip":
            raise
    with open_log(log.path, format=log.format, on_damage="skip") as passing:
        return passing.first_position, passing.next_position


class Span(msgspec.Struct, frozen=True):
    """A run of records of one channel, from ``start`` up to but not including ``end``; ``bytes`` is an estimate.

    >>> Span(SourceChannel("ticks", "data/ticks", "xchannel", ""), 80, 128, 48).end
    128
    """

    channel: SourceChannel
    start: int
    end: int
    bytes: int
    part: Head | CompactedPart | None = None
    """Of a shipped log: the segments with these records, as its manifest has them, or the compacted file."""

    def open(self, *, on_damage: OnDamage | None = None) -> LogReader:
        """Open the log, or as much of it as this span needs."""
        if self.part is not None:
            return shipped.open_piece(self.channel.path, self.part, on_damage)
        return self.channel.open(on_damage=on_damage)


def find_channels(
    paths: Iterable[str], format: str | None = None, disk: ReadDisk | None = None, *, fresh: bool = True
) -> list[SourceChannel]:
    """Return every channel at and below these paths, by name; a path that is not there may be a pattern (``*``, ``?``).

    Two that would have one name are refused, and so is one that would have two: its records would be read twice.
    Shipped logs that this process knows are not looked at again unless ``fresh``.
    """
    disk = disk or PosixDisk()
    channels: dict[str, SourceChannel] = {}
    places: dict[str, SourceChannel] = {}
    for path in paths:
        if shipped.holds_shipped(path):
            logs = shipped.find(path, fresh=fresh)
            for log in logs:
                if format in (None, log.format):
                    _add_shipped(channels, log)
            if not logs and is_url(path) and (copied := _copied(path, format)) is not None:
                channels[copied.name] = copied
            continue
        for found in _find(path, format, disk):
            place = os.path.realpath(found.path)
            named, placed = channels.get(found.name), places.get(place)
            if named is not None and placed is not named:
                raise OptionsError(f"two channels are called {found.name}: {named.path} and {found.path}")
            if placed is not None and placed is not named:
                raise OptionsError(f"{found.path} would be read twice, as {placed.name} and as {found.name}")
            if named is None:
                _check_name(found.path)
                channel = SourceChannel(found.name, found.path, found.format, identity_of(disk, found.path))
                channels[found.name] = places[place] = channel
    return sorted(channels.values())


def _copied(path: str, format: str | None) -> SourceChannel | None:
    """Return the log whose files someone copied to a URL as they are, None where there is none."""
    disk = read_disk_for(path)
    try:
        found = format or detect(path, disk)
    except OptionsError:
        return None
    return SourceChannel(path.rstrip("/").rpartition("/")[2], path, found, identity_of(disk, path))


def _add_shipped(channels: dict[str, SourceChannel], log: shipped.ShippedName) -> None:
    name = f"{log.node}/{log.channel}"
    known = channels.get(name)
    if known is not None and known.path != log.path:
        raise OptionsError(f"two logs are called {log.channel} of node {log.node}: {known.path} and {log.path}")
    channels[name] = SourceChannel(name, log.path, log.format, log.identity, log.node)


def plan_channel(
    log: LogReader, channel: SourceChannel, start: int, end: int, span_bytes: int, filters: Filters | None = None
) -> list[Span]:
    """Cut ``start`` to ``end`` of a channel into spans, leaving out those no record of which can pass.

    A log that cannot be cut without reading it is one span; one whose format has no kinds has no record of any.  A
    shipped one is cut by what its manifest says.
    """
    if isinstance(log, ShippedLog):
        pieces = shipped.cut(log, start, end, span_bytes, filters)
        return [Span(channel, piece.start, piece.end, piece.bytes, piece.head) for piece in pieces]
    if start >= end or (filters is not None and filters.kinds and not log.has_kinds):
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
    bounds: Iterable[tuple[SourceChannel, int, int]],
    partition_bytes: int,
    partitions: int,
    filters: Filters | None = None,
) -> list[tuple[Span, ...]]:
    """Cut each channel between its bounds and share the spans out to tasks.

    First every channel is measured in one piece, then those that are too much for a task are cut evenly.
    """
    whole: list[Span] = []
    for channel, start, end in bounds:
        if start < end:
            with channel.open() as log:
                whole += plan_channel(log, channel, start, end, TOP, filters)
    opening = min(OPENING_BYTES, partition_bytes // OPENINGS)
    task_bytes = share(sum(max(span.bytes, opening) for span in whole), partition_bytes, partitions)
    spans: list[Span] = []
    for span in whole:
        parts = round(span.bytes / task_bytes)
        if parts < 2:
            spans.append(span)
            continue
        with span.channel.open() as log:
            spans += plan_channel(log, span.channel, span.start, span.end, -(-span.bytes // parts), filters)
    return pack(spans, task_bytes, opening)


def pack(spans: Sequence[Span], task_bytes: int, opening: int = 0) -> list[tuple[Span, ...]]:
    """Share spans out to tasks in order: about ``task_bytes`` each, evenly, small channels together.

    A span counts as ``opening`` bytes at least: thousands of tiny ones are work for more than one task.

    >>> ticks = SourceChannel("ticks", "ticks", "xchannel", "")
    >>> [len(task) for task in pack([Span(ticks, n, n + 1, 10) for n in range(6)], 20)]
    [2, 2, 2]
    """
    total = sum(max(span.bytes, opening) for span in spans)
    count = max(1, math.ceil(total / max(task_bytes, 1) - 1 / 8))  # about: one task less may be one round less
    tasks: dict[int, list[Span]] = {}  # most of them have nothing where a task is to read less than a span
    before = 0
    for span in spans:
        weight = max(span.bytes, opening)
        middle = before + weight / 2
        tasks.setdefault(min(int(middle * count / total) if total else 0, count - 1), []).append(span)
        before += weight
    return [tuple(task) for task in tasks.values()]


def share(total_bytes: int, partition_bytes: int, partitions: int) -> int:
    """Return how much one task should read: about ``partition_bytes``, in so many tasks that all cores end together.

    >>> share(1 << 30, 128 << 20, 2) == 128 << 20, share(100 << 20, 128 << 20, 2) == 50 << 20
    (True, True)
    >>> share(400 << 20, 128 << 20, 2) == 100 << 20  # four tasks, not three
    True
    """
    rounds = max(1, round(total_bytes / (partition_bytes * partitions)))
    return max(-(-total_bytes // (rounds * partitions)), min(SMALLEST_SPAN_BYTES, partition_bytes))


class Advance(msgspec.Struct):
    """How far a walk came: up to which position, over how many records and bytes of payload, and what was lost there.

    >>> Advance(80).lost
    Extent(records=0, bytes=0)
    """

    position: int
    records: int = 0
    bytes: int = 0
    lost: Extent = Extent()


def advance(
    log: LogReader,
    start: int,
    end: int,
    max_records: int | None,
    max_bytes: int | None,
    first_bytes: int = TOP,
    *,
    over_damage: bool = False,
) -> Advance:
    """Walk from ``start`` towards ``end`` until a limit is reached.

    The first record is passed although it is larger than ``max_bytes``, if it is not larger than ``first_bytes``.  With
    ``over_damage`` the walk goes on behind damage that the log raises, and measures it.
    """
    done = Advance(start)
    while (
        done.position < end
        and (max_records is None or done.records < max_records)
        and (max_bytes is None or done.bytes < max_bytes)
    ):
        at = done.position
        try:
            batch = log.read(at, MOST_RECORDS if max_records is None else min(MOST_RECORDS, max_records - done.records))
        except CorruptionError:
            if not over_damage:
                raise
            found = log.skip_damage(at)
            done.position = end if found is None else min(found[0], end)
            done.lost += extent_of(log, at, done.position)
            continue
        count = int(batch.positions.searchsorted(end))
        if max_bytes is not None and count:
            ends = batch.payloads.lengths[:count].cumsum()
            fitting = int(ends.searchsorted(max_bytes - done.bytes, "right"))
            if not done.records and not fitting and int(ends[0]) <= first_bytes:
                fitting = 1
            count = min(count, fitting)
            done.bytes += int(ends[count - 1]) if count else 0
        else:
            done.bytes += int(batch.payloads.lengths[:count].sum())
        done.records += count
        if count < len(batch):
            done.position = min(int(batch.positions[count]), end)
            break
        if not len(batch) and batch.next_position <= at:
            break
        done.position = min(batch.next_position, end)
    return done


def _find(path: str, format: str | None, disk: ReadDisk) -> list[Found]:
    """Return the logs at and below a path, or at and below whatever a pattern matches, named from where it begins."""
    if not PATTERN.search(path) or disk.stat(path) is not None:
        try:
            logs = find_logs(path, format=format, disk=disk)
        except NotFoundError:
            raise
        except OptionsError as exc:
            raise OptionsError(f"{exc}{_hint(path, disk)}") from None
        if not logs:
            _check_not_a_table(path, disk)
        return logs
    parts = path.split("/")
    fixed = next(index for index, part in enumerate(parts) if PATTERN.search(part))
    folder = "/".join(parts[:fixed]) or ("/" if path.startswith("/") else ".")
    wanted = [re.compile(fnmatch.translate(part)) for part in parts[fixed:]]
    if (stat := disk.stat(folder)) is None or not stat.is_folder:
        raise NotFoundError(f"{path}: there is no folder {folder}")
    found = []
    for log in find_logs(folder, format=format, disk=disk):
        names = log.name.split("/")
        if len(names) >= len(wanted) and all(
            part.fullmatch(name) for part, name in zip(wanted, names[: len(wanted)], strict=True)
        ):
            found.append(log)
    return found


def _hint(path: str, disk: ReadDisk) -> str:
    """Say what a file is that is no log, where its first bytes tell."""
    stat = disk.stat(path)
    if stat is None or stat.is_folder:
        return ""
    with disk.open(path) as file:
        first = bytes(file.read_at(0, 4))
    return "; it is a Parquet file: read it with spark.read.parquet" if first == b"PAR1" else ""


def _check_not_a_table(path: str, disk: ReadDisk) -> None:
    """Refuse a folder that has files of a table in it and no channel: it is no folder to which channels will come."""
    names = disk.list(path)
    if "_delta_log" in names:
        raise OptionsError(f"{path}: this is a table of the lake, not channels: read it with penstock.spark.lake.read")
    if any(name.endswith(".parquet") for name in names):
        raise OptionsError(f"{path}: there are Parquet files here and no channels: read it with spark.read.parquet")


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise OptionsError(f"{os.fsencode(path)!r}: this name is not UTF-8, which Spark needs: rename it") from None


def _cut(log: Cuttable, channel: SourceChannel, start: int, end: int, span_bytes: int) -> list[Span]:
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
