"""Fuzz the broker: mutated conversations of several clients, never a crash, and afterwards nothing is left over.

An input is one conversation.  Connections break, time passes, clients are slow.  After each, the tables agree with each
other, and when every session is gone, so is everything that belonged to one.

python fuzz/mqtt_conversations.py --inputs 10000 --seed 1
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from _run import main
from mqtt_packets import PIECES, one_input
from penstock.mqtt import packets as p
from penstock.mqtt.broker import Broker
from penstock.mqtt.codec import encode
from penstock.mqtt.packets import Kind, Properties

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from mqtt_use import Device, World

T = TypeVar("T")
TOPICS = ["a/b", "a", "b", "$x/y", "a/b/c"]
FILTERS = ["a/#", "+/b", "#", "$share/g/a/#", "$share/g/#", "b", "$x/#", "a/b/+"]


CHOICES = (None, None, 1)
SPOKEN: dict[str, list[p.Packet]] = {
    "publish": [
        p.Publish(topic, b"x" * size, qos, retain, False, number if qos else 0, properties)
        for topic, size, qos, retain in itertools.product(TOPICS, range(9), range(3), (False, False, True))
        for number, expiry, alias in itertools.product(range(1, 5), CHOICES, CHOICES)
        for properties in [Properties(message_expiry=expiry, topic_alias=alias)]
    ],
    "subscribe": [
        p.Subscribe(number, (p.Filter(name, qos, False, retain, handling),))
        for number, name, qos, retain, handling in itertools.product(
            range(1, 5), FILTERS, range(3), (False, True), range(3)
        )
    ],
    "unsubscribe": [p.Unsubscribe(number, (name,)) for number, name in itertools.product(range(1, 5), FILTERS)],
    "ack": [
        p.Ack(kind, number) for kind in (Kind.PUBACK, Kind.PUBREC, Kind.PUBREL, Kind.PUBCOMP) for number in range(1, 5)
    ],
    "ping": [p.Ping()],
    "disconnect": [p.Disconnect(0), p.Disconnect(4)],
}
KINDS = ["publish"] * 3 + ["subscribe", "unsubscribe", "ack", "ack", "ping", "disconnect"]
SAID = {
    version: {kind: [encode(each, version) for each in some] for kind, some in SPOKEN.items()} for version in (4, 5)
}
"""What a client might say, encoded beforehand: the time is the broker's."""

WILLS = [None] * 6 + [
    p.Will("a/b", b"gone", qos, False, Properties(will_delay=delay))
    for qos, delay in itertools.product(range(3), (None, 3))
]
CONNECTS = {
    version: [
        encode(p.Connect(name, version, clean, 10, None, None, will, properties), version)
        for name, clean, will in itertools.product("uvwxyz", (True, False, False), WILLS)
        for expiry, receive, alias, size in itertools.product(
            (None, 5, 0xFFFFFFFF), (None, 1, 2), (None, 1), (None, 30)
        )
        for properties in [
            Properties(
                session_expiry=expiry,
                receive_maximum=receive,
                topic_alias_maximum=alias,
                maximum_packet_size=size,
            )
        ]
    ]
    for version in (4, 5)
}


class Dice(random.Random):
    """A generator that chooses in less time than the broker takes to answer."""

    def pick(self, values: Sequence[T]) -> T:
        """Return one of them."""
        return values[int(self.random() * len(values))]


def check(broker: Broker) -> None:
    """Compare the tables of a broker with each other."""
    subscriptions = messages = size = 0
    for session in broker.sessions.values():
        exchange, link = session.exchange, session.link
        subscriptions += len(session.subscriptions)
        messages += session.queued_messages
        size += session.queued_bytes
        assert session.queued_messages == (sum(each.run.count for each in session.queue) if session.queue else 0)
        flights = exchange.flights
        assert exchange.messages == (sum(flight.count for flight in flights) if flights else 0)
        assert exchange.size == (sum(flight.size for flight in flights) if flights else 0)
        if link is not None:
            assert link.session is session
            assert 0 <= link.outstanding <= exchange.messages
    assert broker.subscription_count == subscriptions
    assert broker.budget.queued_messages == messages
    assert broker.budget.queued_bytes == size


def conversation(dice: Dice) -> None:
    """Hold one conversation."""
    pick = dice.pick
    world = World(max_queued_messages=pick((2, 100)), receive_maximum=pick((2, 65535)))
    broker = world.broker
    devices: list[Device] = []
    for _ in range(pick(range(5, 40))):
        if not devices or dice.random() < 0.15:
            version = pick((4, 5))
            devices.append(Device(broker, version))
            devices[-1].link.received(pick(CONNECTS[version]))
            continue
        device = pick(devices)
        match pick(range(12)):
            case 0:
                device.drop()
                devices.remove(device)
            case 1:
                device.link.congested()
            case 2:
                device.link.writable()
            case 3:
                world.pass_(pick((0.5, 2, 6)))
            case 4 if not device.closed:
                device.link.received(one_input(dice) or b"\0")
            case 5 if not device.closed:
                device.link.received(pick(PIECES))
            case _ if not device.closed:
                said = SAID[device.version]
                raw = b"".join([pick(said[pick(KINDS)]) for _ in range(pick((1, 1, 3)))])
                cut = pick(range(len(raw))) if dice.random() < 0.2 else 0
                for part in (raw[:cut], raw[cut:]):
                    if part and not device.closed:
                        device.link.received(part)
        check(broker)
    for device in devices:
        device.drop()
    for name in list(broker.sessions):
        broker.kick(name, end=True)
    check(broker)
    assert (len(broker.tree), broker.groups, broker.links) == (0, {}, set())
    assert broker.budget.queued_bytes == 0


def run(inputs: int, seed: int) -> None:
    """Hold that many conversations."""
    dice = Dice()
    for number in range(inputs):
        dice.seed(seed << 40 | number)
        try:
            conversation(dice)
        except Exception:
            print(f"conversation {number} of seed {seed}")
            raise


if __name__ == "__main__":
    main(__doc__, run)
