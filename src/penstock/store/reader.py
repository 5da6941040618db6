"""The read handle every store gives out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from penstock.batch import UpdateBatch
from penstock.errors import ClosedError
from penstock.store.face import SCAN_LIMIT, SnapshotStore, StoreReader
from penstock.types import KvEntry, WatchCursor

__all__ = ["SharedReader", "entries_of"]


def entries_of(batch: UpdateBatch) -> list[KvEntry]:
    """Return the entries of a batch of puts.

    >>> from penstock.types import KvUpdate
    >>> [entry.key for entry in entries_of(UpdateBatch.of([KvUpdate.put("a", b"1")]))]
    ['a']
    """
    return [KvEntry(update.key, update.value, update.version) for update in batch]


class SharedReader:
    """Reads what another handle owns: from any thread, while that one applies, until that one is closed.

    >>> from penstock.disk import MemoryDisk
    >>> from penstock.store import AppendLogStore
    >>> from penstock.types import KvUpdate
    >>> store = AppendLogStore.open("fold.snap", disk=MemoryDisk())
    >>> reader = store.reader()
    >>> store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    >>> reader.get("a").value, reader.cursor().token.as_int()
    (b'1', 1)
    >>> reader.close(); store.close()
    """

    def __init__(self, store: SnapshotStore) -> None:
        self._store: SnapshotStore | None = store
        self.backend, self.path = store.backend, store.path

    def _owner(self) -> StoreReader:
        if self._store is None:
            raise ClosedError(f"{self.path}: the reader is closed")
        return self._store

    def get(self, key: str) -> KvEntry | None:
        """Return the entry of a key, or None."""
        return self._owner().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[KvEntry | None]:
        """Return the entries of many keys."""
        return self._owner().multi_get(keys)

    def range(self, prefix: str = "") -> list[KvEntry]:
        """Return every entry whose key begins with ``prefix``."""
        return self._owner().range(prefix)

    def scan(self, prefix: str = "", *, limit: int = SCAN_LIMIT) -> Iterator[UpdateBatch]:
        """Yield the same entries in batches."""
        return self._owner().scan(prefix, limit=limit)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys alone."""
        return self._owner().keys(prefix)

    def cursor(self) -> WatchCursor:
        """Return the cursor of the last apply."""
        return self._owner().cursor()

    def count(self) -> int:
        """Return how many entries there are."""
        return self._owner().count()

    def digest(self) -> str:
        """Return the digest of all entries."""
        return self._owner().digest()

    def close(self) -> None:
        """Let go of the store; it stays open."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
