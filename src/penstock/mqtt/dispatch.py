"""How messages reach sessions: who gets a run, in which form, and what becomes of what nobody can take now.

The part of a broker that every message passes; ``broker`` stands on it.  No socket, clock, file or task in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from penstock.clock import Clock, shown_ns
from penstock.kernel.mqtt import Run, make_run
from penstock.mqtt.access import Access, Action, Who
from penstock.mqtt.agenda import Agenda
from penstock.mqtt.counts import Counts
from penstock.mqtt.exchange import Flight
from penstock.mqtt.journal import ENDED, HANDED_ON, Journal, Stored
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Will
from penstock.mqtt.properties import encode_properties
from penstock.mqtt.reasons import Reason
from penstock.mqtt.retained import RetainedMessages
from penstock.mqtt.routes import NOBODY, Copied, Copies, Plan, Routes, Subscription
from penstock.mqtt.session import NEVER, Budget, Session, Waiting
from penstock.mqtt.shared import SharedGroup
from penstock.mqtt.topics import FilterTree

__all__ = ["Dispatch", "Origin", "run_of"]

_log = logging.getLogger(__name__)


class Origin(Protocol):
    """Who brings messages and is no session: a bridge, a feed."""

    name: str


class Dispatch(Agenda):
    """Routes, queues within their bounds, retained messages and drops; everything is called from one thread."""

    def __init__(self, options: BrokerOptions, clock: Clock, journal: Journal) -> None:
        super().__init__(clock)
        self.options = options
        self.journal = journal
        self.counts = Counts()
        self.sessions: dict[str, Session] = {}
        self.connected = 0
        """How many of them have a connection."""
        self.retained = RetainedMessages()
        self.on_retained: list[Callable[[bytes], None]] = []
        """Called with a topic whose retained message came, changed or went."""
        self.on_tapped: Callable[[str, str, Run, int], None] | None = None
        """Called with a tap's name, its log, a run with a ``traceparent`` that it wrote, and when that came."""
        self.budget = Budget(options.max_total_queued_bytes, options.max_total_queued_messages)
        self._last_queued = Waiting(_NOTHING, 0, False, b"")
        self.tree: FilterTree[Subscription | SharedGroup | Copies] = FilterTree()
        self.routes = Routes(self.tree)
        self.access: Access | None = None
        self.closing = False

    # --- Rules

    def may(self, session: Session, action: Action, topic: str) -> bool:
        """Whether the rules let a session do that."""
        return self.access is None or self.access.allows(self.who(session), action, topic)

    def who(self, session: Session) -> Who:
        """Return a session as rules see it."""
        link = session.link
        return Who(session.client_id, session.username, link.address if link is not None else "")

    # --- Messages

    def publish(
        self, run: Run, publisher: Session | None, *, acknowledged: bool = False, origin: Origin | None = None
    ) -> int:
        """Deliver a run; return the reason code of its acknowledgement.

        ``acknowledged`` where one will leave through the gate, so that taps may hold it back.  ``origin`` is who
        brought it where that is no session.
        """
        if run.retain:
            run = run.detached()  # kept and delivered, and stored once
            self._retain(run)
        plan = self.routes.find(run.topic)
        if plan is NOBODY:
            return Reason.NO_MATCHING_SUBSCRIBERS
        if plan.taps:
            self.copy(plan.taps, [run], publisher, acknowledged=acknowledged, origin=origin)
            reason = self._deliver(run, plan, publisher)
            return Reason.SUCCESS if reason == Reason.NO_MATCHING_SUBSCRIBERS else reason
        return self._deliver(run, plan, publisher)

    def copy(
        self,
        taps: tuple[Copied, ...],
        runs: list[Run],
        publisher: Session | None,
        *,
        acknowledged: bool = False,
        origin: Origin | None = None,
    ) -> None:
        """Hand runs to taps, several only where they are not acknowledged; not to one whose owner brought them."""
        client = publisher.client_id if publisher is not None else origin.name if origin is not None else ""
        for tap in taps:
            if origin is None or tap.owner is not origin:
                tap.take(runs, publisher, client, acknowledged=acknowledged)

    def publish_message(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, will: Will | None = None
    ) -> None:
        """Publish for the broker itself."""
        run = run_of(will or Will(topic, payload, qos, retain))
        if run.expiry >= 0:
            run.deadline = self.clock.monotonic() + run.expiry
        self.publish(run, None)

    def _deliver(self, run: Run, plan: Plan, publisher: Session | None) -> int:
        qos, retain = run.qos, run.retain
        wire: list[bytes | memoryview | None] = [None, None]
        kept: Run | None = None
        stored: Stored | None = None
        keeps = self.journal.keeps
        taken = refused = copies = size = 0
        for target in plan.targets:
            session = target.session
            if target.no_local and session is publisher:
                if target.for_publisher is None:
                    continue
                target = target.for_publisher
            granted = min(target.qos, qos)
            if granted:
                if kept is None:
                    kept = run.detached()
                flag = retain and target.retain_as_published
                if keeps and session.expiry > 0:
                    if stored is None:
                        stored = self.journal.store(kept)
                    fits = self.offer(session, kept, granted, flag, target.identifiers, stored)
                else:
                    fits = self.offer(session, kept, granted, flag, target.identifiers)
                if fits:
                    taken += 1
                else:
                    refused += not self.is_over(session)
            elif session.ready:
                link = session.link
                assert link is not None
                if target.plain and not retain and run.longest < link.plain_payload:
                    version5 = link.version5
                    data = wire[version5]
                    if data is None:
                        data = wire[version5] = _at_most_once(run, version5)
                    link.write(data)
                    session.delivered += run.count
                    copies += 1
                    size += len(data)
                else:
                    link.send_at_most_once(run, retain and target.retain_as_published, target.identifiers)
                taken += 1
            else:
                self.drop(session, run, "slow" if session.link is not None else "offline")
        if copies:
            self._count_sent(copies * run.count, copies * run.payload_bytes, size)
        for group in plan.groups:
            fits = self._deal(group, run)
            taken += fits
            refused += not fits
        if not taken and refused:
            return Reason.QUOTA_EXCEEDED
        return Reason.SUCCESS if taken else Reason.NO_MATCHING_SUBSCRIBERS

    def deliver_plain(self, plan: Plan, run: Run, data: bytes) -> None:
        """Deliver a plain run that is all there was in a read: the shortest way through the broker."""
        version5, longest, count = run.version5, run.longest, run.count
        copies = 0
        for target in plan.targets:
            session = target.session
            if session.ready:
                link = session.link
                if link.version5 == version5 and longest < link.plain_payload:  # type: ignore[union-attr]
                    link.write(data)  # type: ignore[union-attr]
                    session.delivered += count
                    copies += 1
                    continue
            self._deliver(run, Plan([target], []), None)
        if copies:
            counts = self.counts
            counts.messages_sent += copies * count
            counts.publish_sent += copies * count
            counts.publish_bytes_sent += copies * run.payload_bytes
            counts.bytes_sent += copies * len(data)

    def deliver_streak(self, plan: Plan, runs: list[Run]) -> None:
        """Deliver runs of QoS 0 that came in a row and go to the same sessions: as they came, in one piece."""
        first, last = runs[0], runs[-1]
        version5 = first.version5
        longest = max(run.longest for run in runs)
        data: bytes | memoryview = memoryview(first.data)[first.start : last.end]
        if len(data) == len(first.data):
            data = first.data
        count = sum(run.count for run in runs)
        copies = 0
        rest = []
        for target in plan.targets:
            session = target.session
            link = session.link
            if session.ready and link is not None and link.version5 == version5 and longest < link.plain_payload:
                link.write(data)
                session.delivered += count
                copies += 1
            else:
                rest.append(target)
        if copies:
            payload = sum(run.payload_bytes for run in runs)
            self._count_sent(copies * count, copies * payload, copies * len(data))
        if rest:
            others = Plan(rest, [])
            for run in runs:
                self._deliver(run, others, None)

    def _count_sent(self, count: int, payload_bytes: int, size: int) -> None:
        counts = self.counts
        counts.messages_sent += count
        counts.publish_sent += count
        counts.publish_bytes_sent += payload_bytes
        counts.bytes_sent += size

    def _deal(self, group: SharedGroup, run: Run, able: Callable[[Session], bool] | None = None) -> bool:
        """Give each message to one member, of those that are ``able``; return whether any was taken."""
        topic = run.topic.decode()
        members = group.choose(
            run.count,
            run.qos,
            lambda session: (able is None or able(session)) and self.may(session, "receive", topic),
        )
        if not members:
            self.count_drop("shared", run.count)
            return False
        taken = False
        for target, hand in zip(members, run.deal(len(members)), strict=False):
            granted = min(run.qos, target.qos)
            retain = run.retain and target.retain_as_published
            if granted:
                hand, stored = hand.detached(), None
                if able is not None and self.journal.keeps and target.session.persistent:
                    stored = self.journal.store(hand, anew=True)  # what came after it may wait there already
                taken |= bool(self.offer(target.session, hand, granted, retain, target.identifiers, stored))
            elif target.session.link is not None:
                target.session.link.send_at_most_once(hand, retain, target.identifiers)
                taken = True
        return taken

    def hand_on(self, session: Session, most: int = 0) -> bool:
        """Give what a session that ends has not finished to other members of its groups (MQTT 5, 4.8.2).

        That is what can have come by a group only; of QoS 2 what was never sent.  It is kept once more, and a turn that
        finds no room for it would keep everything else back: so no more at once than the journal can surely take, and
        nothing on a full disk; the rest is lost with its session.  With ``most`` this returns after about so many
        messages, or where the turn has enough to write, and says whether some are left.
        """
        if all(each.group is None for each in session.subscriptions.values()):
            return False
        journal, exchange = self.journal, session.exchange
        left, begun, missed = most, False, 0
        room = journal.at_once if most else journal.room_for(session.queued_bytes + exchange.size)
        room = 0 if journal.full else room
        for flight in list(exchange.flights):
            if flight.qos == 1 and not flight.released:
                if most and (left <= 0 or (room and journal.crowded)):
                    return True
                left -= flight.count
                fits = room > 0 and (most > 0 or not begun or flight.size <= room)
                handed = fits and self._hand(session, flight)
                missed += 0 if fits else flight.count
                if handed:
                    begun, room = True, room if most else max(0, room - flight.size)
                exchange.replay(flight.first, flight.count, done=True)
                if flight.stored is not None:
                    journal.done(session, flight.first, flight.count, HANDED_ON if handed else ENDED)
        while session.queue:
            if most and (left <= 0 or (room and journal.crowded)):
                return True
            waiting = session.dequeue()
            left -= waiting.count
            fits = room > 0 and (most > 0 or not begun or waiting.size <= room)
            handed = fits and self._hand(session, waiting)
            missed += 0 if fits else waiting.count
            if handed:
                begun, room = True, room if most else max(0, room - waiting.size)
            if waiting.stored is not None:
                journal.consumed(session, waiting.stored, waiting.start + waiting.count)
                journal.lost(session, waiting.count, HANDED_ON if handed else ENDED)
        if missed:
            _log.warning("%d messages ended with the session of %s: no room to hand them on", missed, session.client_id)
        return False

    def _hand(self, session: Session, kept: Flight | Waiting) -> bool:
        """Give messages of a session that ends to another one; return whether any were taken."""
        run = kept.run
        if run is None and kept.stored is not None and (whole := self._load(kept.stored)):
            run = kept.run_from(whole)
        return run is not None and self._deal_to_others(session, run)

    def _load(self, stored: Stored) -> Run | None:
        """Return messages that are not needed any more, or None: that they cannot be read keeps nothing from ending."""
        try:
            return self.journal.load(stored)
        except (OSError, MemoryError) as exc:
            _log.error("%d messages cannot be read: %s", stored.count, exc or "no memory")
            return None

    def _deal_to_others(self, session: Session, run: Run) -> bool:
        """Deal messages of a session that ends to the others of the group they came by; return whether one took any."""
        if run.expiry >= 0 and run.deadline <= self.clock.monotonic():
            return False
        found = self.tree.match(run.topic.decode())
        groups = [each for each in found if isinstance(each, SharedGroup) and session in each.members]
        if len(groups) != 1 or len(groups[0].members) == 1:
            return False
        if any(isinstance(each, Subscription) and each.session is session for each in found):
            return False
        return self._deal(groups[0], run, lambda other: other is not session and self._stays(other))

    def _stays(self, session: Session) -> bool:
        """Whether a session is worth handing something to: one that ends as well would only hand it back."""
        return not self.is_over(session) and (session.persistent or not self.closing)

    def is_over(self, session: Session) -> bool:
        """Whether a session has expired, though it may not be gone yet."""
        moment = session.expires_at
        return session.link is None and moment is not None and moment <= self.clock.monotonic()

    def offer(
        self,
        session: Session,
        run: Run,
        qos: int,
        retain: bool,
        identifiers: bytes,
        stored: Stored | None = None,
    ) -> int:
        """Send a run of QoS 1 or 2 to a session, or let it wait; return how many messages it took."""
        link = session.link
        if session.ready and link is not None and not session.queue and session.resend is None:
            return link.send(run, qos, retain, identifiers, stored)
        if link is None and not session.persistent:
            self.drop(session, run, "offline")
            return 0
        if stored is None and self.journal.keeps and session.persistent:
            stored = self.journal.store(run)
        if stored is not None and session.queue and not session.queue[-1].is_before(stored):
            stored = self.journal.store(run, anew=True)  # a second copy, for another of its subscriptions
        last = self._last_queued  # most sessions take a message in the same form: they share what waits
        if stored is None or last.stored is not stored or last.start or last.count != run.count \
                or (last.qos, last.retain, last.identifiers) != (qos, retain, identifiers):  # fmt: skip
            last = Waiting(run, qos, retain, identifiers, stored, 0, self.clock.monotonic())
            if stored is not None:
                last.run = None  # the journal has it
                self._last_queued = last
        return self.enqueue(session, last, run)

    def enqueue(self, session: Session, waiting: Waiting, run: Run | None = None) -> int:
        """Let messages wait for a session as far as there is room; return how many."""
        fits = session.enqueue(waiting)
        count = 0 if fits is None else fits.count
        if count < waiting.count:
            run = run or waiting.run
            assert run is not None
            self.drop(session, run, "queue full", waiting.count - count)
            if self.journal.keeps and session.persistent:
                self.journal.lost(session, waiting.count - count, "queue full", fresh=True)
        if fits is not None and fits.stored is not None:
            self.journal.queued(session, fits)
        return count

    def drop_if_late(self, session: Session, waiting: Waiting) -> bool:
        """Drop what waited and has expired, or has waited for too long; return whether that was so."""
        now = self.clock.monotonic()
        if waiting.deadline <= now:
            reason = "expired"
        elif now - waiting.since >= self.options.max_queued_seconds != NEVER:
            reason = "too old"
        else:
            return False
        run = waiting.run
        if run is None:
            assert waiting.stored is not None
            run = self._load(waiting.stored)
        self.drop(session, run or _NOTHING, reason, waiting.count)
        if waiting.stored is not None:
            self.journal.consumed(session, waiting.stored, waiting.start + waiting.count)
            self.journal.lost(session, waiting.count, reason)
        return True

    def forget_last_queued(self) -> None:
        """Refer no more to what was queued last."""
        self._last_queued = Waiting(_NOTHING, 0, False, b"")

    def drop_late(self) -> None:
        """Drop from the front of every queue what has waited for too long or has expired."""
        for session in list(self.budget.waiting):
            while session.queue and self.drop_if_late(session, session.queue[0]):
                session.dequeue()

    def drop(self, session: Session, run: Run, reason: str, count: int = 0) -> None:
        """Count messages that a session does not get."""
        session.drop(self.clock.monotonic(), run.topic, count or run.count, reason)
        self.count_drop(reason, count or run.count)

    def count_drop(self, reason: str, count: int) -> None:
        """Count messages that nobody in particular got."""
        self.counts.dropped[reason] = self.counts.dropped.get(reason, 0) + count

    def _retain(self, run: Run) -> None:
        """Keep the last message of the run under its topic; an empty one removes what is there (MQTT-3.3.1-6)."""
        if not self.is_retainable(run.topic):
            self.count_drop("too many levels", 1)
            return
        if run.count > 1:
            run = run.split(run.count - 1)[1]
        if not self.journal.can_retain(run):
            self.count_drop("too large to be retained", 1)
            return
        lacks = self.journal.full if run.payload_bytes else self.journal.trouble  # to remove one makes room
        if lacks and not run.topic.startswith(b"$SYS/"):
            self.count_drop("disk", 1)
            return
        if run.payload_bytes == 0:
            if self.retained.remove(run.topic):
                if self.journal.keeps:
                    self.journal.retained(run.topic, None)
                self._tell_retained(run.topic)
            return
        run = run.detached()
        self.retained.put(run, shown_ns(self.clock))
        if run.expiry >= 0:
            self.at(run.deadline, lambda: self.retained_due(run))
        if self.journal.keeps:
            self.journal.retained(run.topic, run)
        self._tell_retained(run.topic)

    def is_retainable(self, topic: bytes) -> bool:
        """Whether a message may be kept under this topic: each level of one is a node of a tree."""
        return topic.count(b"/") < self.options.max_topic_levels

    def _tell_retained(self, topic: bytes) -> None:
        for call in self.on_retained:
            call(topic)

    def retained_due(self, run: Run) -> None:
        """Forget a retained message that has expired."""
        if self.retained.get(run.topic) is run:
            self.retained.remove(run.topic)
            if self.journal.keeps:
                self.journal.retained(run.topic, None)
            self._tell_retained(run.topic)


_NOTHING: Final = make_run(b"", [b""], 0, False)


def run_of(will: Will) -> Run:
    """Return a will as something that can be published: without its delay, its expiry beginning now."""
    properties = will.properties
    expiry = -1 if properties.message_expiry is None else properties.message_expiry
    kept = msgspec.structs.replace(properties, message_expiry=None, will_delay=None)
    forward = encode_properties(kept, length=False)
    return make_run(will.topic.encode(), [will.payload], will.qos, will.retain, forward, expiry)


def _at_most_once(run: Run, version5: bool) -> bytes | memoryview:
    """Return a run as QoS 0 without retain: as it came, wherever that is the same."""
    if run.qos == 0:
        data = run.wire(version5)
        if data is not None:
            return data
    properties = run.forward
    if run.expiry >= 0:
        properties = b"\x02" + run.expiry.to_bytes(4, "big") + properties
    return run.frames(version5, 0, run.topic, properties if version5 else b"", 0)
