"""Turns: a lock between processes that is held for a moment, again and again, and that nobody is kept from for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from penstock.disk.face import Disk
from penstock.disk.wait import Backoff
from penstock.errors import Timeout

__all__ = ["Turns", "wait_until_taken"]

LONGEST_PAUSE_SECONDS: Final = 1e-3
"""The longest pause between two looks at the lock; a turn takes less."""
TURNS_IN_A_ROW: Final = 8
"""How many turns one process may have before who waits for one is let past."""


class Turns:
    """One process's side of a lock that is taken in turns.  One thread at a time.

    A waiting process stands in ``line``, a second lock: whoever had several turns in a row must pass the line as well,
    so that nobody starves beside a busy one.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> one, two = (Turns(disk, "lock", "line", "jobs") for _ in range(2))
    >>> one.take(1.0); one.release()
    >>> two.take(1.0); two.release()
    """

    def __init__(self, disk: Disk, lock: str, line: str, name: str, of: str | None = None) -> None:
        """``of`` is the file or folder that the lock is for: it is taken with it."""
        self._lock, self._line, self._name = disk.latch(lock, of), disk.latch(line), name
        self._in_a_row = 0

    def take(self, timeout: float) -> None:
        """Take the lock; Timeout when others have kept it for that long.  FileNotFoundError when its folder is gone."""
        if self._in_a_row < TURNS_IN_A_ROW and self._lock.take():
            self._in_a_row += 1
            return
        self._in_a_row = 0
        with self.line(timeout) as deadline:
            wait_until_taken(self._lock.take, deadline, self._name)

    @contextmanager
    def line(self, timeout: float) -> Iterator[float]:
        """Stand in line; the block gets the time by which it must have the lock."""
        deadline = time.monotonic() + timeout
        wait_until_taken(self._line.take, deadline, self._name)
        try:
            yield deadline
        finally:
            self._line.release()

    def release(self) -> None:
        """Let others have it."""
        self._lock.release()

    def close(self) -> None:
        """Let go of the files, and with them of the lock."""
        self._lock.close()
        self._line.close()


def wait_until_taken(take: Callable[[], bool], deadline: float, name: str) -> None:
    """Try to take something until nobody else has it; Timeout after the deadline."""
    if take():
        return
    backoff = Backoff(last=LONGEST_PAUSE_SECONDS)
    while time.monotonic() < deadline:
        time.sleep(backoff.delay())
        if take():
            return
    raise Timeout(f"{name}: others have kept it locked for too long")
