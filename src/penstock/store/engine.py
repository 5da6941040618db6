"""What the stores on real engines share: batches, count and digest, entries."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Final, Self

from penstock.batch import UpdateBatch
from penstock.disk import Handle
from penstock.errors import ClosedError, CorruptionError, OptionsError
from penstock.kernel import pgss
from penstock.store.digest import MODULUS, digest_text
from penstock.store.face import SCAN_LIMIT
from penstock.store.pgss import encode_updates
from penstock.store.reader import SharedReader, entries_of
from penstock.store.records import (
    CURSOR_KEY,
    STATE_KEY,
    batch_of_records,
    decode_cursor,
    decode_entry,
    pack_state,
    token_json,
    unpack_state,
)
from penstock.types import KvEntry, KvUpdate, Problem, WatchCursor

__all__ = ["EngineStore", "after_prefix"]

Changes = dict[bytes, bytes | None]
Rows = tuple[list[bytes], list[bytes]]
FIRST_ROWS: Final = 512
"""How many rows are read at a time where another apply meanwhile means to begin again."""


class EngineStore(Handle):
    """A store whose data and meta tables are an engine's; see RocksStore and LmdbStore.

    An engine brings these: read meta, read many keys, write changes and meta in one transaction, iterate a
    prefix, count its bytes, let go, settle, and write an artifact's data.
    """

    backend = ""
    backend_version = ""

    def __init__(self, path: str, *, read_only: bool, running_digest: bool) -> None:
        super().__init__()
        self.path, self.read_only, self._running = path, read_only, running_digest
        self._writing = threading.Lock()
        self._closed = False

    def _begin(self) -> None:
        """Read cursor, count and digest; called when the engine is open."""
        self._token = decode_cursor(self.path, self._read_meta(CURSOR_KEY))
        self._state = unpack_state(self._read_meta(STATE_KEY), self._token.raw)
        """Count and digest, or None while nobody has asked for them since the last apply."""
        if self._state is None and self._running:
            self._state = self._recompute()

    # --- What an engine brings

    @abstractmethod
    def _read_meta(self, key: bytes) -> bytes | None: ...

    @abstractmethod
    def _read_many(self, keys: list[bytes]) -> list[bytes | None]: ...

    @abstractmethod
    def _write(self, changes: Changes, meta: dict[bytes, bytes]) -> None: ...

    @abstractmethod
    def _iterate(self, prefix: bytes, limit: int) -> Generator[Rows]: ...

    @abstractmethod
    def _bytes(self) -> int: ...

    @abstractmethod
    def _release(self) -> None: ...

    def _check_keys(self, keys: list[bytes]) -> None:
        """Refuse keys that the engine cannot hold."""

    @abstractmethod
    def settle(self) -> None:
        """Return when background work is done and everything applied survives a power cut."""

    @abstractmethod
    def write_data(self, folder: str) -> WatchCursor:
        """Write the payload of an artifact as ``folder``/data at one cursor, and return that cursor."""

    # --- The contract

    def apply(self, updates: UpdateBatch | Iterable[KvUpdate], cursor: WatchCursor) -> None:
        """Write the updates, the cursor, count and digest in one transaction of the engine."""
        self._check()
        if self.read_only:
            raise OptionsError(f"{self.path}: the store was opened for reading")
        if not isinstance(updates, list | UpdateBatch):
            updates = list(updates)
        encode_updates(self.path, updates)  # the same limits for every backend
        keys, records = _rows(updates)
        self._check_keys(keys)
        last = dict(zip(keys, records, strict=True))  # the last update of each key
        changes = {key: last[key] for key in sorted(last)}  # engines read and write neighbours faster
        with self._writing:
            self._check()
            raw = cursor.token.raw
            state = self._state_after(changes) if self._running else None
            kept = b"" if state is None else pack_state(*state, raw)
            self._write(changes, {CURSOR_KEY: raw, STATE_KEY: kept})
            self._state, self._token = state, cursor.token

    def _state_after(self, changes: Changes) -> tuple[int, int]:
        """Return count and digest with the old entries taken out and the new ones put in."""
        assert self._state is not None
        names = list(changes)
        gone, old = pgss.digest_values(names, self._read_many(names)) if names else (0, 0)
        came, new = pgss.digest_values(names, list(changes.values()))
        return self._state[0] - gone + came, (self._state[1] - old + new) % MODULUS

    def _counted(self) -> tuple[int, int]:
        """Return count and digest, computing them if they are not kept."""
        state = self._state
        if state is None:
            with self._writing:
                self._check()
                state = self._state = self._recompute()
        return state

    def get(self, key: str) -> KvEntry | None:
        """Return the entry of a key, or None."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[KvEntry | None]:
        """Return the entries of many keys."""
        self._check()
        wanted = [key.encode(errors="surrogatepass") for key in keys]  # such keys are never there
        found = self._read_many(wanted) if wanted else []
        return [
            None if record is None else decode_entry(self.path, key, record)
            for key, record in zip(wanted, found, strict=True)
        ]

    def range(self, prefix: str = "") -> list[KvEntry]:
        """Return every entry whose key begins with ``prefix``, in byte order of the key."""
        return [entry for batch in self.scan(prefix) for entry in entries_of(batch)]

    def scan(self, prefix: str = "", *, limit: int = SCAN_LIMIT) -> Iterator[UpdateBatch]:
        """Yield the same entries as puts, from one snapshot of the engine."""
        self._check()
        for keys, records in self._iterate(prefix.encode(errors="surrogatepass"), limit):
            yield batch_of_records(self.path, keys, records)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys alone, in byte order."""
        self._check()
        for keys, _ in self._iterate(prefix.encode(errors="surrogatepass"), SCAN_LIMIT):
            for key in keys:
                yield key.decode()

    def cursor(self) -> WatchCursor:
        """Return the cursor of the last apply."""
        self._check()
        return WatchCursor(self._token)

    def count(self) -> int:
        """Return how many entries there are."""
        self._check()
        return self._counted()[0]

    def digest(self) -> str:
        """Return the digest of all entries, as it was kept up to date, or computed now."""
        self._check()
        return digest_text(self._counted()[1])

    def reader(self) -> SharedReader:
        """Return a handle that reads while this one applies."""
        self._check()
        return SharedReader(self)

    def verify(self) -> Iterator[Problem]:
        """Read every entry of one snapshot, compute the digest anew and compare with what was kept for it."""
        self._check()
        try:
            kept, rows = self._kept_and_rows()
            count, digest = self._digest_of(rows)
        except CorruptionError as exc:
            yield Problem(exc.file, exc.byte, exc.reason)
            return
        if kept is not None and (count, digest) != kept:
            one, two = digest_text(kept[1]), digest_text(digest)
            reason = f"{kept[0]} entries with the digest {one} were kept, but {count} with {two} are there"
            yield Problem(self.path, 0, reason)

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the store."""
        self._check()
        count, digest = self._counted()
        return {
            "backend": self.backend,
            "path": self.path,
            "entries": count,
            "cursor": token_json(self._token.raw),
            "digest": digest_text(digest),
            "bytes": self._bytes(),
        }

    def close(self) -> None:
        """Let go of the engine and its lock."""
        with self._writing:
            if not self._closed:
                self._closed = True
                self._release()

    def forked(self) -> None:
        """Refuse to work in the child of a fork; the engine stays the parent's."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the store is closed")

    def _kept_and_rows(self) -> tuple[tuple[int, int] | None, Iterator[Rows]]:
        """Return count and digest as they are kept, and the rows of the snapshot they were kept for.

        Others may apply meanwhile, in another process too: what is kept is read before and behind the first rows, which
        are from then on those of one snapshot.
        """
        while True:
            self._check()
            before = self._read_meta(CURSOR_KEY), self._read_meta(STATE_KEY)
            rows = self._iterate(b"", FIRST_ROWS)
            first = next(rows, None)
            if (self._read_meta(CURSOR_KEY), self._read_meta(STATE_KEY)) == before:
                break
            rows.close()
        token = decode_cursor(self.path, before[0])
        return unpack_state(before[1], token.raw), rows if first is None else chain([first], rows)

    def _recompute(self) -> tuple[int, int]:
        return self._digest_of(self._iterate(b"", SCAN_LIMIT))

    def _digest_of(self, rows: Iterator[Rows]) -> tuple[int, int]:
        count = digest = 0
        for keys, records in rows:
            entries = batch_of_records(self.path, keys, records)
            try:
                encode_updates(self.path, entries)
            except OptionsError as exc:
                raise CorruptionError(self.path, 0, str(exc)) from None
            more, part = pgss.digest_values(keys, list(records))
            count, digest = count + more, (digest + part) % MODULUS
        return count, digest


def _rows(updates: UpdateBatch | list[KvUpdate]) -> tuple[list[bytes], list[bytes | None]]:
    """Return keys and value records, None for a delete; a few updates are not worth making columns of."""
    if isinstance(updates, list):
        return [update.key.encode() for update in updates], [
            None if update.op else bytes((len(update.version.raw),)) + update.version.raw + update.value
            for update in updates
        ]
    values, versions = updates.values, updates.versions
    records: list[bytes | None] = list(
        pgss.pack_values(
            memoryview(updates.buffer).cast("B"), values.offsets, values.lengths, versions.offsets, versions.lengths
        )
    )
    if updates.ops.any():
        records = [None if op else record for op, record in zip(updates.ops.tolist(), records, strict=True)]
    return updates.keys.to_list(updates.buffer), records


def after_prefix(prefix: bytes) -> bytes | None:
    r"""Return the first key behind all that begin with ``prefix``, or None when there is none.

    >>> after_prefix(b"ab"), after_prefix(b"a\xff"), after_prefix(b"\xff")
    (b'ac', b'b', None)
    """
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else None
