"""A shipper with a life in the background: it looks for sealed segments, ships them, and waits for more.

A store that is away makes it degraded and is tried again; another shipper that takes over, or a log that is not the one
that was shipped, makes it fail.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import ObjectOptions, ObjectStore, in_waiting_thread, object_store_for
from penstock.errors import NotFoundError, RetryError
from penstock.lifecycle import Health, Life, State
from penstock.ship.roll import is_due, roll_quiet
from penstock.ship.shipper import ShipOptions, Shipper, ShipStatus

__all__ = ["ShipPart"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LAST_PAUSE_SECONDS = 30.0
METRICS_SECONDS = 5.0
SLOW_BYTES = 5 << 20
SLOW_TIMES = 3
"""On a slow link one part of this size goes up at a time, and has so many times as long as elsewhere.

With the times that a store is given by itself that is enough from 120 kbit/s on.
"""


class ShipPart:
    """Ships one log until it is stopped; see penstock.lifecycle.Part.

    ``roll`` ends the open segment of a log whose writer is in this process, and says whether there was one.

    >>> part = ShipPart("data/ticks", "s3://bucket/fleet/edge-1")
    >>> part.name, part.health().state.value
    ('ship:ticks', 'new')
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        place: str | ObjectStore,
        *,
        node: str = "",
        options: ShipOptions | None = None,
        objects: ObjectOptions | None = None,
        look_seconds: float = 1.0,
        roll_seconds: float | None = None,
        paused: bool = False,
        roll: Callable[[], Awaitable[bool]] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.path, self._place, self._node = os.fspath(path).rstrip("/"), place, node
        self.name = f"ship:{os.path.basename(self.path)}"
        self._options, self._objects, self._clock = options, objects, clock
        self._look_seconds, self._roll_seconds, self._roll = look_seconds, roll_seconds, roll
        self._life, self._ready = Life(self.name), asyncio.Event()
        self._measured_at = -math.inf
        self._drain, self._paused, self._stopped = False, paused, False
        self._slow = False
        self._shipper: Shipper | None = None
        self.idle = False
        """Whether it found nothing to ship or to remove when it last looked."""
        self.failures: list[Exception] = []
        """What went wrong since it last went well; it is tried again."""

    async def start(self) -> None:
        """Begin; the first look at the store is part of the work, so an edge node starts without its network."""
        self._life.state = State.STARTING
        self._life.work(self._run())

    async def ready(self) -> None:
        """Return when the log is this shipper's; raises what prevents that."""
        await self._ready.wait()
        if self._life.error is not None:
            raise self._life.error

    async def drain(self, seconds: float) -> None:
        """Ship what is sealed now and end, within that time."""
        self._drain = True
        await self._life.finish(seconds)

    async def stop(self) -> None:
        """End; what was begun is finished by whoever ships next."""
        self._stopped = True  # a thread may be at work, and have no shipper yet
        await self._life.cancel()
        if self._shipper is not None:
            self._shipper.close()
        self._life.end()
        self._ready.set()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is."""
        return self._life.health()

    @property
    def sent_bytes(self) -> int:
        """How many bytes it sent since it was started."""
        return 0 if self._shipper is None else self._shipper.sent_bytes

    def status(self) -> ShipStatus | None:
        """Return how far it is, None before it has seen the store."""
        return None if self._shipper is None else self._shipper.status()

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        about = {} if self._shipper is None else self._shipper.describe()
        return {"log": self.path, "state": self._life.state.value, "reason": self._life.reason, **about}

    def pause(self) -> None:
        """Send nothing more until ``resume``; a segment that is going up is finished."""
        self._paused = True
        if self._shipper is not None:
            self._shipper.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        if self._shipper is not None:
            self._shipper.resume()

    # --- The work

    async def _run(self) -> None:
        life, pause = self._life, FIRST_PAUSE_SECONDS
        try:
            while not life.stopping.is_set() or self._drain:
                try:
                    await self._roll_here()
                    count = await in_waiting_thread(self._work)
                    self.idle = not count
                    pause = FIRST_PAUSE_SECONDS
                    self._settled()
                except NotFoundError as exc:
                    self.failures = [*self.failures[-9:], exc]
                    life.state, life.reason = State.DEGRADED, f"it waits: {exc}"
                    if life.stopping.is_set():
                        return
                    await self._sleep(self._look_seconds)
                    continue
                except (RetryError, OSError) as exc:
                    self._go_slowly()
                    self.failures = [*self.failures[-9:], exc]
                    logger.warning("%s: %s; it is tried again", self.name, exc)
                    life.state, life.reason = State.DEGRADED, str(exc)
                    await self._sleep(pause)
                    pause = min(pause * 2, LAST_PAUSE_SECONDS)
                    continue
                if not count:
                    if life.stopping.is_set():
                        return
                    await self._sleep(self._look_seconds)
        finally:
            self._ready.set()

    def _go_slowly(self) -> None:
        """From now on send part by part: it may be the link."""
        if self._shipper is not None and not self._slow and isinstance(self._place, str):
            self._slow = True
            self._shipper.go_on_by(self._store())

    def _settled(self) -> None:
        self.failures.clear()
        if self._life.state in (State.STARTING, State.DEGRADED):
            self._life.state, self._life.reason = State.READY, ""
        self._ready.set()

    async def _sleep(self, seconds: float) -> None:
        if self._drain:
            await asyncio.sleep(min(seconds, FIRST_PAUSE_SECONDS))
            return
        await self._life.pause(seconds)

    async def _roll_here(self) -> None:
        """End a segment that is old enough where this process has the writer."""
        if self._roll_seconds is None or self._roll is None:
            return
        if await in_waiting_thread(is_due, self.path, self._roll_seconds, clock=self._clock):
            await self._roll()

    def _store(self) -> ObjectStore:
        """Return the store, to be used part by part where the link is known to be slow, or turned out to be.

        Parts that go up side by side share the link, and each has to be there within its time: where that is too
        little, none of them ever is.
        """
        if not isinstance(self._place, str):
            return self._place
        rate = 0.0 if self._options is None else self._options.bytes_per_second
        if not (self._slow or rate):
            return object_store_for(self._place, self._objects)
        objects = self._objects or ObjectOptions()
        seconds = SLOW_TIMES * max(objects.timeout_seconds, SLOW_BYTES / rate if rate else 0.0)
        objects = replace(objects, part_bytes=SLOW_BYTES, parts_at_once=1, timeout_seconds=seconds)
        store = object_store_for(self._place, objects)
        store.puts_at_once = 1
        return store

    def _work(self) -> int:
        """Make the shipper if there is none yet, roll what is old, and ship."""
        if self._roll_seconds is not None:
            roll_quiet(self.path, self._roll_seconds, clock=self._clock)
        if self._shipper is None:
            self._shipper = Shipper(
                self.path, self._store(), node=self._node, options=self._options, clock=self._clock,
                wanted=lambda: not self._stopped,
            )  # fmt: skip
            if self._stopped:
                self._shipper.close()
            if self._paused:
                self._shipper.pause()
        count = self._shipper.step()
        now = self._clock.monotonic()
        if now >= self._measured_at + METRICS_SECONDS:
            self._measured_at = now
            self._shipper.status()  # for the metrics: how far behind it is
        return count
