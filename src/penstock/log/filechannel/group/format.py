"""The journal of a group: what its workers have done to its messages, in the order of their turns.

    journal := snapshot event*                  file name: penstock-group-<name>
    record  := length:u32 crc32:u32 message     big-endian, the frame of the queue's own segments
    message := a msgpack array, its first element the number of the record's kind

    0 GroupSnapshot everything at one moment; the first record, and the only one of its kind
    1 Seen       messages were read and wait, each with its key: groups that keep the order of keys
    2 Taken      messages were handed out to a worker, until a time; those not seen before are new
    3 Done       messages are finished: acknowledged, or buried among the dead letters
    4 Failed     messages wait again, from a time on
    5 Renewed    leases go on until a later time
    6 Released   leases have ended: the messages wait again, at once
    7 Cut        the queue ends sooner than the group had read: a power cut took its end

Times are seconds of the machine's monotonic clock, which all its processes share and nobody can set.  They mean
something until the machine starts again; the snapshot says in which life of it (``boot``) they were written.  Where a
delay must outlive that, the wall clock is noted beside it (docs/decisions/034-leases-go-by-the-monotonic-clock.md).

Numbers of kinds and the order of fields are on disk for ever: add at the end, never renumber.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = [
    "Cut",
    "Done",
    "Unfinished",
    "Event",
    "Failed",
    "Released",
    "Renewed",
    "Seen",
    "GroupSnapshot",
    "Taken",
    "decode_event",
    "encode_event",
]

VERSION: Final = 1


class Unfinished(msgspec.Struct, array_like=True):
    """One unfinished message that was handed out before, or that waits behind its key."""

    position: int
    tries: int = 0
    """How often it was handed out."""
    leased: bool = False
    token: int = 0
    """The number of its newest lease."""
    worker: str = ""
    """Who has it, or had it last."""
    until: float = 0.0
    """Leased: when the lease ends.  Waiting: not before."""
    delay: float = 0.0
    """How long it was to wait when it failed, from ``since_ns`` on."""
    since_ns: int = 0
    """The wall clock when it was handed out or failed."""
    first_ns: int = 0
    """The wall clock when it was first handed out: for people who look at the group."""
    key: bytes | None = None
    reason: str = ""
    """Why it failed the last time."""


class GroupSnapshot(msgspec.Struct, array_like=True, tag=0):
    """Everything at one moment."""

    version: int
    log_id: bytes
    """Which queue this is the group of: another one under the same path begins anew."""
    boot: bytes
    """Which life of the machine its times are of."""
    ordered: bool
    """Whether messages of one key go one at a time."""
    next: int
    """From here on nothing was read yet."""
    serial: int
    """The number of the newest lease."""
    entries: list[Unfinished]


class Seen(msgspec.Struct, array_like=True, tag=1):
    """Messages were read, and wait."""

    next: int
    positions: list[int]
    keys: list[bytes | None]


class Taken(msgspec.Struct, array_like=True, tag=2):
    """Messages were handed out; the token of the first is ``serial``, and so on."""

    next: int
    positions: list[int]
    worker: str
    until: float
    serial: int
    at_ns: int


class Done(msgspec.Struct, array_like=True, tag=3):
    """Messages are finished."""

    positions: list[int]


class Failed(msgspec.Struct, array_like=True, tag=4):
    """Messages wait again."""

    positions: list[int]
    until: float
    delay: float
    at_ns: int
    reason: str


class Renewed(msgspec.Struct, array_like=True, tag=5):
    """Leases go on."""

    positions: list[int]
    until: float


class Released(msgspec.Struct, array_like=True, tag=6):
    """Leases have ended."""

    positions: list[int]
    reason: str


class Cut(msgspec.Struct, array_like=True, tag=7):
    """The queue ends at ``next`` now."""

    next: int


Event = GroupSnapshot | Seen | Taken | Done | Failed | Renewed | Released | Cut

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """Return the message of a record.

    >>> encode_event(Done([0, 24])).hex(" ")
    '92 03 92 00 18'
    """
    return _encoder.encode(event)


def decode_event(message: bytes) -> Event:
    """Return the event of a record; msgspec.DecodeError when it is none.

    >>> decode_event(bytes.fromhex("920392 0018"))
    Done(positions=[0, 24])
    """
    return _decoder.decode(message)
