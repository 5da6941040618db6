"""A broker without a socket: devices write packets, read packets and see when they are cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.mqtt import packets as p
from penstock.mqtt.broker import Broker
from penstock.mqtt.codec import decode, encode
from penstock.mqtt.link import Link
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Ack, Kind, Properties
from penstock.net.connection import Peer
from penstock.testing.clock import FakeClock

__all__ = ["Wire", "Device", "World", "ManualLoop"]


class ManualLoop:
    """What a gate needs of an event loop, run by hand."""

    def __init__(self) -> None:
        self.soon: list[tuple[Any, tuple[Any, ...]]] = []
        self.later: list[tuple[Any, tuple[Any, ...]]] = []

    def call_soon(self, callback: Any, *args: Any) -> None:
        self.soon.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any) -> None:
        self.later.append((callback, args))

    def run(self, *, later: bool = False) -> None:
        """Run what is due now, and with ``later`` what waits for its time first."""
        if later:
            self.soon, self.later = self.later + self.soon, []
        while self.soon:
            callback, args = self.soon.pop(0)
            callback(*args)


class Wire:
    """The face of a connection, in memory."""

    def __init__(self, address: str = "192.0.2.1:1000") -> None:
        self.peer = Peer(address, "mqtt", "tcp")
        self.out = bytearray()
        self.is_closing = False
        self.reason = ""
        self.deadline: float | None = None
        self.reading = True

    @property
    def buffered(self) -> int:
        return len(self.out)

    def write(self, data: bytes | memoryview) -> None:
        if not self.is_closing:
            self.out += data

    def write_many(self, chunks: Sequence[bytes | memoryview]) -> None:
        for chunk in chunks:
            self.write(chunk)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self, reason: str = "closed here") -> None:
        self.is_closing, self.reason = True, reason

    def abort(self, reason: str) -> None:
        self.close(reason)

    def set_deadline(self, seconds: float | None, *, absolute: bool = False) -> None:
        self.deadline = seconds


class Device:
    """A client that does what a test says and nothing by itself."""

    def __init__(self, broker: Broker, version: int = 5, address: str = "192.0.2.1:1000") -> None:
        self.broker, self.version = broker, version
        self.wire: Any = Wire(address)
        self.link = Link(broker)
        self.link.opened(self.wire)

    @property
    def closed(self) -> bool:
        return bool(self.wire.is_closing)

    def send_raw(self, data: bytes) -> list[p.Packet]:
        if not self.closed:
            self.link.received(data)
        return self.read()

    def send(self, *packets: p.Packet) -> list[p.Packet]:
        return self.send_raw(b"".join(encode(packet, self.version) for packet in packets))

    def read(self) -> list[p.Packet]:
        found = []
        data = bytes(self.wire.out)
        self.wire.out.clear()
        while data:
            packet, end = decode(data, self.version)
            found.append(packet)
            data = data[end:]
        return found

    def connect(self, client_id: str = "dev", **given: Any) -> p.Connack:
        properties = Properties(**given.pop("properties", {}))
        answers = self.send(p.Connect(client_id, self.version, properties=properties, **given))
        assert isinstance(answers[0], p.Connack), answers
        self.rest = answers[1:]
        return answers[0]

    def subscribe(
        self, *filters: str | p.Filter, qos: int = 0, packet_id: int = 1, identifier: int = 0
    ) -> list[p.Packet]:
        wanted = tuple(each if isinstance(each, p.Filter) else p.Filter(each, qos) for each in filters)
        properties = Properties(subscription_ids=(identifier,)) if identifier else Properties()
        return self.send(p.Subscribe(packet_id, wanted, properties))

    def publish(
        self, topic: str, payload: bytes = b"x", qos: int = 0, packet_id: int = 0, **given: Any
    ) -> list[p.Packet]:
        properties = Properties(**given.pop("properties", {}))
        return self.send(p.Publish(topic, payload, qos, packet_id=packet_id, properties=properties, **given))

    def ack(self, kind: Kind, packet_id: int, reason: int = 0) -> list[p.Packet]:
        return self.send(Ack(kind, packet_id, reason))

    def messages(self) -> list[p.Publish]:
        return [packet for packet in self.read() if isinstance(packet, p.Publish)]

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages()]

    def drop(self) -> None:
        """The network is gone."""
        self.wire.is_closing = True
        self.link.closed("the peer closed the connection")

    def bye(self, reason: int = 0, **properties: Any) -> None:
        self.send(p.Disconnect(reason, Properties(**properties)))
        self.link.closed("closed here")


class World:
    """A broker, a clock and devices."""

    def __init__(self, **options: Any) -> None:
        parts = {
            name: options.pop(name)
            for name in ("access", "authenticator", "methods", "journal", "gate")
            if name in options
        }
        self.clock = FakeClock()
        self.broker = Broker(BrokerOptions(**options), clock=self.clock, **parts)

    def device(self, client_id: str = "dev", version: int = 5, **given: Any) -> Device:
        device = Device(self.broker, version)
        device.connack = device.connect(client_id, **given)  # type: ignore[attr-defined]
        return device

    def pass_(self, seconds: float) -> None:
        self.clock.pass_(seconds)
        self.broker.tick()
