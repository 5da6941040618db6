"""Promise: a change is told to the journal before the answer that promises it, and answers leave only through it."""

from __future__ import annotations

from typing import Any

from mqtt_use import Device, ManualLoop, World

from penstock.kernel.mqtt import Run
from penstock.mqtt import packets as p
from penstock.mqtt.codec import decode
from penstock.mqtt.gate import TurnGate
from penstock.mqtt.journal import Stored
from penstock.mqtt.packets import Kind


class Recorder(TurnGate):
    """A journal that writes down what it is told, and a gate that holds answers until it is asked to let them go."""

    keeps = True
    trouble = full = ""  # type: ignore[assignment]

    def __init__(self) -> None:
        self.loop = ManualLoop()
        super().__init__(self.loop)
        self.told: list[tuple[Any, ...]] = []

    def hold(self, answers: Any, item: Any) -> None:
        data = getattr(item, "data", item)
        if isinstance(data, bytes):
            self.told.append(("answer", type(decode(data, 5)[0]).__name__))
        super().hold(answers, item)

    def let_go(self) -> None:
        self.loop.run()

    def can_retain(self, run: Run) -> bool:
        return True

    def store(self, run: Run) -> Stored:
        stored = Stored(len(self.told), run.count, run.end - run.start, float("inf"))
        stored.run = run
        return stored

    def load(self, stored: Stored) -> Run:
        assert stored.run is not None
        return stored.run

    def retained(self, topic: bytes, run: Run | None) -> None:
        self.told.append(("retained", topic, None if run is None else run.payload()))

    def session(self, session: Any) -> None:
        session.number = 1
        self.told.append(("session", session.client_id, session.expiry, session.link is not None))

    def ended(self, session: Any, filters: Any) -> None:
        self.told.append(("ended", session.client_id, *filters))

    def took(self, session: Any, first: int, count: int) -> None:
        self.told.append(("took", session.client_id, first, count))

    def freed(self, session: Any, first: int, count: int) -> None:
        self.told.append(("freed", session.client_id, first, count))

    def consumed(self, session: Any, stored: Stored, upto: int) -> None:
        self.told.append(("consumed", session.client_id, upto))

    def subscribed(self, subscription: Any) -> None:
        self.told.append(("subscribed", subscription.session.client_id, subscription.name))

    def unsubscribed(self, session: Any, filter: str) -> None:
        self.told.append(("unsubscribed", session.client_id, filter))

    def queued(self, session: Any, waiting: Any) -> None:
        self.told.append(("queued", session.client_id, waiting.stored.run.payloads(), waiting.qos))

    def sent(self, session: Any, flight: Any, queued: bool) -> None:
        self.told.append(("sent", session.client_id, flight.first, flight.count))

    def released(self, session: Any, first: int, count: int) -> None:
        self.told.append(("released", session.client_id, first, count))

    def done(self, session: Any, first: int, count: int, lost: str = "") -> None:
        self.told.append(("done", session.client_id, first, count, *filter(None, [lost])))

    def lost(self, session: Any, count: int, reason: str, *, fresh: bool = False) -> None:
        self.told.append(("lost", session.client_id, count, reason, fresh))

    def take(self) -> list[tuple[Any, ...]]:
        told, self.told = self.told, []
        return told


def connected(world: World, journal: Recorder, name: str, expiry: int) -> Any:
    device = Device(world.broker)
    properties = p.Properties(session_expiry=expiry) if expiry else p.NONE
    device.send(p.Connect(name, 5, False, properties=properties))
    journal.let_go()
    device.read()
    return device


def test_changes_come_before_the_answers_that_promise_them() -> None:
    journal = Recorder()
    world = World(journal=journal, gate=journal)
    sub = connected(world, journal, "sub", 100)
    assert journal.take() == [("session", "sub", 100, True), ("answer", "Connack")]
    assert sub.subscribe("a", qos=2) == []  # nothing leaves before the journal lets it
    assert journal.take() == [("subscribed", "sub", "a"), ("answer", "Suback")]
    pub = connected(world, journal, "pub", 100)
    journal.take()
    pub.publish("a", b"1", 2, 7, retain=True)
    assert journal.take() == [
        ("retained", b"a", b"1"),
        ("sent", "sub", 1, 1),
        ("answer", "Publish"),
        ("took", "pub", 7, 1),
        ("answer", "Ack"),
    ]
    pub.ack(Kind.PUBREL, 7)
    assert journal.take() == [("freed", "pub", 7, 1), ("answer", "Ack")]
    sub.ack(Kind.PUBREC, 1)
    assert journal.take() == [("released", "sub", 1, 1), ("answer", "Ack")]
    sub.ack(Kind.PUBCOMP, 1)
    assert journal.take() == [("done", "sub", 1, 1)]
    sub.drop()
    assert journal.take() == [("session", "sub", 100, False)]
    pub.publish("a", b"2", 1, 1)
    assert journal.take() == [("queued", "sub", [b"2"], 1), ("answer", "Ack")]
    pub.publish("a", b"", retain=True)
    assert journal.take() == [("retained", b"a", None)]
    world.pass_(200)
    assert journal.take() == [("ended", "sub", "a")]


def test_a_session_that_is_not_kept_is_not_told_about() -> None:
    journal = Recorder()
    world = World(journal=journal, gate=journal)
    device = connected(world, journal, "brief", 0)
    device.subscribe("a", qos=1)
    device.publish("a", b"x", 1, 1)
    assert {each[0] for each in journal.take()} <= {"answer"}


def test_qos_0_leaves_without_the_journal() -> None:
    journal = Recorder()
    world = World(journal=journal, gate=journal)
    sub, pub = connected(world, journal, "sub", 100), connected(world, journal, "pub", 0)
    sub.subscribe("a", qos=1)
    journal.take()
    pub.publish("a", b"x")
    assert sub.payloads() == [b"x"]
    assert journal.take() == []
