"""The live keys of an embedded bucket at one revision: a store in memory, begun from state.snap.

Each process has its own, and moves it on by reading the log; state.snap is written by whoever's turn it is, now and
then.  Both are PGSS, so loading, replaying and looking up are the work of the append-log store.  A few updates that
came one by one wait beside it, because a store takes many at once for the price of a few.
"""

from __future__ import annotations

import heapq

import msgspec
import numpy as np

from penstock.batch import Batch, Spans, UpdateBatch
from penstock.disk import Disk, MemoryDisk, save_atomically
from penstock.errors import CorruptionError
from penstock.kv.embedded_format import EXPIRES, Expiry
from penstock.log.envelope import decode_headers, open_envelopes
from penstock.log.updates import envelope_updates
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.types import KvEntry, KvUpdate, Op, WatchCursor

__all__ = ["BucketState"]

NAME = "state.snap"
EXPIRY = "expiry.json"
LATE = 64
"""How many updates may wait to be folded into the store."""


class BucketState:
    """The state of a bucket; changed by one thread at a time, read by any.

    >>> disk = MemoryDisk()
    >>> disk.make_folder("b")
    >>> state = BucketState(disk, "b")
    >>> state.revision, state.count
    (0, 0)
    """

    def __init__(self, disk: Disk, folder: str) -> None:
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
        self._late: dict[str, KvUpdate] = {}  # the last word on keys whose updates are not in the store yet
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
            try:
                found = msgspec.json.decode(expiry, type=dict[str, Expiry])
            except msgspec.DecodeError as exc:
                raise CorruptionError(self._expiry_path, 0, f"not a list of expiries: {exc}") from None
            for key, when in found.items():
                self._expires(key, when.revision, when.expires_ns)

    # --- Moving on

    def follow(self, batch: Batch, log: str) -> UpdateBatch:
        """Apply a batch of the log and return its updates."""
        opened = open_envelopes(batch, log)
        updates = envelope_updates(opened)
        flags, headers = np.asarray(opened.extra["flags"]), opened.extra["headers"]
        assert isinstance(headers, Spans)
        view = opened.view
        for index in np.flatnonzero(flags & EXPIRES).tolist():  # only those that have a time to live
            when = decode_headers(headers.of(view, index)).get("expires-ns", b"")
            key = updates[index].key
            self._expires(key, int(opened.positions[index]), int.from_bytes(when, "little"))
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

    def expires(self, key: str, revision: int, expires_ns: int) -> None:
        """Take note that a key of this revision expires."""
        self._expires(key, revision, expires_ns)

    def due(self, now_ns: int) -> list[tuple[str, int]]:
        """Return the keys that have expired and are still there, with their revisions."""
        found = []
        while self._due and self._due[0][0] <= now_ns:
            _, key, revision = heapq.heappop(self._due)
            if self._expiry.get(key, Expiry(0, 0)).revision == revision:
                entry = self._get(key)
                if entry is not None and entry.version.as_int() == revision:
                    found.append((key, revision))
                else:
                    del self._expiry[key]
        for key, revision in found:  # until the purge is in the log they are due
            heapq.heappush(self._due, (self._expiry[key].expires_ns, key, revision))
        return found

    @property
    def next_expiry_ns(self) -> int | None:
        """When the next key expires, None when none does."""
        return self._due[0][0] if self._due else None

    # --- Reading

    def entry(self, key: str, now_ns: int) -> KvEntry | None:
        """Return the entry of a key, tombstones included, unless it has expired."""
        found = self._get(key)
        if found is None or not self._expiry:
            return found
        when = self._expiry.get(key)
        if when is not None and when.expires_ns <= now_ns and found.version.as_int() == when.revision:
            return None
        return found

    def scan(self, prefix: str, now_ns: int, *, hidden: bool = False) -> UpdateBatch:
        """Return the entries below a prefix in order of revision, with ``hidden`` also the empty ones."""
        store = self._settle()
        found = list(store.scan(prefix, limit=max(store.count(), 1)))
        if not found:
            return UpdateBatch.of([])
        batch = UpdateBatch.concat(found)
        keep = np.ones(len(batch), np.bool_) if hidden else batch.values.lengths > 0
        if self._expiry:
            gone = {
                key.encode()
                for key, when in list(self._expiry.items())
                if when.expires_ns <= now_ns and self.entry(key, now_ns) is None
            }
            if gone:
                keys = batch.keys.to_list(batch.buffer)
                keep &= np.fromiter((key not in gone for key in keys), np.bool_, len(keys))
        order = np.flatnonzero(keep)
        order = order[np.argsort(batch.revisions()[order], kind="stable")]
        return UpdateBatch(
            batch.buffer, batch.ops[order], batch.keys[order], batch.values[order], batch.versions[order]
        )

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
        self._due = [(when.expires_ns, key, when.revision) for key, when in live.items()]
        heapq.heapify(self._due)
        # First the times: one that names a revision the old state.snap has not is passed over.
        save_atomically(self._disk, self._expiry_path, msgspec.json.encode(live) + b"\n")
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

    def _expires(self, key: str, revision: int, expires_ns: int) -> None:
        self._expiry[key] = Expiry(revision, expires_ns)
        heapq.heappush(self._due, (expires_ns, key, revision))

    def _read(self, path: str) -> bytes | None:
        try:
            with self._disk.open(path) as file:
                return file.read_at(0, file.stat().size)
        except FileNotFoundError:
            return None

    def _identity(self) -> tuple[int, int] | None:
        found = self._disk.stat(self._path)
        return None if found is None else found.identity
