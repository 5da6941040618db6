"""Quotas of one client."""

from __future__ import annotations

from typing import Any

import pytest
from mqtt_use import Device, World

from penstock.errors import OptionsError
from penstock.mqtt import packets as p
from penstock.mqtt.metered import MeteredLink
from penstock.mqtt.options import BrokerOptions


class Metered(Device):
    def __init__(self, world: World, **given: Any) -> None:
        super().__init__(world.broker)
        self.link = MeteredLink(world.broker)
        self.link.opened(self.wire)
        self.connect("pub", **given)


def test_who_publishes_more_than_its_quota_is_read_from_more_slowly_and_loses_nothing() -> None:
    world = World(messages_per_second=10.0)
    sub = world.device("sub")
    sub.subscribe("t")
    pub = Metered(world, keep_alive=60)
    pub.send(*[p.Publish("t", b"%d" % number) for number in range(10)])
    assert pub.wire.reading  # a burst of one second
    pub.send(*[p.Publish("t", b"more") for _ in range(5)])
    assert not pub.wire.reading
    assert pub.wire.deadline is None  # who is not read from is not silent
    assert len(sub.payloads()) == 15
    world.pass_(0.4)
    assert not pub.wire.reading
    world.pass_(0.2)
    assert pub.wire.reading
    assert pub.wire.deadline == 90


def test_bytes_are_counted_as_well() -> None:
    world = World(bytes_per_second=1000.0)
    pub = Metered(world)
    pub.publish("t", b"x" * 2000)
    assert not pub.wire.reading
    world.pass_(1.1)
    assert pub.wire.reading


def test_a_quota_and_a_tap_that_hold_the_same_client_do_not_release_each_others_hold() -> None:
    world = World(messages_per_second=1.0)
    pub = Metered(world)
    pub.link.hold_reading()
    pub.send(p.Publish("t"), p.Publish("t"), p.Publish("t"))
    world.pass_(10)
    assert not pub.wire.reading  # the tap still holds it
    pub.link.go_on_reading()
    assert pub.wire.reading
    pub.send(p.Publish("t"), p.Publish("t"), p.Publish("t"))
    pub.link.hold_reading()
    pub.link.go_on_reading()
    assert not pub.wire.reading  # the quota is still used up
    world.pass_(10)
    assert pub.wire.reading


def test_a_client_that_left_meanwhile_is_left_alone() -> None:
    world = World(messages_per_second=1.0)
    pub = Metered(world)
    pub.send(p.Publish("t"), p.Publish("t"), p.Publish("t"))
    pub.drop()
    world.pass_(10)
    assert not pub.wire.reading


@pytest.mark.parametrize("name", ["messages_per_second", "bytes_per_second"])
def test_a_quota_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(OptionsError, match=name):
        BrokerOptions(**{name: 0.0})
