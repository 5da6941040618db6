"""The broker's own time: it goes on where it was after a restart, and nobody can set it.

Lives of sessions, messages and wills are kept as moments of this clock.  While the broker runs it goes with the
monotonic clock.  After a restart within one boot of the machine the monotonic clock tells how long the broker was away;
across boots it stands still, as the ages of a channel do: a calendar that jumps expires nothing and keeps nothing.
"""

from __future__ import annotations

from penstock.clock import Clock

__all__ = ["OwnTime"]


class OwnTime:
    """Own nanoseconds, and seconds of the monotonic clock, each from the other.

    >>> from penstock.testing.clock import FakeClock
    >>> clock = FakeClock(); clock.pass_(100)
    >>> own = OwnTime(clock, at_ns=5_000_000_000)
    >>> clock.pass_(2); own.now_ns()
    7000000000
    >>> own.of_monotonic(own.to_monotonic(9_000_000_000))
    9000000000
    """

    def __init__(self, clock: Clock, at_ns: int = 0) -> None:
        self._clock = clock
        self._offset = at_ns - round(clock.monotonic() * 1e9)

    @classmethod
    def resumed(
        cls, clock: Clock, last_ns: int, boot: bytes, own_ns: int, monotonic_ns: int, this_boot: bytes
    ) -> OwnTime:
        """Go on after ``last_ns``; in the boot of a segment's header, by what the monotonic clock said there."""
        now_ns = round(clock.monotonic() * 1e9)
        if boot == this_boot and now_ns >= monotonic_ns:
            return cls(clock, max(last_ns, own_ns + now_ns - monotonic_ns))
        return cls(clock, last_ns)

    def now_ns(self) -> int:
        """Return the own time."""
        return round(self._clock.monotonic() * 1e9) + self._offset

    def monotonic_ns(self) -> int:
        """Return what the monotonic clock says."""
        return round(self._clock.monotonic() * 1e9)

    def to_monotonic(self, own_ns: int) -> float:
        """Return a moment as the monotonic clock of this process has it."""
        return (own_ns - self._offset) / 1e9

    def of_monotonic(self, moment: float) -> int:
        """Return a moment of the monotonic clock as own time."""
        return round(moment * 1e9) + self._offset
