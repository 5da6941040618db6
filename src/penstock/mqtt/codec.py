"""Packets ↔ bytes, one at a time.  What comes in runs goes through penstock.kernel.mqtt instead.

    items, end, need, problem = kernel.mqtt.cut(data, start, version == 5, limit)
    packet = decode_body(kind, flags, data, start, end, version)      for an item that is no run

Bad bytes raise BadPacket with the reason code of MQTT 5; nothing else is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from penstock.kernel import mqtt as kernel
from penstock.mqtt.packets import (
    NONE,
    Ack,
    Auth,
    BadPacket,
    Connack,
    Connect,
    Disconnect,
    Filter,
    Kind,
    Packet,
    Ping,
    Pong,
    Properties,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from penstock.mqtt.properties import WILL, decode_properties, encode_properties, encode_varint
from penstock.mqtt.reasons import Reason

__all__ = ["decode", "decode_body", "encode", "LARGEST"]

LARGEST: Final = 268_435_460
"""The largest packet there can be: five bytes before a body of 268,435,455."""

PONG: Final = b"\xd0\x00"
PING: Final = b"\xc0\x00"


def decode(data: bytes, version: int) -> tuple[Packet, int]:
    """Return the first packet of the bytes, and where it ends.

    >>> decode(bytes.fromhex("40020007"), 4)
    (Ack(kind=<Kind.PUBACK: 4>, packet_id=7, reason=0, properties=Properties()), 4)
    """
    items, end, need, problem = kernel.cut(data, 0, version == 5, LARGEST, 1, True)
    if problem is not None:
        code, kind, text = problem
        raise BadPacket("", Kind(kind).name if kind else "a packet", text, code)
    if not items:
        raise BadPacket("", "a packet", f"{len(data)} of {need or 'unknown'} bytes")
    item = items[0]
    if isinstance(item, tuple):
        kind, flags, first, last = item
        if flags < 0:
            return Ack(Kind(kind), first), end
        return decode_body(kind, flags, data, first, last, version), end
    properties = NONE
    if item.forward or item.alias or item.expiry >= 0:
        properties, _ = decode_properties(encode_varint(len(item.forward)) + item.forward, 0, 4 + len(item.forward), 3)
        expiry = item.expiry if item.expiry >= 0 else None
        properties = msgspec.structs.replace(properties, topic_alias=item.alias or None, message_expiry=expiry)
    return (
        Publish(item.topic.decode(), item.payload(), item.qos, item.retain, item.dup, item.first_id, properties),
        end,
    )


def decode_body(kind: int, flags: int, data: bytes, start: int, end: int, version: int) -> Packet:
    """Return the packet of this kind whose body lies from start to end; ``flags`` were checked when it was cut."""
    body = _Body(data, start, end, kind, version)
    decoder = _DECODERS.get(kind)
    if decoder is None or flags < 0:
        raise BadPacket("", body.packet, "it is no packet of its own", Reason.PROTOCOL_ERROR)
    packet = decoder(body)
    if body.at != end:
        raise BadPacket("", body.packet, f"{end - body.at} bytes too many")
    return packet


class _Body:
    """A body that is read from the front; every read checks its end."""

    def __init__(self, data: bytes, start: int, end: int, kind: int, version: int) -> None:
        self.data, self.at, self.end, self.kind, self.version = data, start, end, kind, version
        self.packet = Kind(kind).name

    def bad(self, reason: str, code: int = Reason.MALFORMED_PACKET) -> BadPacket:
        return BadPacket("", self.packet, reason, code)

    def number(self, size: int) -> int:
        at = self.at
        if at + size > self.end:
            raise self.bad("it is too short")
        self.at = at + size
        return int.from_bytes(self.data[at : at + size], "big")

    def binary(self) -> bytes:
        size = self.number(2)
        at = self.at
        if at + size > self.end:
            raise self.bad("it is too short")
        self.at = at + size
        return self.data[at : at + size]

    def text(self) -> str:
        raw = self.binary()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.bad("a string is not UTF-8") from None
        if "\0" in text:
            raise self.bad("U+0000 in a string")
        return text

    def packet_id(self) -> int:
        packet_id = self.number(2)
        if not packet_id:
            raise self.bad("packet id 0", Reason.PROTOCOL_ERROR)
        return packet_id

    def properties(self, kind: int | None = None) -> Properties:
        if self.version < 5:
            return NONE
        found, self.at = decode_properties(self.data, self.at, self.end, self.kind if kind is None else kind)
        return found


def _connect(body: _Body) -> Connect:
    name, level = body.binary(), body.number(1)
    bridge = level in (0x83, 0x84)  # the habit of mosquitto: a bridge sets the highest bit before MQTT 5
    if bridge:
        level &= 0x7F
    if (name, level) not in ((b"MQIsdp", 3), (b"MQTT", 4), (b"MQTT", 5)):
        if name not in (b"MQTT", b"MQIsdp"):
            raise body.bad(f"protocol name {name[:20]!r}", Reason.UNSUPPORTED_PROTOCOL_VERSION)
        raise body.bad(f"protocol level {level}", Reason.UNSUPPORTED_PROTOCOL_VERSION)
    body.version = level
    flags, keep_alive = body.number(1), body.number(2)
    will_qos = flags >> 3 & 3
    if flags & 1 and level > 3:  # MQTT 3.1 does not look at it
        raise body.bad("the reserved flag is set")
    if not flags & 4 and flags & 0x38:
        raise body.bad("flags of a will without a will")
    if will_qos == 3:
        raise body.bad("QoS 3 of the will")
    if level < 5 and flags & 0x40 and not flags & 0x80:
        raise body.bad("a password without a user name")
    properties = body.properties()
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise body.bad("authentication data without a method", Reason.PROTOCOL_ERROR)
    client_id, will = body.text(), None
    if flags & 4:
        of_will = body.properties(WILL)
        topic = body.text()
        if not topic or "+" in topic or "#" in topic:
            raise body.bad("the topic of the will is no topic", Reason.TOPIC_NAME_INVALID)
        if of_will.response_topic is not None and ("+" in of_will.response_topic or "#" in of_will.response_topic):
            raise body.bad("wildcards in the response topic", Reason.PROTOCOL_ERROR)
        will = Will(topic, body.binary(), will_qos, bool(flags & 0x20), of_will)
    username = body.text() if flags & 0x80 else None
    password = body.binary() if flags & 0x40 else None
    return Connect(client_id, level, bool(flags & 2), keep_alive, username, password, will, properties, bridge)


def _connack(body: _Body) -> Connack:
    flags, reason = body.number(1), body.number(1)
    if flags > 1:
        raise body.bad(f"acknowledge flags {flags}")
    return Connack(bool(flags), reason, body.properties())


def _ack(body: _Body) -> Ack:
    packet_id = body.packet_id()
    reason = body.number(1) if body.at < body.end else 0
    properties = body.properties() if body.at < body.end else NONE
    if reason not in _REASONS[body.kind]:
        raise body.bad(f"reason code {reason:#04x}", Reason.PROTOCOL_ERROR)
    return Ack(Kind(body.kind), packet_id, reason, properties)


def _subscribe(body: _Body) -> Subscribe:
    packet_id, properties, filters = body.packet_id(), body.properties(), []
    while body.at < body.end:
        name, options = body.text(), body.number(1)
        if not name:
            raise body.bad("an empty filter")  # MQTT-4.7.3-1
        if options & (0xC0 if body.version == 5 else 0xFC) or options & 3 == 3:
            raise body.bad(f"options {options:#04x}")
        handling = options >> 4 & 3
        if handling == 3:
            raise body.bad("retain handling 3", Reason.PROTOCOL_ERROR)
        filters.append(Filter(name, options & 3, bool(options & 4), bool(options & 8), handling))
    if not filters:
        raise body.bad("no filter", Reason.PROTOCOL_ERROR)
    return Subscribe(packet_id, tuple(filters), properties)


def _suback(body: _Body) -> Suback:
    packet_id, properties = body.packet_id(), body.properties()
    reasons = body.data[body.at : body.end]
    body.at = body.end
    return Suback(packet_id, tuple(reasons), properties)


def _unsubscribe(body: _Body) -> Unsubscribe:
    packet_id, properties, filters = body.packet_id(), body.properties(), []
    while body.at < body.end:
        name = body.text()
        if not name:
            raise body.bad("an empty filter")
        filters.append(name)
    if not filters:
        raise body.bad("no filter", Reason.PROTOCOL_ERROR)
    return Unsubscribe(packet_id, tuple(filters), properties)


def _unsuback(body: _Body) -> Unsuback:
    found = _suback(body)
    return Unsuback(found.packet_id, found.reasons, found.properties)


def _disconnect(body: _Body) -> Disconnect:
    if body.at == body.end:
        return Disconnect()
    if body.version < 5:
        raise body.bad(f"a body of {body.end - body.at} bytes")
    reason = body.number(1)
    properties = body.properties() if body.at < body.end else NONE
    if reason not in _REASONS[Kind.DISCONNECT]:
        raise body.bad(f"reason code {reason:#04x}", Reason.PROTOCOL_ERROR)
    return Disconnect(reason, properties)


def _auth(body: _Body) -> Auth:
    if body.at == body.end:
        return Auth(Reason.SUCCESS)
    reason = body.number(1)
    properties = body.properties() if body.at < body.end else NONE
    if reason not in _REASONS[Kind.AUTH]:
        raise body.bad(f"reason code {reason:#04x}", Reason.PROTOCOL_ERROR)
    return Auth(reason, properties)


_DECODERS: Final[dict[int, Callable[[_Body], Packet]]] = {
    Kind.CONNECT: _connect,
    Kind.CONNACK: _connack,
    Kind.PUBACK: _ack,
    Kind.PUBREC: _ack,
    Kind.PUBREL: _ack,
    Kind.PUBCOMP: _ack,
    Kind.SUBSCRIBE: _subscribe,
    Kind.SUBACK: _suback,
    Kind.UNSUBSCRIBE: _unsubscribe,
    Kind.UNSUBACK: _unsuback,
    Kind.PINGREQ: lambda _: Ping(),
    Kind.PINGRESP: lambda _: Pong(),
    Kind.DISCONNECT: _disconnect,
    Kind.AUTH: _auth,
}
_OF_PUBLISH = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
_REASONS: Final[dict[int, frozenset[int]]] = {
    Kind.PUBACK: _OF_PUBLISH,
    Kind.PUBREC: _OF_PUBLISH,
    Kind.PUBREL: frozenset({0x00, 0x92}),
    Kind.PUBCOMP: frozenset({0x00, 0x92}),
    Kind.DISCONNECT: frozenset(
        {0x00, 0x04, *range(0x80, 0x84), 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, *range(0x93, 0xA3)}
    ),
    Kind.AUTH: frozenset({0x00, 0x18, 0x19}),
}


def encode(packet: Packet, version: int = 4) -> bytes:
    """Return the bytes of a packet.

    >>> encode(Publish("a", b"hi")).hex(" ")
    '30 05 00 01 61 68 69'
    """
    match packet:
        case Publish():
            flags = packet.dup << 3 | packet.qos << 1 | packet.retain
            body = _text(packet.topic) + (packet.packet_id.to_bytes(2, "big") if packet.qos else b"")
            return _framed(0x30 | flags, body + _properties(packet.properties, version) + packet.payload)
        case Ack():
            first = packet.kind << 4 | (2 if packet.kind == Kind.PUBREL else 0)
            body = packet.packet_id.to_bytes(2, "big")
            return _framed(first, body + _tail(packet.reason, packet.properties, version))
        case Connect():
            return _framed(0x10, _connect_body(packet))
        case Connack():
            body = bytes((packet.session_present, packet.reason))
            return _framed(0x20, body + _properties(packet.properties, version))
        case Subscribe():
            body = packet.packet_id.to_bytes(2, "big") + _properties(packet.properties, version)
            return _framed(0x82, body + b"".join(_text(each.filter) + _options(each) for each in packet.filters))
        case Suback():
            body = packet.packet_id.to_bytes(2, "big") + _properties(packet.properties, version)
            return _framed(0x90, body + bytes(packet.reasons))
        case Unsubscribe():
            body = packet.packet_id.to_bytes(2, "big") + _properties(packet.properties, version)
            return _framed(0xA2, body + b"".join(map(_text, packet.filters)))
        case Unsuback():
            body = packet.packet_id.to_bytes(2, "big") + _properties(packet.properties, version)
            return _framed(0xB0, body + (bytes(packet.reasons) if version == 5 else b""))
        case Ping():
            return PING
        case Pong():
            return PONG
        case Disconnect():
            return _framed(0xE0, _tail(packet.reason, packet.properties, version))
        case Auth():
            return _framed(0xF0, _tail(packet.reason, packet.properties, version))


def _framed(first: int, body: bytes) -> bytes:
    return bytes((first,)) + encode_varint(len(body)) + body


def _text(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(2, "big") + raw


def _binary(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def _properties(properties: Properties, version: int) -> bytes:
    return encode_properties(properties) if version == 5 else b""


def _options(each: Filter) -> bytes:
    return bytes((each.qos | each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4,))


def _tail(reason: int, properties: Properties, version: int) -> bytes:
    """Return reason and properties, each left out where it says nothing."""
    if version < 5:
        return b""
    raw = encode_properties(properties)
    if raw != b"\0":
        return bytes((reason,)) + raw
    return bytes((reason,)) if reason else b""


def _connect_body(packet: Connect) -> bytes:
    will = packet.will
    flags = packet.clean << 1 | (packet.username is not None) << 7 | (packet.password is not None) << 6
    if will is not None:
        flags |= 4 | will.qos << 3 | will.retain << 5
    name = b"MQIsdp" if packet.version == 3 else b"MQTT"
    level = packet.version | (0x80 if packet.bridge and packet.version < 5 else 0)
    body = _binary(name) + bytes((level, flags)) + packet.keep_alive.to_bytes(2, "big")
    body += _properties(packet.properties, packet.version) + _text(packet.client_id)
    if will is not None:
        body += _properties(will.properties, packet.version) + _text(will.topic) + _binary(will.payload)
    if packet.username is not None:
        body += _text(packet.username)
    if packet.password is not None:
        body += _binary(packet.password)
    return body
