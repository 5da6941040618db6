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
from typing import Final

import msgspec
import numpy as np

from penstock import kernel
from penstock.batch import Batch, Spans
from penstock.errors import CorruptionError, OptionsError
from penstock.types import Op

__all__ = ["Envelope", "encode_envelope", "decode_envelope", "open_envelopes", "CONTENT"]

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
    try:
        headers = b"".join(
            NAME.pack(len(raw)) + raw + VALUE.pack(len(value)) + value
            for raw, value in ((name.encode(), value) for name, value in envelope.headers.items())
        )
        head = HEAD.pack(1, envelope.op, envelope.flags, envelope.event_time_ns, len(envelope.key), len(headers))
    except struct.error as exc:
        raise OptionsError(f"a field or header of the envelope is out of range: {exc}") from None
    return head + envelope.key + headers + envelope.payload


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
