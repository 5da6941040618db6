"""The client's side of MQTT: bytes in, events out.  No socket, clock or task.

    flight      messages under consecutive packet ids that were sent together and wait for their acknowledgements
    session     what survives a connection: flights, ids of QoS 2 messages that were received, the number of the session

A run of messages is one flight as far as the ids and the server's receive maximum allow; what does not fit waits, in
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from penstock.errors import OptionsError, ProtocolError
from penstock.kernel import mqtt as kernel
from penstock.kernel.mqtt import Run
from penstock.mqtt.codec import LARGEST, decode_body, encode
from penstock.mqtt.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Filter,
    Kind,
    Packet,
    Pong,
    Properties,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from penstock.mqtt.properties import encode_properties, read_varint
from penstock.mqtt.reasons import Reason

__all__ = ["Arrived", "ClientCore", "Done"]

Done = Callable[[int, Sequence[int]], None]
"""Called once with the worst reason code, and with all of them where there is one for each filter."""

_RECEIVED: Final = b"\1"  # PUBREC came
_FINISHED: Final = b"\2"


class Arrived(msgspec.Struct):
    """Messages that came in; QoS 1 and 2 are acknowledged by ``ClientCore.acknowledge``."""

    run: Run
    session: int
    """The number of the session they came in: an acknowledgement does not outlive it."""


def _ignore(_worst: int, _reasons: Sequence[int]) -> None:
    """Take an answer that nobody waits for."""


class _Publication:
    """One call: some runs, one answer."""

    __slots__ = ("done", "flags", "left", "properties", "reason", "runs", "topic")

    def __init__(self, runs: list[Run], topic: bytes, flags: int, properties: bytes, done: Done) -> None:
        self.runs = deque(runs)
        self.topic, self.flags, self.properties, self.done = topic, flags, properties, done
        self.left = sum(run.count for run in runs)
        self.reason = 0


class _Flight:
    """What was sent under the ids from ``first_id``."""

    __slots__ = ("count", "done", "first_id", "left", "publication", "request", "run", "state")

    def __init__(self, first_id: int, count: int) -> None:
        self.first_id, self.count, self.left = first_id, count, count
        self.state = bytearray(count)
        self.run: Run | None = None
        self.publication: _Publication | None = None
        self.request: Subscribe | Unsubscribe | None = None
        self.done: Done | None = None


class ClientCore:
    """One client and its session.

    >>> from penstock.mqtt.packets import NONE
    >>> core = ClientCore(Connect("c", version=4))
    >>> core.begin(); core.data_to_send().hex()
    '100d00044d5154540402003c000163'
    >>> core.receive(bytes.fromhex("20020000")), core.open
    ([Connack(session_present=False, reason=0, properties=Properties())], True)
    >>> core.publish("a", [b"x", b"y"], 1, False, NONE, lambda worst, _: print("done", worst))
    >>> core.data_to_send().hex()
    '32060001610001783206000161000279'
    >>> core.receive(bytes.fromhex("4002000140020002"))
    done 0
    []
    """

    def __init__(self, connect: Connect, max_inflight: int = 65535) -> None:
        self.connect = connect
        self._max_inflight = max_inflight
        self.version5 = connect.version == 5
        self.open = False
        self.session = 0
        self.subscriptions: dict[str, tuple[Filter, Properties]] = {}
        self.max_packet = LARGEST
        self.max_qos = 2
        self._window = 65535
        self._inflight = 0
        self._next_id = 1
        self._flights: deque[_Flight] = deque()
        self._waiting: deque[_Publication] = deque()
        self._received: set[int] = set()
        self._in_work: set[int] = set()  # of these, what was not acknowledged yet
        self._unread = b""
        self._out: list[bytes] = []

    # --- What the shell moves

    def data_to_send(self) -> bytes:
        """Return the bytes for the server, once."""
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out = []
        return data

    def begin(self) -> None:
        """Start a new connection: the first packet is CONNECT."""
        self.open, self._unread, self._out = False, b"", [encode(self.connect, self.connect.version)]

    def lost(self) -> None:
        """Note that the connection is gone; what was not finished waits for the next one."""
        self.open, self._unread, self._out = False, b"", []

    def receive(self, data: bytes) -> list[Arrived | Connack | Disconnect | Auth | Pong]:
        """Return what ``data`` completes, cut anywhere; raises ProtocolError where it is no MQTT."""
        if self._unread:
            data = self._unread + data
        # Only the answer to CONNECT is cut before it is known whether more may follow.
        items, end, _, problem = kernel.cut(data, 0, self.version5, LARGEST, 0 if self.open else 1, True)
        events: list[Arrived | Connack | Disconnect | Auth | Pong] = []
        for item in items:
            if isinstance(item, Run):
                self._arrived(item, events)
                continue
            kind, flags, first, last = item
            if flags < 0:
                self._acked(kind, first, last, 0)
            else:
                self._packet(decode_body(kind, flags, data, first, last, self.connect.version), events)
        if problem is not None:
            raise ProtocolError("the server", Kind(problem[1]).name if problem[1] else "a packet", problem[2])
        self._unread = data[end:]
        if self._unread and end and self.open and any(isinstance(event, Connack) for event in events):
            rest, self._unread = self._unread, b""
            events += self.receive(rest)
        return events

    # --- What the shell asks for

    def publish(
        self, topic: str, payloads: Sequence[bytes], qos: int, retain: bool, properties: Properties, done: Done
    ) -> None:
        """Send messages of one topic; ``done`` is called when all are acknowledged, with QoS 0 at once."""
        if not topic or "+" in topic or "#" in topic:
            raise OptionsError(f"{topic!r} is no topic to publish to")
        if qos > self.max_qos:
            raise OptionsError(f"{topic}: QoS {qos}; the server takes QoS {self.max_qos} at most")
        raw, flags = b"", qos << 1 | retain
        if self.version5:
            encoded = encode_properties(properties)
            raw = encoded[read_varint(encoded, 0, len(encoded), "PUBLISH")[1] :]
        name = topic.encode()
        if len(name) > 65535:
            raise OptionsError(f"a topic of {len(name)} bytes; 65535 is the most")
        runs = []
        for at in range(0, len(payloads), 65535):
            run = kernel.make_run(name, payloads[at : at + 65535], qos, retain)
            if run.longest + len(name) + len(raw) + 16 > self.max_packet:
                raise OptionsError(f"{topic}: {run.longest} bytes; the server takes {self.max_packet} at most")
            runs.append(run)
        if qos:
            self._waiting.append(_Publication(runs, name, flags, raw, done))
            self.pump()
        else:
            self._out += [run.frames(self.version5, flags, name, raw, 0) for run in runs]
            done(0, ())

    def ask(self, request: Subscribe | Unsubscribe, done: Done) -> None:
        """Send a SUBSCRIBE or UNSUBSCRIBE under an id of its own."""
        if not self._room():
            raise OptionsError("all packet ids are in use")
        flight = self._new_flight(1)
        flight.request, flight.done = request, done
        request.packet_id = flight.first_id
        if self.open:
            self._out.append(encode(request, self.connect.version))

    def acknowledge(self, arrived: Arrived) -> None:
        """Tell the server that messages were taken over; not where their session is gone."""
        run = arrived.run
        if not run.qos or arrived.session != self.session:
            return
        if run.qos == 2:
            self._in_work.difference_update(range(run.first_id, run.first_id + run.count))
        if self.open:
            self._out.append(kernel.ack_run(0x40 if run.qos == 1 else 0x50, run.first_id, run.count))

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._out.append(b"\xc0\x00")

    def leave(self, reason: int = 0) -> None:
        """Say goodbye."""
        self._out.append(encode(Disconnect(reason), self.connect.version))

    @property
    def unfinished(self) -> int:
        """Messages that wait for their acknowledgements or to be sent."""
        return self._inflight + sum(publication.left for publication in self._waiting)

    def give_up(self) -> None:
        """End everything that waits with 0x80: there will be no further connection."""
        flights, self._flights = self._flights, deque()
        waiting, self._waiting = self._waiting, deque()
        self.open = False
        ended: set[_Publication] = {flight.publication for flight in flights if flight.publication and flight.left}
        for publication in [*ended, *(each for each in waiting if each not in ended)]:
            publication.done(0x80, ())
        for flight in flights:
            if flight.done is not None and flight.left:
                flight.done(0x80, ())

    # --- Sending

    def pump(self) -> None:
        """Send what waits, within the window and the ids that are free."""
        while self.open and self._waiting:
            publication = self._waiting[0]
            room = min(self._window - self._inflight, self._room())
            if room <= 0:
                return
            run = publication.runs.popleft()
            if run.count > room:
                run, rest = run.split(room)
                publication.runs.appendleft(rest)
            flight = self._new_flight(run.count)
            flight.run, flight.publication = run, publication
            self._inflight += run.count
            self._out.append(self._frames(flight, 0))
            if not publication.runs:
                self._waiting.popleft()

    def _frames(self, flight: _Flight, dup: int) -> bytes:
        run, publication = flight.run, flight.publication
        assert run is not None
        assert publication is not None
        return run.frames(
            self.version5, publication.flags | dup, publication.topic, publication.properties, flight.first_id
        )

    def _room(self) -> int:
        """Return how many consecutive ids are free."""
        if self._next_id > 65535:
            self._next_id = 1
        if not self._flights:
            return 65536 - self._next_id
        oldest = self._flights[0].first_id
        return oldest - self._next_id if self._next_id <= oldest else 65536 - self._next_id

    def _new_flight(self, count: int) -> _Flight:
        flight = _Flight(self._next_id, count)
        self._next_id += count
        self._flights.append(flight)
        return flight

    # --- Receiving

    def _packet(self, packet: Packet, events: list[Arrived | Connack | Disconnect | Auth | Pong]) -> None:
        match packet:
            case Connack():
                if not packet.reason:
                    self._welcome(packet)
                events.append(packet)
            case Ack():
                self._acked(packet.kind, packet.packet_id, 1, packet.reason)
            case Suback() | Unsuback():
                self._answered(packet)
            case Disconnect() | Auth() | Pong():
                events.append(packet)
            case _:
                raise ProtocolError("the server", type(packet).__name__.upper(), "it is no packet of a server")

    def _arrived(self, run: Run, events: list[Arrived | Connack | Disconnect | Auth | Pong]) -> None:
        if run.qos == 2:
            ids = range(run.first_id, run.first_id + run.count)
            if self._received.isdisjoint(ids):
                self._received.update(ids)
                self._in_work.update(ids)
            elif run.count > 1:
                head, tail = run.split(1)
                self._arrived(head, events)
                self._arrived(tail, events)
                return
            else:  # MQTT-4.3.3-10: once received, never delivered again before PUBREL
                if run.first_id not in self._in_work:  # else it is answered when that has been dealt with
                    self._out.append(kernel.ack_run(0x50, run.first_id, 1))
                return
        events.append(Arrived(run, self.session))

    def _acked(self, kind: int, first: int, count: int, reason: int) -> None:
        if kind == Kind.PUBREL:
            self._received.difference_update(range(first, first + count))
            self._out.append(kernel.ack_run(0x70, first, count))
            return
        while count > 0:
            flight = next((each for each in self._flights if each.first_id <= first < each.first_id + each.count), None)
            if flight is None or flight.publication is None:
                first, count = first + 1, count - 1
                continue
            here = min(count, flight.first_id + flight.count - first)
            self._advance(flight, kind, first - flight.first_id, here, reason)
            first, count = first + here, count - here
        self.pump()

    def _advance(self, flight: _Flight, kind: int, at: int, count: int, reason: int) -> None:
        publication = flight.publication
        assert publication is not None
        state = flight.state
        if kind == Kind.PUBREC and reason < 0x80:
            state[at : at + count] = _RECEIVED * count
            self._out.append(kernel.ack_run(0x62, flight.first_id + at, count))
            return
        finished = count - state.count(2, at, at + count)
        state[at : at + count] = _FINISHED * count
        flight.left -= finished
        self._inflight -= finished
        publication.left -= finished
        if kind == Kind.PUBCOMP and reason == Reason.PACKET_ID_NOT_FOUND:
            reason = 0  # MQTT 5, 3.7.2.1: no error during recovery; the server had finished before its answer was lost
        publication.reason = max(publication.reason, reason if reason >= 0x80 else 0)
        self._drop_finished()
        if finished and not publication.left:
            publication.done(publication.reason, ())

    def _answered(self, packet: Suback | Unsuback) -> None:
        for flight in self._flights:
            if flight.first_id == packet.packet_id and flight.request is not None and flight.left:
                flight.left = 0
                done, request = flight.done, flight.request
                self._remember(request, packet)
                self._drop_finished()
                assert done is not None
                done(max(packet.reasons, default=0), packet.reasons)
                self.pump()
                return

    def _remember(self, request: Subscribe | Unsubscribe, answer: Suback | Unsuback) -> None:
        if isinstance(request, Subscribe):
            for each, reason in zip(request.filters, answer.reasons, strict=False):
                if reason < 0x80:
                    self.subscriptions[each.filter] = (each, request.properties)
        else:
            for name in request.filters:
                self.subscriptions.pop(name, None)

    def _drop_finished(self) -> None:
        while self._flights and not self._flights[0].left:
            self._flights.popleft()

    # --- The session

    def _welcome(self, connack: Connack) -> None:
        """Go on where the last connection ended, or begin anew where the server has forgotten the session."""
        self.open = True
        given = connack.properties
        self._window = min(self._max_inflight, given.receive_maximum if given.receive_maximum is not None else 65535)
        self.max_packet = given.maximum_packet_size or LARGEST
        self.max_qos = given.maximum_qos if given.maximum_qos is not None else 2
        if connack.session_present:
            for flight in self._flights:
                self._resend(flight)
        else:
            self.session += 1
            self._received.clear()
            self._in_work.clear()
            self._begin_again()
        self.pump()

    def _resend(self, flight: _Flight) -> None:
        """MQTT-4.4.0-1: PUBLISH again with DUP, or PUBREL where PUBREC came already."""
        if flight.request is not None:
            if flight.left:
                self._out.append(encode(flight.request, self.connect.version))
            return
        if flight.left == flight.count and not any(flight.state):
            self._out.append(self._frames(flight, 8))
            return
        run, publication = flight.run, flight.publication
        assert run is not None
        assert publication is not None
        payloads = run.payloads()
        for at, state in enumerate(flight.state):
            packet_id = flight.first_id + at
            if state == 0:
                one = kernel.make_run(publication.topic, [payloads[at]], run.qos, run.retain)
                out = one.frames(
                    self.version5, publication.flags | 8, publication.topic, publication.properties, packet_id
                )
                self._out.append(out)
            elif state == 1:
                self._out.append(kernel.ack_run(0x62, packet_id, 1))

    def _begin_again(self) -> None:
        """Subscribe again and send what was not finished as if for the first time: a new session knows no ids."""
        flights, self._flights, self._next_id, self._inflight = list(self._flights), deque(), 1, 0
        again: dict[Properties, list[Filter]] = {}
        for each, properties in self.subscriptions.values():
            again.setdefault(properties, []).append(each)
        for properties, filters in again.items():
            self.ask(Subscribe(0, tuple(filters), properties), _ignore)
        again_runs: dict[_Publication, list[Run]] = {}
        for flight in flights:
            if flight.request is not None and flight.left and flight.done is not None:
                self.ask(flight.request, flight.done)
            elif flight.publication is not None and flight.left:
                assert flight.run is not None
                publication = flight.publication
                runs = again_runs.setdefault(publication, [])
                # After PUBREC the message is the server's, whatever became of the session: it is not sent again.
                publication.left -= flight.state.count(1)
                left = [each for each, state in zip(flight.run.payloads(), flight.state, strict=True) if state == 0]
                if left:
                    runs.append(kernel.make_run(publication.topic, left, flight.run.qos, flight.run.retain))
        for publication, runs in again_runs.items():
            publication.runs = deque([*runs, *publication.runs])
        first = [publication for publication in again_runs if publication.runs]
        self._waiting = deque([*first, *(each for each in self._waiting if each not in again_runs)])
        for publication in again_runs:
            if not publication.left:
                publication.done(publication.reason, ())
