"""The files of a filechannel, byte for byte those of risingwavelabs/filechannel: shared by all of this folder.

    channel  := lock segment.N* penstock-*      a folder; N decimal from 0, no leading zeros, no holes
    segment.N    := header frame*               plain
    segment.N.z  := header stream               compressed: the stream unpacks to the frames of the plain file

    frame, big-endian, back to back:

     0          4          8
     +----------+----------+---- … ----+
     | length   | crc32    | payload   |
     +----------+----------+---- … ----+

    header, big-endian, 64 bytes:

     0    segment id    u32   the number in the file name; never checked by the original
     4    begin offset  u64   the position of the first frame
     12   end offset    u64   compressed only: the position behind the last frame
     20   method        u8    compressed only: 0 snappy framing format, 1 gzip
     21   zero                whatever a plain header holds here is carried over when it is compressed

A position is the count of frame bytes since the channel was first made; headers do not count, compression
changes nothing.  crc32 (zlib's) covers the payload alone, so eight zero bytes are a valid empty message.
A segment is sealed when one with a higher number exists; then its end is where that one begins.

Worked example and reasons: docs/formats/filechannel.md
"""

from __future__ import annotations

import enum
import re
import struct
from typing import Final, Literal

import msgspec

from penstock.errors import CorruptionError

__all__ = ["Header", "FrameStop", "Method", "segment_path", "segment_index", "HEADER_BYTES", "FRAME_HEAD", "LARGEST"]

PLAIN: Final = struct.Struct(">IQ")
PACKED: Final = struct.Struct(">IQQB")
HEADER_BYTES: Final = 64
FRAME_HEAD: Final = 8
LARGEST: Final = (1 << 32) - 1  # bytes of one payload
LAST_INDEX: Final = (1 << 32) - 1
LAST_POSITION: Final = (1 << 63) - 1
NAME: Final = re.compile(r"segment\.(0|[1-9][0-9]{0,9})(|\.z|\.z\.ing)", re.ASCII)

Method = Literal["snappy", "gzip"]
METHODS: Final[tuple[Method, ...]] = ("snappy", "gzip")  # their numbers are on disk: add, never renumber


class FrameStop(enum.IntEnum):
    """Why a scan over frames stopped: the numbers of kernel/filechannel.pyx and its twin."""

    LIMIT = 0
    END = 1
    SHORT = 2
    BAD_CRC = 3


class Header(msgspec.Struct, frozen=True):
    """What the first 64 bytes of a segment say; ``end`` and ``method`` are None in a plain one.

    >>> Header(3, 3003).encode().hex(" ")[:35]
    '00 00 00 03 00 00 00 00 00 00 0b bb'
    >>> Header(3, 3003, 5000, "gzip").encode()[:21].hex()
    '000000030000000000000bbb000000000000138801'
    """

    index: int
    begin: int
    end: int | None = None
    method: Method | None = None

    def encode(self, rest: bytes = b"") -> bytes:
        """Return the 64 bytes; ``rest`` fills them from byte 12 (plain) or 21 (compressed)."""
        if self.end is None or self.method is None:
            head = PLAIN.pack(self.index, self.begin)
        else:
            head = PACKED.pack(self.index, self.begin, self.end, METHODS.index(self.method))
        return (head + rest).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]

    @classmethod
    def decode(cls, path: str, data: bytes, *, packed: bool) -> Header:
        """Read the header of a segment; CorruptionError when it cannot be one."""
        if len(data) < HEADER_BYTES:
            raise CorruptionError(path, len(data), "the file ends inside the segment header")
        index, begin = PLAIN.unpack_from(data)
        if not packed:
            end, method = None, None
        else:
            _, _, end, number = PACKED.unpack_from(data)
            if number >= len(METHODS):
                raise CorruptionError(path, 20, f"compression method {number} is not known")
            method = METHODS[number]
            if not begin <= end <= LAST_POSITION:
                raise CorruptionError(path, 12, f"the segment ends at {end}, before it begins at {begin}")
        if begin > LAST_POSITION:
            raise CorruptionError(path, 4, f"begin offset {begin} is past what a position holds")
        return cls(index, begin, end, method)

    def misplaced(self, path: str) -> CorruptionError:
        """Return what to say of a header that is in the file of another segment."""
        reason = f"the header is that of segment {self.index}: another segment's file, or zeros"
        return CorruptionError(path, 0, reason)


def segment_path(folder: str, index: int, suffix: str = "") -> str:
    """Return the path of a segment.

    >>> segment_path("jobs", 7), segment_path("jobs", 7, ".z")
    ('jobs/segment.7', 'jobs/segment.7.z')
    """
    return f"{folder}/segment.{index}{suffix}"


def segment_index(name: str) -> tuple[int, str] | None:
    """Return (index, suffix) of a segment's name, or None for every other name.

    >>> [segment_index(n) for n in ("segment.1", "segment.2.z.ing", "segment.3.z", "unknown", "segment.007")]
    [(1, ''), (2, '.z.ing'), (3, '.z'), None, None]
    """
    match = NAME.fullmatch(name)
    if match is None or int(match[1]) > LAST_INDEX:
        return None
    return int(match[1]), match[2]
