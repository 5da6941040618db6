"""The face of a store: what folds, buckets, brokers and nodes keep their state in.

A store is an ordered map from key to (value, version) on disk, together with one cursor.  It is
synchronous and may be used from any thread; asyncio callers reach it through an executor.  It needs no
watch: whoever has state to keep may use it, with any cursor or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from penstock.batch import UpdateBatch
from penstock.types import KvEntry, KvUpdate, Problem, WatchCursor

__all__ = ["StoreReader", "SnapshotStore", "SCAN_LIMIT"]

SCAN_LIMIT = 8192
"""How many entries a batch of a scan holds unless the caller says otherwise."""


class StoreReader(Protocol):
    """A store to read from, while someone else may be applying."""

    backend: str
    """The name of the backend: append-log, rocksdb, lmdb."""
    path: str

    def get(self, key: str) -> KvEntry | None:
        """Return the entry of a key, or None."""

    def multi_get(self, keys: Sequence[str]) -> list[KvEntry | None]:
        """Return the entries of many keys, in the order asked for."""

    def range(self, prefix: str = "") -> list[KvEntry]:
        """Return every entry whose key begins with ``prefix``, in byte order of the key."""

    def scan(self, prefix: str = "", *, limit: int = SCAN_LIMIT) -> Iterator[UpdateBatch]:
        """Yield the same entries as puts, ``limit`` at a time, as they were when the scan began."""

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys alone, in byte order."""

    def cursor(self) -> WatchCursor:
        """Return the cursor of the last apply."""

    def count(self) -> int:
        """Return how many entries there are."""

    def digest(self) -> str:
        """Return the digest of all entries: 32 hex digits, see store/digest.py."""

    def close(self) -> None:
        """Let go of what the handle holds."""

    def __enter__(self) -> Self:
        """Return the handle."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the handle."""


class SnapshotStore(StoreReader, Protocol):
    """A store with its one owner; a second one is refused with LockedError.

    Invariants:

    1. ``apply`` is all or nothing for everyone who reads: a refused batch changes nothing.
    2. The cursor moves with the data, and never names an update that is not there.
    3. After a reopen the store is as some apply left it: the last one that returned, unless power was lost.
    """

    backend_version: str
    """The generation of the files, as an artifact's manifest names it."""

    def apply(self, updates: UpdateBatch | Iterable[KvUpdate], cursor: WatchCursor) -> None:
        """Fold the updates and move the cursor, together; an empty batch moves the cursor alone."""

    def settle(self) -> None:
        """Return when background work is done and everything applied survives a power cut."""

    def reader(self) -> StoreReader:
        """Return a handle that reads while this one applies."""

    def verify(self) -> Iterator[Problem]:
        """Yield every problem; the digest is computed anew and compared."""

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the store, ready for JSON."""

    def write_data(self, folder: str) -> WatchCursor:
        """Write the payload of an artifact as ``folder``/data at one cursor, and return that cursor."""
