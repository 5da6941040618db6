"""The true end of a message whose length is wrong, proven by its own checksum.

A frame is length, checksum, payload.  If only the length was damaged, the checksum says which of all ends is the true
one: that up to which the bytes sum up to it.  An end found in this way is right but for one case in four billion, also
where payloads hold frames themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.log.filechannel.format import FRAME_HEAD
from penstock.log.filechannel.sources import OpenSegment

__all__ = ["proven_ends"]

PIECE_BYTES: Final = 1 << 20


def proven_ends(source: OpenSegment, position: int, end: int, most: int) -> Iterator[int]:
    """Yield the positions, up to ``most`` bytes on, where the message at ``position`` ends by its checksum.

    Only those are tried where another frame can begin, or the segment ends.
    """
    buffer, start, size = source.window(position, FRAME_HEAD, end)
    if size < FRAME_HEAD:
        return
    wanted = int.from_bytes(memoryview(buffer)[start + 4 : start + FRAME_HEAD], "big")
    at, sum_ = position + FRAME_HEAD, 0
    stop = min(end, at + most)
    while at <= stop:
        want = min(PIECE_BYTES, stop - at)
        buffer, start, size = source.window(at, want + FRAME_HEAD, end)
        view = memoryview(buffer)[start : start + min(size, want + FRAME_HEAD)]
        piece = min(want, len(view))
        tried = 0
        for candidate in _frame_starts(view, piece, end - at):
            sum_, tried = zlib.crc32(view[tried:candidate], sum_), candidate
            if sum_ == wanted and at + candidate > position + FRAME_HEAD:
                yield at + candidate
        sum_ = zlib.crc32(view[tried:piece], sum_)
        at += piece
        if not piece:
            break
    if at == end and sum_ == wanted and end > position + FRAME_HEAD:
        yield end


def _frame_starts(view: memoryview, piece: int, room: int) -> list[int]:
    """Return the offsets below ``piece`` where the length of a message lies that fits and is not 0."""
    data = np.frombuffer(view, np.uint8)
    count = min(piece, len(data) - 3)
    if count <= 0:
        return []
    lengths = np.zeros(count, np.int64)
    for byte in range(4):
        lengths = lengths << 8 | data[byte : byte + count]
    offsets = np.flatnonzero((lengths > 0) & (lengths + FRAME_HEAD <= room - np.arange(count)))
    found: list[int] = offsets.tolist()
    return found
