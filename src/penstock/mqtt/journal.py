"""The seam to what is kept: the broker tells a journal each change.

Order: decide → write → answer (DESIGN: what a broker keeps).  A change is told before the answer that promises it.  A
journal that writes is a step of the gate (``gate``), which holds answers back until it has; the one here keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.kernel.mqtt import Run

if TYPE_CHECKING:
    from penstock.mqtt.exchange import Flight
    from penstock.mqtt.routes import Subscription
    from penstock.mqtt.session import Session, Waiting

__all__ = ["ENDED", "HANDED_ON", "Journal", "MemoryJournal", "Stored"]

ENDED: Final = "session ended"
HANDED_ON: Final = "handed on"
"""A session ended, and another member of its group is to get the message."""


class Stored:
    """Where a journal has a run: once, however many sessions wait for it.

    It may be let go of at any time: a segment of the journal goes when nothing refers to it any more.
    """

    __slots__ = ("count", "data_at", "deadline", "head_at", "id", "run", "segment", "size")

    def __init__(self, id: int, count: int, size: int, deadline: float) -> None:
        self.id, self.count, self.size = id, count, size
        self.deadline = deadline
        """When it expires, by the monotonic clock."""
        self.run: Run | None = None
        """The messages themselves, until they are written."""
        self.segment: Any = None
        self.head_at = self.data_at = 0


class Journal(Protocol):
    """Changes of one turn, in order.  Every method returns at once; only persistent sessions are told about."""

    keeps: bool
    """Whether there is any use in telling changes."""

    @property
    def trouble(self) -> str:
        """Why it cannot write at the moment: then nothing is taken that would have to be kept."""

    @property
    def full(self) -> str:
        """Why no messages and no new sessions are taken: it cannot write, or only what makes room again."""

    def can_retain(self, run: Run) -> bool:
        """Whether there is room for such a message at all."""

    @property
    def at_once(self) -> int:
        """Bytes of messages that one turn can always take, whatever room the disk has."""

    def room_for(self, size: int) -> int:
        """Return how many bytes of messages this turn can take of so many."""

    @property
    def crowded(self) -> bool:
        """Whether this turn has as many to write already."""

    def store(self, run: Run, *, anew: bool = False) -> Stored:
        """Keep messages, before it is told who waits for them; ``anew``: once more, behind all that is kept."""

    def load(self, stored: Stored) -> Run | None:
        """Return messages that were kept; None when they turn out to be damaged, which is said in the log."""

    def retained(self, topic: bytes, run: Run | None) -> None:
        """Keep the retained message of a topic, or forget it with None."""

    def session(self, session: Session) -> None:
        """Keep a session that began or changed: expiry, will, whether it is connected."""

    def ended(self, session: Session, filters: Iterable[str]) -> None:
        """Forget a session with everything that belongs to it; these were its subscriptions."""

    def took(self, session: Session, first: int, count: int) -> None:
        """Keep ids of QoS 2 messages that a client published, until it releases them."""

    def freed(self, session: Session, first: int, count: int) -> None:
        """Forget such ids."""

    def subscribed(self, subscription: Subscription) -> None:
        """Keep a subscription that came or changed its options."""

    def unsubscribed(self, session: Session, filter: str) -> None:
        """Forget a subscription."""

    def queued(self, session: Session, waiting: Waiting) -> None:
        """Keep messages that wait for a session."""

    def sent(self, session: Session, flight: Flight, queued: bool) -> None:
        """Keep which packet ids messages got: they are under way, and if they were ``queued`` they wait no more."""

    def consumed(self, session: Session, stored: Stored, upto: int) -> None:
        """Forget what waits, up to and without this message of a run: it was dropped."""

    def released(self, session: Session, first: int, count: int) -> None:
        """Keep that PUBREC came for these ids."""

    def done(self, session: Session, first: int, count: int, lost: str = "") -> None:
        """Forget these ids: their exchange is over; ``lost`` says why the client did not get the messages."""

    def lost(self, session: Session, count: int, reason: str, *, fresh: bool = False) -> None:
        """Count messages that a session does not get; ``fresh`` ones were never told of before."""


class MemoryJournal:
    """Keeps nothing: a broker that lives in memory.

    >>> MemoryJournal().keeps
    False
    """

    keeps = False
    trouble = full = ""

    def can_retain(self, run: Run) -> bool:  # noqa: ARG002
        """Return True: memory takes what a packet can hold."""
        return True

    at_once: int = 1 << 62
    crowded = False

    def room_for(self, size: int) -> int:  # noqa: ARG002
        """Return more than there can be."""
        return self.at_once

    def store(self, run: Run, *, anew: bool = False) -> Stored:
        """Refuse: nothing is kept."""
        raise NotImplementedError

    def load(self, stored: Stored) -> Run | None:
        """Refuse: nothing is kept."""
        raise NotImplementedError

    def retained(self, topic: bytes, run: Run | None) -> None:
        """Keep nothing."""

    def session(self, session: Session) -> None:
        """Keep nothing."""

    def ended(self, session: Session, filters: Iterable[str]) -> None:
        """Keep nothing."""

    def took(self, session: Session, first: int, count: int) -> None:
        """Keep nothing."""

    def freed(self, session: Session, first: int, count: int) -> None:
        """Keep nothing."""

    def subscribed(self, subscription: Subscription) -> None:
        """Keep nothing."""

    def unsubscribed(self, session: Session, filter: str) -> None:
        """Keep nothing."""

    def queued(self, session: Session, waiting: Waiting) -> None:
        """Keep nothing."""

    def sent(self, session: Session, flight: Flight, queued: bool) -> None:
        """Keep nothing."""

    def consumed(self, session: Session, stored: Stored, upto: int) -> None:
        """Keep nothing."""

    def released(self, session: Session, first: int, count: int) -> None:
        """Keep nothing."""

    def done(self, session: Session, first: int, count: int, lost: str = "") -> None:
        """Keep nothing."""

    def lost(self, session: Session, count: int, reason: str, *, fresh: bool = False) -> None:
        """Keep nothing."""
