"""Opening what a broker has kept: the store, then the turns since; payloads stay where they are.

Sessions come from the store, each exact up to a position of the journal.  The segments that are left are read in order:

    before the store's cursor    only who waits for which message counts, from the head that each session names
    from the cursor on           every change that the session does not have yet

A session that was connected when the broker ended has lost its connection then: its will and its expiry begin now.
"""

from __future__ import annotations

import array
import itertools
import logging
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.disk import Disk, save_atomically
from penstock.errors import CorruptionError
from penstock.kernel import pgss
from penstock.kernel.mqtt import Run, make_run
from penstock.mqtt import state_changes as c
from penstock.mqtt.deliveries import DeliveryTotals, decode_totals, measure
from penstock.mqtt.exchange import Flight
from penstock.mqtt.journal import Stored
from penstock.mqtt.retained_data import decode_retained
from penstock.mqtt.routes import Subscription
from penstock.mqtt.session import NEVER, Session, Waiting
from penstock.mqtt.state import StateJournal, load_run
from penstock.mqtt.state_log import StateLog, TurnFrame
from penstock.mqtt.topics import split_share
from penstock.store import AppendLogStore
from penstock.types import Problem

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["Restore", "check_data", "open_store"]

_log = logging.getLogger(__name__)

STORE: Final = "state.snap"
MOST_MENDED: Final = 8 << 30
"""A damaged store that is longer is left as it is: what is good of it is taken over in memory."""
NONE_WAITS: Final = (1 << 63, 0)


def open_store(disk: Disk, folder: str) -> tuple[AppendLogStore, list[Problem]]:
    """Open the store; a damaged one is set aside, and what is good of it taken over."""
    path = os.path.join(folder, STORE)
    try:
        return AppendLogStore.open(path, disk=disk, unfinished="drop"), []
    except CorruptionError as exc:
        problem = _set_aside(disk, path, exc)
        return AppendLogStore.open(path, disk=disk, unfinished="keep"), [problem]


def _set_aside(disk: Disk, path: str, exc: CorruptionError) -> Problem:
    with disk.open(path) as file:
        size = file.stat().size
        if size > MOST_MENDED:
            raise exc
        data = file.read_at(0, size)
    names = (f"{path}{number or ''}.bad" for number in itertools.count())
    bad = next(name for name in names if disk.stat(name) is None)
    save_atomically(disk, bad, data)
    good, at = [b"PGSS\x02\x00"], 6
    while 0 <= at < len(data):
        end = _good_end(data, at)
        good.append(data[at:end])
        at = pgss.find_record(data, end + 1, len(data)) if end < len(data) else -1
    for name in ("mark",):
        if disk.stat(f"{path}.penstock-{name}") is not None:
            disk.remove(f"{path}.penstock-{name}")
    save_atomically(disk, path, b"".join(good))
    problem = Problem(exc.file, exc.byte, f"{exc.reason}; the damaged file is kept as {bad}")
    _log.error("%s", problem)
    return problem


def _good_end(data: bytes, at: int) -> int:
    """Return where the whole records from ``at`` on end."""
    while at + 5 <= len(data):
        kind, end = data[at + 4], at + 5
        if kind in (1, 2):
            end += 2 + int.from_bytes(data[end : end + 2], "little")
            if kind == 1:
                end += 4 + int.from_bytes(data[end : end + 4], "little")
        elif kind != 3:
            return at
        if end >= len(data):
            return at
        end += 1 + data[end]
        if end > len(data) or zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[at : at + 4], "little"):
            return at
        at = end
    return at


def check_data(frame: TurnFrame) -> bool:
    """Whether the messages of a frame are what was written."""
    changes, data, data_at = frame.changes, memoryview(frame.data()), 0
    for kind, at in each_change(changes):
        if kind != c.IS_MESSAGE:
            continue
        _, _, _, size, crc, _, _, _, _ = c.MESSAGE.unpack_from(changes, at)
        if zlib.crc32(data[data_at : data_at + size]) != crc:
            return False
        data_at += size
    return True


def each_change(changes: bytes) -> list[tuple[int, int]]:
    """Return (kind, where it begins) of the changes of a frame."""
    at, found = 0, []
    while at < len(changes):
        kind = changes[at]
        found.append((kind, at))
        at += _size(kind, changes, at)
    return found


