"""Fold a bucket: batch, apply, and only then move the cursor.

    watch ──► channel (bounded) ──► queue ── window or max ──► apply ──► store(updates, cursor) ──► on_applied

The one promise: a cursor that was stored or reported covers only updates for which ``apply`` has returned.  Moving
it when an update arrives would, after a crash, skip what had arrived and was not applied.

When the cursor has expired, or retention has overrun the running watch, keys may have vanished whose deletes
nobody will ever deliver.  So the live keys are listed, what the fold has and the bucket has not is deleted with
an unknown version, and only when that is in the store does the full watch start: a key that came back is put
after it was deleted, never before.

A network that is away is waited for, at the first attach as later: the store has what the fold was, and goes on.

Keys that a bucket drops without a change are found by comparing, now and then and after a restart: fold/reconcile.py.
``lag`` and ``hydrated`` claim nothing while the server is silent, or before the first comparison of a restart.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.batch import UpdateBatch
from penstock.disk import Backoff, in_disk_thread
from penstock.errors import (
    ExpiredError,
    NotConnected,
    OptionsError,
    PenstockError,
    RetryError,
    Timeout,
)
from penstock.fold.claims import Claim
from penstock.fold.comparing import Comparing
from penstock.fold.face import BatchConfig, FoldStore, WatchScope
from penstock.fold.guards import may_relist, resume_cursor, waits_for_room
from penstock.fold.moments import Moments
from penstock.fold.queue import FoldQueue
from penstock.fold.reconcile import KnownKeys
from penstock.fold.seen import SeenNote, fingerprint_of_change, owner_of, seen_note_of
from penstock.kv.roles import KvReader, KvWatcher, Watch
from penstock.lifecycle import Health, State
from penstock.metrics import REGISTRY
from penstock.options import options_from, shows_options
from penstock.types import KvUpdate, WatchCursor

__all__ = ["AppliedWatch", "watch_applied"]

_log = logging.getLogger("penstock.fold")

_updates = REGISTRY.counter("fold_updates", "updates folded", labels=("fold",))
_failures = REGISTRY.counter("fold_store_failures", "batches a store refused", labels=("fold",))
_resyncs = REGISTRY.counter("fold_resyncs", "resyncs after an expired cursor", labels=("fold",))
_repairs = REGISTRY.counter("fold_repairs", "keys put right by comparing with the bucket", labels=("fold",))
_lag = REGISTRY.gauge("fold_lag", "changes that are not in the fold yet; NaN when nobody knows", labels=("fold",))
_hydrated = REGISTRY.gauge("fold_hydrated", "1 when the state the watch began with is in the fold", labels=("fold",))

RESYNC_PAUSE_SECONDS = 0.5
ATTACH_PAUSE_SECONDS = 0.1
ATTACH_PAUSE_MAX_SECONDS = 5.0

T = TypeVar("T")
Parse = Callable[[UpdateBatch], Any]
Apply = Callable[[Any], Awaitable[None] | None]


class AppliedWatch:
    """One fold under way.  ``run`` does the work; the properties may be read at any time.

    >>> from unittest import mock
    >>> AppliedWatch(mock.Mock(), WatchScope.all(), apply=print).hydrated
    False
    """

    @shows_options(BatchConfig)
    def __init__(
        self,
        watcher: KvWatcher,
        scope: WatchScope,
        *,
        apply: Apply,
        parse: Parse | None = None,
        store: FoldStore | None = None,
        reader: KvReader | None = None,
        resume: WatchCursor | None = None,
        on_applied: Callable[[WatchCursor], None] | None = None,
        on_lag: Callable[[int], None] | None = None,
        config: BatchConfig | None = None,
        stop: asyncio.Event | None = None,
        name: str = "fold",
        fill: bool = False,
        **given: Any,
    ) -> None:
        self._fill = fill
        config = options_from(BatchConfig, config, given)
        if fill and not hasattr(store, "scan"):
            raise OptionsError(f"{name}: fill=True needs a store whose entries can be read (scan)")
        self._watcher, self._scope, self._apply, self._parse = watcher, scope, apply, parse
        self._store, self._reader, self._on_applied, self._on_lag = store, reader, on_applied, on_lag
        self._told_lag: int | None = None
        self._config, self._stop, self._name = config, stop or asyncio.Event(), name
        self._resume = resume or WatchCursor()
        self._queue = FoldQueue(self._config)
        self._applied: int | None = None
        self._reported: int | None = None
        self._channel: deque[UpdateBatch] = deque()
        self._in_channel = 0
        self._wake, self._room, self._synced = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._live: set[str] | None = None  # the live keys of a resync that was asked for
        self._watch: Watch | None = None
        self._known = store if store is not None else KnownKeys() if reader is not None else None
        self._seen: SeenNote | None = None
        self._owner: bytes | None = None  # of the bucket, once it was looked at
        self._followed_at = float("-inf")
        self._moments = Moments(self._name)
        self.resyncs = 0
        """How often the cursor had expired."""
        self._comparing = Comparing(
            reader, self._known, scope.prefixes, self._config.reconcile_seconds, name=name, wake=self._wake.set
        )

    # --- What can be seen from outside

    @property
    def applied(self) -> WatchCursor:
        """The cursor in memory: everything up to it has been applied."""
        return self._resume if self._applied is None else WatchCursor.of(self._applied)

    @property
    def hydrated(self) -> bool:
        """Whether the state the watch began with has been folded completely, as far as is known at this moment.

        Not while the backend is away, and after a restart not before keys that it dropped meanwhile were looked for.
        """
        watch = self._watch
        if watch is None or not watch.in_touch or not self._comparing.exact:
            return False
        return watch.hydrated and not self._in_channel and not len(self._queue)

    @property
    def lag(self) -> int | None:
        """Changes not folded yet, here and at the backend; None when nobody knows: before the first, or it is away."""
        watch = self._watch
        if watch is None or watch.lag is None or not watch.in_touch:
            return None
        return watch.lag + self._in_channel + len(self._queue)

    def health(self) -> Health:
        """Return how the fold is, without waiting."""
        watch = self._watch
        if self._moments.ended:
            return Health(State.STOPPED, "the fold has ended")
        if watch is None:
            return Health(State.STARTING, "the watch does not stand yet")
        if not watch.in_touch:
            return Health(State.DEGRADED, "nothing is heard from the bucket's server: the fold may be behind")
        if self._queue.failures:
            return Health(State.DEGRADED, f"the store has refused {self._queue.failures} times in a row")
        return Health(State.READY) if self.hydrated else Health(State.STARTING, "it is not hydrated yet")

    @property
    def looks(self) -> int:
        """How often it was looked whether the bucket has dropped keys."""
        return self._comparing.looks

    @property
    def repaired(self) -> int:
        """How many keys a comparison with the bucket has put right."""
        return self._comparing.repaired

    @property
    def failures(self) -> int:
        """How often in a row the store has refused a batch."""
        return self._queue.failures

    async def between_flushes(self, call: Callable[[Any], T]) -> T:
        """Flush, then run ``call(store)`` in the store's thread while nothing is applied, and return its answer.

        That is how a fold is exported: the store's cursor is exactly what its files hold.  What ``call``
        raises comes out here, and the fold goes on.  ClosedError when the fold has ended or ends first.
        """
        if self._store is None:
            raise OptionsError(f"{self._name}: the fold has no store")
        answer = self._moments.ask(call)
        self._wake.set()
        return await answer

    # --- The loop

    async def run(self) -> WatchCursor:
        """Fold until ``stop`` is set or the watch ends; return the cursor up to which everything is applied."""
        claim = Claim(self._store if self._store is not None else self, self._name)
        claim.take()
        try:
            return await self._run()
        finally:
            if self._seen is not None:
                self._seen.close()
            claim.release()

    async def _run(self) -> WatchCursor:
        fresh = True
        if self._store is not None:
            self._resume = _start(await in_disk_thread(self._store.cursor), self._resume)
            fresh = await in_disk_thread(_is_empty, self._store)
            self._seen = await in_disk_thread(seen_note_of, self._store)
            if self._fill:
                await self._fill_memory()
        loop = asyncio.get_running_loop()
        pump = asyncio.create_task(self._pump())
        stopping = asyncio.create_task(self._stop.wait())
        looking = asyncio.create_task(
            self._comparing.look(
                lambda: self._watch is not None and self._watch.hydrated, fresh=fresh and self._resume.at_start
            )
        )
        tasks = (pump, stopping, looking)
        for task in tasks:
            task.add_done_callback(lambda _: self._wake.set())
        try:
            while not self._stop.is_set():
                self._wake.clear()
                if self._queue.due(loop.time()):
                    await self._flush()
                elif self._live is not None and not self._channel:
                    await self._resync(self._live)
                elif self._comparing.waits:
                    await self._compare()
                elif self._moments:
                    await self._settle()
                    await self._moments.serve(self._store)
                elif looking.done() and looking.exception() is not None:
                    await self._settle()
                    looking.result()
                elif self._channel and not self._queue.failures:
                    self._receive(loop.time())  # while the store fails, the channel fills and the watch waits
                elif self._quiet(loop.time()):
                    await self._follow()
                elif pump.done() and not self._channel:
                    await self._settle()
                    pump.result()
                    return self.applied
                else:
                    await self._sleep(loop.time())
            await self._settle()
            return self.applied
        finally:
            self._moments.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill_memory(self) -> None:
        """Hand the entries of the store to ``apply``: what is kept in memory begins as the store is."""
        for prefix in self._scope.prefixes:
            for batch in await in_disk_thread(lambda at: list(self._store.scan(at)), prefix):  # type: ignore[union-attr]
                await self._call(batch)

    async def _call(self, batch: UpdateBatch) -> None:
        result = self._apply(self._parse(batch) if self._parse is not None else batch)
        if inspect.isawaitable(result):
            await result

    async def _sleep(self, now: float) -> None:
        self._tell_lag()
        deadline = self._queue.deadline
        if deadline is None:
            deadline = now + self._config.progress_seconds
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _quiet(self, now: float) -> bool:
        """Whether nothing waits anywhere and the bucket has gone on outside of the scope."""
        watch = self._watch
        if watch is None or len(self._queue) or now < self._followed_at + self._config.progress_seconds:
            return False
        self._followed_at = now
        return watch.hydrated and watch.progress > (self.applied.token.as_int() or 0)

    async def _follow(self) -> None:
        """Move the cursor over what did not concern this fold."""
        assert self._watch is not None
        self._applied = self._queue.reached = self._watch.progress
        if self._store is not None:
            try:
                await in_disk_thread(self._store.apply, UpdateBatch.of([]), self.applied)
            except Exception as exc:  # noqa: BLE001 - the next update or the next time will do
                _log.warning("%s: the cursor could not follow: %s", self._name, exc)
                return
        self._report()

    def _receive(self, now: float) -> None:
        batch = self._channel.popleft()
        self._in_channel -= len(batch)
        self._room.set()
        self._queue.add(batch, now)

    async def _flush(self) -> bool:
        """Apply what is new, store everything the store has not, then report; return whether it was stored."""
        fresh = self._queue.take()
        if fresh is not None:
            await self._call(fresh)
            self._applied = self._queue.reached if self._queue.reached is not None else self._applied
            _updates.add(len(fresh), fold=self._name)
            self._comparing.folded(fresh)
            if isinstance(self._known, KnownKeys):
                self._known.apply(fresh, self.applied)
        batch = self._queue.to_store()
        if batch is not None and self._store is not None:
            try:
                await in_disk_thread(self._store_batch, batch)
            except Exception as exc:  # noqa: BLE001 - whatever a store fails with, the batch is kept
                self._refused(exc)
                return False
        self._queue.stored()
        self._report()
        self._tell_lag()
        return True

    def _store_batch(self, batch: UpdateBatch) -> None:
        """Store a batch with the cursor; what was seen last is noted before, and so never behind it."""
        assert self._store is not None
        if self._seen is not None and self._owner is not None:
            revision = self.applied.token.as_int()
            last = batch[len(batch) - 1] if len(batch) else None
            found = last if last is not None and last.version.as_int() == revision else None
            self._seen.write(self._owner, revision or 0, fingerprint_of_change(found) if found is not None else None)
        self._store.apply(batch, self.applied)

    def _tell_lag(self) -> None:
        """Say how far behind the fold is, when that has changed."""
        lag = self.lag
        _lag.set(math.nan if lag is None else lag, fold=self._name)
        _hydrated.set(int(self.hydrated), fold=self._name)
        if lag is None or lag == self._told_lag:
            return
        self._told_lag = lag
        if self._on_lag is not None:
            self._on_lag(lag)

    def _report(self) -> None:
        if self._applied is not None and self._applied != self._reported:
            self._reported = self._applied
            if self._on_applied is not None:
                self._on_applied(self.applied)

    def _refused(self, exc: Exception) -> None:
        _failures.add(fold=self._name)
        waits = waits_for_room(exc) and not self._stop.is_set()  # who is told to stop does not wait for room
        fatal = self._queue.refused(asyncio.get_running_loop().time(), waits=waits)
        times = self._queue.failures
        if fatal:
            raise RetryError(f"{self._name}: the store failed {times} consecutive times: {exc}") from exc
        _log.warning("%s: the store refused a batch (%d in a row), it is kept: %s", self._name, times, exc)

    async def _settle(self) -> None:
        """Flush until nothing waits; a store that keeps failing ends it."""
        while len(self._queue):
            if not await self._flush():
                deadline = self._queue.deadline or 0.0
                await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))

    # --- Resync

    async def _resync(self, live: set[str]) -> None:
        """Delete what the fold has and the bucket has not, then let the full watch start."""
        await self._settle()
        assert self._known is not None  # no resync is asked for without a reader
        gone = await in_disk_thread(_vanished, self._known, self._scope.prefixes, live)
        if gone:
            deletes = UpdateBatch.of(KvUpdate.delete(key) for key in gone)
            self._queue.add(deletes, asyncio.get_running_loop().time())
            await self._settle()
        self._live = None
        self._synced.set()

    async def _ask_for_resync(self, exc: ExpiredError) -> None:
        """In the pump: list the live keys, hand them to the loop, and wait until the fold has caught up."""
        self.resyncs += 1
        _resyncs.add(fold=self._name)
        if self._reader is None:
            _log.warning("%s: %s; without a reader, keys deleted in between may stay", self._name, exc)
            return
        _log.info("%s: %s; resyncing", self._name, exc)
        live: set[str] = set()
        try:
            for prefix in self._scope.prefixes:
                live.update(await self._reader.keys(prefix))
        except PenstockError as failure:
            raise RetryError(f"{self._name}: the resync after {exc} failed listing live keys: {failure}") from failure
        self._synced.clear()
        self._live = live
        self._wake.set()
        while not may_relist(self._synced.is_set()):
            await self._synced.wait()

    async def _compare(self) -> None:
        """Bring the fold to what the bucket had when it was listed, without moving the cursor."""
        await self._settle()
        repairs = await self._comparing.differences(self.applied.token.as_int() or 0)
        if repairs:
            _repairs.add(len(repairs), fold=self._name)
            self._queue.add(UpdateBatch.of(repairs), asyncio.get_running_loop().time(), counts=False)
            await self._settle()
        self._comparing.done()

    # --- The watch

    async def _pump(self) -> None:
        """Move batches from the watch into the channel; start over with a resync when history is gone."""
        watch = await self._attach()
        while True:
            self._watch = watch
            try:
                while True:
                    await self._send(
                        await watch.next_batch(min(self._config.max_updates, self._config.channel_capacity))
                    )
            except StopAsyncIteration:
                return
            except ExpiredError as exc:
                self._watch = None
                await watch.aclose()
                # On a small busy bucket this can be needless each time: never in a hot loop.
                await asyncio.sleep(RESYNC_PAUSE_SECONDS)
                watch = await self._attach(exc)
            except BaseException:
                await watch.aclose()
                raise

    async def _attach(self, expired: ExpiredError | None = None) -> Watch:
        """Start a watch behind what is applied, however long the network takes; with a resync where history is gone.

        A full watch that does not come about is not simply tried again: keys may vanish while the network is away, so
        the next try begins where a restart would.
        """
        backoff = Backoff(first=ATTACH_PAUSE_SECONDS, last=ATTACH_PAUSE_MAX_SECONDS)
        while True:
            if expired is not None:
                await self._ask_for_resync(expired)
            try:
                await self._check_same()
                if expired is not None:
                    return await self._scope.watch(self._watcher)
                return await self._scope.watch_from(self._watcher, self.applied)
            except ExpiredError as exc:
                expired = exc
            except (NotConnected, Timeout) as exc:
                if self._watcher.closed:
                    raise NotConnected(f"{self._name}: the connection was shut down: {exc}") from exc
                expired = None
                _log.warning("%s: the watch could not start, it is tried again: %s", self._name, exc)
                await asyncio.sleep(backoff.delay())

    async def _check_same(self) -> None:
        """Before the first watch: raise ReplacedError unless this is the store's bucket, and no older state of it."""
        if self._seen is None or self._reader is None or self._owner is not None:
            return
        if self._resume.at_start:
            self._owner = owner_of(await self._reader.identity())
            self._seen.forget(self._owner)
        else:
            self._owner = await self._seen.check_bucket(self._reader, self._name)

    async def _send(self, batch: UpdateBatch) -> None:
        while self._in_channel and self._in_channel + len(batch) > self._config.channel_capacity:
            self._room.clear()
            await self._room.wait()
        self._channel.append(batch)
        self._in_channel += len(batch)
        self._wake.set()


