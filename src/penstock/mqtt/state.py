"""The journal of a broker that forgets nothing: changes of a turn become one frame, written before its answers leave.

    told changes ──► one frame of the StateLog ──► (always: group commit) ──► answers leave
                            └── now and then: what is dirty ──► the store (state_checkpoint.py), old segments go

The store is behind by what the journal has had since the last checkpoint; opening reads both (state_restore.py).
"""

from __future__ import annotations

import array
import contextlib
import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import Clock, shown_ns
from penstock.disk import PosixDisk
from penstock.disk.commit import GROUP, Committer
from penstock.disk.tree import free_bytes
from penstock.errors import CorruptionError
from penstock.kernel.mqtt import Run, cut, make_run
from penstock.mqtt import state_changes as c
from penstock.mqtt.deliveries import Deliveries
from penstock.mqtt.journal import ENDED, Stored
from penstock.mqtt.state_log import HEAD_BYTES, StateLog
from penstock.mqtt.state_reserve import Reserve
from penstock.mqtt.state_time import OwnTime

if TYPE_CHECKING:
    from penstock.mqtt.exchange import Flight
    from penstock.mqtt.gate import TurnGate
    from penstock.mqtt.routes import Subscription
    from penstock.mqtt.session import Session, Waiting
    from penstock.mqtt.state_checkpoint import Checkpoints
    from penstock.mqtt.state_options import PersistenceOptions

__all__ = ["StateJournal"]

MOST_LISTS: Final = 4096
"""Lists of receivers that are known by number at once."""

LARGEST_PACKET: Final = 1 << 62

UNRESERVED: Final = 4 << 20
"""Bytes that are handed on at once where no room is kept for a full disk."""

MUCH: Final = 4
"""How often what is handed on at once has to fit the room that the disk has."""

LARGEST_RETAINED: Final = 15 << 20
LONGEST_RETAINED_TOPIC: Final = c.LONGEST_KEY - 16


