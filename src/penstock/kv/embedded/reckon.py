"""The clocks of a bucket: what is stored comes from the calendar, what is due from the clock that never jumps."""

from __future__ import annotations

from typing import Any, Final

from penstock.clock import Clock, Moment, boot_number
from penstock.errors import OptionsError
from penstock.kv.embedded.format import Expiry, Lease

__all__ = ["Reckoner"]

LAST_NS: Final = (1 << 63) - 1


class Reckoner:
    """The clocks as one bucket reads them.

    >>> from penstock.disk import MemoryDisk
    >>> from penstock.testing.clock import FakeClock
    >>> clock = FakeClock()
    >>> reckoner = Reckoner(clock, MemoryDisk())
    >>> lease = reckoner.lease(10 * 10**9)
    >>> clock.pass_(4.0); clock.jump(-3600.0)
    >>> (reckoner.expiry(7, lease).deadline_ns - reckoner.monotonic_ns()) / 1e9
    6.0
    """

    def __init__(self, clock: Clock, disk: Any) -> None:
        self._clock = clock
        boot_id = getattr(disk, "boot_id", None)  # a disk for reading only has none
        self.boot = boot_number(boot_id()) if boot_id is not None else 0
        """Which start of the machine this is; monotonic times of another one say nothing.  0 is unknown."""

    def now_ns(self) -> int:
        """Return the calendar's time for a record; OptionsError where no record can have it."""
        now = self._clock.now_ns()
        if not 0 <= now <= LAST_NS:
            raise OptionsError(
                f"the clock of this machine says {now} ns since 1970: buckets keep times from 1970 to 2262"
            )
        return now

    def monotonic_ns(self) -> int:
        """Return the time that never goes back, the same for all processes of one boot."""
        return round(self._clock.monotonic() * 1e9)

    def moment(self) -> Moment:
        """Return all readings together."""
        return Moment.read(self._clock, self.boot)

    def lease(self, ttl_ns: int) -> Lease:
        """Return what the record of a key that lives so long says about time."""
        now = self.now_ns()
        if now + ttl_ns > LAST_NS:
            raise OptionsError(f"a time to live of {ttl_ns / 1e9:g} s ends after 2262")
        return Lease(now, now + ttl_ns, self.boot, self.monotonic_ns())

    def expiry(self, revision: int, lease: Lease) -> Expiry:
        """Return when a key expires for this process.

        In the boot it was written in, so long after it was written.  After a restart of the machine when the calendar
        says so, but never later than its whole time to live from now.
        """
        ttl_ns = max(0, lease.expires_ns - lease.written_ns)
        monotonic_ns = self.monotonic_ns()
        if lease.boot and lease.boot == self.boot:
            deadline = min(lease.monotonic_ns, monotonic_ns) + ttl_ns
        else:
            deadline = monotonic_ns + min(max(0, lease.expires_ns - self._clock.now_ns()), ttl_ns)
        return Expiry(revision, lease.expires_ns, ttl_ns, deadline, self.boot)

    def reloaded(self, saved: Expiry) -> Expiry:
        """Return an expiry that expiry.json had, for this process."""
        ttl_ns = saved.ttl_ns or max(0, saved.expires_ns - self._clock.now_ns())  # the first release kept no ttl_ns
        written = Lease(saved.expires_ns - ttl_ns, saved.expires_ns, saved.boot, saved.deadline_ns - ttl_ns)
        return self.expiry(saved.revision, written)
