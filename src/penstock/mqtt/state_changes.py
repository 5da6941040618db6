"""What a turn changed, as bytes of the journal; and what a session is, as a value of the store.

    message       1  flags:u8 count:u32 data_len:u32 crc32:u32 deadline:i64 expiry:i64 topic_len:u16 forward_len:u32
                     topic forward
    list          2  list:u32 count:u32 session:u32*            who gets messages together; known within a segment
    queued        3  flags:u8 id:u64 start:u32 count:u32 list:u32 identifiers_len:u16 identifiers
    queued for    4  the same with a session in place of the list
    sent          5  flags:u8 session:u32 number:u64 id:u64 start:u32 count:u32 identifiers_len:u16 identifiers
    released      6  session:u32 first:u16 count:u32            PUBREC came
    done          7  session:u32 first:u16 count:u32            PUBACK or PUBCOMP came
    consumed      8  session:u32 id:u64 upto:u32                dropped from the front of its queue
    took          9  session:u32 first:u16 count:u32            ids of QoS 2 messages a client published
    freed        10  session:u32 first:u16 count:u32
    session      11  session:u32 len:u32 SessionData
    ended        12  session:u32
    subscribed   13  session:u32 len:u32 SubscriptionData
    unsubscribed 14  session:u32 len:u32 filter
    retained     15  id:u64 stored_at:u64 topic_len:u16 topic   id 0: removed
    counts       16  len:u32 DeliveryTotals                     as of this turn; the last change of it

little-endian; each begins with its number.  The data of a message are its PUBLISH packets as they came; they stand in
the data of the frame, one message after the other.  The id of the n-th message of a frame is its position + n + 1.
Flags of a message: 1 version 5, 2 retain, QoS × 4; of queued and sent: QoS, 4 retain, 8 it had waited.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from penstock.mqtt.packets import Will

__all__ = ["FlightData", "SessionData", "SubscriptionData", "key_of", "decode_session", "decode_subscription", "encode"]

MESSAGE: Final = struct.Struct("<BBIIIqqHI")
LIST: Final = struct.Struct("<BII")
QUEUED: Final = struct.Struct("<BBQIIIH")
SENT: Final = struct.Struct("<BBIQQIIH")
IDS: Final = struct.Struct("<BIHI")
CONSUMED: Final = struct.Struct("<BIQI")
BLOB: Final = struct.Struct("<BII")
ENDED: Final = struct.Struct("<BI")
RETAINED: Final = struct.Struct("<BQQH")
COUNTS: Final = struct.Struct("<BI")

IS_MESSAGE: Final = 1
IS_LIST: Final = 2
IS_QUEUED: Final = 3
IS_QUEUED_FOR: Final = 4
IS_SENT: Final = 5
IS_RELEASED: Final = 6
IS_DONE: Final = 7
IS_CONSUMED: Final = 8
IS_TOOK: Final = 9
IS_FREED: Final = 10
IS_SESSION: Final = 11
IS_ENDED: Final = 12
IS_SUBSCRIBED: Final = 13
IS_UNSUBSCRIBED: Final = 14
IS_RETAINED: Final = 15
IS_COUNTS: Final = 16

LONGEST_KEY: Final = 60_000
"""A longer key of the store is replaced by its hash; what it says stands in the value as well."""

NEVER_NS: Final = -1


class FlightData(msgspec.Struct, array_like=True, frozen=True):
    """Messages under way to a client; ``id`` 0 is released."""

    number: int
    count: int
    qos: int
    retain: bool
    identifiers: bytes | int
    """Of subscriptions, encoded; long ones are a number in ``forms`` of the session."""
    id: int
    start: int
    size: int


class SessionData(msgspec.Struct, array_like=True, frozen=True):
    """A session; in the journal what it was set to, in the store all of it.  Moments are of the broker's own time."""

    number: int
    client_id: str
    username: str | None
    expiry: int
    expires_ns: int
    connected: bool
    will: Will | None
    will_ns: int
    fresh: bool = False
    """Whether it begins here, whatever was before."""
    next_number: int = 0
    received: tuple[tuple[int, int], ...] = ()
    """First and count of ids of QoS 2 messages that were not released yet."""
    flights: tuple[FlightData, ...] = ()
    head: tuple[int, int] | None = None
    """The first message that waits: its id, and which of its run; None when none waits."""
    forms: tuple[bytes, ...] = ()
    """Long identifiers of flights, each once."""


class SubscriptionData(msgspec.Struct, array_like=True, frozen=True):
    """A subscription; ``client_id`` is empty in the journal, which has the session's number."""

    client_id: str
    name: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int


_encoder = msgspec.msgpack.Encoder()
_sessions = msgspec.msgpack.Decoder(SessionData)
_subscriptions = msgspec.msgpack.Decoder(SubscriptionData)
encode: Final = _encoder.encode
decode_session: Final = _sessions.decode
decode_subscription: Final = _subscriptions.decode


def key_of(kind: str, *parts: str) -> str:
    """Return a key of the store; a ``/`` in any part but the last is escaped, so no two keys are the same.

    >>> key_of("sessions", "pump/7"), key_of("subscriptions", "pump/7", "plant/+"), key_of("retained", "a/b")
    ('sessions/pump/7', 'subscriptions/pump%2F7/plant/+', 'retained/a/b')
    """
    *before, last = parts
    key = "/".join([kind, *(part.replace("%", "%25").replace("/", "%2F") for part in before), last])
    if len(key) > LONGEST_KEY // 4 and len(key.encode()) > LONGEST_KEY:
        import hashlib

        return f"{kind}/\x7f{hashlib.sha256(key.encode()).hexdigest()}"
    return key


def ranges(ids: set[int]) -> tuple[tuple[int, int], ...]:
    """Return ids as (first, count), in order.

    >>> ranges({1, 2, 3, 9})
    ((1, 3), (9, 1))
    """
    found: list[tuple[int, int]] = []
    for each in sorted(ids):
        if found and found[-1][0] + found[-1][1] == each:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((each, 1))
    return tuple(found)