def _size(kind: int, changes: bytes, at: int) -> int:
    if kind == c.IS_MESSAGE:
        fields = c.MESSAGE.unpack_from(changes, at)
        return int(c.MESSAGE.size + fields[7] + fields[8])
    if kind == c.IS_LIST:
        return int(c.LIST.size + 4 * c.LIST.unpack_from(changes, at)[2])
    if kind in (c.IS_QUEUED, c.IS_QUEUED_FOR):
        return int(c.QUEUED.size + c.QUEUED.unpack_from(changes, at)[6])
    if kind == c.IS_SENT:
        return int(c.SENT.size + c.SENT.unpack_from(changes, at)[7])
    if kind in (c.IS_RELEASED, c.IS_DONE, c.IS_TOOK, c.IS_FREED):
        return c.IDS.size
    if kind == c.IS_CONSUMED:
        return c.CONSUMED.size
    if kind in (c.IS_SESSION, c.IS_SUBSCRIBED, c.IS_UNSUBSCRIBED):
        return int(c.BLOB.size + c.BLOB.unpack_from(changes, at)[2])
    if kind == c.IS_ENDED:
        return c.ENDED.size
    if kind == c.IS_RETAINED:
        return int(c.RETAINED.size + c.RETAINED.unpack_from(changes, at)[3])
    if kind == c.IS_COUNTS:
        return int(c.COUNTS.size + c.COUNTS.unpack_from(changes, at)[1])
    raise ValueError(f"a change of kind {kind}")


