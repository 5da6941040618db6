"""The roles of a key-value bucket: what a caller may hold, whatever stands behind it.

    KvConnection ─ store(name) ─► KvStore ── reader    get, entry, keys, scan
                                          ├─ watcher   batches of changes, from the start or from a cursor
                                          └─ writer    put, delete, compare-and-set, purge, TTL

A caller that only reads holds a KvReader and nothing else.  A backend without watches or writes
returns None for the role; ``KvConnection.capabilities`` says what there is before anyone asks.

Words: a *tombstone* is an empty value written by compare-and-set, which is how ``delete_with_version``
deletes; ``get``, ``keys`` and ``scan`` hide it, ``entry`` shows it, because who wants to compare and set
needs its version.  A *re-list* is the current value of every key, which is what a watch without a cursor
delivers first, in order of revision, before it goes on with the changes.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec

from penstock.batch import UpdateBatch
from penstock.errors import OptionsError, UnsupportedError
from penstock.options import options_from, shows_options
from penstock.types import KvEntry, KvUpdate, VersionToken, WatchCursor

__all__ = [
    "KvConnection",
    "KvStore",
    "KvReader",
    "KvWatcher",
    "Watch",
    "KvWriter",
    "ConnectionCapabilities",
    "StoreConfig",
    "Traces",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCapabilities:
    """What a backend can do.  Advisory: nothing is enforced by it.

    >>> ConnectionCapabilities(cas=True).ttl
    False
    """

    streaming_watch: bool = False
    """Changes are pushed, not polled."""

    prefix_watch: bool = False
    """A watch of a prefix is filtered where the data is."""

    ttl: bool = False
    """``put_with_ttl`` works, and so does ``ttl_seconds`` of ``create`` and ``update``."""

    purge: bool = False
    """``purge`` frees the bytes of a key and its history."""

    cas: bool = False
    """``create``, ``update`` and ``delete_with_version`` compare and set."""

    transactions: bool = False
    """Several keys change together."""

    max_value_bytes: int = 0
    """Longest value; 0 where this layer knows no limit."""

    global_ordering: bool = False
    """Versions order changes across all buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How a bucket is made.  Applies at creation only: an existing bucket is taken as it is.

    >>> StoreConfig(name="routes").history
    1
    >>> StoreConfig(name="routes.eu")
    Traceback (most recent call last):
    penstock.errors.OptionsError: bucket 'routes.eu': only letters, digits, - and _ are allowed
    """

    name: str
    """Letters, digits, ``-`` and ``_``."""

    # --- What the bucket keeps

    history: int = 1
    """Revisions kept for each key, 1 to 64."""

    max_age_seconds: float = 0.0
    """How long a revision is kept; 0 for ever.  It also decides when cursors expire."""

    max_bytes: int = 10 << 20
    """Size of the whole bucket; -1 without limit."""

    discard: Literal["new", "old"] = "new"
    """What a full bucket does: refuse the new value, or evict the oldest."""

    # --- Where it keeps it

    storage: Literal["file", "memory"] = "file"
    """``memory``: NATS keeps it in the server's memory; embedded buckets are files and refuse it."""

    replicas: int = 1
    """Copies in a NATS cluster, 1 to 5; an embedded bucket has one and refuses more."""

    def __post_init__(self) -> None:
        if not self.name or not all(char.isascii() and (char.isalnum() or char in "-_") for char in self.name):
            raise OptionsError(f"bucket {self.name!r}: only letters, digits, - and _ are allowed")
        if not 1 <= self.history <= 64:
            raise OptionsError(f"history={self.history}: must be 1 to 64")
        if not 0 <= self.max_age_seconds < float("inf"):
            raise OptionsError(f"max_age_seconds={self.max_age_seconds}: must not be negative, and end some time")
        if self.max_bytes != -1 and self.max_bytes < 1:
            raise OptionsError(f"max_bytes={self.max_bytes}: must be positive, or -1 for no limit")
        if not 1 <= self.replicas <= 5:
            raise OptionsError(f"replicas={self.replicas}: must be 1 to 5")
        if self.discard not in ("new", "old"):
            raise OptionsError(f"discard={self.discard!r}: must be new or old")
        if self.storage not in ("file", "memory"):
            raise OptionsError(f"storage={self.storage!r}: must be file or memory")


class Traces(msgspec.Struct, frozen=True):
    """What shows whether a bucket has lost changes since somebody looked: compare two of them.

    >>> Traces("2026-01-01", 40, 3) == Traces("2026-01-01", 40, 4)
    False
    """

    identity: str
    """Which bucket this is: another one of the same name has another."""
    last: int
    """Its newest revision."""
    removed: int
    """How many of its changes are gone: overwritten, aged, discarded or purged."""


