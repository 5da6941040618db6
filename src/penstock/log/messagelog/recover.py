"""What a writer does before it writes: look at every segment, cut the torn tail, mend the indexes.

The rules are those of the original, with the same bytes as a result, except that nothing is thrown away in silence
(docs/decisions/040 to 043, 048): intact entries behind a damaged place stay where they are, and a segment that has such
a place is not written to again; what the original cuts or removes besides is set aside in a file that ends in
``.bad``, unless it is a torn last entry or nothing but zeros.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

import msgspec
import numpy as np

from penstock import kernel
from penstock.disk import Disk, File, save_atomically
from penstock.disk.aside import bad_path
from penstock.disk.sparse import copy_data, is_empty
from penstock.kernel import Mapping
from penstock.log.messagelog.format import (
    ENTRY_OVERHEAD,
    HEAD,
    INDEX,
    INDEX_ENTRY,
    INDEX_EVERY,
    LOG,
    MAX_SENDER_BYTES,
    EntryStop,
    Index,
    index_capacity,
    index_problem,
    segment_name,
    segment_number,
    stray_number,
    used_index,
)
from penstock.log.messagelog.options import MessageLogOptions
from penstock.log.messagelog.resync import NEAR, NO_INDEX, SUM_BYTES, Damage, describe, numbers_missing
from penstock.log.messagelog.segment import Segment
from penstock.metrics import REGISTRY
from penstock.types import Problem

__all__ = ["Recovery", "SegmentState", "recover", "set_aside_behind"]

logger = logging.getLogger(__name__)

TRUNCATIONS: Final = REGISTRY.counter(
    "message_log_sealed_segment_truncations", "sealed segments of message logs found to end before their file does"
)
SET_ASIDE: Final = REGISTRY.counter("message_log_bytes_set_aside", "bytes of message logs moved to .bad files")


BELIEVED_BYTES: Final = 1 << 30
"""A segment that claims to be longer is walked once more, to see how far its entries go."""
MOST_NOTES: Final = 100
"""How many damaged places of one segment are noted one by one."""


class SegmentState(msgspec.Struct):
    """What a writer knows of a segment: its number, its intact bytes and its highest seq."""

    number: int
    size: int
    last_seq: int


class WalkResult(msgspec.Struct, frozen=True):
    """What a walk over the bytes of a segment found; see kernel/messagelog.pyx."""

    end: int
    stop: int
    count: int
    first_seq: int
    last_seq: int
    highest_seq: int
    unordered: int
    sound_end: int
    since_index: int
    index: Index


class Recovery(msgspec.Struct):
    """What was found and mended: segments in order, whether the last is to be written on, and how."""

    segments: list[SegmentState]
    active: bool = False
    index_used: int = 0
    since_index: int = 0
    repairs: list[Problem] = msgspec.field(default_factory=list)
    emptied: int = 0
    """The number of a newest segment that was there and had no entry, 0 when there was none."""

    @property
    def last_seq(self) -> int:
        """The highest number in the log, 0 when it is empty."""
        return max((segment.last_seq for segment in self.segments), default=0)


def walk_segment(data: Mapping | bytes | memoryview, number: int) -> WalkResult:
    """Walk over the bytes of a segment.

    >>> walk_segment(kernel.messagelog.encode_one(1, 0, b"", b"hello"), 1).count
    1
    """
    indexed = len(data)
    if indexed > BELIEVED_BYTES:  # a file can claim a terabyte that it does not hold: room for what is there
        indexed = kernel.messagelog.walk(data, number, NO_INDEX)[0]
    index = np.zeros((indexed // INDEX_EVERY + 2) * INDEX_ENTRY.itemsize, np.uint8)
    found = kernel.messagelog.walk(data, number, index)
    return WalkResult(*found[:-1], index.view(INDEX_ENTRY)[: found[-1]])


def map_whole(file: File, size: int) -> Mapping | bytes:
    """Return all bytes of a file that only this process may change."""
    return file.map(0, size) if size else b""


def recover(disk: Disk, folder: str, options: MessageLogOptions, durable: int = 0) -> Recovery:
    """Make a log ready to be written on; the caller holds its lock.  Below ``durable`` every entry was synced."""
    return _Recoverer(disk, folder, options, durable).run()


def set_aside_behind(disk: Disk, folder: str, missing: int) -> None:
    """Set aside every byte behind the hole that begins with number ``missing``; the caller holds the lock."""
    numbers = sorted(number for number in map(segment_number, disk.list(folder)) if number is not None)
    for number in reversed(numbers):
        path = os.path.join(folder, segment_name(number) + LOG)
        if number > missing:
            target = bad_path(disk, path)
            with contextlib.suppress(FileNotFoundError):
                disk.remove(os.path.join(folder, segment_name(number) + INDEX))
            disk.rename(path, target)
            logger.warning("%s: behind a hole that a power cut left; set aside as %s", path, os.path.basename(target))
            continue
        with disk.modify(path) as file:
            size = file.stat().size
            segment = Segment(disk, folder, number, sealed=True)
            try:
                walk = walk_segment(map_whole(file, size), number)
                damages = segment.damages(walk.end) if walk.end < size else iter(())
                hole = next((place for place in damages if (place.high or 0) > missing), None)
            finally:
                segment.close()
            if hole is not None:
                target = bad_path(disk, f"{path}.{hole.start}")
                _save_rest(disk, target, file, hole.start)
                file.truncate(hole.start)
                file.sync()
                what = "a power cut left a hole here; what lies behind it was set aside in"
                logger.warning("%s at byte %d: %s %s", path, hole.start, what, os.path.basename(target))
        break
    disk.sync_folder(folder)


def _save_rest(disk: Disk, target: str, file: File, offset: int) -> None:
    """Copy what a file has from ``offset`` on to a file of its own, whole or not at all."""
    temporary = target + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        disk.remove(temporary)
    with disk.create(temporary) as copy:
        copy_data(file, offset, file.stat().size, copy)
        copy.sync()
    disk.rename(temporary, target)
    disk.sync_folder(os.path.dirname(target))


class _Recoverer:
    def __init__(self, disk: Disk, folder: str, options: MessageLogOptions, durable: int) -> None:
        self._disk, self._folder, self._options, self._durable = disk, folder, options, durable
        self._capacity = index_capacity(options.segment_bytes)
        self._result = Recovery([])

    def run(self) -> Recovery:
        names = self._disk.list(self._folder)
        numbers = sorted(n for n in map(segment_number, names) if n is not None)
        strays = [n for n in map(stray_number, names) if n is not None]
        last = max([*numbers, *strays], default=None)
        for place, number in enumerate(numbers):
            path = self._path(number, LOG)
            found = self._disk.stat(path)
            following = numbers[place + 1] if place + 1 < len(numbers) else None
            if found is None or found.is_folder:
                logger.warning("%s: not a file that can be read, passed over", path)
            elif found.size == 0 and following is None:
                self._result.emptied = number
                if self._result.segments or number <= max(1, self._durable):
                    self._remove(number)  # else only its name tells which numbers were given out
            elif found.size == 0:
                self._keep_lost(number, 0, following, "the segment is empty, but another follows")
            else:
                # of two files with the highest number the stray one does not count
                self._segment(number, found.size, following, active=number == last)
        return self._result

    def _segment(self, number: int, size: int, following: int | None, *, active: bool) -> None:
        path = self._path(number, LOG)
        with self._disk.modify(path) as file:
            data = map_whole(file, size)
            walk = walk_segment(data, number)
            if walk.end < size and self._keep_damaged(number, size, walk, following, active=active):
                return
            if active and 0 < walk.sound_end < walk.end:  # the original would remove all of it
                walk = walk_segment(memoryview(data)[: walk.sound_end], number)
            if walk.count == 0 or walk.sound_end == 0:
                if following is None:
                    self._set_aside_whole(number, file, data, walk)
                else:
                    self._keep_lost(number, size, following, "no entry of a sealed segment is intact")
                return
            if walk.unordered:
                self._note(path, 0, f"{walk.unordered} entries are not above an earlier one and are passed over")
            if walk.end < size:
                self._short(number, file, data, walk, following, active=active)
        state = SegmentState(number, walk.end, walk.highest_seq)
        self._result.segments.append(state)
        if active:
            self._index_active(number, walk)
        else:
            self._index_sealed(number, walk)

    def _keep_damaged(self, number: int, size: int, walk: WalkResult, following: int | None, *, active: bool) -> bool:
        """Leave a segment as it is whose damage intact entries follow; False when there are none.

        It is not written to again: the next entry begins another segment.
        """
        segment = Segment(self._disk, self._folder, number, sealed=True)
        try:
            damages = list(segment.damages(walk.end))
            if all(damage.high is None for damage in damages):
                return False
            last = segment.last_seq()
        finally:
            segment.close()
        TRUNCATIONS.add()
        for damage in damages[:MOST_NOTES]:
            problem = describe(segment.path, damage, following)
            self._note(problem.file, problem.byte, problem.reason)
        if active:
            self._seal_index(number)
        self._result.segments.append(SegmentState(number, size, last))
        return True

    def _keep_lost(self, number: int, size: int, following: int | None, reason: str) -> None:
        """Leave a sealed segment as it is that has no intact entry: its numbers are missing, and readers say so."""
        last = number - 1 if following is None else following - 1
        self._note(self._path(number, LOG), 0, f"{reason}; {numbers_missing(number, last)}")
        self._result.segments.append(SegmentState(number, size, last))

    def _seal_index(self, number: int) -> None:
        """Cut the index of a segment that is written to no more."""
        path = self._path(number, INDEX)
        used = len(used_index(self._read(path, self._capacity))) * INDEX_ENTRY.itemsize
        with contextlib.suppress(FileNotFoundError), self._disk.modify(path) as file:
            file.truncate(used)

    def _short(
        self, number: int, file: File, data: Mapping | bytes, walk: WalkResult, following: int | None, *, active: bool
    ) -> None:
        """Deal with bytes behind the last intact entry."""
        path = self._path(number, LOG)
        if not active:
            TRUNCATIONS.add()
            damage = Damage(walk.end, EntryStop(walk.stop), len(data), walk.highest_seq, None)
            self._note(path, walk.end, describe(path, damage, following).reason)
            return
        if self._worth_keeping(file, data, walk):
            kept = self._set_aside(number, file, walk.end)
            SET_ASIDE.add(len(data) - walk.end)
            self._note(path, walk.end, f"damaged from here on; {len(data) - walk.end} bytes were set aside in {kept}")
        else:
            logger.info("%s: a torn tail of %d bytes was cut", path, len(data) - walk.end)
        file.truncate(walk.end)
        file.sync()

    def _worth_keeping(self, file: File, data: Mapping | bytes, walk: WalkResult) -> bool:
        """Whether a tail is more than one torn entry, or zeros."""
        view = memoryview(data)
        tail = view[walk.end :]
        if self._durable > walk.highest_seq + 1:
            return True  # it was whole once, and synced
        if is_empty(file, walk.end, len(data)):
            return False
        if walk.stop != EntryStop.SHORT:
            return True
        if len(tail) >= HEAD.size:
            seq, _, sender, payload = HEAD.unpack_from(tail)
            if seq <= walk.highest_seq or sender > MAX_SENDER_BYTES or payload > self._options.max_payload_bytes:
                return True
        if len(tail) > ENTRY_OVERHEAD + MAX_SENDER_BYTES + self._options.max_payload_bytes:
            return True
        low = walk.highest_seq
        return kernel.messagelog.find_entry(data, walk.end + 1, low, low + NEAR, SUM_BYTES)[0] != -1

    def _set_aside_whole(self, number: int, file: File, data: Mapping | bytes, walk: WalkResult) -> None:
        path = self._path(number, LOG)
        if walk.count or self._worth_keeping(file, data, walk):
            target = self._bad_path(number, 0)
            self._disk.rename(path, target)
            SET_ASIDE.add(len(data))
            self._note(path, 0, f"no entry is intact; the file was set aside as {os.path.basename(target)}")
        self._remove(number)
        self._disk.sync_folder(self._folder)

    def _set_aside(self, number: int, file: File, offset: int) -> str:
        """Save the rest of a file in one of its own before it is cut; return its name."""
        target = self._bad_path(number, offset)
        _save_rest(self._disk, target, file, offset)
        return os.path.basename(target)

    def _bad_path(self, number: int, offset: int) -> str:
        return bad_path(self._disk, f"{self._path(number, LOG)}.{offset}")

    # --- Indexes

    def _index_active(self, number: int, walk: WalkResult) -> None:
        data = walk.index.tobytes()
        full = data.ljust(self._capacity, b"\0")
        path = self._path(number, INDEX)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._path(number, ".tmp"))
        if self._read(path, len(full)) != full:
            self._rebuild(number, data)
            try:
                with self._disk.modify(path) as file:
                    file.truncate(len(full))
            except FileNotFoundError:
                pass  # the rebuild failed: the writer makes an empty one
        self._result.active = True
        self._result.index_used = len(data)
        self._result.since_index = walk.since_index

    def _index_sealed(self, number: int, walk: WalkResult) -> None:
        path = self._path(number, INDEX)
        problem = index_problem(self._read(path, self._capacity), walk.index, walk.end, self._capacity)
        if problem is not None:
            if self._disk.stat(path) is None:
                logger.info("%s: is not there; it is made", path)
            else:
                logger.warning("%s at byte %d: %s; it is rebuilt", path, *problem)
            self._rebuild(number, walk.index.tobytes())

    def _rebuild(self, number: int, data: bytes) -> None:
        path, temporary = self._path(number, INDEX), self._path(number, ".tmp")
        try:
            save_atomically(self._disk, path, data, temporary=temporary)
        except OSError as exc:
            logger.warning("%s: cannot be rebuilt (%s); reads do without it", path, exc)
            with contextlib.suppress(OSError):
                self._disk.remove(path)

    def _read(self, path: str, most: int) -> bytes:
        """Return a file's bytes, one more than ``most`` at the most; none when it is missing."""
        try:
            with self._disk.open(path) as file:
                return file.read_at(0, most + 1)
        except FileNotFoundError:
            return b""

    # --- Small things

    def _remove(self, number: int) -> None:
        for ending in (LOG, INDEX):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self._path(number, ending))

    def _note(self, path: str, byte: int, reason: str) -> None:
        problem = Problem(path, byte, reason)
        logger.warning("%s", problem)
        self._result.repairs.append(problem)

    def _path(self, number: int, ending: str) -> str:
        return os.path.join(self._folder, segment_name(number) + ending)
