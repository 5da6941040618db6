"""How to wait for something another process does: spin a little, then sleep longer and longer."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """The delays between looks: first 50 µs, doubling up to 10 ms; ``reset`` after each success.

    It owns no clock of its own, so it serves threads (``wait``) and asyncio (``delay``) alike.  An idle
    waiter looks a hundred times a second, which costs next to nothing.

    >>> backoff = Backoff()
    >>> [backoff.delay() for _ in range(3)]
    [5e-05, 0.0001, 0.0002]
    >>> backoff.reset(); backoff.delay()
    5e-05
    """

    FIRST = 50e-6
    LAST = 10e-3

    def __init__(self, *, first: float = FIRST, last: float = LAST) -> None:
        self._first, self._last = first, last
        self._next = first

    def delay(self, remaining: float | None = None) -> float:
        """Return how long to sleep now, at most ``remaining``; the next one is twice as long."""
        delay, self._next = self._next, min(self._next * 2, self._last)
        return delay if remaining is None else max(0.0, min(delay, remaining))

    def reset(self) -> None:
        """Begin with the shortest delay again."""
        self._next = self._first

    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float | None = None,
    ) -> bool:
        """Sleep until ``ready`` says so; False when ``timeout`` seconds are over.

        >>> Backoff().wait(lambda: True), Backoff().wait(lambda: False, timeout=0.001)
        (True, False)
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.reset()
        while not ready():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            time.sleep(self.delay(remaining))
        return True
