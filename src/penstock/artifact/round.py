"""One export round of a node: lease, export, upload, complete, prune, clean up.

    idle ── try_acquire ──► acquiring ── lost ──► idle
                                │ won
                            exporting ── failed ──► abandoning ──► idle       (the error goes to the caller)
                                │
                            uploading ── failed ──► abandoning ──► idle       (the error goes to the caller)
                                │      └ a newer one is published ──► abandoning ──► idle
                                │ published
                            completing ── complete, prune (neither may fail the round) ──► idle

The local artifact is removed on every way, that of a round that was killed by a later one: it pins files that the
store would let go.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from penstock.artifact.export import export_store
from penstock.artifact.lease import ExportLease, LeaseGuard
from penstock.artifact.manifest import ExportManifest
from penstock.artifact.transport import Outcome, Transport
from penstock.disk import in_disk_thread
from penstock.disk.failpoint import fail_point
from penstock.disk.tree import remove_tree, staged
from penstock.errors import PenstockError
from penstock.metrics import REGISTRY

__all__ = ["GRACE_TTLS", "Exporter", "RoundReport", "RoundState", "exporter_of", "run_export_round"]

_log = logging.getLogger("penstock.artifact")
_rounds = REGISTRY.counter("export_rounds", "export rounds by how they ended", labels=("key", "end"))

GRACE_TTLS: Final = 4
"""The grace of prune in times of the lease: one for a publisher that lost it, three for who is downloading."""

T = TypeVar("T")
Exporter = Callable[[str], Awaitable[ExportManifest]]
"""Writes an artifact to a folder that is not there yet."""


class RoundState(enum.StrEnum):
    """Where a round is; see the head of this module.

    >>> RoundState.IDLE.value
    'idle'
    """

    IDLE = "idle"
    ACQUIRING = "acquiring"
    EXPORTING = "exporting"
    UPLOADING = "uploading"
    COMPLETING = "completing"
    ABANDONING = "abandoning"


NEXT: Final[dict[RoundState, tuple[RoundState, ...]]] = {
    RoundState.IDLE: (RoundState.ACQUIRING,),
    RoundState.ACQUIRING: (RoundState.EXPORTING, RoundState.IDLE),
    RoundState.EXPORTING: (RoundState.UPLOADING, RoundState.ABANDONING),
    RoundState.UPLOADING: (RoundState.COMPLETING, RoundState.ABANDONING),
    RoundState.COMPLETING: (RoundState.IDLE,),
    RoundState.ABANDONING: (RoundState.IDLE,),
}


class RoundReport(msgspec.Struct):
    """What a round did.

    >>> RoundReport().won
    False
    """

    states: list[RoundState] = msgspec.field(default_factory=lambda: [RoundState.IDLE])
    """Every state it was in, in order."""
    won: bool = False
    manifest: ExportManifest | None = None
    outcome: Outcome | None = None
    completed: bool = False
    """Whether the lease says what was exported."""
    pruned: list[str] = msgspec.field(default_factory=list)

    def enter(self, state: RoundState) -> None:
        """Go on to a state that can follow."""
        assert state in NEXT[self.states[-1]], f"{self.states[-1]} is not followed by {state}"
        self.states.append(state)
        fail_point(f"artifact.round.{state.value}")


class Between(Protocol):
    """A fold under way that lets a call have its store between two flushes: AppliedWatch, Follow."""

    async def between_flushes(self, call: Callable[[Any], T]) -> T:
        """Run ``call(store)`` while nothing is applied."""


def exporter_of(fold: Between) -> Exporter:
    """Return what exports the store of a fold that is running, between two of its flushes.

    >>> async def example(fold):
    ...     manifest = await exporter_of(fold)("/var/tmp/artifact")
    ...     return manifest.cursor
    """

    async def export(destination: str) -> ExportManifest:
        return await fold.between_flushes(lambda store: export_store(store, destination))

    return export


async def run_export_round(
    lease: ExportLease,
    ttl_seconds: float,
    export: Exporter,
    transport: Transport,
    key: str,
    scratch: str | os.PathLike[str],
) -> RoundReport:
    """Run one round; the report says whether the lease was won and what became of the artifact.

    ``export`` comes from ``exporter_of(fold)``, or is any function that writes an artifact.  What goes wrong before the
    artifact is up is raised, after the lease was given back.

    >>> async def example(lease, fold, transport):
    ...     report = await run_export_round(lease, 300, exporter_of(fold), transport, "routes", "/var/tmp")
    ...     return report.outcome
    """
    report = RoundReport()
    report.enter(RoundState.ACQUIRING)
    guard = await lease.try_acquire(ttl_seconds)
    if guard is None:
        report.enter(RoundState.IDLE)
        _rounds.add(key=key, end="lost")
        return report
    report.won = True
    try:
        report.enter(RoundState.EXPORTING)
        with staged(os.fspath(scratch) + "/round", "round") as folder:
            artifact = folder + "/artifact"
            try:
                report.manifest = await export(artifact)
                report.enter(RoundState.UPLOADING)
                report.outcome = await in_disk_thread(transport.upload, artifact, key)
            finally:
                await in_disk_thread(remove_tree, artifact)
    except BaseException:
        report.enter(RoundState.ABANDONING)
        await guard.abandon()
        report.enter(RoundState.IDLE)
        _rounds.add(key=key, end="failed")
        raise
    if report.outcome.result == "superseded":
        report.enter(RoundState.ABANDONING)
        await guard.abandon()
    else:
        report.enter(RoundState.COMPLETING)
        await _finish(report, guard, transport, key, GRACE_TTLS * ttl_seconds)
    report.enter(RoundState.IDLE)
    _rounds.add(key=key, end=report.outcome.result)
    return report


async def _finish(report: RoundReport, guard: LeaseGuard, transport: Transport, key: str, grace: float) -> None:
    """Note the export and prune; neither undoes what is published, so neither may fail the round."""
    assert report.manifest is not None
    try:
        report.completed = await guard.complete(report.manifest.cursor)
    except PenstockError as exc:
        _log.warning("%s: the export could not be noted in the lease: %s", key, exc)
    try:
        report.pruned = await in_disk_thread(transport.prune, key, grace)
    except (PenstockError, OSError) as exc:
        _log.warning("%s: old payloads could not be pruned, the next round does it: %s", key, exc)
