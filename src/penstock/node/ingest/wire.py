"""What goes over an ingest socket.  Pure: bytes in, frames out.

    frame    := length:u32 kind:u8 body              little-endian; length counts kind and body
    hello    := msgpack {version, writer, instance, channel, content}     producer → node, first
    welcome  := msgpack {last, max_batch_bytes, has_times}                node → producer
    batch    := first:u64 count:u32 flags:u32 lengths:u32×count [times:i64×count] [kinds:i64×count] payloads
    ack      := last:u64 count:u32 positions:i64×count       -1: in the log already, at a place nobody remembers
    sync     := number:u64
    synced   := number:u64 position:i64
    refused  := msgpack {error, message}                                  node → producer, last

Records of a producer are numbered from 1 without gaps; ``first`` is the number of a batch's first record.  ``last`` of
a welcome is the highest number that the log has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProtocolError

__all__ = ["IngestAck", "IngestBatch", "FrameCutter", "Hello", "IngestRefusal", "Welcome", "frame", "encode_batch"]

VERSION: Final = 1
HELLO, WELCOME, BATCH, ACK, SYNC, SYNCED, REFUSED = range(1, 8)
HEAD: Final = struct.Struct("<IB")
BATCH_HEAD: Final = struct.Struct("<QII")
ACK_HEAD: Final = struct.Struct("<QI")
NUMBER: Final = struct.Struct("<Q")
NUMBER_AT: Final = struct.Struct("<Qq")
HAS_TIMES: Final = 1
HAS_KINDS: Final = 2
MAX_BATCH_BYTES: Final = 8 << 20
MAX_FRAME_BYTES: Final = 64 << 20
"""A single record may be larger than a batch should be."""
MAX_RECORD_BYTES: Final = MAX_FRAME_BYTES - 64
"""What a frame has room for beside the numbers of one record."""


class Hello(msgspec.Struct, frozen=True):
    """Who writes to what.

    >>> Hello("pump-7", "0f", "readings").version
    1
    """

    writer: str
    instance: str
    """Random for each process: a second one of the same name is told apart from one that comes back."""
    channel: str
    version: int = VERSION
    content: str = ""
    """``raw`` or ``envelope/1`` where the channel must be that; a new one is made so."""


class Welcome(msgspec.Struct, frozen=True):
    """Where to go on.

    >>> Welcome(41, 8 << 20, True).last
    41
    """

    last: int
    max_batch_bytes: int
    has_times: bool


class IngestRefusal(msgspec.Struct, frozen=True):
    """Why the node goes no further; ``error`` is the name of a class in penstock.errors.

    >>> IngestRefusal("Backpressure", "the disk is full").error
    'Backpressure'
    """

    error: str
    message: str


class IngestBatch(msgspec.Struct, frozen=True):
    """Records of one producer.

    >>> IngestBatch(7, [b"a", b"b"]).last
    8
    """

    first: int
    payloads: list[bytes]
    times: NDArray[np.int64] | None = None
    kinds: NDArray[np.int64] | None = None

    @property
    def last(self) -> int:
        """The number of its last record."""
        return self.first + len(self.payloads) - 1

    def without(self, count: int) -> IngestBatch:
        """Return the batch from record ``count`` on."""
        if not count:
            return self
        return IngestBatch(
            self.first + count,
            self.payloads[count:],
            None if self.times is None else self.times[count:],
            None if self.kinds is None else self.kinds[count:],
        )


class IngestAck(msgspec.Struct, frozen=True):
    """Records that the log has: up to number ``last``, at these positions.

    >>> IngestAck(9, np.array([80])).last
    9
    """

    last: int
    positions: NDArray[np.int64]


def frame(kind: int, body: bytes) -> bytes:
    r"""Return a frame.

    >>> frame(SYNC, b"\1")
    b'\x02\x00\x00\x00\x05\x01'
    """
    return HEAD.pack(len(body) + 1, kind) + body


def encode_batch(batch: IngestBatch) -> bytes:
    """Return a frame of records.

    >>> decode_batch("x", encode_batch(IngestBatch(1, [b"one", b""]))[5:]).payloads
    [b'one', b'']
    """
    flags = (HAS_TIMES if batch.times is not None else 0) | (HAS_KINDS if batch.kinds is not None else 0)
    pieces = [
        BATCH_HEAD.pack(batch.first, len(batch.payloads), flags),
        np.fromiter(map(len, batch.payloads), np.uint32, len(batch.payloads)).tobytes(),
    ]
    pieces += [np.ascontiguousarray(one, np.int64).tobytes() for one in (batch.times, batch.kinds) if one is not None]
    return frame(BATCH, b"".join([*pieces, *batch.payloads]))


def decode_batch(peer: str, body: bytes | memoryview) -> IngestBatch:
    """Return the records of a frame; ProtocolError when its lengths do not add up."""
    body = memoryview(body)
    if len(body) < BATCH_HEAD.size:
        raise ProtocolError(peer, "a frame", f"a batch of {len(body)} bytes is too short")
    first, count, flags = BATCH_HEAD.unpack_from(body)
    if not count or not first or flags & ~(HAS_TIMES | HAS_KINDS) or first + count >= 1 << 63:
        raise ProtocolError(peer, "a frame", f"a batch with first={first} count={count} flags={flags}")
    at = BATCH_HEAD.size
    columns = bool(flags & HAS_TIMES) + bool(flags & HAS_KINDS)
    start = at + count * (4 + 8 * columns)
    if start > len(body):
        raise ProtocolError(peer, "a frame", f"a batch of {count} records in {len(body)} bytes")
    lengths = np.frombuffer(body, np.uint32, count, at)
    at += 4 * count
    times = kinds = None
    if flags & HAS_TIMES:
        times = np.frombuffer(body, np.int64, count, at)
        at += 8 * count
    if flags & HAS_KINDS:
        kinds = np.frombuffer(body, np.int64, count, at)
    ends = (np.cumsum(lengths, dtype=np.int64) + start).tolist()
    if ends[-1] != len(body):
        raise ProtocolError(peer, "a frame", f"the lengths of a batch make {ends[-1]} bytes, it has {len(body)}")
    data = bytes(body)
    begins = [start, *ends[:-1]]
    return IngestBatch(first, [data[a:b] for a, b in zip(begins, ends, strict=True)], times, kinds)


def encode_ack(ack: IngestAck) -> bytes:
    """Return a frame that acknowledges.

    >>> decode_ack("x", encode_ack(IngestAck(9, np.array([80, 112])))[5:]).positions.tolist()
    [80, 112]
    """
    positions = np.ascontiguousarray(ack.positions, np.int64)
    return frame(ACK, ACK_HEAD.pack(ack.last, len(positions)) + positions.tobytes())


def decode_ack(peer: str, body: bytes | memoryview) -> IngestAck:
    """Return what a frame acknowledges."""
    if len(body) < ACK_HEAD.size:
        raise ProtocolError(peer, "a frame", f"an ack of {len(body)} bytes is too short")
    last, count = ACK_HEAD.unpack_from(body)
    if len(body) != ACK_HEAD.size + 8 * count:
        raise ProtocolError(peer, "a frame", f"an ack of {count} records in {len(body)} bytes")
    return IngestAck(last, np.frombuffer(body, np.int64, count, ACK_HEAD.size))


def decode_message(peer: str, body: bytes | memoryview, kind: type[Any]) -> Any:
    """Return a body in msgpack as ``kind``."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProtocolError(peer, "a frame", f"no {kind.__name__.lower()}: {exc}") from None


class FrameCutter:
    """Cuts what comes from a socket into frames.

    >>> cutter = FrameCutter("x")
    >>> list(cutter.feed(frame(SYNC, b"1234")[:3])), [(kind, bytes(body)) for kind, body in cutter.feed(
    ...     frame(SYNC, b"1234")[3:])]
    ([], [(5, b'1234')])
    """

    def __init__(self, peer: str) -> None:
        self._peer, self._buffer = peer, bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the frames that are whole now: kind and body."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEAD.size:
                length, kind = HEAD.unpack_from(self._buffer, at)
                if not 1 <= length <= MAX_FRAME_BYTES:
                    raise ProtocolError(self._peer, "a frame", f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
                end = at + HEAD.size - 1 + length
                if end > len(self._buffer):
                    break
                body = bytes(memoryview(self._buffer)[at + HEAD.size : end])
                at = end
                yield kind, body
        finally:
            del self._buffer[:at]
