"""What a fold needs of others: a store to keep its state in, and a scope to watch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.batch import UpdateBatch
from penstock.errors import OptionsError
from penstock.kv.roles import KvWatcher, Watch
from penstock.types import WatchCursor

__all__ = ["FoldStore", "WatchScope", "BatchConfig"]


class FoldStore(Protocol):
    """The part of a store that a fold uses.  Synchronous; called from one executor thread at a time.

    >>> hasattr(FoldStore, "apply")
    True
    """

    def apply(self, updates: UpdateBatch, cursor: WatchCursor) -> None:
        """Fold the updates and move the cursor, together; all or nothing."""

    def cursor(self) -> WatchCursor:
        """Return the cursor of the last apply."""

    def keys(self, prefix: str = "") -> Iterable[str]:
        """Yield the keys below a prefix."""


@dataclass(frozen=True, slots=True)
class WatchScope:
    """What of a bucket is folded: everything, one prefix, or several with one consumer.

    >>> WatchScope.all().prefixes, WatchScope.prefix("node.").prefixes
    (('',), ('node.',))
    >>> WatchScope.of(["node.", "svc."]).kind
    'prefixes'
    """

    kind: Literal["all", "prefix", "prefixes"]
    prefixes: tuple[str, ...]

    @classmethod
    def all(cls) -> WatchScope:
        """Return the scope of every key."""
        return cls("all", ("",))

    @classmethod
    def prefix(cls, prefix: str) -> WatchScope:
        """Return the scope of the keys below one prefix."""
        return cls("prefix", (prefix,))

    @classmethod
    def of(cls, prefixes: Iterable[str]) -> WatchScope:
        """Return the scope of the keys below any of these prefixes."""
        return cls("prefixes", tuple(prefixes))

    async def watch(self, watcher: KvWatcher) -> Watch:
        """Start the watch that begins with the re-list."""
        if self.kind == "all":
            return await watcher.watch_all()
        if self.kind == "prefix":
            return await watcher.watch_prefix(self.prefixes[0])
        return await watcher.watch_prefixes(self.prefixes)

    async def watch_from(self, watcher: KvWatcher, cursor: WatchCursor) -> Watch:
        """Start the watch that goes on behind a cursor."""
        if self.kind == "all":
            return await watcher.watch_all_from(cursor)
        if self.kind == "prefix":
            return await watcher.watch_prefix_from(self.prefixes[0], cursor)
        return await watcher.watch_prefixes_from(self.prefixes, cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """When a fold flushes.

    >>> BatchConfig(max_updates=0)
    Traceback (most recent call last):
    penstock.errors.OptionsError: max_updates=0: must be at least 1
    """

    window_seconds: float = 0.01
    """How long the first update of a batch waits for company."""

    max_updates: int = 8192
    """Updates after which a batch is flushed without waiting."""

    channel_capacity: int = 16384
    """Updates between the watch and the fold; a full channel makes the watch wait, and that the server."""

    retry_seconds: float = 0.05
    """First pause after a store refused a batch; it doubles up to a second."""

    progress_seconds: float = 5.0
    """How often the cursor of a quiet scope follows the bucket, so that it does not expire."""

    reconcile_seconds: float = 10.0
    """How often a fold looks whether its bucket has dropped keys without a change, and compares if it has.  A fold
    equals its bucket again within this time and that of one comparison; where one takes long they are made less often,
    so that comparing takes at most a twentieth of the time."""

    def __post_init__(self) -> None:
        if not self.reconcile_seconds > 0:
            raise OptionsError(f"reconcile_seconds={self.reconcile_seconds}: must be positive")
        for name in ("max_updates", "channel_capacity"):
            if getattr(self, name) < 1:
                raise OptionsError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("window_seconds", "retry_seconds", "progress_seconds"):
            if getattr(self, name) < 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must not be negative")
