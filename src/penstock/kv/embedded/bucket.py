"""One embedded bucket in one process, synchronous: turns of writing, catching up, retention.

What must stay true:

1. The log is the truth: a change exists when its entry is whole in the log, whoever wrote it, whatever happened
   to that process afterwards.  State, state.snap and head follow it and can be made again from it.
2. Whoever decides a compare-and-set holds the turn and has applied every entry there is.
3. state.snap and the segments go by the rules of retain.py: retention takes history and never a live key.
4. Reading changes nothing: what writing needs (locks, ``head``) is opened by the first write, so a bucket can be read
   on a mount that is read-only, and by a user who may only read.

Lock order: ``_mutex`` (threads of this process), then the turn (processes).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Final

import numpy as np

from penstock.batch import Batch, UpdateBatch
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Disk, File, Handle, ReadFile, save_atomically
from penstock.disk.doors import refuse_foreign
from penstock.disk.plain import boot_id_of, clear_folder, refuse_link
from penstock.disk.posix import folder_of
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    PenstockError,
    ReadOnlyError,
    ReplacedError,
    Timeout,
)
from penstock.kv.embedded.format import MAX_RECORD_BYTES, decode_config, encode_config, encode_record
from penstock.kv.embedded.last import LastChange
from penstock.kv.embedded.options import EmbeddedOptions
from penstock.kv.embedded.plan import RECORD_OVERHEAD, Change, plan_changes
from penstock.kv.embedded.powercut import HoleError, cut_hole, encode_head, lost_power
from penstock.kv.embedded.reckon import Reckoner
from penstock.kv.embedded.retain import BucketRetention
from penstock.kv.embedded.state import BucketState, arrange
from penstock.kv.roles import StoreConfig
from penstock.log.ends import lost_at_end
from penstock.log.envelope import CONTENT, encode_envelopes
from penstock.log.messagelog import MessageLogOptions, MessageLogReader
from penstock.log.messagelog.shared import SharedLog
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.log.updates import envelope_updates
from penstock.metrics import REGISTRY
from penstock.types import KvEntry, KvUpdate, Op, VersionToken

__all__ = ["Bucket"]

CHANGES: Final = REGISTRY.counter("bucket_changes", "changes written to embedded buckets", labels=("bucket",))
TURNS: Final = REGISTRY.counter("bucket_turns", "turns of writing taken on embedded buckets", labels=("bucket",))

HEAD_LOOK_SECONDS: Final = 0.1
"""How long the hint in ``head`` is trusted: its writer may have died before it moved it."""
LIGHT_BYTES: Final = 64 << 10
"""The most that is written without leaving the caller's thread."""
LIGHT_OVERHEAD: Final = 100
MANY: Final = 16
"""From how many puts on columns of updates are faster than objects."""
COLUMNS: Final = 512
"""From how many puts on columns of envelopes are faster than one envelope after another."""
PURGES_A_TURN: Final = 256
"""How many keys that have expired are purged along with other writes: who writes does not pay for all of them."""
NO_RIGHT: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


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

    def __init__(
        self, folder: str, config: StoreConfig, options: EmbeddedOptions, disk: Disk, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__()
        self.folder, self.config, self.options = folder, config, options
        self._disk, self._mutex, self._closed, self._replaced = disk, threading.RLock(), "", ""
        self._looked = float("-inf")
        self._last = LastChange()
        self._reloads = -1  # of the log, as of when all of it was known
        self._reckoner = Reckoner(clock, disk)
        self.limited = config.max_bytes >= 0 and config.discard == "new"
        """Whether ``max_bytes`` bounds the live keys, not only the log."""
        path = f"{folder}/log"
        identity = Sidecar(disk, f"{path}/penstock-").identity()
        if identity is None:
            raise CorruptionError(f"{path}/penstock-id", 0, "it is missing: the bucket was not copied whole")
        self.log_id = identity.log_id
        self._log: SharedLog | None = None  # opened by the first write
        self._hint: ReadFile | None = None  # ``head`` as a reader has it
        self._head: File | None = None  # and as a writer does
        self._may_write, self._boot = True, boot_id_of(disk) or bytes(16)
        self.reader = MessageLogReader(path, disk)
        self._state = BucketState(disk, folder, self._reckoner)
        self._retention = BucketRetention(
            folder, config, options, self.reader, self._state, disk, self._reckoner, self.log_id
        )
        lost = lost_at_end(self.reader)
        if lost is not None:
            raise CorruptionError(lost.file, lost.byte, lost.reason)
        try:
            self.catch_up()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        folder: str,
        config: StoreConfig,
        options: EmbeddedOptions | None = None,
        *,
        disk: Disk,
        make: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Bucket:
        """Open the bucket in this folder; with ``make`` it is made with ``config`` if it is not there."""
        path = f"{folder}/bucket.json"
        for name in (folder, f"{folder}/log"):
            refuse_link(disk, name)
        if disk.stat(path) is None:
            if not make:
                raise ReplacedError(folder, "the bucket does not exist")
            refuse_foreign(disk, folder, "bucket")
            disk.make_folder(folder)
            # The log first: what has a bucket.json is a bucket that can be read.
            SharedLog(f"{folder}/log", disk, _log_options(config, options or EmbeddedOptions())).close()
            _create(disk, path, encode_config(config))
            disk.sync_folder(folder_of(folder))
        with disk.open(path) as file:
            found = decode_config(path, file.read_at(0, 1 << 16))
        options = options or EmbeddedOptions()
        try:
            return cls(folder, found, options, disk, clock)
        except HoleError as hole:
            if not lost_power(folder, disk, hole):
                raise
            try:
                cut_hole(folder, disk, _log_options(found, options), hole)
            except OSError as exc:
                if exc.errno not in NO_RIGHT:
                    raise
                raise hole from None  # whoever may write has to open it first
        return cls(folder, found, options, disk, clock)

    # --- Writing

    def commit(self, changes: list[Change]) -> list[int | PenstockError]:
        """Take a turn, decide these changes in order, write them with one append; return revisions and refusals."""
        with self._mutex:
            self._check()
            log = self._writable()
            with log.turn(self.options.turn_seconds):
                self._settle(log)
                outcomes = self._write(log, changes, self._reckoner.now_ns())
                self._retention.tend(log)
            return outcomes

    def commit_now(self, changes: list[Change]) -> list[int | PenstockError] | None:
        """Like commit, if that waits for nothing: the turn is free, and no file has to be made, read or synced.

        Otherwise None, and nothing was done.
        """
        log = self._log
        if log is None or self.options.sync == "always" or not self._mutex.acquire(blocking=False):
            return None
        try:
            self._check()
            log.begin_turn(0)
            try:
                return self._write(log, changes, self._reckoner.now_ns()) if self._light(log, changes) else None
            finally:
                log.end_turn()
        except Timeout:
            return None
        finally:
            self._mutex.release()

    def expire(self) -> None:
        """Write the purges of keys that have expired, if there are any."""
        if self.expiry_due():
            self.commit([])

    def expiry_due(self) -> bool:
        """Whether a key has expired and may still be there, and this process may purge it."""
        when = self._state.next_deadline_ns
        return when is not None and self._may_write and when <= self._reckoner.monotonic_ns()

    def seconds_to_expiry(self) -> float | None:
        """Return when the next key expires that this process may purge; None while none does."""
        when = self._state.next_deadline_ns
        return None if when is None or not self._may_write else max(0.0, (when - self._reckoner.monotonic_ns()) / 1e9)

    @property
    def disk(self) -> Disk:
        """The disk it is on."""
        return self._disk

    def compact(self, revision: int) -> None:
        """Forget the history up to and including this revision: no watch resumes from before it."""
        with self._mutex:
            self._check()
            log = self._writable()
            with log.turn(self.options.turn_seconds):
                self._settle(log)
                self._retention.forget(log, min(revision, self._state.revision) + 1)

    def purge(self, key: str) -> None:
        """Purge a key if it has anything, and write state.snap without it."""
        with self._mutex:
            self._check()
            log = self._writable()
            with log.turn(self.options.turn_seconds):
                self._settle(log)
                if self._state.entry(key, None) is not None:
                    for outcome in self._write(log, [Change("purge", key)], self._reckoner.now_ns()):
                        if isinstance(outcome, PenstockError):
                            raise outcome
                    self._settle(log)
                self._retention.save(log)

    def delete(self) -> None:
        """Remove the bucket and everything in it; whoever has it open gets ReplacedError."""
        with self._mutex:
            self._check()
            log = self._writable()
            with log.turn(self.options.turn_seconds):
                self._disk.remove(f"{self.folder}/bucket.json")  # from here on it is no bucket
                self._disk.sync_folder(self.folder)
                self._replaced = "the bucket was deleted"
            self.close()
            for folder in (f"{self.folder}/log", self.folder):
                clear_folder(self._disk, folder, remove=False)
                self._disk.remove_folder(folder)

    # --- Reading

    def fresh(self) -> bool:
        """Whether this process has applied everything, as far as one look at ``head`` can tell."""
        self._check()
        if time.monotonic() - self._looked > HEAD_LOOK_SECONDS:
            return False
        return self.head() == self._state.revision

    def head(self) -> int:
        """Return the newest revision, as the last writer noted it."""
        try:
            if self._hint is None:
                self._hint = self._disk.open(f"{self.folder}/head")
            return int.from_bytes(self._hint.read_at(0, 8), "little")
        except FileNotFoundError:
            return 0  # nobody has written yet
        except OSError:
            self._check()
            raise

    def catch_up(self) -> int:
        """Apply what others have written; return the newest revision."""
        with self._mutex:
            self._check()
            if self._disk.stat(f"{self.folder}/bucket.json") is None:
                raise ReplacedError(self.folder, "the bucket does not exist any more")
            self._check_last()
            while True:
                try:
                    batch = self.reader.read(self._state.revision + 1, DEFAULT_LIMIT)
                except ExpiredError as exc:  # this process slept longer than history lasts
                    before = self._state.revision
                    self._state.load()
                    if self._state.revision <= before:
                        raise self._incomplete(before, exc.first) from None
                    continue
                if not len(batch):
                    break
                self._no_hole(batch)
                self._state.follow(batch, self.reader.path)
                self._last.note(self._state.revision, batch[-1].payload)
            self._looked = time.monotonic()
            return self._state.revision

    @property
    def replaced(self) -> bool:
        """Whether the bucket this one had open is not there any more, or another one or an older state of it is."""
        if not self._replaced:
            there = self._disk.stat(f"{self.folder}/bucket.json") is not None
            identity = Sidecar(self._disk, f"{self.reader.path}/penstock-").identity() if there else None
            if identity is None or identity.log_id != self.log_id:
                self._replaced = "the bucket was deleted"
            elif self._log is not None:
                self._replaced = self._log.replaced
        return bool(self._replaced)

    @property
    def revision(self) -> int:
        """The newest revision this process has applied."""
        return self._state.revision

    def entry(self, key: str) -> KvEntry | None:
        """Return the entry of a key as this process knows it."""
        return self._state.entry(key, self._reckoner.monotonic_ns())

    def scan(self, prefix: str, *, hidden: bool = False) -> tuple[UpdateBatch, int]:
        """Return the entries below a prefix in order of revision, and the revision they are exact at."""
        with self._mutex:
            self._check()
            found, gone = self._state.snapshot(prefix, self._reckoner.monotonic_ns())
            revision = self._state.revision
        return arrange(found, gone, hidden=hidden), revision  # writers need not wait for this

    def change(self, revision: int) -> KvUpdate | None:
        """Return the change that has this revision, None when it is not kept any more, or not there yet."""
        try:
            batch = self.reader.read(revision, 1)
        except ExpiredError:
            return None
        if not len(batch) or int(batch.positions[0]) != revision:
            return None
        return envelope_updates(batch, self.reader.path)[0]

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
                if self._log is not None:
                    self._log.close()
            finally:
                self.reader.close()
                self._retention.close()
                for file in (self._hint, self._head):
                    if file is not None:
                        file.close()
                self._state.close()

    def forked(self) -> None:
        """Close in the child of a fork; the files stay the parent's."""
        self._mutex = threading.RLock()
        self._closed = "the bucket was opened before a fork: open it again in the child"

    # --- Inside of a turn

    def _write(self, log: SharedLog, changes: list[Change], now_ns: int) -> list[int | PenstockError]:
        TURNS.add(bucket=self.config.name)
        most = PURGES_A_TURN if self._fits(changes) else self._state.count  # all of them where room is wanted
        due = [Change("expire", key, revision=at) for key, at in self._state.due(self._reckoner.monotonic_ns(), most)]
        outcomes = None if due else self._put_all(log, changes, now_ns)
        if outcomes is None:
            outcomes = self._decide(log, [*due, *changes], now_ns)[len(due) :]
        return outcomes

    def _light(self, log: SharedLog, changes: list[Change]) -> bool:
        """Whether these changes fit the active segment, the state is current, and no care is due."""
        size = sum(len(change.key) + len(change.value) + LIGHT_OVERHEAD for change in changes)
        return (
            self._state.revision + 1 == log.next_position
            and self._reloads == log.reloads
            and size <= min(log.room_bytes, LIGHT_BYTES)
            and self._retention.idle(size)
            and not self.expiry_due()
        )

    def _fits(self, changes: list[Change]) -> bool:
        """Whether there is room for these changes whatever they replace."""
        if not self.limited:
            return True
        size = sum(len(change.key) + len(change.value) + RECORD_OVERHEAD for change in changes)
        return size <= self.config.max_bytes - self._state.most_live_bytes

    def _decide(self, log: SharedLog, changes: list[Change], now_ns: int) -> list[int | PenstockError]:
        """Decide changes one after another and write what they come to."""
        monotonic_ns = self._reckoner.monotonic_ns()
        plan = plan_changes(
            self.config.name,
            changes,
            lambda key: self._state.entry(key, monotonic_ns),
            log.next_position,
            self.config.max_bytes - self._state.live_bytes if self.limited else None,
            expired=lambda key: self._state.entry(key, None),
        )
        if plan.updates:
            leases = [self._reckoner.lease(ttl_ns) if ttl_ns else None for ttl_ns in plan.ttl_ns]
            records = [
                encode_record(update.op, update.key, update.value, now_ns, lease)
                for update, lease in zip(plan.updates, leases, strict=True)
            ]
            last = self._append(log, records, now_ns)
            for update, lease in zip(plan.updates, leases, strict=True):
                if lease is not None:
                    self._state.expires(update.key, update.version.as_int() or 0, lease)
            self._state.apply(plan.updates, last, sum(map(len, records)))
        return plan.outcomes

    def _put_all(self, log: SharedLog, changes: list[Change], now_ns: int) -> list[int | PenstockError] | None:
        """Write changes that need no decision, many of them in columns; None if there is something to decide."""
        if not changes or any(change.what != "put" or change.ttl_ns for change in changes) or not self._fits(changes):
            return None
        if len(changes) >= COLUMNS:
            return self._put_columns(log, changes, now_ns)
        records = [encode_record(Op.PUT, change.key, change.value, now_ns) for change in changes]
        last = self._append(log, records, now_ns)
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

    def _put_columns(self, log: SharedLog, changes: list[Change], now_ns: int) -> list[int | PenstockError]:
        """Write puts as one column of envelopes, and apply the same bytes."""
        keys, values = [change.key.encode() for change in changes], [change.value for change in changes]
        records = encode_envelopes(keys, values, event_times_ns=now_ns)
        last = self._append(log, records, now_ns)
        first = last - len(records) + 1
        numbered = Batch(records.buffer, records.positions + first, records.payloads)
        self._state.apply(envelope_updates(numbered), last, int(records.payloads.lengths.sum()))
        return list(range(first, last + 1))

    def _append(self, log: SharedLog, records: list[bytes] | Batch, now_ns: int) -> int:
        """Append records, whose revisions are in a row, and return the last one's."""
        if isinstance(records, list) and len(records) == 1:
            last = log.append(records[0], timestamp_ns=now_ns)
        else:
            last = int(log.append_many(records, timestamp_ns=now_ns)[-1])
        assert self._head is not None
        self._head.write_at(0, encode_head(last, self._boot))
        self._retention.wrote(last)
        CHANGES.add(len(records), bucket=self.config.name)
        self._last.note(last, records[-1] if isinstance(records, list) else records[-1].payload)
        return last

    def _settle(self, log: SharedLog) -> None:
        """Apply every entry there is; the turn knows where they end."""
        if self._state.revision + 1 == log.next_position and self._reloads == log.reloads:
            return
        self.catch_up()
        self._reloads = log.reloads
        if self._state.revision > log.next_position - 1:
            raise ReplacedError(
                self.folder,
                f"its log ends at revision {log.next_position - 1}, before revision {self._state.revision} that was"
                " read from it or is in state.snap: a backup was put back, or it was copied while it was written",
            )

    # --- Small things

    def _writable(self) -> SharedLog:
        """Return the log to write to, opened by the first who asks; ReadOnlyError where there is no right to write."""
        if self._log is not None:
            return self._log
        if self._disk.stat(f"{self.folder}/bucket.json") is None:
            raise ReplacedError(self.folder, "the bucket does not exist any more")
        try:
            log = SharedLog(self.reader.path, self._disk, _log_options(self.config, self.options))
            try:
                if log.log_id != self.log_id:
                    raise ReplacedError(self.folder, "its log id changed")
                self._head = self._head or self._open_head()
            except BaseException:
                log.close()
                raise
        except OSError as exc:
            if exc.errno not in NO_RIGHT:
                raise
            self._may_write = False
            raise ReadOnlyError(f"{self.folder}: here it can only be read: {exc.strerror}") from exc
        self._log = log
        return log

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

    def _check_last(self) -> None:
        """Raise ReplacedError, from now on, if the log does not have the newest change that is known here."""
        try:
            self._last.check(self.reader, self._state.revision)
        except ReplacedError as exc:
            self._replaced = exc.reason
            raise

    def _no_hole(self, batch: Batch) -> None:
        """Raise CorruptionError if changes are missing between what was applied and the end of a batch."""
        wanted = self._state.revision + 1 + np.arange(len(batch), dtype=np.int64)
        wrong = np.flatnonzero(batch.positions != wanted)
        if len(wrong):
            missing, found = int(wanted[wrong[0]]), int(batch.positions[wrong[0]])
            raise HoleError(self.reader.path, missing, found)

    def _incomplete(self, have: int, first: int) -> CorruptionError:
        """Return what to say when neither state.snap nor the log has some of the changes."""
        path = f"{self.folder}/state.snap"
        what = f"it ends at revision {have}" if self._disk.stat(path) is not None else "it is missing"
        return CorruptionError(
            path,
            0,
            f"{what} and the log begins at revision {first}: the changes from {have + 1} to {first - 1} are missing;"
            " if this is a copy taken while the bucket was written, copy it again, state.snap last",
        )

    def _check(self) -> None:
        if self._replaced:
            raise ReplacedError(self.folder, self._replaced)
        if self._closed:
            raise ClosedError(f"{self.folder}: {self._closed}")


def _log_options(config: StoreConfig, options: EmbeddedOptions) -> MessageLogOptions:
    limit = config.max_bytes
    return MessageLogOptions(
        sync=options.sync,
        sync_seconds=options.sync_seconds,
        retention="fifo",
        max_payload_bytes=MAX_RECORD_BYTES,
        content=CONTENT,
        segment_bytes=8 << 20 if limit < 0 else min(max(limit // 8, 64 << 10), 8 << 20),
    )


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