class StateJournal:
    """A Journal and a step of the gate."""

    keeps = True

    def __init__(
        self, log: StateLog, own: OwnTime, clock: Clock, options: PersistenceOptions, reserve: Reserve
    ) -> None:
        self.log, self.own, self.options, self.reserve = log, own, options, reserve
        self._clock = clock
        self.gate: TurnGate
        self.checkpoints: Checkpoints
        self.next_session = 1
        self.turns = 0
        self.deliveries = Deliveries()
        self.error = self._said_spent = ""
        self.refusal = ""
        """Why whoever watches the disk lets no more messages be kept."""
        self.dirty_sessions: set[Session] = set()
        self.dirty_subscriptions: set[tuple[str, str]] = set()
        self.dirty_retained: set[bytes] = set()
        self.gone: set[str] = set()
        self._changes: list[bytes] = []
        self._changes_len = 0
        self._data: list[bytes | memoryview] = []
        self._data_len = 0
        self._turn: list[tuple[Stored, int, int]] = []
        self._by_run: dict[int, Stored] = {}
        self._lists: dict[bytes, int] = {}
        self._waiting: Waiting | None = None
        self._numbers: array.array[int] = array.array("I")
        interval = options.seconds if options.sync == "interval" else None
        self._committer: Committer | None = None
        if options.sync != "none":
            self._committer = GROUP.committer(self._sync, interval=interval)

    @property
    def trouble(self) -> str:
        """Why nothing can be kept now."""
        failed = self.log.failed
        return self.error if failed is None else str(failed)

    @property
    def full(self) -> str:
        """Why nothing is kept now that takes room for long."""
        return self.trouble or self.refusal or self.reserve.spent

    def _sync(self) -> int:
        try:
            return self.log.sync()
        except OSError:
            self.gate.changed_elsewhere()
            raise

    # --- What changes

    def _add(self, change: bytes) -> None:
        if self._waiting is not None:
            self._end_queued()
        self._changes.append(change)
        self._changes_len += len(change)
        self.gate.changed()

    def can_retain(self, run: Run) -> bool:
        """Whether the store takes such a value and such a key."""
        size = run.longest + len(run.forward)
        return size <= LARGEST_RETAINED and len(run.topic) <= LONGEST_RETAINED_TOPIC

    @property
    def at_once(self) -> int:
        """A part of the room that is kept for a full disk: what else there is to write needs some as well."""
        return self.reserve.size // 4 or UNRESERVED

    def room_for(self, size: int) -> int:
        """Return how many bytes this turn can take of so many: all of them where the disk has far more room."""
        if size > self.at_once and isinstance(self.log.disk, PosixDisk):
            with contextlib.suppress(OSError):
                if free_bytes(self.log.folder) >= MUCH * (self._data_len + size):
                    return size
        return self.at_once

    @property
    def crowded(self) -> bool:
        """Whether this turn has as many to write already."""
        return self._data_len >= self.at_once

    def store(self, run: Run, *, anew: bool = False) -> Stored:
        """Keep messages; twice in a turn only where that is wanted ``anew``."""
        found = self._by_run.get(id(run))
        if found is not None and not anew:
            return found
        data = run.packets()
        expires = run.expiry >= 0
        deadline = self.own.of_monotonic(run.deadline) if expires else c.NEVER_NS
        flags = run.version5 | run.retain << 1 | run.qos << 2
        topic, forward, size = run.topic, run.forward, len(data)
        head = c.MESSAGE.pack(
            c.IS_MESSAGE, flags, run.count, size, zlib.crc32(data), deadline, run.expiry, len(topic), len(forward)
        )
        stored = Stored(self.log.end + len(self._turn) + 1, run.count, size, run.deadline if expires else inf)
        stored.run = run
        if self._waiting is not None:
            self._end_queued()
        self._turn.append((stored, self._changes_len, self._data_len))
        self._by_run[id(run)] = stored
        self._data.append(data)
        self._data_len += size
        self._add(head + topic + forward)
        return stored

    def retained(self, topic: bytes, run: Run | None) -> None:
        """Keep the retained message of a topic; those below $SYS are said anew by every start."""
        if topic.startswith(b"$SYS/"):
            return
        self.dirty_retained.add(topic)
        stored_at = shown_ns(self._clock) // 1_000_000_000
        number = 0 if run is None else self.store(run).id
        self._add(c.RETAINED.pack(c.IS_RETAINED, number, stored_at, len(topic)) + topic)

    def session(self, session: Session) -> None:
        """Keep a session."""
        fresh = not session.number
        if fresh:
            session.number, self.next_session = self.next_session, self.next_session + 1
        self.dirty_sessions.add(session)
        if not session.persistent:
            self.deliveries.lose(session, session.owed, ENDED)
        data = c.encode(self.data_of(session, fresh=fresh))
        self._add(c.BLOB.pack(c.IS_SESSION, session.number, len(data)) + data)

    def data_of(self, session: Session, *, fresh: bool = False) -> c.SessionData:
        """Return what there is to keep of a session, without its messages."""
        own = self.own
        return c.SessionData(
            session.number,
            session.client_id,
            session.username,
            session.expiry,
            c.NEVER_NS if session.expires_at is None else own.of_monotonic(session.expires_at),
            session.link is not None,
            session.will,
            c.NEVER_NS if session.will_at is None else own.of_monotonic(session.will_at),
            fresh,
        )

    def ended(self, session: Session, filters: Iterable[str]) -> None:
        """Forget a session."""
        self.deliveries.lose(session, session.owed, ENDED)
        self._add(c.ENDED.pack(c.IS_ENDED, session.number))
        self.dirty_sessions.discard(session)
        self.dirty_subscriptions.update((session.client_id, name) for name in filters)
        self.gone.add(session.client_id)
        session.number = 0

    def took(self, session: Session, first: int, count: int) -> None:
        """Keep ids of QoS 2 messages that a client published."""
        self.dirty_sessions.add(session)
        self._add(c.IDS.pack(c.IS_TOOK, session.number, first, count))

    def freed(self, session: Session, first: int, count: int) -> None:
        """Forget such ids."""
        self.dirty_sessions.add(session)
        self._add(c.IDS.pack(c.IS_FREED, session.number, first, count))

    def subscribed(self, subscription: Subscription) -> None:
        """Keep a subscription."""
        session = subscription.session
        self.dirty_subscriptions.add((session.client_id, subscription.name))
        data = c.encode(subscription_data(subscription, ""))
        self._add(c.BLOB.pack(c.IS_SUBSCRIBED, session.number, len(data)) + data)

    def unsubscribed(self, session: Session, filter: str) -> None:
        """Forget a subscription."""
        self.dirty_subscriptions.add((session.client_id, filter))
        data = filter.encode()
        self._add(c.BLOB.pack(c.IS_UNSUBSCRIBED, session.number, len(data)) + data)

    def queued(self, session: Session, waiting: Waiting) -> None:
        """Keep that messages wait; sessions that share them are written as one list."""
        self.dirty_sessions.add(session)
        self.deliveries.owe(session, waiting.count)
        if self._waiting is not waiting:
            if self._waiting is not None:
                self._end_queued()
            self._waiting = waiting
        self._numbers.append(session.number)

    def _end_queued(self) -> None:
        waiting, numbers = self._waiting, self._numbers
        assert waiting is not None
        assert waiting.stored is not None
        self._waiting, self._numbers = None, array.array("I")
        kind, who = c.IS_QUEUED_FOR, numbers[0]
        if len(numbers) > 1:
            kind, raw = c.IS_QUEUED, numbers.tobytes()
            known = self._lists.get(raw)
            if known is None:
                if len(self._lists) >= MOST_LISTS:
                    self._lists.clear()
                known = self._lists[raw] = len(self._lists)
                self._add(c.LIST.pack(c.IS_LIST, known, len(numbers)) + raw)
            who = known
        flags, identifiers = waiting.qos | waiting.retain << 2, waiting.identifiers
        self._add(
            c.QUEUED.pack(kind, flags, waiting.stored.id, waiting.start, waiting.count, who, len(identifiers))
            + identifiers
        )

    def sent(self, session: Session, flight: Flight, queued: bool) -> None:
        """Keep which packet ids messages got."""
        assert flight.stored is not None
        self.dirty_sessions.add(session)
        if not queued:
            self.deliveries.owe(session, flight.count)
        flags = flight.qos | flight.retain << 2 | queued << 3
        self._add(
            c.SENT.pack(c.IS_SENT, flags, session.number, flight.number, flight.stored.id, flight.start, flight.count,
                        len(flight.identifiers)) + flight.identifiers
        )  # fmt: skip

    def consumed(self, session: Session, stored: Stored, upto: int) -> None:
        """Forget what waits, up to a message."""
        self.dirty_sessions.add(session)
        self._add(c.CONSUMED.pack(c.IS_CONSUMED, session.number, stored.id, upto))

    def released(self, session: Session, first: int, count: int) -> None:
        """Keep that PUBREC came."""
        self.dirty_sessions.add(session)
        self._add(c.IDS.pack(c.IS_RELEASED, session.number, first, count))

    def done(self, session: Session, first: int, count: int, lost: str = "") -> None:
        """Forget ids whose exchange is over."""
        self.dirty_sessions.add(session)
        if lost:
            self.deliveries.lose(session, count, lost)
        else:
            self.deliveries.done(session, count)
        self._add(c.IDS.pack(c.IS_DONE, session.number, first, count))

    def lost(self, session: Session, count: int, reason: str, *, fresh: bool = False) -> None:
        """Count messages that a session does not get."""
        if fresh:
            self.deliveries.owe(session, count)
        self.deliveries.lose(session, count, reason)
        self.gate.changed()

    # --- The end of a turn

    def end_turn(self) -> Future[Any] | None:
        """Write the turn; return what its answers wait for."""
        try:
            wrote = self.reserve.with_room(self._renew_and_write)
        except Exception as exc:
            self.error = str(exc) or type(exc).__name__
            raise
        self.error = ""
        durable: Future[Any] | None = None
        if wrote and self._committer is not None:
            if self.options.sync == "always":
                durable = self._committer.request()
            else:
                self._committer.touch()
        self.checkpoints.go_on()
        if self.reserve.spent != self._said_spent:
            self._said_spent = self.reserve.spent
            self.gate.tell_trouble()
        return durable

    def request_sync(self) -> Future[Any] | None:
        """Ask for a sync now, whatever the interval; None where the device is never asked."""
        return None if self._committer is None else self._committer.request()

    def _renew_and_write(self) -> bool:
        if self.log.failed is not None:
            self.log.renew(self.own.now_ns(), self.own.monotonic_ns())
        return self._write()

    def _write(self) -> bool:
        if self._waiting is not None:
            self._end_queued()
        counted = self.deliveries.changed
        if not self._changes and not counted:
            return False
        log, totals = self.log, self.deliveries.encode() if counted else b""
        try:
            position = log.append([*self._changes, totals], self._data, self.own.now_ns())
        except BaseException:
            self.deliveries.changed = counted
            raise
        segment = log.segments[-1]
        changes_at = log.changes_position(position)
        data_at = changes_at + self._changes_len + len(totals)
        for stored, head, data in self._turn:
            stored.segment, stored.head_at, stored.data_at = segment, changes_at + head, data_at + data
            stored.run = None
        self._changes, self._data, self._turn, self._by_run = [], [], [], {}
        self._changes_len = self._data_len = 0
        self.turns += 1
        if segment.end - segment.start >= self.options.segment_bytes:
            with contextlib.suppress(OSError, MemoryError):  # what was told is written: the next turn tries again
                self.roll()
        return True

    def write_totals(self) -> None:
        """Write how many messages came, went and were lost, as a turn of its own."""
        self.log.append([self.deliveries.encode()], [], self.own.now_ns())

    def roll(self) -> None:
        """Go on in a new segment."""
        self.log.begin(self.log.end, own_ns=self.own.now_ns(), monotonic_ns=self.own.monotonic_ns())
        self._lists.clear()

    def sync(self) -> None:
        """Have everything written survive a power cut, unless that was not wanted."""
        if self._committer is not None:
            self._committer.wait()

    # --- Messages

    def load(self, stored: Stored) -> Run | None:
        """Return messages; None when they are not what was written."""
        if stored.run is not None:
            return stored.run
        try:
            return load_run(stored)
        except CorruptionError as exc:
            self.log.set_aside_messages(stored.segment, stored.data_at, stored.size, exc.reason)
            return None

    def close(self) -> None:
        """Sync unless that was not wanted, and let go."""
        try:
            if self._committer is not None:
                self._committer.wait()
        finally:
            if self._committer is not None:
                self._committer.close()
            self.log.close()


