"""Promise: a disk that is full, read-only or fails to sync under load makes nobody lose what was acknowledged.

Clients are told, QoS 0 goes on, and when the disk takes writes again so does the broker, without a restart.
"""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest
from mqtt_kept import Fleet, KeptWorld
from mqtt_use import Device

from penstock.mqtt import packets as p, state_checkpoint
from penstock.mqtt.reasons import Reason
from penstock.mqtt.sys import SysTopics

FAULTS = {
    "full": (("write_at", "write_many_at", "create"), (errno.ENOSPC, "No space left on device")),
    "read-only": (
        ("write_at", "write_many_at", "create", "modify", "rename", "remove", "truncate", "sync_folder"),
        (errno.EROFS, "Read-only file system"),
    ),
    "sync": (("sync",), (errno.EIO, "Input/output error")),
}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("sync", ["always", "interval"])
def test_trouble_in_the_middle_of_load_loses_nothing_acknowledged_and_passes(
    fault: str, sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_checkpoint, "AGAIN_SECONDS", 0.0)
    fleet = Fleet(11)
    world = KeptWorld(fleet, sync)
    world.everyone()
    for _ in range(3):
        for _ in range(5):
            world.some_load()
        world.fault = FAULTS[fault]
        for _ in range(10):
            world.some_load()
            world.loop.run(later=True)
        world.fault = None
        recover(world)
        assert world.kept.journal.trouble == ""
    world.finish()
    before = acknowledged(fleet)
    for publisher in fleet.publishers:
        publisher.publish(5)
    world.finish()
    assert acknowledged(fleet) > before
    for publisher in fleet.publishers:  # and what was kept is there after a restart
        publisher.refused.clear()
    world.kept.close()
    fleet.lost()
    world.open()
    world.finish()
    world.kept.close()


def acknowledged(fleet: Fleet) -> int:
    return sum(len(publisher.acked) for publisher in fleet.publishers)


def recover(world: KeptWorld) -> None:
    until = time.monotonic() + 20
    kept = world.kept
    while why := kept.journal.reserve.spent or kept.journal.trouble or kept.gate.trouble:
        assert time.monotonic() < until, why
        world.loop.run(later=True)
        time.sleep(0.001)


class Clients:
    """A publisher and a subscriber with sessions, of one version."""

    def __init__(self, world: KeptWorld, version: int) -> None:
        self.world = world
        self.pub, self.sub = self._connect("pub", version), self._connect("sub", version)
        self.sub.send(p.Subscribe(1, (p.Filter("a/#", 1),)))
        self.settle()

    def _connect(self, name: str, version: int) -> Device:
        device = self.world.device(version)
        properties = p.Properties(session_expiry=1000) if version == 5 else p.NONE
        device.send(p.Connect(name, version, False, properties=properties))
        self.settle()
        device.read()
        return device

    def settle(self) -> None:
        until = time.monotonic() + 20
        while self.world.kept.gate.busy and not self.world.kept.gate.trouble and time.monotonic() < until:
            self.world.loop.run()
            time.sleep(0.0005)


@pytest.mark.parametrize("version", [4, 5])
def test_who_publishes_while_the_disk_is_full_is_told_and_qos_0_goes_on(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_checkpoint, "AGAIN_SECONDS", 0.0)
    world = KeptWorld(Fleet(0))
    clients = Clients(world, version)
    world.fault = FAULTS["full"]
    first = clients.pub
    first.publish("a/1", b"lost?", 1, 1)
    clients.settle()
    assert first.closed  # its turn was decided when the disk said no
    left = [packet for packet in first.read() if not isinstance(packet, p.Connack)]
    assert left == [] if version == 4 else [packet.reason for packet in left] == [Reason.QUOTA_EXCEEDED]

    brief = Device(world.kept.broker, version)
    told = brief.send(p.Connect("brief", version), p.Subscribe(1, (p.Filter("$SYS/#", 0),)))
    assert [type(packet) for packet in told[:2]] == [p.Connack, p.Suback], "who has nothing kept is let in all the same"
    broker = world.kept.broker
    assert broker.journal.trouble
    assert "No space left" in SysTopics(broker, "0").values()["persistence/state"]
    refused = world.device(version)
    refused.send(p.Connect("new", version, False, properties=_expiry(version)))
    answer = refused.read()[0]
    assert answer.reason == (Reason.QUOTA_EXCEEDED if version == 5 else 3)  # type: ignore[union-attr]
    assert refused.closed
    world.fault = None
    recover(world)
    clients.settle()
    assert not brief.closed

    world.fault = FAULTS["full"]
    brief.publish("a/2", b"too late", 1, 5)
    clients.settle()
    other = Device(world.kept.broker, version)
    world.fault = None
    recover(world)
    other.send(p.Connect("other", version))
    clients.settle()
    other.read()
    clients.sub.read()
    world.kept.journal.error = "No space left on device"  # as a turn that failed leaves it
    other.publish("a/3", b"now", 0)
    assert clients.sub.payloads() == [b"now"]
    answers = other.publish("a/3", b"refused", 1, 9)
    if version == 5:
        assert [(packet.packet_id, packet.reason) for packet in answers if isinstance(packet, p.Ack)] == [(9, 0x97)]
        assert not other.closed
    else:
        assert other.closed
        assert answers == []
    assert world.kept.broker.counts.dropped["disk"] >= 1
    world.kept.journal.error = ""
    world.kept.close()


def test_a_sync_that_fails_for_long_leaves_no_files_behind_and_says_when_it_is_over() -> None:
    world = KeptWorld(Fleet(0))
    clients = Clients(world, 5)
    said: list[str] = []
    world.kept.gate.on_trouble = lambda: said.append(world.kept.gate.trouble)
    before = len(world.disk.list("data/journal"))
    world.fault = FAULTS["sync"]
    clients.pub.publish("a/1", b"in doubt", 1, 1)
    until = time.monotonic() + 20
    while not said and time.monotonic() < until:
        world.loop.run()
        time.sleep(0.0005)
    for _ in range(20):
        world.loop.run(later=True)
    assert len(world.disk.list("data/journal")) <= before + 1
    world.fault = None
    recover(world)
    world.loop.run()
    assert [bool(reason) for reason in said] == [True, False], said
    assert "Input/output error" in said[0]
    world.kept.close()


def _expiry(version: int) -> p.Properties:
    return p.Properties(session_expiry=1000) if version == 5 else p.NONE
