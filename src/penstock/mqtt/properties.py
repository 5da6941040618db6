"""The properties of MQTT 5 as bytes: which there are, how they are laid out and where they may be.

properties := length:varint (identifier:u8 value)*          MQTT 5, 2.2.2
"""

from __future__ import annotations

from typing import Any, Final

from penstock.kernel import mqtt as kernel
from penstock.mqtt.packets import NONE, BadPacket, Kind, Properties
from penstock.mqtt.reasons import Reason

__all__ = ["decode_properties", "encode_properties", "encode_varint", "read_varint", "WILL"]

WILL: Final = 0
"""In place of a kind: the properties of a will inside a CONNECT."""

NAMES: Final = {
    34: "topic_alias_maximum", 1: "payload_format", 2: "message_expiry", 3: "content_type", 8: "response_topic",
    9: "correlation_data", 11: "subscription_ids", 17: "session_expiry", 18: "assigned_client_id",
    19: "server_keep_alive", 21: "authentication_method", 22: "authentication_data", 23: "request_problem",
    24: "will_delay", 25: "request_response", 26: "response_information", 28: "server_reference", 31: "reason_string",
    35: "topic_alias", 36: "maximum_qos", 37: "retain_available", 38: "user", 40: "wildcard_available",
    41: "subscription_ids_available", 42: "shared_available", 39: "maximum_packet_size", 33: "receive_maximum",
}  # fmt: skip
"""In the order in which they are written, which the standard leaves open: the one that mosquitto has in a CONNACK."""

SIZES: Final = {
    **dict.fromkeys((1, 23, 25, 36, 37, 40, 41, 42), 1),
    **dict.fromkeys((19, 33, 34, 35), 2),
    **dict.fromkeys((2, 17, 24, 39), 4),
}
ALLOWED: Final[dict[int, frozenset[int]]] = {
    WILL: frozenset({1, 2, 3, 8, 9, 24, 38}),
    Kind.CONNECT: frozenset({17, 21, 22, 23, 25, 33, 34, 38, 39}),
    Kind.CONNACK: frozenset({17, 18, 19, 21, 22, 26, 28, 31, 33, 34, 36, 37, 38, 39, 40, 41, 42}),
    Kind.PUBLISH: frozenset({1, 2, 3, 8, 9, 11, 35, 38}),
    **dict.fromkeys((Kind.PUBACK, Kind.PUBREC, Kind.PUBREL, Kind.PUBCOMP), frozenset({31, 38})),
    Kind.SUBSCRIBE: frozenset({11, 38}),
    Kind.SUBACK: frozenset({31, 38}),
    Kind.UNSUBSCRIBE: frozenset({38}),
    Kind.UNSUBACK: frozenset({31, 38}),
    Kind.DISCONNECT: frozenset({17, 28, 31, 38}),
    Kind.AUTH: frozenset({21, 22, 31, 38}),
}
NOT_ZERO: Final = frozenset({11, 33, 35, 39})
BOOLEAN: Final = frozenset({1, 23, 25, 36, 37, 40, 41, 42})


def encode_varint(value: int) -> bytes:
    """Return a Variable Byte Integer in its shortest form.

    >>> encode_varint(127).hex(), encode_varint(128).hex()
    ('7f', '8001')
    """
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int, end: int, packet: str) -> tuple[int, int]:
    """Return (value, where it ends)."""
    value = 0
    for used in range(4):
        if at + used >= end:
            raise BadPacket("", packet, "it ends inside of a length", Reason.MALFORMED_PACKET)
        byte = data[at + used]
        value |= (byte & 127) << 7 * used
        if byte < 128:
            if used and not byte:
                break
            return value, at + used + 1
    raise BadPacket("", packet, "a length is not in its shortest form", Reason.MALFORMED_PACKET)


def decode_properties(data: bytes, at: int, end: int, kind: int) -> tuple[Properties, int]:
    """Return the properties of a packet of this kind, and where they end."""
    packet = Kind(kind).name if kind else "the will of CONNECT"
    length, at = read_varint(data, at, end, packet)
    if at + length > end:
        raise BadPacket("", packet, "its properties go past its end", Reason.MALFORMED_PACKET)
    if not length:
        return NONE, at
    pairs = kernel.properties(data, at, at + length)
    if pairs is None:
        raise BadPacket("", packet, "its properties are malformed", Reason.MALFORMED_PACKET)
    allowed = ALLOWED.get(kind, frozenset())
    values: dict[str, Any] = {}
    several: dict[str, list[Any]] = {}
    for what, value in pairs:
        name = NAMES[what]
        if what not in allowed:
            raise BadPacket("", packet, f"it must not have {name}", Reason.MALFORMED_PACKET)  # MQTT 5, 2.2.2.2
        if what in NOT_ZERO and value == 0:
            code = Reason.TOPIC_ALIAS_INVALID if what == 35 else Reason.PROTOCOL_ERROR
            raise BadPacket("", packet, f"{name} is 0", code)
        if what in BOOLEAN and value not in (0, 1):
            raise BadPacket("", packet, f"{name} is {value!r}", Reason.PROTOCOL_ERROR)
        if what == 38 or (what == 11 and kind == Kind.PUBLISH):
            several.setdefault(name, []).append(value)
        elif name in values:
            raise BadPacket("", packet, f"{name} is there twice", Reason.PROTOCOL_ERROR)
        else:
            values[name] = (value,) if what == 11 else value
    for name, found in several.items():
        values[name] = tuple(found)
    return Properties(**values), at + length


def encode_properties(properties: Properties, *, length: bool = True) -> bytes:
    """Return the bytes, in the order of NAMES; ``length`` puts their length before them.

    >>> encode_properties(Properties(topic_alias=3)).hex(), encode_properties(Properties()).hex()
    ('03230003', '00')
    """
    if properties is NONE:
        return b"\0" if length else b""
    out = bytearray()
    for what, name in NAMES.items():
        value = getattr(properties, name)
        if value is None or value == ():
            continue
        size = SIZES.get(what)
        if size is not None:
            out.append(what)
            out += value.to_bytes(size, "big")
        elif what == 11:
            for number in value:
                out.append(what)
                out += encode_varint(number)
        elif what == 38:
            for pair in value:
                out.append(what)
                for part in pair:
                    raw = part.encode()
                    out += len(raw).to_bytes(2, "big") + raw
        else:
            raw = value.encode() if isinstance(value, str) else value
            out.append(what)
            out += len(raw).to_bytes(2, "big") + raw
    return encode_varint(len(out)) + bytes(out) if length else bytes(out)
