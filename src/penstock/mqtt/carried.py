"""How an MQTT message travels in a log: envelope v1, the topic as key, the rest as headers.

    key            the topic
    payload        the payload, as it came
    event_time_ns  when the broker received it
    headers        qos ("0", "1", "2")   retain ("1", where it was set)   client (who published it)
                   id (two bytes, the packet id, with QoS 2)   user.NAME (a user property each, in order)
                   content_type   response_topic   correlation_data   payload_format   message_expiry

Taps write it, feeds, bridges and the outbox read it.  Headers of a run are the same
but for packet ids, so they are encoded once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from penstock import kernel
from penstock.batch import Batch, Spans
from penstock.errors import CorruptionError
from penstock.kernel.mqtt import Run
from penstock.log.envelope import HEAD, NAME, VALUE, open_envelopes
from penstock.mqtt.packets import NONE, BadPacket, Kind, Properties
from penstock.mqtt.properties import decode_properties, encode_properties, encode_varint
from penstock.types import Op

if TYPE_CHECKING:
    from penstock.kernel.mqttcarry import Carrier

__all__ = [
    "Carried", "carrier_of", "encode_carried", "encode_in_pieces", "encode_runs", "headers_for", "ids_of",
    "open_headers", "open_rows",
]  # fmt: skip

USER: Final = "user."
RAW: Final = "properties"
LONGEST_NAME: Final = 65535 - len(USER)
NUMBERS: Final = ("payload_format", "message_expiry")
TEXTS: Final = ("content_type", "response_topic")
PIECE_BYTES: Final = 128 << 10
_ID: Final = NAME.pack(2) + b"id" + VALUE.pack(2)


class Carried(msgspec.Struct, frozen=True):
    """What the headers of a record say about the message in it.

    >>> open_headers(headers_for(1, True, "pump-7", b"", 30))
    Carried(qos=1, retain=True, client='pump-7', packet_id=0, properties=Properties(message_expiry=30))
    """

    qos: int = 0
    retain: bool = False
    client: str = ""
    packet_id: int = 0
    properties: Properties = NONE


def headers_for(qos: int, retain: bool, client: str, forward: bytes = b"", expiry: int = -1) -> bytes:
    """Return the headers of a message; ``forward`` are its encoded properties without alias and expiry.

    >>> len(headers_for(0, False, "")), len(headers_for(0, False, "pump-7"))
    (10, 28)
    """
    out = [_header(b"qos", b"%d" % qos)]
    if retain:
        out.append(_header(b"retain", b"1"))
    if client:
        out.append(_header(b"client", client.encode()))
    if expiry >= 0:
        out.append(_header(b"message_expiry", b"%d" % expiry))
    if forward:
        out += _property_headers(forward)
    return b"".join(out)


def _property_headers(forward: bytes) -> list[bytes]:
    found, _ = decode_properties(encode_varint(len(forward)) + forward, 0, len(forward) + 4, 3)
    if any(len(name.encode()) > LONGEST_NAME for name, _ in found.user):
        return [_header(RAW.encode(), forward)]
    out = []
    for name in ("content_type", "response_topic", "correlation_data", "payload_format"):
        value: Any = getattr(found, name)
        if value is not None:
            raw = value if isinstance(value, bytes) else str(value).encode()
            out.append(_header(name.encode(), raw))
    out += [_header((USER + name).encode(), value.encode()) for name, value in found.user]
    return out


def _header(name: bytes, value: bytes) -> bytes:
    return NAME.pack(len(name)) + name + VALUE.pack(len(value)) + value


def encode_runs(runs: list[Run], headers: list[bytes], times_ns: list[int]) -> Batch:
    r"""Return the messages of many runs as records over one buffer, ready for ``append_many``.

    Headers and times are one for each run; messages of QoS 2 get their packet id as the last header.

    >>> from penstock.kernel.mqtt import make_run
    >>> runs = [make_run(b"a", [b"on", b"off"], 2, False), make_run(b"b", [b"1"], 0, False)]
    >>> [(bytes(each)[-3:], len(each)) for each in encode_runs(runs, [b"", b""], [7, 8]).to_payloads()]
    [(b'\x01on', 33), (b'off', 34), (b'\x00b1', 22)]
    """
    count = sum(run.count for run in runs)
    offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    data = kernel.mqttcarry.carry(runs, headers, times_ns, _ID, offsets, lengths)
    return Batch(data, offsets, Spans(offsets, lengths))


def encode_in_pieces(runs: list[Run], headers: list[bytes], times_ns: list[int]) -> Iterator[Batch]:
    """Yield what ``encode_runs`` returns in pieces that stay in the processor's cache."""
    first = size = 0
    for index, run in enumerate(runs, 1):
        size += run.end - run.start
        if size >= PIECE_BYTES or index == len(runs):
            part = slice(first, index)
            yield encode_runs(runs[part], headers[part], times_ns[part])
            first, size = index, 0


