"""The one lifecycle of everything with a life in the background: servers, taps, feeds, folds, shippers, bridges.

    new ── start ──► starting ── ready ──► ready ⇄ degraded ── drain ──► draining ── stop ──► stopped
                         └──────────────────┴────────┴── it cannot go on ──► failed ── stop ──► stopped

Who runs parts (a command, a supervisor, a test) needs to know nothing else about them.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol, runtime_checkable

import msgspec

__all__ = ["Health", "Part", "State"]


class State(enum.StrEnum):
    """Where a part is in its life.

    >>> State.READY.serves, State.DRAINING.serves
    (True, False)
    """

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def serves(self) -> bool:
        """Whether new work is accepted."""
        return self in (State.READY, State.DEGRADED)


class Health(msgspec.Struct, frozen=True):
    """How a part is now; ``reason`` is a sentence for people whenever the state is not ``ready``.

    >>> Health(State.DEGRADED, "the disk is full").state.serves
    True
    """

    state: State
    reason: str = ""


@runtime_checkable
class Part(Protocol):
    """Something that runs until it is stopped.  All methods are called from one event loop.

    Invariants:

    1. ``start`` that raises leaves nothing behind: no task, no socket, no lock.
    2. ``stop`` always ends, may be called in any state, and twice.
    3. A part that cannot go on says so: ``health`` is ``failed`` with the reason and ``wait`` raises it.
    """

    name: str
    """Unique among the parts of a process: ``mqtt``, ``tap:readings``."""

    async def start(self) -> None:
        """Begin: open what is needed and start the tasks.  Called once."""

    async def ready(self) -> None:
        """Return when it serves; raises what prevents that."""

    async def drain(self, seconds: float) -> None:
        """Accept nothing new and finish what was begun, within that time."""

    async def stop(self) -> None:
        """End everything, drained or not; what was acknowledged is kept."""

    async def wait(self) -> None:
        """Return when the part has stopped; raises what made it fail."""

    def health(self) -> Health:
        """Return how it is, without waiting."""

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON: addresses, positions, counts."""
