"""From the journal to the store: what changed goes there now and then, a few at a time, while the broker goes on.

    begin   a new segment of the journal; its start is where the next opening will read from
    some    what is dirty is encoded as it is now, after a turn was written, with the position up to which that is exact
    apply   on a thread: sync the journal, so that the store is never ahead of it, then the store
    end     the store's cursor moves to the start of that segment; segments before it go when nothing refers to them

Each entry says in its version up to where it is exact, so it does no harm that they are of different moments.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.disk import Threads
from penstock.disk.failpoint import fail_point
from penstock.errors import PenstockError, ReadOnlyError
from penstock.mqtt import state_changes as c
from penstock.mqtt.retained_data import RetainedData, encode_retained
from penstock.mqtt.state import StateJournal, subscription_data
from penstock.mqtt.state_reserve import NO_ROOM
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.gate import Loop
    from penstock.mqtt.session import Session

__all__ = ["Checkpoints", "SOME"]

_log = logging.getLogger(__name__)

SOME: Final = 256
"""How many entries are encoded after one turn."""

MANY: Final = 8192
"""How many go to the store at once when nobody waits meanwhile."""

LONG_FORM: Final = 64
MOST_FORMS: Final = 4 << 20
"""Bytes of long identifiers in the value of one session: a store takes none of more than 16 MiB."""

AGAIN_SECONDS: Final = 5.0
"""How long a checkpoint that failed is left alone."""


class _Forms:
    """Long identifiers of a session's flights, each once: with each flight they would be more than a store takes."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}
        self._size = 0

    def of(self, identifiers: bytes) -> bytes | int:
        """Return identifiers, or their number where they are long; none where there are too many different ones."""
        if len(identifiers) <= LONG_FORM:
            return identifiers
        number = self.known.get(identifiers)
        if number is None:
            if self._size + len(identifiers) > MOST_FORMS:
                return b""
            self._size += len(identifiers)
            number = self.known[identifiers] = len(self.known)
        return number


