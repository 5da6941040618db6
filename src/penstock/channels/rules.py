"""Who may do what, and in which order that is checked.

Each function checks one command against one channel and raises Refused with the protocol's word for the first thing
that is wrong.  The order is part of the protocol: a client that is told WRONG_TYPE learns nothing of membership.

Everything here is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, Config, Limits
from penstock.errors import OptionsError, Refused

__all__ = ["View", "RECOVERABLE", "paged", "merged"]

RECOVERABLE: Final = frozenset({
    "CHANNEL_NOT_FOUND", "CHANNEL_IS_FULL", "CURSOR_RECOVERY_REQUIRED", "FORBIDDEN", "NOT_ALLOWED", "NOT_IMPLEMENTED",
    "PERSISTENCE_NOT_ENABLED", "QUEUE_EMPTY", "QUEUE_FULL", "RESOURCE_LIMIT_REACHED", "USER_IN_CHANNEL",
    "USER_NOT_IN_CHANNEL", "USER_NOT_REGISTERED", "WRONG_TYPE",
})  # fmt: skip
"""Reasons after which a connection stays open; the others end it."""


class View(Protocol):
    """What the rules look at in a channel."""

    owner: Nid | None
    config: Config
    acl: ChannelAcl
    kind: ChannelType
    head: int | None

    def has(self, nid: Nid) -> bool:
        """Say whether ``nid`` is a member."""

    @property
    def size(self) -> int:
        """How many members there are."""

    @property
    def depth(self) -> int:
        """How many elements wait in the queue."""


def served(channel: ChannelId, domain: str, reason: str = "NOT_IMPLEMENTED") -> None:
    """Refuse a channel of another domain."""
    if channel.domain != domain:
        raise Refused(reason)


def may_create(channels: int, limits: Limits) -> None:
    """Refuse one channel too many."""
    if channels >= limits.max_channels:
        raise Refused("RESOURCE_LIMIT_REACHED", "maximum channels reached")


def join(channel: View | None, command: c.Join, joined: int, limits: Limits) -> None:
    """Check a JOIN; ``channel`` is None when it would be created, ``joined`` how many the target is in."""
    target = command.on_behalf or command.nid
    if command.on_behalf is not None:
        # A channel that is only now being created has no owner yet, so nobody may invite into it.
        if channel is None or channel.owner != command.nid:
            raise Refused("FORBIDDEN")
        if not command.registered:
            raise Refused("USER_NOT_REGISTERED")
    if channel is not None:
        if not channel.acl.join.allows(target):
            raise Refused("NOT_ALLOWED")
        if channel.has(target):
            raise Refused("USER_IN_CHANNEL")
        if channel.size >= channel.config.max_clients:
            raise Refused("CHANNEL_IS_FULL")
    elif limits.max_clients_per_channel < 1:
        raise Refused("CHANNEL_IS_FULL")
    if joined >= limits.max_channels_per_client:
        raise Refused("POLICY_VIOLATION", "subscription limit reached")


def leave(channel: View, command: c.Leave) -> None:
    """Check a LEAVE."""
    if command.on_behalf is not None and channel.owner != command.nid:
        raise Refused("FORBIDDEN")
    if not channel.has(command.on_behalf or command.nid):
        raise Refused("USER_NOT_IN_CHANNEL")


def owner(channel: View, nid: Nid) -> None:
    """Refuse everyone but the owner."""
    if channel.owner != nid:
        raise Refused("FORBIDDEN")


def member(channel: View, nid: Nid, reason: str = "USER_NOT_IN_CHANNEL") -> None:
    """Refuse who is not a member."""
    if not channel.has(nid):
        raise Refused(reason)


def kind(channel: View, wanted: ChannelType) -> None:
    """Refuse an operation that does not fit the type of the channel."""
    if channel.kind is not wanted:
        raise Refused("WRONG_TYPE")


def may_read(channel: View, nid: Nid) -> None:
    """Refuse who is not on the read list; the owner is no exception."""
    if not channel.acl.read.allows(nid):
        raise Refused("NOT_ALLOWED")


def payload_given(payload: bytes) -> None:
    """Refuse an empty payload: the protocol cannot carry one, so no member could be given it."""
    if not payload:
        raise Refused("BAD_REQUEST", "length field must be non-zero")


def payload_size(channel: View, payload: bytes) -> None:
    """Refuse a payload over the channel's limit."""
    if len(payload) > channel.config.max_payload_size:
        raise Refused("POLICY_VIOLATION", "payload size exceeds channel limit")


def broadcast(channel: View, command: c.Broadcast | c.BroadcastMany) -> None:
    """Check a BROADCAST up to the point where it takes a sequence number; the size is checked after that."""
    kind(channel, ChannelType.PUBSUB)
    member(channel, command.nid, "FORBIDDEN")
    if not channel.acl.publish.allows(command.nid):
        raise Refused("NOT_ALLOWED")


