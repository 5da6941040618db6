"""The twin of envelope.pyx."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of

ENVELOPE = struct.Struct("<BBHQII")  # version, op, flags, event time, key length, headers length

Spans = NDArray[np.int64]


def decode(
    data: Any,
    offsets: Spans,
    lengths: Spans,
    ops: NDArray[np.uint8],
    flags: NDArray[np.uint16],
    times: NDArray[np.uint64],
    spans: Spans,
) -> int:
    """Fill the envelope columns; return the index of the first that is none, or the count."""
    view = view_of(data)
    for index, (at, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        if at < 0 or length < ENVELOPE.size or at > len(view) - length:
            return index
        version, op, flag, time, key, headers = ENVELOPE.unpack_from(view, at)
        body = at + ENVELOPE.size
        if version != 1 or op > 2 or ENVELOPE.size + key + headers > length:
            return index
        ops[index], flags[index], times[index] = op, flag, time
        payload = length - ENVELOPE.size - key - headers
        spans[index] = (body, key, body + key, headers, body + key + headers, payload)
    return len(offsets)
