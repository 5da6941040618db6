"""One segment open for reading: mapped, read with pread, or unpacked.

How a segment is read follows from who may still change it.  The newest one can be truncated by recovery, so it is
read with pread into the batch's own bytes.  A sealed plain one is mapped.  A compressed one is unpacked into
the batch's own bytes.  Nobody meets SIGBUS.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, Protocol

from penstock.disk import ReadFile, view_of
from penstock.errors import CorruptionError
from penstock.log.filechannel.compress import Unpacker
from penstock.log.filechannel.format import FRAME_HEAD, HEADER_BYTES, Header

__all__ = ["BELIEVED_BYTES", "sums_up", "OpenSegment", "Live", "Mapped", "Packed"]

READ_BYTES: Final = 1 << 20
BELIEVED_BYTES: Final = 64 << 20
"""A message in a file that may be anything and claims to be longer is summed up before it is read in one piece."""


def sums_up(file: ReadFile, at: int, length: int) -> bool:
    """Whether a very long frame at a byte is whole, found out a piece at a time: no file can claim the memory."""
    end, sum_ = at + length, 0
    wanted = int.from_bytes(file.read_at(at + 4, 4), "big")
    at += FRAME_HEAD
    while at < end:
        piece = file.read_at(at, min(4 * READ_BYTES, end - at))
        if not piece:
            return False
        sum_, at = zlib.crc32(piece, sum_), at + len(piece)
    return sum_ == wanted


class OpenSegment(Protocol):
    """One open segment.

    ``window`` returns (buffer, offset of ``position`` in it, bytes that are good to look at from there): at
    least ``want`` of them unless the segment ends sooner.
    """

    path: str
    begin: int
    end: int | None
    """Where it ends, if its own header says so."""

    def window(self, position: int, want: int, bound: int | None) -> tuple[Any, int, int]:
        """Return bytes from ``position`` on, none of them at or past ``bound``."""

    def byte_of(self, position: int) -> int:
        """Return the byte of the file a position is at, or the nearest that can be named."""

    def close(self) -> None:
        """Let go of the file."""


class Live:
    """A plain segment that may still grow or be trimmed: read with pread."""

    end: int | None = None

    def __init__(self, file: ReadFile, header: Header) -> None:
        self.path, self.begin, self._file = file.path, header.begin, file

    def window(self, position: int, want: int, bound: int | None) -> tuple[Any, int, int]:
        """Return a copy of the bytes."""
        offset = self.byte_of(position)
        end = self._file.stat().size if bound is None else self.byte_of(bound)
        data = self._file.read_at(offset, max(0, min(want, end - offset)))
        return data, 0, len(data)

    def byte_of(self, position: int) -> int:
        """Return the byte of the file."""
        return HEADER_BYTES + position - self.begin

    def size(self) -> int:
        """Return the size of the file now."""
        return self._file.stat().size

    def sums_up(self, position: int, length: int) -> bool:
        """Whether a very long frame is whole."""
        return sums_up(self._file, self.byte_of(position), length)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Mapped:
    """A sealed plain segment, mapped whole."""

    end: int | None = None

    def __init__(self, file: ReadFile, header: Header) -> None:
        self.path, self.begin = file.path, header.begin
        self._map = view_of(file, 0, max(HEADER_BYTES, file.stat().size))
        self._file = file

    def window(self, position: int, want: int, bound: int | None) -> tuple[Any, int, int]:  # noqa: ARG002
        """Return the map: no copy, and as much as there is."""
        offset = self.byte_of(position)
        end = min(len(self._map), self._file.stat().size)  # behind a cut are zeros, and those are empty messages
        if bound is not None:
            end = min(end, self.byte_of(bound))
        return self._map, min(offset, end), max(0, end - offset)

    def check(self, end: int) -> None:
        """Raise CorruptionError if the file was cut before this byte while it was read."""
        size = self._file.stat().size
        if size < end:
            raise CorruptionError(self.path, size, "it was cut while it was read")

    def byte_of(self, position: int) -> int:
        """Return the byte of the file."""
        return HEADER_BYTES + position - self.begin

    def close(self) -> None:
        """Let go of the file; the map goes with its last view."""
        self._file.close()


class Packed:
    """A compressed segment, unpacked in order; going back begins anew."""

    def __init__(self, file: ReadFile, header: Header) -> None:
        self.path, self.begin, self.end = file.path, header.begin, header.end
        self._file, self._header = file, header
        self._rewind()

    def _rewind(self) -> None:
        self._unpacker = Unpacker(self._file, self._header)
        self._buffer, self._start = b"", self.begin

    def window(self, position: int, want: int, bound: int | None) -> tuple[Any, int, int]:
        """Return unpacked bytes; CorruptionError when the stream breaks at or before ``position``."""
        if position < self._start:
            self._rewind()
        while position + want > (end := self._start + len(self._buffer)):
            keep = max(position, self._start) if position < end else end
            more = self._unpacker.read(max(want, READ_BYTES))
            if not more:
                break
            self._buffer, self._start = self._buffer[keep - self._start :] + more, keep
        offset = position - self._start
        end = len(self._buffer) if bound is None else min(len(self._buffer), bound - self._start)
        return self._buffer, min(offset, end), max(0, end - offset)

    def byte_of(self, position: int) -> int:  # noqa: ARG002
        """Return the end of the header: a compressed byte has no position of its own."""
        return HEADER_BYTES

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