class Checkpoints:
    """When to write to the store, and what."""

    def __init__(
        self, journal: StateJournal, broker: Broker, store: AppendLogStore, loop: Loop, open_store: Callable[[], Any]
    ) -> None:
        self._journal, self._broker, self.store, self._loop = journal, broker, store, loop
        self._open_store = open_store
        self._began_at = broker.clock.monotonic()
        self._began_end = journal.log.end
        self._cursor = -1
        self._sessions: set[Session] = set()
        self._subscriptions: set[tuple[str, str]] = set()
        self._retained: set[bytes] = set()
        self._gone: set[str] = set()
        self._thread = Threads(1, "penstock-mqtt-state")
        self._applying: Future[None] | None = None
        self._taken: tuple[list[Any], ...] = ([], [], [], [])
        self._not_before = 0.0
        self._swept_at = self._began_at
        self._closed = self._looks_later = self._hurries = False
        self._pauses = 0
        self.count = 0
        """How many were finished."""
        self.trouble = ""
        """Why the last try failed, until one is finished: the journal grows meanwhile."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing to the store meanwhile."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._journal.gate.changed()

    @property
    def applying(self) -> bool:
        """Whether something is being written to the store right now."""
        return self._applying is not None

    @property
    def running(self) -> bool:
        """Whether one is under way."""
        return self._cursor >= 0

    def go_on(self) -> None:
        """Begin one if it is time, or do some of it; called when a turn was written and nothing is told since."""
        journal = self._journal
        if not self._looks_later and (
            journal.log.end != self._began_end or journal.log.has_old or journal.reserve.spent
        ):
            self._looks_later = True
            self._loop.call_later(min(AGAIN_SECONDS, journal.options.checkpoint_seconds), self._look)
        if self._pauses:
            return
        if not self.running:
            if not self._due():
                if self._broker.clock.monotonic() - self._swept_at >= AGAIN_SECONDS:
                    self.sweep()
                return
            try:
                self.begin()
            except Exception as exc:  # noqa: BLE001 - the turn is written, whatever became of this
                self._put_off(exc)
                return
        if self._applying is None:
            try:
                self._some(SOME)
            except Exception as exc:  # noqa: BLE001 - whatever it is, nothing of it counts as written
                self._put_back()
                self._put_off(exc)

    def _look(self) -> None:
        """Go on with a broker that has nothing to do: what is old goes all the same."""
        self._looks_later = False
        if not self._closed:
            self._journal.gate.changed()

    def _due(self) -> bool:
        now = self._broker.clock.monotonic()
        if now < self._not_before:
            return False
        options, grown = self._journal.options, self._journal.log.end - self._began_end
        size, seconds = options.segment_bytes, options.checkpoint_seconds
        if self._journal.full:  # what was fetched since makes room only when the store knows of it
            size, seconds = min(size, max(4096, options.reserve_bytes // 4)), min(seconds, AGAIN_SECONDS)
        return grown >= size or (grown > 0 and now - self._began_at >= seconds)

    def begin(self) -> None:
        """Take what is dirty now as what is to be written; changes from here on are for the next one."""
        journal = self._journal
        newest = journal.log.segments[-1]
        size, again = newest.end - newest.start, self._began_end < 0
        # A try after one that failed makes no file of its own: there may be one every few seconds, for days.
        if size and not (again and size < journal.options.segment_bytes and not journal.full):
            journal.roll()
        cursor = journal.log.end
        journal.write_totals()  # so that they are behind the cursor, whatever goes before it
        self._cursor, self._began_end = cursor, journal.log.end  # not before: what is dirty is taken with it
        self._began_at = self._broker.clock.monotonic()
        self._sessions, journal.dirty_sessions = journal.dirty_sessions | self._sessions, set()
        self._subscriptions, journal.dirty_subscriptions = journal.dirty_subscriptions | self._subscriptions, set()
        self._retained, journal.dirty_retained = journal.dirty_retained | self._retained, set()
        self._gone, journal.gone = journal.gone | self._gone, set()

    def _some(self, limit: int) -> None:
        """Encode some and have them applied; with the last of them the cursor moves."""
        self._taken = self._take(limit)
        updates = self._updates(*self._taken)
        last = not self._left
        self._applying = future = self._thread.submit(self._apply, updates, last)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._applied, done, last))

    @property
    def _left(self) -> bool:
        return bool(self._sessions or self._subscriptions or self._retained or self._gone)

    def _take(self, limit: int) -> tuple[list[Any], ...]:
        found = []
        for each in (self._gone, self._subscriptions, self._retained, self._sessions):
            some: list[Any] = list(islice(each, limit))
            each.difference_update(some)
            limit -= len(some)
            found.append(some)
        return tuple(found)

    def _updates(self, gone: Any, subscriptions: Any, retained: Any, sessions: Any) -> list[KvUpdate]:
        broker, as_of = self._broker, self._journal.log.end
        found = []
        for client_id in gone:
            session = broker.sessions.get(client_id)
            if session is None or not session.number:
                found.append(KvUpdate.delete(c.key_of("sessions", client_id)))
        for client_id, name in subscriptions:
            session = broker.sessions.get(client_id)
            there = None if session is None or not session.number else session.subscriptions.get(name)
            key = c.key_of("subscriptions", client_id, name)
            if there is None:
                found.append(KvUpdate.delete(key))
            else:
                found.append(KvUpdate.put(key, c.encode(subscription_data(there, client_id)), as_of))
        found += [self._retained_update(topic) for topic in retained]
        found += [
            KvUpdate.put(c.key_of("sessions", session.client_id), self._value(session), as_of)
            for session in sessions
            if session.number
        ]
        return found

    def everything(self) -> list[KvUpdate]:
        """Return all that is kept now, as it would stand in the store."""
        sessions = [session for session in self._broker.sessions.values() if session.number]
        names = [(each.client_id, name) for each in sessions for name in each.subscriptions]
        topics = [topic for topic in self._broker.retained.topics() if not topic.startswith(b"$SYS/")]
        return self._updates((), names, topics, sessions)

    def _retained_update(self, topic: bytes) -> KvUpdate:
        key = c.key_of("retained", topic.decode())
        kept = self._broker.retained.kept(topic)
        if kept is None or kept.run is None:
            return KvUpdate.delete(key)
        run = kept.run
        data = RetainedData(
            run.qos, run.payload(), run.forward or None, kept.stored_ns // 1_000_000_000, max(-1, run.expiry)
        )
        # The version is when it was stored by the broker's own time: its expiry does not follow the calendar.
        stored = self._journal.own.of_monotonic(run.deadline) - run.expiry * 1_000_000_000 if run.expiry >= 0 else 0
        return KvUpdate.put(key, encode_retained(data), max(0, stored))

    def _value(self, session: Session) -> bytes:
        exchange, forms = session.exchange, _Forms()
        flights = tuple(
            c.FlightData(
                each.number,
                each.count,
                each.qos,
                each.retain,
                forms.of(each.identifiers),
                0 if each.stored is None else each.stored.id,
                each.start,
                each.size,
            )
            for each in exchange.flights
        )
        first = session.queue[0] if session.queue else None
        head = None if first is None or first.stored is None else (first.stored.id, first.start)
        data = msgspec.structs.replace(
            self._journal.data_of(session),
            next_number=exchange.next_number,
            received=c.ranges(session.received),
            flights=flights,
            head=head,
            forms=tuple(forms.known),
        )
        return c.encode(data)

    def _apply(self, updates: list[KvUpdate], last: bool) -> None:
        """Write to the store; on the thread."""
        if self._journal.options.sync != "none":
            self._journal.sync()
        fail_point("mqtt.checkpoint.synced")
        cursor = WatchCursor.of(self._cursor) if last else self.store.cursor()
        try:
            self.store.apply(updates, cursor)
            fail_point("mqtt.checkpoint.applied")
            if last and self._journal.options.sync != "none":
                self._settle()
        except ReadOnlyError:
            self.store.close()
            self.store = self._open_store()
            raise
        fail_point("mqtt.checkpoint.settled")

    def _settle(self) -> None:
        """Have the store survive a power cut; that a full disk has no room to rewrite it does not matter now."""
        try:
            self.store.settle()
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            self.store.sync()

    def _applied(self, done: Future[None], last: bool) -> None:
        if self._closed:
            return
        self._applying = None
        error = done.exception()
        if error is not None:
            self._put_back()
            self._put_off(error)
            return
        if last:
            self._journal.log.forget_before(self._cursor)
            self._cursor, self.trouble = -1, ""
            self.count += 1
            self._swept_at = -inf  # with the next turn
        self._journal.gate.changed()

    def _put_off(self, error: BaseException) -> None:
        """Try a checkpoint again later, with the room that is kept if the disk has no other."""
        unforeseen = None if isinstance(error, OSError | PenstockError) else error
        self.trouble = what = str(error) or type(error).__name__
        _log.error("the store could not be written, it is tried again: %s", what, exc_info=unforeseen)
        if isinstance(error, OSError):
            self._journal.reserve.release(error)
        self._cursor = -1
        self._not_before = self._broker.clock.monotonic() + AGAIN_SECONDS
        self._began_end = -(1 << 62)  # due as soon as it may be

    def _put_back(self) -> None:
        """Take what could not be applied as dirty still."""
        gone, subscriptions, retained, sessions = self._taken
        self._gone.update(gone)
        self._subscriptions.update(subscriptions)
        self._retained.update(retained)
        self._sessions.update(sessions)

    def sweep(self) -> None:
        """Remove segments that nothing refers to any more."""
        self._swept_at = self._broker.clock.monotonic()
        self._broker.forget_last_queued()
        try:
            self._journal.log.sweep()
        except OSError as exc:
            _log.warning("a segment of the journal could not be removed: %s", exc)
        journal = self._journal
        if not journal.full or self._closed:
            return
        if journal.reserve.spent:
            journal.reserve.restore()
        if journal.log.awaits_sync and not self._hurries and (durable := journal.request_sync()) is not None:
            self._hurries = True
            durable.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._hurried))

    def _hurried(self) -> None:
        """Let files go that waited for a sync, while their room is wanted."""
        self._hurries, self._swept_at = False, -inf
        if not self._closed:
            self._journal.gate.changed()

    def finish(self) -> None:
        """Write everything that is dirty, and wait for it; for the end, when no more changes come."""
        self._closed = True
        if self._applying is not None and self._applying.exception() is not None:
            self._put_back()
        self._journal.reserve.with_room(self.begin)
        while True:
            self._taken = self._take(MANY)
            last = not self._left
            self._apply(self._updates(*self._taken), last)
            if last:
                break
        self._journal.log.forget_before(self._cursor)
        self.sweep()
        self.sweep()

    def close(self) -> None:
        """End the thread and close the store."""
        self._thread.shutdown()
        self.store.close()
