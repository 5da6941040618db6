"""The ledger as a part of the node: it looks at every seam again and again, and a difference is an alarm."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.disk import disk_for, in_disk_thread
from penstock.lifecycle import Health, Life, State
from penstock.metrics import REGISTRY
from penstock.node.ledger.book import Book, Figures
from penstock.node.ledger.reckon import LedgerReckoner, RunningTap, SeamCount, lake_seams
from penstock.node.ledger.seams import IngestSeam, Seam, seams_of, write_seams
from penstock.node.options import NodeConfig

__all__ = ["LedgerPart"]

_log = logging.getLogger("penstock.node")

_figures = REGISTRY.gauge("ledger_records", "records of a seam: came, went, waiting, lost", labels=("seam", "what"))
_ok = REGISTRY.gauge("ledger_ok", "whether what came at a seam is accounted for", labels=("seam",))

SETTLED_NS: Final = 10**9
"""How long ago a folder must have changed for its time to tell that it has not changed again."""


class LedgerPart:
    """Counts the seams of a node; see penstock.lifecycle.Part.

    >>> LedgerPart(lambda: NodeConfig(data="nowhere")).name
    'ledger'
    """

    name = "ledger"

    def __init__(
        self,
        config: Callable[[], NodeConfig],
        running: Callable[[], Mapping[str, RunningTap]] = dict,
        deliveries: Callable[[], Figures | None] = lambda: None,
    ) -> None:
        self._config, self._running, self._deliveries = config, running, deliveries
        self._life = Life(self.name)
        self._book: Book | None = None
        self._written: list[Seam] | None = None
        self._known: dict[str, tuple[object, SeamCount]] = {}
        self._channels: tuple[object, list[str]] = (None, [])
        self._seams: tuple[object, list[Seam]] = (None, [])
        self._tidied = -1
        self.seams: list[SeamCount] = []
        """What the last look found."""

    async def start(self) -> None:
        """Open the book and look for the first time."""
        self._life.state = State.STARTING
        self._book = await in_disk_thread(Book, self._config().data)
        try:
            await self.look()
        except BaseException:
            await in_disk_thread(self._book.close)
            raise
        self._life.state = State.READY
        self._life.work(self._run())

    async def _run(self) -> None:
        while not self._life.stopping.is_set():
            await self._life.pause(self._config().ledger.look_seconds)
            await self.look()

    async def look(self) -> None:
        """Look at every seam once; what is as it was costs a look at its file and no more."""
        before, self.seams = self.seams, await in_disk_thread(self._look, self._deliveries())
        if before and self.seams == before:
            return
        alarms = [seam.alarm for seam in self.seams if seam.alarm]
        for alarm in alarms:
            if alarm not in self._life.reason:
                _log.error("ledger: %s", alarm)
        self._life.reason = "; ".join(alarms)
        _ok.replace({(seam.seam,): float(seam.ok) for seam in self.seams})
        _figures.replace({
            (seam.seam, what): float(count)
            for seam in self.seams
            for what, count in (
                ("came", seam.came), ("went", seam.went), ("waiting", seam.waiting), ("lost", sum(seam.lost.values())),
            )
        })  # fmt: skip

    def _look(self, deliveries: Figures | None) -> list[SeamCount]:
        assert self._book is not None
        config = self._config()
        seams = self._seams_of(config)
        if seams != self._written:
            write_seams(config.data, seams)
            self._written = seams
        reckoner = LedgerReckoner(self._book, running=self._running(), deliveries=deliveries)
        counts = [self._count(reckoner, seam) for seam in (*seams, *lake_seams(config.data))]
        if self._tidied != reckoner.hour:
            reckoner.tidy(config.ledger.keep_hours)
            self._tidied = reckoner.hour
        self._book.save()
        return counts

    def _seams_of(self, config: NodeConfig) -> list[Seam]:
        """Return all seams; they are listed anew when the configuration or the folder of channels has changed."""
        folder = os.path.join(config.data, "ingest")
        found = disk_for(folder).stat(folder)
        settled = found is not None and time.time_ns() - found.modified_ns > SETTLED_NS
        if not settled or self._channels[0] != found:
            self._channels = found, _channels_of(config.data)
        known = config, self._channels[1]
        if self._seams[0] != known:
            self._seams = known, seams_of(config, self._channels[1])
        return self._seams[1]

    def _count(self, reckoner: LedgerReckoner, seam: Seam) -> SeamCount:
        """Count a seam, unless it is a channel that nobody has written to since the last look of this hour."""
        if not isinstance(seam, IngestSeam):
            return reckoner.count(seam)
        found = disk_for(seam.memory).stat(seam.memory)
        state = None if found is None else (found.size, found.modified_ns, found.identity, reckoner.hour)
        known = self._known.get(seam.name)
        if known is not None and known[0] == state and known[1].ok:
            return known[1]
        count = reckoner.count(seam)
        self._known[seam.name] = state, count
        return count

    async def ready(self) -> None:
        """Return at once: ``start`` has looked."""

    async def drain(self, seconds: float) -> None:
        """Go on: others drain, and the last look is theirs."""

    async def stop(self) -> None:
        """Look once more and close the book."""
        await self._life.finish(None)
        if self._book is not None:
            await in_disk_thread(self._book.close)
            self._book = None
        self._life.end()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is: degraded while a seam does not add up."""
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return how many seams there are, and which do not add up."""
        return {"seams": len(self.seams), "wrong": [seam.seam for seam in self.seams if not seam.ok]}


def _channels_of(data: str) -> list[str]:
    """Return the channels that ingest has ever written."""
    folder = os.path.join(data, "ingest")
    disk = disk_for(folder)
    if disk.stat(folder) is None:
        return []
    return [name[: -len(".snap")] for name in disk.list(folder) if name.endswith(".snap")]
