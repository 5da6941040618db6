"""A fold as a part of the node: a log is followed into a store for as long as the node runs."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

from penstock.artifact import BootstrapReport, bootstrap, log_window, transport_for
from penstock.disk import in_disk_thread, is_url
from penstock.errors import NotFoundError
from penstock.fold import Follow
from penstock.lifecycle import Health, Life, State
from penstock.log.detect import open_log
from penstock.log.face import LogReader
from penstock.node.options import FoldOptions
from penstock.ship import open_shipped
from penstock.store import AppendLogStore, LmdbStore, RocksStore, SnapshotStore

__all__ = ["FoldPart"]

_log = logging.getLogger("penstock.node")

ABSENT_SECONDS: Final = 0.25
"""How often a log that is not there yet is looked for."""
STORES: Final[dict[str, Any]] = {store.backend: store for store in (AppendLogStore, RocksStore, LmdbStore)}


def open_source(path: str) -> LogReader:
    """Open a log of this machine, or one that was shipped, by its URL."""
    return open_shipped(path) if is_url(path) else open_log(path)


class FoldPart:
    """Follows one log into one store.

    >>> FoldPart(FoldOptions(name="latest", log="readings", store="latest.snap")).name
    'fold:latest'
    """

    def __init__(self, options: FoldOptions) -> None:
        self.name = f"fold:{options.name}"
        self._options = options
        self._life = Life(self.name)
        self._fold: Follow | None = None
        self._bootstrap: BootstrapReport | None = None
        self._opened = contextlib.ExitStack()

    @property
    def fold(self) -> Follow | None:
        """The fold itself, while it runs."""
        return self._fold if self._life.state is State.READY else None

    async def start(self) -> None:
        """Open log and store and begin to follow; a log that is not there yet is waited for."""
        self._life.state = State.STARTING
        try:
            await self._open()
        except NotFoundError as exc:
            if not self._options.bootstrap:  # that would replace a damaged store
                await in_disk_thread(self._check_store)
            self._life.state, self._life.reason = State.DEGRADED, f"it waits for its log: {exc}"
        self._life.work(self._run())

    def _check_store(self) -> None:
        """Raise what is wrong with the store that is here, if there is one: that does not wait for the log."""
        with (
            contextlib.suppress(NotFoundError),
            STORES[self._options.backend].open(self._options.store, read_only=True),
        ):
            pass

    async def _open(self) -> None:
        options = self._options
        try:
            log = self._opened.enter_context(await in_disk_thread(open_source, options.log))
            if options.bootstrap:
                place, _, key = options.bootstrap.rpartition("/")
                transport = await in_disk_thread(transport_for, place or ".", allow_non_atomic_pointer=True)
                window = log_window(log)
                self._bootstrap = await bootstrap(options.store, window, transport, key, backend=options.backend)
                _log.info("part %s begins by way of %s: %s", self.name, self._bootstrap.way, self._bootstrap.reason)
            store: SnapshotStore = await in_disk_thread(STORES[options.backend].open, options.store)
            self._opened.callback(store.close)
            self._fold = Follow(log, store, stop=self._life.stopping)
        except BaseException:
            self._opened.close()
            raise
        self._life.state, self._life.reason = State.READY, ""

    async def _run(self) -> None:
        while self._fold is None:
            await self._life.pause(ABSENT_SECONDS)
            if self._life.stopping.is_set():
                return
            with contextlib.suppress(NotFoundError):
                await self._open()
        await self._fold.run()

    async def ready(self) -> None:
        """Return at once: reading has begun."""

    async def drain(self, seconds: float) -> None:
        """Finish the batch that is being applied."""
        await self._life.finish(seconds)

    async def stop(self) -> None:
        """End the fold and close what is open."""
        await self._life.finish(None)
        await in_disk_thread(self._opened.close)
        self._life.end()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is."""
        if self._fold is not None and self._fold.failures and self._life.state is State.READY:
            return Health(State.DEGRADED, f"the store has refused a batch {self._fold.failures} times")
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return where it is."""
        fold = self._fold
        return {
            "log": self._options.log,
            "store": self._options.store,
            "records": 0 if fold is None else fold.records,
            "lag": None if fold is None else fold.lag,
            "bootstrap": None if self._bootstrap is None else self._bootstrap.way,
        }
