"""The clock seam: deciding code asks a Clock for the time, so that a test can turn it instead of sleeping.

``testing.FakeClock`` has the same face.  A core that needs the time only now and then takes it as an argument instead.

What has an age that must survive a restart keeps a ``Moment`` and asks ``elapsed_ns``: neither a clock that is set nor
a process that ends can make it older or younger than it is.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

import msgspec

__all__ = ["Clock", "SystemClock", "SYSTEM_CLOCK", "shown_ns", "Moment", "elapsed_ns", "boot_number"]


class Clock(Protocol):
    """Two readings: what a calendar says, which may jump, and how much time went by, which never goes back."""

    def now_ns(self) -> int:
        """Return nanoseconds since 1970: for what is stored and shown."""

    def monotonic(self) -> float:
        """Return seconds from an unknown start: for deadlines and ages within this process."""


class SystemClock:
    """The clock of this machine.

    >>> SystemClock().now_ns() > 0
    True
    """

    def now_ns(self) -> int:
        """Return nanoseconds since 1970."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()


SYSTEM_CLOCK: Final = SystemClock()


def shown_ns(clock: Clock) -> int:
    """Return what a calendar says, within what 63 bits hold (1970 to 2262): for what is shown, whatever it is set to.

    >>> shown_ns(SYSTEM_CLOCK) > 0
    True
    """
    return min(max(0, clock.now_ns()), (1 << 63) - 1)


class Moment(msgspec.Struct, frozen=True):
    """One reading of all clocks, to be kept with what has an age.

    >>> Moment.read(SYSTEM_CLOCK, boot_number(bytes(16))).boot
    0
    """

    boot: int
    """Which start of the machine this was (``boot_number(disk.boot_id())``); 0 where nobody knows."""
    monotonic_ns: int
    """What the clock said that never goes back and is the same for all processes of one boot."""
    wall_ns: int
    """What the calendar said."""

    @classmethod
    def read(cls, clock: Clock, boot: int) -> Moment:
        """Return this moment."""
        return cls(boot, round(clock.monotonic() * 1e9), clock.now_ns())


def elapsed_ns(before: Moment, now: Moment) -> int:
    """Return how much time went by between two moments, never less than none.

    Within one boot of the machine the monotonic clock tells, whatever the calendar was set to.  Over a restart of the
    machine the calendar is all there is; set back meanwhile, no time went by.

    >>> elapsed_ns(Moment(7, 1_000, 5_000_000), Moment(7, 1_600, 0))  # the calendar was set back
    600
    >>> elapsed_ns(Moment(7, 1_000, 5_000_000), Moment(8, 20, 5_000_900))  # the machine was restarted
    900
    >>> elapsed_ns(Moment(7, 1_000, 5_000_000), Moment(8, 20, 0))
    0
    """
    if now.boot == before.boot and now.boot != 0:
        return max(0, now.monotonic_ns - before.monotonic_ns)
    return max(0, now.wall_ns - before.wall_ns)


def boot_number(boot_id: bytes) -> int:
    """Return the id of a boot (``disk.boot_id()``) as a number that every JSON reader keeps exactly.

    >>> boot_number(bytes(range(1, 17))) < 1 << 56
    True
    """
    return int.from_bytes(boot_id[:7], "little")
