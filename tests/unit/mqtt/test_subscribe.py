"""Promises about SUBSCRIBE, UNSUBSCRIBE, retained messages and shared subscriptions."""

from __future__ import annotations

import random

import pytest
from mqtt_statements import statement
from mqtt_use import World

from penstock.mqtt import packets as p
from penstock.mqtt.packets import Kind
from penstock.mqtt.reasons import Reason
from penstock.mqtt.topics import matches

BOTH = pytest.mark.parametrize("version", [4, 5])


def published(packets: list[p.Packet]) -> list[p.Publish]:
    return [packet for packet in packets if isinstance(packet, p.Publish)]


@statement("3.8.3-2", "3.10.3-2", v3=("3.8.3-3", "3.10.3-2"))
@BOTH
@pytest.mark.parametrize("first", ["82", "a2"])
def test_no_filter_at_all_closes(version: int, first: str) -> None:
    device = World().device(version=version)
    device.send_raw(bytes.fromhex(f"{first} 02 00 01" if version == 4 else f"{first} 03 00 01 00"))
    assert device.closed


@statement("3.8.3-5", v3="3.8.3-4")
@pytest.mark.parametrize(
    "raw", ["82 07 00 01 00 00 01 61 40", "82 07 00 01 00 00 01 61 80", "82 07 00 01 00 00 01 61 03"]
)
def test_reserved_options_close(raw: str) -> None:
    device = World().device()
    answers = device.send_raw(bytes.fromhex(raw))
    assert [each.reason for each in answers] == [Reason.MALFORMED_PACKET]  # type: ignore[union-attr]


@statement(
    "3.8.4-1",
    "3.8.4-2",
    "3.8.4-5",
    "3.8.4-6",
    "3.8.4-7",
    "3.9.3-1",
    "3.9.3-2",
    v3=("3.8.4-1", "3.8.4-2", "3.8.4-4", "3.8.4-5", "3.9.3-1", "3.9.3-2"),
)
@BOTH
def test_a_suback_has_the_id_and_one_code_for_each_filter_in_order(version: int) -> None:
    device = World().device(version=version)
    wanted = (p.Filter("a", 2), p.Filter("a/#/b", 1), p.Filter("b", 1), p.Filter("x+", 0), p.Filter("$share//x"))
    (suback,) = device.send(p.Subscribe(77, wanted))
    bad = 0x80 if version == 4 else Reason.TOPIC_FILTER_INVALID
    assert suback == p.Suback(77, (2, bad, 1, bad, bad))


@statement(
    "3.8.3-1",
    "4.7.1-1",
    "4.7.1-2",
    "4.7.3-1",
    "4.7.3-2",
    "4.7.3-3",
    "4.7.3-4",
    v3=("4.7.1-2", "4.7.1-3", "4.7.3-2", "4.7.3-3", "4.7.3-4", "4.7.3-1", "3.8.3-1", "3.8.3-2"),
)
@pytest.mark.parametrize(
    ("filter", "topic", "hit"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
        ("sport/#", "sport", True),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("a//b", "a/b", False),
        ("a/+/b", "a//b", True),
        ("A", "a", False),
        ("\u00e9", "e\u0301", False),
        ("#", "x" * 65535, True),
        ("/" * 100, "/" * 100, True),
    ],
)
def test_a_filter_matches_level_by_level(filter: str, topic: str, hit: bool) -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    pub.publish(topic, b"kept", retain=True)
    kept = published(sub.subscribe(filter))
    assert bool(kept) == hit
    pub.publish(topic, b"live")
    assert bool(sub.messages()) == hit


@statement("3.8.4-3", "3.8.4-4", "3.3.1-9", v3="3.8.4-3")
@BOTH
def test_the_same_filter_again_replaces_its_options_and_sends_what_is_retained_again(version: int) -> None:
    world = World()
    sub, pub = world.device("sub", version), world.device("pub")
    pub.publish("a", b"kept", 1, 1, retain=True)
    assert [m.qos for m in published(sub.subscribe("a", qos=0))] == [0]
    assert [m.qos for m in published(sub.subscribe("a", qos=1))] == [1]
    pub.publish("a", b"live", 1, 1)
    assert [m.qos for m in sub.messages()] == [1]
    assert world.broker.subscription_count == 1


@statement("3.3.1-9", "3.3.1-10", "3.3.1-11")
def test_retain_handling_says_when_retained_messages_come() -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    pub.publish("a", b"kept", retain=True)
    assert len(published(sub.subscribe(p.Filter("a", retain_handling=2)))) == 0
    assert len(published(sub.subscribe(p.Filter("a", retain_handling=1)))) == 0
    assert len(published(sub.subscribe(p.Filter("a", retain_handling=0)))) == 1
    assert len(published(sub.subscribe(p.Filter("+", retain_handling=1)))) == 1
    sub.send(p.Unsubscribe(9, ("+",)))
    assert len(published(sub.subscribe(p.Filter("+", retain_handling=1)))) == 1


