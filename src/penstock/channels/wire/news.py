"""What a client of a channel server hears: messages, events, payloads of a modulator, and what it missed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.channels.wire.cutter import MessageRun
from penstock.channels.wire.frames import Frame

__all__ = ["Heard", "HeardEvent", "HeardDirect", "Gap", "News", "message_of", "messages_of", "news_of"]


class Heard(msgspec.Struct, frozen=True):
    """A message of a channel.

    >>> Heard("!ops@localhost", "ann@localhost", 7, 1767225600000, b"hi!").seq
    7
    """

    channel: str
    sender: str
    seq: int
    timestamp: int
    payload: bytes


class HeardEvent(msgspec.Struct, frozen=True):
    """Something that happened to a channel.

    >>> HeardEvent("MEMBER_LEFT", "!ops@localhost", "ann@localhost", False).kind
    'MEMBER_LEFT'
    """

    kind: str
    channel: str | None
    nid: str | None
    owner: bool | None


class HeardDirect(msgspec.Struct, frozen=True):
    """A payload that a modulator sent to this client alone.

    >>> HeardDirect("localhost", b"psst").payload
    b'psst'
    """

    sender: str
    payload: bytes


class Gap(msgspec.Struct, frozen=True):
    """Messages that were missed for good: retention took them, or the channel keeps none.

    ``last_seq`` is None where nobody knows how many they are.

    >>> Gap("!ops@localhost", 7, 9).last_seq - 7 + 1
    3
    """

    channel: str
    first_seq: int
    last_seq: int | None


News = Heard | HeardEvent | HeardDirect | Gap


def message_of(frame: Frame) -> Heard:
    """Return the message that a MESSAGE carries.

    >>> fields = {"channel": "!a@x.io", "from": "ann@x.io", "seq": 7, "timestamp": 1767225600000}
    >>> message_of(Frame("MESSAGE", fields, b"hi!")).payload
    b'hi!'
    """
    f = frame.fields
    return Heard(f["channel"], f["from"], f["seq"], f["timestamp"], frame.payload or b"")


def messages_of(run: MessageRun) -> Iterator[Heard]:
    """Return the messages of a run, one after the other.

    >>> [heard.seq for heard in messages_of(MessageRun("!a@x.io", "ann@x.io", 7, 1767225600000, [b"hi!", b"ho!"]))]
    [7, 8]
    """
    channel, sender, time = run.channel, run.sender, run.timestamp
    return (Heard(channel, sender, seq, time, payload) for seq, payload in enumerate(run.payloads, run.first_seq))


def news_of(frame: Frame) -> News:
    """Return what an EVENT or a MOD_DIRECT tells.

    >>> news_of(Frame("EVENT", {"kind": "CHANNEL_DELETED", "channel": "!a@x.io", "nid": None, "owner": None})).kind
    'CHANNEL_DELETED'
    """
    f = frame.fields
    if frame.name == "MOD_DIRECT":
        return HeardDirect(f["from"], frame.payload or b"")
    return HeardEvent(f["kind"], f["channel"], f["nid"], f["owner"])
