"""One segment, open for reading: its bytes, its index, and finding entries by number."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import ReadDisk, ReadFile, view_of
from penstock.kernel import Mapping
from penstock.log.messagelog.format import (
    COLUMNS,
    CRC_BYTES,
    ENTRY_OVERHEAD,
    HEAD,
    INDEX,
    INDEX_ENTRY,
    INDEX_EVERY,
    LOG,
    MAX_SEQ,
    EntryStop,
    segment_name,
    used_index,
)
from penstock.log.messagelog.resync import WINDOW_BYTES, Anchor, Damage, Finder

__all__ = ["FoundEntries", "Segment"]

STOPS: Final = tuple(EntryStop)
DAMAGED: Final = (EntryStop.SHORT, EntryStop.BAD_CRC)
NO_INDEX: Final = np.empty(0, np.uint8)
KEPT_WINDOW_BYTES: Final = 64 << 20
"""Up to this a window of an active segment is kept for the next look."""
TRIED_ANCHORS: Final = 8
READ_BYTES: Final = 4 << 20
"""How much of an active segment is read at a time."""
BELIEVED_BYTES: Final = 64 << 20
"""An entry of an active segment that claims to be longer is summed up before it is read in one piece."""
STALE_BYTES: Final = 256 << 10
"""How far an active segment grows before its index is read again."""
RELATIVE_MAX: Final = (1 << 32) - 1
INDEX_PIECE: Final = INDEX_ENTRY.itemsize << 16
INDEX_MOST: Final = 64 * INDEX_PIECE
"""Entries behind this much of an index are found from the last one before: 16 GiB of a segment further on."""


class FoundEntries(msgspec.Struct, frozen=True):
    """Entries of one segment: columns over ``data``, whose first byte is byte ``base`` of the file.

    The columns are the six that the kernel fills; numbers and times in them are the bits of unsigned ones.
    """

    path: str
    data: Any
    base: int
    count: int
    columns: NDArray[np.int64]
    last_seq: int
    passed: tuple[Damage, ...] = ()
    """Damaged places before these entries that hide numbers which were asked for."""

    @property
    def end(self) -> int:
        """The byte of the file behind the last entry."""
        return self.base + int(self.columns[4, self.count - 1]) + int(self.columns[5, self.count - 1]) + CRC_BYTES


class Segment:
    """One segment, open for reading.  Used under the lock of its reader."""

    def __init__(self, disk: ReadDisk, folder: str, number: int, *, sealed: bool) -> None:
        self._disk, self.number, self.sealed = disk, number, sealed
        self.path = self.log_path(folder, number)
        self._index_path = os.path.join(folder, segment_name(number) + INDEX)
        self._file = disk.open(self.path)
        stat = self._file.stat()
        self._identity, self._size = stat.identity, stat.size
        self._map: Mapping | None = None
        self._relatives, self._offsets = np.empty(0, np.uint32), np.empty(0, np.uint64)
        self._keys = array("I")  # the relative numbers once more, for a search that is quick for one number
        self._indexed_size = -1  # how long the segment was when its index was read
        self._last: tuple[int, int, int] | None = None  # (file size, last seq, offset behind it)
        self._hint = (0, 0)  # an entry with at least this number, if any, begins at this offset
        self._average = 256  # bytes of an entry, as far as is known
        self._stopped = (0, EntryStop.END)  # where the last scan stopped, in the file, and why
        self._damages: dict[int, Damage | None] = {}
        self._finder: Finder | None = None
        self._kept: tuple[int, bytes] = (0, b"")
        self._first: int | None = None  # the number of its first entry, -1 when that is damaged

    @staticmethod
    def log_path(folder: str, number: int) -> str:
        """Return the path of a segment's entries."""
        return os.path.join(folder, segment_name(number) + LOG)

    def look(self) -> bool:
        """Look how long the file is now; False when the name belongs to another file, or to none."""
        found = self._disk.stat(self.path)
        if found is None or found.identity != self._identity:
            return False
        self._resize(found.size)
        return True

    def close(self) -> None:
        """Let go of the file; what was mapped stays."""
        self._file.close()

    def find(self, want: int, limit: int) -> FoundEntries:
        """Return up to ``limit`` entries whose number is at least ``want``, in growing order, as of the last look."""
        seq, offset = self._hint
        going_on = seq == want and offset <= self._size  # most reads go on where they were
        start, trusted = (offset, True) if going_on else (self._known(want), False)
        if not going_on and 0 < seq < want and start < offset <= self._size:
            start, trusted = offset, True
        passed: list[Damage] = []
        while True:
            found = self._find_from(start, want, limit)
            at, stop = self._stopped
            if found.count or stop not in DAMAGED:
                break
            damage = self.damage_at(at, trusted=trusted)
            if damage is None and not trusted and start:
                start, trusted, passed = 0, True, []  # the index, or what it led to, lies
                continue
            if damage is None:
                break
            if damage.high is None or damage.high > want:
                passed.append(damage)
            if damage.high is None:
                break
            start = damage.resume
        return msgspec.structs.replace(found, passed=tuple(passed)) if passed else found

    def last_seq(self, *, fresh: bool = True) -> int:
        """Return the highest number of the last stretch of the segment, 0 when it has no entry.

        Without ``fresh`` what was found earlier will do for a sealed segment.
        """
        if not fresh and self.sealed and self._last is not None:
            return self._last[1]
        self._measure()
        if self._last is not None and self._last[0] == self._size:
            return self._last[1]
        _, last, start = self._last or (0, 0, self._known(MAX_SEQ))
        while last < MAX_SEQ:
            found = self._find_from(start, last + 1, 4096)
            if found.count:
                last, start = found.last_seq, found.end
                continue
            at, stop = self._stopped
            damage = self.damage_at(at) if stop in DAMAGED else None
            if damage is not None and damage.high is not None:
                start = damage.resume
            elif last or not start or stop not in DAMAGED:
                break
            else:
                start = 0  # the index led to a damaged entry
        self._last = (self._size, last, start)
        return last

    @property
    def size(self) -> int:
        """How long the file was at the last look."""
        return self._size

    def first_seq(self) -> int | None:
        """Return the number of the first entry; None where that is not whole, or not there yet."""
        if self._first is None and self._size:
            view, _ = self.window(0, READ_BYTES)
            columns = np.empty((COLUMNS, 1), np.int64)
            count = kernel.messagelog.scan(view, 0, 0, False, columns)[0]
            if not count and not self.sealed:
                return None
            self._first = (int(columns[0, 0]) & MAX_SEQ) if count else -1
        return None if self._first in (None, -1) else self._first

    # --- Damage

    def damage_at(self, start: int, *, trusted: bool = True) -> Damage | None:
        """Return the damage that begins at ``start``, where intact entries end; None where there is none to tell of.

        In the segment that is written to, bytes behind the last intact entry count only if an intact one follows
        them: before that they may be one that is being written.  Unless ``trusted``, also None where entries do not
        lead there from the beginning.
        """
        if start not in self._damages:
            low = self._number_before(start)
            if low is None and not trusted:
                return None
            if self._finder is None:
                self._finder = Finder(self, self._size, self.number)
            found = self._finder.damage(start, low or 0, self._anchors(start))
            self._damages[start] = None if found.high is None and not self.sealed else found
        return self._damages[start]

    def damages(self, start: int) -> Iterator[Damage]:
        """Yield what is damaged from ``start`` on, where intact entries end, to the end of the segment."""
        at = start
        while (damage := self.damage_at(at)) is not None:
            yield damage
            if damage.high is None:
                return
            at = damage.resume
            while True:
                self._find_from(at, MAX_SEQ, 1)
                at, stop = self._stopped
                if stop in DAMAGED:
                    break
                if at >= self._size:
                    return

    def window(self, offset: int, length: int) -> tuple[Any, int]:
        """Return bytes for whoever looks for the way back."""
        if self.sealed:
            return self._mapped(), offset
        length = min(length, self._size - offset)
        start, data = self._kept
        if not (start <= offset and offset + length <= start + len(data)):
            start, data = offset, self._file.read_at(offset, length)
            if length <= KEPT_WINDOW_BYTES:
                self._kept = start, data
        return data, offset - start

    def _number_before(self, start: int) -> int | None:
        """Return the number of the intact entry that ends at ``start``, 0 at the beginning; None if none ends there."""
        if start == 0:
            return 0
        resumed = max((d.resume for d in self._damages.values() if d and d.high and d.resume < start), default=0)
        self._load_index()
        place = int(np.searchsorted(self._offsets, np.uint64(start)))
        begins = [int(offset) for offset in self._offsets[max(place - TRIED_ANCHORS, 0) : place][::-1]]
        for begin in sorted({*(at for at in begins if at >= resumed), resumed}, reverse=True):
            at, last = begin, 0
            while at < start:
                view, offset = self.window(at, WINDOW_BYTES)
                part = memoryview(view)[offset : min(len(view), offset + start - at)]
                end, _, count, _, _, highest, *_ = kernel.messagelog.walk(part, self.number, NO_INDEX)
                if not count:
                    view, offset = self.window(at, start - at)  # longer than a window
                    part = memoryview(view)[offset : offset + start - at]
                    end, _, count, _, _, highest, *_ = kernel.messagelog.walk(part, self.number, NO_INDEX)
                    if not count:
                        break
                at, last = at + end, max(last, highest)
            if at == start:
                return last
        return None

    def _anchors(self, start: int) -> list[Anchor]:
        """Return what the index has behind ``start``, as far as it is worth trying."""
        self._load_index()
        place = int(np.searchsorted(self._offsets, np.uint64(start), "right"))
        part = slice(place, place + TRIED_ANCHORS)
        seqs = self._relatives[part].astype(np.uint64) + np.uint64(self.number)
        return list(zip(self._offsets[part].tolist(), seqs.tolist(), strict=True))

    def points(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], int]:
        """Return numbers and offsets as the index has them, growing, and the size of the segment.

        An index that lies has the wrong offsets for its numbers: good enough to share out work, not to read by.
        """
        self._measure()
        self._load_index()
        return self._relatives.astype(np.uint64) + np.uint64(self.number), self._offsets, self._size

    def scan_any(self, at: int, columns: NDArray[np.int64]) -> tuple[int, int, EntryStop]:
        """Fill columns with whatever entries are at ``at``, in any order; return (entries, where it stopped, why)."""
        view, offset = self.window(at, WINDOW_BYTES)
        count, end, reason, _ = kernel.messagelog.scan(view, offset, 0, False, columns)
        columns[2, :count] += at - offset
        stopped, stop = at + end - offset, EntryStop(reason)
        if stop is EntryStop.SHORT and not count and stopped + len(view) - offset < self._size:
            sender, payload = HEAD.unpack(self.head(at))[2:]
            needed = ENTRY_OVERHEAD + sender + payload
            if needed <= self._size - at and (needed <= BELIEVED_BYTES or self._sums_up(at, needed)):
                view, offset = self.window(at, needed)
                count, end, reason, _ = kernel.messagelog.scan(view, offset, 0, False, columns[:, :1].copy())
                return count, at + end - offset, EntryStop.LIMIT if count else EntryStop(reason)
        elif stop is EntryStop.SHORT and count and at + len(view) - offset < self._size:
            stop = EntryStop.LIMIT  # it may reach past the window: looked at again from its own beginning
        return count, stopped, stop

    def head(self, at: int) -> bytes:
        """Return the bytes of the head of an entry; fewer where the file ends."""
        return self._file.read_at(at, HEAD.size)

    def is_at_rest(self, at: int) -> bool:
        """Whether the bytes from ``at`` on are those that were looked at before."""
        view, offset = self.window(at, WINDOW_BYTES)
        rest = bytes(memoryview(view)[offset : offset + WINDOW_BYTES])
        return self._file.stat().size == self._size and self._file.read_at(at, len(rest)) == rest

    # --- Bytes

    def _measure(self) -> None:
        """Look how long the file is now.

        A sealed segment may change once more: if the one behind it never got an entry, a later writer removes that
        and the writer after it goes on in this one.
        """
        self._resize(self._file.stat().size)

    def _resize(self, size: int) -> None:
        if size == self._size:
            return
        if self.sealed or size < self._size:
            self._map, self._last, self._indexed_size = None, None, -1
            self._damages.clear()
        # What was not there to tell of may be by now.
        self._damages = {start: damage for start, damage in self._damages.items() if damage is not None}
        self._finder, self._kept, self._first = None, (0, b""), None
        self._size = size

    def _find_from(self, offset: int, want: int, limit: int) -> FoundEntries:
        """Scan on from ``offset`` until an entry is found or there is none."""
        if self.sealed:
            return self._scan(self._mapped(), 0, offset, want, limit)
        length = min(limit * self._average + 2 * INDEX_EVERY, READ_BYTES)  # the index leads to less than one before
        while True:
            data = self._file.read_at(offset, min(length, self._size - offset)) if offset < self._size else b""
            whole = offset + len(data) >= self._size
            found = self._scan(data, offset, 0, want, limit)
            at, stop = self._stopped
            if found.count or whole or stop is not EntryStop.SHORT:
                if found.count or stop is not EntryStop.END or whole:
                    return found
                offset, length = at, READ_BYTES
            elif at == offset:  # one entry is longer than what was read; its length says how much it needs
                _, _, sender, payload = HEAD.unpack_from(data.ljust(HEAD.size, b"\0"))
                needed = ENTRY_OVERHEAD + sender + payload
                if needed > self._size - offset or (needed > BELIEVED_BYTES and not self._sums_up(offset, needed)):
                    return found
                length = max(needed, length)
            else:
                offset, length = at, READ_BYTES

    def _sums_up(self, offset: int, length: int) -> bool:
        """Whether a very long entry is whole, found out a piece at a time: no file can claim the memory."""
        end, sum_ = offset + length - CRC_BYTES, 0
        while offset < end:
            piece = self._file.read_at(offset, min(READ_BYTES, end - offset))
            if not piece:
                return False
            sum_, offset = zlib.crc32(piece, sum_), offset + len(piece)
        return self._file.read_at(end, CRC_BYTES) == sum_.to_bytes(CRC_BYTES, "little")

    def _scan(self, data: Any, base: int, at: int, want: int, limit: int) -> FoundEntries:
        most = min(limit, (len(data) - at) // ENTRY_OVERHEAD + 1) if at < len(data) else 0
        columns = np.empty((COLUMNS, most), np.int64)
        count, end, reason, _ = kernel.messagelog.scan(data, at, want, True, columns) if most else (0, at, 1, 0)
        self._stopped = (base + end, STOPS[reason])
        last = 0
        if count:
            last = int(columns[0, count - 1]) & MAX_SEQ
            self._hint = (last + 1, base + end)
            if count >= 16:
                self._average = (end - int(columns[2, 0])) // count + 1
        return FoundEntries(self.path, data, base, count, columns if count == most else columns[:, :count], last)

    def _mapped(self) -> Mapping | bytes:
        if self._map is None:
            if not self._size:
                return b""
            self._map = view_of(self._file, 0, self._size)
        return self._map

    # --- The index

    def _known(self, want: int) -> int:
        """Return where the index has an entry that is not above ``want``; the scan finds out whether it is whole."""
        if want <= self.number:
            return 0
        self._load_index()
        place = bisect_right(self._keys, min(want - self.number, RELATIVE_MAX))
        for at in range(place - 1, max(place - 1 - TRIED_ANCHORS, 0), -1):
            offset = int(self._offsets[at])
            if offset + ENTRY_OVERHEAD > self._size:
                continue
            head = memoryview(self._mapped())[offset:] if self.sealed else self._file.read_at(offset, HEAD.size)
            if len(head) >= HEAD.size and HEAD.unpack_from(head)[0] == self.number + self._keys[at]:
                return offset
        return 0

    def _load_index(self) -> None:
        if self._indexed_size < 0 or (not self.sealed and self._size - self._indexed_size > STALE_BYTES):
            most = (self._size // INDEX_EVERY + 2) * INDEX_ENTRY.itemsize
            try:
                with self._disk.open(self._index_path) as file:
                    index = used_index(read_index(file, most))
            except OSError:
                index = used_index(b"")  # missing: read from the start of the segment
            self._relatives = np.ascontiguousarray(index["relative"])
            self._offsets = np.ascontiguousarray(index["offset"])
            self._keys = array("I", self._relatives.tobytes())
            self._indexed_size = self._size


def read_index(file: ReadFile, most: int) -> bytes:
    """Return what is used of an index, up to ``most`` bytes: an unused rest is zeros, and may be a hole of any size."""
    data = bytearray()
    while len(data) < min(most, INDEX_MOST):
        want = min(INDEX_PIECE, most - len(data))
        piece = file.read_at(len(data), want)
        data += piece
        if len(piece) < want or not any(piece[-INDEX_ENTRY.itemsize :]):
            break
    return bytes(data)
