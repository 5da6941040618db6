"""What a client leaves behind when it goes: subscriptions, unacknowledged messages, those that wait, its will.

A session outlives its connections.  ``link`` is the connection it has now, or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.kernel.mqtt import Run
from penstock.kernel.mqttrelay import Outlet
from penstock.mqtt.exchange import Exchange
from penstock.mqtt.packets import Will
from penstock.mqtt.routes import Subscription
from penstock.mqtt.unsettled import Unsettled

if TYPE_CHECKING:
    from penstock.mqtt.gate import Ticket
    from penstock.mqtt.journal import Stored
    from penstock.mqtt.options import BrokerOptions
    from penstock.mqtt.outgoing import Outgoing

__all__ = ["Session", "Budget", "Waiting", "Drop", "NEVER"]

NEVER: Final = 0xFFFFFFFF
"""A session expiry of this many seconds is none."""
MOST_DROPS: Final = 16
"""How many drops a session remembers."""


class Waiting:
    """Messages that wait for their turn, and the form they take; it does not change, and many sessions may share it.

    ``stored`` is where a journal has them, those from the ``start``-th on; then ``run`` need not be in memory.
    """

    __slots__ = ("count", "deadline", "identifiers", "qos", "retain", "run", "since", "size", "start", "stored")

    def __init__(
        self,
        run: Run | None,
        qos: int,
        retain: bool,
        identifiers: bytes,
        stored: Stored | None = None,
        start: int = 0,
        since: float = 0.0,
    ) -> None:
        self.run, self.qos, self.retain, self.identifiers = run, qos, retain, identifiers
        self.stored, self.start, self.since = stored, start, since
        if run is not None:
            self.count, self.size = run.count, run.end - run.start
            self.deadline = run.deadline if run.expiry >= 0 else inf
        else:
            assert stored is not None
            self.count, self.size, self.deadline = stored.count, stored.size, stored.deadline

    def split(self, count: int) -> tuple[Waiting, Waiting]:
        """Return the first ``count`` messages and the rest."""
        form = (self.qos, self.retain, self.identifiers, self.stored)
        if self.run is not None:
            one, two = self.run.split(count)
            return (
                Waiting(one, *form, self.start, self.since),
                Waiting(two, *form, self.start + count, self.since),
            )
        head = Waiting(None, *form, self.start, self.since)
        tail = Waiting(None, *form, self.start + count, self.since)
        part = self.size * count // self.count
        head.count, head.size = count, part
        tail.count, tail.size = self.count - count, self.size - part
        return head, tail

    def is_before(self, stored: Stored) -> bool:
        """Whether a journal has these messages before others: what waits for a session stands in that order."""
        return self.stored is None or self.stored.id < stored.id

    def run_from(self, run: Run) -> Run:
        """Return its messages out of the whole run that was stored."""
        if self.start:
            run = run.split(self.start)[1]
        return run.split(self.count)[0] if self.count < run.count else run


class Drop(msgspec.Struct, frozen=True):
    """Messages that a session did not get, and why."""

    when: float
    topic: str
    count: int
    reason: str


class Budget:
    """What waits for all sessions of a broker together."""

    __slots__ = ("limit", "most_messages", "queued_bytes", "queued_messages", "waiting")

    def __init__(self, limit: int, most_messages: int) -> None:
        self.limit, self.most_messages = limit, most_messages
        self.waiting: set[Session] = set()
        """The sessions that something waits for."""
        self.queued_bytes = self.queued_messages = 0


class Session(Outlet):
    """The state of one client id."""

    __slots__ = (
        "budget",
        "client_id",
        "connected_at",
        "dropped",
        "drops",
        "exchange",
        "expires_at",
        "expiry",
        "number",
        "options",
        "owed",
        "permits",
        "queue",
        "queued_bytes",
        "queued_messages",
        "received",
        "replays",
        "resend",
        "subscriptions",
        "unsettled",
        "username",
        "will",
        "will_at",
    )

    def __init__(self, client_id: str, options: BrokerOptions, budget: Budget) -> None:
        self.client_id, self.options, self.budget = client_id, options, budget
        self.number = 0
        """What a journal calls it; 0 while none keeps it."""
        self.username: str | None = None
        self.link: Outgoing | None = None
        self.ready = False  # its connection takes messages now
        self.expiry = 0
        self.expires_at: float | None = None
        self.connected_at = 0.0
        self.will: Will | None = None
        self.will_at: float | None = None
        self.subscriptions: dict[str, Subscription] = {}
        self.exchange = Exchange()
        self.received: set[int] = set()
        """Packet ids of QoS 2 messages that were taken and not released yet."""
        self.unsettled: Unsettled | None = None
        """What the acknowledgement of each of them waits for."""
        self.queue: deque[Waiting] = deque()
        self.queued_messages = self.queued_bytes = 0
        self.resend: int | None = None
        """The number from which on all that is under way has to be sent again; None: nothing has."""
        self.replays: list[Iterator[tuple[Run, int, bytes]]] = []
        """Retained messages that follow a subscription, with QoS and subscription identifiers."""
        self.delivered = 0
        self.owed = 0
        """Messages that a journal has counted as its own and that are neither acknowledged nor lost."""
        self.dropped: dict[str, int] = {}
        self.drops: list[Drop] = []
        self.permits: dict[bytes, bool] = {}

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def note_unsettled(self, ids: range, tickets: list[Ticket]) -> None:
        """Remember what the acknowledgement of QoS 2 messages waits for, as long as it does."""
        if self.unsettled is None:
            self.unsettled = Unsettled()
        self.unsettled.note(ids, tickets)

    def open_tickets(self, packet_id: int) -> list[Ticket]:
        """Return what the acknowledgement of a QoS 2 message still waits for, and what has refused it."""
        return self.unsettled.tickets(packet_id) if self.unsettled else []

    @property
    def persistent(self) -> bool:
        """Whether it outlives its connection."""
        return self.expiry > 0

    @property
    def kept(self) -> bool:
        """Whether a journal has to know of it: its will has to be published even if everything ends."""
        return self.expiry > 0 or self.will is not None

    @property
    def has_room(self) -> bool:
        """Whether a message may wait for it."""
        return (
            self.queued_messages < self.options.max_queued_messages
            and self.queued_bytes < self.options.max_queued_bytes
            and self.budget.queued_bytes < self.budget.limit
            and self.budget.queued_messages < self.budget.most_messages
            and (self.link is not None or self.persistent)
        )

    def enqueue(self, waiting: Waiting) -> Waiting | None:
        """Let messages wait; return what of them fits."""
        if not self.has_room:
            return None
        room = self.options.max_queued_messages - self.queued_messages
        if room < waiting.count:
            waiting = waiting.split(room)[0]
        self.restore(waiting)
        return waiting

    def restore(self, waiting: Waiting) -> None:
        """Let messages wait, whether there is room or not."""
        self.queue.append(waiting)
        self._count(waiting, 1)

    def dequeue(self) -> Waiting:
        """Take the first that waits."""
        waiting = self.queue.popleft()
        self._count(waiting, -1)
        return waiting

    def put_back(self, waiting: Waiting) -> None:
        """Put what could not be sent in front again."""
        self.queue.appendleft(waiting)
        self._count(waiting, 1)

    def forget_messages(self) -> None:
        """Let go of everything that waits or is under way: the session is over."""
        while self.queue:
            self.dequeue()
        self.exchange = Exchange()
        self.resend = None
        self.replays.clear()

    def _count(self, waiting: Waiting, sign: int) -> None:
        count, size, before = sign * waiting.count, sign * waiting.size, self.queued_messages
        self.queued_messages += count
        self.queued_bytes += size
        self.budget.queued_messages += count
        self.budget.queued_bytes += size
        if not before:
            self.budget.waiting.add(self)
        elif not self.queued_messages:
            self.budget.waiting.discard(self)

    @property
    def all_dropped(self) -> int:
        """Messages this session did not get, for whatever reason."""
        return sum(self.dropped.values())

    def drop(self, when: float, topic: bytes, count: int, reason: str) -> None:
        """Remember that messages did not reach it."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count
        last = self.drops[-1] if self.drops else None
        name = topic.decode()
        if last is not None and last.topic == name and last.reason == reason:
            self.drops[-1] = Drop(when, name, last.count + count, reason)
        else:
            self.drops.append(Drop(when, name, count, reason))
            del self.drops[:-MOST_DROPS]
