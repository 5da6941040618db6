"""The twin of gather.pyx."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of

INLINE = 12

Spans = NDArray[np.int64]


def total_bytes(size: int, offsets: Spans, lengths: Spans) -> int:
    """Return how many bytes the spans hold, having checked that they lie within size."""
    if len(offsets) != len(lengths):
        raise ValueError("offsets and lengths differ in length")
    bad = (offsets < 0) | (lengths < 0) | (lengths > size) | (offsets > size - lengths)
    if bad.any():
        raise ValueError(f"span {int(bad.argmax())} lies outside its buffer of {size} bytes")
    return int(lengths.sum())


def gather(data: Any, offsets: Spans, lengths: Spans, out: NDArray[np.uint8], starts: Spans) -> None:
    """Copy the spans one after another into out; starts gets count + 1 offsets."""
    view = view_of(data)
    if total_bytes(len(view), offsets, lengths) > len(out) or len(starts) != len(offsets) + 1:
        raise ValueError("the output is too small")
    target, at = out.data, 0
    starts[0] = 0
    for index, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        target[at : at + length] = view[offset : offset + length]
        at += length
        starts[index + 1] = at


def to_bytes_list(data: Any, offsets: Spans, lengths: Spans) -> list[bytes]:
    """Return the spans as a list of bytes objects."""
    view = view_of(data)
    total_bytes(len(view), offsets, lengths)
    pairs = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return [bytes(view[offset : offset + length]) for offset, length in pairs]


def binary_views(data: Any, offsets: Spans, lengths: Spans, origin: int, out: NDArray[np.uint8]) -> None:
    """Write Arrow's 16-byte views; offsets in them count from origin."""
    view = view_of(data)
    total_bytes(len(view), offsets, lengths)
    if len(out) < 16 * len(offsets):
        raise ValueError("the output is too small")
    for index, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        entry = struct.pack("<i", length)
        if length <= INLINE:
            entry += bytes(view[offset : offset + length]).ljust(INLINE, b"\0")
        else:
            entry += bytes(view[offset : offset + 4]) + struct.pack("<ii", 0, offset - origin)
        out[index * 16 : index * 16 + 16] = np.frombuffer(entry, np.uint8)
