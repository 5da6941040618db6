"""Export rounds with a life in the background: a running fold is exported and published, again and again.

A round that fails makes the part degraded, and is tried again; a fold that is not running is waited for.  A fold that
has not moved since its last round is left alone.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from penstock.artifact.lease import ExportLease
from penstock.artifact.round import GRACE_TTLS, Between, RoundReport, exporter_of, run_export_round
from penstock.artifact.transport import Transport, transport_for
from penstock.disk import ObjectOptions, in_disk_thread
from penstock.disk.tree import staged
from penstock.errors import OptionsError
from penstock.kv import KvConnection
from penstock.lifecycle import Health, Life, State

__all__ = ["ExportPart"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class ExportPart:
    """Exports one fold until it is stopped; see penstock.lifecycle.Part.

    ``fold`` is called before each round and returns the fold that is running (Follow, AppliedWatch) or None.  With
    ``leases``, which makes a connection, one node of a fleet at a time exports: the lease has the artifact's key in
    ``bucket``.  Without it every node does, and the pointer still goes forward only.

    >>> part = ExportPart(lambda: None, "s3://bucket/folds", "routes")
    >>> part.name, part.health().state.value
    ('export:routes', 'new')
    """

    def __init__(
        self,
        fold: Callable[[], Between | None],
        url: str,
        key: str,
        *,
        every_seconds: float = 300.0,
        ttl_seconds: float = 300.0,
        leases: Callable[[], KvConnection] | None = None,
        bucket: str = "leases",
        holder: str = "",
        scratch: str | os.PathLike[str] | None = None,
        objects: ObjectOptions | None = None,
    ) -> None:
        if not every_seconds > 0 or not ttl_seconds > 0:
            raise OptionsError("every_seconds and ttl_seconds must be above 0")
        self.name = f"export:{key}"
        self._fold, self._url, self._key = fold, url, key
        self._every, self._ttl = every_seconds, ttl_seconds
        self._leases, self._bucket = leases, bucket
        self._holder = holder or f"{os.uname().nodename}-{uuid.uuid4().hex[:8]}"
        self._scratch = os.fspath(scratch) if scratch is not None else tempfile.gettempdir()
        self._objects = objects
        self._life = Life(self.name)
        self._seen: Any = None
        self.rounds = 0
        """Rounds that ended without an error."""
        self.last: RoundReport | None = None
        """What the last of them did."""

    async def start(self) -> None:
        """Begin; the first round is part of the work, so a node starts without its network."""
        self._life.state = State.READY
        self._life.work(self._run())

    async def ready(self) -> None:
        """Return at once: rounds come when they are due."""

    async def drain(self, seconds: float) -> None:
        """Finish the round that is under way, within that time."""
        await self._life.finish(seconds)

    async def stop(self) -> None:
        """End; a lease that is held is given back, or runs out."""
        await self._life.cancel()
        self._life.end()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is."""
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        last = self.last
        published = None if last is None or last.manifest is None else last.manifest.rank
        outcome = None if last is None else "lost" if not last.won else last.outcome and last.outcome.result
        return {"url": f"{self._url}/{self._key}", "rounds": self.rounds, "cursor": published, "last": outcome}

    # --- The work

    async def _run(self) -> None:
        life = self._life
        while not life.stopping.is_set():
            pause = self._every
            try:
                if not await self._round():
                    pause = min(RETRY_SECONDS, self._every)
                elif life.state is State.DEGRADED:
                    life.state, life.reason = State.READY, ""
            except Exception as exc:  # noqa: BLE001 - whatever it is, the next round may go well
                logger.warning("%s: %s; it is tried again", self.name, exc)
                life.state, life.reason = State.DEGRADED, str(exc)
                pause = min(RETRY_SECONDS, self._every)
            await life.pause(pause)

    async def _round(self) -> bool:
        """Run a round if there is a reason to; False while there is no fold."""
        fold = self._fold()
        if fold is None:
            self._life.state, self._life.reason = State.DEGRADED, "the fold is not running"
            return False
        cursor = getattr(fold, "cursor", None)
        if cursor is not None and cursor == self._seen:
            return True
        transport = transport_for(self._url, self._objects)
        self.last = await self._export(fold, transport)
        self.rounds += 1
        if self.last.won:
            self._seen = cursor
        return True

    async def _export(self, fold: Between, transport: Transport) -> RoundReport:
        if self._leases is None:
            report = RoundReport(won=True)
            with staged(self._scratch + "/export", "export") as folder:
                report.manifest = await exporter_of(fold)(folder + "/artifact")
                report.outcome = await in_disk_thread(transport.upload, folder + "/artifact", self._key)
            if report.outcome.result == "published":
                report.pruned = await in_disk_thread(transport.prune, self._key, GRACE_TTLS * self._ttl)
            return report
        async with self._leases() as connection:
            lease = ExportLease(await connection.store(self._bucket), self._key, self._holder)
            return await run_export_round(lease, self._ttl, exporter_of(fold), transport, self._key, self._scratch)
