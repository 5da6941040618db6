"""Reading ahead for a group: messages never change, so what went to another worker is simply passed over."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from penstock.log.filechannel.segments import Folder, Walk
from penstock.types import Problem

__all__ = ["ReadAhead"]

AHEAD_MESSAGES: Final = 4096
AHEAD_BYTES: Final = 128 << 10


class ReadAhead:
    """The messages of a queue from any position on, read many at a time.  One thread at a time."""

    def __init__(self, folder: Folder) -> None:
        self._walk = Walk(folder)
        self._positions: list[int] = []
        self._payloads: list[bytes] = []
        self._end = -1

    def read(self, position: int, limit: int, bound: int | None) -> tuple[list[int], list[bytes], int]:
        """Return positions and payloads from ``position`` on, at most ``limit``, and where reading goes on."""
        start = self._find(position)
        if start is None:
            batch = self._walk.read(position, max(limit, AHEAD_MESSAGES), bound, AHEAD_BYTES)
            if not len(batch):
                self.forget()
                return [], [], position
            self._positions, self._payloads, self._end = (
                batch.positions.tolist(),
                batch.to_payloads(),
                batch.next_position,
            )
            start = 0
        stop = min(start + limit, len(self._positions))
        after = self._end if stop == len(self._positions) else self._positions[stop]
        return self._positions[start:stop], self._payloads[start:stop], after

    def _find(self, position: int) -> int | None:
        """Return which message of those at hand begins at ``position``."""
        at = bisect_left(self._positions, position)
        return at if at < len(self._positions) and self._positions[at] == position else None

    def has(self, position: int, bound: int | None) -> bool:
        """Whether there is a message at ``position`` or behind it."""
        return bool(self.read(position, 1, bound)[0])

    def skip_damage(self, position: int, bound: int | None) -> tuple[int, Problem] | None:
        """Return where reading goes on behind damage, and what it is."""
        return self._walk.skip_damage(position, bound)

    def forget(self) -> None:
        """Forget what was read: the queue was cut, and other messages have those positions."""
        self._positions, self._payloads, self._end = [], [], -1

    def close(self) -> None:
        """Let go of the file."""
        self.forget()
        self._walk.close()
