"""What goes to one client: runs in the form it needs, within its window and its packet size; and how it is sent away.

The lowest layer of a connection of the broker; ``handshake`` and ``link`` stand on it.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError
from penstock.kernel.mqtt import Run, ack_run
from penstock.kernel.mqttrelay import Sink
from penstock.mqtt import packets as p
from penstock.mqtt.codec import LARGEST, encode
from penstock.mqtt.exchange import Flight
from penstock.mqtt.gate import Answers, Ticket
from penstock.mqtt.packets import Properties
from penstock.mqtt.properties import encode_varint
from penstock.mqtt.reasons import Reason
from penstock.mqtt.session import Session, Waiting

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.journal import Stored
    from penstock.net.connection import Connection

__all__ = ["Outgoing", "ConnectionState"]

_log = logging.getLogger(__name__)

LATER_SECONDS: Final = (0.001, 1.0)
"""When retained messages go on after a turn that had enough to write, and on a disk that is full."""


class ConnectionState(enum.Enum):
    """Where a connection is in its life."""

    WAITING = "waiting for CONNECT"
    CHECKING = "checking credentials"
    OPEN = "open"
    CLOSED = "closed"


class Outgoing(Sink):
    """The sending half of a connection.  ``write`` is the connection's own; ``answer`` goes through the gate."""

    __slots__ = (
        "__weakref__",
        "_aliases_out",
        "_normal",
        "_packet_limit",
        "_problems",
        "_quota",
        "_state",
        "_will_pump",
        "address",
        "alias_maximum",
        "answer",
        "answers",
        "broker",
        "client_id",
        "connection",
        "outstanding",
        "session",
        "version",
    )

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.connection: Connection
        self.write: Callable[[bytes | memoryview], None]
        self.answers: Answers
        self.answer: Callable[[bytes], None]
        self.session: Session | None = None
        self.address, self.client_id = "", ""
        self.version, self.version5 = 4, False
        self.plain_payload = LARGEST
        """Payloads below this need no look at the client's maximum packet size and topic aliases."""
        self.outstanding = 0
        self.alias_maximum = 0
        self._aliases_out: dict[bytes, tuple[int, bool]] = {}
        """Topic → its alias, and whether that was said in a packet that did not wait at the gate."""
        self._counts = broker.counts
        self._state = ConnectionState.WAITING
        self._packet_limit = LARGEST
        self._quota = 0
        self._normal = self._will_pump = False
        self._problems = True

    def sent(self, count: int, payload_bytes: int, size: int) -> None:
        """Count messages that left."""
        counts = self._counts
        counts.messages_sent += count
        counts.publish_sent += count
        counts.publish_bytes_sent += payload_bytes
        counts.bytes_sent += size

    def send_at_most_once(self, run: Run, retain: bool, identifiers: bytes) -> None:
        """Send a run of QoS 0 in the form this client needs."""
        session = self.session
        assert session is not None
        if run.longest < self.plain_payload:  # it fits, whatever its topic and properties are
            _, properties = self._head(run, identifiers, waits=False) if self.version5 else (b"", b"")
            data = run.frames(self.version5, int(retain), run.topic, properties, 0)
            self.write(data)
            session.delivered += run.count
            self.sent(run.count, run.payload_bytes, len(data))
            return
        for part, _ in self._fitting(run, 0, session, identifiers, False):
            topic, properties = self._head(part, identifiers, waits=False)
            data = part.frames(self.version5, int(retain), topic, properties, 0)
            self.write(data)
            session.delivered += part.count
            self.sent(part.count, part.payload_bytes, len(data))

    def send(
        self,
        run: Run,
        qos: int,
        retain: bool,
        identifiers: bytes,
        stored: Stored | None = None,
        start: int = 0,
        *,
        since: float | None = None,
    ) -> int:
        """Send a run of QoS 1 or 2 as far as the client's window goes; the rest waits.  Return how many were taken.

        ``since`` is given where these messages were the first that waited: how long they have.
        """
        session = self.session
        assert session is not None
        queued = since is not None
        broker, taken = self.broker, run.count
        keeps = broker.journal.keeps and session.expiry > 0
        if keeps and stored is None:
            stored = broker.journal.store(run)
        if self._packet_limit == LARGEST and taken <= self.room(session):  # the way it nearly always is
            flight, unnumbered = session.exchange.begin(run, qos, retain, identifiers, stored, start)
            if keeps:
                broker.journal.sent(session, flight, queued)
            self._transmit(flight, dup=False)
            if unnumbered is None:
                return taken
            run, start = unnumbered, start + flight.count
        since = broker.clock.monotonic() if since is None else since
        parts = deque(
            [(run, start)] if self._packet_limit == LARGEST else self._fitting(run, start, session, identifiers)
        )
        if keeps and (missing := run.count - sum(part.count for part, _ in parts)):
            broker.journal.lost(session, missing, "packet too large", fresh=not queued)
        while parts:
            part, start = parts.popleft()
            room = self.room(session)
            if room <= 0 and queued:  # they are the first that wait, and stay it
                for rest, at in reversed([(part, start), *parts]):
                    session.put_back(Waiting(rest, qos, retain, identifiers, stored, at, since))
                return taken
            if room <= 0:
                waiting = Waiting(part, qos, retain, identifiers, stored, start, since)
                taken -= part.count - broker.enqueue(session, waiting)
                continue
            if room < part.count:
                part, rest = part.split(room)
                parts.appendleft((rest, start + room))
            flight, unnumbered = session.exchange.begin(part, qos, retain, identifiers, stored, start)
            if unnumbered is not None:
                parts.appendleft((unnumbered, start + flight.count))
            if keeps:
                broker.journal.sent(session, flight, queued)
            self._transmit(flight, dup=False)
        return taken

    def hold_reading(self) -> None:
        """Read nothing more until each hold has ended."""
        raise NotImplementedError

    def go_on_reading(self) -> None:
        """End a hold."""
        raise NotImplementedError

    def pump(self) -> None:
        """Send what waits: first what was under way before, then retained messages, then the queue."""
        session = self.session
        if session is None or self._state is not ConnectionState.OPEN:
            return
        while session.resend is not None and session.ready:
            room = self._quota - self.outstanding
            if room <= 0:
                return
            flight = session.exchange.next_from(session.resend, room)
            session.resend = None if flight is None else flight.number + flight.count
            if flight is not None:
                self._transmit(flight, dup=True)
        if session.replays:
            self._replay(session)
        while session.queue and session.ready and session.resend is None and self.room(session) > 0:
            waiting = session.dequeue()
            if self.broker.drop_if_late(session, waiting):
                continue
            run = waiting.run
            if run is None:
                assert waiting.stored is not None
                try:
                    whole = self.broker.journal.load(waiting.stored)
                except BaseException:  # the disk may give it another time; this connection ends
                    session.put_back(waiting)
                    raise
                if whole is None:
                    self.broker.count_drop("damaged", waiting.count)
                    self.broker.journal.consumed(session, waiting.stored, waiting.start + waiting.count)
                    self.broker.journal.lost(session, waiting.count, "damaged")
                    continue
                run = waiting.run_from(whole)
            if not self._may_receive(session, run):
                self.broker.drop(session, run, "not authorized", waiting.count)
                if waiting.stored is not None:
                    self.broker.journal.consumed(session, waiting.stored, waiting.start + waiting.count)
                    self.broker.journal.lost(session, waiting.count, "not authorized")
                continue
            room = self.room(session)
            if room < waiting.count:
                waiting, rest = waiting.split(room)
                session.put_back(rest)
                run = run.split(room)[0]
            self.send(
                run, waiting.qos, waiting.retain, waiting.identifiers, waiting.stored, waiting.start,
                since=waiting.since,
            )  # fmt: skip
            first = session.queue[0] if session.queue else None
            back = first is not None and first.stored is waiting.stored and first.start < waiting.start + waiting.count
            if self._packet_limit != LARGEST and waiting.stored is not None and not back:  # some were too large, maybe
                self.broker.journal.consumed(session, waiting.stored, waiting.start + waiting.count)

    def count_outstanding(self, session: Session, resend: int) -> None:
        """Count anew what is unacknowledged: a client may acknowledge what it had before it is sent again."""
        self.outstanding = session.exchange.count_before(resend)

    def _replay(self, session: Session) -> None:
        """Send retained messages as far as the client's window and its connection go."""
        room, journal = self.room(session), self.broker.journal
        keeps = journal.keeps and session.persistent
        while session.replays and session.ready and room > 0:
            if keeps and (journal.full or journal.crowded):  # a turn that finds no room would keep everything back
                self._pump_later(LATER_SECONDS[bool(journal.full)])
                return
            found = next(session.replays[0], None)
            if found is None:
                session.replays.pop(0)
                continue
            run, qos, identifiers = found
            if qos:
                self.send(run, qos, True, identifiers)
                room = self.room(session)
            else:
                self.send_at_most_once(run, True, identifiers)

    def _pump_later(self, seconds: float) -> None:
        if not self._will_pump:
            self._will_pump = True
            self.broker.at(self.broker.clock.monotonic() + seconds, self._pump_now)

    def _pump_now(self) -> None:
        self._will_pump = False
        try:
            self.pump()
        except Exception as exc:  # noqa: BLE001 - nobody else ends a connection after a fault here
            _log.error("%s: cannot go on after a fault", self.client_id, exc_info=exc)
            self.connection.abort(f"a fault: {type(exc).__name__}: {exc}")

    def room(self, session: Session) -> int:
        """Return how many messages may be sent before more are acknowledged."""
        if not session.ready or session.exchange.size >= (self.broker.options.max_queued_bytes or 1):
            return 0
        return min(self._quota - self.outstanding, 65535 - session.exchange.messages)

    def _transmit(self, flight: Flight, *, dup: bool) -> None:
        self.outstanding += flight.count
        run = flight.run
        if run is None:
            if flight.stored is None:  # released
                self._acknowledge(0x62, flight.first, flight.count)
                return
            whole = self.broker.journal.load(flight.stored)
            if whole is None:
                self._lose(flight)
                return
            run = flight.run_from(whole)
        elif flight.stored is not None:
            flight.run = None  # the journal has it
        if dup and self.session is not None and not self._may_receive(self.session, run):
            self._lose(flight, "not authorized", run)
            return
        if dup and not self._fits(run, flight.identifiers):
            self._transmit_in_halves(flight, run)
            return
        topic, properties = self._head(run, flight.identifiers, waits=True)
        flags = dup << 3 | flight.qos << 1 | flight.retain
        data = run.frames(self.version5, flags, topic, properties, flight.first)
        self.answer(data)
        if self.session is not None and not dup:
            self.session.delivered += flight.count
        self.sent(flight.count, run.payload_bytes, len(data))

    def _transmit_in_halves(self, flight: Flight, run: Run) -> None:
        """Send again what the client takes now of messages of which some are too large for it."""
        if flight.count == 1:
            self._lose(flight, "packet too large", run)
            return
        session = self.session
        assert session is not None
        self.outstanding -= flight.count
        for number, count in ((flight.number, flight.count // 2), (flight.number + flight.count // 2, flight.count)):
            part = session.exchange.next_from(number, count)
            assert part is not None
            self._transmit(part, dup=True)

    def _may_receive(self, session: Session, run: Run) -> bool:
        """Whether what waited, or was under way, may still be delivered: rules and users change meanwhile."""
        broker = self.broker
        return broker.access is None or broker.may(session, "receive", run.topic.decode())

    def _lose(self, flight: Flight, reason: str = "damaged", run: Run | None = None) -> None:
        """Forget messages under way that cannot be sent again."""
        session = self.session
        assert session is not None
        self.outstanding -= flight.count
        if run is None:
            self.broker.count_drop(reason, flight.count)
        else:
            self.broker.drop(session, run, reason, flight.count)
        session.exchange.replay(flight.first, flight.count, done=True)
        self.broker.journal.done(session, flight.first, flight.count, reason)

    def _head(self, run: Run, identifiers: bytes, *, waits: bool) -> tuple[bytes, bytes]:
        """Return the topic and the properties that go before a payload; ``waits``: it leaves through the gate.

        What leaves at once overtakes what waits at the gate, so there an alias stands for nothing that was said behind
        the gate only.
        """
        topic = run.topic
        if not self.version5:
            return topic, b""
        properties = identifiers + run.forward if identifiers else run.forward
        if run.expiry >= 0:
            left = max(0, round(run.deadline - self.broker.clock.monotonic()))  # MQTT-3.3.2-6
            properties = b"\x02" + min(left, run.expiry).to_bytes(4, "big") + properties
        if self.alias_maximum:
            alias, at_once = self._aliases_out.get(topic, (0, False))
            if not alias and len(self._aliases_out) < self.alias_maximum:
                alias = len(self._aliases_out) + 1
            elif alias and (at_once or waits):
                topic = b""
            if alias:
                if topic:
                    self._aliases_out[topic] = (alias, not waits)
                properties = b"\x23" + alias.to_bytes(2, "big") + properties
        return topic, properties

    def _fitting(
        self, run: Run, start: int, session: Session, identifiers: bytes, numbered: bool = True
    ) -> list[tuple[Run, int]]:
        """Return the messages that the client's maximum packet size allows; the others count as delivered.

        With each run comes where it begins, counted from ``start``.
        """
        if self._fits(run, identifiers, numbered):
            return [(run, start)]
        if run.count == 1:
            self.broker.drop(session, run, "packet too large")
            return []
        half, rest = run.split(run.count // 2)
        return [
            *self._fitting(half, start, session, identifiers, numbered),
            *self._fitting(rest, start + half.count, session, identifiers, numbered),
        ]

    def _fits(self, run: Run, identifiers: bytes, numbered: bool = True) -> bool:
        """Whether each message of a run is a packet that the client takes."""
        if self._packet_limit == LARGEST:
            return True
        properties = (
            len(run.forward) + len(identifiers) + (5 if run.expiry >= 0 else 0) + (3 if self.alias_maximum else 0)
        )
        body = 2 + len(run.topic) + (2 if numbered else 0) + run.longest
        if self.version5:
            body += len(encode_varint(properties)) + properties
        return 1 + len(encode_varint(body)) + body <= self._packet_limit

    def _acknowledge(self, first: int, packet_id: int, count: int, reason: int = 0) -> None:
        self._counts.messages_sent += count
        data = ack_run(first, packet_id, count, reason)
        self._counts.bytes_sent += len(data)
        self.answer(data)

    def _acknowledge_publish(
        self, first: int, packet_id: int, count: int, reason: int, also: Sequence[Ticket] = ()
    ) -> None:
        """Acknowledge what the client published, when everything has it that must."""
        if not self.broker.gate.waits:
            self._acknowledge(first, packet_id, count, reason)
            return
        self._counts.messages_sent += count
        data = ack_run(first, packet_id, count, reason)
        self._counts.bytes_sent += len(data)
        session = self.session
        tickets = self.answers.acknowledge(
            data, lambda code: self._refuse_publish(session, first, packet_id, count, code, tickets), also
        )
        if tickets and first == 0x50 and session is not None:
            session.note_unsettled(range(packet_id, packet_id + count), tickets)

    def _refuse_publish(
        self, session: Session | None, first: int, packet_id: int, count: int, reason: int, tickets: list[Ticket]
    ) -> None:
        """Tell that a publish was not kept: version 5 has a reason code, the others are closed without an answer.

        Its id is free also where the client is gone: it had no answer, and sends the message again.
        """
        broker = self.broker
        if first == 0x50 and session is not None and broker.sessions.get(session.client_id) is session:
            unsettled, ids = session.unsettled, range(packet_id, packet_id + count)
            for freed in unsettled.forget_refused(ids, tickets) if unsettled else ():  # not what has come anew since
                session.received.difference_update(freed)
                if broker.journal.keeps and session.persistent:
                    broker.journal.freed(session, freed.start, len(freed))
        if self.session is None or self._state is not ConnectionState.OPEN:
            return
        if self.version5:
            self.connection.write(ack_run(first, packet_id, count, reason))  # its turn has come: nothing overtakes it
        else:
            self.disconnect(reason, "what it published could not be kept")

    def _send(self, packet: p.Packet, *, kept: bool = True) -> None:
        """Send an answer; ``kept`` says whether it promises something that is."""
        data = encode(packet, self.version)
        if len(data) > self._packet_limit:  # MQTT-3.1.2-24
            self.disconnect(Reason.PACKET_TOO_LARGE, f"an answer of {len(data)} bytes")
            return
        self._count_packet(data)
        if kept:
            self.answer(data)
        else:
            self.answers.tell(data)

    def _count_packet(self, data: bytes) -> None:
        self._counts.messages_sent += 1
        self._counts.bytes_sent += len(data)

    # --- Going out

    def taken_over(self) -> None:
        """Another connection has this client id (MQTT-3.1.4-3); over that one comes again what has no answer yet."""
        self.disconnect(Reason.SESSION_TAKEN_OVER, "another connection has this client id", at_once=True)

    def disconnect(self, reason: int, why: str, *, at_once: bool = False) -> None:
        """Say why, where the version allows it, and close; ``at_once``: also while publishes wait for a ticket."""
        if self._state is ConnectionState.CLOSED:
            return
        farewell = b""
        if self.version5 and self._state is ConnectionState.OPEN and self._packet_limit >= 3:
            farewell = self._farewell(reason, why)
            self._count_packet(farewell)
            if not at_once:
                self.answers.tell(farewell)
        name = Reason(reason).name.lower()
        _log.info("%s (%s) is disconnected: %s", self.client_id or "?", self.address, why)
        self._counts.refused[name] = self._counts.refused.get(name, 0) + 1
        if at_once:
            self._state = ConnectionState.CLOSED
            self._leave(why)
            self.answers.close_with(farewell, why)
        else:
            self._close(why)

    def _farewell(self, reason: int, why: str) -> bytes:
        """Return DISCONNECT; its words only where the client wants to hear them and has room."""
        if self._problems and self.broker.options.reason_strings:
            packet = encode(p.Disconnect(reason, Properties(reason_string=why)), 5)
            if len(packet) <= self._packet_limit:
                return packet
        return encode(p.Disconnect(reason), 5)

    def unkept(self) -> None:
        """End the connection at once and without an acknowledgement: what it published could not be written."""
        if self._state is ConnectionState.OPEN and self.version5:
            self.connection.write(self._farewell(Reason.QUOTA_EXCEEDED, "the disk does not take it"))
        self._counts.refused["unkept"] = self._counts.refused.get("unkept", 0) + 1
        self._state = ConnectionState.CLOSED
        self._leave("what it published could not be kept")
        self.connection.close("what it published could not be kept")

    def _close(self, why: str) -> None:
        self._state = ConnectionState.CLOSED
        self._leave(why)
        self.answers.close(why)

    def _leave(self, reason: str) -> None:
        session, self.session, self._short = self.session, None, None
        if session is not None:
            _log.debug("%s is gone: %s", self.client_id, reason)
            try:
                self.broker.detach(self, session, normal=self._normal)
            except PenstockError:
                _log.exception("%s could not be detached", self.client_id)
