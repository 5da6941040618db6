"""The twin of filechannel.pyx."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import OptionsError
from penstock.kernel.twin.gather import total_bytes
from penstock.kernel.twin.maps import view_of

HEAD = struct.Struct(">II")
LARGEST = 0xFFFFFFFF
LIMIT, END, SHORT, BAD_CRC = range(4)

Int64 = NDArray[np.int64]


def encode_frame(payload: Any) -> bytes:
    """Return the frame of one payload."""
    data = bytes(memoryview(payload))
    if len(data) > LARGEST:
        raise OptionsError(f"a message of {len(data)} bytes is too large: a frame holds at most 4294967295")
    return HEAD.pack(len(data), zlib.crc32(data)) + data


def encode_list(payloads: list[bytes], ends: Int64) -> bytes:
    """Return the frames of all payloads in one run; ends gets where each one ends in it."""
    if len(ends) != len(payloads):
        raise ValueError("ends must have one place for each payload")
    frames = [encode_frame(payload) for payload in payloads]
    ends[:] = np.cumsum(np.fromiter(map(len, frames), np.int64, len(frames)))
    return b"".join(frames)


def encode_spans(data: Any, offsets: Int64, lengths: Int64, ends: Int64) -> bytes:
    """Return the frames of spans over one buffer; ends gets where each one ends."""
    if len(ends) != len(offsets):
        raise ValueError("offsets, lengths and ends differ in length")
    view = view_of(data)
    total_bytes(len(view), offsets, lengths)
    pairs = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return encode_list([bytes(view[offset : offset + length]) for offset, length in pairs], ends)


def scan(
    data: Any, start: int, stop: int, base: int, positions: Int64, offsets: Int64, lengths: Int64
) -> tuple[int, int, int]:
    """Walk the frames of data[start:stop], checking each; return (count, at, status)."""
    view = view_of(data)
    if not 0 <= start <= stop <= len(view):
        raise ValueError(f"cannot scan {start}..{stop} of {len(view)} bytes")
    if not len(positions) == len(offsets) == len(lengths):
        raise ValueError("positions, offsets and lengths differ in length")
    at, count = start, 0
    while at < stop:
        if stop - at < HEAD.size:
            return count, at, SHORT
        if count == len(positions):
            return count, at, LIMIT
        length, crc = HEAD.unpack_from(view, at)
        body = at + HEAD.size
        if length > stop - body:
            return count, at, SHORT
        if zlib.crc32(view[body : body + length]) != crc:
            return count, at, BAD_CRC
        positions[count], offsets[count], lengths[count] = base + at, body, length
        count += 1
        at = body + length
    return count, at, END


def hop(data: Any, start: int, stop: int, target: int) -> int:
    """Walk the frames of data[start:stop] by their lengths alone, to the first that begins at or behind target."""
    view = view_of(data)
    if not 0 <= start <= stop <= len(view):
        raise ValueError(f"cannot scan {start}..{stop} of {len(view)} bytes")
    at = start
    while at < target and stop - at >= HEAD.size:
        after = at + HEAD.size + int.from_bytes(view[at : at + 4], "big")
        if after > stop:
            break
        at = after
    return at
