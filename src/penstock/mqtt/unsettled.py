"""Which packet ids of one client wait for tickets: QoS 2 messages that are not acknowledged yet.

A run of messages is one entry, whatever it holds, so what is noted and released costs the runs and not the messages;
an id is found by bisection, however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.mqtt.gate import Ticket

__all__ = ["Unsettled"]


class Unsettled:
    """Ids and the tickets they wait for; an id that is noted again waits for the new ones.

    >>> unsettled = Unsettled()
    >>> unsettled.note(range(7, 10), [])
    >>> unsettled.forget(range(8, 9)); unsettled.ids()
    [range(7, 8), range(9, 10)]
    """

    __slots__ = ("_by_age", "_ends", "_starts", "_tickets")

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted, and no two spans overlap
        self._ends: list[int] = []
        self._tickets: list[list[Ticket]] = []
        self._by_age: deque[tuple[range, list[Ticket]]] = deque()

    def __len__(self) -> int:
        return len(self._starts)

    def ids(self) -> list[range]:
        """Return the spans that wait."""
        return [range(start, end) for start, end in zip(self._starts, self._ends, strict=True)]

    def note(self, ids: range, tickets: list[Ticket]) -> None:
        """Remember what these wait for, as long as they do; what is settled is forgotten, the oldest first."""
        by_age = self._by_age
        while by_age and not (told(by_age[0][1]) and self._waits(*by_age[0])):
            gone, done = by_age.popleft()
            self._take_out(gone, done)
        if len(by_age) > 2 * len(self._starts) + 64:  # of a client that sends ids again and again
            self._by_age = by_age = deque(each for each in by_age if self._waits(*each))
        self.forget(ids)
        at = bisect_left(self._starts, ids.start)
        self._starts.insert(at, ids.start)
        self._ends.insert(at, ids.stop)
        self._tickets.insert(at, tickets)
        by_age.append((ids, tickets))

    def tickets(self, packet_id: int) -> list[Ticket]:
        """Return what the acknowledgement of a message still waits for, and what has refused it."""
        at = bisect_right(self._starts, packet_id) - 1
        return told(self._tickets[at]) if at >= 0 and packet_id < self._ends[at] else []

    def forget(self, ids: range) -> None:
        """Forget these, whatever they wait for."""
        self._take_out(ids, None)

    def forget_refused(self, ids: range, tickets: Sequence[Ticket]) -> list[range]:
        """Forget those that still wait for one of these tickets, and return them."""
        wanted = set(tickets)
        found = [
            range(max(ids.start, self._starts[at]), min(ids.stop, self._ends[at]))
            for at in range(*self._between(ids))
            if wanted.intersection(self._tickets[at])
        ]
        for some in found:
            self.forget(some)
        return found

    def _waits(self, ids: range, tickets: list[Ticket]) -> bool:
        first, last = self._between(ids)
        return any(self._tickets[at] is tickets for at in range(first, last))

    def _between(self, ids: range) -> tuple[int, int]:
        return bisect_right(self._ends, ids.start), bisect_left(self._starts, ids.stop)

    def _take_out(self, ids: range, only: list[Ticket] | None) -> None:
        """Take ids out of all spans, or of those that wait for ``only`` these."""
        first, last = self._between(ids)
        for at in range(last - 1, first - 1, -1):
            tickets = self._tickets[at]
            if only is not None and tickets is not only:
                continue
            start, end = self._starts[at], self._ends[at]
            left = [one for one in (range(start, ids.start), range(ids.stop, end)) if one]
            self._starts[at : at + 1] = [one.start for one in left]
            self._ends[at : at + 1] = [one.stop for one in left]
            self._tickets[at : at + 1] = [tickets] * len(left)


def told(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return those that are open or have refused: done is what has nothing to say any more."""
    return [ticket for ticket in tickets if ticket.open or ticket.reason]
