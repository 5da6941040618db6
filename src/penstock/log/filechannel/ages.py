"""How old sealed segments are, by a clock that only goes forward.

The wall clock can be set, an hour back or two ahead; neither may drop a segment or keep it for ever.  So a channel with
``keep_seconds`` has a time of its own, which runs while the machine does and goes on where it was after a restart:

    penstock-ages    JSON: boot and monotonic (what the machine's own clock said, and since which start of it), own
                     (what the channel's clock said then), marks: [segment, own] growing, "made at this time or
                     later"; made and ahead: the boot in which the file was made, and how far the wall clock was ahead

While the machine was off the clock stands still: a segment is never older than the time it was there to be read.  The
time at which a file was last written counts only if it is older by it, and only until the wall clock is seen to have
been set since the file here was made, or the machine has been restarted.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.disk import Disk, save_atomically

__all__ = ["Ages"]

logger = logging.getLogger(__name__)

MOST_MARKS: Final = 1024
LARGEST_FILE: Final = 1 << 20
SET_SECONDS: Final = 2.0
"""A wall clock that is off by less was not set: clocks drift."""


class AgesFile(msgspec.Struct):
    """What the file holds."""

    boot: str
    own: float
    monotonic: float
    marks: list[tuple[int, float]]
    made: str = ""
    ahead: float = 0.0


class Ages:
    """The ages of the segments of one channel.  Used under the mutex of retention.

    >>> from penstock.disk import MemoryDisk
    >>> from penstock.testing.clock import FakeClock
    >>> clock = FakeClock()
    >>> ages = Ages(MemoryDisk(), "penstock-ages", clock)
    >>> ages.note(1); clock.pass_(60); ages.age(0)
    60.0
    """

    def __init__(self, disk: Disk, path: str, clock: Clock) -> None:
        self._disk, self._path, self._clock = disk, path, clock
        self._boot = disk.boot_id().hex()
        found = self._load()
        now = clock.monotonic()
        if found is None:
            self._marks: list[tuple[int, float]] = []
            self._base = -now
            self._made, self._ahead = self._boot, self._wall_ahead()
            self._save(0.0)
        else:
            self._marks = found.marks
            ran = now - found.monotonic if found.boot == self._boot else 0.0
            self._base = found.own + max(ran, 0.0) - now
            self._made, self._ahead = found.made, found.ahead
        self._opened = self._now()

    def note(self, index: int) -> None:
        """Note that segment ``index`` was begun now, so that all before it are sealed."""
        now = self._now()
        self.look()
        if self._marks and index <= self._marks[-1][0]:
            return
        self._marks.append((index, now))
        if len(self._marks) > MOST_MARKS:  # every second one goes: some segments then count as younger than they are
            self._marks = self._marks[1::2] if len(self._marks) % 2 == 0 else self._marks[::2]
        self._save(now)

    def age(self, index: int, written_ns: int | None = None) -> float:
        """Return for how many seconds a sealed segment was sealed, at least; ``written_ns`` is what its file says."""
        place = bisect_right(self._marks, (index, float("inf")))
        when = self._marks[place][1] if place < len(self._marks) else self._opened
        age = max(0.0, self._now() - when)
        if written_ns is not None and self.look():
            age = max(age, (self._clock.now_ns() - written_ns) / 1e9)
        return age

    def look(self) -> bool:
        """Whether the times of files tell ages: no more once the clock was set, for what was written meanwhile."""
        if self._made == self._boot and abs(self._wall_ahead() - self._ahead) >= SET_SECONDS:
            self._made = ""
            self._save(self._now())
        return self._made == self._boot

    def forget_before(self, index: int) -> None:
        """Forget the marks that no segment from ``index`` on needs."""
        place = bisect_right(self._marks, (index, float("inf")))
        if place > 1:
            del self._marks[: place - 1]

    def _now(self) -> float:
        return self._base + self._clock.monotonic()

    def _wall_ahead(self) -> float:
        return self._clock.now_ns() / 1e9 - self._clock.monotonic()

    def _load(self) -> AgesFile | None:
        try:
            with self._disk.open(self._path) as file:
                data = file.read_at(0, LARGEST_FILE)
        except FileNotFoundError:
            return None
        try:
            found = msgspec.json.decode(data, type=AgesFile)
            if found.own < 0 or any(not 0 <= when <= found.own for _, when in found.marks):
                raise msgspec.ValidationError("a time lies ahead")
            if found.marks != sorted(found.marks):
                raise msgspec.ValidationError("the marks do not grow")
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            logger.warning("%s at byte 0: %s; what is there counts as new", self._path, exc)
            return None
        return found

    def _save(self, now: float) -> None:
        about = AgesFile(self._boot, now, self._clock.monotonic(), self._marks, self._made, self._ahead)
        try:
            save_atomically(self._disk, self._path, msgspec.json.encode(about) + b"\n")
        except OSError as exc:  # segments then count as younger than they are
            logger.warning("%s: %s", self._path, exc)
