"""Fuzz the broker: mutated conversations of several clients, never a crash, and afterwards nothing is left over.

An input is one conversation.  Connections break, time passes, clients are slow.  After each, the tables agree with each
other, and when every session is gone, so is everything that belonged to one.

python fuzz/mqtt_conversations.py --inputs 10000 --seed 1
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from _run import main
from mqtt_packets import PIECES, one_input
from penstock.mqtt import packets as p
from penstock.mqtt.broker import Broker
from penstock.mqtt.codec import encode
from penstock.mqtt.packets import Kind, Properties

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from mqtt_use import Device, World

TOPICS = ["a/b", "a", "b", "$x/y", "a/b/c"]
FILTERS = ["a/#", "+/b", "#", "$share/g/a/#", "$share/g/#", "b", "$x/#", "a/b/+"]


def packet(rng: random.Random) -> p.Packet:
    """Return something a client might say."""
    number = rng.randrange(1, 5)
    match rng.randrange(9):
        case 0 | 1 | 2:
            qos = rng.randrange(3)
            properties = Properties(message_expiry=rng.choice([None, None, 1]), topic_alias=rng.choice([None, None, 1]))
            return p.Publish(
                rng.choice(TOPICS),
                b"x" * rng.randrange(9),
                qos,
                rng.random() < 0.3,
                False,
                number if qos else 0,
                properties,
            )
        case 3:
            handling = rng.randrange(3)
            return p.Subscribe(
                number, (p.Filter(rng.choice(FILTERS), rng.randrange(3), False, rng.random() < 0.5, handling),)
            )
        case 4:
            return p.Unsubscribe(number, (rng.choice(FILTERS),))
        case 5 | 6:
            return p.Ack(rng.choice([Kind.PUBACK, Kind.PUBREC, Kind.PUBREL, Kind.PUBCOMP]), number)
        case 7:
            return p.Ping()
    return p.Disconnect(rng.choice([0, 4]))


def connect(rng: random.Random, version: int) -> p.Connect:
    """Return a CONNECT."""
    properties = Properties(
        session_expiry=rng.choice([None, 5, 0xFFFFFFFF]),
        receive_maximum=rng.choice([None, 1, 2]),
        topic_alias_maximum=rng.choice([None, 1]),
        maximum_packet_size=rng.choice([None, 30]),
    )
    will = rng.choice(
        [None, p.Will("a/b", b"gone", rng.randrange(3), False, Properties(will_delay=rng.choice([None, 3])))]
    )
    return p.Connect(rng.choice("uvwxyz"), version, rng.random() < 0.3, 10, None, None, will, properties)


def check(broker: Broker) -> None:
    """Compare the tables of a broker with each other."""
    sessions = broker.sessions.values()
    assert broker.subscription_count == sum(len(session.subscriptions) for session in sessions)
    assert broker.budget.queued_messages == sum(session.queued_messages for session in sessions)
    assert broker.budget.queued_bytes == sum(session.queued_bytes for session in sessions)
    for session in sessions:
        exchange = session.exchange
        assert session.queued_messages == sum(waiting.run.count for waiting in session.queue)
        assert exchange.messages == sum(flight.count for flight in exchange.flights)
        assert exchange.size == sum(flight.size for flight in exchange.flights)
        assert session.link is None or session.link.session is session
        if session.link is not None:
            assert 0 <= session.link.outstanding <= exchange.messages


def conversation(rng: random.Random) -> None:
    """Hold one conversation."""
    world = World(max_queued_messages=rng.choice([2, 100]), receive_maximum=rng.choice([2, 65535]))
    devices: list[Device] = []
    for _ in range(rng.randrange(5, 40)):
        if not devices or rng.random() < 0.15:
            version = rng.choice([4, 5])
            devices.append(Device(world.broker, version))
            devices[-1].link.received(encode(connect(rng, version), version))
            continue
        device = rng.choice(devices)
        match rng.randrange(12):
            case 0:
                device.drop()
                devices.remove(device)
            case 1:
                device.link.congested()
            case 2:
                device.link.writable()
            case 3:
                world.pass_(rng.choice([0.5, 2, 6]))
            case 4 if not device.closed:
                device.link.received(one_input(rng) or b"\0")
            case 5 if not device.closed:
                device.link.received(rng.choice(PIECES))
            case _ if not device.closed:
                raw = b"".join(encode(packet(rng), device.version) for _ in range(rng.choice([1, 1, 3])))
                cut = rng.randrange(len(raw)) if rng.random() < 0.2 else 0
                for part in (raw[:cut], raw[cut:]):
                    if part and not device.closed:
                        device.link.received(part)
        check(world.broker)
    for device in devices:
        device.drop()
    for name in list(world.broker.sessions):
        world.broker.kick(name, end=True)
    check(world.broker)
    assert (len(world.broker.tree), world.broker.groups, world.broker.links) == (0, {}, set())
    assert world.broker.budget.queued_bytes == 0


def run(inputs: int, seed: int) -> None:
    """Hold that many conversations."""
    for number in range(inputs):
        rng = random.Random(f"{seed} {number}")
        try:
            conversation(rng)
        except Exception:
            print(f"conversation {number} of seed {seed}")
            raise


if __name__ == "__main__":
    main(__doc__, run)
