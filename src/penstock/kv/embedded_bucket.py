"""One embedded bucket in one process, synchronous: turns of writing, catching up, retention.

What must stay true:

1. The log is the truth: a change exists when its entry is whole in the log, whoever wrote it, whatever happened
   to that process afterwards.  State, state.snap and head follow it and can be made again from it.
2. Whoever decides a compare-and-set holds the turn and has applied every entry there is.
3. state.snap and the segments go by the rules of embedded_retain.py: retention takes history and never a live key.

Lock order: ``_mutex`` (threads of this process), then the turn (processes).
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from penstock.batch import Batch, UpdateBatch
from penstock.disk import Disk, File, Handle, save_atomically
from penstock.disk.posix import folder_of
from penstock.errors import ClosedError, ExpiredError, PenstockError, ReplacedError, Timeout
from penstock.kv.embedded_format import MAX_RECORD_BYTES, decode_config, encode_config, encode_record
from penstock.kv.embedded_options import EmbeddedOptions
from penstock.kv.embedded_plan import RECORD_OVERHEAD, Change, plan_changes
from penstock.kv.embedded_retain import Retention
from penstock.kv.embedded_state import BucketState
from penstock.kv.roles import StoreConfig
from penstock.log.envelope import CONTENT
from penstock.log.messagelog import MessageLogOptions, MessageLogReader
from penstock.log.messagelog.shared import SharedLog
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.updates import envelope_updates
from penstock.metrics import REGISTRY
from penstock.types import KvEntry, KvUpdate, Op, VersionToken

__all__ = ["Bucket"]

CHANGES: Final = REGISTRY.counter("bucket_changes", "changes written to embedded buckets", labels=("bucket",))
TURNS: Final = REGISTRY.counter("bucket_turns", "turns of writing taken on embedded buckets", labels=("bucket",))

LOOK_SECONDS: Final = 0.1
"""How long the hint in ``head`` is trusted: its writer may have died before it moved it."""
LIGHT_BYTES: Final = 64 << 10
"""The most that is written without leaving the caller's thread."""
LIGHT_OVERHEAD: Final = 100
MANY: Final = 16
"""From how many puts on columns are faster than objects."""


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
        self.limited = config.max_bytes >= 0 and config.discard == "new"
        """Whether ``max_bytes`` bounds the live keys, not only the log."""
        path = f"{folder}/log"
        self._log = SharedLog(path, disk, self._log_options())
        self.log_id = self._log.log_id
        self._head = self._open_head()
        self.reader = MessageLogReader(path, disk)
        self._state = BucketState(disk, folder)
        self._retention = Retention(config, options, self._log, self.reader, self._state, disk)
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
                self._retention.tend(now_ns)
            return outcomes

    def commit_now(self, changes: list[Change]) -> list[int | PenstockError] | None:
        """Like commit, if that waits for nothing: the turn is free, and no file has to be made, read or synced.

        Otherwise None, and nothing was done.
        """
        if self.options.sync == "always" or not self._mutex.acquire(blocking=False):
            return None
        try:
            self._check()
            self._log.begin_turn(0)
            try:
                now_ns = time.time_ns()
                return self._write(changes, now_ns) if self._light(changes, now_ns) else None
            finally:
                self._log.end_turn()
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
                self._retention.forget(min(revision, self._state.revision) + 1)

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
                    batch = self.reader.read(self._state.revision + 1, DEFAULT_LIMIT)
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
        return self._retention.first_revision()

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
                self._retention.close()
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
        size = sum(len(change.key) + len(change.value) + LIGHT_OVERHEAD for change in changes)
        return (
            self._state.revision + 1 == self._log.next_position
            and size <= min(self._log.room_bytes, LIGHT_BYTES)
            and self._retention.idle(size, now_ns)
            and not self.expiry_due()
        )

    def _decide(self, changes: list[Change], now_ns: int) -> list[int | PenstockError]:
        """Decide changes one after another and write what they come to."""
        plan = plan_changes(
            self.config.name,
            changes,
            lambda key: self._state.entry(key, 0),  # what has expired is purged by the changes that come first
            self._log.next_position,
            self.config.max_bytes - self._state.live_bytes if self.limited else None,
        )
        if plan.updates:
            records = [
                encode_record(update.op, update.key, update.value, now_ns, expires_ns)
                for update, expires_ns in zip(plan.updates, plan.expires_ns, strict=True)
            ]
            last = self._append(records, now_ns)
            for update, expires_ns in zip(plan.updates, plan.expires_ns, strict=True):
                if expires_ns:
                    self._state.expires(update.key, update.version.as_int() or 0, expires_ns)
            self._state.apply(plan.updates, last, sum(map(len, records)))
        return plan.outcomes

    def _put_all(self, changes: list[Change], now_ns: int) -> list[int | PenstockError] | None:
        """Write changes that need no decision, many of them in columns; None if there is something to decide."""
        if not changes:
            return None
        for change in changes:
            if change.what != "put" or change.expires_ns:
                return None
        if self.limited:
            size = sum(len(change.key) + len(change.value) + RECORD_OVERHEAD for change in changes)
            if size > self.config.max_bytes - self._state.most_live_bytes:
                return None
        records = [encode_record(Op.PUT, change.key, change.value, now_ns) for change in changes]
        last = self._append(records, now_ns)
        revisions = range(last - len(records) + 1, last + 1)
        updates: UpdateBatch | list[KvUpdate]
        if len(changes) < MANY:
            updates = [
                KvUpdate(Op.PUT, change.key, change.value, VersionToken.of(revision))
                for change, revision in zip(changes, revisions, strict=True)
            ]
        else:
            updates = envelope_updates(Batch.of(records, positions=revisions))
        self._state.apply(updates, last, sum(map(len, records)))
        return list(revisions)

    def _append(self, records: list[bytes], now_ns: int) -> int:
        """Append records, whose revisions are in a row, and return the last one's."""
        if len(records) == 1:
            last = self._log.append(records[0], timestamp_ns=now_ns)
        else:
            last = int(self._log.append_many(records, timestamp_ns=now_ns)[-1])
        self._head.write_at(0, last.to_bytes(8, "little"))
        CHANGES.add(len(records), bucket=self.config.name)
        return last

    def _settle(self) -> None:
        """Apply every entry there is; the turn knows where they end."""
        if self._state.revision + 1 == self._log.next_position:
            return
        self.catch_up()
        if self._state.revision > self._log.next_position - 1:
            raise ReplacedError(self.folder, f"its log ends before revision {self._state.revision}")

    # --- Small things

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
