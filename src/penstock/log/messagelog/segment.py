"""One segment, open for reading: its bytes, its index, and finding entries by number."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import ReadDisk
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
    Stop,
    segment_name,
    used_index,
)

__all__ = ["Found", "Segment"]

STOPS: Final = tuple(Stop)
DAMAGED: Final = (Stop.SHORT, Stop.BAD_CRC)
READ_BYTES: Final = 4 << 20
"""How much of an active segment is read at a time."""
STALE_BYTES: Final = 256 << 10
"""How far an active segment grows before its index is read again."""
RELATIVE_MAX: Final = (1 << 32) - 1


class Found(msgspec.Struct, frozen=True):
    """Entries of one segment: columns over ``data``, whose first byte is byte ``base`` of the file.

    The columns are the six that the kernel fills; numbers and times in them are the bits of unsigned ones.
    """

    path: str
    data: Any
    base: int
    count: int
    columns: NDArray[np.int64]
    last_seq: int
    damage: tuple[int, Stop] | None = None

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

    def find(self, want: int, limit: int) -> Found:
        """Return up to ``limit`` entries whose number is at least ``want``, in growing order, as of the last look."""
        seq, offset = self._hint
        if seq == want and offset <= self._size:  # most reads go on where they were
            found = self._find_from(offset, want, limit)
            if found.count or self._clean(found):
                return found
        known, relative = self._known(want)
        if 0 < seq < want and known < offset <= self._size:
            found = self._find_from(offset, want, limit)
            if found.count or self._clean(found):
                return found
        found = self._find_from(known, want, limit, relative)
        if not found.count and known and not self._clean(found):
            found = self._find_from(0, want, limit)  # the index lied
        return found

    def last_seq(self, *, fresh: bool = True) -> int:
        """Return the highest number of the last stretch of the segment, 0 when it has no entry.

        Without ``fresh`` what was found earlier will do for a sealed segment.
        """
        if not fresh and self.sealed and self._last is not None:
            return self._last[1]
        self._measure()
        if self._last is not None and self._last[0] == self._size:
            return self._last[1]
        relative = None
        if self._last is not None:
            _, last, start = self._last
        else:
            last, (start, relative) = 0, self._known(MAX_SEQ)
        while True:
            found = self._find_from(start, last + 1, 4096, relative)
            relative = None
            if not found.count:
                if last or not start:
                    break
                start = 0  # the index led to a damaged entry
                continue
            last, start = found.last_seq, found.end
            if last == MAX_SEQ:
                break
        self._last = (self._size, last, start)
        return last

    def points(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], int]:
        """Return numbers and offsets as the index has them, growing, and the size of the segment.

        An index that lies has the wrong offsets for its numbers: good enough to share out work, not to read by.
        """
        self._measure()
        self._load_index()
        return self._relatives.astype(np.uint64) + np.uint64(self.number), self._offsets, self._size

    # --- Bytes

    def _measure(self) -> None:
        """Look how long the file is now.

        A sealed segment may change once more: if the one behind it never got an entry, a later writer removes that
        and the writer after it goes on in this one.
        """
        self._resize(self._file.stat().size)

    def _resize(self, size: int) -> None:
        if self.sealed and size != self._size:
            self._map, self._last, self._indexed_size = None, None, -1
        self._size = size

    def _find_from(self, offset: int, want: int, limit: int, relative: int | None = None) -> Found:
        """Scan on from ``offset`` until an entry is found or there is none.

        ``relative`` is the number that the index has for the entry there; if it lies, the scan begins at the start.
        """
        if self.sealed:
            data = self._mapped()
            if relative is not None and not self._is_entry(data, offset, relative):
                offset = 0
            return self._scan(data, 0, offset, want, limit, whole=True)
        length = min(limit * self._average + 2 * INDEX_EVERY, READ_BYTES)  # the index leads to less than one before
        while True:
            data = self._file.read_at(offset, min(length, self._size - offset)) if offset < self._size else b""
            if relative is not None and not self._is_entry(data, 0, relative):
                offset, relative = 0, None
                continue
            relative = None
            whole = offset + len(data) >= self._size
            found = self._scan(data, offset, 0, want, limit, whole=whole)
            stop_at, stop = self._stopped
            if found.count or whole or stop is Stop.BAD_CRC:
                return found
            if stop_at == 0:  # one entry is longer than what was read; its length says how much it needs
                _, _, sender, payload = HEAD.unpack_from(data.ljust(HEAD.size, b"\0"))
                needed = ENTRY_OVERHEAD + sender + payload
                if needed > self._size - offset:
                    return found
                length = max(needed, length)
            else:
                offset += stop_at
                length = READ_BYTES

    def _scan(self, data: Any, base: int, at: int, want: int, limit: int, *, whole: bool) -> Found:
        most = min(limit, (len(data) - at) // ENTRY_OVERHEAD + 1) if at < len(data) else 0
        columns = np.empty((COLUMNS, most), np.int64)
        count, end, reason, _ = kernel.messagelog.scan(data, at, want, True, columns) if most else (0, at, 1, 0)
        stop = STOPS[reason]
        self._stopped = (end, stop)
        damage = (base + end, stop) if self.sealed and whole and reason in DAMAGED else None
        last = 0
        if count:
            last = int(columns[0, count - 1]) & MAX_SEQ
            self._hint = (last + 1, base + end)
            if count >= 16:
                self._average = (end - int(columns[2, 0])) // count + 1
        return Found(self.path, data, base, count, columns if count == most else columns[:, :count], last, damage)

    def _clean(self, found: Found) -> bool:
        """Whether a scan that found nothing came to the end of the intact entries by itself."""
        return found.damage is None and (self._stopped[1] is Stop.END or (not self.sealed and self._stopped[0] > 0))

    def _mapped(self) -> Mapping | bytes:
        if self._map is None:
            if not self._size:
                return b""
            self._map = self._file.map(0, self._size)
        return self._map

    # --- The index

    def _known(self, want: int) -> tuple[int, int | None]:
        """Return where the index has an entry that is not above ``want``, and its number less that of the segment."""
        if want <= self.number:
            return 0, None
        self._load_index()
        at = bisect_right(self._keys, min(want - self.number, RELATIVE_MAX)) - 1
        if at <= 0:
            return 0, None
        offset = int(self._offsets[at])
        return (0, None) if offset + ENTRY_OVERHEAD > self._size else (offset, self._keys[at])

    def _is_entry(self, data: Any, at: int, relative: int) -> bool:
        """Whether an entry of this number begins there; that it is whole is the scan's to find out."""
        return len(data) >= at + HEAD.size and HEAD.unpack_from(data, at)[0] == self.number + relative

    def _load_index(self) -> None:
        if self._indexed_size < 0 or (not self.sealed and self._size - self._indexed_size > STALE_BYTES):
            most = (self._size // INDEX_EVERY + 2) * INDEX_ENTRY.itemsize
            try:
                with self._disk.open(self._index_path) as file:
                    index = used_index(file.read_at(0, most))
            except OSError:
                index = used_index(b"")  # missing: read from the start of the segment
            self._relatives = np.ascontiguousarray(index["relative"])
            self._offsets = np.ascontiguousarray(index["offset"])
            self._keys = array("I", self._relatives.tobytes())
            self._indexed_size = self._size
