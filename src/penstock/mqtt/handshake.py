"""How a client comes in: CONNECT, credentials, enhanced authentication, CONNACK.

waiting ── CONNECT ──► checking ── let in ──► open
└── AUTH ⇄ AUTH ──┘
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import Refused
from penstock.kernel.mqtt import Run, cut
from penstock.mqtt import packets as p
from penstock.mqtt.access import Conversation, Verdict
from penstock.mqtt.codec import LARGEST, decode_body, encode
from penstock.mqtt.dispatch import run_of
from penstock.mqtt.outgoing import ConnectionState, Outgoing
from penstock.mqtt.packets import BadPacket, Kind, Properties
from penstock.mqtt.reasons import CONNACK_3, Reason
from penstock.mqtt.session import Session

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["Handshake"]

_log = logging.getLogger(__name__)


class Handshake(Outgoing):
    """A connection until its client is let in, and AUTH afterwards."""

    __slots__ = (
        "_bridge",
        "_chunks",
        "_chunks_need",
        "_chunks_size",
        "_connect",
        "_conversation",
        "_expiry_at_connect",
        "_method",
        "_wrote_behind",
        "identity",
        "keep_alive",
    )

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.identity: str | None = None
        self.keep_alive = 0
        self._limit = broker.options.max_packet_bytes
        self._expiry_at_connect = 0
        self._wrote_behind = False
        self._bridge = False
        self._chunks: list[bytes] = []
        self._chunks_size = self._chunks_need = 0
        self._connect: p.Connect | None = None
        self._method: str | None = None
        self._conversation: Conversation | None = None

    def _take(self, data: bytes) -> None:
        raise NotImplementedError

    def _keep(self, rest: bytes, need: int) -> None:
        self._chunks = [rest]
        self._chunks_size, self._chunks_need = len(rest), need

    def _take_first(self, data: bytes) -> None:
        if data[0] >> 4 != Kind.CONNECT:
            self._close(f"{name_of(data[0] >> 4)} before CONNECT")
            return
        items, end, need, problem = cut(data, 0, False, min(self._limit, 1 << 20), 1)
        if problem is not None:
            self._close(problem[2])
            return
        if not items:
            self._keep(data, need)
            return
        item = items[0]
        assert isinstance(item, tuple)
        self._counts.messages_received += 1
        try:
            packet = decode_body(*item[:2], data, item[2], item[3], 4)
        except BadPacket as exc:
            self._bad_connect(exc, data)
            return
        assert isinstance(packet, p.Connect)
        if end < len(data):
            self._keep(data[end:], 0)
        self._begin(packet)

    def _bad_connect(self, exc: BadPacket, data: bytes) -> None:
        """Say why where a client could understand it (MQTT-3.1.2-2), and close."""
        if exc.code == Reason.UNSUPPORTED_PROTOCOL_VERSION and exc.reason.startswith("protocol level"):
            level = int(exc.reason.rpartition(" ")[2])
            self.write(b"\x20\x03\x00\x84\x00" if level > 5 else b"\x20\x02\x00\x01")
        elif exc.code != Reason.UNSUPPORTED_PROTOCOL_VERSION and b"MQTT\x05" in data[:16]:
            self.write(encode(p.Connack(False, exc.code), 5))
        self._count_refused(exc.code)
        self._close(exc.reason)

    def _begin(self, packet: p.Connect) -> None:
        self.version, self.version5, self._bridge = packet.version, packet.version == 5, packet.bridge
        self._connect = packet
        self.client_id = packet.client_id
        self._packet_limit = packet.properties.maximum_packet_size or LARGEST
        self._problems = packet.properties.request_problem != 0
        broker, options = self.broker, self.broker.options
        reason = Reason.SUCCESS
        if broker.closing:
            reason = Reason.SERVER_SHUTTING_DOWN
        elif (not packet.client_id and (packet.version == 3 or (packet.version == 4 and not packet.clean))) or (
            len(packet.client_id.encode()) > options.max_client_id_bytes
        ):
            reason = Reason.CLIENT_ID_NOT_VALID
        elif packet.will is not None and packet.will.qos > options.maximum_qos:
            reason = Reason.QOS_NOT_SUPPORTED
        elif packet.will is not None and packet.will.retain and not options.retain_available:
            reason = Reason.RETAIN_NOT_SUPPORTED
        elif packet.will is not None and packet.will.retain and not self._can_retain_will(run_of(packet.will)):
            reason = Reason.TOPIC_NAME_INVALID
        elif broker.journal.full and self._needs_keeping(packet) and not self._makes_room(packet):
            reason = Reason.QUOTA_EXCEEDED
        if reason:
            self._refuse(reason)
            return
        self._state = ConnectionState.CHECKING
        method = packet.properties.authentication_method
        if method is not None:
            chosen = broker.methods.get(method)
            if chosen is None:
                self._refuse(Reason.BAD_AUTHENTICATION_METHOD)
                return
            self._method, self._conversation = method, chosen.begin()
            self._step(packet.properties.authentication_data)
        elif broker.authenticator is not None:
            self.connection.pause_reading()
            broker.authenticator.check(packet, self.address, self.identity, self._checked)
        elif self.identity is None and not options.anonymous:  # a name that nobody can check is no name
            self._refuse(Reason.NOT_AUTHORIZED)
        else:
            self._accept(self.identity or packet.username, None)

    def _can_retain_will(self, will: Run) -> bool:
        """Whether a will can be kept under its topic."""
        return self.broker.is_retainable(will.topic) and self.broker.journal.can_retain(will)

    def _needs_keeping(self, packet: p.Connect) -> bool:
        """Whether letting this client in changes something that is kept."""
        expiry = (packet.properties.session_expiry or 0) if packet.version == 5 else int(not packet.clean)
        old = self.broker.sessions.get(packet.client_id)
        return bool(expiry or packet.will is not None or (old is not None and old.number))

    def _makes_room(self, packet: p.Connect) -> bool:
        """Whether a client comes back for what waits for it, or ends its session, while that can be written."""
        old = self.broker.sessions.get(packet.client_id)
        return not self.broker.journal.trouble and old is not None and bool(old.number)

    def _checked(self, verdict: Verdict) -> None:
        """Go on when the credentials were checked; the connection may be gone by now."""
        if self._state is not ConnectionState.CHECKING:
            return
        self.connection.resume_reading()
        if verdict.reason:
            self._refuse(verdict.reason, verdict.detail)
        else:
            try:
                self._accept(verdict.username, None)
            except Exception as exc:  # noqa: BLE001 - nobody else ends a connection after a fault here
                _log.error("%s: not let in after a fault", self.client_id, exc_info=exc)
                self.connection.abort(f"a fault: {type(exc).__name__}: {exc}")

    def _accept(self, username: str | None, auth_data: bytes | None) -> None:
        packet, broker, options = self._connect, self.broker, self.broker.options
        assert packet is not None
        wanted = packet.properties
        properties: dict[str, Any] = {}
        if not self.client_id:
            self.client_id = broker.assign_client_id()
            properties["assigned_client_id"] = self.client_id
        keeps = self._needs_keeping(packet)
        session, present = broker.attach(self, packet, self.client_id, username)
        self.session, self._connect, self._state = session, None, ConnectionState.OPEN
        self._expiry_at_connect = session.expiry
        self._quota = min(wanted.receive_maximum or 65535, options.max_inflight)
        self.alias_maximum = min(wanted.topic_alias_maximum or 0, options.topic_alias_maximum) if self.version5 else 0
        self.plain_payload = 0 if self.alias_maximum else max(0, self._packet_limit - 131_072)
        if self._packet_limit == LARGEST and not self.alias_maximum:
            self.plain_payload = LARGEST
        self.keep_alive = packet.keep_alive
        if self.version5:
            self._capabilities(packet, session, properties)
            if auth_data is not None:
                properties["authentication_data"] = auth_data
        self.connection.set_deadline(1.5 * self.keep_alive if self.keep_alive else None)
        connack = encode(p.Connack(present and self.version > 3, 0, Properties(**properties)), self.version)
        if len(connack) > self._packet_limit:  # MQTT-3.1.2-24; nor may DISCONNECT come before it (MQTT-3.14.0-1)
            self._close(f"CONNACK has {len(connack)} bytes, and the client takes {self._packet_limit}")
            return
        self._count_packet(connack)
        if keeps:
            self.answer(connack)
        if (keeps or not self.answers.tell(connack)) and broker.gate.waits:
            self.write = self._write_behind_connack
            self.answers.call(self._connack_left)
        _log.debug("%s is connected from %s", self.client_id, self.address)
        if present and session.exchange.flights:
            session.resend = session.exchange.flights[0].number
        self.pump()
        self._go_on()

    def _write_behind_connack(self, data: bytes | memoryview) -> None:
        """Write what needs no gate through it all the same: nothing overtakes CONNACK."""
        self._wrote_behind = True
        self.answers.write(data)

    def _connack_left(self) -> None:
        if self._wrote_behind:  # in a later turn, which may not have left yet
            self._wrote_behind = False
            self.answers.call(self._connack_left)
        else:
            self.write = self.connection.write

    def _capabilities(self, packet: p.Connect, session: Session, properties: dict[str, Any]) -> None:
        """Tell what differs from what the standard takes for granted."""
        options, wanted = self.broker.options, packet.properties
        if (wanted.session_expiry or 0) != session.expiry:
            properties["session_expiry"] = session.expiry
        if packet.keep_alive > options.max_keep_alive or (not packet.keep_alive and options.max_keep_alive < 65535):
            properties["server_keep_alive"] = self.keep_alive = options.max_keep_alive
        if options.receive_maximum != 65535:
            properties["receive_maximum"] = options.receive_maximum
        if options.topic_alias_maximum:
            properties["topic_alias_maximum"] = options.topic_alias_maximum
        if options.max_packet_bytes != LARGEST:
            properties["maximum_packet_size"] = options.max_packet_bytes
        if options.maximum_qos < 2:
            properties["maximum_qos"] = options.maximum_qos
        for name, there in (
            ("retain_available", options.retain_available),
            ("wildcard_available", options.wildcard_subscriptions),
            ("subscription_ids_available", options.subscription_identifiers),
            ("shared_available", options.shared_subscriptions),
        ):
            if not there:
                properties[name] = 0
        if wanted.request_response and options.response_information:
            properties["response_information"] = options.response_information
        if self._method is not None:
            properties["authentication_method"] = self._method

    def _go_on(self) -> None:
        """Take what the client sent before it had its answer."""
        if self._chunks and self._state is ConnectionState.OPEN:
            data = b"".join(self._chunks)
            self._chunks = []
            self._take(data)

    def _refuse(self, reason: Reason, detail: str = "") -> None:
        """Answer CONNECT with a failure; nothing that came with it is looked at (MQTT-3.1.4-6)."""
        if self.version5:
            connack = encode(p.Connack(False, reason, Properties(reason_string=detail) if detail else p.NONE), 5)
            if len(connack) > self._packet_limit:  # MQTT-3.2.2-19
                connack = encode(p.Connack(False, reason), 5)
            if len(connack) <= self._packet_limit:
                self._count_packet(connack)
                self.write(connack)
        elif reason in CONNACK_3:
            self.write(encode(p.Connack(False, CONNACK_3[reason]), 4))
        elif reason == Reason.BAD_AUTHENTICATION_METHOD:
            self.write(encode(p.Connack(False, 5), 4))
        self._count_refused(reason)
        self._close(f"refused: {detail or Reason(reason).name}")

    def _count_refused(self, reason: int) -> None:
        name = Reason(reason).name.lower()
        self._counts.refused[name] = self._counts.refused.get(name, 0) + 1

    # --- Enhanced authentication

    def _step(self, data: bytes | None) -> None:
        conversation = self._conversation
        assert conversation is not None
        try:
            done, answer = conversation.step(data)
        except Refused as exc:
            if self._state is ConnectionState.OPEN:
                self.disconnect(Reason.NOT_AUTHORIZED, exc.detail or "authentication failed")
            else:
                self._refuse(Reason.NOT_AUTHORIZED, exc.detail or "")
            return
        if not done:
            properties = Properties(authentication_method=self._method, authentication_data=answer)
            packet = encode(p.Auth(Reason.CONTINUE_AUTHENTICATION, properties), 5)
            if len(packet) <= self._packet_limit:
                self.write(packet)
            elif self._state is ConnectionState.OPEN:
                self.disconnect(Reason.PACKET_TOO_LARGE, "AUTH is larger than the client takes")
            else:
                self._refuse(Reason.PACKET_TOO_LARGE)
            return
        self._conversation = None
        if self._state is ConnectionState.OPEN:
            assert self.session is not None
            if conversation.username != self.session.username:
                self.disconnect(Reason.NOT_AUTHORIZED, "another user")
                return
            properties = Properties(authentication_method=self._method, authentication_data=answer)
            self.write(encode(p.Auth(Reason.SUCCESS, properties), 5))
        else:
            self._accept(conversation.username, answer)

    def _take_auth(self, data: bytes) -> None:
        """Before CONNACK a client may send AUTH and DISCONNECT only."""
        if self._conversation is None:
            self._chunks.append(data)  # the credentials are being checked; reading is paused
            self._chunks_size, self._chunks_need = self._chunks_size + len(data), 0
            return
        items, end, need, problem = cut(data, 0, True, self._limit, 1)
        if problem is not None or not items:
            if problem is not None:
                self._refuse(Reason(problem[0]))
            else:
                self._keep(data, need)
                self._chunks_need = max(need, 1)
            return
        item = items[0]
        if end < len(data):
            self._keep(data[end:], 0)
        if not isinstance(item, tuple) or item[0] != Kind.AUTH:
            if isinstance(item, tuple) and item[0] == Kind.DISCONNECT:
                self._close("DISCONNECT before CONNACK")
            else:
                self._refuse(Reason.PROTOCOL_ERROR)
            return
        try:
            packet = decode_body(item[0], item[1], data, item[2], item[3], 5)
        except BadPacket as exc:
            self._refuse(Reason(exc.code))
            return
        assert isinstance(packet, p.Auth)
        if packet.properties.authentication_method != self._method or packet.reason != Reason.CONTINUE_AUTHENTICATION:
            self._refuse(Reason.PROTOCOL_ERROR)
        else:
            self._step(packet.properties.authentication_data)

    def _auth(self, packet: p.Auth) -> None:
        """AUTH on an open connection: only the method of the CONNECT may be used again (MQTT-4.12.1-1)."""
        if self._method is None or packet.properties.authentication_method != self._method:
            self.disconnect(Reason.PROTOCOL_ERROR, "AUTH with another method")  # MQTT-4.12.1-1
        elif packet.reason == Reason.REAUTHENTICATE and self._conversation is None:
            self._conversation = self.broker.methods[self._method].begin()
            self._step(packet.properties.authentication_data)
        elif packet.reason == Reason.CONTINUE_AUTHENTICATION and self._conversation is not None:
            self._step(packet.properties.authentication_data)
        else:
            self.disconnect(Reason.PROTOCOL_ERROR, "AUTH out of turn")


def name_of(kind: int) -> str:
    """Return the name of a kind of packet, for people."""
    return Kind(kind).name if kind else "a packet of kind 0"
