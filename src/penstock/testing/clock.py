"""A clock that stands still until a test turns it."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """A Clock in the hands of a test: ``pass_`` moves both readings, ``jump`` only the calendar.

    >>> clock = FakeClock(now_ns=1_000)
    >>> clock.pass_(2.0); clock.now_ns(), clock.monotonic()
    (2000001000, 2.0)
    >>> clock.jump(-1.0); clock.now_ns(), clock.monotonic()
    (1000001000, 2.0)
    """

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns
        self._monotonic = 0.0

    def now_ns(self) -> int:
        """Return the calendar's reading."""
        return self._now_ns

    def monotonic(self) -> float:
        """Return the seconds that have passed."""
        return self._monotonic

    def pass_(self, seconds: float) -> None:
        """Let time go by."""
        self._monotonic += seconds
        self._now_ns += round(seconds * 1e9)

    def jump(self, seconds: float) -> None:
        """Set the calendar forward or back, as an administrator or NTP does."""
        self._now_ns += round(seconds * 1e9)
