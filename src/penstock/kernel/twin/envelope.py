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


def _check(count: int, size: int, offsets: Spans, lengths: Spans, largest: int, what: str) -> None:
    if len(lengths) != len(offsets) or len(offsets) not in (1, count):
        raise ValueError("the columns differ in length")
    for index, (at, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        if at < 0 or length < 0 or at > size - length or length > largest:
            raise ValueError(f"{what} {index} has {length} bytes, or lies outside its buffer of {size} bytes")


def encode(
    ops: NDArray[np.uint8], flags: NDArray[np.uint16], times: NDArray[np.uint64], key_data: Any, key_offsets: Spans,
    key_lengths: Spans, header_data: Any, header_offsets: Spans, header_lengths: Spans, data: Any, offsets: Spans,
    lengths: Spans, out_offsets: Spans, out_lengths: Spans,
) -> bytes:  # fmt: skip
    """Return the envelopes one after another, and fill in where each is."""
    count = len(out_offsets)
    if len(out_lengths) != count or any(len(column) not in (1, count) for column in (ops, flags, times)):
        raise ValueError("the columns differ in length")
    columns = []
    for raw, starts, sizes, largest, what in (
        (key_data, key_offsets, key_lengths, 0xFFFFFFFF, "key"),
        (header_data, header_offsets, header_lengths, 0xFFFFFFFF, "headers"),
        (data, offsets, lengths, (1 << 63) - 1, "payload"),
    ):
        view = view_of(raw)
        _check(count, len(view), starts, sizes, largest, what)
        parts = [bytes(view[at : at + size]) for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        columns.append(parts * count if len(parts) == 1 and count != 1 else parts)
    heads = [np.broadcast_to(column, count).tolist() for column in (ops, flags, times)]
    records = [
        ENVELOPE.pack(1, op, flag, time, len(key), len(headers)) + key + headers + payload
        for op, flag, time, key, headers, payload in zip(*heads, *columns, strict=True)
    ]
    out_lengths[:] = np.fromiter(map(len, records), np.int64, count)
    out_offsets[:] = np.cumsum(out_lengths) - out_lengths
    return b"".join(records)


def split_headers(data: Any, offsets: Spans, lengths: Spans, starts: Spans, spans: Spans) -> tuple[int, int]:
    """Find the headers in runs of them; return (runs that are sound, headers seen)."""
    view, seen = view_of(data), 0
    if len(lengths) != len(offsets) or len(starts) != len(offsets) + 1 or spans.shape[1] != 4:
        raise ValueError("the columns differ in length")
    starts[0] = 0
    for index, (at, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        if at < 0 or length < 0 or at > len(view) - length:
            return index, seen
        stop = at + length
        while at < stop:
            if stop - at < 6:
                return index, seen
            (name,) = struct.unpack_from("<H", view, at)
            if name > stop - at - 6:
                return index, seen
            (value,) = struct.unpack_from("<I", view, at + 2 + name)
            if value > stop - at - 6 - name:
                return index, seen
            if seen < len(spans):
                spans[seen] = (at + 2, name, at + 6 + name, value)
            seen += 1
            at += 6 + name + value
        starts[index + 1] = seen
    return len(offsets), seen


def join_headers(
    starts: Spans, name_data: Any, name_offsets: Spans, name_lengths: Spans, value_data: Any, value_offsets: Spans,
    value_lengths: Spans, out_offsets: Spans, out_lengths: Spans,
) -> bytes:  # fmt: skip
    """Return runs of headers one after another, and where each is."""
    count, rows = len(out_offsets), len(name_offsets)
    if len(starts) != count + 1 or len(out_lengths) != count or len(value_offsets) != rows:
        raise ValueError("the columns differ in length")
    if starts[0] < 0 or starts[count] > rows:
        raise ValueError("the runs lie outside of the headers")
    if (np.diff(starts) < 0).any():
        raise ValueError("the runs overlap")
    names, values = view_of(name_data), view_of(value_data)
    _check(rows, len(names), name_offsets, name_lengths, 0xFFFF, "name")
    _check(rows, len(values), value_offsets, value_lengths, 0xFFFFFFFF, "value")
    out, bounds = bytearray(), starts.tolist()
    for index in range(count):
        out_offsets[index] = len(out)
        for row in range(bounds[index], bounds[index + 1]):
            name = names[int(name_offsets[row]) : int(name_offsets[row] + name_lengths[row])]
            value = values[int(value_offsets[row]) : int(value_offsets[row] + value_lengths[row])]
            out += struct.pack("<H", len(name)) + name + struct.pack("<I", len(value)) + value
        out_lengths[index] = len(out) - int(out_offsets[index])
    return bytes(out)
