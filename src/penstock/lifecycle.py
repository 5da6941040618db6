"""The one lifecycle of everything with a life in the background: servers, taps, feeds, folds, shippers, bridges.

    new ── start ──► starting ── ready ──► ready ⇄ degraded ── drain ──► draining ── stop ──► stopped
                         └──────────────────┴────────┴── it cannot go on ──► failed ── stop ──► stopped

Who runs parts (a command, a supervisor, a test) needs to know nothing else about them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Coroutine
from typing import Any, Protocol, runtime_checkable

import msgspec

from penstock.errors import PenstockError

__all__ = ["Health", "Life", "Part", "State"]

_log = logging.getLogger(__name__)


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


class Life:
    """The state of a part and the tasks that do its work: what most parts have in common.

    Invariants:

    1. A task that ends by an error makes the part ``failed``, with the reason, and ``wait`` raises that error.
    2. After ``end`` no task runs, and the part is ``stopped``.

    >>> Life("tap:readings").health()
    Health(state=<State.NEW: 'new'>, reason='')
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.NEW
        self.reason = ""
        """Why it is not as it should be; a part that is ready and has a reason is degraded."""
        self.error: BaseException | None = None
        """What made it fail."""
        self.stopping = asyncio.Event()
        """Set when the work is to end by itself."""
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def work(self, work: Coroutine[Any, Any, None], *, name: str = "", forever: bool = True) -> None:
        """Begin a task; the part is over when one that is meant to go on ``forever`` has ended."""
        task = asyncio.get_running_loop().create_task(work, name=name or self.name)
        self._tasks.add(task)
        task.add_done_callback(self._forever_done if forever else self._done)

    def _forever_done(self, task: asyncio.Task[None]) -> None:
        self._done(task)
        self._over.set()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Say that the part cannot go on; the first error is the one that counts."""
        if self.error is None:
            self.error = error
            self.state, self.reason = State.FAILED, str(error) or type(error).__name__
            expected = isinstance(error, PenstockError)
            _log.error("%s: %s", self.name, self.reason, exc_info=None if expected else error)
        self._over.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the work is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    async def finish(self, seconds: float | None) -> None:
        """Let the work end by itself, within that time; None: however long it takes."""
        self.stopping.set()
        if self.state.serves or self.state is State.STARTING:
            self.state = State.DRAINING
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def cancel(self) -> None:
        """End the work where it is."""
        self.stopping.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """Be stopped: the work has ended, and what was open is closed."""
        self.state = State.STOPPED
        self._over.set()

    async def wait(self) -> None:
        """Return when the part is over; raises what made it fail."""
        await self._over.wait()
        if self.error is not None:
            raise self.error

    def health(self) -> Health:
        """Return how the part is."""
        if self.state is State.READY and self.reason:
            return Health(State.DEGRADED, self.reason)
        return Health(self.state, self.reason)