class KvReader(abc.ABC):
    """Reads of one moment.

    >>> issubclass(KvReader, abc.ABC)
    True
    """

    @abc.abstractmethod
    async def get(self, key: str) -> KvEntry | None:
        """Return the live entry, or None; a tombstone is None."""

    @abc.abstractmethod
    async def entry(self, key: str) -> KvEntry | None:
        """Return the entry even if it is a tombstone; None after a delete or a purge."""

    @abc.abstractmethod
    async def keys(self, prefix: str = "") -> list[str]:
        """Return the live keys below a prefix, without moving their values."""

    @abc.abstractmethod
    async def scan(self, prefix: str = "") -> UpdateBatch:
        """Return the live entries below a prefix as one batch of puts, in order of revision."""

    async def entries(self, prefix: str = "") -> list[KvEntry]:
        """Return what ``scan`` returns, as objects."""
        return [KvEntry(update.key, update.value, update.version) for update in await self.scan(prefix)]

    # --- For those who keep a copy

    async def traces(self) -> Traces | None:
        """Return what shows whether keys went without a change; None where no key ever does."""
        return None

    async def revisions(self, prefix: str = "") -> UpdateBatch:
        """Return the keys below a prefix with their revisions, tombstones included; values may be left out."""
        return await self.scan(prefix)

    async def identity(self) -> str:
        """Return what tells this bucket from another one that has its name later; empty where nothing can."""
        return ""

    async def change(self, revision: int) -> KvUpdate | None:  # noqa: ARG002 - a default keeps no history
        """Return the change that has this revision, None when it is not kept any more."""
        return None


