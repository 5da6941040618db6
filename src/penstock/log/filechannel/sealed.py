"""The sealed segments of a channel as its writer knows them: listed once, then kept up to date one at a time."""

from __future__ import annotations

from collections import deque

import msgspec

from penstock.disk import ReadDisk
from penstock.log.filechannel.format import segment_path
from penstock.log.filechannel.segments import Folder

__all__ = ["Sealed", "SealedSegment"]


class SealedSegment(msgspec.Struct):
    """A sealed segment: its number and that of the next, the bytes of its files, and where it ends once known."""

    index: int
    following: int
    bytes: int
    end: int | None = None


class Sealed:
    """The sealed segments, oldest first.  Used under the mutex of retention."""

    def __init__(self, disk: ReadDisk, folder: Folder) -> None:
        self._disk, self._folder = disk, folder
        self._segments: deque[SealedSegment] = deque()
        self._by_index: dict[int, SealedSegment] = {}
        self._newest: int | None = None
        self.bytes = 0
        """How many bytes all of them have."""

    def __len__(self) -> int:
        return len(self._segments)

    def load(self, newest: int) -> None:
        """List what is there below ``newest``, the segment that is written to."""
        self._segments.clear()
        self._by_index.clear()
        self.bytes, self._newest = 0, newest
        indexes = [index for index in self._folder.files() if index < newest]
        for place, index in enumerate(indexes):
            self._add(index, indexes[place + 1] if place + 1 < len(indexes) else newest)

    def grow(self, newest: int) -> None:
        """Take note of what was sealed since ``newest`` was another one."""
        if self._newest is None or newest < self._newest:
            self.load(newest)
            return
        while self._newest < newest:
            self._add(self._newest, self._newest + 1)
            self._newest += 1

    def oldest(self) -> SealedSegment | None:
        """Return the oldest one, with where it ends."""
        if not self._segments:
            return None
        oldest = self._segments[0]
        if oldest.end is None:  # asked for here, so that opening reads no header but the newest
            oldest.end = self._folder.begin(oldest.following)
        return oldest

    def drop_oldest(self) -> None:
        """Forget the oldest one, whose files are gone."""
        segment = self._segments.popleft()
        self._by_index.pop(segment.index, None)
        self.bytes -= segment.bytes

    def look_again(self, index: int) -> None:
        """Look how many bytes a segment has now."""
        segment = self._by_index.get(index)
        if segment is not None:
            self.bytes -= segment.bytes
            segment.bytes = self._size(index)
            self.bytes += segment.bytes

    def _add(self, index: int, following: int) -> None:
        size = self._size(index)
        if not size:
            return  # collected by another process
        segment = SealedSegment(index, following, size)
        self._segments.append(segment)
        self._by_index[index] = segment
        self.bytes += size

    def _size(self, index: int) -> int:
        stats = (self._disk.stat(segment_path(self._folder.path, index, suffix)) for suffix in ("", ".z"))
        return sum(found.size for found in stats if found is not None)
