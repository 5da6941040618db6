"""Which segments of a local log are sealed, and what is to be said about each.

A segment can be shipped when a later one is there: then nobody appends to it.  Its own bytes are synced before they go
up, so that nothing is named elsewhere that a power cut could take here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec

from penstock.disk import Disk
from penstock.disk.posix import folder_of
from penstock.errors import CorruptionError, PenstockError, UnsupportedError
from penstock.log.face import Cuttable, LogReader
from penstock.log.filechannel.format import segment_path
from penstock.log.filechannel.segments import Folder as ChannelFolder
from penstock.log.messagelog.format import segment_name, segment_number
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import ChannelFile, discover
from penstock.log.xchannel.format import FIRST_SLOT, file_path, position_of, split_position
from penstock.log.xchannel.remove import note_end

__all__ = [
    "LocalSegment",
    "log_files",
    "note_removal",
    "oldest_time_ns",
    "sealed_segments",
    "survey",
]

CUT_BYTES: Final = 8 << 20
READ_RECORDS: Final = 65_536


class LocalSegment(msgspec.Struct, frozen=True):
    """A sealed segment on this machine: the names of its files, the first of them the records, and its span.

    >>> LocalSegment("data/ticks", ("ticks",), "xch", 80, 1 << 40).first
    80
    """

    path: str
    names: tuple[str, ...]
    ending: str
    first: int
    next: int

    def paths(self) -> list[str]:
        """Return the paths of all its files."""
        return [self.path, *(os.path.join(os.path.dirname(self.path), name) for name in self.names[1:])]


def sealed_segments(disk: Disk, log: LogReader, start: int) -> Iterator[LocalSegment]:
    """Yield the sealed segments that reach behind ``start``, oldest first."""
    return _SEALED[log.format](disk, log, start)


def _messagelog(disk: Disk, log: LogReader, start: int) -> Iterator[LocalSegment]:
    numbers = sorted(number for name in disk.list(log.path) if (number := segment_number(name)) is not None)
    for number, later in pairwise(numbers):
        if later <= start:
            continue
        name = segment_name(number)
        path = f"{log.path}/{name}.log"
        if (found := disk.stat(path)) is None or not found.size:
            continue
        index = (f"{name}.idx",) if disk.stat(f"{log.path}/{name}.idx") is not None else ()
        yield LocalSegment(path, (f"{name}.log", *index), "log", number, later)


def _filechannel(disk: Disk, log: LogReader, start: int) -> Iterator[LocalSegment]:
    folder = ChannelFolder(disk, log.path)
    files = list(folder.files().values())
    first = len(files) - 1  # headers are read from the newest on, as few as it takes
    if files and (oldest := folder.begin(files[0].index)) is not None and start <= oldest:
        first = 0
    while first > 0 and ((begin := folder.begin(files[first].index)) is None or begin > start):
        first -= 1
    for found, later in pairwise(files[max(first, 0) :]):
        begin, end = folder.begin(found.index), folder.begin(later.index)
        if begin is None and not _is_there(disk, log.path, found.index):
            continue  # retention took it since the folder was listed
        if begin is None or end is None:
            raise CorruptionError(segment_path(log.path, found.index), 0, "its header or the next one cannot be read")
        if begin < end and end > start:
            path = segment_path(log.path, found.index, ".z" if found.packed else "")
            yield LocalSegment(path, (os.path.basename(path),), "z" if found.packed else "seg", begin, end)


def _is_there(disk: Disk, path: str, index: int) -> bool:
    return any(disk.stat(segment_path(path, index, suffix)) is not None for suffix in ("", ".z"))


def _xchannel(disk: Disk, log: LogReader, start: int) -> Iterator[LocalSegment]:
    sequences = discover(disk, log.path)
    durable = log.durable_position
    for sequence, later in pairwise(sequences):
        first, following = position_of(sequence, FIRST_SLOT), position_of(sequence + 1, FIRST_SLOT)
        if later != sequence + 1:
            raise CorruptionError(file_path(log.path, sequence + 1), 0, "missing, though a later file is there")
        if following <= start:
            continue
        if durable is not None and following > durable:
            return  # a power cut would take it back
        try:
            file = ChannelFile.open(disk, log.path, sequence)
        except FileNotFoundError:
            continue  # retention took it since the folder was listed
        try:
            if not file.is_sealed():
                return
        finally:
            file.close()
        path = file_path(log.path, sequence)
        yield LocalSegment(path, (os.path.basename(path),), "xch", first, following)


_SEALED: Final[dict[str, Callable[[Disk, LogReader, int], Iterator[LocalSegment]]]] = {
    "messagelog": _messagelog,
    "filechannel": _filechannel,
    "xchannel": _xchannel,
}


def note_removal(disk: Disk, log: LogReader, segment: LocalSegment, sidecar: Sidecar) -> None:
    """Have readers that stand at the end of a segment go on in the next one once this one is gone."""
    if log.format == "xchannel":
        note_end(disk, log.path, split_position(segment.first)[0], sidecar)


def check_format(format: str) -> None:
    """Refuse a log of a format that cannot be shipped."""
    if format not in _SEALED:
        raise UnsupportedError(f"a log of format {format} cannot be shipped")


def open_segment_start(disk: Disk, log: LogReader) -> int | None:
    """Return where the newest segment begins, the one that is being written; only that one is looked at."""
    if log.format == "messagelog":
        numbers = [number for name in disk.list(log.path) if (number := segment_number(name)) is not None]
        return max(numbers, default=None)
    if log.format == "xchannel":
        sequences = discover(disk, log.path)
        return position_of(sequences[-1], FIRST_SLOT) if sequences else None
    folder = ChannelFolder(disk, log.path)
    files = list(folder.files().values())
    return folder.begin(files[-1].index) if files else None


def log_files(disk: Disk, log: LogReader) -> Iterator[tuple[str, int]]:
    """Yield the files of a log with their sizes, sealed or not."""
    for file in log.stat()["files"]:
        if (found := disk.stat(file["file"])) is not None:
            yield file["file"], found.size


def oldest_time_ns(log: LogReader, start: int) -> int | None:
    """Return when the oldest record at or behind ``start`` was written, None when there is none or no time is kept."""
    try:
        batch = log.read(max(start, log.first_position), 1)
    except PenstockError:
        return None
    if not len(batch):
        return None
    return None if batch.timestamps is None else int(batch.timestamps[0])


def sync_segment(disk: Disk, segment: LocalSegment, *, folder: bool = True) -> None:
    """Return when the files of a segment survive a power cut, and with ``folder`` their names as well."""
    for path in segment.paths():
        with disk.open(path) as file:
            sync: Any = getattr(file, "sync", None)
            if sync is not None:
                sync()
    if folder:
        disk.sync_folder(folder_of(segment.path))


def survey(disk: Disk, log: LogReader, segment: LocalSegment) -> dict[str, Any]:
    """Return what an entry says of the records in a segment: how many, from when to when, where it can be cut."""
    at, records, times = segment.first, 0, []
    while at < segment.next:
        batch = log.read(at, READ_RECORDS)
        if not len(batch):
            break
        inside = int(batch.positions.searchsorted(segment.next))
        records += inside
        if batch.timestamps is not None and inside:
            times += [int(batch.timestamps[:inside].min()), int(batch.timestamps[:inside].max())]
        if inside < len(batch):
            break
        at = batch.next_position
    return {
        "records": records,
        "min_time_ns": min(times, default=None),
        "max_time_ns": max(times, default=None),
        "cuts": tuple(_cuts(disk, log, segment)),
    }


def _cuts(disk: Disk, log: LogReader, segment: LocalSegment) -> list[tuple[int, int]]:
    """Return where spans of a segment begin; a log is asked only about a long one, because it lists its folder."""
    if log.format == "messagelog":
        found = disk.stat(segment.path)
        if found is not None and found.size <= CUT_BYTES:
            return [(segment.first, found.size)]
    elif log.format == "filechannel" and segment.next - segment.first <= CUT_BYTES:
        return [(segment.first, segment.next - segment.first)]  # its positions count bytes
    return log.cut(segment.first, segment.next, CUT_BYTES) if isinstance(log, Cuttable) else [(segment.first, 0)]
