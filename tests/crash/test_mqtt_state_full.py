"""Promise: a broker that has filled its own disk is emptied by the clients it keeps messages for, without a restart.

Publishers are refused with 0x97 meanwhile; nothing that was acknowledged is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from mqtt_kept import PatientDevice
from mqtt_use import Device, ManualLoop
from small_disk import SmallDisk

from penstock.errors import RetryError
from penstock.kernel.mqtt import make_run
from penstock.mqtt import packets as p
from penstock.mqtt.inlet import Inlet
from penstock.mqtt.packets import Ack, Kind
from penstock.mqtt.reasons import Reason
from penstock.mqtt.state_open import RESERVE, KeptBroker
from penstock.mqtt.state_options import PersistenceOptions
from penstock.mqtt.sys import SysTopics
from penstock.testing.clock import FakeClock

ROOM = 1536 << 10
RESERVED = 128 << 10
PAYLOAD = 2000
EXPIRY = p.Properties(session_expiry=100_000)


class FullWorld:
    """A broker on a small disk, a publisher, and a subscriber that comes and goes."""

    def __init__(self, sync: Any = "always", room: int = ROOM, reserve: int = RESERVED) -> None:
        self.disk, self.clock = SmallDisk(room), FakeClock()
        self.options = PersistenceOptions(
            sync=sync, segment_bytes=64 << 10, checkpoint_seconds=1e9, reserve_bytes=reserve, sync_interval_secs=3600.0
        )
        self.acked: list[bytes] = []
        self.got: list[bytes] = []
        self.early: list[Any] = []
        self.next = 0
        self.open()

    def open(self) -> None:
        self.loop = ManualLoop()
        self.kept = KeptBroker("data", None, self.options, loop=self.loop, clock=self.clock, disk=self.disk)
        assert not self.kept.problems

    def until(self, done: Callable[[], bool], *, passes: float = 0.0) -> None:
        """Let the broker go on until something is so; with ``passes`` its clock goes on too."""
        end = time.monotonic() + 30
        while not done():
            assert time.monotonic() < end, "it does not come to that"
            self.clock.pass_(passes)
            self.loop.run(later=bool(passes))
            time.sleep(0.0005)

    def answers(self, device: Device) -> list[Any]:
        """Return what comes next, or nothing if the connection ends."""
        found: list[Any] = []

        def came() -> bool:
            found.extend(device.read())
            return bool(found) or device.closed

        self.until(came)
        return found

    def connect(self, name: str, *, expiry: bool = True) -> tuple[Device, p.Connack]:
        device = PatientDevice(self.kept.broker, 5)
        device.send(p.Connect(name, 5, False, properties=EXPIRY if expiry else p.NONE))
        found = self.answers(device)
        self.early = found[1:]
        return device, found[0]

    def leave_behind(self, name: str, filter: str = "a/#") -> None:
        """Make a session that waits for everything."""
        device, _ = self.connect(name)
        device.send(p.Subscribe(1, (p.Filter(filter, 1),)))
        found = self.answers(device)
        assert found[0].reasons == (1,)
        device.drop()
        self.until(lambda: not self.kept.gate.busy)

    def publish(self, device: Device, count: int) -> int:
        """Publish messages of QoS 1, one turn each; return the last reason code."""
        reason = 0
        for _ in range(count):
            payload = b"%08d" % self.next + bytes(PAYLOAD)
            self.next += 1
            device.send(p.Publish("a/b", payload, 1, False, False, 1))
            found = self.answers(device)
            assert found, "a publisher was cut off"
            reason = found[0].reason
            if reason >= 0x80:
                break
            self.acked.append(payload)
        return reason

    def fill(self, device: Device) -> None:
        while not (reason := self.publish(device, 100)):
            assert self.disk.used <= self.disk.room
        assert reason == Reason.QUOTA_EXCEEDED
        assert not device.closed

    def fetch(self, name: str, most: int = 1 << 30) -> None:
        """Come back for what waits, and acknowledge all of it or so many."""
        device, connack = self.connect(name)
        assert connack.reason == 0
        assert connack.session_present
        session = self.kept.broker.sessions[name]

        def step() -> bool:
            nonlocal most
            early, self.early = self.early, []
            for packet in (*early, *device.read()):
                assert isinstance(packet, p.Publish)
                if most > 0:
                    most -= 1
                    self.got.append(packet.payload)
                    device.send(Ack(Kind.PUBACK, packet.packet_id))
            return most <= 0 or not (session.queue or session.exchange.messages)

        self.until(step, passes=0.01)
        device.drop()
        self.until(lambda: not self.kept.gate.busy, passes=0.01)


@pytest.mark.parametrize("sync", ["always", "interval", "none"])
def test_a_full_broker_is_emptied_by_its_subscriber_and_goes_on(sync: Any) -> None:
    world = FullWorld(sync)
    world.leave_behind("sub")
    publisher, _ = world.connect("pub")
    world.fill(publisher)
    journal = world.kept.journal
    assert len(world.acked) > 400
    assert journal.reserve.spent == "No space left on device"
    assert journal.trouble == ""
    assert world.disk.stat(f"data/{RESERVE}") is None
    assert "No space left" in SysTopics(world.kept.broker, "0").values()["persistence/state"]
    _, refused = world.connect("new")
    assert refused.reason == Reason.QUOTA_EXCEEDED, "a new session takes room"
    full = world.disk.used

    world.fetch("sub")
    world.until(lambda: not journal.full, passes=1.0)

    assert world.got == world.acked
    assert world.disk.used < full // 2, "the segments went"
    assert world.disk.stat(f"data/{RESERVE}").size == RESERVED  # type: ignore[union-attr]
    assert world.publish(publisher, 50) == 0, "publishers go on, on the connection they have"
    world.fetch("sub")
    assert world.got == world.acked
    world.kept.close()
    world.open()
    assert world.kept.broker.budget.queued_messages == 0
    world.kept.close()


def test_it_fills_and_empties_again_and_again_with_restarts_between() -> None:
    world = FullWorld("interval")
    world.leave_behind("sub")
    for restart in (False, True, False, True):
        publisher, _ = world.connect("pub")
        world.fill(publisher)
        if restart:
            world.kept.close()
            world.open()
        world.fetch("sub", most=len(world.acked) - len(set(world.got)) - 7)
        world.until(lambda: not world.kept.journal.full, passes=1.0)
    world.fetch("sub")
    assert set(world.got) == set(world.acked)
    world.kept.close()


def test_a_broker_starts_on_a_disk_that_others_have_filled_to_the_last_byte() -> None:
    world = FullWorld()
    world.leave_behind("sub")
    publisher, _ = world.connect("pub")
    assert world.publish(publisher, 300) == 0
    world.kept.close()
    world.disk.room = world.disk.used

    world.open()

    assert world.kept.journal.full
    assert not world.kept.journal.trouble
    world.fetch("sub")
    assert world.got == world.acked
    world.until(lambda: not world.kept.journal.full, passes=1.0)
    world.kept.close()


@pytest.mark.parametrize("expires", [True, False])
def test_a_member_of_a_group_whose_session_ends_on_a_full_disk_leaves_room_for_the_others(expires: bool) -> None:
    world = FullWorld()
    for name in ("gone", "sub"):
        world.leave_behind(name, "$share/g/a/#")
    publisher, _ = world.connect("pub")
    world.fill(publisher)
    gone = world.kept.broker.sessions["gone"]
    assert gone.queued_bytes > 4 * RESERVED  # what waits for it cannot be written once more
    if expires:
        gone.expires_at = world.clock.monotonic()
        world.kept.broker.session_due(gone)
    else:
        clean = PatientDevice(world.kept.broker, 5)
        clean.send(p.Connect("gone", 5, True))
    world.until(lambda: not world.kept.gate.busy, passes=0.01)

    assert world.kept.journal.trouble == ""
    world.fetch("sub")
    world.until(lambda: not world.kept.journal.full, passes=1.0)

    assert world.publish(publisher, 50) == 0, "publishers go on"
    world.fetch("sub")
    lost = world.kept.journal.deliveries.totals.lost["session ended"]
    assert len(world.got) == len({*world.got}) == len(world.acked) - lost
    world.kept.close()


def test_retained_messages_that_follow_a_subscription_leave_room_for_everybody_else() -> None:
    world = FullWorld()
    publisher, _ = world.connect("pub")
    for number in range(200):
        publisher.send(p.Publish(f"r/{number}", b"%03d" % number + bytes(PAYLOAD), 1, True, packet_id=1))
        world.answers(publisher)
    world.kept.checkpoints.begin()
    world.kept.gate.changed()
    world.until(lambda: world.kept.checkpoints.count > 0, passes=0.01)
    world.disk.room = world.disk.used + RESERVED  # not full, and too little for all of it at once

    device, _ = world.connect("sub")
    device.send(p.Subscribe(1, (p.Filter("r/#", 1),)))
    found: list[Any] = []

    def step() -> bool:
        world.kept.broker.tick()
        for packet in device.read():
            found.append(packet)
            if isinstance(packet, p.Publish):
                device.send(Ack(Kind.PUBACK, packet.packet_id))
        assert not world.kept.gate.trouble
        return len(found) == 201

    world.until(step, passes=0.1)
    assert {packet.payload[:3] for packet in found[1:]} == {b"%03d" % number for number in range(200)}
    world.kept.close()


def test_a_subscriber_may_ask_again_for_what_it_has_and_end_its_session() -> None:
    world = FullWorld()
    world.leave_behind("sub")
    world.leave_behind("gone")
    publisher, _ = world.connect("pub")
    world.fill(publisher)
    device, _ = world.connect("sub")
    device.send(p.Subscribe(2, (p.Filter("a/#", 1), p.Filter("b/#", 1))), p.Unsubscribe(3, ("a/#",)))
    found: list[Any] = []
    while len(found) < 2:
        found += [each for each in world.answers(device) if not isinstance(each, p.Publish)]
    assert found[0].reasons == (1, Reason.QUOTA_EXCEEDED)
    assert found[1].reasons == (0,)
    for name in ("gone", "sub"):
        clean = PatientDevice(world.kept.broker, 5)
        clean.send(p.Connect(name, 5, True))
        world.until(lambda: bool(clean.read()))  # noqa: B023
    world.until(lambda: not world.kept.journal.full, passes=1.0)
    assert world.publish(publisher, 10) in (0, Reason.NO_MATCHING_SUBSCRIBERS)
    world.kept.close()


def test_a_budget_that_refuses_messages_lets_a_subscriber_fetch_them() -> None:
    world = FullWorld("interval")
    world.leave_behind("sub")
    publisher, _ = world.connect("pub")
    assert world.publish(publisher, 100) == 0
    files = world.kept.journal.log.files
    world.kept.journal.refusal = "90 of 90 bytes are used"
    assert world.publish(publisher, 1) == Reason.QUOTA_EXCEEDED
    assert world.connect("new")[1].reason == Reason.QUOTA_EXCEEDED
    world.fetch("sub")
    assert world.got == world.acked
    world.until(lambda: world.kept.journal.log.files < files, passes=1.0)
    world.kept.close()


def test_who_publishes_from_within_is_told_to_try_again_and_loses_nothing() -> None:
    world = FullWorld()
    inlet = Inlet(world.kept.broker, "feed:alerts")
    world.kept.journal.refusal = "90 of 90 bytes are used"
    with pytest.raises(RetryError, match="90 of 90"):
        asyncio.run(inlet.publish([make_run(b"alerts/7", [b"hot"], 0, True)]))
    assert len(world.kept.broker.retained) == 0
    world.kept.close()


def test_without_a_reserve_a_full_disk_takes_nothing() -> None:
    world = FullWorld(reserve=0)
    world.leave_behind("sub")
    world.disk.room = world.disk.used
    publisher = PatientDevice(world.kept.broker, 5)
    publisher.send(p.Connect("brief", 5))
    world.until(lambda: bool(publisher.read()), passes=0.3)
    publisher.send(p.Publish("a/b", bytes(100), 1, False, False, 1))
    world.until(lambda: publisher.closed)
    _, refused = world.connect("sub")
    assert refused.reason == Reason.QUOTA_EXCEEDED
    world.disk.room = ROOM
    world.until(lambda: not world.kept.journal.full, passes=1.0)
    world.kept.close()
