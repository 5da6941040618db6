"""Taps: broker traffic that matches a filter, copied into a log as it comes.

A tap is a step of the gate (``gate``): what a turn of the loop published is one ``append_many`` for each channel,
before the journal writes and before an acknowledgement leaves.  Where a log cannot take it, the tap's rule says what
becomes of the message; the broker and other publishers go on.

**QoS 2 is in a log once, through kills.**  Order within a turn: log, journal (the ids of the session), note (how far
the log is that the journal knows of), answers.  A process that dies in between leaves records behind the note.  Their
ids are either in the session, which then knows the message when it comes again, or they are not; those are remembered
as in doubt when the log is opened again, and the same message under the same id is not written a second time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from penstock.disk.executor import disk_executor
from penstock.errors import OptionsError, PenstockError
from penstock.kernel.mqtt import Run
from penstock.lifecycle import Health, State
from penstock.log.detect import open_log
from penstock.log.face import LogWriter
from penstock.log.options import SyncMode
from penstock.metrics import REGISTRY
from penstock.mqtt.carried import encode_runs, headers_for
from penstock.mqtt.gate import Ticket, TurnGate
from penstock.mqtt.places import TapPlace
from penstock.mqtt.reasons import Reason
from penstock.mqtt.routes import Copies
from penstock.mqtt.state_changes import ranges
from penstock.mqtt.tapped import Doubt, TappedLog, lost_records
from penstock.mqtt.tapspec import TapSpec

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.outgoing import Outgoing
    from penstock.mqtt.session import Session

__all__ = ["Tap", "TapSpec"]

_log = logging.getLogger(__name__)

_records = REGISTRY.counter("mqtt_tap_records", "messages that taps wrote into logs", labels=("tap",))
_lost = REGISTRY.counter("mqtt_tap_lost", "messages that a tap did not write, by reason", labels=("tap", "reason"))

_NUMBER: Final = re.compile(r"\d+")

FIRST_RETRY_SECONDS: Final = 0.25
LAST_RETRY_SECONDS: Final = 5.0
MOST_HEADERS: Final = 4096
LONGEST_HEADERS: Final = 2048
"""Headers that are remembered: how many, and how long."""


class _Entry:
    """Runs of one publisher that wait for their log: one that is acknowledged, or several of QoS 0."""

    __slots__ = ("client", "doubled", "runs", "session", "ticket", "when_ns")

    def __init__(
        self, runs: list[Run], client: str, session: Session | None, ticket: Ticket | None, when_ns: int
    ) -> None:
        self.runs, self.client, self.session, self.ticket, self.when_ns = runs, client, session, ticket, when_ns
        self.doubled: list[int] = []
        """Packet ids of messages that came with these and are in the log already."""

    @property
    def count(self) -> int:
        runs = self.runs
        return runs[0].count if len(runs) == 1 else sum(run.count for run in runs)

    @property
    def qos(self) -> int:
        return 2 if self.doubled else self.runs[0].qos


class _Trouble:
    """A channel that cannot be written, and what waits for it."""

    __slots__ = ("backlog", "last", "pause", "reason", "size")

    def __init__(self, reason: str, last: int | None) -> None:
        self.reason, self.pause, self.size = reason, FIRST_RETRY_SECONDS, 0
        self.last = last
        """The position of the last record in front of what waits; some of that may be behind it already."""
        self.backlog: deque[_Entry] = deque()


class Tap:
    """One tap of one broker; a part (penstock.lifecycle).

    >>> from penstock.mqtt.broker import Broker
    >>> tap = Tap(TapSpec(filter="plant/#", path="data/readings"), Broker())
    >>> tap.name, tap.health().state.value
    ('tap:data/readings', 'new')

    Invariants:

    1. The records of one publisher are in a channel in the order in which it published.
    2. With ``ack="tap"`` no acknowledgement of QoS 1 or 2 leaves before the log has the message, or it is counted as
       lost under ``on_failure="drop"``.
    3. A QoS 2 message of a session that the broker keeps is in a channel once.
    """

    def __init__(self, spec: TapSpec, broker: Broker, *, owner: object = None) -> None:
        self.spec, self.broker = spec, broker
        self.name = f"tap:{spec.name or spec.path}"
        self.owner = owner
        """What comes from it is not written: a bridge does not send back what it brought."""
        self.records = 0
        self.lost: dict[str, int] = {}
        self.began_at: int | None = None
        """Where the log ended when this began; None for one with a template."""
        self._place = TapPlace(spec.path)
        self._state, self._reason = State.NEW, ""
        self._entries: list[_Entry] = []
        self._logs: dict[str, TappedLog] = {}  # those that are open, the one used last at the end
        self._known: set[str] = set()
        self._troubles: dict[str, _Trouble] = {}
        self._held: set[Outgoing] = set()
        self._headers: dict[tuple[str, int, bool, bytes, int], bytes] = {}
        self._doubt = Doubt()
        self._copies = Copies(self)
        self._notes = _Notes(self)
        self._gate: TurnGate
        self._loop: asyncio.AbstractEventLoop | None = None
        self._syncing: set[str] = set()
        self._unsynced: dict[str, list[_Entry]] = {}
        self._no_sync = asyncio.Event()  # no sync is under way
        self._no_sync.set()
        self._stopped = asyncio.Event()

    # --- Life

    async def start(self) -> None:
        """Open the log and stand in the way of what is published."""
        self._state = State.STARTING
        self._loop = asyncio.get_running_loop()
        self.attach()

    def attach(self) -> None:
        """Do what ``start`` does where there is no loop."""
        broker, gate = self.broker, self.broker.gate
        if not isinstance(gate, TurnGate):
            raise OptionsError(f"{self.name}: the broker must hold back answers (TurnGate) to have a tap")
        try:
            self._known.update(TappedLog.at(self._place))
            for path in self._known:  # now: later the sessions know the ids of what came again
                self._doubt.learn(path, broker.sessions)
            if lost_records(self._known):
                self._forget_ids()
            if self._place.fixed:
                self._open(self.spec.path)
                with open_log(self.spec.path) as log:
                    self.began_at = log.next_position
        except BaseException:
            self._state = State.FAILED
            self._close_logs()
            raise
        self._gate = gate
        gate.steps.insert(0, self)  # before the journal
        gate.steps.append(self._notes)  # behind it
        for each in self.spec.filters:
            broker.tap(each, self._copies)
        self._state = State.READY

    async def ready(self) -> None:
        """Return at once: ``start`` has opened everything."""

    async def drain(self, seconds: float) -> None:  # noqa: ARG002  (nothing is under way between two turns)
        """Take nothing more; what came is in the log."""
        if self._state.serves:
            self._state = State.DRAINING
            self._detach()

    async def stop(self) -> None:
        """End; the log has everything that was acknowledged."""
        if self._state.serves:
            self._state = State.DRAINING
            self._detach()
        for trouble in self._troubles.values():
            for entry in trouble.backlog:
                if entry.ticket is not None:
                    self._refuse(entry)  # never acknowledged: the log does not have it
                else:
                    self._count_lost([entry], "stopped")
        self._troubles.clear()
        self._let_go()
        await self._no_sync.wait()
        self._close_logs()
        self._state = State.STOPPED
        self._stopped.set()

    def _detach(self) -> None:
        for each in self.spec.filters:
            self.broker.untap(each, self._copies)
        self.end_turn()
        self._notes.end_turn()
        steps = self.broker.gate.steps
        if self in steps:
            steps.remove(self)
            steps.remove(self._notes)

    async def wait(self) -> None:
        """Return when it has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is: degraded while a log cannot be written."""
        if self._state is State.READY and self._troubles:
            path, trouble = next(iter(self._troubles.items()))
            return Health(State.DEGRADED, f"{path}: {trouble.reason}")
        return Health(self._state, self._reason)

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        return {
            "filters": list(self.spec.filters),
            "path": self.spec.path,
            "records": self.records,
            "lost": dict(self.lost),
            "waiting": self.waiting,
            "channels": len(self._known | {*self._logs}),
            "trouble": {path: trouble.reason for path, trouble in self._troubles.items()},
        }

    @property
    def waiting(self) -> int:
        """Messages that wait for a log that cannot be written."""
        return sum(entry.count for trouble in self._troubles.values() for entry in trouble.backlog)

    @property
    def writer(self) -> LogWriter | None:
        """The log of a tap without a template, where it is open."""
        log = self._logs.get(self.spec.path)
        return None if log is None else log.writer

    # --- What the broker hands over

    def take(self, runs: list[Run], session: Session | None, client: str, *, acknowledged: bool) -> None:
        """Take runs that are being published; the acknowledgement, if there is one, waits: it is of one run then."""
        broker, gate = self.broker, self._gate
        ticket = gate.ticket() if acknowledged and self.spec.ack == "tap" else None
        self._entries.append(_Entry(runs, client, session, ticket, max(0, broker.clock.now_ns())))
        if len(self._entries) == 1:
            gate.changed()

    def end_turn(self) -> Future[Any] | None:
        """Write what came since the last time."""
        entries, self._entries = self._entries, []
        if not entries:
            return None
        if self._place.fixed:
            self._write(self.spec.path, entries)
            return None
        places: dict[str, list[_Entry]] = {}
        path = self._place.path
        for entry in entries:
            for one in _single_runs(entry):
                places.setdefault(path(one.runs[0].topic, one.client), []).append(one)
        for where, some in places.items():
            self._write(where, some)
        return None

    # --- Writing

    def _write(self, path: str, entries: list[_Entry]) -> None:
        trouble = self._troubles.get(path)
        if trouble is not None:
            self._fail(entries, trouble)
            return
        before: int | None = None
        try:
            log = self._open(path)
            before = log.last
            if self._doubt:
                entries = self._without_doubled(entries)
            log.append_runs(*self._columns(entries))
        except OptionsError as exc:
            self._write_fitting(path, entries, before, str(exc))
            return
        except (OSError, PenstockError, MemoryError) as exc:
            self._begin_trouble(path, entries, before, str(exc))
            return
        self._wrote(path, log, entries)

    def _write_fitting(self, path: str, entries: list[_Entry], before: int | None, reason: str) -> None:
        """Write what the log takes; what it never will (too large, a channel too many) is refused, not held."""
        log = self._logs.get(path)
        fitting, at, left = [], 0, [one for entry in entries for one in _single_runs(entry)]
        try:
            records = [self._records([entry]) for entry in left]
            there = [] if log is None else log.written_since(before, [r for some in records for r in some])
            for some in records:
                entry, rest = left[0], some[max(0, len(there) - at) :]
                at += len(some)
                try:
                    if log is None:
                        raise OptionsError(reason)
                    if rest:
                        log.append(rest)
                        before = log.last
                    elif some:
                        before = there[at - 1]
                    fitting.append(entry)
                except OptionsError as exc:
                    if self.spec.on_failure == "drop" or entry.ticket is None:
                        self._count_lost([entry], _kind_of(exc))
                    else:
                        self._refuse(entry)
                del left[0]
        except (OSError, PenstockError, MemoryError) as exc:
            if log is not None and fitting:
                self._wrote(path, log, fitting)
            self._begin_trouble(path, left, before, str(exc))
            return
        if log is not None and fitting:
            self._wrote(path, log, fitting)

    def _wrote(self, path: str, log: TappedLog, entries: list[_Entry]) -> None:
        count, with_ids = 0, False
        waiting: list[_Entry] = []
        for entry in entries:
            count += entry.count
            with_ids |= entry.qos == 2
            if entry.ticket is not None:
                waiting.append(entry)
            elif entry.doubled:
                self._doubt.settle(entry.client, entry.doubled)
        self.records += count
        _records.add(count, tap=self.name)
        log.noted_later(count, with_ids)
        if self.broker.on_tapped is not None:
            self._tell_tapped(path, entries, self.broker.on_tapped)
        if self.spec.sync == "always" and waiting:
            self._unsynced.setdefault(path, []).extend(waiting)
            self._sync(path, log)
        else:
            self._done(waiting)

    def _done(self, entries: list[_Entry]) -> None:
        """Let the acknowledgements of what has its place go."""
        for entry in entries:
            if entry.doubled:
                self._doubt.settle(entry.client, entry.doubled)
            if entry.ticket is not None:
                entry.ticket.done()

    def _tell_tapped(self, path: str, entries: list[_Entry], tell: Callable[[str, str, Run, int], None]) -> None:
        for entry in entries:
            for run in entry.runs:
                if b"traceparent" in run.forward:
                    tell(self.name, path, run, entry.when_ns)

    def _open(self, path: str) -> TappedLog:
        log = self._logs.get(path)
        if log is not None:
            if len(self._logs) > 1:
                self._logs[path] = self._logs.pop(path)
            return log
        known = self._known | self._troubles.keys()
        if path not in known and len(known) >= self.spec.max_channels and not self._place.fixed:
            raise OptionsError(f"{path}: there are {self.spec.max_channels} channels already")
        sync: SyncMode = "none" if self.spec.sync == "always" else self.spec.sync
        log = TappedLog.open(path, self.spec.format, sync, self.spec.options, alone=self._place.fixed)
        self._logs[path] = log
        self._known.add(path)
        while len(self._logs) > self.spec.max_open:
            oldest = next(iter(self._logs))
            if oldest in self._syncing:
                break
            self._logs.pop(oldest).close()
        return log

    def _columns(self, entries: list[_Entry]) -> tuple[list[Run], list[bytes], list[int]]:
        """Return the runs of entries, with the headers and the time of each."""
        runs: list[Run] = []
        headers: list[bytes] = []
        times: list[int] = []
        for entry in entries:
            runs += entry.runs
            headers += [self._headers_of(entry.client, run) for run in entry.runs]
            times += [entry.when_ns] * len(entry.runs)
        return runs, headers, times

    def _records(self, entries: list[_Entry]) -> list[bytes]:
        """Return what entries are in the log, record by record."""
        return encode_runs(*self._columns(entries)).to_payloads()

    def _headers_of(self, client: str, run: Run) -> bytes:
        key = (client, run.qos, run.retain, run.forward, run.expiry)
        found = self._headers.get(key)
        if found is None:
            found = headers_for(run.qos, run.retain, client, run.forward, run.expiry)
            if len(found) <= LONGEST_HEADERS:
                if len(self._headers) >= MOST_HEADERS:
                    self._headers.clear()
                self._headers[key] = found
        return found

    def _without_doubled(self, entries: list[_Entry]) -> list[_Entry]:
        """Return what is not in the log already: QoS 2 messages that come again after a kill."""
        left = []
        for entry in entries:
            if entry.qos == 2:
                parts = [part for run in entry.runs for part in ([run] if run.count == 1 else _single(run))]
                known = [self._doubt.has(entry.client, part) for part in parts]
                if any(known):
                    fresh = [part for part, there in zip(parts, known, strict=True) if not there]
                    entry = _Entry(fresh, entry.client, entry.session, entry.ticket, entry.when_ns)
                    entry.doubled = [part.first_id for part, there in zip(parts, known, strict=True) if there]
            left.append(entry)
        return left

    # --- Durable

    def _sync(self, path: str, log: TappedLog) -> None:
        if path in self._syncing:
            return
        self._syncing.add(path)
        self._no_sync.clear()
        entries = self._unsynced.pop(path, [])
        loop = self._loop
        assert loop is not None

        def done(future: Future[Any]) -> None:
            loop.call_soon_threadsafe(self._synced, path, entries, future)

        disk_executor().submit(log.sync).add_done_callback(done)

    def _synced(self, path: str, entries: list[_Entry], future: Future[Any]) -> None:
        self._syncing.discard(path)
        exc = future.exception()
        if exc is None:
            self._done(entries)
        else:
            _log.error("%s: %s: %s", self.name, path, exc)
            for entry in entries:
                if entry.qos == 2:  # it is in the log, and may come again
                    self._doubt.add(entry.client, [one for run in entry.runs for one in _single(run)])
                self._refuse(entry)
        log = self._logs.get(path)
        if log is not None and path in self._unsynced:
            self._sync(path, log)
        elif not self._syncing:
            self._no_sync.set()

    # --- When a log cannot be written

    def _begin_trouble(self, path: str, entries: list[_Entry], last: int | None, reason: str) -> None:
        trouble = self._troubles[path] = _Trouble(reason, last)
        _log.error("%s: %s: %s", self.name, path, reason)
        self._fail(entries, trouble)
        if any(entry.qos == 2 for entry in entries):
            self._doubt_refused(path)
        self._try_later(path, trouble)

    def _doubt_refused(self, path: str) -> None:
        """Remember which of the messages that were just refused are in the log: they may come again."""
        try:
            self._doubt.learn(path, self.broker.sessions)
        except (OSError, PenstockError) as exc:  # then they may be written again
            _log.error("%s: %s: cannot see which refused messages are there: %s", self.name, path, exc)

    def _fail(self, entries: list[_Entry], trouble: _Trouble) -> None:
        rule = self.spec.on_failure
        for entry in entries:
            if rule == "block" and entry.qos < 2 and trouble.size < self.spec.max_backlog_bytes:
                self._hold(entry, trouble)
            elif rule == "drop" or entry.ticket is None:
                self._count_lost([entry], f"{rule}: {trouble.reason}" if rule != "drop" else trouble.reason)
            else:
                self._refuse(entry)

    def _hold(self, entry: _Entry, trouble: _Trouble) -> None:
        entry.runs = [run.detached() for run in entry.runs]
        trouble.backlog.append(entry)
        trouble.size += sum(run.end - run.start + 256 for run in entry.runs)
        link = entry.session.link if entry.session is not None else None
        if link is not None and link not in self._held:
            self._held.add(link)
            link.hold_reading()

    def _refuse(self, entry: _Entry) -> None:
        session = entry.session
        if entry.qos == 2 and session is not None:  # before the journal writes that they were received
            for run in entry.runs:
                self._free(session, run.first_id, run.count)
            for packet_id in entry.doubled:
                self._free(session, packet_id, 1)
        assert entry.ticket is not None
        entry.ticket.refuse(Reason.QUOTA_EXCEEDED)

    def _count_lost(self, entries: list[_Entry], reason: str) -> None:
        for entry in entries:
            count = entry.count
            self.lost[reason] = self.lost.get(reason, 0) + count
            _lost.add(count, tap=self.name, reason=reason)
            if entry.ticket is not None:
                entry.ticket.done()

    def _try_later(self, path: str, trouble: _Trouble) -> None:
        self.broker.at(self.broker.clock.monotonic() + trouble.pause, lambda: self._try_again(path))
        trouble.pause = min(trouble.pause * 2, LAST_RETRY_SECONDS)

    def _try_again(self, path: str) -> None:
        trouble = self._troubles.get(path)
        if trouble is None:
            return
        before = self._logs.pop(path, None)
        try:
            if before is not None:
                before.close()
            log = self._open(path)
            records = self._records(list(trouble.backlog))
            done = len(log.written_since(trouble.last, records))
            if done < len(records):
                log.append(records[done:])
        except OptionsError as exc:  # something waits that the log never takes; who else waits need not
            del self._troubles[path]
            self._write_fitting(path, list(trouble.backlog), trouble.last, str(exc))
        except (OSError, PenstockError, MemoryError) as exc:
            trouble.reason = str(exc)
            self._try_later(path, trouble)
            return
        else:
            del self._troubles[path]
            self._wrote(path, log, list(trouble.backlog))
        if path not in self._troubles:
            _log.warning("%s: %s can be written again", self.name, path)
        if not self._troubles:
            self._let_go()

    def _let_go(self) -> None:
        """Read again from those that were held back."""
        held, self._held = self._held, set()
        for link in held:
            link.go_on_reading()

    def _forget_ids(self) -> None:
        """Let messages come again whose ids the sessions know: a power cut took their records."""
        for session in self.broker.sessions.values():
            for first, count in ranges(session.received):
                self._free(session, first, count)

    def _free(self, session: Session, first: int, count: int) -> None:
        session.received.difference_update(range(first, first + count))
        if self.broker.journal.keeps and session.persistent:
            self.broker.journal.freed(session, first, count)

    def _close_logs(self) -> None:
        logs, self._logs = self._logs, {}
        for log in logs.values():
            log.close()


class _Notes:
    """The step behind the journal: how far the logs are that it knows of."""

    __slots__ = ("_tap",)

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def end_turn(self) -> Future[Any] | None:
        """Write the notes that are due; one that cannot be written is no harm: more is in doubt then."""
        for path, log in self._tap._logs.items():
            try:
                log.note()
            except (OSError, PenstockError) as exc:
                _log.warning("%s: %s: %s", self._tap.name, path, exc)
        return None


def _kind_of(exc: OptionsError) -> str:
    """Return why a log never takes a message, without its path and size: there are few such reasons to count by."""
    return _NUMBER.sub("…", str(exc).partition(": ")[2] or str(exc), count=1)


def _single(run: Run) -> Iterator[Run]:
    while run.count > 1:
        one, run = run.split(1)
        yield one
    yield run


def _single_runs(entry: _Entry) -> list[_Entry]:
    if len(entry.runs) == 1 or entry.ticket is not None:
        return [entry]
    return [_Entry([run], entry.client, entry.session, None, entry.when_ns) for run in entry.runs]