@shows_options(BatchConfig)
async def watch_applied(
    watcher: KvWatcher,
    scope: WatchScope,
    *,
    apply: Apply,
    parse: Parse | None = None,
    store: FoldStore | None = None,
    reader: KvReader | None = None,
    resume: WatchCursor | None = None,
    on_applied: Callable[[WatchCursor], None] | None = None,
    on_lag: Callable[[int], None] | None = None,
    config: BatchConfig | None = None,
    stop: asyncio.Event | None = None,
    name: str = "fold",
    fill: bool = False,
    **given: Any,
) -> WatchCursor:
    """Fold a scope of a bucket until ``stop`` is set or the watch ends; return the applied cursor.

    ``parse`` gets each batch and returns what ``apply`` gets; what it leaves out is rejected, and the cursor passes it
    all the same.  ``apply`` may be a coroutine function.  With a ``store`` the fold goes on at the store's cursor, and
    ``on_applied`` is called only when the store has what it reports.  A ``reader`` makes an expired cursor repairable.
    ``on_lag`` is called with the number of changes not folded yet whenever that has changed; 0 is caught up.
    With ``fill`` the entries of the store are handed to ``apply`` first: what is kept in memory begins as the store is.
    The options of BatchConfig are given as keywords (``window_seconds=…``) or as one object, ``config``.

    >>> async def example(store):
    ...     stop = asyncio.Event()
    ...     return await watch_applied(store.watcher, WatchScope.all(), apply=print, reader=store.reader, stop=stop)
    """
    return await AppliedWatch(
        watcher,
        scope,
        apply=apply,
        parse=parse,
        store=store,
        reader=reader,
        resume=resume,
        on_applied=on_applied,
        on_lag=on_lag,
        config=config,
        stop=stop,
        name=name,
        fill=fill,
        **given,
    ).run()


def _start(stored: WatchCursor, asked: WatchCursor) -> WatchCursor:
    """Return where a fold goes on: never past its store."""
    revision, wanted = stored.token.as_int(), asked.token.as_int()
    if revision is None or wanted is None:
        return stored
    return WatchCursor.of(resume_cursor(revision, wanted))


def _is_empty(store: FoldStore) -> bool:
    return next(iter(store.keys("")), None) is None


def _vanished(store: FoldStore, prefixes: tuple[str, ...], live: set[str]) -> list[str]:
    """Return the keys of the fold that are not live, sorted, each once."""
    return sorted({key for prefix in prefixes for key in store.keys(prefix) if key not in live})
