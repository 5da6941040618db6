"""Whatever a caller has many of, as columns the kernel appends: lists, Arrow arrays, batches."""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch
from penstock.errors import OptionsError

__all__ = ["Columns", "columns_of", "whole_numbers"]

WHOLE: Final = (int, np.integer)


class Columns(msgspec.Struct, frozen=True):
    """Payload spans over one buffer, with one kind and time for all or one for each."""

    data: Any
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    kinds: NDArray[np.uint16]
    timestamps: NDArray[np.uint64]


def columns_of(payloads: Any, kind: Any = 0, timestamp_ns: Any = None) -> Columns:
    """Return the columns of a Batch, an Arrow array of binary or string, or an iterable of bytes.

    >>> columns = columns_of([b"one", b"three"], kind=7, timestamp_ns=1)
    >>> columns.lengths.tolist(), columns.kinds.tolist()
    ([3, 5], [7])
    """
    if isinstance(payloads, Batch):
        if kind == 0 and payloads.kinds is not None:
            kind = payloads.kinds
        if timestamp_ns is None and payloads.timestamps is not None:
            timestamp_ns = payloads.timestamps
        spans = payloads.payloads
        data, offsets, lengths = payloads.buffer, spans.offsets, spans.lengths
    elif _is_arrow(payloads):
        data, offsets, lengths = _arrow_spans(payloads)
    else:
        chunks = payloads if isinstance(payloads, list) else list(payloads)
        if any(kind is not bytes for kind in set(map(type, chunks))):
            chunks = [bytes(memoryview(chunk)) for chunk in chunks]
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
        data, offsets = b"".join(chunks), np.cumsum(lengths) - lengths
    count = len(offsets)
    return Columns(
        memoryview(data).cast("B") if memoryview(data).nbytes else b"\0",
        offsets,
        lengths,
        _column(kind, np.uint16, "kind", count),
        _column(
            time.time_ns() if timestamp_ns is None else timestamp_ns,
            np.uint64,
            "timestamp_ns",
            count,
        ),
    )


def whole_numbers(name: str, value: Any) -> NDArray[Any]:
    """Return numbers as an array, times of numpy in nanoseconds; seconds as ``time.time()`` gives them are none.

    >>> whole_numbers("timestamp_ns", [5, 6]).tolist(), int(whole_numbers("timestamp_ns", np.datetime64(1, "s")))
    ([5, 6], 1000000000)
    """
    array = np.asarray(value)
    if array.dtype.kind == "M" and name == "timestamp_ns":
        times = array.astype("datetime64[ns]")
        if not np.array_equal(times.astype(array.dtype), array):  # NaT equals nothing
            raise OptionsError(f"{name}: holds a time that nanoseconds of 64 bits are too few for, or none (NaT)")
        array = times.astype(np.int64)
    if array.size and array.dtype.kind not in "iubO":
        raise TypeError(f"{name}: must be whole numbers, not {array.dtype}")
    if array.dtype.kind == "O" and (wrong := [each for each in array.flat if not isinstance(each, WHOLE)]):
        raise TypeError(f"{name}: must be whole numbers, not {type(wrong[0]).__name__}")
    return array


def _column(value: Any, dtype: type[np.generic], name: str, count: int) -> NDArray[Any]:
    array = np.atleast_1d(whole_numbers(name, value))
    if array.ndim != 1 or (array.size != 1 and array.size != count):
        raise OptionsError(f"{name} has {array.size} values for {count} records")
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        found = int(array.min()) if int(array.min()) < limits.min else int(array.max())
        raise OptionsError(f"{name}={found}: must be between {limits.min} and {limits.max}")
    return np.ascontiguousarray(array.astype(dtype))


def _is_arrow(payloads: Any) -> bool:
    pa = sys.modules.get("pyarrow")  # whoever has an Arrow array has imported it
    return pa is not None and isinstance(payloads, (pa.Array, pa.ChunkedArray))


def _arrow_spans(array: Any) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # combine_chunks keeps an empty one as it is
        array = pa.array([], array.type)
    if array.null_count:
        raise OptionsError("a record cannot be null: fill or drop the nulls of the Arrow array first")
    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        array = array.cast(pa.large_binary())
    elif pa.types.is_binary_view(kind) or pa.types.is_string_view(kind):
        array = array.cast(pa.large_binary() if pa.types.is_binary_view(kind) else pa.large_string())
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        width: type[np.signedinteger[Any]] = np.int32
    elif pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        width = np.int64
    else:
        raise OptionsError(f"an Arrow array of {kind} has no bytes to append: use binary or string")
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array):
        return b"\0", np.empty(0, np.int64), np.empty(0, np.int64)
    bounds = np.frombuffer(offsets_buffer, width)[array.offset : array.offset + len(array) + 1]
    bounds = bounds.astype(np.int64)
    return data_buffer or b"\0", bounds[:-1].copy(), np.diff(bounds)
