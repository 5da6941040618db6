"""One embedded bucket in one process, synchronous: turns of writing, catching up, retention.

What must stay true:

1. The log is the truth: a change exists when its entry is whole in the log, whoever wrote it, whatever happened
   to that process afterwards.  State, state.snap and head follow it and can be made again from it.
2. Whoever decides a compare-and-set holds the turn and has applied every entry there is.
3. state.snap never names a revision that a power cut could take out of the log: the log is synced first.
4. A segment goes only when state.snap covers it.  So retention takes history and never a live key.

Lock order: ``_mutex`` (threads of this process), then the turn (processes).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch, UpdateBatch
from penstock.disk import Disk, File, Handle, save_atomically
from penstock.disk.posix import folder_of
from penstock.errors import ClosedError, ExpiredError, OptionsError, PenstockError, ReplacedError, Timeout
from penstock.kv.embedded_format import MAX_RECORD_BYTES, decode_config, encode_config, encode_record
from penstock.kv.embedded_plan import RECORD_OVERHEAD, Change, plan_changes
from penstock.kv.embedded_state import BucketState
from penstock.kv.roles import StoreConfig
from penstock.log.envelope import CONTENT
from penstock.log.messagelog import MessageLogOptions, MessageLogReader
from penstock.log.messagelog.shared import SharedLog
from penstock.log.options import SYNC_SECONDS, SyncMode, check_sync
from penstock.log.sidecar import Register
from penstock.log.updates import envelope_updates
from penstock.metrics import REGISTRY
from penstock.types import KvEntry, Op

__all__ = ["Bucket", "EmbeddedOptions"]

CHANGES: Final = REGISTRY.counter("bucket_changes", "changes written to embedded buckets", labels=("bucket",))
TURNS: Final = REGISTRY.counter("bucket_turns", "turns of writing taken on embedded buckets", labels=("bucket",))
CHECKPOINTS: Final = REGISTRY.counter("bucket_checkpoints", "times a state.snap was written", labels=("bucket",))

LOOK_SECONDS: Final = 0.1
"""How long the hint in ``head`` is trusted: its writer may have died before it moved it."""
READ_LIMIT: Final = 65_536
TEND_NS: Final = 1_000_000_000
LIGHT_BYTES: Final = 64 << 10
"""The most that is written without leaving the caller's thread."""
LIGHT_OVERHEAD: Final = 100
MANY: Final = 16
"""From how many puts on columns are faster than objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """How a process uses embedded buckets.  What a bucket keeps is in its StoreConfig.

    >>> EmbeddedOptions().sync
    'interval'
    """

    # --- What is promised

    sync: SyncMode = "interval"
    """When a change survives a power cut; with ``none`` it still survives the death of any process."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long a change may stay undurable."""

    turn_seconds: float = 10.0
    """How long a writer waits for its turn before it gives up with Timeout."""

    # --- How fast it is

    checkpoint_bytes: int = 4 << 20
    """Write state.snap when this much log, and more than the live keys take, is not covered by it.  Less: a
    bucket opens faster, and writers pause more often."""

    def __post_init__(self) -> None:
        check_sync(self.sync, self.sync_seconds)
        if self.turn_seconds <= 0:
            raise OptionsError(f"turn_seconds={self.turn_seconds}: must be positive")
        if self.checkpoint_bytes < 1:
            raise OptionsError(f"checkpoint_bytes={self.checkpoint_bytes}: must be positive")


