"""What a channel is made of: its settings, its lists of who may do what, and the snapshot that is kept on disk.

All values here are immutable: a change makes a new value, which is saved first and applied afterwards.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from penstock.channels.ids import Nid
from penstock.errors import OptionsError

__all__ = ["ChannelType", "AclKind", "StoredConfig", "Config", "Allow", "ChannelAcl", "PersistedChannel", "Limits"]

AclKind = Literal["join", "publish", "read"]


class ChannelType(enum.IntEnum):
    """How a channel hands out messages.  The numbers are on disk: add, never renumber.

    >>> ChannelType.FIFO.word, ChannelType.of("pubsub")
    ('fifo', <ChannelType.PUBSUB: 0>)
    """

    PUBSUB = 0
    FIFO = 1

    @property
    def word(self) -> str:
        """The name the protocol uses."""
        return self.name.lower()

    @classmethod
    def of(cls, word: str) -> ChannelType:
        """Return the type of that name."""
        for kind in cls:
            if kind.word == word:
                return kind
        raise OptionsError(f"unknown channel type: {word}")


class StoredConfig(msgspec.Struct, frozen=True):
    """The five settings as the file has them: each may be missing.

    >>> StoredConfig(max_clients=5).persist is None
    True
    """

    max_clients: int | None = None
    max_payload_size: int | None = None
    max_persist_messages: int | None = None
    persist: bool | None = None
    message_flush_interval: int | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What no channel and no client may exceed.  A new channel starts with these values as its own.

    >>> Limits(max_channels=10).max_clients_per_channel
    100
    """

    max_channels: int = 5000
    """Channels in all."""
    max_clients_per_channel: int = 100
    """Members of one channel."""
    max_channels_per_client: int = 100
    """Channels one client may be a member of."""
    max_payload_size: int = 65_536
    """Bytes of one message."""
    max_persist_messages: int = 1000
    """Messages the history of one channel keeps."""
    max_message_flush_interval: int = 60_000
    """Milliseconds a message of a channel may stay undurable."""
    max_history_limit: int = 100
    """Messages one question for history brings."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not 0 <= getattr(self, field) < 1 << 32:
                raise OptionsError(f"{field}={getattr(self, field)}: must fit 32 bits")


class Config(msgspec.Struct, frozen=True):
    """The settings of a live channel; sizes in bytes, ``message_flush_interval`` in milliseconds.

    ``message_flush_interval`` 0 makes every message durable before it is acknowledged.

    >>> Config(100, 65536, 1000, persist=True).message_flush_interval
    0
    """

    max_clients: int
    max_payload_size: int
    max_persist_messages: int
    persist: bool = False
    message_flush_interval: int = 0

    @classmethod
    def of_limits(cls, limits: Limits) -> Config:
        """Return the settings of a new channel."""
        return cls(limits.max_clients_per_channel, limits.max_payload_size, limits.max_persist_messages)

    @classmethod
    def of_stored(cls, stored: StoredConfig, limits: Limits) -> Config:
        """Return the settings of a restored channel.

        What the file leaves open takes the limit.  A cap of 0 messages stands in old files only and means the
        limit as well.  Whatever was found on disk is persistent, or its next change would not be kept.
        """
        clients, payload = stored.max_clients, stored.max_payload_size
        return cls(
            limits.max_clients_per_channel if clients is None else clients,
            limits.max_payload_size if payload is None else payload,
            stored.max_persist_messages or limits.max_persist_messages,
            True,
            stored.message_flush_interval or 0,
        )

    def stored(self) -> StoredConfig:
        """Return the settings as they are written: all five, always."""
        return StoredConfig(
            self.max_clients, self.max_payload_size, self.max_persist_messages, self.persist,
            self.message_flush_interval,
        )  # fmt: skip


Domains = Mapping[str, frozenset[str]]


class Allow(msgspec.Struct, frozen=True):
    """One allow-list: domain → usernames.  No domains: everyone.  A domain without names: all of that domain.

    >>> everyone = Allow()
    >>> team = everyone.add([Nid.parse("example.com"), Nid.parse("ann@localhost")])
    >>> [team.allows(Nid.parse(text)) for text in ("bob@example.com", "ann@localhost", "bob@localhost")]
    [True, True, False]
    >>> team.names, [str(nid) for nid in team.entries()]
    (1, ['example.com', 'ann@localhost'])
    """

    domains: Domains = MappingProxyType({})

    def allows(self, nid: Nid) -> bool:
        """Say whether ``nid`` is on the list."""
        if not self.domains:
            return True
        names = self.domains.get(nid.domain)
        return names is not None and (not names or nid.username in names)

    def add(self, nids: Iterable[Nid]) -> Allow:
        """Return the list with these added: a name narrows a whole domain, a domain never widens names."""
        domains = dict(self.domains)
        for username, domain in nids:
            names = domains.get(domain, frozenset())
            domains[domain] = names | {username} if username else names
        return Allow(domains)

    def remove(self, nids: Iterable[Nid]) -> Allow:
        """Return the list without these: a domain goes with its last name, or by itself if it has none."""
        domains = dict(self.domains)
        for username, domain in nids:
            names = domains.get(domain)
            if names is None or (names and not username):
                continue
            left = names - {username}
            # A whole-domain entry has no name to take away: only the bare domain removes it.
            if left or (username and not names):
                domains[domain] = left
            else:
                del domains[domain]
        return Allow(domains)

    @property
    def names(self) -> int:
        """How many usernames are listed; whole domains count nothing."""
        return sum(map(len, self.domains.values()))

    def entries(self) -> list[Nid]:
        """Return all entries in NID order; a whole domain is the bare domain."""
        return sorted(Nid(name, domain) for domain, names in self.domains.items() for name in names or ("",))


class ChannelAcl(msgspec.Struct, frozen=True):
    """Who may join, publish and read.

    >>> ChannelAcl().replace("read", Allow({"x.io": frozenset()})).read.allows(Nid.parse("a@y.io"))
    False
    """

    join: Allow = Allow()
    publish: Allow = Allow()
    read: Allow = Allow()

    def of(self, kind: AclKind) -> Allow:
        """Return one of the three lists."""
        found: Allow = getattr(self, kind)
        return found

    def replace(self, kind: AclKind, allow: Allow) -> ChannelAcl:
        """Return all three with one replaced."""
        return msgspec.structs.replace(self, **{kind: allow})


class PersistedChannel(msgspec.Struct, frozen=True):
    """A channel as ``metadata.bin`` has it: what must survive, and nothing else.

    >>> PersistedChannel("jobs").channel_type
    <ChannelType.PUBSUB: 0>
    """

    handler: str
    owner: Nid | None = None
    config: StoredConfig = StoredConfig()
    acl: ChannelAcl = ChannelAcl()
    members: tuple[Nid, ...] = ()
    channel_type: ChannelType = ChannelType.PUBSUB

    def to_json(self) -> dict[str, object]:
        """Return the fields by name, as the command line prints them."""
        return {
            "handler": self.handler,
            "owner": None if self.owner is None else str(self.owner),
            "config": msgspec.structs.asdict(self.config),
            "acl": {
                kind: {domain: sorted(names) for domain, names in sorted(self.acl.of(kind).domains.items())}
                for kind in ("join", "publish", "read")
            },
            "members": [str(nid) for nid in self.members],
            "channel_type": "Fifo" if self.channel_type is ChannelType.FIFO else "PubSub",
        }
