"""Deadlines of many connections on one timer.

A deadline counts from the last read, and a read must not pay for it.  So a connection only notes when it read; it sits
in the slot of the earliest moment at which it may be late, and when that slot comes up it is looked at: late, or moved
to the slot of its new moment.  That is one look a deadline, however much is read.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

__all__ = ["Slots"]

T = TypeVar("T", bound=Hashable)

SLOT_SECONDS: Final = 0.125
"""How late a deadline may be noticed, and how many connections share a wake-up."""


class Slots(Generic[T]):
    """Items by the slot of time in which they are due.  Every item is in one slot at most; times are given.

    >>> slots = Slots()
    >>> slots.put("a", 10.0); slots.put("b", 11.0); slots.put("a", 12.0)
    >>> slots.next, slots.take(10.9), slots.take(11.2), slots.take(20.0)
    (11.0, set(), {'b'}, {'a'})
    """

    __slots__ = ("_heap", "_of_item", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, set[T]] = {}
        self._heap: list[int] = []
        self._of_item: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._of_item)

    def put(self, item: T, due: float) -> None:
        """Put an item into the slot that begins at ``due`` or right after it, out of the one it was in."""
        number = math.ceil(due / SLOT_SECONDS)
        before = self._of_item.get(item)
        if before == number:
            return
        if before is not None:
            self._slots[before].discard(item)
        self._of_item[item] = number
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = set()
            heapq.heappush(self._heap, number)
        slot.add(item)

    def due(self, item: T) -> float | None:
        """Return when the slot of an item comes up."""
        number = self._of_item.get(item)
        return None if number is None else number * SLOT_SECONDS

    def discard(self, item: T) -> None:
        """Take an item out of its slot, if it is in one."""
        number = self._of_item.pop(item, None)
        if number is not None:
            self._slots[number].discard(item)

    def take(self, now: float) -> set[T]:
        """Return the items of all slots that have come up; they are in no slot afterwards."""
        found: set[T] = set()
        while self._heap and self._heap[0] * SLOT_SECONDS <= now:
            found |= self._slots.pop(heapq.heappop(self._heap))
        for item in found:
            del self._of_item[item]
        return found

    @property
    def next(self) -> float | None:
        """When the next slot with an item in it comes up."""
        while self._heap and not self._slots[self._heap[0]]:
            del self._slots[heapq.heappop(self._heap)]
        return self._heap[0] * SLOT_SECONDS if self._heap else None