class Bucket(Handle):
    """One bucket of one process; any thread may call it.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> bucket = Bucket.open("b", StoreConfig(name="b"), disk=disk)
    >>> bucket.commit([Change("put", "a", b"1"), Change("create", "a", b"2")])[0]
    1
    >>> bucket.entry("a").value
    b'1'
    >>> bucket.close()
    """

    def __init__(self, folder: str, config: StoreConfig, options: EmbeddedOptions, disk: Disk) -> None:
        super().__init__()
        self.folder, self.config, self.options = folder, config, options
        self._disk, self._mutex, self._closed = disk, threading.RLock(), ""
        self._looked = float("-inf")
        self._tended_ns = 0
        path = f"{folder}/log"
        self._log = SharedLog(path, disk, self._log_options())
        self.log_id = self._log.log_id
        self._first = Register(disk, f"{path}/penstock-first")
        self._head = self._open_head()
        self.reader = MessageLogReader(path, disk)
        self._state = BucketState(disk, folder)
        self.catch_up()

    @classmethod
    def open(cls, folder: str, config: StoreConfig, options: EmbeddedOptions | None = None, *, disk: Disk) -> Bucket:
        """Open the bucket in this folder; it is made with ``config`` if it is not there."""
        path = f"{folder}/bucket.json"
        disk.make_folder(folder)
        disk.make_folder(f"{folder}/log")
        if disk.stat(path) is None:
            _create(disk, path, encode_config(config))
            disk.sync_folder(folder_of(folder))
        with disk.open(path) as file:
            found = decode_config(path, file.read_at(0, 1 << 16))
        return cls(folder, found, options or EmbeddedOptions(), disk)

    # --- Writing

    def commit(self, changes: list[Change]) -> list[int | PenstockError]:
        """Take a turn, decide these changes in order, write them with one append; return revisions and refusals."""
        with self._mutex:
            self._check()
            with self._log.turn(self.options.turn_seconds):
                self._settle()
                now_ns = time.time_ns()
                outcomes = self._write(changes, now_ns)
                self._tend(now_ns)
            return outcomes

    def commit_now(self, changes: list[Change]) -> list[int | PenstockError] | None:
        """Like commit, if that waits for nothing: the turn is free, and no file has to be made, read or synced.

        Otherwise None, and nothing was done.
        """
        if self.options.sync == "always" or not self._mutex.acquire(blocking=False):
            return None
        try:
            self._check()
            with self._log.turn(0):
                now_ns = time.time_ns()
                return self._write(changes, now_ns) if self._light(changes, now_ns) else None
        except Timeout:
            return None
        finally:
            self._mutex.release()

    def expire(self) -> None:
        """Write the purges of keys that have expired, if there are any."""
        if self.expiry_due():
            self.commit([])

    def expiry_due(self) -> bool:
        """Whether a key has expired and may still be there."""
        when = self._state.next_expiry_ns
        return when is not None and when <= time.time_ns()

    def compact(self, revision: int) -> None:
        """Forget the history up to and including this revision: no watch resumes from before it."""
        with self._mutex:
            self._check()
            with self._log.turn(self.options.turn_seconds):
                self._settle()
                self._forget(min(revision, self._state.revision) + 1)

    # --- Reading

    def fresh(self) -> bool:
        """Whether this process has applied everything, as far as one look at ``head`` can tell."""
        self._check()
        if time.monotonic() - self._looked > LOOK_SECONDS:
            return False
        return self.head() == self._state.revision

    def head(self) -> int:
        """Return the newest revision, as the last writer noted it."""
        try:
            return int.from_bytes(self._head.read_at(0, 8), "little")
        except OSError:
            self._check()
            raise

    def catch_up(self) -> int:
        """Apply what others have written; return the newest revision."""
        with self._mutex:
            self._check()
            while True:
                try:
                    batch = self.reader.read(self._state.revision + 1, READ_LIMIT)
                except ExpiredError:  # this process slept longer than history lasts
                    before = self._state.revision
                    self._state.load()
                    if self._state.revision <= before:
                        raise
                    continue
                if not len(batch):
                    break
                self._state.follow(batch, self.reader.path)
            self._looked = time.monotonic()
            return self._state.revision

    @property
    def revision(self) -> int:
        """The newest revision this process has applied."""
        return self._state.revision

    def entry(self, key: str) -> KvEntry | None:
        """Return the entry of a key as this process knows it."""
        return self._state.entry(key, time.time_ns())

    def scan(self, prefix: str, *, hidden: bool = False) -> tuple[UpdateBatch, int]:
        """Return the entries below a prefix in order of revision, and the revision they are exact at."""
        with self._mutex:
            self._check()
            return self._state.scan(prefix, time.time_ns(), hidden=hidden), self._state.revision

    def first_revision(self) -> int:
        """Return the first revision whose change can still be read."""
        return max(self.reader.first_position, min(self._forgotten(), self._state.revision + 1))

    def stat(self) -> dict[str, object]:
        """Return what there is to say about the bucket."""
        with self._mutex:
            self.catch_up()
            return {
                "bucket": self.config.name,
                "log_id": self.log_id,
                "revision": self._state.revision,
                "first_revision": self.first_revision(),
                "keys": self._state.count,
                "live_bytes": self._state.live_bytes,
                "log_bytes": self.reader.stat()["bytes"],
                "checkpoint": self._state.saved,
                "digest": self._state.digest(),
            }

    # --- The end

    def close(self) -> None:
        """Let go of the files; with a sync mode, sync once more."""
        with self._mutex:
            if self._closed:
                return
            self._closed = "the bucket is closed"
            try:
                self._log.close()
            finally:
                self.reader.close()
                self._first.close()
                self._head.close()
                self._state.close()

    def forked(self) -> None:
        """Close in the child of a fork; the files stay the parent's."""
        self._mutex = threading.RLock()
        self._closed = "the bucket was opened before a fork: open it again in the child"

    # --- Inside of a turn

    def _write(self, changes: list[Change], now_ns: int) -> list[int | PenstockError]:
        TURNS.add(bucket=self.config.name)
        due = [Change("expire", key, revision=revision) for key, revision in self._state.due(now_ns)]
        outcomes = None if due else self._put_all(changes, now_ns)
        if outcomes is None:
            outcomes = self._decide([*due, *changes], now_ns)[len(due) :]
        return outcomes

    def _light(self, changes: list[Change], now_ns: int) -> bool:
        """Whether these changes fit the active segment, the state is current, and no care is due."""
        state, age_ns = self._state, int(self.config.max_age_seconds * 1e9)
        size = sum(len(change.key) + len(change.value) + LIGHT_OVERHEAD for change in changes)
        return (
            state.revision + 1 == self._log.next_position
            and size <= min(self._log.room_bytes, LIGHT_BYTES)
            and state.unsaved_bytes + size < self.options.checkpoint_bytes
            and (not age_ns or now_ns - self._tended_ns < min(age_ns // 4, TEND_NS))
            and not self.expiry_due()
        )

    def _decide(self, changes: list[Change], now_ns: int) -> list[int | PenstockError]:
        """Decide changes one after another and write what they come to."""
        plan = plan_changes(
            self.config.name,
            changes,
            lambda key: self._state.entry(key, 0),  # what has expired is purged by the changes that come first
            self._log.next_position,
            self._room(),
        )
        if plan.updates:
            records = [
                encode_record(update.op, update.key, update.value, now_ns, expires_ns)
                for update, expires_ns in zip(plan.updates, plan.expires_ns, strict=True)
            ]
            last = int(self._append(records, now_ns)[-1])
            for update, expires_ns in zip(plan.updates, plan.expires_ns, strict=True):
                if expires_ns:
                    self._state.expires(update.key, update.version.as_int() or 0, expires_ns)
            self._state.apply(plan.updates, last, sum(map(len, records)))
        return plan.outcomes

    def _put_all(self, changes: list[Change], now_ns: int) -> list[int | PenstockError] | None:
        """Write changes that need no decision, in columns; None if there is something to decide."""
        if len(changes) < MANY or any(change.what != "put" or change.expires_ns for change in changes):
            return None
        room = self._room()
        size = sum(len(change.key) + len(change.value) + RECORD_OVERHEAD for change in changes)
        if room is not None and size > room:
            return None
        records = [encode_record(Op.PUT, change.key, change.value, now_ns) for change in changes]
        numbers = self._append(records, now_ns)
        updates = envelope_updates(Batch.of(records, positions=numbers))  # type: ignore[arg-type]
        self._state.apply(updates, int(numbers[-1]), size)
        revisions: list[int | PenstockError] = numbers.tolist()
        return revisions

    def _append(self, records: list[bytes], now_ns: int) -> NDArray[np.int64]:
        if len(records) == 1:
            numbers = np.array([self._log.append(records[0], timestamp_ns=now_ns)])
        else:
            numbers = self._log.append_many(records, timestamp_ns=now_ns)
        self._head.write_at(0, int(numbers[-1]).to_bytes(8, "little"))
        CHANGES.add(len(records), bucket=self.config.name)
        return numbers

    def _settle(self) -> None:
        """Apply every entry there is; the turn knows where they end."""
        if self._state.revision + 1 == self._log.next_position:
            return
        self.catch_up()
        if self._state.revision > self._log.next_position - 1:
            raise ReplacedError(self.folder, f"its log ends before revision {self._state.revision}")

    def _room(self) -> int | None:
        limit = self.config.max_bytes
        return None if limit < 0 or self.config.discard == "old" else limit - self._state.live_bytes

    def _tend(self, now_ns: int) -> None:
        """Write state.snap if it is time, and let old history go."""
        state, limit = self._state, self.config.max_bytes
        if state.unsaved_bytes >= max(self.options.checkpoint_bytes, state.live_bytes) and not state.saved_elsewhere():
            self._checkpoint()
        first = 0
        if limit > 0:
            total = self._log.total_bytes
            for last, size in self._log.sealed_ends:
                if total <= limit:
                    break
                total, first = total - size, last + 1
        if self.config.max_age_seconds:
            age_ns = int(self.config.max_age_seconds * 1e9)
            if now_ns - self._tended_ns >= min(age_ns // 4, TEND_NS):
                self._tended_ns = now_ns
                first = max(first, self._older_than(now_ns - age_ns))
        if first:
            self._forget(first)

    def _forget(self, first: int) -> None:
        """Note that history begins at ``first``, and drop the segments below that state.snap covers."""
        if first > self._forgotten():
            self._first.write(bytes.fromhex(self.log_id), first)
        ends = [last for last, _ in self._log.sealed_ends if last < first]
        if ends:
            if ends[-1] > self._state.saved:
                self._checkpoint()
            self._log.drop_before(first)

    def _checkpoint(self) -> None:
        self._log.sync()
        self._state.save()
        CHECKPOINTS.add(bucket=self.config.name)

    def _older_than(self, cutoff_ns: int) -> int:
        """Return the first revision that is not older than this, or the next one."""
        first = self.first_revision()
        while True:
            batch = self.reader.read(first, READ_LIMIT)
            if not len(batch):
                return first
            assert batch.timestamps is not None
            old = int(np.searchsorted(batch.timestamps, np.uint64(max(cutoff_ns, 0))))
            if old < len(batch):
                return int(batch.positions[old])
            first = batch.next_position

    # --- Small things

    def _forgotten(self) -> int:
        found = self._first.read()
        return found[1] if found is not None and found[0] == bytes.fromhex(self.log_id) else 1

    def _log_options(self) -> MessageLogOptions:
        limit = self.config.max_bytes
        return MessageLogOptions(
            sync=self.options.sync,
            sync_seconds=self.options.sync_seconds,
            retention="fifo",
            max_payload_bytes=MAX_RECORD_BYTES,
            content=CONTENT,
            segment_bytes=8 << 20 if limit < 0 else min(max(limit // 8, 64 << 10), 8 << 20),
        )

    def _open_head(self) -> File:
        path = f"{self.folder}/head"
        while True:
            try:
                return self._disk.modify(path)
            except FileNotFoundError:
                try:
                    self._disk.create(path).close()
                except FileExistsError:
                    pass

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.folder}: {self._closed}")


def _create(disk: Disk, path: str, data: bytes) -> None:
    """Make a file that appears whole, unless another process was first: then that one counts."""
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    save_atomically(disk, temporary, data)
    try:
        disk.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        disk.remove(temporary)
    disk.sync_folder(folder_of(path))
