"""The twin of xchannel.pyx: the walk over records, without the writing."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of
from penstock.types import Record

RECORD = struct.Struct("<BBHIQ")  # committed, header type, message type, length, timestamp
WORDS = struct.Struct("<QQ")

LIMIT, TAIL, END, ROLLED, TRUNCATED, BAD_COMMIT, BAD_KIND, PAST_REGION, NO_SLOT, SHORT_SKIP, STRAY_CHANNEL = range(11)
CHANNEL, USER, SKIP, ROLL = range(4)
OFFSET_MASK = (1 << 40) - 1


class Cursor:
    """A place in a window and the walk from there; see xchannel.pyx."""

    def __init__(self) -> None:
        self.window: Any = None
        self._view: memoryview | None = None
        self.at = self.stop = self.window_position = self._rests_until = 0
        self.status = LIMIT

    def attach(self, window: Any, at: int, stop: int, region: int, window_position: int) -> None:
        """Stand at ``at`` of ``window``, whose bytes up to ``stop`` the file has."""
        if region <= 0 or region % 8 or at < 0 or at % 8 or stop > len(window):
            raise ValueError(f"cannot walk {at}..{stop} of {len(window)} in regions of {region}")
        self.window, self._view, self.at, self.stop = window, view_of(window), at, stop
        self._region, self._region_end = region, (at // region + 1) * region
        self.window_position, self.status = window_position, LIMIT
        self._rests_until = 0

    def detach(self) -> None:
        """Let go of the window; from here on there is nothing to read."""
        self.window = self._view = None
        self.at = self.stop = 0
        self.status = LIMIT

    def extend(self, stop: int) -> None:
        """Allow the walk up to ``stop``: the file has grown."""
        if self._view is None or stop < self.stop or stop > len(self._view):
            raise ValueError(f"cannot extend {self.stop} to {stop}")
        self.stop = stop

    @property
    def position(self) -> int:
        """The position of the slot it stands on."""
        return self.window_position + self.at

    def _look(self) -> tuple[int, int, int, int]:
        """Return (found, message type, length, timestamp) of the slot; found as in xchannel.pyx."""
        assert self._view is not None
        at, left = self.at, self._region_end - self.at
        if at >= self.stop:
            return END, 0, 0, 0
        if left < RECORD.size:
            return NO_SLOT, 0, 0, 0
        if at + RECORD.size > self.stop:
            return TRUNCATED, 0, 0, 0
        committed, kind, message_type, length, timestamp = RECORD.unpack_from(self._view, at)
        if committed == 0:
            return TAIL, 0, 0, 0
        if committed != 1:
            return BAD_COMMIT, 0, 0, 0
        if kind > ROLL:
            return BAD_KIND, 0, 0, 0
        if RECORD.size + length > left:
            return PAST_REGION, 0, 0, 0
        if kind == ROLL:
            return ROLLED, 0, 0, 0
        if kind == SKIP and RECORD.size + length != left:
            return SHORT_SKIP, 0, 0, 0
        if kind == CHANNEL and (self.window_position + at) & OFFSET_MASK:  # not the file's own
            return STRAY_CHANNEL, 0, 0, 0
        if at + RECORD.size + length > self.stop:
            return TRUNCATED, 0, 0, 0
        return -1 - kind, message_type, length, timestamp

    def _step(self) -> tuple[int, int, int, int, int] | None:
        """Take one record: (kind, message type, length, timestamp, slot); None with status set."""
        found, message_type, length, timestamp = self._look()
        if found >= 0:
            self.status = found
            return None
        slot, self.at = self.at, self.at + (RECORD.size + length + 7) // 8 * 8
        if self.at >= self._region_end:
            self._region_end += self._region
        return -1 - found, message_type, length, timestamp, slot

    def ready(self) -> bool:
        """Step over service records; whether a user record is next, else the reason in status."""
        found = LIMIT
        while self._view is not None and (found := self._look()[0]) < 0:
            if found == -1 - USER:
                return True
            self._step()
        self.status = found
        return False

    def rest(self, nanoseconds: int) -> None:
        """Find nothing more to do at the tail for that long, or until it is attached elsewhere."""
        self._rests_until = time.monotonic_ns() + nanoseconds

    def resting(self) -> bool:
        """Whether it stopped at the tail and there is nothing to do but wait."""
        return self.status == TAIL and time.monotonic_ns() < self._rests_until

    def next(self) -> Record | None:
        """Return the next user record, or None with the reason in status."""
        if self._view is None:
            self.status = LIMIT
            return None
        while (step := self._step()) is not None:
            kind, message_type, length, timestamp, slot = step
            if kind == USER:
                payload = self._view[slot + RECORD.size : slot + RECORD.size + length]
                return Record(self.window_position + slot, timestamp, message_type, payload)
        return None

    def scan(
        self,
        limit: int,
        span: int,
        positions: NDArray[np.int64],
        timestamps: NDArray[np.uint64],
        kinds: NDArray[np.uint16],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> int:
        """Fill the arrays with up to ``limit`` records within ``span`` bytes; return how many."""
        first, count, self.status = self.at, 0, LIMIT
        while count < limit and self.at - first < span and (step := self._step()) is not None:
            kind, message_type, length, timestamp, slot = step
            if kind == USER:
                positions[count] = self.window_position + slot
                timestamps[count], kinds[count] = timestamp, message_type
                offsets[count], lengths[count] = slot + RECORD.size, length
                count += 1
        return count

    def walk(self, until: int = -1) -> tuple[int, int]:
        """Go on to ``until`` or the first slot that is not a record; return (user, service) records."""
        users = services = 0
        self.status = LIMIT
        while (until < 0 or self.at < until) and (step := self._step()) is not None:
            users, services = users + (step[0] == USER), services + (step[0] != USER)
        return users, services

    def spin(self, nanoseconds: int) -> bool:
        """Sealed files do not change."""
        return nanoseconds < 0

    def doze(self, nanoseconds: int, first: int, last: int) -> bool:
        """Sealed files do not change."""
        return nanoseconds < 0 or first > last


class Taker:
    """Takes one record after another; see xchannel.pyx."""

    def __init__(self, cursor: Cursor, move_on: Callable[[], bool]) -> None:
        self._cursor, self._move_on = cursor, move_on

    def take(self) -> Record | None:
        """Return the next record, or None when there is none yet."""
        while True:
            record = self._cursor.next()
            if record is not None or self._cursor.resting() or not self._move_on():
                return record


def load_counts(head: Any) -> tuple[int, int]:
    """Return (write_position, message_count)."""
    write_position, message_count = WORDS.unpack_from(view_of(head), RECORD.size)
    return write_position, message_count
