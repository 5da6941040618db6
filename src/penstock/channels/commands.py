"""What can be asked of a channel, and what it tells its members.

A command says who asks (``nid``) for what, on which channel.  An event or a message says who is to get it; the
shell that knows connections leaves out the one that asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from penstock.channels.ids import ChannelId, Nid
from penstock.channels.model import AclKind

__all__ = [
    "Command", "Join", "Leave", "Delete", "Broadcast", "BroadcastMany", "SetAcl", "GetAcl", "SetConfig", "GetConfig",
    "Members", "History", "Range", "Push", "Pop", "Length", "Clear", "Event", "EventKind", "ChannelMessage", "Messages",
    "Delivery", "StoredMessage", "Page",
]  # fmt: skip

EventKind = Literal["MEMBER_JOINED", "MEMBER_LEFT", "CHANNEL_DELETED", "CHANNEL_RECONFIGURED"]


class Command(msgspec.Struct, frozen=True):
    """The base of all commands: the channel, and who asks.

    >>> str(Pop(ChannelId("jobs", "localhost"), Nid("ann", "localhost")).channel)
    '!jobs@localhost'
    """

    channel: ChannelId
    nid: Nid


class Join(Command, frozen=True):
    """Become a member, creating the channel if need be; an owner may let someone else join."""

    on_behalf: Nid | None = None
    registered: bool = True
    """Whether ``on_behalf`` has a live connection; the shell knows."""
    wants_number: bool = False
    """Whether to tell the number of the last message before the join: it is the answer."""


class Leave(Command, frozen=True):
    """Stop being a member; an owner may make someone else leave.  The last one to leave ends the channel."""

    on_behalf: Nid | None = None


class Delete(Command, frozen=True):
    """End the channel with everything it holds."""


class Broadcast(Command, frozen=True):
    """Give a message to all members that may read, and to the history."""

    payload: bytes
    timestamp: int
    """Unix milliseconds; the shell's clock."""


class BroadcastMany(Command, frozen=True):
    """Give many messages at once: numbered in a row, stored together or not at all acknowledged."""

    payloads: tuple[bytes, ...]
    timestamp: int


class SetAcl(Command, frozen=True):
    """Add entries to one of the allow-lists, or remove them."""

    kind: AclKind
    action: Literal["add", "remove"]
    nids: tuple[Nid, ...]


class GetAcl(Command, frozen=True):
    """List the entries of one of the allow-lists; in pages only when both numbers are given."""

    kind: AclKind
    page: int | None = None
    page_size: int | None = None


class SetConfig(Command, frozen=True):
    """Change settings; what is None stays as it is."""

    max_clients: int | None = None
    max_payload_size: int | None = None
    max_persist_messages: int | None = None
    persist: bool | None = None
    message_flush_interval: int | None = None
    type: str | None = None


class GetConfig(Command, frozen=True):
    """Tell the settings."""


class Members(Command, frozen=True):
    """List the members in NID order; all of them when no page is asked for."""

    page: int | None = None
    page_size: int | None = None


class History(Command, frozen=True):
    """Read stored messages from a sequence number on."""

    from_seq: int
    limit: int
    for_resume: bool = False
    """Whether a server reads on behalf of a client that resumes: in pieces of its own size."""


class Range(Command, frozen=True):
    """Tell the first and the last stored sequence number; 0 and 0 when nothing is stored."""

    for_resume: bool = False
    """Whether to tell the last number that was given out as well, stored or not."""


class Push(Command, frozen=True):
    """Put an element at the end of a queue."""

    payload: bytes
    timestamp: int


class Pop(Command, frozen=True):
    """Take the element at the head of a queue: it is never handed out again."""


class Length(Command, frozen=True):
    """Tell how many elements wait in a queue."""


class Clear(Command, frozen=True):
    """Forget all elements of a queue; also the way out of an unusable cursor."""


class Event(msgspec.Struct, frozen=True):
    """Something happened to a channel; ``recipients`` are to hear of it.

    >>> Event("CHANNEL_DELETED", ChannelId("jobs", "localhost"), None, None, ()).kind
    'CHANNEL_DELETED'
    """

    kind: EventKind
    channel: ChannelId
    nid: Nid | None
    owner: bool | None
    recipients: tuple[Nid, ...]
    last_seq: int | None = None
    """The number of the last message before a join, where it is known."""


class ChannelMessage(msgspec.Struct, frozen=True):
    """A broadcast on its way to those who may read it.

    >>> ChannelMessage(ChannelId("ops", "localhost"), Nid("ann", "localhost"), 7, 1767225600000, b"hi!").seq
    7
    """

    channel: ChannelId
    sender: Nid
    seq: int
    timestamp: int
    payload: bytes
    recipients: tuple[Nid, ...] = ()


class Messages(msgspec.Struct):
    """A run of broadcasts numbered in a row, one or many; iterate to get them one by one, which nobody has to.

    >>> run = Messages(ChannelId("ops", "localhost"), Nid("ann", "localhost"), 7, 1767225600000, (b"hi!", b"ho!"))
    >>> [message.seq for message in run]
    [7, 8]
    """

    channel: ChannelId
    sender: Nid
    first_seq: int
    timestamp: int
    payloads: tuple[bytes, ...]
    recipients: tuple[Nid, ...] = ()
    encoded: Any = None
    """What a receiver made of the run to pass it on: the next one that needs the same finds it here."""

    def __len__(self) -> int:
        return len(self.payloads)

    def first(self, count: int) -> Messages:
        """Return the run cut short."""
        return Messages(
            self.channel, self.sender, self.first_seq, self.timestamp, self.payloads[:count], self.recipients
        )

    def __iter__(self) -> Iterator[ChannelMessage]:
        for seq, payload in enumerate(self.payloads, self.first_seq):
            yield ChannelMessage(self.channel, self.sender, seq, self.timestamp, payload, self.recipients)


Delivery = Event | Messages
"""What reaches a session or a listener: an event, or a run of messages of one sender on one channel."""


class StoredMessage(msgspec.Struct, frozen=True):
    """A stored message: its number, its time in Unix milliseconds, who sent it, its bytes.

    >>> StoredMessage(7, 1767225600000, "ann@localhost", b"hi!").seq
    7
    """

    seq: int
    timestamp: int
    sender: str
    payload: bytes


class Page(msgspec.Struct, frozen=True):
    """A part of a list; the numbers are None when the list was given whole.

    >>> Page(("a",)).total is None
    True
    """

    items: tuple[object, ...]
    page: int | None = None
    page_size: int | None = None
    total: int | None = None