@statement(
    "3.3.1-5", "3.3.1-6", "3.3.1-7", "3.3.1-8", v3=("3.3.1-5", "3.3.1-6", "3.3.1-10", "3.3.1-11", "3.3.1-12", "3.3.1-7")
)
@BOTH
def test_the_last_retained_message_of_a_topic_is_kept_and_an_empty_one_removes_it(version: int) -> None:
    world = World()
    pub, live = world.device("pub", version), world.device("live")
    live.subscribe("a")
    pub.publish("a", b"1", retain=True)
    pub.publish("a", b"not kept")
    pub.publish("a", b"2", 1, 1, retain=True)
    assert [m.payload for m in published(world.device("s1").subscribe("a", qos=2))] == [b"2"]
    pub.publish("a", b"", retain=True)
    assert published(world.device("s2").subscribe("a")) == []
    assert len(world.broker.retained) == 0
    assert live.payloads() == [b"1", b"not kept", b"2", b""]


def test_of_a_run_of_retained_messages_the_last_is_kept() -> None:
    world = World()
    pub = world.device("pub")
    pub.send(*(p.Publish("a", b"%d" % n, retain=True) for n in range(5)))
    assert [m.payload for m in published(world.device("s").subscribe("a"))] == [b"4"]
    pub.send(p.Publish("a", b"x", retain=True), p.Publish("a", b"", retain=True))
    assert len(world.broker.retained) == 0


@statement("3.3.1-12", "3.3.1-13", v3=("3.3.1-8", "3.3.1-9"))
def test_the_retain_flag_is_1_from_the_store_and_0_live_unless_as_published() -> None:
    world = World()
    pub = world.device("pub")
    plain, as_published, old = world.device("a"), world.device("b"), world.device("c", 4)
    for device in (plain, old):
        device.subscribe("t", qos=1)
    as_published.subscribe(p.Filter("t", 1, retain_as_published=True))
    pub.publish("t", b"x", retain=True)
    pub.publish("t", b"y", 1, 1, retain=True)
    pub.publish("t", b"z")
    assert [m.retain for m in plain.messages()] == [False, False, False]
    assert [m.retain for m in old.messages()] == [False, False, False]
    assert [m.retain for m in as_published.messages()] == [True, True, False]
    assert [m.retain for m in published(world.device("d").subscribe("t"))] == [True]
    assert [m.retain for m in published(world.device("e", 4).subscribe("t"))] == [True]


def test_a_retained_message_expires_and_what_is_left_is_told() -> None:
    world = World()
    world.device("pub").publish("a", b"x", retain=True, properties={"message_expiry": 10})
    world.pass_(4)
    assert [m.properties.message_expiry for m in published(world.device("s").subscribe("a"))] == [6]
    world.pass_(7)
    assert len(world.broker.retained) == 0
    assert published(world.device("t").subscribe("a")) == []


def test_retained_messages_follow_a_subscriber_at_its_own_pace() -> None:
    world = World()
    pub = world.device("pub")
    for number in range(100):
        pub.publish(f"t/{number}", b"old", retain=True)
    sub = world.device("sub")
    sub.link.congested()
    assert sub.subscribe("t/#") == [p.Suback(1, (0,))]
    pub.publish("t/7", b"new", retain=True)
    pub.publish("t/8", b"", retain=True)
    sub.link.writable()
    got = {m.topic: m.payload for m in sub.messages()}
    assert len(got) == 99
    assert got["t/7"] == b"new"  # it came late, so it is the one that counts now
    assert "t/8" not in got


@statement(
    "3.10.4-1",
    "3.10.4-2",
    "3.10.4-4",
    "3.10.4-5",
    "3.10.4-6",
    "3.11.3-1",
    "3.11.3-2",
    "3.10.3-1",
    v3=("3.10.4-1", "3.10.4-2", "3.10.4-4", "3.10.4-5", "3.10.4-6", "3.10.3-1"),
)
@BOTH
def test_unsubscribe_goes_by_the_exact_text_and_is_always_answered(version: int) -> None:
    world = World()
    sub, pub = world.device("sub", version), world.device("pub")
    sub.subscribe("a/+", "b")
    codes = (0, 0x11, 0x11) if version == 5 else ()
    assert sub.send(p.Unsubscribe(9, ("a/+", "a/#", "c"))) == [p.Unsuback(9, codes)]
    pub.publish("a/x")
    pub.publish("b")
    assert [m.topic for m in sub.messages()] == ["b"]
    assert world.broker.subscription_count == 1


@statement("3.10.4-3", v3="3.10.4-3")
def test_what_is_under_way_is_finished_after_an_unsubscribe() -> None:
    world = World()
    sub, pub = world.device("sub", properties={"session_expiry": 9, "receive_maximum": 1}), world.device("pub")
    sub.subscribe("a", qos=2)
    pub.publish("a", b"1", 2, 1)
    pub.publish("a", b"2", 2, 2)
    sub.send(p.Unsubscribe(9, ("a",)))
    assert sub.ack(Kind.PUBREC, 1) == [p.Ack(Kind.PUBREL, 1)]
    assert [m.payload for m in published(sub.ack(Kind.PUBCOMP, 1))] == [b"2"]


