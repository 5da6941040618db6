"""Envelope v1: how records that have keys keep them.

    envelope, little-endian:

     0         1    2       4               12         16            20
     +---------+----+-------+---------------+----------+-------------+-----+---------+---------+
     | version | op | flags | event_time_ns | key_len  | headers_len | key | headers | payload |
     |  u8 = 1 | u8 |  u16  |      u64      |   u32    |     u32     |     |         |         |
     +---------+----+-------+---------------+----------+-------------+-----+---------+---------+

    header := name_len:u16 name value_len:u32 value          headers := header*

op: 0 put, 1 delete, 2 purge.  The payload is what is left of the record.  A log says in its sidecar
whether its content is ``raw`` or ``envelope/1``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.batch import Batch, Spans
from penstock.errors import CorruptionError, OptionsError
from penstock.log.columns import columns_of
from penstock.types import Op

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CONTENT",
    "Envelope",
    "HeaderColumns",
    "decode_envelope",
    "decode_headers",
    "encode_envelope",
    "encode_envelopes",
    "encode_headers",
    "headers_of",
    "is_erased",
    "open_envelopes",
]

CONTENT: Final = "envelope/1"
HEAD: Final = struct.Struct("<BBHQII")
NAME: Final = struct.Struct("<H")
VALUE: Final = struct.Struct("<I")


class Envelope(msgspec.Struct, frozen=True):
    """A record with a key: what is to be done to it, since when, and with which payload.

    >>> envelope = Envelope(b"devices/7", b"on", headers={"unit": b"C"})
    >>> decode_envelope(encode_envelope(envelope)) == envelope
    True
    """

    key: bytes
    payload: bytes = b""
    op: Op = Op.PUT
    event_time_ns: int = 0
    headers: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    flags: int = 0


def encode_envelope(envelope: Envelope) -> bytes:
    """Return the record of an envelope.

    >>> encode_envelope(Envelope(b"k", b"v")).hex(" ")
    '01 00 00 00 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 6b 76'
    """
    headers = encode_headers(envelope.headers)
    try:
        head = HEAD.pack(1, envelope.op, envelope.flags, envelope.event_time_ns, len(envelope.key), len(headers))
    except struct.error as exc:
        raise OptionsError(f"a field of the envelope is out of range: {exc}") from None
    return head + envelope.key + headers + envelope.payload


def encode_headers(headers: Mapping[str, bytes]) -> bytes:
    """Return headers as an envelope holds them.

    >>> decode_headers(memoryview(encode_headers({"unit": b"C"})))
    {'unit': b'C'}
    """
    try:
        return b"".join(
            NAME.pack(len(raw)) + raw + VALUE.pack(len(value)) + value
            for raw, value in ((name.encode(), value) for name, value in headers.items())
        )
    except (struct.error, UnicodeEncodeError) as exc:
        raise OptionsError(f"a header of the envelope is out of range: {exc}") from None


def decode_envelope(record: bytes | memoryview) -> Envelope:
    """Return the envelope of a record; CorruptionError when it is none."""
    view = memoryview(record)
    if len(view) < HEAD.size:
        raise CorruptionError("envelope", 0, f"{len(view)} bytes are too few for an envelope")
    version, op, flags, time, key_length, headers_length = HEAD.unpack_from(view)
    start = HEAD.size + key_length
    if version != 1 or op > max(Op):
        raise CorruptionError("envelope", 0, f"version {version} with op {op} is not known")
    if start + headers_length > len(view):
        raise CorruptionError("envelope", 12, "key and headers are longer than the record")
    return Envelope(
        bytes(view[HEAD.size : start]),
        bytes(view[start + headers_length :]),
        Op(op),
        time,
        decode_headers(view[start : start + headers_length]),
        flags,
    )


def is_erased(record: bytes) -> bool:
    """Whether a record is what erasing leaves in the place of one: a purge without a payload.

    >>> is_erased(encode_envelope(Envelope(b"", b"", Op.PURGE))), is_erased(encode_envelope(Envelope(b"k", b"v")))
    (True, False)
    """
    try:
        found = decode_envelope(record)
    except (CorruptionError, OptionsError):
        return False
    return found.op is Op.PURGE and not found.payload and not found.headers


def decode_headers(view: memoryview) -> dict[str, bytes]:
    r"""Return the headers of an envelope by name.

    >>> decode_headers(memoryview(b"\x01\x00a\x02\x00\x00\x00hi"))
    {'a': b'hi'}
    """
    headers: dict[str, bytes] = {}
    at = 0
    try:
        while at < len(view):
            (length,) = NAME.unpack_from(view, at)
            name = str(view[at + NAME.size : at + NAME.size + length], "utf-8")
            at += NAME.size + length
            (length,) = VALUE.unpack_from(view, at)
            at += VALUE.size
            if at + length > len(view):
                raise CorruptionError("envelope", at, f"header {name!r} is cut short")
            headers[name] = bytes(view[at : at + length])
            at += length
    except (struct.error, UnicodeDecodeError) as exc:
        raise CorruptionError("envelope", at, f"the headers are malformed: {exc}") from None
    return headers


def open_envelopes(batch: Batch, log: str = "log") -> Batch:
    """Return the batch with its envelopes opened: payloads inside, and the rest as extra columns.

    The columns are ``op`` (uint8), ``flags`` (uint16), ``event_time_ns`` (uint64), ``key`` and ``headers`` (Spans).
    Nothing is copied: all of them point into the buffer the batch already has.

    >>> batch = Batch.of([encode_envelope(Envelope(b"k", b"v"))])
    >>> opened = open_envelopes(batch)
    >>> bytes(opened[0].payload), bytes(opened[0].extra["key"])
    (b'v', b'k')
    """
    count = len(batch)
    ops, flags = np.empty(count, np.uint8), np.empty(count, np.uint16)
    times, spans = np.empty(count, np.uint64), np.empty((count, 6), np.int64)
    good = kernel.decode_envelopes(batch.view, batch.payloads.offsets, batch.payloads.lengths, ops, flags, times, spans)
    if good < count:
        position = int(batch.positions[good])
        raise CorruptionError(log, position, "the record at this position is no envelope of version 1")
    return Batch(
        batch.buffer,
        batch.positions,
        Spans(spans[:, 4], spans[:, 5]),
        timestamps=batch.timestamps,
        kinds=batch.kinds,
        extra={
            **batch.extra,
            "op": ops,
            "flags": flags,
            "event_time_ns": times,
            "key": Spans(spans[:, 0], spans[:, 1]),
            "headers": Spans(spans[:, 2], spans[:, 3]),
        },
        next_position=batch.next_position,
    )


# --- Many at a time


class HeaderColumns(msgspec.Struct, frozen=True):
    """The headers of many envelopes: those of envelope i are numbers ``starts[i]`` to ``starts[i + 1]``.

    Names and values are spans over ``buffer``, the names in UTF-8.
    """

    buffer: Any
    starts: NDArray[np.int64]
    names: Spans
    values: Spans

    def to_arrow(self) -> pa.Array:
        """Return an Arrow array of type ``map<string, binary>``, one map an envelope.

        >>> batch = open_envelopes(encode_envelopes([b"k"], [b"v"], headers={"unit": b"C"}))
        >>> headers_of(batch).to_arrow().to_pylist()
        [[('unit', b'C')]]
        """
        import pyarrow as pa

        names = self.names.to_arrow(self.buffer, view=False).cast(pa.string())
        values = self.values.to_arrow(self.buffer, view=False)
        return pa.MapArray.from_arrays(pa.array(self.starts.astype(np.int32)), names, values)


def encode_envelopes(
    keys: Any,
    payloads: Any,
    *,
    ops: Any = Op.PUT,
    event_times_ns: Any = 0,
    flags: Any = 0,
    headers: Any = None,
) -> Batch:
    """Return many envelopes over one buffer, ready for ``append_many``; no Python runs per record where columns come.

    ``keys`` and ``payloads`` are a list of bytes, an Arrow array, a Batch (its payloads), a pair of a buffer and Spans,
    or one bytes object for all.  ``headers`` are one mapping for all, a list of mappings, a HeaderColumns, an Arrow
    array of maps, or spans of encoded headers.  The other columns are one number for all, or one for each.

    >>> batch = encode_envelopes([b"a", b"b"], b"on", event_times_ns=[1, 2], headers={"unit": b"C"})
    >>> decode_envelope(batch.payload(1))
    Envelope(key=b'b', payload=b'on', op=<Op.PUT: 0>, event_time_ns=2, headers={'unit': b'C'}, flags=0)
    """
    names, bodies, heads = _spans_of(keys), _spans_of(payloads), _header_spans(headers)
    numbers: tuple[tuple[Any, bool], ...] = (
        _numbers(ops, np.uint8, "op", int(max(Op))),
        _numbers(flags, np.uint16, "flags", 65_535),
        _numbers(event_times_ns, np.uint64, "event_time_ns", (1 << 64) - 1),
    )
    given = {len(column[1]) for column in (names, bodies, heads) if not column[2]}
    given |= {len(column) for column, single in numbers if not single}
    if len(given) > 1:
        raise OptionsError(f"the columns of envelopes differ in length: {', '.join(map(str, sorted(given)))}")
    count = given.pop() if given else 1
    offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    if not count:
        return Batch(b"", offsets, Spans(offsets, lengths))
    columns: list[Any] = [
        part for data, spans, _ in (names, heads, bodies) for part in (data, spans.offsets, spans.lengths)
    ]
    try:
        (op, _), (flag, _), (when, _) = numbers
        encoded = kernel.encode_envelopes(op, flag, when, *columns, offsets, lengths)  # type: ignore[call-arg]
    except ValueError as exc:
        raise OptionsError(f"envelopes cannot be made: {exc}") from None
    return Batch(encoded, np.arange(count, dtype=np.int64), Spans(offsets, lengths))


def headers_of(batch: Batch, log: str = "log") -> HeaderColumns:
    """Return the headers of a batch that ``open_envelopes`` returned; CorruptionError where they are malformed.

    >>> batch = open_envelopes(encode_envelopes([b"a", b"b"], b"", headers=[{}, {"x": b"1", "y": b"2"}]))
    >>> headers_of(batch).starts.tolist()
    [0, 0, 2]
    """
    spans = batch.extra["headers"]
    assert isinstance(spans, Spans)
    starts, found = np.empty(len(batch) + 1, np.int64), np.empty((0, 4), np.int64)
    good, seen = kernel.split_headers(batch.view, spans.offsets, spans.lengths, starts, found)  # counts them
    if good < len(batch):
        raise CorruptionError(log, int(batch.positions[good]), "the headers of the record here are malformed")
    if seen:
        found = np.empty((seen, 4), np.int64)
        kernel.split_headers(batch.view, spans.offsets, spans.lengths, starts, found)
    names, values = Spans(found[:, 0], found[:, 1]), Spans(found[:, 2], found[:, 3])
    _check_names(batch, names, starts, log)
    return HeaderColumns(batch.buffer, starts, names, values)


def _check_names(batch: Batch, names: Spans, starts: NDArray[np.int64], log: str) -> None:
    """Refuse names that are no UTF-8: all are looked at in one run, and one by one only when that fails."""
    raw = names.to_list(batch.buffer)
    try:
        b"\0".join(raw).decode()
    except UnicodeDecodeError:
        for index, name in enumerate(raw):
            try:
                name.decode()
            except UnicodeDecodeError:
                row = int(np.searchsorted(starts, index, "right")) - 1
                reason = f"the name of a header is no UTF-8: {name[:40]!r}"
                raise CorruptionError(log, int(batch.positions[row]), reason) from None


Column = tuple[Any, Spans, bool]
"""A buffer, spans over it, and whether its one span is for all."""


def _spans_of(values: Any) -> Column:
    if isinstance(values, bytes | bytearray | memoryview):
        data = bytes(values)
        return data or b"\0", Spans(np.zeros(1, np.int64), np.array([len(data)], np.int64)), True
    if isinstance(values, tuple) and len(values) == 2 and isinstance(values[1], Spans):
        return memoryview(values[0]).cast("B") if memoryview(values[0]).nbytes else b"\0", values[1], False
    columns = columns_of(values, 0, 0)
    return columns.data, Spans(columns.offsets, columns.lengths), False


def _header_spans(headers: Any) -> Column:
    """Return headers as runs of them, however they come."""
    if headers is None:
        return _spans_of(b"")
    if isinstance(headers, Mapping):
        return _spans_of(encode_headers(headers))
    if isinstance(headers, list):
        return _spans_of([encode_headers(one or {}) for one in headers])
    if hasattr(headers, "type") and str(headers.type).startswith("map<"):
        headers = _map_columns(headers)
    if isinstance(headers, tuple) and headers and isinstance(headers[0], np.ndarray):
        starts, names, values = headers
    elif isinstance(headers, HeaderColumns):
        starts = headers.starts
        names, values = (headers.buffer, headers.names, False), (headers.buffer, headers.values, False)
    else:
        return _spans_of(headers)
    offsets, lengths = np.empty(len(starts) - 1, np.int64), np.empty(len(starts) - 1, np.int64)
    try:
        run = kernel.join_headers(
            starts, names[0], names[1].offsets, names[1].lengths, values[0], values[1].offsets, values[1].lengths,
            offsets, lengths,
        )  # fmt: skip
    except ValueError as exc:
        raise OptionsError(f"headers cannot be encoded: {exc}") from None
    return run or b"\0", Spans(offsets, lengths), False


def _map_columns(array: Any) -> tuple[NDArray[np.int64], Column, Column]:
    """Return an Arrow array of maps as starts, names and values; a null is no header."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    counts = np.zeros(len(array), np.int64)
    if len(array):
        bounds = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
        counts = bounds[1:].astype(np.int64) - bounds[:-1]
        if array.null_count:
            counts[array.is_null().to_numpy(zero_copy_only=False)] = 0
            if int(counts.sum()) != int(bounds[-1] - bounds[0]):  # nulls with something behind them: made anew
                return _map_columns(pa.array([one or [] for one in array.to_pylist()], array.type))
        low, high = int(bounds[0]), int(bounds[-1])
    else:
        low = high = 0
    keys = array.keys[low:high] if len(array.keys) != high - low else array.keys
    items = array.items[low:high] if len(array.items) != high - low else array.items
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    return starts, _spans_of(keys), _spans_of(items)


def _numbers(values: Any, dtype: Any, name: str, largest: int) -> tuple[NDArray[Any], bool]:
    single = np.ndim(values) == 0
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise OptionsError(f"{name}: must be whole numbers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= largest:
        raise OptionsError(f"{name} must be between 0 and {largest}")
    return np.ascontiguousarray(array.astype(dtype)), single
