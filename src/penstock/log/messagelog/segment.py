"""One segment, open for reading: its bytes, its index, and finding entries by number."""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import ReadDisk
from penstock.kernel import Mapping
from penstock.log.messagelog.format import (
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

READ_BYTES: Final = 4 << 20
"""How much of an active segment is read at a time."""
STALE_BYTES: Final = 256 << 10
"""How far an active segment grows before its index is read again."""


class Found(msgspec.Struct, frozen=True):
    """Entries of one segment: columns over ``data``, whose first byte is byte ``base`` of the file."""

    path: str
    data: Any
    base: int
    seqs: NDArray[np.uint64]
    times: NDArray[np.uint64]
    spans: NDArray[np.int64]
    damage: tuple[int, Stop] | None = None


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
        self._indexed_size = -1  # how long the segment was when its index was read
        self._last: tuple[int, int, int] | None = None  # (file size, last seq, offset behind it)
        self._hint = (0, 0)  # an entry with at least this number, if any, begins at this offset

    @staticmethod
    def log_path(folder: str, number: int) -> str:
        """Return the path of a segment's entries."""
        return os.path.join(folder, segment_name(number) + LOG)

    def replaced(self) -> bool:
        """Whether the name now belongs to another file."""
        found = self._disk.stat(self.path)
        return found is None or found.identity != self._identity

    def close(self) -> None:
        """Let go of the file; what was mapped stays."""
        self._file.close()

    def find(self, want: int, limit: int) -> Found:
        """Return up to ``limit`` entries whose number is at least ``want``, in growing order."""
        self._measure()
        seq, offset = self._hint
        if seq and seq <= want and offset <= self._size:
            known = self._known(want)
            start = max(offset, known)
            found = self._find_from(start, want, limit)
            if len(found.seqs) or self._clean(found):
                return found
        known = self._known(want)
        found = self._find_from(known, want, limit)
        if not len(found.seqs) and known and not self._clean(found):
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
        last, start = (self._last[1], self._last[2]) if self._last is not None else (0, self._known(MAX_SEQ))
        while True:
            found = self._find_from(start, last + 1, 4096)
            if not len(found.seqs):
                if last or not start:
                    break
                start = 0  # the index led to a damaged entry
                continue
            if int(found.seqs[-1]) == MAX_SEQ:
                last, start = MAX_SEQ, self._behind(found)
                break
            last = int(found.seqs[-1])
            start = self._behind(found)
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
        size = self._file.stat().size
        if self.sealed and size != self._size:
            self._map, self._last, self._indexed_size = None, None, -1
        self._size = size

    def _find_from(self, offset: int, want: int, limit: int) -> Found:
        """Scan on from ``offset`` until an entry is found or there is none."""
        if self.sealed:
            return self._scan(self._mapped(), 0, offset, want, limit, whole=True)
        length = min(max(limit * 256, 16 << 10), READ_BYTES)
        while True:
            data = self._file.read_at(offset, min(length, self._size - offset)) if offset < self._size else b""
            whole = offset + len(data) >= self._size
            found = self._scan(data, offset, 0, want, limit, whole=whole)
            stop_at, stop = self._stopped
            if len(found.seqs) or whole or stop is Stop.BAD_CRC:
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
        seqs, times = np.empty(most, np.uint64), np.empty(most, np.uint64)
        spans = np.empty((4, most), np.int64)
        count, end, stop, _ = (
            kernel.messagelog.scan(data, at, want, True, seqs, times, spans) if most else (0, at, 1, 0)
        )
        self._stopped = (end, Stop(stop))
        if count:
            self._hint = (int(seqs[count - 1]) + 1, base + end)
        damage = (base + end, Stop(stop)) if self.sealed and whole and stop in (Stop.SHORT, Stop.BAD_CRC) else None
        return Found(self.path, data, base, seqs[:count], times[:count], spans[:, :count], damage)

    def _clean(self, found: Found) -> bool:
        """Whether a scan that found nothing came to the end of the intact entries by itself."""
        return found.damage is None and (self._stopped[1] is Stop.END or (not self.sealed and self._stopped[0] > 0))

    def _behind(self, found: Found) -> int:
        index = len(found.seqs) - 1
        return found.base + int(found.spans[2, index]) + int(found.spans[3, index]) + 4

    def _mapped(self) -> Mapping | bytes:
        if self._map is None:
            if not self._size:
                return b""
            self._map = self._file.map(0, self._size)
        return self._map

    # --- The index

    def _known(self, want: int) -> int:
        """Return the offset of an intact entry that is not above ``want``, from the index if that tells the truth."""
        if want <= self.number:
            return 0
        self._load_index()
        relative = np.uint32(min(want - self.number, (1 << 32) - 1))
        at = int(self._relatives.searchsorted(relative, "right")) - 1
        if at <= 0:
            return 0
        offset = int(self._offsets[at])
        if offset + ENTRY_OVERHEAD > self._size:
            return 0
        if self.sealed:
            seq, _, sender, payload = HEAD.unpack_from(self._mapped(), offset)
        else:
            seq, _, sender, payload = HEAD.unpack(self._file.read_at(offset, HEAD.size).ljust(HEAD.size, b"\0"))
        if (seq - self.number) & 0xFFFFFFFF != int(self._relatives[at]) or not 0 < seq <= want:
            return 0
        if offset + ENTRY_OVERHEAD + sender + payload > self._size:
            return 0
        return offset

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
            self._indexed_size = self._size