class Restore:
    """Puts a broker into the state that was kept.  Used once, before anyone is let in."""

    def __init__(self, broker: Broker, journal: StateJournal, log: StateLog, store: AppendLogStore) -> None:
        self.broker, self.journal = broker, journal
        self._broker, self._journal, self._log, self._store = broker, journal, log, store
        self._own = journal.own
        self.problems: list[Problem] = []
        self._sessions: dict[int, Session] = {}
        self._numbers: dict[str, int] = {}
        self._data: dict[int, c.SessionData] = {}
        self._as_of: dict[int, int] = {}
        self._head: dict[int, tuple[int, int]] = {}
        self._subscriptions: dict[str, dict[str, c.SubscriptionData]] = {}
        self._wanted: dict[int, list[Flight]] = {}
        self._retained: dict[bytes, tuple[Stored | None, int]] = {}
        self._kept: dict[bytes, tuple[Run, int]] = {}
        self._lists: dict[int, array.array[int]] = {}
        self._highest = 0
        self._totals: DeliveryTotals | None = None
        self.end = 0
        """Behind everything that store and journal know of."""
        self.turns = self.messages = 0

    # --- Reading

    def read(self) -> None:
        """Read the store and the journal."""
        cursor = self._store.cursor().token.as_int() or 0
        self.end = cursor
        self._read_store()
        for frame in self._log.frames(check_data):
            try:
                self._apply(frame, frame.position >= cursor)
            except (ValueError, IndexError, KeyError, msgspec.MsgspecError) as exc:
                self._note(frame.segment.path, frame.position - frame.segment.start, f"a turn is not understood: {exc}")
            self.turns += 1
        self.end = max(self.end, self._log.end)
        self._journal.next_session = self._highest + 1
        self._log.forget_before(cursor)

    def _note(self, path: str, byte: int, reason: str) -> None:
        problem = Problem(path, byte, reason)
        _log.error("%s", problem)
        self.problems.append(problem)

    def _each(self, prefix: str, take: Callable[[str, bytes, int], None]) -> None:
        for batch in self._store.scan(prefix):  # by columns: an object for each entry would take longer than the rest
            columns = (spans.to_list(batch.buffer) for spans in (batch.keys, batch.values, batch.versions))
            for key, value, version in zip(*columns, strict=True):
                name = key.decode()
                try:
                    take(name, value, int.from_bytes(version, "big") if len(version) == 8 else 0)
                except (msgspec.MsgspecError, ValueError, IndexError, CorruptionError) as exc:
                    self._note(self._store.path, 0, f"the value of {name!r} is not understood: {exc}")

    def _read_store(self) -> None:
        self._each("sessions/", self._take_session)
        self._each("subscriptions/", self._take_subscription)
        self._each("retained/", self._take_retained)

    def _take_session(self, key: str, value: bytes, as_of: int) -> None:  # noqa: ARG002
        data = c.decode_session(value)
        session = self._begin(data)
        exchange = session.exchange
        flights = []
        for each in data.flights:
            identifiers = data.forms[each.identifiers] if isinstance(each.identifiers, int) else each.identifiers
            flight = Flight(each.number, None, each.count, each.qos, each.retain, identifiers, None, each.start,
                            each.size)  # fmt: skip
            if each.id:
                self._wanted.setdefault(each.id, []).append(flight)
            flights.append(flight)
        exchange.restore(flights, data.next_number)
        for first, count in data.received:
            session.received.update(range(first, first + count))
        self._as_of[data.number] = as_of
        self._head[data.number] = data.head or NONE_WAITS
        self.end = max(self.end, as_of)

    def _take_subscription(self, key: str, value: bytes, as_of: int) -> None:  # noqa: ARG002
        data = c.decode_subscription(value)
        self._subscriptions.setdefault(data.client_id, {})[data.name] = data

    def _take_retained(self, key: str, value: bytes, stored_ns: int) -> None:
        data = decode_retained(self._store.path, key, value)
        topic = key[len("retained/") :].encode()
        run = make_run(topic, [data.payload], data.qos, True, data.properties or b"", data.expiry)
        if data.expiry >= 0:
            age = 0
            if not stored_ns:  # not ours: all there is to go by is the calendar, and one that went back counts as now
                age = max(0, self._broker.clock.now_ns() // 1_000_000_000 - data.stored_at)
                stored_ns = self._own.now_ns() - age * 1_000_000_000
            run.deadline = self._own.to_monotonic(stored_ns + data.expiry * 1_000_000_000)
        self._kept[topic] = (run, data.stored_at * 1_000_000_000)

    def _begin(self, data: c.SessionData) -> Session:
        session = Session(data.client_id, self._broker.options, self._broker.budget)
        session.number = data.number
        self._sessions[data.number], self._data[data.number] = session, data
        self._numbers[data.client_id] = data.number
        self._as_of[data.number] = 0
        self._highest = max(self._highest, data.number)
        return session

    def _end(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is None:
            return
        data = self._data.pop(number)
        session.forget_messages()
        session.number = 0
        self._journal.dirty_sessions.discard(session)
        if self._numbers.get(data.client_id) == number:
            del self._numbers[data.client_id]
            for name in self._subscriptions.pop(data.client_id, {}):
                self._journal.dirty_subscriptions.add((data.client_id, name))
        self._journal.gone.add(data.client_id)

    # --- The journal

    def _apply(self, frame: TurnFrame, counts: bool) -> None:
        """Take the changes of one turn; unless it ``counts`` only who waits for what."""
        changes, position, segment = frame.changes, frame.position, frame.segment
        changes_at = StateLog.changes_position(position)
        messages: list[tuple[int, int]] = []
        made: dict[int, Stored] = {}
        data_at, at, size = frame.data_at, 0, len(changes)
        since = self._own.to_monotonic(frame.own_ns)

        def stored_of(number: int) -> Stored:
            found = made.get(number)
            if found is None:
                head, data = messages[number - position - 1]
                _, _, count, length, _, deadline, _, _, _ = c.MESSAGE.unpack_from(changes, head)
                moment = float("inf") if deadline == c.NEVER_NS else self._own.to_monotonic(deadline)
                found = made[number] = Stored(number, count, length, moment)
                found.segment, found.head_at, found.data_at = segment, changes_at + head, data
            return found

        while at < size:
            kind = changes[at]
            if kind == c.IS_MESSAGE:
                _, _, _, length, _, _, _, topic_len, forward_len = c.MESSAGE.unpack_from(changes, at)
                messages.append((at, data_at))
                data_at += length
                at += c.MESSAGE.size + topic_len + forward_len
                if self._wanted:
                    number = position + len(messages)
                    for flight in self._wanted.pop(number, ()):
                        flight.stored = stored_of(number)
            elif kind in (c.IS_QUEUED, c.IS_QUEUED_FOR):
                _, flags, number, start, count, who, extra = c.QUEUED.unpack_from(changes, at)
                at += c.QUEUED.size + extra
                form = changes[at - extra : at]
                waiting = Waiting(None, flags & 3, bool(flags & 4), form, stored_of(number), 0, since)
                if start or count < waiting.count:
                    waiting = _part(waiting, start, count)
                if kind == c.IS_QUEUED_FOR:
                    if who > self._highest:
                        self._highest = who
                    self._queue(who, waiting, position)
                else:
                    for each in self._lists[who]:
                        self._queue(each, waiting, position)
            elif kind == c.IS_LIST:
                _, name, count = c.LIST.unpack_from(changes, at)
                at += c.LIST.size
                numbers = array.array("I")
                numbers.frombytes(changes[at : at + 4 * count])
                self._lists[name] = numbers
                self._highest = max(self._highest, *numbers)
                at += 4 * count
            else:
                length = _size(kind, changes, at)
                if counts:
                    self._change(kind, changes, at, position, stored_of)
                at += length

    def _queue(self, number: int, waiting: Waiting, position: int) -> None:
        session = self._sessions.get(number)
        if session is None:
            return
        if position < self._as_of[number]:
            first, stored = self._head[number], waiting.stored
            assert stored is not None
            if (stored.id, waiting.start + waiting.count) <= first:
                return
            if (stored.id, waiting.start) < first:
                waiting = waiting.split(first[1] - waiting.start)[1]
        session.restore(waiting)

    def _change(self, kind: int, changes: bytes, at: int, position: int, stored_of: Callable[[int], Stored]) -> None:
        if kind == c.IS_RETAINED:
            _, number, stored_at, length = c.RETAINED.unpack_from(changes, at)
            at += c.RETAINED.size
            self._retained[changes[at : at + length]] = (stored_of(number) if number else None, stored_at)
            return
        if kind == c.IS_COUNTS:
            self._totals = decode_totals(changes[at + c.COUNTS.size :])
            return
        if kind == c.IS_SESSION:
            _, number, length = c.BLOB.unpack_from(changes, at)
            at += c.BLOB.size
            self._set(number, c.decode_session(changes[at : at + length]), position)
            return
        number = c.SENT.unpack_from(changes, at)[2] if kind == c.IS_SENT else c.ENDED.unpack_from(changes, at)[1]
        session = self._sessions.get(number)
        if session is None:
            return
        if kind in (c.IS_SUBSCRIBED, c.IS_UNSUBSCRIBED):
            _, _, length = c.BLOB.unpack_from(changes, at)
            at += c.BLOB.size
            self._subscription(kind, session, changes[at : at + length])
            return
        if position < self._as_of[number]:
            return
        self._journal.dirty_sessions.add(session)
        if kind == c.IS_SENT:
            self._sent(session, changes, at, stored_of)
        elif kind == c.IS_ENDED:
            self._end(number)
        elif kind == c.IS_CONSUMED:
            _, _, id_, upto = c.CONSUMED.unpack_from(changes, at)
            _consume(session, id_, upto)
        else:
            _, _, first, count = c.IDS.unpack_from(changes, at)
            if kind == c.IS_DONE:
                session.exchange.replay(first, count, done=True)
            elif kind == c.IS_RELEASED:
                session.exchange.replay(first, count, done=False)
            elif kind == c.IS_TOOK:
                session.received.update(range(first, first + count))
            else:
                session.received.difference_update(range(first, first + count))

    def _set(self, number: int, data: c.SessionData, position: int) -> None:
        self._highest = max(self._highest, number)
        if data.fresh and number not in self._sessions:
            old = self._numbers.get(data.client_id)
            if old is not None and position < self._as_of[old]:
                return  # the store has a later session of this client
            if old is not None:
                self._end(old)
            self._journal.dirty_sessions.add(self._begin(data))
        elif number in self._sessions and position >= self._as_of[number]:
            self._data[number] = data
            self._journal.dirty_sessions.add(self._sessions[number])

    def _subscription(self, kind: int, session: Session, data: bytes) -> None:
        there = self._subscriptions.setdefault(session.client_id, {})
        if kind == c.IS_SUBSCRIBED:
            found = c.decode_subscription(data)
            name = found.name
            there[name] = found
        else:
            name = data.decode()
            there.pop(name, None)
        self._journal.dirty_subscriptions.add((session.client_id, name))

    def _sent(self, session: Session, changes: bytes, at: int, stored_of: Callable[[int], Stored]) -> None:
        _, flags, _, number, id_, start, count, extra = c.SENT.unpack_from(changes, at)
        at += c.SENT.size
        stored: Stored | None = None
        if flags & 8:
            _consume(session, id_, start)
            if session.queue and session.queue[0].stored is not None and session.queue[0].stored.id == id_:
                stored = session.queue[0].stored
            _consume(session, id_, start + count)
        else:
            stored = stored_of(id_)
        # Without it, it is over by now or at least released: its segment went because nothing referred to it.
        size = 1 if stored is None else stored.size * count // stored.count
        session.exchange.put(
            Flight(number, None, count, flags & 3, bool(flags & 4), changes[at : at + extra], stored, start, size)
        )

    # --- Into the broker

    def into_broker(self, *, resume: bool = True) -> None:
        """Hand everything to the broker; the journal takes changes by now.  Only with ``resume`` does time go on."""
        for number, session in self._sessions.items():
            self._place(session, self._data[number])
        for client_id, found in self._subscriptions.items():
            owner = self._broker.sessions.get(client_id)
            for data in found.values():
                if owner is None:  # left over by a session that ended
                    self._journal.dirty_subscriptions.add((client_id, data.name))
                else:
                    self._subscribe(owner, data)
        self._place_retained(resume)
        sessions = self._broker.sessions.values()
        for session in sessions:
            session.owed = session.queued_messages + session.exchange.messages if session.expiry > 0 else 0
        damaged = bool(self.problems or self._log.problems)
        self._journal.deliveries.begin(self._totals, measure(sessions), damaged)
        if resume:
            for number, session in self._sessions.items():
                self._resume(session, self._data[number])
            for session in self._sessions.values():  # not before: who is over by now gets nothing of the others
                self._catch_up(session)
        self.messages = self._broker.budget.queued_messages

    def _place(self, session: Session, data: c.SessionData) -> None:
        session.username, session.expiry, session.will = data.username, data.expiry, data.will
        if not data.expiry:  # there for its will only: its messages were nobody's but the connection's
            session.forget_messages()
        exchange = session.exchange
        lost = sum(flight.count for flight in exchange.flights if flight.released and flight.size)
        if lost:  # neither released nor done, and not there: their segment is damaged
            kept = [flight for flight in exchange.flights if not (flight.released and flight.size)]
            exchange.restore(kept, exchange.next_number)
            what = f"{lost} messages that were under way to {session.client_id!r} are not in the journal any more"
            self._note(self._log.folder, 0, what)
        self._broker.sessions[session.client_id] = session

    def _subscribe(self, session: Session, data: c.SubscriptionData) -> None:
        group, name = split_share(data.name)
        self._broker.add(
            Subscription(
                session,
                name,
                group,
                data.qos,
                data.no_local,
                data.retain_as_published,
                data.retain_handling,
                data.identifier,
            ),
            first=True,
        )

    def _place_retained(self, resume: bool) -> None:
        broker = self._broker
        for topic, (stored, stored_at) in self._retained.items():
            self._journal.dirty_retained.add(topic)
            self._kept.pop(topic, None)
            if stored is None:
                continue
            try:
                self._kept[topic] = (load_run(stored), stored_at * 1_000_000_000)
            except CorruptionError as exc:
                self._note(exc.file, exc.byte, f"the retained message of {topic.decode()!r} is damaged")
        now = broker.clock.monotonic()
        for topic, (run, stored_ns) in self._kept.items():
            if resume and run.expiry >= 0 and run.deadline <= now:
                self._journal.retained(topic, None)
                continue
            broker.retained.put(run, stored_ns)
            if run.expiry >= 0:
                broker.at(run.deadline, lambda run=run: broker.retained_due(run))  # type: ignore[misc]

    def _resume(self, session: Session, data: c.SessionData) -> None:
        """Let time go on for a session: it has no connection now."""
        own, now = self._own, self._broker.clock.monotonic()
        if data.connected:
            delay = min(session.will.properties.will_delay or 0, session.expiry) if session.will is not None else 0
            session.will_at = None if session.will is None else now + delay
            session.expires_at = None if session.expiry == NEVER else now + session.expiry
        else:
            session.will_at = None if data.will_ns == c.NEVER_NS else own.to_monotonic(data.will_ns)
            session.expires_at = None if data.expires_ns == c.NEVER_NS else own.to_monotonic(data.expires_ns)
        if data.connected:
            self._journal.session(session)

    def _catch_up(self, session: Session) -> None:
        """Do what is due for a session, and have the rest done in time."""
        broker = self._broker
        now = broker.clock.monotonic()
        if session.will_at is not None:
            if session.will_at <= now:
                broker.will_due(session)  # before its client can come back
            else:
                broker.at(session.will_at, lambda: broker.will_due(session))
        if session.expires_at is not None:
            if session.expires_at <= now:
                broker.session_due(session)
            else:
                broker.at(session.expires_at, lambda: broker.session_due(session))


def _part(waiting: Waiting, start: int, count: int) -> Waiting:
    if start:
        waiting = waiting.split(start)[1]
    return waiting.split(count)[0] if count < waiting.count else waiting


def _consume(session: Session, id_: int, upto: int) -> None:
    """Take from the front of a queue what is before a message."""
    while session.queue:
        first = session.queue[0]
        assert first.stored is not None
        if (first.stored.id, first.start) >= (id_, upto):
            return
        session.dequeue()
        if first.stored.id == id_ and first.start + first.count > upto:
            session.put_back(first.split(upto - first.start)[1])


def facts(restored: Restore, seconds: float) -> dict[str, Any]:
    """Return what was restored, for people and scripts."""
    broker = restored._broker
    return {
        "seconds": round(seconds, 3),
        "sessions": len(broker.sessions),
        "subscriptions": broker.subscription_count,
        "retained": len(broker.retained),
        "queued": restored.messages,
        "problems": [str(problem) for problem in restored.problems],
    }
