"""What is wrong with a message log: every entry, every index, every number."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from penstock.disk import ReadDisk
from penstock.log.messagelog.format import (
    COLUMNS,
    ENTRY_OVERHEAD,
    HEAD,
    INDEX,
    INDEX_ENTRY,
    INDEX_EVERY,
    EntryStop,
    index_problem,
    segment_name,
    used_index,
)
from penstock.log.messagelog.recover import walk_segment
from penstock.log.messagelog.resync import describe, numbers_missing
from penstock.log.messagelog.segment import Segment
from penstock.types import Problem

__all__ = ["verify_segments"]

BATCH = 65_536
INDEXED_BYTES = 1 << 30
"""The index of a longer segment is not held against its entries."""


def verify_segments(disk: ReadDisk, folder: str, numbers: list[int]) -> Iterator[Problem]:
    """Yield the problems of the segments with these numbers, in order."""
    last = 0
    for place, number in enumerate(numbers):
        following = numbers[place + 1] if place + 1 < len(numbers) else None
        try:
            segment = Segment(disk, folder, number, sealed=following is not None)
        except FileNotFoundError:
            continue  # retention was faster
        except OSError as exc:
            yield Problem(Segment.log_path(folder, number), 0, f"cannot be read: {exc}")
            continue
        try:
            found = _Check(segment, following, last)
            yield from found.entries()
            yield from _verify_index(disk, folder, segment, found.intact)
            last = max(last, found.last)
        except OSError as exc:
            yield Problem(segment.path, 0, f"cannot be read: {exc}")
        finally:
            segment.close()


class _Check:
    """The walk over one segment."""

    def __init__(self, segment: Segment, following: int | None, last: int) -> None:
        self._segment, self._following, self.last = segment, following, last
        self.path, self.number = segment.path, segment.number
        self.intact: int | None = None
        """Where the entries from the first one on end."""

    def entries(self) -> Iterator[Problem]:
        """Yield what is wrong with entries and their numbers."""
        if self._following is not None and not self._segment.size:
            missing = numbers_missing(self.number, self._following - 1)
            yield Problem(self.path, 0, f"the segment is empty, but one for {self._following} follows; {missing}")
            self.last = max(self.last, self._following - 1)
        columns, at, size = np.empty((COLUMNS, BATCH), np.int64), 0, self._segment.size
        while at < size:
            count, after, stop = self._segment.scan_any(at, columns)
            yield from self._numbers(columns[0, :count].view(np.uint64), columns[2, :count] - HEAD.size)
            at = after
            if stop not in (EntryStop.SHORT, EntryStop.BAD_CRC):
                continue
            self.intact = at if self.intact is None else self.intact
            damage = self._segment.damage_at(at)
            if damage is None:
                yield from self._torn(at, stop)
                return
            yield describe(self.path, damage, self._following)
            if damage.high is None:
                self.last = max(self.last, (self._following or 1) - 1)
                return
            at, self.last = damage.resume, max(self.last, damage.high - 1)
        self.intact = at if self.intact is None else self.intact

    def _torn(self, at: int, stop: EntryStop) -> Iterator[Problem]:
        """Yield what is wrong behind the last entry of the log, unless its writer is at work there."""
        rest = self._segment.size - at
        head = bytes(self._segment.head(at))
        if not self._segment.is_at_rest(at):
            return
        if stop is EntryStop.BAD_CRC:
            reason = "the checksum of the entry does not match"
        elif rest < ENTRY_OVERHEAD:
            reason = f"{rest} bytes are too few for an entry"
        else:
            _, _, sender, payload = HEAD.unpack(head)
            reason = f"the entry has {ENTRY_OVERHEAD + sender + payload} bytes, but only {rest} are left"
        yield Problem(self.path, at, reason)

    def _numbers(
        self, seqs: np.ndarray[tuple[int], np.dtype[np.uint64]], offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Iterator[Problem]:
        if not len(seqs):
            return
        highest = np.maximum.accumulate(np.concatenate((np.array([self.last], np.uint64), seqs)))[:-1]
        odd = (seqs != highest + np.uint64(1)) | (seqs < np.uint64(self.number))
        for index in np.flatnonzero(odd).tolist():
            seq, before, byte = int(seqs[index]), int(highest[index]), int(offsets[index])
            if seq == 0:
                yield Problem(self.path, byte, "an entry has number 0, and numbers begin with 1")
            elif seq <= before:
                yield Problem(self.path, byte, f"entry {seq} is not above entry {before} before it")
            elif seq < self.number:
                yield Problem(self.path, byte, f"entry {seq} is below the number in the name of its file")
            elif before:
                missing = f"{before + 1} is" if seq == before + 2 else f"{before + 1} to {seq - 1} are"
                yield Problem(self.path, byte, f"a gap: {missing} missing")
        self.last = max(self.last, int(seqs.max()))


def _verify_index(disk: ReadDisk, folder: str, segment: Segment, end: int | None) -> Iterator[Problem]:
    if not end or end > INDEXED_BYTES:
        return  # no entry, no index
    path = os.path.join(folder, segment_name(segment.number) + INDEX)
    most = (segment.size // INDEX_EVERY + 2) * INDEX_ENTRY.itemsize
    try:
        with disk.open(path) as file:
            size = file.stat().size
            stored = file.read_at(0, min(size, most))
    except FileNotFoundError:
        yield Problem(path, 0, "missing; reads begin at the start of the segment until the next writer mends it")
        return
    view, offset = segment.window(0, end)
    true = walk_segment(memoryview(view)[offset : offset + end], segment.number).index
    if not segment.sealed or end < segment.size:  # it may be ahead of what was read, and zero behind its last entry
        used = used_index(stored)
        stored = used[: int(np.searchsorted(used["offset"], end))].tobytes() or stored[: INDEX_ENTRY.itemsize]
    elif size > len(stored):
        yield Problem(path, most, f"{size} bytes are more than the index of a segment of {segment.size} can have")
        return
    problem = index_problem(stored, true, end, max(len(stored), 1))
    if problem is not None:
        yield Problem(path, *problem)
