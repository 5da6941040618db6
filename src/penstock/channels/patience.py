"""When the event loop may wait for the disk itself.

On a quiet machine a sync on the loop spares two changes of threads.  When the disk is slow, or when every core is busy
and the loop has to line up for one after each sync, a thread is better: it has used little time and goes first.  Only
trying tells which it is, so the loop tries, and the longer it goes wrong the more seldom.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Patience"]

FEWEST: Final = 64
MOST: Final = 4096


class Patience:
    """Says where the next sync is waited for, by how long the last ones took.

    After one on the loop that took longer than ``limit`` seconds the next ones go to a thread: 64 at first, twice as
    many each time, at the most 4096.  Every quick one on the loop takes one off.

    >>> patience = Patience(0.002)
    >>> patience.allows()                                # nobody knows yet
    False
    >>> patience.took(0.0003, on_loop=False); patience.allows()
    True
    >>> patience.took(0.5, on_loop=True); patience.allows()
    False
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last = float("inf")
        self._pause = 0  # how many still go to a thread
        self._next_pause = FEWEST

    def allows(self) -> bool:
        """Say whether the loop may wait for the next sync; asked once for each message."""
        if self._pause:
            self._pause -= 1
            return False
        return self._last <= self._limit

    def took(self, seconds: float, *, on_loop: bool) -> None:
        """Note how long a sync took, and where it was waited for."""
        self._last = seconds
        if on_loop and seconds > self._limit:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, MOST)
        elif on_loop:
            self._next_pause = max(self._next_pause - 1, FEWEST)
