"""What a broker owes to its sessions adds up, through acknowledgements, losses, restarts and kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqtt_use import Device, ManualLoop

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.mqtt import packets as p
from penstock.mqtt.deliveries import DeliveryTotals, measure, read_deliveries
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_options import PersistenceOptions
from penstock.testing.clock import FakeClock


class Kept:
    """A broker on a folder, driven without sockets."""

    def __init__(self, folder: Path, clock: Clock = SYSTEM_CLOCK, **options: Any) -> None:
        self.folder, self.loop = folder, ManualLoop()
        persistence = PersistenceOptions(sync="none")
        self.kept = KeptBroker(str(folder), BrokerOptions(**options), persistence, loop=self.loop, clock=clock)

    def device(self, name: str, **connect: Any) -> Device:
        device = Device(self.kept.broker)
        properties = p.Properties(session_expiry=connect.pop("expiry", 1000), **connect)
        device.send(p.Connect(name, 5, False, properties=properties))
        self.turn()
        return device

    def turn(self) -> None:
        self.kept.gate.end_turn()

    def check(self) -> DeliveryTotals:
        """Return the totals, which must agree with the queues and with what is on disk."""
        self.turn()
        totals = self.kept.journal.deliveries.totals
        assert totals.owed == measure(self.kept.broker.sessions.values())
        assert read_deliveries(str(self.folder)) == totals
        return totals

    def crash(self) -> None:
        """End without a checkpoint, as kill -9 does."""
        self.kept.checkpoints.close()
        self.kept.journal.log.close()

    def close(self) -> None:
        self.kept.close()


def publish(kept: Kept, count: int, **more: Any) -> None:
    for number in range(count):
        kept.kept.broker.publish_message("plant/7", b"%d" % number, qos=1, **more)
    kept.turn()


def acknowledge(device: Device, kept: Kept, most: int) -> int:
    """Acknowledge so many of what has come; return how many there were."""
    came = [packet for packet in device.read() if isinstance(packet, p.Publish)]
    for packet in came[:most]:
        device.send(p.Ack(p.Kind.PUBACK, packet.packet_id))
    kept.turn()
    return len(came)


def subscribed(kept: Kept, name: str, **connect: Any) -> Device:
    device = kept.device(name, **connect)
    device.send(p.Subscribe(1, (p.Filter("plant/#", 1),)))
    kept.turn()
    device.read()
    return device


def test_what_came_is_acknowledged_or_waits_through_a_kill(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    online = subscribed(kept, "online")
    away = subscribed(kept, "away")
    away.drop()
    publish(kept, 10)
    assert acknowledge(online, kept, 7) == 10
    assert kept.check() == DeliveryTotals(20, 7, {})
    kept.crash()
    assert read_deliveries(str(tmp_path)) == DeliveryTotals(20, 7, {})
    kept = Kept(tmp_path)
    assert kept.check() == DeliveryTotals(20, 7, {})
    back = kept.device("away")
    kept.turn()
    assert acknowledge(back, kept, 100) == 10
    assert kept.check() == DeliveryTotals(20, 17, {})
    kept.close()
    assert read_deliveries(str(tmp_path)) == DeliveryTotals(20, 17, {})
    kept = Kept(tmp_path)
    assert kept.check() == DeliveryTotals(20, 17, {})
    kept.close()


def test_every_loss_has_its_reason(tmp_path: Path) -> None:
    kept = Kept(tmp_path, max_queued_messages=5)
    for name in ("full", "ended"):
        subscribed(kept, name).drop()
    narrow = subscribed(kept, "narrow", maximum_packet_size=60)
    publish(kept, 8)
    assert acknowledge(narrow, kept, 100) == 8
    assert kept.check() == DeliveryTotals(24, 8, {"queue full": 6})
    kept.kept.broker.publish_message("plant/7", b"x" * 100, qos=1)
    assert kept.check().lost == {"queue full": 8, "packet too large": 1}
    kept.kept.broker.kick("ended", end=True)
    assert kept.check().lost == {"queue full": 8, "packet too large": 1, "session ended": 5}
    kept.crash()
    kept = Kept(tmp_path)
    assert kept.check() == DeliveryTotals(27, 8, {"queue full": 8, "packet too large": 1, "session ended": 5})
    kept.close()


def test_a_message_that_expires_in_a_queue_is_counted(tmp_path: Path) -> None:
    clock = FakeClock()
    kept = Kept(tmp_path, clock, max_queued_seconds=5)
    subscribed(kept, "away").drop()
    publish(kept, 3)
    clock.pass_(6)
    kept.kept.broker.drop_late()
    assert kept.check() == DeliveryTotals(3, 0, {"too old": 3})
    kept.close()


def test_a_session_of_one_connection_is_not_counted(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    short = subscribed(kept, "short", expiry=0)
    publish(kept, 4)
    assert acknowledge(short, kept, 2) == 4
    assert kept.check() == DeliveryTotals()
    kept.close()


def test_journal_without_totals_begins_with_what_waits(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.kept.journal.deliveries.begin(None, 12, damaged=False)
    assert kept.kept.journal.deliveries.totals == DeliveryTotals(12)
    kept.kept.journal.deliveries.begin(DeliveryTotals(12, 2), 7, damaged=True)
    assert kept.kept.journal.deliveries.totals == DeliveryTotals(12, 2, {"damaged": 3})
    kept.crash()
