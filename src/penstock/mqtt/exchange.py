"""The sender's side of QoS 1 and 2: packet ids, what is unacknowledged, and in which phase.

Messages that are sent together are one flight with ids that count up; an acknowledgement of all of them is one step.
One of a part splits the flight, so a flight is always in one phase:

    QoS 1   sent ── PUBACK ──► done
    QoS 2   sent ── PUBREC ──► released ── PUBCOMP ──► done

Each flight has a sequence number; the id of number n is n % 65535 + 1, so flights are sorted and found by bisection.
An id that is still in use is stepped over.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from penstock.kernel.mqtt import Run

if TYPE_CHECKING:
    from penstock.mqtt.journal import Stored

__all__ = ["Exchange", "Flight", "Answer"]

IDS: Final = 65535
_number = attrgetter("number")


class Flight:
    """Messages under way: ``count`` ids from ``first``.  Once they are released there is neither run nor stored.

    ``stored`` is where a journal has them, those from the ``start``-th on; then ``run`` need not be in memory.
    """

    __slots__ = ("count", "first", "identifiers", "number", "qos", "retain", "run", "size", "start", "stored")

    def __init__(
        self,
        number: int,
        run: Run | None,
        count: int,
        qos: int,
        retain: bool,
        identifiers: bytes,
        stored: Stored | None = None,
        start: int = 0,
        size: int = 0,
    ) -> None:
        self.number, self.first, self.count = number, number % IDS + 1, count
        self.run, self.qos, self.retain, self.identifiers = run, qos, retain, identifiers
        self.stored, self.start = stored, start
        self.size = size if run is None else run.end - run.start
        """Bytes that are kept for it."""

    @property
    def released(self) -> bool:
        """Whether PUBREC came, so that PUBREL is what is repeated."""
        return self.run is None and self.stored is None

    def release(self) -> None:
        """Let go of the messages: PUBREC came."""
        self.run = self.stored = None
        self.size = 0

    def run_from(self, run: Run) -> Run:
        """Return its messages out of the whole run that was stored."""
        if self.start:
            run = run.split(self.start)[1]
        return run.split(self.count)[0] if self.count < run.count else run

    def split(self, count: int) -> tuple[Flight, Flight]:
        """Return the first ``count`` messages and the rest."""
        head, tail = (None, None) if self.run is None else self.run.split(count)
        part = self.size * count // self.count
        form = (self.qos, self.retain, self.identifiers, self.stored)
        return (
            Flight(self.number, head, count, *form, self.start, part),
            Flight(self.number + count, tail, self.count - count, *form, self.start + count, self.size - part),
        )


class Answer(enum.Enum):
    """What an acknowledgement means."""

    DONE = "done"
    RELEASE = "release"
    UNKNOWN = "unknown"
    WRONG = "wrong"


class Exchange:
    """What one session has sent and not seen acknowledged, oldest first."""

    __slots__ = ("_next", "flights", "messages", "size")

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        self.messages = self.size = 0
        self._next = 0

    @property
    def next_number(self) -> int:
        """The number of the next message; its packet id follows from it."""
        return self._next

    def restore(self, flights: list[Flight], next_number: int) -> None:
        """Go on with what was kept."""
        self.flights = flights
        self.messages = sum(flight.count for flight in flights)
        self.size = sum(flight.size for flight in flights)
        self._next = next_number

    def begin(
        self, run: Run, qos: int, retain: bool, identifiers: bytes, stored: Stored | None = None, start: int = 0
    ) -> tuple[Flight, Run | None]:
        """Give ids to as many messages of the run as can have them in a row; return the flight and the rest."""
        number = self._next
        count = min(run.count, IDS - number % IDS)
        if self.flights:
            free = self.flights[0].number + IDS - number
            if free < count:
                if free <= 0:
                    while self._find(number % IDS + 1) >= 0:
                        number += 1
                    free = 1
                count = min(free, count)
        rest: Run | None = None
        if count < run.count:
            run, rest = run.split(count)
        flight = Flight(number, run, count, qos, retain, identifiers, stored, start)
        self._next = number + count
        self.flights.append(flight)
        self.messages += count
        self.size += run.end - run.start
        return flight, rest

    def next_from(self, number: int, most: int) -> Flight | None:
        """Return the first flight from a number on; one of more messages than ``most`` is cut there."""
        index = bisect_left(self.flights, number, key=_number)
        if index == len(self.flights):
            return None
        flight = self.flights[index]
        if flight.count > most:
            flight, rest = flight.split(most)
            self.flights[index : index + 1] = [flight, rest]
        return flight

    def count_before(self, number: int) -> int:
        """Return how many messages are under way before a number."""
        return sum(flight.count for flight in self.flights[: bisect_left(self.flights, number, key=_number)])

    def acked(self, first: int, count: int) -> Iterator[tuple[Answer, int, int]]:
        """PUBACK of ``count`` ids from first: yield (answer, first, count) for each part of them."""
        flights = self.flights
        if flights:
            head = flights[0]
            if head.first == first and head.count == count and head.qos == 1:  # the way it nearly always is
                del flights[0]
                self.messages -= count
                self.size -= head.size
                yield Answer.DONE, first, count
                return
        yield from self._each(first, count, 1, False, Answer.DONE)

    def received(self, first: int, count: int) -> Iterator[tuple[Answer, int, int]]:
        """PUBREC: what was sent is released, and PUBREL is the answer."""
        yield from self._each(first, count, 2, False, Answer.RELEASE)

    def completed(self, first: int, count: int) -> Iterator[tuple[Answer, int, int]]:
        """PUBCOMP: the end of QoS 2."""
        yield from self._each(first, count, 2, True, Answer.DONE)

    def refused(self, first: int) -> Answer:
        """PUBACK or PUBREC with a reason of failure: the exchange of this id is over (MQTT-4.4.0-2)."""
        index = self._find(first)
        if index < 0 or self.flights[index].released:
            return Answer.UNKNOWN
        index = self._isolate(index, first, 1)
        self.size -= self.flights[index].size
        del self.flights[index]
        self.messages -= 1
        return Answer.DONE

    def replay(self, first: int, count: int, *, done: bool) -> None:
        """Take what a journal says of ids: their exchange is over, or PUBREC came; ids that are not known are not."""
        while count:
            index = self._find(first)
            if index < 0:
                first, count = first + 1, count - 1
                continue
            flight = self.flights[index]
            part = min(count, flight.first + flight.count - first)
            index = self._isolate(index, first, part)
            self.size -= self.flights[index].size
            if done:
                del self.flights[index]
                self.messages -= part
            else:
                self.flights[index].release()
            first, count = first + part, count - part

    def put(self, flight: Flight) -> None:
        """Go on with messages that were sent: the newest so far."""
        self.flights.append(flight)
        self.messages += flight.count
        self.size += flight.size
        self._next = flight.number + flight.count

    def _each(
        self, first: int, count: int, qos: int, released: bool, done: Answer
    ) -> Iterator[tuple[Answer, int, int]]:
        while count:
            index = self._find(first)
            if index < 0:
                yield Answer.UNKNOWN, first, 1
                first, count = first + 1, count - 1
                continue
            flight = self.flights[index]
            part = min(count, flight.first + flight.count - first)
            if flight.qos != qos or (flight.released != released and not (qos == 2 and flight.released)):
                yield Answer.WRONG, first, part
            else:
                index = self._isolate(index, first, part)
                self.size -= self.flights[index].size
                if done is Answer.DONE:
                    del self.flights[index]
                    self.messages -= part
                else:
                    self.flights[index].release()
                yield done, first, part
            first, count = first + part, count - part

    def _find(self, packet_id: int) -> int:
        """Return the index of the flight that holds this id, or -1."""
        flights = self.flights
        if not flights:
            return -1
        head = flights[0]
        if head.first <= packet_id < head.first + head.count:
            return 0
        number = self._next - 1 - (self._next - packet_id) % IDS
        while number >= head.number:
            index = bisect_right(flights, number, key=_number) - 1
            flight = flights[index]
            if number < flight.number + flight.count:
                return index
            number -= IDS
        return -1

    def _isolate(self, index: int, first: int, count: int) -> int:
        """Cut the flight so that one of them has exactly these ids; return its index."""
        flight = self.flights[index]
        before, behind = first - flight.first, flight.first + flight.count - first - count
        if behind:
            flight, rest = flight.split(flight.count - behind)
            self.flights[index : index + 1] = [flight, rest]
        if before:
            rest, flight = flight.split(before)
            self.flights[index : index + 1] = [rest, flight]
            return index + 1
        return index
