"""Promises of the short way: a plain PUBLISH that is a read of its own gets no other treatment than by the long one."""

from __future__ import annotations

import pytest
from mqtt_use import World

from penstock.mqtt import packets as p
from penstock.mqtt.access import Who
from penstock.mqtt.reasons import Reason

BOTH = pytest.mark.parametrize("version", [4, 5])


class OnlyAnn:
    def allows(self, who: Who, action: str, topic: str) -> bool:
        return action != "publish" or who.client_id == "ann"

    def rule(self, who: Who, action: str, topic: str) -> str:
        return "only ann publishes"


@BOTH
def test_every_message_of_a_topic_is_delivered_and_counted(version: int) -> None:
    world = World()
    pub, sub = world.device("pub", version), world.device("sub", version)
    sub.subscribe("a/#")
    counts, before = world.broker.counts, world.broker.counts.bytes_received
    for number in range(5):
        pub.publish("a/b", b"%d" % number)
    assert pub.link._short is world.broker.routes
    assert sub.payloads() == [b"0", b"1", b"2", b"3", b"4"]
    assert (counts.publish_received, counts.publish_sent) == (5, 5)
    assert (counts.publish_bytes_received, counts.publish_bytes_sent) == (5, 5)
    assert counts.bytes_received - before == 5 * (8 if version == 4 else 9)
    assert world.broker.sessions["sub"].delivered == 5


def test_rules_that_come_later_hold_for_who_is_connected() -> None:
    world = World()
    ann, bob, sub = world.device("ann"), world.device("bob"), world.device("sub")
    sub.subscribe("a")
    for each in (ann, bob, ann, bob):
        each.publish("a", b"free")
    world.broker.rules_changed(OnlyAnn())
    for _ in range(2):
        ann.publish("a", b"allowed")
        bob.publish("a", b"denied")
    assert sub.payloads() == [b"free"] * 4 + [b"allowed"] * 2
    world.broker.rules_changed(None)
    for _ in range(2):
        bob.publish("a", b"free")
    assert sub.payloads() == [b"free"] * 2


def test_a_subscription_that_comes_or_goes_is_seen_by_the_next_message() -> None:
    world = World()
    pub, one, two = world.device("pub"), world.device("one"), world.device("two")
    one.subscribe("a")
    for _ in range(2):
        pub.publish("a", b"1")
    two.subscribe("+")
    pub.publish("a", b"2")
    assert one.payloads() == [b"1", b"1", b"2"]
    one.send(p.Unsubscribe(9, ("a",)))
    pub.publish("a", b"3")
    assert two.payloads() == [b"2", b"3"]
    two.drop()
    pub.publish("a", b"4")
    assert one.payloads() == two.payloads() == []


def test_a_slow_receiver_is_dropped_for_and_the_others_are_not() -> None:
    world = World()
    pub, slow, quick = world.device("pub"), world.device("slow"), world.device("quick")
    slow.subscribe("a")
    quick.subscribe("a")
    pub.publish("a", b"1")
    slow.link.congested()
    pub.publish("a", b"2")
    slow.link.writable()
    pub.publish("a", b"3")
    assert slow.payloads() == [b"1", b"3"]
    assert quick.payloads() == [b"1", b"2", b"3"]
    assert world.broker.counts.dropped == {"slow": 1}


def test_a_packet_in_two_reads_is_put_together() -> None:
    world = World()
    pub, sub = world.device("pub", 4), world.device("sub", 4)
    sub.subscribe("a")
    packet = b"\x30\x04\x00\x01a!"
    for data in (packet, packet, packet[:3], packet[3:], packet, packet[:1], packet[1:] + packet):
        pub.send_raw(data)
    assert sub.payloads() == [b"!"] * 6


def test_nothing_is_taken_from_a_connection_that_was_taken_over() -> None:
    world = World()
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("a")
    pub.publish("a", b"1")
    pub.publish("a", b"2")
    world.device("pub")
    link = pub.link
    link.received(b"\x30\x05\x00\x01a\x00!")
    assert link._short is None
    assert sub.payloads() == [b"1", b"2"]


def test_a_wildcard_in_the_topic_is_refused_although_the_broker_published_to_it() -> None:
    world = World()
    pub = world.device("pub")
    pub.publish("a", b"1")
    world.broker.publish_message("a/+", b"its own mistake")
    (goodbye,) = pub.send_raw(b"\x30\x07\x00\x03a/+\x00x")
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason == Reason.TOPIC_NAME_INVALID
