"""Runs parts: starts them in order of need, starts a failing one again with back-off, and never loses sight of one.

    make ──► start ──► ready ──► wait ──┐
      ▲                                 │ it failed, or could not start
      └──── back-off: 1, 2, 4 … 60 s ◄──┘       (from 1 again after a minute that went well)

A part is made anew for each try.  One that another needs is started first; while it is away, those that need it are
stopped and wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence, Set as AbstractSet
from typing import Any, Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import OptionsError
from penstock.lifecycle import Health, Part, State
from penstock.metrics import REGISTRY

__all__ = ["Spec", "Supervisor"]

_log = logging.getLogger("penstock.node")

_restarts = REGISTRY.counter("node_part_restarts", "parts started again after a failure", labels=("part",))
_up = REGISTRY.gauge("node_part_up", "whether a part serves", labels=("part",))

FIRST_SECONDS: Final = 1.0
LAST_SECONDS: Final = 60.0
WELL_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
SLOW_SECONDS: Final = 10.0
"""After this long the next part is started, whether this one is ready or not."""
READY_LOOK_SECONDS: Final = 0.1


class Spec(msgspec.Struct, frozen=True):
    """A part to run: how it is made, and the names of those it needs.

    >>> Spec("tap", lambda: None, needs=("mqtt",)).needs
    ('mqtt',)
    """

    name: str
    make: Callable[[], Part]
    needs: tuple[str, ...] = ()


class Supervisor:
    """Runs parts until it is stopped.

    >>> asyncio.run(Supervisor([]).start()) is None
    True
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._specs = in_order(specs)
        self._clock, self._sleep = clock, sleep
        self._parts: dict[str, Part] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._tried: dict[str, asyncio.Event] = {}
        self._serves: dict[str, asyncio.Event] = {}
        self._away: dict[str, asyncio.Event] = {}
        self.restarts: dict[str, int] = {}
        for spec in self._specs:
            self._note(spec.name)
        self._leaving: set[str] = set()

    def _note(self, name: str) -> None:
        for known in (self._tried, self._serves, self._away):
            known.setdefault(name, asyncio.Event()).clear()  # the same event: others may be waiting for it
        self.restarts[name] = 0

    async def start(self) -> None:
        """Try to start every part once, those that others need first; what fails is tried again from here on."""
        for spec in self._specs:
            self._tasks[spec.name] = asyncio.create_task(self._run(spec), name=f"part {spec.name}")
            await self._tried[spec.name].wait()

    async def change(self, specs: Sequence[Spec], renewed: AbstractSet[str], drain_seconds: float) -> None:
        """Run other parts from here on: what is not among ``specs`` or is ``renewed`` is drained and stopped.

        Then what is new or renewed is started.  A part that stays is not touched.
        """
        ordered = in_order(specs)
        names = {spec.name for spec in ordered}
        leaving = [spec for spec in self._specs if spec.name not in names or spec.name in renewed]
        left = {spec.name for spec in leaving}
        self._leaving |= left
        await asyncio.gather(
            *(self._drained(name, part, drain_seconds) for name, part in self._parts.items() if name in left)
        )
        for spec in reversed(leaving):
            await self._end(spec.name)
            self._forget_reason(spec.name)
        self._leaving -= left
        self._specs = ordered
        for name in left - names:
            for known in (self._tried, self._serves, self._away, self.restarts):
                known.pop(name, None)
        for spec in ordered:
            if spec.name not in self._tasks:
                self._note(spec.name)
        self._say_up()
        for spec in ordered:
            if spec.name not in self._tasks:
                self._tasks[spec.name] = asyncio.create_task(self._run(spec), name=f"part {spec.name}")
                await self._tried[spec.name].wait()

    @property
    def failures(self) -> dict[str, str]:
        """Parts that do not serve now, and why: they failed, or are still waiting for something."""
        return {**self._waiting, **self._failures}

    @property
    def failed(self) -> dict[str, str]:
        """Parts that failed, and why."""
        return dict(self._failures)

    def part(self, name: str) -> Part | None:
        """Return a part that runs."""
        return self._parts.get(name)

    def health(self) -> dict[str, Health]:
        """Return how each part is."""
        found = {}
        for spec in self._specs:
            part = self._parts.get(spec.name)
            if part is not None:
                found[spec.name] = part.health()
            else:
                found[spec.name] = self._health_of_none(spec.name)
        return found

    def _health_of_none(self, name: str) -> Health:
        if name in self._failures:
            return Health(State.FAILED, self._failures[name])
        return Health(State.STARTING, self._waiting[name]) if name in self._waiting else Health(State.NEW)

    def _forget_reason(self, name: str) -> None:
        self._failures.pop(name, None)
        self._waiting.pop(name, None)

    def describe(self) -> dict[str, Any]:
        """Return what each part says about itself, with its health and how often it was started again."""
        health = self.health()
        return {
            name: {
                "state": str(one.state),
                "reason": one.reason,
                "restarts": self.restarts[name],
                **(self._parts[name].describe() if name in self._parts and one.state.serves else {}),
            }
            for name, one in health.items()
        }

    async def stop(self, drain_seconds: float) -> None:
        """Drain all parts side by side within that time, then stop them in the reverse order of their start."""
        self._leaving.update(self._parts)
        deadline = asyncio.get_running_loop().time() + drain_seconds
        drains = [self._drained(name, part, drain_seconds) for name, part in self._parts.items()]
        await asyncio.gather(*drains)
        for spec in reversed(self._specs):
            await self._end(spec.name)
        left = deadline - asyncio.get_running_loop().time()
        _log.info("all parts stopped with %.1f s of the drain left", max(0.0, left))

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # --- One part

    async def _run(self, spec: Spec) -> None:
        delay = FIRST_SECONDS
        while True:
            spec = next((one for one in self._specs if one.name == spec.name), spec)  # a reload may have changed it
            for need in spec.needs:
                if not self._serves[need].is_set():
                    self._waiting[spec.name] = f"{need}, which it needs, does not serve"
                    self._tried[spec.name].set()  # nobody else waits for it
                    await self._serves[need].wait()
            began = self._clock.monotonic()
            reason = await self._live(spec)
            if spec.name in self._leaving:
                return  # it was drained, and ended when it was done
            self._waiting.pop(spec.name, None)
            self._failures[spec.name] = reason
            self._tried[spec.name].set()
            if self._clock.monotonic() - began > WELL_SECONDS:
                delay = FIRST_SECONDS
            _log.error("part %s does not serve: %s; it is started again in %g s", spec.name, reason, delay)
            await self._sleep(delay)
            delay = min(2 * delay, LAST_SECONDS)
            self.restarts[spec.name] += 1
            _restarts.add(part=spec.name)

    async def _live(self, spec: Spec) -> str:
        """Start a part and wait until it ends; return why it did."""
        part: Part | None = None
        try:
            part = spec.make()
            await part.start()
            self._parts[spec.name] = part
            await self._until_it_serves(spec, part)
            self._forget_reason(spec.name)
            self._away[spec.name].clear()
            self._serves[spec.name].set()
            self._tried[spec.name].set()
            self._say_up()
            _log.info("part %s serves", spec.name)
            return await self._until_it_ends(spec, part)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other parts go on and people are told
            return f"{type(exc).__name__}: {exc}"
        finally:
            self._serves[spec.name].clear()
            self._away[spec.name].set()
            self._say_up()
            if part is not None:
                await self._stopped(spec.name, part)
            self._parts.pop(spec.name, None)

    async def _until_it_serves(self, spec: Spec, part: Part) -> None:
        """Wait for a part to be ready, or to say that it serves as well as it can; others do not wait for long."""
        ready = asyncio.ensure_future(part.ready())
        began = asyncio.get_running_loop().time()
        try:
            while not ready.done() and not part.health().state.serves:
                await asyncio.wait([ready], timeout=READY_LOOK_SECONDS)
                if not self._tried[spec.name].is_set() and asyncio.get_running_loop().time() - began > SLOW_SECONDS:
                    self._waiting[spec.name] = "it is still starting"
                    self._tried[spec.name].set()
            if ready.done():
                ready.result()
        finally:
            if not ready.done():
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)

    async def _until_it_ends(self, spec: Spec, part: Part) -> str:
        own = asyncio.ensure_future(part.wait())
        lost = [asyncio.ensure_future(self._lost(need)) for need in spec.needs]
        try:
            done, _ = await asyncio.wait([own, *lost], return_when=asyncio.FIRST_COMPLETED)
            if own in done:
                own.result()
                return "it stopped by itself"
            return f"{next(one for one in lost if one in done).result()}, which it needs, is away"
        finally:
            for one in (own, *lost):
                one.cancel()
            await asyncio.gather(own, *lost, return_exceptions=True)

    def _say_up(self) -> None:
        """Say which parts serve; one that is asked for no more has nothing to say."""
        _up.replace({(spec.name,): float(self._serves[spec.name].is_set()) for spec in self._specs})

    async def _lost(self, name: str) -> str:
        await self._away[name].wait()
        return name

    async def _drained(self, name: str, part: Part, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds + 1):
                await part.drain(seconds)
        except Exception as exc:  # noqa: BLE001 - it is stopped next, drained or not
            _log.warning("part %s was not drained: %s", name, exc or type(exc).__name__)

    async def _stopped(self, name: str, part: Part) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await part.stop()
        except Exception as exc:  # noqa: BLE001 - others must be stopped too
            _log.error("part %s did not stop: %s", name, exc or type(exc).__name__)


def in_order(specs: Sequence[Spec]) -> list[Spec]:
    """Return the parts so that each comes after those it needs; otherwise as given.

    >>> [spec.name for spec in in_order([Spec("tap", lambda: None, ("mqtt",)), Spec("mqtt", lambda: None)])]
    ['mqtt', 'tap']
    """
    known = {spec.name: spec for spec in specs}
    if len(known) < len(specs):
        names = [spec.name for spec in specs]
        raise OptionsError(f"two parts are called {next(name for name in names if names.count(name) > 1)}")
    ordered: dict[str, Spec] = {}

    def place(spec: Spec, above: tuple[str, ...]) -> None:
        if spec.name in above:
            raise OptionsError(f"parts need each other: {' → '.join((*above, spec.name))}")
        for need in spec.needs:
            if need not in known:
                raise OptionsError(f"part {spec.name} needs {need}, which is not there")
            if need not in ordered:
                place(known[need], (*above, spec.name))
        ordered.setdefault(spec.name, spec)

    for spec in specs:
        place(spec, ())
    return list(ordered.values())
