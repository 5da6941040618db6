"""One connection of the broker: bytes in, bytes out.  A protocol core of penstock.net; no socket, clock or task in it.

A read is cut into runs and other packets; each run is one step.  Whatever is wrong closes this connection with the
standard's reason code, and no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.kernel.mqtt import Run, ack_run, cut
from penstock.mqtt import packets as p
from penstock.mqtt.codec import PONG, decode_body, encode
from penstock.mqtt.exchange import Answer
from penstock.mqtt.handshake import Handshake, name_of
from penstock.mqtt.outgoing import ConnectionState
from penstock.mqtt.packets import BadPacket, Kind
from penstock.mqtt.properties import encode_varint
from penstock.mqtt.reasons import Reason
from penstock.mqtt.routes import LONGEST, Plan
from penstock.mqtt.session import Session

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.net.connection import Connection

__all__ = ["Link"]

CutItem = Run | tuple[int, int, int, int]
LARGEST_CONTROL: Final = 4 << 20
"""A packet that is no PUBLISH is taken apart as a whole, piece by piece, while everybody waits."""
ALIAS_BYTES: Final = 1 << 20
"""Of topics that one connection may have aliases for."""
_OPEN: Final = ConnectionState.OPEN  # looked up once: a member of an Enum is found by way of its metaclass
_SENT_AGAIN: Final = frozenset({Kind.PUBREL, Kind.SUBSCRIBE, Kind.UNSUBSCRIBE})
_FROM_SERVERS: Final = frozenset({Kind.CONNACK, Kind.SUBACK, Kind.UNSUBACK, Kind.PINGRESP})


class Link(Handshake):
    """One connection: what its client publishes, acknowledges and asks for."""

    __slots__ = ("_alias_bytes", "_aliases_in", "_holds")

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self._aliases_in: dict[int, bytes] = {}
        self._alias_bytes = 0
        self._holds = 0

    # --- What the connection calls

    def opened(self, connection: Connection) -> None:
        """Begin."""
        self.connection = connection
        self.write = connection.write
        self.answers = self.broker.gate.answers(connection)
        self.answer, self.answers.unkept, self.answers.reader = self.answers.write, self.unkept, self
        self.address, self.identity = connection.peer.address, connection.peer.identity
        self.broker.links.add(self)
        self._counts.connections += 1
        connection.set_deadline(self.broker.options.connect_seconds, absolute=True)

    def received_any(self, data: bytes) -> None:
        """Take what one read brought, whatever it is; ``received`` of the kernel asks first whether it is plain."""
        self._short = None
        self._take_read(data)
        if self._state is _OPEN and not self._chunks and self.broker.access is None:
            self._short = self.broker.routes

    def _take_read(self, data: bytes) -> None:
        self._counts.bytes_received += len(data)
        if self._chunks:
            self._chunks.append(data)
            self._chunks_size += len(data)
            if self._chunks_size < self._chunks_need or self._state is ConnectionState.CHECKING:
                return
            data = b"".join(self._chunks)
            self._chunks = []
        if self._state is _OPEN:
            items, end, need, problem = cut(data, 0, self.version5, self._limit)
            if len(items) == 1 and end == len(data):
                run = items[0]
                if run.__class__ is Run:
                    self._counts.messages_received += run.count
                    if run.plain and self.broker.access is None:
                        self._publish_plain(run, data)
                    else:
                        self._publish(run)
                    return
            self._take_items(data, items, end, need, problem)
        elif self._state is ConnectionState.WAITING:
            self._take_first(data)
        elif self._state is ConnectionState.CHECKING:
            self._take_auth(data)

    def hold_reading(self) -> None:
        """Read nothing more for now: what this client published cannot be taken yet.  Each hold is ended once."""
        self._holds += 1
        self.connection.pause_reading()
        self.connection.set_deadline(None)  # who is not read from is not silent

    def go_on_reading(self) -> None:
        """End a hold; with the last of them the client is read again."""
        self._holds -= 1
        if not self._holds and self._state is ConnectionState.OPEN:
            self.connection.set_deadline(1.5 * self.keep_alive if self.keep_alive else None)
            self.connection.resume_reading()

    def congested(self) -> None:
        """Send no more for now."""
        if self.session is not None:
            self.session.ready = False

    def writable(self) -> None:
        """Go on with what waits."""
        if self.session is not None and self._state is ConnectionState.OPEN:
            self.session.ready = True
            self.pump()

    def expired(self) -> None:
        """Close: nothing came in time."""
        if self._state is ConnectionState.OPEN:
            self.disconnect(Reason.KEEP_ALIVE_TIMEOUT, f"nothing for {1.5 * self.keep_alive:g} s")
        else:
            self._close(f"no CONNECT within {self.broker.options.connect_seconds:g} s")

    def closed(self, reason: str) -> None:
        """Clean up."""
        self.broker.links.discard(self)
        self._state = ConnectionState.CLOSED
        self._leave(reason)

    # --- Cutting

    def _take(self, data: bytes) -> None:
        self._take_items(data, *cut(data, 0, self.version5, self._limit))

    def _take_items(
        self, data: bytes, items: list[CutItem], end: int, need: int, problem: tuple[int, int, str] | None
    ) -> None:
        counts = self._counts
        if len(items) > 2:
            items = self._take_streaks(items)
        for item in items:
            if isinstance(item, Run):
                counts.messages_received += item.count
                self._publish(item)
            else:
                kind, flags, first, last = item
                if flags < 0:
                    counts.messages_received += last
                    self._acks(kind, first, last)
                else:
                    counts.messages_received += 1
                    self._other(kind, flags, data, first, last)
            if self._state is not ConnectionState.OPEN:
                return
        if problem is not None:
            code, kind, text = problem
            if self.version == 3 and kind in _SENT_AGAIN and data[end] & 0x0F == 0x0A:
                # MQTT 3.1 marks what is sent again; later versions know DUP for PUBLISH only.
                self._take(bytes([data[end] & 0xF7]) + data[end + 1 :])
                return
            self.disconnect(code, f"{name_of(kind)}: {text}")
        elif need > LARGEST_CONTROL and data[end] >> 4 != Kind.PUBLISH:
            self.disconnect(Reason.QUOTA_EXCEEDED, f"{name_of(data[end] >> 4)} of {need} bytes")
        elif end < len(data):
            self._keep(data[end:] if end else data, need)

    def _take_streaks(self, items: list[CutItem]) -> list[CutItem]:
        """Deliver runs of QoS 0 from the front that go to the same sessions in one piece; return what is left.

        A publisher with many topics is as fast as one with a single topic where its messages have the same receivers.
        """
        session, broker, find = self.session, self.broker, self.broker.routes.find
        assert session is not None
        count = payload = at = 0
        guarded = broker.access is not None
        streak: list[Run] = []
        plan: Plan | None = None
        for run in items:
            if not isinstance(run, Run) or not run.plain:
                break
            found = find(run.topic)
            if not found.plain or (guarded and not self._may_publish(session, run.topic)):
                break
            if found is not plan:
                if streak and plan is not None:
                    self._deliver_streak(plan, streak)
                    streak = []
                plan = found
            streak.append(run)
            count += run.count
            payload += run.payload_bytes
            at += 1
        if streak and plan is not None:
            self._deliver_streak(plan, streak)
        counts = self._counts
        counts.messages_received += count
        counts.publish_received += count
        counts.publish_bytes_received += payload
        return items[at:]

    def _deliver_streak(self, plan: Plan, streak: list[Run]) -> None:
        if plan.taps:
            self.broker.copy(plan.taps, streak, self.session)
        self.broker.deliver_streak(plan, streak)

    # --- What a client publishes

    def _publish_plain(self, run: Run, data: bytes) -> None:
        counts, broker = self._counts, self.broker
        counts.publish_received += run.count
        counts.publish_bytes_received += run.payload_bytes
        plan = broker.routes.find(run.topic)
        if plan.plain:
            if plan.taps:
                broker.copy(plan.taps, [run], self.session)
            broker.deliver_plain(plan, run, data)
        else:
            broker.publish(run, self.session)

    def _publish(self, run: Run) -> None:
        broker, session = self.broker, self.session
        assert session is not None
        if (run.alias or not run.topic) and not self._resolve(run):
            return
        counts = self._counts
        counts.publish_received += run.count
        counts.publish_bytes_received += run.payload_bytes
        if run.expiry >= 0:
            run.deadline = broker.clock.monotonic() + run.expiry
        if run.retain and not self._can_retain(run):
            return
        if run.qos == 0:
            if run.retain and not broker.options.retain_available:
                self.disconnect(Reason.RETAIN_NOT_SUPPORTED, "retain")
            elif self._may_publish(session, run.topic):
                broker.publish(run, session)
            else:
                broker.count_drop("not authorized", run.count)
            return
        self._publish_acknowledged(run, session)

    def _can_retain(self, run: Run) -> bool:
        """Whether a message is one that can be kept under its topic; who sends another is told."""
        options = self.broker.options
        if not self.broker.journal.can_retain(run):
            size = len(run.topic) + run.longest + len(run.forward)
            self.disconnect(Reason.PACKET_TOO_LARGE, f"{size} bytes are too many to be retained")
        elif not self.broker.is_retainable(run.topic):
            self.disconnect(Reason.TOPIC_NAME_INVALID, f"more than {options.max_topic_levels} levels to be retained")
        else:
            return True
        return False

    def _publish_acknowledged(self, run: Run, session: Session) -> None:
        broker, options = self.broker, self.broker.options
        if run.qos > options.maximum_qos:
            self.disconnect(Reason.QOS_NOT_SUPPORTED, f"QoS {run.qos}")
            return
        if run.retain and not options.retain_available:
            self.disconnect(Reason.RETAIN_NOT_SUPPORTED, "retain")
            return
        if broker.journal.full:
            self._not_now(run)
            return
        if run.qos == 2:
            self._publish_exactly_once(run, session)
            return
        reason: int = Reason.NOT_AUTHORIZED
        if self._may_publish(session, run.topic):
            reason = broker.publish(run, session, acknowledged=True)
        if broker.gate.waits:
            self._acknowledge_publish(0x40, run.first_id, run.count, reason if self.version5 else 0)
        else:
            self._acknowledge(0x40, run.first_id, run.count, reason if self.version5 else 0)

    def _publish_exactly_once(self, run: Run, session: Session) -> None:
        broker = self.broker
        received = session.received
        ids = range(run.first_id, run.first_id + run.count)
        if not received.isdisjoint(ids):
            # MQTT-4.3.3-10: the same id before PUBREL is the same message; PUBREC again, and no second delivery.
            if run.count > 1:
                head, tail = run.split(1)
                self._publish_exactly_once(head, session)
                if self._state is ConnectionState.OPEN:
                    self._publish_exactly_once(tail, session)
            else:
                self._acknowledge_publish(0x50, run.first_id, 1, 0, session.open_tickets(run.first_id))
            return
        if len(received) + run.count > broker.options.receive_maximum and self.version5:
            self.disconnect(Reason.RECEIVE_MAXIMUM_EXCEEDED, f"more than {broker.options.receive_maximum} at once")
            return
        reason: int = Reason.NOT_AUTHORIZED
        if self._may_publish(session, run.topic):
            reason = broker.publish(run, session, acknowledged=True)
        if reason < 0x80 or not self.version5:
            received.update(ids)
            if broker.journal.keeps and session.persistent:
                broker.journal.took(session, run.first_id, run.count)
        self._acknowledge_publish(0x50, run.first_id, run.count, reason if self.version5 else 0)

    def _not_now(self, run: Run) -> None:
        """Take nothing that could not be kept: version 5 is told so, the others are closed without an answer."""
        self.broker.count_drop("disk", run.count)
        if self.version5:
            self._counts.messages_sent += run.count
            self.write(ack_run(0x40 if run.qos == 1 else 0x50, run.first_id, run.count, Reason.QUOTA_EXCEEDED))
        else:
            self.unkept()

    def _resolve(self, run: Run) -> bool:
        """Turn a topic alias into its topic; return whether that worked."""
        if run.alias > self.broker.options.topic_alias_maximum:
            self.disconnect(Reason.TOPIC_ALIAS_INVALID, f"topic alias {run.alias}")
            return False
        if run.topic:
            self._alias_bytes += len(run.topic) - len(self._aliases_in.get(run.alias, b""))
            if self._alias_bytes > ALIAS_BYTES:
                self.disconnect(Reason.QUOTA_EXCEEDED, f"topic aliases for more than {ALIAS_BYTES} bytes of topics")
                return False
            self._aliases_in[run.alias] = run.topic
            return True
        topic = self._aliases_in.get(run.alias) if run.alias else None
        if topic is None:
            self.disconnect(Reason.PROTOCOL_ERROR, "a topic alias that stands for nothing" if run.alias else "no topic")
            return False
        run.topic = topic
        return True

    def _may_publish(self, session: Session, topic: bytes) -> bool:
        if topic[:1] == b"$" and topic[:5] == b"$SYS/":
            return False
        if self.broker.access is None:
            return True
        allowed = session.permits.get(topic)
        if allowed is None:
            allowed = self.broker.may(session, "publish", topic.decode())
            if len(topic) <= LONGEST:
                if len(session.permits) >= 1024:
                    session.permits.clear()
                session.permits[topic] = allowed
        return allowed

    # --- What a client acknowledges

    def _acks(self, kind: int, first: int, count: int) -> None:
        session, broker = self.session, self.broker
        assert session is not None
        if kind == Kind.PUBREL:
            self._release(session, first, count)
            return
        exchange = session.exchange
        if kind == Kind.PUBACK:
            parts = exchange.acked(first, count)
        elif kind == Kind.PUBREC:
            parts = exchange.received(first, count)
        else:
            parts = exchange.completed(first, count)
        keeps = broker.journal.keeps and session.persistent
        for answer, start, some in parts:
            if answer is Answer.DONE:
                self.outstanding -= some
                if keeps:
                    broker.journal.done(session, start, some)
            elif answer is Answer.RELEASE:
                if keeps:
                    broker.journal.released(session, start, some)
                self._acknowledge(0x62, start, some)
            elif answer is Answer.WRONG:
                self.disconnect(Reason.PROTOCOL_ERROR, f"{Kind(kind).name} of packet {start} out of turn")
                return
            elif kind == Kind.PUBREC:
                self._acknowledge(0x62, start, some, Reason.PACKET_ID_NOT_FOUND if self.version5 else 0)
        if session.resend is not None:
            self.count_outstanding(session, session.resend)
            self.pump()
        elif session.queue or session.replays:
            self.pump()

    def _release(self, session: Session, first: int, count: int) -> None:
        """PUBREL: always answered; an unknown id is said in version 5 (MQTT-4.3.3-11)."""
        received = session.received
        ids = range(first, first + count)
        if session.unsettled:
            session.unsettled.forget(ids)
        if received.issuperset(ids) or not self.version5:
            received.difference_update(ids)
            if self.broker.journal.keeps and session.persistent:
                self.broker.journal.freed(session, first, count)
            self._acknowledge(0x70, first, count)
            return
        for packet_id in ids:
            known = packet_id in received
            received.discard(packet_id)
            if known and self.broker.journal.keeps and session.persistent:
                self.broker.journal.freed(session, packet_id, 1)
            self._acknowledge(0x70, packet_id, 1, 0 if known else Reason.PACKET_ID_NOT_FOUND)

    def _ack(self, packet: p.Ack) -> None:
        """Take an acknowledgement with a reason code or properties, which only version 5 has."""
        session = self.session
        assert session is not None
        if packet.reason < 0x80 or packet.kind in (Kind.PUBREL, Kind.PUBCOMP):
            self._acks(packet.kind, packet.packet_id, 1)
            return
        if session.exchange.refused(packet.packet_id) is Answer.DONE:
            self.outstanding -= 1
            if session.resend is not None:
                self.count_outstanding(session, session.resend)
            if self.broker.journal.keeps and session.persistent:
                self.broker.journal.done(session, packet.packet_id, 1, "refused by its receiver")
        self.pump()

    # --- Everything else a client says

    def _other(self, kind: int, flags: int, data: bytes, start: int, end: int) -> None:
        if kind == Kind.PINGREQ and start == end:
            self._count_packet(PONG)
            self.write(PONG)
            return
        if kind in _FROM_SERVERS:
            self.disconnect(Reason.PROTOCOL_ERROR, f"{Kind(kind).name} from a client")
            return
        try:
            packet = decode_body(kind, flags, data, start, end, self.version)
        except BadPacket as exc:
            self.disconnect(exc.code, f"{exc.packet}: {exc.reason}")
            return
        match packet:
            case p.Subscribe():
                self._subscribe(packet)
            case p.Unsubscribe():
                self._unsubscribe(packet)
            case p.Ack():
                self._ack(packet)
            case p.Disconnect():
                self._disconnected(packet)
            case p.Auth():
                self._auth(packet)
            case _:
                self.disconnect(Reason.PROTOCOL_ERROR, f"{Kind(kind).name} from a client")

    def _subscribe(self, packet: p.Subscribe) -> None:
        session = self.session
        assert session is not None
        if not self._has_room_for(len(packet.filters)):
            return
        identifier = packet.properties.subscription_ids[0] if packet.properties.subscription_ids else 0
        if any(each.no_local and each.filter.startswith("$share/") for each in packet.filters):
            self.disconnect(Reason.PROTOCOL_ERROR, "SUBSCRIBE: no local on a shared subscription")  # MQTT-3.8.3-4
            return
        filters = packet.filters
        if self._bridge:
            as_bridge = {"no_local": True, "retain_as_published": True}
            filters = tuple(
                each if each.filter.startswith("$share/") else msgspec.structs.replace(each, **as_bridge)
                for each in filters
            )
        reasons = [self.broker.subscribe(session, each, identifier) for each in filters]
        if not self.version5:
            reasons = [min(reason, 0x80) for reason in reasons]
        self._send(p.Suback(packet.packet_id, tuple(reasons)), kept=session.persistent and min(reasons) < 0x80)
        self.pump()

    def _has_room_for(self, codes: int) -> bool:
        """Whether the client takes an answer with so many codes (MQTT-3.1.2-24); if not, it is told so."""
        if codes + 8 <= self._packet_limit or codes + 4 + len(encode_varint(codes + 3)) <= self._packet_limit:
            return True
        self.disconnect(Reason.PACKET_TOO_LARGE, f"{codes} filters, whose answer is larger than the client takes")
        return False

    def _unsubscribe(self, packet: p.Unsubscribe) -> None:
        session = self.session
        assert session is not None
        if not self._has_room_for(len(packet.filters)):
            return
        if self.broker.journal.trouble and session.persistent:
            if not self.version5:
                self.unkept()
                return
            self.write(encode(p.Unsuback(packet.packet_id, (int(Reason.UNSPECIFIED),) * len(packet.filters)), 5))
            return
        reasons = tuple(int(self.broker.unsubscribe(session, name)) for name in packet.filters)
        self._send(p.Unsuback(packet.packet_id, reasons), kept=session.persistent)

    def _disconnected(self, packet: p.Disconnect) -> None:
        session = self.session
        assert session is not None
        expiry = packet.properties.session_expiry
        if expiry is not None:
            if expiry and not self._expiry_at_connect:
                self.disconnect(Reason.PROTOCOL_ERROR, "a session expiry where there was none")
                return
            session.expiry = min(expiry, self.broker.options.max_session_expiry)
        self._normal = packet.reason == 0
        self._close("the client disconnected")