@statement("4.8.2-1", "4.8.2-2")
@pytest.mark.parametrize("filter", ["$share//a", "$share/g", "$share/g/", "$share/a+/b", "$share/#/b", "$share"])
def test_a_shared_filter_has_a_name_without_wildcards_and_a_filter(filter: str) -> None:
    device = World().device()
    assert device.subscribe(filter) == [p.Suback(1, (Reason.TOPIC_FILTER_INVALID,))]


@statement("4.8.2-3", "3.8.4-8")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_member_of_each_group_strictly_in_turn(qos: int) -> None:
    world = World()
    members = [world.device(f"m{number}") for number in range(3)]
    other, plain, pub = world.device("other"), world.device("plain"), world.device("pub")
    for number, device in enumerate(members):
        device.subscribe("$share/g/t/#", qos=number)
    other.subscribe("$share/h/t/#", qos=2)
    plain.subscribe("t/#", qos=2)
    pub.send(*(p.Publish("t/x", b"%d" % n, qos, packet_id=n + 1 if qos else 0) for n in range(9)))
    got = [device.messages() for device in members]
    assert [[int(m.payload) for m in each] for each in got] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [{m.qos for m in each} for each in got] == [{0}, {min(1, qos)}, {qos}]
    assert len(other.messages()) == len(plain.messages()) == 9


def test_a_client_with_a_shared_and_a_plain_subscription_gets_both_and_no_retained_for_the_shared() -> None:
    world = World()
    device, pub = world.device("dev"), world.device("pub")
    pub.publish("t", b"kept", retain=True)
    assert published(device.subscribe("$share/g/t")) == []
    assert len(published(device.subscribe("t"))) == 1
    pub.publish("t", b"live")
    assert device.payloads() == [b"live", b"live"]


@statement("4.8.2-4", "4.8.2-5")
def test_absent_members_are_passed_over_and_what_one_has_begun_stays_with_it() -> None:
    world = World()
    keep = {"properties": {"session_expiry": 100}}
    one, two, pub = world.device("one", **keep), world.device("two", **keep), world.device("pub")
    for device in (one, two):
        device.subscribe("$share/g/t", qos=2)
    pub.publish("t", b"1", 2, 1)
    assert one.payloads() == [b"1"]
    one.drop()
    for number in (2, 3):
        pub.publish("t", b"%d" % number, 2, number)
    assert two.payloads() == [b"2", b"3"]
    one = world.device("one", clean=False, **keep)
    assert [(m.payload, m.dup) for m in published(one.rest)] == [(b"1", True)]
    one.drop()
    two.drop()
    assert pub.publish("t", b"4", 2, 4) == [p.Ack(Kind.PUBREC, 4)]
    one = world.device("one", clean=False, **keep)
    two = world.device("two", clean=False, **keep)
    assert sorted(m.payload for m in published(one.rest + two.rest) if not m.dup) == [b"4"]


def test_members_that_come_and_go_do_not_disturb_the_turn() -> None:
    world = World()
    devices = {name: world.device(name) for name in "abc"}
    pub = world.device("pub")
    for device in devices.values():
        device.subscribe("$share/g/t")
    order = []

    def next_one() -> None:
        pub.publish("t")
        order.extend(name for name, device in devices.items() if device.messages())

    next_one()
    devices["a"].send(p.Unsubscribe(1, ("$share/g/t",)))
    next_one()
    next_one()
    next_one()
    assert order == ["a", "b", "c", "b"]
    for name in "bc":
        devices[name].drop()
    assert world.broker.groups == {}
    assert len(world.broker.tree) == 0


def test_a_refused_filter_and_too_many_subscriptions_get_their_codes() -> None:
    device = World(refused_filters=("#",), max_subscriptions=2, max_topic_levels=3).device()
    (suback,) = device.subscribe("#", "a", "b", "c", "a", "1/2/3/4")
    assert suback == p.Suback(1, (0x80, 0, 0, Reason.QUOTA_EXCEEDED, 0, Reason.TOPIC_FILTER_INVALID))


def test_routes_follow_every_change_of_subscriptions() -> None:
    """The cache against matching by hand, over many changes and topics."""
    rng = random.Random(7)
    world = World()
    pub = world.device("pub")
    devices = [world.device(f"d{number}") for number in range(4)]
    wanted: dict[int, set[str]] = {number: set() for number in range(4)}
    levels = ["a", "b", "+"]
    for turn in range(600):
        number = rng.randrange(4)
        name = "/".join(rng.choice(levels) for _ in range(rng.randint(1, 3))) + rng.choice(["", "", "/#"])
        if name in wanted[number] and rng.random() < 0.7:
            wanted[number].discard(name)
            devices[number].send(p.Unsubscribe(1, (name,)))
        else:
            wanted[number].add(name)
            devices[number].subscribe(name)
        for _ in range(rng.choice([0, 1, 4])):
            topic = "/".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
            pub.publish(topic, b"%d" % turn)
            for index, device in enumerate(devices):
                assert bool(device.messages()) == any(matches(each, topic) for each in wanted[index]), (topic, index)
    assert world.broker.routes.hits > 0
