"""When a fold is compared with its bucket: the shell around fold/reconcile.py.

look ── traces have changed ──► list ──► the fold, between two batches: differences ──► repairs ──► done
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from penstock.batch import UpdateBatch
from penstock.disk import Backoff, in_disk_thread
from penstock.errors import RetryError
from penstock.fold.face import FoldStore
from penstock.fold.reconcile import KnownKeys, differences, listed, revisions_of
from penstock.kv.roles import KvReader, Traces
from penstock.types import KvUpdate

__all__ = ["Comparing"]

_log = logging.getLogger("penstock.fold")

SHARE: Final = 20
"""After a comparison at least this many times what it took goes by before the next."""
RETRY_SECONDS: Final = 1.0
READS_AT_ONCE: Final = 64


class Comparing:
    """The comparisons of one fold.  ``look`` is a task of its own; the rest is called by the fold's loop.

    >>> Comparing(None, None, [""], 10.0, name="routes", wake=print).exact
    True
    """

    def __init__(
        self,
        reader: KvReader | None,
        known: FoldStore | KnownKeys | None,
        prefixes: Sequence[str],
        seconds: float,
        *,
        name: str,
        wake: Callable[[], None],
    ) -> None:
        self._reader, self._known, self._prefixes, self._seconds = reader, known, prefixes, seconds
        self._name, self._wake = name, wake
        self._listing: tuple[Traces, dict[str, int | None]] | None = None
        self._touched: set[str] | None = None  # the keys folded since a listing was begun
        self._compared = asyncio.Event()
        self._unfinished: RetryError | None = None  # why a comparison could not read everything
        self.exact = reader is None
        """Whether everything the bucket dropped before this start is out of the fold, as far as anyone can know."""
        self.looks = 0
        """How often it was looked whether the bucket has dropped keys."""
        self.repaired = 0
        """How many keys were put right."""

    @property
    def waits(self) -> bool:
        """Whether a listing waits to be compared."""
        return self._listing is not None

    def folded(self, batch: UpdateBatch) -> None:
        """Take note of what was folded: a listing that is under way may not have it."""
        if self._touched is not None:
            self._touched.update(bytes(key).decode() for key in batch.keys.to_list(batch.buffer))

    async def look(self, hydrated: Callable[[], bool], *, fresh: bool) -> None:
        """Task: look whether the bucket has lost changes; if so, list it and let the loop compare.

        ``fresh`` is a fold that had nothing when it started: there is nothing that could be left of before.
        """
        reader, before = self._reader, None
        if reader is None:
            return
        pause = Backoff(first=0.005, last=0.1)
        while True:
            try:
                if before is None and fresh:
                    before = await reader.traces()
                    self.exact = True
                while not hydrated():
                    await asyncio.sleep(pause.delay())
                started = time.monotonic()
                now = await reader.traces()
                self.looks += 1
                if now is None:
                    self.exact = True
                    return
                if before is None or now.removed != before.removed:
                    await self._list(reader, now)
                before = now
                wait = max(self._seconds, SHARE * (time.monotonic() - started))
            except RetryError as exc:  # the network is away: the watch says so
                _log.debug("%s: the bucket could not be compared: %s", self._name, exc)
                wait = min(self._seconds, RETRY_SECONDS)
            await asyncio.sleep(wait)

    async def differences(self, applied: int) -> list[KvUpdate]:
        """Return what puts the fold right, which has folded everything up to ``applied`` and nothing else."""
        assert self._listing is not None
        assert self._known is not None
        assert self._reader is not None
        now, theirs = self._listing
        ours = await in_disk_thread(revisions_of, self._known, self._prefixes)
        touched = self._touched or set()
        gone, other = await in_disk_thread(differences, ours, theirs, touched, now.last, applied)
        repairs = [KvUpdate.delete(key) for key in gone]
        try:
            for at in range(0, len(other), READS_AT_ONCE):
                part = other[at : at + READS_AT_ONCE]
                repairs += [
                    KvUpdate.put(entry.key, entry.value, entry.version.as_int())
                    for entry in await asyncio.gather(*map(self._reader.entry, part))
                    if entry is not None and (entry.version.as_int() or 0) <= applied
                ]
        except RetryError as exc:  # what is known is put right now, the rest by the next comparison
            self._unfinished = exc
        if repairs:
            _log.warning("%s: %d keys changed in the bucket without a word, the fold follows", self._name, len(repairs))
            self.repaired += len(repairs)
        return repairs

    def done(self) -> None:
        """Take note that the fold has been put right."""
        self._listing = None
        self._compared.set()

    async def _list(self, reader: KvReader, now: Traces) -> None:
        """List the bucket and wait until the loop has compared it with the fold."""
        self._touched = set()
        try:
            theirs: dict[str, int | None] = {}
            for prefix in self._prefixes:
                theirs.update(await in_disk_thread(listed, await reader.revisions(prefix)))
            self._compared.clear()
            self._listing = now, theirs
            self._wake()
            await self._compared.wait()
        finally:
            self._listing = self._touched = None
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            raise unfinished
        self.exact = True
