"""Fold a log: read a batch, apply it together with the position behind it, and only then go on.

    log ── read(cursor) ──► Batch ── to_updates ──► UpdateBatch ── apply(updates, next position) ──► store

What must stay true:

1. The store's cursor is the position where reading goes on, and moves with the updates, in one apply.  After a crash
   the fold is exactly that of the records below its cursor: none is lost, none counts twice.
2. A cursor is only used on the log it was made on: see fold/source.py.  Nor on an older state of it: fold/seen.py.
3. A record that retention took before it was folded is never passed over in silence: the fold stops with
   ExpiredError, or begins again from nothing where the caller said so.

A fold of envelopes runs no Python per record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from penstock.batch import Batch, Spans, UpdateBatch
from penstock.disk import Disk, LoopWait, disk_for, in_disk_thread
from penstock.errors import ExpiredError, OptionsError, ReadOnlyError, ReplacedError, RetryError
from penstock.fold.claims import Claim
from penstock.fold.guards import store_failure_is_fatal, waits_for_room
from penstock.fold.moments import Moments
from penstock.fold.seen import SeenNote, owner_of
from penstock.fold.source import SourceNote, source_of
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, fingerprint_of
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.updates import envelope_updates
from penstock.metrics import REGISTRY
from penstock.options import options_from, shows_options
from penstock.store.face import SnapshotStore
from penstock.types import KvUpdate, Op, Record, WatchCursor

__all__ = ["follow", "Follow", "FollowOptions", "ToUpdates", "each_record"]

_log = logging.getLogger("penstock.fold")

_records = REGISTRY.counter("follow_records", "records of logs folded", labels=("store",))
_restarts = REGISTRY.counter("follow_restarts", "folds of logs begun again from nothing", labels=("store",))

ToUpdates = Callable[[Batch], UpdateBatch]
"""What turns the records of a batch into updates; it may leave records out, and make several of one."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """How a log is followed.

    >>> FollowOptions(on_expired="skip")
    Traceback (most recent call last):
    penstock.errors.OptionsError: on_expired='skip': must be refuse or restart
    """

    on_expired: Literal["refuse", "restart"] = "refuse"
    """When records the fold has not seen are gone: raise ExpiredError, or empty the store and fold what is left."""

    on_replaced: Literal["refuse", "restart"] = "refuse"
    """When the log was recreated: raise ReplacedError, or empty the store and fold the new log."""

    batch_records: int = DEFAULT_LIMIT
    """The most records of one apply.  More: faster; fewer: less is read again after a crash."""

    retry_seconds: float = 0.05
    """First pause after the store refused a batch; it doubles up to a second.  After 16 in a row the fold stops, those
    for want of room, memory or descriptors not counted."""

    def __post_init__(self) -> None:
        for name in ("on_expired", "on_replaced"):
            if getattr(self, name) not in ("refuse", "restart"):
                raise OptionsError(f"{name}={getattr(self, name)!r}: must be refuse or restart")
        if self.batch_records < 1:
            raise OptionsError(f"batch_records={self.batch_records}: must be at least 1")
        if self.retry_seconds < 0:
            raise OptionsError(f"retry_seconds={self.retry_seconds}: must not be negative")


def each_record(make: Callable[[Record], KvUpdate | None]) -> ToUpdates:
    """Return a ToUpdates that asks ``make`` record by record; None leaves a record out.

    Slower than a function of the whole batch, and simpler.

    >>> to_updates = each_record(lambda record: KvUpdate.put("last", bytes(record.payload), record.position))
    >>> to_updates(Batch.of([b"one", b"two"])).to_pylist()[1]["value"]
    b'two'
    """

    def to_updates(batch: Batch) -> UpdateBatch:
        return UpdateBatch.of(update for record in batch if (update := make(record)) is not None)

    return to_updates


class Follow:
    """One fold of a log under way; the properties may be read at any time.

    >>> import tempfile
    >>> from penstock.log.messagelog import MessageLog, MessageLogOptions
    >>> from penstock.log.envelope import Envelope, encode_envelope
    >>> from penstock.store import AppendLogStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MessageLog.open(folder.name + "/log", MessageLogOptions(content="envelope/1")) as writer:
    ...     position = writer.append(encode_envelope(Envelope(b"a", b"1")))
    >>> with open_log(folder.name + "/log") as log, AppendLogStore.open(folder.name + "/fold.snap") as store:
    ...     fold = Follow(log, store)
    ...     cursor = asyncio.run(fold.run(once=True))
    ...     store.get("a").value, cursor.token.as_int(), fold.lag
    (b'1', 2, 0)
    >>> folder.cleanup()
    """

    @shows_options(FollowOptions)
    def __init__(
        self,
        log: LogReader,
        store: SnapshotStore,
        to_updates: ToUpdates | None = None,
        *,
        options: FollowOptions | None = None,
        on_applied: Callable[[WatchCursor], None] | None = None,
        stop: asyncio.Event | None = None,
        disk: Disk | None = None,
        **given: Any,
    ) -> None:
        if to_updates is None and log.content != CONTENT:
            raise OptionsError(f"{log.path}: its records are no envelopes, so a function must make updates of them")
        self._log, self._store = log, store
        self._to_updates = to_updates or (lambda batch: envelope_updates(batch, log.path))
        self._options, self._on_applied = options_from(FollowOptions, options, given), on_applied
        self._stop = stop or asyncio.Event()
        self._note = SourceNote(disk or disk_for(store.path), store.path)
        self._seen = SeenNote(disk or disk_for(store.path), store.path)
        self._owner = bytes(16)
        self._disk = disk
        self._claim = Claim(store, log.path)
        self._next: int | None = None
        self._end = 0
        self._moments = Moments(store.path)
        self._waiting: LoopWait | None = None
        self.records = 0
        """Records folded by this object."""
        self.restarts = 0
        """How often the fold began again from nothing."""
        self.failures = 0
        """How often in a row the store has refused a batch; for want of room it is asked for as long as it takes."""

    @property
    def cursor(self) -> WatchCursor:
        """Everything below it is in the store; unknown before the first step."""
        return WatchCursor() if self._next is None else WatchCursor.of(self._next)

    @property
    def lag(self) -> int | None:
        """How many positions behind the end of the log it was at the last step; None before it."""
        return None if self._next is None else max(0, self._end - self._next)

    async def between_flushes(self, call: Callable[[SnapshotStore], T]) -> T:
        """Run ``call(store)`` in a disk thread while nothing is applied, and return its answer.

        That is how a fold is exported: the store's cursor is exactly what its files hold.  What ``call`` raises comes
        out here, and the fold goes on.  ClosedError when the fold has ended or ends first.
        """
        answer = self._moments.ask(call)
        if self._waiting is not None:
            self._waiting.wake()
        return await answer

    # --- The loop

    async def run(self, *, once: bool = False) -> WatchCursor:
        """Fold until ``stop`` is set, or with ``once`` until the end of the log as it is now; return the cursor."""
        self._moments.begin()
        stopped = asyncio.create_task(self._stop.wait())
        stopped.add_done_callback(lambda _: self._waiting.wake() if self._waiting is not None else None)
        try:
            while not self._stop.is_set():
                while self._moments:
                    await self._moments.serve(self._store)
                waiting = self._waiting = self._waiting or self._log.waiter()
                count = await self.step()
                if count:
                    waiting.reset()
                elif once and not self._moments:
                    break
                elif not self._moments and not self._stop.is_set():
                    await waiting.pause()
            return self.cursor
        finally:
            stopped.cancel()
            self._stop_waiting()
            self.close()
            self._moments.end()

    async def step(self) -> int:
        """Fold one batch; return how many records it had, 0 at the end of the log."""
        try:
            if not self._claim.held:
                self._claim.take()
                self._next = None  # another fold may have had the store in between
            if self._next is None:
                self._next = await in_disk_thread(self._begin)
            batch = await in_disk_thread(self._read, self._next)
        except ExpiredError:
            if self._options.on_expired == "refuse":
                raise
            await self._restart("records that were not folded yet are gone")
            return await self.step()
        except ReplacedError as exc:
            if self._options.on_replaced == "refuse":
                raise
            await self._restart(exc.reason, reopen=True)
            return await self.step()
        if not len(batch):
            self._next = max(self._next, batch.next_position)  # it may have gone on into a file without records yet
            return 0
        updates = self._to_updates(batch)
        if not await self._apply(updates, batch.next_position, fingerprint_of(batch)):
            return 0
        self._next = batch.next_position
        self.records += len(batch)
        _records.add(len(batch), store=self._store.path)
        if self._on_applied is not None:
            self._on_applied(self.cursor)
        return len(batch)

    def close(self) -> None:
        """Let go of the store, which another fold may take then; needed after ``step`` only, ``run`` does it itself."""
        self._seen.close()
        self._claim.release()

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()

    # --- In a thread

    def _begin(self) -> int:
        """Return where to go on, or say why that is not possible."""
        token = self._store.cursor().token
        source = source_of(self._log)
        self._owner = owner_of(source.log_id)
        if not token.known:
            self._note.write(source)
            self._seen.forget(self._owner)
            return self._log.first_position
        position = token.as_int()
        if position is None:
            raise OptionsError(f"{self._store.path}: its cursor is {token!r}, which is no position of a log")
        self._note.check(source)
        end = self._log.next_position
        if position > end:
            raise ReplacedError(self._log.path, f"it ends at {end}, before the fold's cursor at {position}")
        self._seen.check_log(self._log)
        return position

    def _read(self, position: int) -> Batch:
        batch = self._log.read(position, self._options.batch_records)
        self._end = max(self._log.next_position, batch.next_position)
        return batch

    def _store_batch(self, updates: UpdateBatch, position: int, seen: Fingerprint | None) -> None:
        self._seen.write(self._owner, position, seen)
        self._store.apply(updates, WatchCursor.of(position))

    async def _apply(self, updates: UpdateBatch, position: int, seen: Fingerprint | None) -> bool:
        """Apply, and try again while the store cannot: what it did not take must not be passed.

        False when it was told to stop before the store could.
        """
        grave, pause = 0, self._options.retry_seconds
        while True:
            try:
                await in_disk_thread(self._store_batch, updates, position, seen)
                self.failures = 0
                return True
            except (OSError, MemoryError, RetryError, ReadOnlyError) as exc:
                self.failures += 1
                grave += not waits_for_room(exc)
                if store_failure_is_fatal(grave):
                    raise RetryError(f"{self._store.path}: the store failed {grave} times in a row: {exc}") from exc
                _log.warning("%s: the store refused a batch (%d in a row): %s", self._store.path, self.failures, exc)
            try:
                async with asyncio.timeout(pause):
                    await self._stop.wait()
            except TimeoutError:
                pause = min(pause * 2, 1.0)
            else:
                return False

    # --- Beginning again

    async def _restart(self, reason: str, *, reopen: bool = False) -> None:
        _log.warning("%s: %s: folding from the beginning", self._log.path, reason)
        self.restarts += 1
        _restarts.add(store=self._store.path)
        await in_disk_thread(self._empty)
        self._stop_waiting()
        if reopen:  # a reader is of one log; this is another
            path, kind = self._log.path, self._log.format
            await in_disk_thread(self._log.close)
            self._log = await in_disk_thread(open_log, path, format=kind, disk=self._disk)
        self._next = None

    def _empty(self) -> None:
        """Delete every key and forget the cursor, in one apply."""
        parts = list(self._store.scan())
        everything = UpdateBatch.concat(parts) if parts else UpdateBatch.of([])
        count = len(everything)
        none = Spans(np.zeros(count, np.int64), np.zeros(count, np.int64))
        deletes = UpdateBatch(everything.buffer, np.full(count, Op.DELETE, np.uint8), everything.keys, none, none)
        self._store.apply(deletes, WatchCursor())


@shows_options(FollowOptions)
async def follow(
    log: LogReader,
    store: SnapshotStore,
    to_updates: ToUpdates | None = None,
    *,
    once: bool = False,
    options: FollowOptions | None = None,
    on_applied: Callable[[WatchCursor], None] | None = None,
    stop: asyncio.Event | None = None,
    disk: Disk | None = None,
    **given: Any,
) -> WatchCursor:
    """Fold a log into a store until ``stop`` is set, or with ``once`` until its end; return the cursor.

    Without ``to_updates`` the records must be envelopes: their keys are put, deleted and purged, and the version of
    an entry is the position of its record.  The store goes on where it was; ``on_applied`` is called with every
    cursor after the store has it.  ``disk`` is the one the store is on, if that is not the file system.  The options of
    FollowOptions are given as keywords (``on_expired="restart"``) or as one object.

    >>> async def counts(log, store):
    ...     newest = each_record(lambda record: KvUpdate.put(f"kind.{record.kind}", bytes(record.payload)))
    ...     return await follow(log, store, newest, once=True)
    """
    fold = Follow(log, store, to_updates, options=options, on_applied=on_applied, stop=stop, disk=disk, **given)
    return await fold.run(once=once)
