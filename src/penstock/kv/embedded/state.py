"""The live keys of an embedded bucket at one revision: a store in memory, begun from state.snap.

Each process has its own, and moves it on by reading the log; state.snap is written by whoever's turn it is, now and
then.  Both are PGSS, so loading, replaying and looking up are the work of the append-log store.  A few updates that
came one by one wait beside it, because a store takes many at once for the price of a few.
"""

from __future__ import annotations

import heapq
import time

import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch, Spans, UpdateBatch
from penstock.disk import Disk, MemoryDisk, save_atomically
from penstock.errors import CorruptionError
from penstock.kv.embedded.format import EXPIRES, Expiry, ExpiryFile, Lease, lease_of
from penstock.kv.embedded.reckon import Reckoner
from penstock.log.envelope import decode_headers, open_envelopes
from penstock.log.updates import envelope_updates
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.types import KvEntry, KvUpdate, Op, WatchCursor

__all__ = ["BucketState", "arrange", "give_way"]

NAME = "state.snap"
EXPIRY = "expiry.json"
ROWS_AT_ONCE = 8192
"""How many rows are looked at before another thread gets its turn."""
PAUSE_SECONDS = 2e-5
LATE = 64
"""How many updates may wait to be folded into the store."""


class BucketState:
    """The state of a bucket; changed by one thread at a time, read by any.

    >>> from penstock.clock import SYSTEM_CLOCK
    >>> disk = MemoryDisk()
    >>> disk.make_folder("b")
    >>> state = BucketState(disk, "b", Reckoner(SYSTEM_CLOCK, disk))
    >>> state.revision, state.count
    (0, 0)
    """

    def __init__(self, disk: Disk, folder: str, reckoner: Reckoner) -> None:
        self._reckoner = reckoner
        self._disk, self._path, self._expiry_path = disk, f"{folder}/{NAME}", f"{folder}/{EXPIRY}"
        self._folder = folder
        self.load()

    def load(self) -> None:
        """Begin again from state.snap, or from nothing."""
        expiry = self._read(self._expiry_path)
        data = self._read(self._path)
        memory = MemoryDisk()
        if data is not None:
            with memory.create(NAME) as file:
                file.write_at(0, data)
        try:
            self._store = AppendLogStore.open(NAME, AppendLogOptions(), disk=memory)
        except CorruptionError as exc:
            raise CorruptionError(self._path, exc.byte, exc.reason) from None
        self._memory = memory
        self._late: dict[str, KvUpdate] = {}  # the newest update of each key that is not in the store yet
        self._late_bytes = 0
        self.revision = self._store.cursor().token.as_int() or 0
        self.saved = self.revision
        """The revision of state.snap, as far as is known here."""
        self.unsaved_bytes = 0
        """How much of the log state.snap does not cover."""
        self._saved_identity = self._identity()
        self._expiry: dict[str, Expiry] = {}
        self._due: list[tuple[int, str, int]] = []
        if expiry:
            for key, when in ExpiryFile.decode(self._expiry_path, expiry).items():
                self._expires(key, self._reckoner.reloaded(when))

    # --- Moving on

    def follow(self, batch: Batch, log: str) -> UpdateBatch:
        """Apply a batch of the log and return its updates."""
        opened = open_envelopes(batch, log)
        updates = envelope_updates(opened)
        flags, headers = np.asarray(opened.extra["flags"]), opened.extra["headers"]
        assert isinstance(headers, Spans)
        view = opened.view
        times = opened.extra.get("event_time_ns")
        for index in np.flatnonzero(flags & EXPIRES).tolist():  # only those that have a time to live
            written_ns = int(times[index]) if isinstance(times, np.ndarray) else 0
            lease = lease_of(decode_headers(headers.of(view, index)), written_ns)
            self.expires(updates[index].key, int(opened.positions[index]), lease)
        self.apply(updates, int(opened.positions[-1]), int(batch.payloads.lengths.sum()))
        return updates

    def apply(self, updates: UpdateBatch | list[KvUpdate], revision: int, log_bytes: int) -> None:
        """Fold updates, the last of them ``revision``, which take ``log_bytes`` of the log."""
        if isinstance(updates, list) and len(updates) + len(self._late) <= LATE:
            for update in updates:
                self._late[update.key] = update
            self._late_bytes += log_bytes
        else:
            self._settle()
            self._store.apply(updates, WatchCursor.of(revision))
        self.revision = revision
        self.unsaved_bytes += log_bytes

    def _settle(self) -> AppendLogStore:
        """Return the store with everything in it."""
        if self._late:
            self._store.apply(list(self._late.values()), WatchCursor.of(self.revision))
            self._late, self._late_bytes = {}, 0  # in this order: who reads meanwhile finds them here or there
        return self._store

    def expires(self, key: str, revision: int, lease: Lease) -> None:
        """Take note that a key of this revision expires."""
        self._expires(key, self._reckoner.expiry(revision, lease))

    def due(self, monotonic_ns: int, limit: int) -> list[tuple[str, int]]:
        """Return keys that have expired and are still there, with their revisions: at most ``limit``, oldest first."""
        found: list[tuple[str, int]] = []
        while self._due and self._due[0][0] <= monotonic_ns and len(found) < limit:
            _, key, revision = heapq.heappop(self._due)
            if self._expiry.get(key, Expiry(0, 0)).revision == revision:
                entry = self._get(key)
                if entry is not None and entry.version.as_int() == revision:
                    found.append((key, revision))
                else:
                    del self._expiry[key]
        for key, revision in found:  # until the purge is in the log they are due
            heapq.heappush(self._due, (self._expiry[key].deadline_ns, key, revision))
        return found

    @property
    def next_deadline_ns(self) -> int | None:
        """When the next key expires, by the monotonic clock; None when none does."""
        return self._due[0][0] if self._due else None

    # --- Reading

    def entry(self, key: str, monotonic_ns: int | None) -> KvEntry | None:
        """Return the entry of a key, tombstones included, unless it has expired by then; None for a time hides none."""
        found = self._get(key)
        if found is None or not self._expiry or monotonic_ns is None:
            return found
        when = self._expiry.get(key)
        if when is not None and when.deadline_ns <= monotonic_ns and found.version.as_int() == when.revision:
            return None
        return found

    def snapshot(self, prefix: str, monotonic_ns: int) -> tuple[list[UpdateBatch], NDArray[np.uint64]]:
        """Return what ``arrange`` makes a scan of: the entries as they are, and the revisions that have expired.

        This is the part that must not be changed meanwhile, and it is short.
        """
        store = self._settle()
        found = list(store.scan(prefix, limit=max(store.count(), 1)))
        gone = [when.revision for when in self._expiry.values() if when.deadline_ns <= monotonic_ns]
        return found, np.array(gone, np.uint64)

    @property
    def count(self) -> int:
        """How many keys there are, tombstones included."""
        return self._settle().count()

    @property
    def live_bytes(self) -> int:
        """What the live keys take."""
        return self._settle().live_bytes

    @property
    def most_live_bytes(self) -> int:
        """What the live keys take at most, for the asking."""
        return self._store.live_bytes + self._late_bytes

    def digest(self) -> str:
        """Return the digest of all entries."""
        return self._settle().digest()

    # --- The checkpoint

    def save(self) -> None:
        """Write state.snap at this revision; the caller holds the turn and has synced the log."""
        live = {key: when for key, when in self._expiry.items() if self._is_live(key, when)}
        self._expiry = live
        self._due = [(when.deadline_ns, key, when.revision) for key, when in live.items()]
        heapq.heapify(self._due)
        # First the times: one that names a revision the old state.snap has not is passed over.
        save_atomically(self._disk, self._expiry_path, ExpiryFile(live).encode())
        self._settle().compact()
        with self._memory.open(NAME) as file:
            save_atomically(self._disk, self._path, file.read_at(0, file.stat().size))
        self.saved, self.unsaved_bytes, self._saved_identity = self.revision, 0, self._identity()

    def saved_elsewhere(self) -> bool:
        """Whether another process has written state.snap since this one looked."""
        identity = self._identity()
        if identity == self._saved_identity:
            return False
        self._saved_identity, self.unsaved_bytes = identity, 0
        return True

    def close(self) -> None:
        """Let go of the memory."""
        self._store.close()

    def _is_live(self, key: str, when: Expiry) -> bool:
        entry = self._get(key)
        return entry is not None and entry.version.as_int() == when.revision

    def _get(self, key: str) -> KvEntry | None:
        late = self._late.get(key)
        if late is None:
            return self._store.get(key)
        return KvEntry(key, late.value, late.version) if late.op is Op.PUT else None

    def _expires(self, key: str, when: Expiry) -> None:
        self._expiry[key] = when
        heapq.heappush(self._due, (when.deadline_ns, key, when.revision))

    def _read(self, path: str) -> bytes | None:
        try:
            with self._disk.open(path) as file:
                size = file.stat().size
                return file.read_at(0, size)
        except FileNotFoundError:
            return None
        except MemoryError:
            raise CorruptionError(path, 0, f"{size} bytes do not fit into memory") from None

    def _identity(self) -> tuple[int, int] | None:
        found = self._disk.stat(self._path)
        return None if found is None else found.identity


def give_way() -> None:
    """Let another thread have the interpreter: long work in a thread must not hold up the event loop in another."""
    time.sleep(PAUSE_SECONDS)  # nought would often give it back to this one


def arrange(found: list[UpdateBatch], gone: NDArray[np.uint64], *, hidden: bool = False) -> UpdateBatch:
    """Return the entries of a snapshot in order of revision, with ``hidden`` also the empty ones."""
    if not found:
        return UpdateBatch.of([])
    batch = UpdateBatch.concat(found)
    parts = []
    for start in range(0, len(batch), ROWS_AT_ONCE):
        parts.append(batch[start : start + ROWS_AT_ONCE].revisions())
        give_way()
    revisions = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    keep = np.ones(len(batch), np.bool_) if hidden else batch.values.lengths > 0
    if len(gone):
        keep &= ~np.isin(revisions, gone)
    order = np.flatnonzero(keep)
    order = order[np.argsort(revisions[order], kind="stable")]
    return UpdateBatch(batch.buffer, batch.ops[order], batch.keys[order], batch.values[order], batch.versions[order])