def carrier_of(runs: list[Run], headers: list[bytes], times_ns: list[int]) -> Carrier:
    """Return what makes the same records where they will lie, for ``append_in_place``."""
    return kernel.mqttcarry.Carrier(runs, headers, times_ns, _ID)


def open_rows(
    batch: Batch, log: str, bad: Callable[[CorruptionError], None]
) -> Iterator[tuple[int, bytes, bytes, int, int, bytes]]:
    """Yield position, key, headers, op, time and payload of each record; ``bad`` is told of one that is no envelope."""
    try:
        yield from _rows(open_envelopes(batch, log))
    except CorruptionError:  # before the first: one after the other
        for position, record in zip(batch.positions.tolist(), batch.to_payloads(), strict=True):
            try:
                yield from _rows(open_envelopes(Batch.of([record], positions=[position]), log))
            except CorruptionError as exc:
                bad(exc)


def _rows(opened: Batch) -> Iterator[tuple[int, bytes, bytes, int, int, bytes]]:
    keys, headers, ops = opened.extra["key"], opened.extra["headers"], opened.extra["op"]
    times = opened.extra["event_time_ns"]
    assert isinstance(keys, Spans)
    assert isinstance(headers, Spans)
    return zip(
        opened.positions.tolist(), keys.to_list(opened.buffer), headers.to_list(opened.buffer),
        ops.tolist(), times.tolist(), opened.to_payloads(), strict=True,  # type: ignore[union-attr]
    )  # fmt: skip


def ids_of(headers: bytes) -> int:
    """Return the packet id in headers, 0 where there is none; ``id`` is the last header."""
    if len(headers) < len(_ID) + 2 or headers[-len(_ID) - 2 : -2] != _ID:
        return 0
    return int.from_bytes(headers[-2:], "big")


def encode_carried(topic: bytes, payload: bytes, headers: bytes, when_ns: int, op: Op = Op.PUT) -> bytes:
    """Return one record; ``encode_runs`` makes many.

    >>> from penstock.log.envelope import decode_envelope
    >>> decode_envelope(encode_carried(b"a/b", b"on", b"", 7)).key
    b'a/b'
    """
    return HEAD.pack(1, op, 0, when_ns, len(topic), len(headers)) + topic + headers + payload


def open_headers(raw: bytes) -> Carried:
    """Return what headers say; those of other writers are passed over."""
    qos, retain, client, packet_id = 0, False, "", 0
    values: dict[str, Any] = {}
    user: list[tuple[str, str]] = []
    at = 0
    try:
        while at < len(raw):
            (size,) = NAME.unpack_from(raw, at)
            name = raw[at + 2 : at + 2 + size].decode()
            at += 2 + size
            (size,) = VALUE.unpack_from(raw, at)
            value = raw[at + 4 : at + 4 + size]
            at += 4 + size
            if at > len(raw):
                raise ValueError("cut short")
            if name == "qos":
                qos = min(int(value), 2)
                if qos < 0:
                    raise ValueError(f"qos {qos}")
            elif name == "retain":
                retain = value == b"1"
            elif name == "client":
                client = value.decode()
            elif name == "id":
                packet_id = int.from_bytes(value, "big")
            elif name.startswith(USER):
                user.append((name[len(USER) :], value.decode()))
            elif name in NUMBERS:
                values[name] = int(value)
            elif name in TEXTS:
                values[name] = value.decode()
            elif name == "correlation_data":
                values[name] = value
            elif name == RAW:
                given, _ = decode_properties(encode_varint(len(value)) + value, 0, len(value) + 4, 3)
                return Carried(qos, retain, client, packet_id, given)
        if not values and not user:
            return Carried(qos, retain, client, packet_id)
        raw = encode_properties(Properties(**values, user=tuple(user)))
        properties, _ = decode_properties(raw, 0, len(raw), Kind.PUBLISH)  # as whoever receives them would
    except (struct.error, ValueError, OverflowError, BadPacket) as exc:
        raise CorruptionError("envelope", at, f"the headers are malformed: {exc}") from None
    return Carried(qos, retain, client, packet_id, properties)
