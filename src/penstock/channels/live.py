"""A channel in memory, and who is in which channels.  Changed by the core alone."""

from __future__ import annotations

from operator import lt
from typing import Any

import msgspec

from penstock.channels.ids import Nid
from penstock.channels.model import ChannelAcl, ChannelType, Config, Limits, PersistedChannel

__all__ = ["LiveChannel", "Memberships"]


class Memberships:
    """Who is in which channels, over all shards, and how many channels there are.

    >>> slots = Memberships()
    >>> slots.take(Nid("ann", "x.io"), "jobs"); slots.of(Nid("ann", "x.io"))
    ['jobs']
    """

    def __init__(self) -> None:
        self._handlers: dict[Nid, set[str]] = {}
        self.channels = 0

    def of(self, nid: Nid) -> list[str]:
        """Return the handlers of the channels ``nid`` is in, sorted."""
        return sorted(self._handlers.get(nid, ()))

    def count(self, nid: Nid) -> int:
        """Return how many channels ``nid`` is in."""
        return len(self._handlers.get(nid, ()))

    def take(self, nid: Nid, handler: str) -> None:
        """Note a membership."""
        handlers = self._handlers.get(nid)
        if handlers is None:
            self._handlers[nid] = {handler}
        else:
            handlers.add(handler)

    def release(self, nid: Nid, handler: str) -> None:
        """Forget a membership."""
        handlers = self._handlers.get(nid)
        if handlers is not None:
            handlers.discard(handler)
            if not handlers:
                del self._handlers[nid]


class LiveChannel:
    """A live channel.

    ``next_seq`` is the number the next message gets, ``log_next`` the next one the log takes (lower where numbers were
    spent on messages that are not stored), and ``head`` the queue's cursor, None while it is unusable.

    >>> channel = LiveChannel("jobs", Config(10, 100, 1000))
    >>> channel.size, channel.depth
    (0, 0)
    """

    def __init__(self, handler: str, config: Config, flush_floor: int = 0) -> None:
        self.handler = handler
        self._flush_floor = flush_floor
        self.config = config
        self.owner: Nid | None = None
        self.acl = ChannelAcl()
        self.kind = ChannelType.PUBSUB
        self.next_seq = 1
        self.log_next = 1
        self.head: int | None = 1
        self._set: set[Nid] = set()
        self._members: tuple[Nid, ...] = ()
        self._readers: tuple[Nid, ...] | None = None

    @classmethod
    def restored(cls, saved: PersistedChannel, limits: Limits, flush_floor: int = 0) -> LiveChannel:
        """Return the channel a file describes; members sorted and each once, however they were written."""
        channel = cls(saved.handler, Config.of_stored(saved.config, limits), flush_floor)
        channel.owner, channel.kind = saved.owner, saved.channel_type
        members = saved.members
        if not all(map(lt, members, members[1:])):
            members = tuple(sorted(set(members)))
        channel.set_members(members)
        channel.set_acl(saved.acl)
        return channel

    def flush_interval(self, config: Config | None = None) -> int:
        """Return after how many milliseconds a message is durable, with these settings or its own; 0: at once."""
        return max((config or self.config).message_flush_interval, self._flush_floor)

    @property
    def members(self) -> tuple[Nid, ...]:
        """The members in NID order."""
        return self._members

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self._set)

    @property
    def depth(self) -> int:
        """How many elements wait in the queue."""
        return 0 if self.head is None else max(0, self.next_seq - self.head)

    def has(self, nid: Nid) -> bool:
        """Say whether ``nid`` is a member."""
        return nid in self._set

    def set_members(self, members: tuple[Nid, ...]) -> None:
        """Replace the members."""
        self._members, self._set, self._readers = members, set(members), None

    def set_acl(self, acl: ChannelAcl) -> None:
        """Replace the lists; who receives follows at once."""
        self.acl, self._readers = acl, None

    def stored(self, seq: int) -> None:
        """Note that the log has this message now."""
        self.log_next = seq + 1

    def give_back(self, seq: int) -> None:
        """Give this number, and those behind it, out again: what had them was not stored, and nobody heard it."""
        self.next_seq = min(self.next_seq, seq)

    def readers(self) -> tuple[Nid, ...]:
        """Return the members that may read."""
        if self._readers is None:
            self._readers = tuple(nid for nid in self._members if self.acl.read.allows(nid))
        return self._readers

    def snapshot(self, **changes: Any) -> PersistedChannel:
        """Return what is kept on disk, with these fields as they are going to be."""
        config: Config = changes.pop("config", self.config)
        now = PersistedChannel(self.handler, self.owner, config.stored(), self.acl, self._members, self.kind)
        return msgspec.structs.replace(now, **changes) if changes else now