def history(channel: View, nid: Nid) -> None:
    """Check a HISTORY or a CHAN_SEQ."""
    kind(channel, ChannelType.PUBSUB)
    member(channel, nid)
    may_read(channel, nid)
    if not channel.config.persist:
        raise Refused("PERSISTENCE_NOT_ENABLED")


def queue(channel: View, nid: Nid) -> None:
    """Check what PUSH, POP and GET_CHAN_LEN have in common."""
    kind(channel, ChannelType.FIFO)
    if channel.head is None:
        raise Refused("CURSOR_RECOVERY_REQUIRED")
    member(channel, nid)


def push(channel: View, command: c.Push) -> None:
    """Check a PUSH."""
    queue(channel, command.nid)
    owner(channel, command.nid)
    payload_size(channel, command.payload)
    if channel.depth >= channel.config.max_persist_messages:
        raise Refused("QUEUE_FULL")


def pop(channel: View, command: c.Pop) -> None:
    """Check a POP."""
    queue(channel, command.nid)
    may_read(channel, command.nid)
    if not channel.depth:
        raise Refused("QUEUE_EMPTY")


def clear(channel: View, command: c.Clear) -> None:
    """Check a CLEAR: an unusable cursor does not stop it."""
    kind(channel, ChannelType.FIFO)
    member(channel, command.nid)
    owner(channel, command.nid)


def acl_size(channel: View, allow: Allow) -> None:
    """Refuse a list with more names than the channel may have members."""
    if allow.names > channel.config.max_clients:
        raise Refused("POLICY_VIOLATION", "ACL allow list exceeds max entries")


def config_request(command: c.SetConfig, domain: str, limits: Limits, *, authenticated: bool) -> ChannelType | None:
    """Check a SET_CHAN_CONFIG by itself, before any channel is looked at; return the type it asks for."""
    try:
        wanted = None if command.type is None else ChannelType.of(command.type)
    except OptionsError as exc:
        raise Refused("BAD_REQUEST", str(exc)) from None
    if command.persist and not authenticated:
        raise Refused("FORBIDDEN", "persistence requires auth")
    served(command.channel, domain, "NOT_ALLOWED")
    for field, limit in (
        ("max_clients", limits.max_clients_per_channel),
        ("max_payload_size", limits.max_payload_size),
        ("max_persist_messages", limits.max_persist_messages),
        ("message_flush_interval", limits.max_message_flush_interval),
    ):
        asked = getattr(command, field)
        if asked is not None and asked > limit:
            raise Refused("BAD_REQUEST", f"{field} exceeds server established limit")
    return wanted


def merged(config: Config, command: c.SetConfig) -> Config:
    """Return the settings with those of the command in their place.

    >>> command = c.SetConfig(ChannelId("a", "x.io"), Nid("ann", "x.io"), persist=True)
    >>> merged(Config(100, 65536, 1000), command).persist
    True
    """
    values = {field: getattr(command, field) for field in Config.__struct_fields__}
    return Config(**{field: getattr(config, field) if value is None else value for field, value in values.items()})


def config_change(channel: View, config: Config, wanted: ChannelType | None) -> ChannelType:
    """Check what the settings would become; return the type the channel would have."""
    if channel.kind is ChannelType.FIFO and wanted is ChannelType.PUBSUB:
        raise Refused("BAD_REQUEST", "FIFO is one-way; cannot revert to pubsub")
    result = channel.kind if wanted is None else wanted
    if config.persist and not config.max_persist_messages:
        # Checked before the queue's own rule, which would refuse the same thing in other words.
        raise Refused("BAD_REQUEST", "max_persist_messages must be greater than 0 for persistent channels")
    if result is ChannelType.FIFO and not (config.persist and config.max_persist_messages):
        raise Refused("BAD_REQUEST", "FIFO requires persist=true and max_persist_messages > 0")
    return result


def paged(items: Sequence[object], page: int | None, page_size: int | None, default: int, cap: int) -> c.Page:
    """Return one page of a list, 1-based; the paging numbers only when the page is not the whole list.

    >>> paged("abcde", 3, 2, 20, 100)
    Page(items=('e',), page=3, page_size=2, total=5)
    >>> paged("abc", None, None, 20, 100)
    Page(items=('a', 'b', 'c'), page=None, page_size=None, total=None)
    """
    number = 1 if page is None else page
    size = min(default if page_size is None else page_size, cap)
    part = tuple(items[(number - 1) * size : number * size]) if number else ()
    if len(part) == len(items):
        return c.Page(part)
    return c.Page(part, number, size, len(items))
