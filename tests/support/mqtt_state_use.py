"""What tests of what a broker keeps use."""

from __future__ import annotations

import time
from typing import Any

from mqtt_use import Device, ManualLoop

from penstock.disk import MemoryDisk
from penstock.mqtt import packets as p
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_options import PersistenceOptions
from penstock.testing.clock import FakeClock
from penstock.testing.faulty import FaultyDisk


class Kept:
    """A kept broker without sockets, that can be closed or killed and opened again."""

    def __init__(
        self, sync: Any = "none", segment_bytes: int = 1 << 20, interval: float = 30.0, **options: Any
    ) -> None:
        self.disk, self.clock = FaultyDisk(MemoryDisk()), FakeClock()
        self.persistence = PersistenceOptions(sync=sync, segment_bytes=segment_bytes, sync_interval_secs=interval)
        self.options = BrokerOptions(**options)
        self.open()

    def open(self) -> None:
        self.loop = ManualLoop()
        self.kept = KeptBroker("data", self.options, self.persistence, loop=self.loop, clock=self.clock, disk=self.disk)
        self.broker = self.kept.broker

    def settle(self) -> None:
        until = time.monotonic() + 20
        while True:
            self.loop.run()
            if not self.kept.gate.busy and self.kept.checkpoints._applying is None:
                return
            assert time.monotonic() < until
            time.sleep(0.0005)

    def kill(self) -> None:
        """Leave everything as it is, as kill -9 does, and open again."""
        self.leave()
        self.open()

    def leave(self) -> None:
        self.kept.checkpoints._thread.shutdown()
        log = self.kept.checkpoints.store._log
        assert log is not None
        log.close()
        self.kept.checkpoints.store._closed = True
        if self.kept.journal._committer is not None:
            self.kept.journal._committer.close()
        self.kept.journal.log.close()

    def restart(self) -> None:
        self.kept.close()
        self.open()

    def device(self, name: str, *, expiry: int = 1000, version: int = 5, **given: Any) -> Device:
        device = Device(self.broker, version)
        properties = p.Properties(session_expiry=expiry) if version == 5 else p.NONE
        device.send(p.Connect(name, version, False, properties=properties, **given))
        self.settle()
        found = device.read()
        assert isinstance(found[0], p.Connack)
        device.connack, device.rest = found[0], found[1:]  # type: ignore[attr-defined]
        return device

    def subscriber(self, name: str, filter: str = "a/#", qos: int = 1) -> Device:
        device = self.device(name)
        device.subscribe(filter, qos=qos)
        self.settle()
        device.read()
        return device

    def tick(self, seconds: float) -> None:
        self.clock.pass_(seconds)
        self.broker.tick()
        self.settle()
