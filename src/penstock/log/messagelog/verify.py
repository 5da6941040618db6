"""What is wrong with a message log: every entry, every index, every number."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from penstock import kernel
from penstock.disk import ReadDisk, ReadFile
from penstock.log.messagelog.format import (
    COLUMNS,
    ENTRY_OVERHEAD,
    HEAD,
    INDEX,
    INDEX_ENTRY,
    LOG,
    Stop,
    index_problem,
    segment_name,
    used_index,
)
from penstock.log.messagelog.recover import walk_segment
from penstock.types import Problem

__all__ = ["verify_segments"]

BATCH = 65_536
NEAR = 1 << 20
ALL = (1 << 64) - 1


def verify_segments(disk: ReadDisk, folder: str, numbers: list[int]) -> Iterator[Problem]:
    """Yield the problems of the segments with these numbers, in order."""
    last = 0
    for place, number in enumerate(numbers):
        path = os.path.join(folder, segment_name(number) + LOG)
        try:
            with disk.open(path) as file:
                size = file.stat().size
                active = place == len(numbers) - 1
                data: object = b"" if not size else file.map(0, size) if not active else file.read_at(0, size)
                found = _Segment(path, number, data, last)
                yield from found.entries()
                yield from found.end(file, active=active)
                yield from _verify_index(disk, folder, number, data, found.stop_at, active=active)
                last = max(last, found.last)
        except FileNotFoundError:
            continue  # retention was faster
        except OSError as exc:
            yield Problem(path, 0, f"cannot be read: {exc}")


class _Segment:
    """The walk over one segment."""

    def __init__(self, path: str, number: int, data: object, last: int) -> None:
        self.path, self.number, self.data, self.last = path, number, data, last
        self.stop_at, self.stop = 0, Stop.END

    def entries(self) -> Iterator[Problem]:
        """Yield what is wrong with the numbers, up to the first damaged entry."""
        columns = np.empty((COLUMNS, BATCH), np.int64)
        while True:
            count, self.stop_at, stop, _ = kernel.messagelog.scan(self.data, self.stop_at, 0, False, columns)
            self.stop = Stop(stop)
            yield from self._numbers(columns[0, :count].view(np.uint64), columns[2, :count] - HEAD.size)
            if stop != Stop.LIMIT or not count:
                return

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

    def end(self, file: ReadFile, *, active: bool) -> Iterator[Problem]:
        """Yield what is wrong where the intact entries end."""
        if self.stop is Stop.END:
            return
        view = memoryview(self.data)  # type: ignore[arg-type]
        rest = len(view) - self.stop_at
        if active:
            again = file.read_at(self.stop_at, rest)
            if file.stat().size != len(view) or again != view[self.stop_at :]:
                return  # its writer is at work
        if self.stop is Stop.BAD_CRC:
            reason = "the checksum of the entry does not match"
        elif rest < ENTRY_OVERHEAD:
            reason = f"{rest} bytes are too few for an entry"
        else:
            _, _, sender, payload = HEAD.unpack_from(view, self.stop_at)
            reason = f"the entry has {ENTRY_OVERHEAD + sender + payload} bytes, but only {rest} are left"
        following = kernel.messagelog.find_entry(self.data, self.stop_at + 1, self.last, min(self.last + NEAR, ALL))
        if following >= 0:
            reason += f"; the next intact entry is at byte {following}"
        yield Problem(self.path, self.stop_at, reason)


def _verify_index(
    disk: ReadDisk, folder: str, number: int, data: object, end: int, *, active: bool
) -> Iterator[Problem]:
    if not end:
        return  # no entry, no index
    path = os.path.join(folder, segment_name(number) + INDEX)
    try:
        with disk.open(path) as file:
            stored = file.read_at(0, file.stat().size)
    except FileNotFoundError:
        yield Problem(path, 0, "missing; reads begin at the start of the segment until the next writer mends it")
        return
    true = walk_segment(memoryview(data)[:end], number).index  # type: ignore[arg-type]
    if active:  # it may be ahead of what was read, and is zero behind its last entry
        used = used_index(stored)
        stored = used[: int(np.searchsorted(used["offset"], end))].tobytes() or stored[: INDEX_ENTRY.itemsize]
    problem = index_problem(stored, true, end, max(len(stored), 1))
    if problem is not None:
        yield Problem(path, *problem)
