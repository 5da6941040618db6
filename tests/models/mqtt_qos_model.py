"""QoS 1 and 2 between a sender and a receiver whose connections break and are taken over at any moment.

The sender's decisions are those of ``penstock.mqtt.exchange.Exchange`` itself, put together again in every state; the
receiver remembers packet ids as ``penstock.mqtt.link`` does.  A connection is two queues, emptied when it breaks.
After a takeover the old connection's packets may still arrive for a while; a receiver must not listen to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from penstock.kernel.mqtt import make_run
from penstock.mqtt.exchange import Answer, Exchange, Flight

Mutation = Literal[
    "",
    "the receiver forgets ids with the connection",
    "a released message is published again",
    "nothing is sent again",
    "the receiver answers before it has taken",
    "an id is free at PUBREC",
    "the old connection is heard",
]
Packet = tuple[str, int, int]


class World(NamedTuple):
    next_message: int
    next_number: int
    flights: tuple[tuple[int, int, bool], ...]
    """(number, message, released), oldest first."""
    held: frozenset[int]
    delivered: tuple[int, ...]
    to_receiver: tuple[Packet, ...]
    to_sender: tuple[Packet, ...]
    stale: tuple[Packet, ...]
    """Packets of a connection that was taken over."""
    breaks: int


class QosModel:
    def __init__(self, qos: int, messages: int, window: int, breaks: int, mutation: Mutation = "") -> None:
        self.qos, self.messages, self.window, self.breaks, self.mutation = qos, messages, window, breaks, mutation

    def initial(self) -> World:
        # Packet ids go round soon, so that they are used again within few messages.
        return World(0, 65533, (), frozenset(), (), (), (), (), 0)

    def _exchange(self, world: World) -> Exchange:
        exchange = Exchange()
        flights = [
            Flight(
                number,
                None if released else make_run(b"t", [b"%d" % message], self.qos, False),
                1,
                self.qos,
                False,
                b"",
            )
            for number, message, released in world.flights
        ]
        exchange.restore(flights, world.next_number)
        return exchange

    def _kept(self, exchange: Exchange, world: World) -> World:
        messages = {number: message for number, message, _ in world.flights}
        flights = tuple(
            (f.number, messages.get(f.number, -1) if f.run is None else int(f.run.payload()), f.released)
            for f in exchange.flights
        )
        return world._replace(flights=flights, next_number=exchange.next_number)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.next_message < self.messages and len(world.flights) < self.window:
            yield "send", self._send(world)
        if world.to_receiver:
            yield "receive", self._receive(world._replace(to_receiver=world.to_receiver[1:]), world.to_receiver[0])
        if world.to_sender:
            yield "acknowledge", self._acknowledge(world._replace(to_sender=world.to_sender[1:]), world.to_sender[0])
        if world.stale and self.mutation == "the old connection is heard":
            after = self._receive(world._replace(stale=world.stale[1:]), world.stale[0])
            yield "receive stale", after._replace(to_sender=world.to_sender)
        if world.breaks < self.breaks:
            yield "break", self._resume(world._replace(stale=()))
            yield "take over", self._resume(world._replace(stale=world.to_receiver))

    def _send(self, world: World) -> World:
        exchange = self._exchange(world)
        run = make_run(b"t", [b"%d" % world.next_message], self.qos, False)
        flight, rest = exchange.begin(run, self.qos, False, b"")
        assert rest is None
        after = self._kept(exchange, world)._replace(next_message=world.next_message + 1)
        return after._replace(to_receiver=(*world.to_receiver, ("publish", flight.first, world.next_message)))

    def _receive(self, world: World, packet: Packet) -> World:
        what, packet_id, message = packet
        if what == "release":
            return world._replace(
                held=world.held - {packet_id}, to_sender=(*world.to_sender, ("complete", packet_id, -1))
            )
        if self.qos == 1:
            if self.mutation == "the receiver answers before it has taken":
                return world._replace(to_sender=(*world.to_sender, ("ack", packet_id, -1)))
            delivered = (*world.delivered, message)
            return world._replace(delivered=delivered, to_sender=(*world.to_sender, ("ack", packet_id, -1)))
        answer = (*world.to_sender, ("receive", packet_id, -1))
        if packet_id in world.held:
            return world._replace(to_sender=answer)
        return world._replace(held=world.held | {packet_id}, delivered=(*world.delivered, message), to_sender=answer)

    def _acknowledge(self, world: World, packet: Packet) -> World:
        what, packet_id, _ = packet
        exchange = self._exchange(world)
        call = {"ack": exchange.acked, "receive": exchange.received, "complete": exchange.completed}[what]
        ((answer, _, _),) = call(packet_id, 1)
        if self.mutation == "an id is free at PUBREC" and what == "receive":
            list(exchange.completed(packet_id, 1))
        after = self._kept(exchange, world)
        if what == "receive" and answer in (Answer.RELEASE, Answer.UNKNOWN):
            after = after._replace(to_receiver=(*world.to_receiver, ("release", packet_id, -1)))
        assert answer is not Answer.WRONG
        return after

    def _resume(self, world: World) -> World:
        """Come back with the session: the queues are empty, what is unacknowledged is sent again in order."""
        again: list[Packet] = []
        for number, message, released in world.flights:
            packet_id = number % 65535 + 1
            if released and self.mutation != "a released message is published again":
                again.append(("release", packet_id, -1))
            else:
                again.append(("publish", packet_id, message))
        if self.mutation == "nothing is sent again":
            again = []
        held = frozenset() if self.mutation == "the receiver forgets ids with the connection" else world.held
        return world._replace(held=held, to_receiver=tuple(again), to_sender=(), breaks=world.breaks + 1)

    # --- What must hold

    def once(self, world: World, terminal: bool) -> bool:
        return self.qos == 1 or len(set(world.delivered)) == len(world.delivered)

    def in_order(self, world: World, terminal: bool) -> bool:
        first = list(dict.fromkeys(world.delivered))
        return first == sorted(first)

    def all_delivered(self, world: World, terminal: bool) -> bool:
        return not terminal or set(world.delivered) == set(range(self.messages))

    def all_forgotten(self, world: World, terminal: bool) -> bool:
        return not terminal or (not world.flights and not world.held)
