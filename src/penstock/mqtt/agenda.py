"""What is to be done later: a heap of times and actions.  No clock but the one it is given, no task."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from penstock.clock import Clock

__all__ = ["Agenda"]


class Agenda:
    """Actions and when they are due, by the monotonic clock.

    >>> from penstock.testing.clock import FakeClock
    >>> agenda = Agenda(clock := FakeClock())
    >>> agenda.at(clock.monotonic() + 5, lambda: print("done"))
    >>> agenda.tick(); clock.pass_(5); agenda.tick(); agenda.next_due
    done
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.on_due: Callable[[], None] | None = None
        """Called when ``next_due`` may have come nearer."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._due_count = 0

    @property
    def next_due(self) -> float | None:
        """When ``tick`` has something to do, by the monotonic clock."""
        return self._due[0][0] if self._due else None

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something when the time has come; the action looks whether it is still wanted."""
        self._due_count += 1
        heapq.heappush(self._due, (when, self._due_count, action))
        if self.on_due is not None and self._due[0][1] == self._due_count:
            self.on_due()

    def tick(self) -> None:
        """Do what is due."""
        now = self.clock.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
