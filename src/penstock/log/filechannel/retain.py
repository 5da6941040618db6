"""Which segments may go: those that every receiver has passed, and those beyond the bounds.

A receiver holds everything from its acknowledged position on.  Open receivers hold by being open; named ones hold by
their cursor files, whether they are open, away, or in another process.  Without any of them what holds is the
furthest position anyone has passed: nothing, if there never was a receiver.

What a roll pays does not depend on how many segments there are: the sealed ones are listed once (sealed.py), and of the
named receivers the one that held last is asked first.

The mutex here is the one the compressor renames under: a segment being collected is never brought back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Disk
from penstock.errors import Backpressure, CorruptionError, OptionsError
from penstock.log.filechannel.ages import Ages
from penstock.log.filechannel.format import HEADER_BYTES, segment_path
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.sealed import Sealed
from penstock.log.filechannel.segments import Folder
from penstock.log.sidecar import SHIP, Sidecar
from penstock.metrics import REGISTRY

__all__ = ["Retention", "Holder"]

logger = logging.getLogger(__name__)
DROPPED: Final = REGISTRY.counter("filechannel_dropped_bytes", "bytes removed by a bound before everyone had read them")
AGE_CHECK_SECONDS: Final = 1.0
LOOK_AGAIN_SECONDS: Final = 0.05
NOTHING_SEALED: Final = 1 << 63
MANY_SEGMENTS: Final = 100


class Holder(Protocol):
    """What holds messages back: a receiver."""

    name: str | None

    @property
    def held(self) -> int:
        """Everything from here on must stay."""


class Retention:
    """What may be removed from one channel, and removing it."""

    def __init__(
        self,
        disk: Disk,
        folder: Folder,
        options: ChannelOptions,
        sidecar: Sidecar,
        holders: Callable[[], Iterable[Holder]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._disk, self._folder, self._options, self._sidecar = disk, folder, options, sidecar
        self._holders = holders
        self.mutex = threading.RLock()
        self.newest: Callable[[], int] = lambda: 0
        """The index being written, which is never removed."""
        self.end: Callable[[], int] = lambda: 0
        self._passed = 0
        self.boundary: int | None = None  # where the oldest segment ends: below it nothing can go
        self._sealed = Sealed(disk, folder)
        self._ages = Ages(disk, sidecar.prefix + "ages", clock) if options.keep_seconds else None
        self._slowest_name = ""  # who held the oldest segment when all were asked
        self._aged = self._in_vain = self._asked = 0.0

    # --- Receivers

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``; cheap unless a segment may be done with."""
        self._passed = max(self._passed, position)
        boundary = self.boundary
        if not self._options.collect or (boundary is not None and position < boundary):
            return
        if boundary is not None and any(holder.held < boundary for holder in self._holders()):
            return
        # Only a named receiver that is away, or in another process, can hold it now: ask for it now and then.
        if time.monotonic() - self._in_vain > LOOK_AGAIN_SECONDS and not self.collect() and boundary is not None:
            self._in_vain = time.monotonic()

    def floor(self) -> int:
        """Return the position below which nobody needs anything."""
        with self.mutex:
            return self._lowest(self.holding())

    def _lowest(self, held: dict[str, int]) -> int:
        """Return where the slowest receiver is.  A shipper holds like one, but reads for nobody: it lets nothing go."""
        readers = [position for name, position in held.items() if not name.startswith(SHIP)]
        lowest = min(readers, default=self._passed)
        return min([lowest, *held.values()])

    def holding(self) -> dict[str, int]:
        """Return from where each receiver holds: named ones, open or away, and as #0, #1, … open ones without a name.

        A cursor that cannot be read holds everything.
        """
        try:
            held = self._sidecar.cursors()
        except CorruptionError as exc:
            logger.warning("%s; nothing is collected until it is repaired or removed", exc)
            held = {"": 0}
        unnamed = (holder for holder in self._holders() if holder.name is None)
        return held | {f"#{number}": holder.held for number, holder in enumerate(unnamed)}

    # --- Removing

    def collect(self) -> int:
        """Remove the segments nobody needs; return how many."""
        with self.mutex:
            self._catch_up()
            oldest = self._sealed.oldest()
            if oldest is None:
                self.boundary = NOTHING_SEALED
                return 0
            if self._still_held(oldest.end):
                self.boundary = oldest.end
                return 0
            held, self._asked = self.holding(), time.monotonic()
            floor, removed = self._lowest(held), 0
            self._slowest_name = min(held, key=lambda name: held[name]) if held else ""
            while oldest is not None and oldest.end is not None and oldest.end <= floor:
                self._remove(oldest.index)
                removed += 1
                oldest = self._sealed.oldest()
            self.boundary = NOTHING_SEALED if oldest is None else oldest.end
            return removed

    def rotated(self) -> None:
        """Look again, because a segment was sealed."""
        with self.mutex:
            self.boundary = None
            self._catch_up()
            if self._ages is not None:
                self._ages.note(self.newest())
        if self._options.collect and not (len(self._sealed) > MANY_SEGMENTS and self._looked_just_now()):
            self.collect()

    def _looked_just_now(self) -> bool:
        """Whether everyone was asked in vain a moment ago; asking lists the folder, which many segments make long."""
        return time.monotonic() - self._asked < LOOK_AGAIN_SECONDS

    def packed(self, index: int) -> None:
        """Note that a segment was compressed."""
        with self.mutex:
            self._sealed.look_again(index)

    def admit(self, size: int) -> None:
        """Make room for ``size`` bytes within the bounds, or refuse: Backpressure, nothing is sent."""
        options = self._options
        if options.keep_bytes:
            if size > options.keep_bytes - options.segment_bytes:
                raise OptionsError(f"{self._folder.path}: {size} bytes at once are too many for keep_bytes")
            if self.usage() + size > options.keep_bytes:
                self.collect()
                self._bound(lambda: self.usage() + size > options.keep_bytes, f"keep_bytes={options.keep_bytes}")
        if options.keep_seconds and time.monotonic() - self._aged > min(AGE_CHECK_SECONDS, options.keep_seconds):
            self.collect()
            self._bound(self._too_old, f"keep_seconds={options.keep_seconds}")
            self._aged = time.monotonic()

    def usage(self) -> int:
        """Return the bytes of all segments, those of the newest as far as it was sent."""
        with self.mutex:
            self._catch_up()
            begin = self._folder.begin(self.newest())
            return self._sealed.bytes + HEADER_BYTES + (0 if begin is None else self.end() - begin)

    def measure(self) -> int:
        """Look again how many bytes all segments have."""
        with self.mutex:
            self._sealed.load(self.newest())
            return self.usage()

    def _catch_up(self) -> None:
        """Take note of what was sealed since the last look, by whoever sends."""
        self._sealed.grow(self.newest())

    def _still_held(self, end: int | None) -> bool:
        """Whether the receiver that held the oldest segment last does so still: one look instead of one at each."""
        name = self._slowest_name
        if end is None or not name or name.startswith("#"):
            return False
        try:
            held = self._sidecar.read_cursor(name)
        except (CorruptionError, OptionsError):
            return False
        return held is not None and held < end

    def _bound(self, exceeded: Callable[[], bool], bound: str) -> None:
        with self.mutex:
            floor: int | None = None
            unread: list[int] = []
            try:
                while exceeded():
                    oldest = self._sealed.oldest()
                    if self._options.policy != "drop_oldest" or oldest is None:
                        raise Backpressure(
                            f"{self._folder.path}: {bound} is reached; {self._slowest()}, "
                            f"the channel ends at {self.end()}"
                        )
                    if floor is None:  # asked once: it reads the cursor of every receiver
                        floor = self.floor()
                    if oldest.end is None or oldest.end > floor:
                        unread.append(oldest.index)
                        DROPPED.add((oldest.end or floor) - (self._folder.begin(oldest.index) or 0))
                    self._remove(oldest.index)
            finally:
                if unread:
                    which = f"segment {unread[0]}" if len(unread) == 1 else f"segments {unread[0]} to {unread[-1]}"
                    logger.warning("%s: dropped %s for %s, though a receiver is at %d",
                                   self._folder.path, which, bound, floor)  # fmt: skip

    def _slowest(self) -> str:
        held = self.holding()
        if not held:
            return "there is no receiver"
        name = min(held, key=lambda one: held[one])
        return f"the slowest receiver is {name!r} at {held[name]}"

    def _too_old(self) -> bool:
        oldest = self._sealed.oldest()
        if self._ages is not None:
            self._ages.look()
        if oldest is None or self._ages is None:
            return False
        stats = (self._disk.stat(segment_path(self._folder.path, oldest.index, suffix)) for suffix in ("", ".z"))
        written = next((found.modified_ns for found in stats if found is not None), None)
        return self._ages.age(oldest.index, written) > self._options.keep_seconds

    def _remove(self, index: int) -> None:
        for suffix in ("", ".z"):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(segment_path(self._folder.path, index, suffix))
        self._folder.forget(index)
        self._sealed.drop_oldest()
        if self._ages is not None:
            self._ages.forget_before(index + 1)
