"""Which segments may go: those that every receiver has passed, and those beyond the bounds.

A receiver holds everything from its acknowledged position on.  Open receivers hold by being open; named ones hold by
their cursor files, whether they are open, away, or in another process.  Without any of them what holds is the
furthest position anyone has passed: nothing, if there never was a receiver.

The mutex here is the one the compressor renames under: a segment being collected is never brought back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final, Protocol

from penstock.disk import Disk
from penstock.errors import Backpressure, CorruptionError, OptionsError
from penstock.log.filechannel.format import segment_path
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.segments import Files, Folder
from penstock.log.sidecar import Sidecar
from penstock.metrics import REGISTRY

__all__ = ["Retention", "Holder"]

logger = logging.getLogger(__name__)
DROPPED: Final = REGISTRY.counter("filechannel_dropped_bytes", "bytes removed by a bound before everyone had read them")
AGE_CHECK_SECONDS: Final = 1.0
LOOK_AGAIN_SECONDS: Final = 0.05
NOTHING_SEALED: Final = 1 << 63


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
    ) -> None:
        self._disk, self._folder, self._options, self._sidecar = disk, folder, options, sidecar
        self._holders = holders
        self.mutex = threading.RLock()
        self.newest: Callable[[], int] = lambda: 0
        """The index being written, which is never removed."""
        self.end: Callable[[], int] = lambda: 0
        self._passed = 0
        self._boundary: int | None = None  # where the oldest segment ends: below it nothing can go
        self._bytes, self._bytes_at = 0, 0
        self._aged = self._in_vain = 0.0

    # --- Receivers

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``; cheap unless a segment may be done with."""
        self._passed = max(self._passed, position)
        boundary = self._boundary
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
            return min(self.holding().values(), default=self._passed)

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
            floor, removed = self.floor(), 0
            for files, end in self._sealed():
                if end is None or end > floor:
                    self._boundary = end
                    break
                self._remove(files)
                removed += 1
            else:
                self._boundary = NOTHING_SEALED
            if self._options.keep_bytes:
                self.measure()
            return removed

    def rotated(self) -> None:
        """Look again, because a segment was sealed."""
        self._boundary = None
        if self._options.collect:
            self.collect()

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
        """Return the bytes of all segments, as of the last look plus what was sent since."""
        return self._bytes + self.end() - self._bytes_at

    def measure(self) -> int:
        """Look how many bytes all segments have."""
        with self.mutex:
            total = 0
            for files in self._folder.files().values():
                for suffix in ("", ".z"):
                    found = self._disk.stat(segment_path(self._folder.path, files.index, suffix))
                    total += 0 if found is None else found.size
            self._bytes, self._bytes_at = total, self.end()
            return total

    def _bound(self, exceeded: Callable[[], bool], bound: str) -> None:
        with self.mutex:
            while exceeded():
                oldest = next(self._sealed(), None)
                if self._options.policy != "drop_oldest" or oldest is None:
                    raise Backpressure(
                        f"{self._folder.path}: {bound} is reached; {self._slowest()}, the channel ends at {self.end()}"
                    )
                files, end = oldest
                floor = self.floor()
                if end is None or end > floor:
                    logger.warning("%s: dropped segment %d for %s, though a receiver is at %d",
                                   self._folder.path, files.index, bound, floor)  # fmt: skip
                    DROPPED.add((end or floor) - (self._folder.begin(files.index) or 0))
                self._remove(files)
                self.measure()

    def _slowest(self) -> str:
        held = self.holding()
        if not held:
            return "there is no receiver"
        name = min(held, key=lambda one: held[one])
        return f"the slowest receiver is {name!r} at {held[name]}"

    def _too_old(self) -> bool:
        for files, _ in self._sealed():
            suffix = "" if files.plain else ".z"
            found = self._disk.stat(segment_path(self._folder.path, files.index, suffix))
            return found is not None and time.time_ns() - found.modified_ns > self._options.keep_seconds * 1e9
        return False

    def _sealed(self) -> Iterator[tuple[Files, int | None]]:
        """Yield the sealed segments, oldest first, each with where it ends."""
        newest = self.newest()
        for files, later in pairwise(self._folder.files().values()):
            if files.index < newest:
                yield files, self._folder.begin(later.index)

    def _remove(self, files: Files) -> None:
        for suffix in ("", ".z"):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(segment_path(self._folder.path, files.index, suffix))
        self._folder.forget(files.index)
