"""Watches of an embedded bucket: the re-list or the delta behind a cursor, then the log as it grows.

A watch waits by looking at ``head``, which costs a microsecond, and after a while for the folder to change: ``head`` is
written with every change.  Only when it moves does it read the log, in a thread.  Retention that overtakes a watch ends
it with ExpiredError: nothing is skipped in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.batch import Spans, UpdateBatch
from penstock.disk import LoopWait, disk_executor, in_disk_thread
from penstock.errors import ExpiredError, OptionsError, ReadOnlyError, ReplacedError, RetryError
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.roles import Watch
from penstock.kv.window import resume_start, resume_window_ok
from penstock.log.fingerprint import Fingerprint, check_fingerprint, fingerprint_of
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.updates import envelope_updates

__all__ = ["EmbeddedWatch", "below"]

IDLE_SECONDS: Final = 5e-3
"""The longest pause between two looks, before the folder is waited for."""
LOG_LOOK_SECONDS: Final = 0.9
"""How often the log itself is looked at, in case a writer died before it moved ``head``."""


def below(batch: UpdateBatch, prefixes: list[bytes]) -> UpdateBatch:
    """Return the updates whose key begins with one of these prefixes.

    >>> from penstock.types import KvUpdate
    >>> batch = UpdateBatch.of([KvUpdate.put("node.a", b"1"), KvUpdate.put("svc.a", b"2")])
    >>> [update.key for update in below(batch, [b"svc."])]
    ['svc.a']
    """
    if b"" in prefixes or not len(batch):
        return batch
    raw = np.frombuffer(memoryview(batch.buffer).cast("B"), np.uint8)
    keep = np.zeros(len(batch), np.bool_)
    for prefix in prefixes:
        keep |= _begins(raw, batch.keys, prefix)
    if keep.all():
        return batch
    return UpdateBatch(batch.buffer, batch.ops[keep], batch.keys[keep], batch.values[keep], batch.versions[keep])


def _begins(raw: NDArray[np.uint8], keys: Spans, prefix: bytes) -> NDArray[np.bool_]:
    long_enough = np.flatnonzero(keys.lengths >= len(prefix))
    found = np.zeros(len(keys), np.bool_)
    starts = keys.offsets[long_enough]
    equal = np.ones(len(starts), np.bool_)
    for at, byte in enumerate(prefix):
        equal &= raw[starts + at] == byte
    found[long_enough] = equal
    return found


class EmbeddedWatch(Watch):
    """One watch; see the head of this module.  Made by EmbeddedKvWatcher, used by one task.

    >>> EmbeddedWatch.__mro__[1] is Watch
    True
    """

    def __init__(self, bucket: Bucket, prefixes: list[bytes], revision: int | None) -> None:
        self._bucket, self._prefixes, self._revision = bucket, prefixes, revision
        self._next = 1  # the revision to read next
        self._goal = 0  # hydrated when everything up to here was delivered
        self._ready: UpdateBatch | None = None
        self._delivered = revision or 0
        self._lag: int | None = None
        self._closed = False
        self._reading: asyncio.Future[None] | None = None
        self._seen: Fingerprint | None = None  # the last change that was read: a backup put back has another there
        self._waiting = LoopWait(bucket.disk, bucket.folder, last=IDLE_SECONDS)

    @property
    def hydrated(self) -> bool:
        """Whether the re-list, or the delta behind the cursor, has been delivered completely."""
        return self._ready is None and self._next > self._goal

    @property
    def lag(self) -> int | None:
        """Changes that were in the log behind the last delivery, those of other keys included; None before it."""
        return self._lag

    @property
    def progress(self) -> int:
        """The revision up to which everything that matches was delivered, quiet times included."""
        return self._next - 1 if self._ready is None else self._delivered

    def attach(self) -> None:
        """Check the window and take the re-list; called in a thread, once."""
        bucket, revision = self._bucket, self._revision
        if revision is None:
            bucket.catch_up()
            listed, at = bucket.scan("", hidden=True)
            listed = below(listed, self._prefixes)
            self._next, self._goal = at + 1, at
            if at >= bucket.reader.first_position:
                self._seen = fingerprint_of(bucket.reader.read(at, 1), 0)
            self._ready = listed if len(listed) else None
            return
        start = resume_start(revision)
        if start is None:
            raise OptionsError(f"{bucket.config.name}: no revision can come after {revision}")
        last = bucket.catch_up()
        if revision > last:
            raise ReplacedError(bucket.config.name, f"it ends at revision {last}, before the cursor at {revision}")
        first = bucket.first_revision()
        if not resume_window_ok(revision, first):
            raise ExpiredError(bucket.config.name, revision, first)
        self._next, self._goal = start, last
        if revision >= bucket.reader.first_position:
            self._seen = fingerprint_of(bucket.reader.read(revision, 1), 0)

    async def next_batch(self, limit: int = 65536) -> UpdateBatch:
        """Return the next changes, at least one and at most ``limit``; StopAsyncIteration after aclose."""
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        waiting = self._waiting
        waiting.reset()
        loop = asyncio.get_running_loop()
        looked = float("-inf")
        while self._ready is None:
            if self._closed:
                raise StopAsyncIteration
            if self._bucket.expiry_due():
                with contextlib.suppress(RetryError, ReadOnlyError):  # whoever keeps the turn, or may write, will do it
                    await in_disk_thread(self._bucket.expire)
            if self._bucket.head() >= self._next or loop.time() - looked > LOG_LOOK_SECONDS:
                looked = loop.time()
                await self._read_in_thread()
            if self._ready is None:  # also when head is ahead of the log, as a power cut can leave it
                expiry = self._bucket.seconds_to_expiry()
                await waiting.pause(None if expiry is None else max(expiry, IDLE_SECONDS))
        batch = self._ready
        if len(batch) > limit:
            self._ready, batch = batch[limit:], batch[:limit]
        else:
            self._ready = None
        self._delivered = int(batch.revisions()[-1])
        self._lag = max(0, self._bucket.head() - self.progress)
        return batch

    async def aclose(self) -> None:
        """End the watch."""
        self._closed, self._ready = True, None
        self._waiting.close()

    async def _read_in_thread(self) -> None:
        """Read on, one at a time: the thread of who was cancelled goes on, and who comes next waits for it."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(disk_executor().submit(self._read))
        await asyncio.shield(self._reading)

    def _read(self) -> None:
        """Read on in the log until something matches or there is no more; called in a thread."""
        bucket = self._bucket
        while not self._closed:
            check_fingerprint(bucket.reader, self._seen)
            try:
                batch = bucket.reader.read(self._next, DEFAULT_LIMIT)
            except ExpiredError as exc:
                raise ExpiredError(bucket.config.name, self._next - 1, exc.first) from None
            if not len(batch):
                return
            found = below(envelope_updates(batch, bucket.reader.path), self._prefixes)
            if len(found):
                self._ready = found  # first: what is not delivered is no progress, whoever looks meanwhile
            self._next, self._seen = batch.next_position, fingerprint_of(batch)
            if len(found):
                return