def subscription_data(subscription: Subscription, client_id: str) -> c.SubscriptionData:
    """Return what there is to keep of a subscription."""
    return c.SubscriptionData(
        client_id,
        subscription.name,
        subscription.qos,
        subscription.no_local,
        subscription.retain_as_published,
        subscription.retain_handling,
        subscription.identifier,
    )


def load_run(stored: Stored) -> Run:
    """Read messages from their segment."""
    segment = stored.segment
    head = segment.read(stored.head_at, c.MESSAGE.size)
    _, flags, count, size, crc, _, expiry, topic_len, forward_len = c.MESSAGE.unpack(head)
    names = segment.read(stored.head_at + c.MESSAGE.size, topic_len + forward_len)
    topic, forward = names[:topic_len], names[topic_len:]
    data = segment.read(stored.data_at, size)
    if zlib.crc32(data) != crc:
        byte = stored.data_at - segment.start + HEAD_BYTES
        raise CorruptionError(segment.path, byte, f"{count} messages here are damaged")
    items = cut(data, 0, bool(flags & 1), LARGEST_PACKET)[0]
    runs = [item for item in items if isinstance(item, Run)]
    if len(runs) == 1 and runs[0].count == count and runs[0].forward == forward:
        run = runs[0]
        run.topic = topic
    else:  # not as a client sends them: what was dealt to a group, what the broker published itself
        payloads = [payload for each in runs for payload in each.payloads()]
        run = make_run(topic, payloads, flags >> 2 & 3, bool(flags & 2), forward, expiry)
    run.deadline = stored.deadline if expiry >= 0 else 0.0
    return run