class Watch(abc.ABC):
    """One running watch: batches of changes in order of revision, until ``aclose``.

    Iterating raises ExpiredError when retention has removed changes that were not delivered yet, and
    ReplacedError when the bucket was deleted or recreated.  A watch that falls behind makes the
    server wait; nothing is dropped.

    >>> issubclass(Watch, abc.ABC)
    True
    """

    @property
    @abc.abstractmethod
    def hydrated(self) -> bool:
        """Whether the re-list, or the delta behind the cursor, has been delivered completely."""

    @property
    @abc.abstractmethod
    def lag(self) -> int | None:
        """Changes that the server still had for this watch at the last delivery; None before it."""

    @property
    def progress(self) -> int:
        """The revision up to which everything that matches was handed out, quiet times included; 0 unknown."""
        return 0

    @property
    def in_touch(self) -> bool:
        """Whether the backend has been heard from lately.  If not, nobody knows what it has: not even ``lag``."""
        return True

    @abc.abstractmethod
    async def next_batch(self, limit: int = 65536) -> UpdateBatch:
        """Return the next changes, at least one and at most ``limit``; StopAsyncIteration at the end."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """End the watch.  Calling it again does nothing."""

    def __aiter__(self) -> AsyncIterator[UpdateBatch]:
        return self

    async def __anext__(self) -> UpdateBatch:
        return await self.next_batch()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class KvWatcher(abc.ABC):
    """Starts watches.  A watch has attached when the call returns.

    The ``_from`` forms deliver what came after a cursor and raise ExpiredError when part of that is
    gone.  A backend that cannot resume starts from the beginning, which is why they have a default.

    >>> issubclass(KvWatcher, abc.ABC)
    True
    """

    @property
    def closed(self) -> bool:
        """Whether its connection was shut down, so that trying again is in vain."""
        return False

    @abc.abstractmethod
    async def watch_all(self) -> Watch:
        """Watch every key, beginning with the re-list."""

    @abc.abstractmethod
    async def watch_prefix(self, prefix: str) -> Watch:
        """Watch the keys below one prefix, beginning with the re-list."""

    @abc.abstractmethod
    async def watch_prefixes(self, prefixes: Sequence[str]) -> Watch:
        """Watch the keys below any of these prefixes with one consumer; none of them end at once."""

    async def watch_all_from(self, cursor: WatchCursor) -> Watch:  # noqa: ARG002 - a default cannot resume
        """Watch every key from behind a cursor on."""
        return await self.watch_all()

    async def watch_prefix_from(self, prefix: str, cursor: WatchCursor) -> Watch:  # noqa: ARG002
        """Watch the keys below one prefix from behind a cursor on."""
        return await self.watch_prefix(prefix)

    async def watch_prefixes_from(self, prefixes: Sequence[str], cursor: WatchCursor) -> Watch:  # noqa: ARG002
        """Watch the keys below any of these prefixes from behind a cursor on."""
        return await self.watch_prefixes(prefixes)


class KvWriter(abc.ABC):
    """Writes of single keys; compare-and-set where two writers could meet.

    >>> issubclass(KvWriter, abc.ABC)
    True
    """

    @abc.abstractmethod
    async def put(self, key: str, value: bytes) -> VersionToken:
        """Set a key, whatever it was."""

    async def put_many(self, entries: Iterable[tuple[str, bytes]]) -> list[VersionToken]:
        """Set many keys in order; a backend may send them without waiting for each answer."""
        return [await self.put(key, value) for key, value in entries]

    @abc.abstractmethod
    async def delete(self, key: str) -> bool:
        """Remove a key, whatever it was; always True."""

    @abc.abstractmethod
    async def create(self, key: str, value: bytes, *, ttl_seconds: float | None = None) -> VersionToken:
        """Set a key that is absent or deleted; AlreadyExists if it is live or a tombstone.

        With ``ttl_seconds`` it vanishes after that time, at the clock of whoever keeps the bucket, unless it is set
        again; UnsupportedError where the backend cannot.  That is how a lease ends with its holder.
        """

    @abc.abstractmethod
    async def update(
        self, key: str, value: bytes, version: VersionToken, *, ttl_seconds: float | None = None
    ) -> VersionToken:
        """Set a key whose version is still this one; RevisionMismatch otherwise.  ``ttl_seconds`` as in ``create``."""

    @abc.abstractmethod
    async def delete_with_version(self, key: str, version: VersionToken) -> bool:
        """Replace a key whose version is still this one by a tombstone; RevisionMismatch otherwise."""

    async def purge(self, key: str) -> bool:
        """Remove a key together with its history; UnsupportedError where the backend cannot."""
        raise UnsupportedError(f"purge of {key!r}: this backend cannot purge")

    async def put_with_ttl(self, key: str, value: bytes, ttl_seconds: float) -> VersionToken:  # noqa: ARG002
        """Set a key that vanishes after a time; UnsupportedError where the backend cannot."""
        raise UnsupportedError(f"put_with_ttl of {key!r}: this backend has no per-key time to live")


class KvStore(abc.ABC):
    """One named bucket; it hands out the roles and holds no socket.

    >>> issubclass(KvStore, abc.ABC)
    True
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the bucket."""

    @property
    @abc.abstractmethod
    def reader(self) -> KvReader:
        """The role that reads."""

    @property
    def watcher(self) -> KvWatcher | None:
        """The role that watches, or None."""
        return None

    @property
    def writer(self) -> KvWriter | None:
        """The role that writes, or None."""
        return None


class KvConnection(abc.ABC):
    """The life of a connection, and the place where buckets come from.

    >>> issubclass(KvConnection, abc.ABC)
    True
    """

    @abc.abstractmethod
    async def connect(self) -> None:
        """Connect; of several calls at once one dials and all get its outcome."""

    @abc.abstractmethod
    async def shutdown(self) -> None:
        """Disconnect.  ``connect`` may be called again afterwards."""

    async def close(self) -> None:
        """End the connection, as ``close`` does everywhere; backends say in ``shutdown`` how."""
        await self.shutdown()

    @property
    @abc.abstractmethod
    def is_healthy(self) -> bool:
        """Whether the connection stands at this moment; costs nothing and waits for nothing."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> ConnectionCapabilities:
        """What this backend can do."""

    @abc.abstractmethod
    async def store_with_config(self, config: StoreConfig) -> KvStore:
        """Return a bucket, made with this configuration if it does not exist."""

    @shows_options(StoreConfig)
    async def make(self, name: str, **given: Any) -> KvStore:
        """Return a bucket, made with these options if it is not there: ``make("routes", history=5)``."""
        return await self.store_with_config(options_from(StoreConfig, None, {"name": name, **given}))

    @abc.abstractmethod
    async def store(self, name: str) -> KvStore:
        """Return a bucket, which need not exist: its first ``put`` or ``create`` makes it, as StoreConfig is by itself.

        Nothing else does: reading, watching, deleting and updating what is not there raise ReplacedError.
        """

    @abc.abstractmethod
    async def find(self, name: str) -> KvStore | None:
        """Return a bucket that exists, or None; nothing is made."""

    @abc.abstractmethod
    async def buckets(self) -> list[str]:
        """Return the names of the buckets there are, sorted."""

    @abc.abstractmethod
    async def delete(self, name: str) -> bool:
        """Remove a bucket with all its keys; return whether it was there.  Those who use it get ReplacedError."""

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
