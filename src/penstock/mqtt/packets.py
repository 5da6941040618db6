"""MQTT packets as values.  One struct a packet; ``codec`` turns them into bytes and back."""

from __future__ import annotations

import enum

import msgspec

from penstock.errors import ProtocolError
from penstock.mqtt.reasons import Reason

__all__ = [
    "Kind",
    "BadPacket",
    "Properties",
    "Will",
    "Connect",
    "Connack",
    "Publish",
    "Ack",
    "Filter",
    "Subscribe",
    "Suback",
    "Unsubscribe",
    "Unsuback",
    "Ping",
    "Pong",
    "Disconnect",
    "Auth",
    "Packet",
]


class Kind(enum.IntEnum):
    """The four high bits of the first byte of a packet.

    >>> Kind(0x62 >> 4).name
    'PUBREL'
    """

    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15


class BadPacket(ProtocolError):
    """A packet that breaks the protocol, with the reason code that says how.

    >>> bad = BadPacket("127.0.0.1:4001", "PUBLISH", "QoS 3", 0x81)
    >>> str(bad), Reason(bad.code).name
    ('127.0.0.1:4001 in PUBLISH: QoS 3', 'MALFORMED_PACKET')
    """

    def __init__(self, peer: str, packet: str, reason: str, code: int = 0x81) -> None:
        Exception.__init__(self, peer, packet, reason, code)
        self.peer, self.packet, self.reason, self.code = peer, packet, reason, code


class Properties(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """The properties of a packet of MQTT 5; None is "not there".

    >>> Properties(topic_alias=3).topic_alias, Properties().user
    (3, ())
    """

    payload_format: int | None = None
    message_expiry: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    subscription_ids: tuple[int, ...] = ()
    session_expiry: int | None = None
    assigned_client_id: str | None = None
    server_keep_alive: int | None = None
    authentication_method: str | None = None
    authentication_data: bytes | None = None
    request_problem: int | None = None
    will_delay: int | None = None
    request_response: int | None = None
    response_information: str | None = None
    server_reference: str | None = None
    reason_string: str | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: int | None = None
    user: tuple[tuple[str, str], ...] = ()
    maximum_packet_size: int | None = None
    wildcard_available: int | None = None
    subscription_ids_available: int | None = None
    shared_available: int | None = None


NONE = Properties()


class Will(msgspec.Struct):
    """What is published for a client that goes without a word; ``properties`` holds its delay as well."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: Properties = NONE


class Connect(msgspec.Struct):
    """The first packet.  ``version`` is 3 (MQTT 3.1), 4 (3.1.1) or 5.

    ``bridge`` is what mosquitto made of the highest bit of the version before MQTT 5: the client gets nothing back that
    it published, and retained messages as such.
    """

    client_id: str = ""
    version: int = 4
    clean: bool = True
    keep_alive: int = 60
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties = NONE
    bridge: bool = False


class Connack(msgspec.Struct):
    """The answer to CONNECT; ``reason`` is a return code of 0 to 5 in version 3.1.1."""

    session_present: bool = False
    reason: int = 0
    properties: Properties = NONE


class Publish(msgspec.Struct):
    """One message."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties = NONE


class Ack(msgspec.Struct):
    """PUBACK, PUBREC, PUBREL or PUBCOMP, as ``kind`` says."""

    kind: Kind
    packet_id: int
    reason: int = 0
    properties: Properties = NONE


class Filter(msgspec.Struct, frozen=True):
    """One subscription: a filter and its options."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


class Subscribe(msgspec.Struct):
    """Ask for messages."""

    packet_id: int
    filters: tuple[Filter, ...]
    properties: Properties = NONE


class Suback(msgspec.Struct):
    """One reason code for each filter."""

    packet_id: int
    reasons: tuple[int, ...]
    properties: Properties = NONE


class Unsubscribe(msgspec.Struct):
    """Ask for no more."""

    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = NONE


class Unsuback(msgspec.Struct):
    """One reason code for each filter; none in version 3.1.1."""

    packet_id: int
    reasons: tuple[int, ...] = ()
    properties: Properties = NONE


class Ping(msgspec.Struct):
    """PINGREQ."""


class Pong(msgspec.Struct):
    """PINGRESP."""


class Disconnect(msgspec.Struct):
    """The last packet."""

    reason: int = 0
    properties: Properties = NONE


class Auth(msgspec.Struct):
    """A step of an enhanced authentication."""

    reason: int = Reason.CONTINUE_AUTHENTICATION
    properties: Properties = NONE


Packet = (
    Connect | Connack | Publish | Ack | Subscribe | Suback | Unsubscribe | Unsuback | Ping | Pong | Disconnect | Auth
)
