"""What the connections of one loop share: the write at the end of a turn, and one timer for all deadlines."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.kernel import turns as kernel
from penstock.net.deadlines import Slots

__all__ = ["LoopTurns"]


class Timed(Protocol):
    """What is looked at: a connection."""

    @property
    def due(self) -> float | None: ...
    def late(self) -> None: ...
    def flush(self) -> None: ...
    def __hash__(self) -> int: ...


class LoopTurns(kernel.Turns):
    """What connections of one loop share: the flush at the end of a turn, and one timer for all deadlines."""

    __slots__ = ("_loop", "_slots", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._loop = loop
        self._slots: Slots[Timed] = Slots()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def look_at(self, connection: Timed, due: float) -> None:
        """Look at a connection's deadline at ``due``, or sooner where that was asked for already."""
        before = self._slots.due(connection)
        if before is not None and before <= due:
            return
        self._slots.put(connection, due)
        self._set_timer()

    def flush(self) -> None:
        """Send what connections wrote in this turn so far, before something that takes a while."""
        self._flush()

    def forget(self, connection: Timed) -> None:
        """Never look at a connection again."""
        self._slots.discard(connection)

    def _set_timer(self) -> None:
        due = self._slots.next
        if self._timer is not None:
            if due is not None and self._timer_at <= due:
                return  # it wakes up early enough and sets itself again
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer, self._timer_at = self._loop.call_at(due, self._tick), due

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection in self._slots.take(now):
            due = connection.due
            if due is None:
                continue
            if due <= now:
                connection.late()
            else:
                self._slots.put(connection, due)
        self._set_timer()
