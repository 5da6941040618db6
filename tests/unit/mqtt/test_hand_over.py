"""What a member of a shared group leaves undone when its session ends goes to the others: once, in order, kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from mqtt_state_use import Kept
from mqtt_statements import statement
from mqtt_use import Device, ManualLoop, World

from penstock.mqtt import packets as p, state
from penstock.mqtt.deliveries import measure
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_options import PersistenceOptions


@statement("4.8.2-5")
def test_what_a_member_has_not_finished_when_its_session_ends_goes_to_another_one() -> None:
    world = World()
    brief = world.device("brief", properties={"receive_maximum": 2})
    other, pub = world.device("other"), world.device("pub")
    brief.subscribe("$share/g/t/#", qos=2)
    other.subscribe("$share/h/t/#", "$share/g/t/never", qos=2)
    for number, qos in enumerate((1, 2, 1, 2), 1):  # two are under way, two wait for room
        pub.publish("t/x", b"%d" % number, qos, number)
    assert brief.payloads() == [b"1", b"2"]
    other.read()
    other.subscribe("$share/g/t/#", qos=2)
    brief.drop()
    assert [(m.payload, m.qos, m.dup) for m in other.messages()] == [
        (b"1", 1, False),
        (b"3", 1, False),
        (b"4", 2, False),
    ]
    other.drop()  # nobody is left: then it is over
    assert world.broker.sessions.keys() == {"pub"}
    assert (world.broker.budget.queued_messages, world.broker.budget.queued_bytes) == (0, 0)


def test_what_may_have_come_by_another_subscription_or_has_expired_is_not_handed_on() -> None:
    world = World()
    one, other, pub = world.device("one"), world.device("other"), world.device("pub")
    one.subscribe("$share/g/t/#", "t/plain", qos=1)
    other.subscribe("$share/g/t/#", qos=1)
    other.link.congested()
    pub.publish("t/plain", b"perhaps the plain one", 1, 1)
    pub.publish("t/old", b"late", 1, 2, properties={"message_expiry": 5})
    pub.publish("t/new", b"new", 1, 3, properties={"message_expiry": 50})
    assert len(one.messages()) == 4
    world.pass_(10)
    one.drop()
    other.link.writable()
    assert [(m.payload, m.properties.message_expiry) for m in other.messages()] == [(b"new", 40)]


def test_the_queue_of_a_member_that_does_not_come_back_goes_to_the_others_and_holds_nobody_up() -> None:
    kept = Kept()
    away = kept.device("away", expiry=60)
    away.subscribe("$share/g/t", qos=1)
    away.drop()
    pub = kept.device("pub")
    for start in range(0, 2500, 250):
        pub.send(*(p.Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(start, start + 250)))
    kept.settle()
    kept.kill()
    others = [kept.subscriber(name, "$share/g/t") for name in ("one", "two")]
    for device in others:
        device.read()
    kept.clock.pass_(61)
    turns = 0
    while "away" in kept.broker.sessions:
        kept.tick(0.01)
        turns += 1
        kept.settle()
    assert turns == 3
    got = [[int(m.payload) for m in device.messages()] for device in others]
    assert sorted(got[0] + got[1]) == list(range(2500))
    assert all(each == sorted(each) and len(each) == 1250 for each in got)
    totals = kept.kept.journal.deliveries.totals
    assert (totals.came, totals.went, totals.lost, totals.owed) == (5000, 0, {"handed on": 2500}, 2500)
    kept.kill()
    assert kept.kept.problems == []
    assert kept.kept.journal.deliveries.totals == totals
    kept.kept.close()


@pytest.mark.parametrize("expiry", [None, 0, 1000])
def test_all_that_a_client_without_a_session_leaves_to_its_group_is_handed_on_bit_by_bit(expiry: int | None) -> None:
    world: World | Kept = World(max_queued_messages=10_000) if expiry is None else Kept(max_queued_messages=10_000)
    pass_ = world.tick if isinstance(world, Kept) else world.pass_
    brief = world.device("brief") if isinstance(world, World) else world.device("brief", expiry=expiry or 0)
    brief.subscribe("$share/g/t", "own", qos=1)
    brief.link.congested()
    pub = world.device("pub")
    for start in range(0, 2500, 250):
        pub.send(*(p.Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(start, start + 250)))
    other = world.device("other")
    other.subscribe("$share/g/t", qos=1)
    if expiry:
        brief.bye(session_expiry=0)
    else:
        brief.drop()
    assert world.broker.sessions["brief"].queued_messages == 1500  # everybody else has a turn first
    if isinstance(world, Kept):
        assert world.kept.journal.deliveries.totals.owed == measure(world.broker.sessions.values())
    answers = pub.publish("own", b"x", 1, 9)
    if isinstance(world, Kept):
        world.settle()
    ack = [*answers, *pub.read()][-1]
    assert isinstance(ack, p.Ack)
    assert (ack.packet_id, ack.reason < 0x80) == (9, True)  # nobody is refused because of it
    while "brief" in world.broker.sessions:
        pass_(0.01)
    pass_(0.01)
    assert [int(m.payload) for m in other.messages()] == list(range(2500))


def test_what_an_ended_session_leaves_to_its_group_is_handed_on_after_a_kill_as_well() -> None:
    kept = Kept(max_queued_messages=10_000)
    ended = kept.device("ended")
    ended.subscribe("$share/g/t", qos=1)
    ended.link.congested()
    pub = kept.device("pub")
    for start in range(0, 2500, 250):
        pub.send(*(p.Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(start, start + 250)))
    other = kept.subscriber("other", "$share/g/t")
    ended.bye(session_expiry=0)
    kept.settle()
    kept.kept.checkpoints.begin()
    kept.kept.gate.changed()
    kept.settle()
    assert "ended" in kept.broker.sessions
    kept.kill()
    while "ended" in kept.broker.sessions:
        kept.tick(0.01)
    other = kept.device("other")
    found = [int(each.payload) for each in other.rest if isinstance(each, p.Publish)]  # type: ignore[attr-defined]
    totals = kept.kept.journal.deliveries.totals
    assert (found, totals.owed, totals.lost) == (list(range(2500)), 2500, {"handed on": 2500})
    assert kept.kept.problems == []
    kept.kept.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_members_whose_sessions_end_together_do_not_hand_on_to_each_other(restarts: bool) -> None:
    kept = Kept(max_queued_messages=10_000)
    for name in ("one", "two"):
        device = kept.device(name, expiry=60)
        device.subscribe("$share/g/t", qos=1)
        device.drop()
    pub = kept.device("pub", expiry=10_000)
    for start in range(0, 3000, 250):
        pub.send(*(p.Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(start, start + 250)))
    kept.settle()
    if restarts:
        kept.leave()
    kept.clock.pass_(61)
    if restarts:
        kept.open()
    for _ in range(10):
        kept.tick(0.01)
    assert kept.broker.sessions.keys() == {"pub"}
    totals = kept.kept.journal.deliveries.totals
    assert (totals.came, totals.lost, totals.owed) == (3000, {"session ended": 3000}, 0)
    kept.kept.close()


def test_a_client_that_comes_while_the_queue_of_its_ended_session_is_handed_on_begins_a_new_one() -> None:
    kept = Kept()
    away, other = kept.device("away", expiry=60), kept.subscriber("other", "$share/g/t")
    away.subscribe("$share/g/t", "own", qos=1)
    away.drop()
    other.link.congested()
    pub = kept.device("pub")
    for start in range(0, 2000, 250):
        topics = ("t" if n % 2 else "own" for n in range(start, start + 250))
        pub.send(*(p.Publish(each, b"x", 1, packet_id=n + 1) for n, each in enumerate(topics, start)))
    kept.settle()
    kept.tick(61)
    assert "away" in kept.broker.sessions  # it is being handed on
    away = kept.device("away")
    assert not away.connack.session_present  # type: ignore[attr-defined]
    kept.tick(1)
    assert away.messages() == []
    assert kept.broker.sessions["other"].queued_messages == 1000
    totals = kept.kept.journal.deliveries.totals
    assert (totals.lost, totals.owed) == ({"handed on": totals.lost["handed on"], "session ended": 1000}, 1000)
    kept.kept.close()


class KeptInFolder(Kept):
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        super().__init__()

    def open(self) -> None:
        self.loop = ManualLoop()
        self.kept = KeptBroker(self.folder, self.options, PersistenceOptions(), loop=self.loop, clock=self.clock)
        self.broker = self.kept.broker


@pytest.mark.parametrize("narrow", [False, True])
def test_a_member_that_begins_anew_leaves_all_of_its_queue_to_its_group_where_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow: bool
) -> None:
    kept = KeptInFolder(tmp_path / "data")
    for name in ("away", "other"):
        device = kept.device(name)
        device.subscribe("$share/g/t", qos=1)
        device.drop()
    pub = kept.device("pub")
    for number in range(1, 201):
        pub.publish("t", bytes(64 << 10), 1, number)
        kept.settle()
    away = kept.broker.sessions["away"]
    assert (away.queued_messages, away.queued_bytes > kept.kept.journal.at_once) == (100, True)
    if narrow:
        monkeypatch.setattr(state, "free_bytes", lambda _: 20 << 20)
    device = Device(kept.broker)
    device.send(p.Connect("away", 5, True))
    kept.settle()
    totals = kept.kept.journal.deliveries.totals
    handed = totals.lost["handed on"]
    assert kept.broker.sessions["other"].queued_messages == 100 + handed
    assert handed in (range(50, 70) if narrow else [100])
    assert totals.owed == 100 + handed
    kept.kept.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_handed_on_in_the_turn_in_which_it_came_is_there_after_a_kill(restarts: bool) -> None:
    kept = Kept()
    away = kept.device("away")
    away.subscribe("$share/g/#", "own/#", qos=1)
    away.drop()
    brief, pub = kept.device("brief"), kept.device("pub")
    brief.subscribe("$share/g/#", qos=1)
    kept.settle()
    for number, topic in enumerate(("job", "own/1", "job", "own/2", "job"), 1):
        pub.publish(topic, b"%d" % number, 1, number)
    brief.bye(session_expiry=0)  # in the same turn: nothing of it was written yet
    kept.settle()
    first = Device(kept.broker)
    first.send(p.Connect("away", 5, False, properties=p.Properties(session_expiry=1000, receive_maximum=1)))
    kept.settle()
    if restarts:
        kept.restart()
    else:
        kept.kill()
    assert kept.broker.sessions["away"].owed == kept.kept.journal.deliveries.totals.owed == 7
    away = kept.device("away")
    found = [each.payload for each in away.rest if isinstance(each, p.Publish)]  # type: ignore[attr-defined]
    assert sorted(found) == [b"1", b"2", b"2", b"3", b"4", b"4", b"5"]
    kept.kept.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_message_that_waits_for_a_client_twice_is_there_as_often_after_a_kill(restarts: bool) -> None:
    kept = Kept()
    props = p.Properties(session_expiry=1000, receive_maximum=1)
    sub = kept.device("sub")
    sub.subscribe("$share/g/#", "$share/h/#", "#", qos=2)
    sub.drop()
    pub = kept.device("pub")
    for number in (1, 2):
        pub.publish("a", b"%d" % number, 2, number)
        kept.settle()
    sub = Device(kept.broker)
    sub.send(p.Connect("sub", 5, False, properties=props))  # the first copy of three is under way
    kept.settle()
    if restarts:
        kept.restart()
    else:
        kept.kill()
    totals = kept.kept.journal.deliveries.totals
    assert (totals.came, totals.owed, kept.broker.sessions["sub"].owed) == (6, 6, 6)
    sub = kept.device("sub")
    got = [each for each in sub.rest if isinstance(each, p.Publish)]  # type: ignore[attr-defined]
    assert sorted(each.payload for each in got) == [b"1"] * 3 + [b"2"] * 3
    kept.kept.close()
