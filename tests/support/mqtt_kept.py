"""Clients that keep their own books, for brokers that are killed: what was acknowledged, what came, in which order.

A peer talks packets over anything with ``send``, ``read`` and ``closed``: a Device of mqtt_use, or a socket here.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from typing import Any

from mqtt_use import Device, ManualLoop

from penstock.disk import MemoryDisk
from penstock.mqtt import packets as p
from penstock.mqtt.codec import encode
from penstock.mqtt.packets import Ack, Kind, Properties
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_options import PersistenceOptions
from penstock.testing.clock import FakeClock
from penstock.testing.faulty import FaultyDisk

__all__ = ["Fleet", "Group", "KeptWorld", "Mourner", "Publisher", "Retainer", "SocketDevice", "Subscriber"]


class SocketDevice:
    """A connection to a broker over TCP that never blocks for long."""

    def __init__(self, port: int, version: int) -> None:
        self.version, self.closed = version, False
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.settimeout(0.0005)
        self._unread = b""

    def send(self, *packets: Any) -> None:
        try:
            self._socket.settimeout(10)
            self._socket.sendall(b"".join(encode(packet, self.version) for packet in packets))
        except OSError:
            self.closed = True
        finally:
            self._socket.settimeout(0.0005)

    def read(self) -> list[Any]:
        from penstock.kernel.mqtt import cut
        from penstock.mqtt.codec import decode

        try:
            while data := self._socket.recv(1 << 18):
                self._unread += data
            self.closed = True
        except TimeoutError:
            pass
        except OSError:
            self.closed = True
        found = []
        whole = cut(self._unread, 0, self.version == 5, 1 << 30, 0, True)[1]
        data, self._unread = self._unread[:whole], self._unread[whole:]
        while data:
            packet, end = decode(data, self.version)
            found.append(packet)
            data = data[end:]
        return found

    def drop(self) -> None:
        self.closed = True
        self._socket.close()


class Peer:
    """A client with a session that outlives its connections."""

    def __init__(self, name: str, version: int = 5, *, qos: int = 1) -> None:
        self.name, self.version, self.qos = name, version, qos
        self.device: Any = None
        self.up = False
        self.had_session = False
        self.will: p.Will | None = None

    def connect(self, device: Any) -> None:
        self.device, self.up = device, False
        properties = Properties(session_expiry=100_000) if self.version == 5 else p.NONE
        device.send(p.Connect(self.name, self.version, False, 0, will=self.will, properties=properties))

    def disconnect(self) -> None:
        """Lose the connection without a word."""
        if self.device is not None:
            self.device.drop()
        self.device, self.up = None, False

    def step(self) -> bool:
        """Take what came; return whether something did."""
        if self.device is None:
            return False
        found = self.device.read()
        for packet in found:
            if isinstance(packet, p.Connack):
                if packet.reason:
                    assert packet.reason == (0x97 if self.version == 5 else 3), packet
                    continue  # the disk is in trouble; it is closed
                assert packet.session_present or not self.had_session, f"the session of {self.name} is lost"
                self.up = self.had_session = True
                self.connected()
            elif not isinstance(packet, p.Disconnect):
                self.take(packet)
        if self.device.closed:
            self.disconnect()
        return bool(found)

    def connected(self) -> None: ...

    def take(self, packet: Any) -> None: ...

    @property
    def idle(self) -> bool:
        return True


class Publisher(Peer):
    def __init__(self, name: str, version: int = 5, *, qos: int = 1, topic: str = "load") -> None:
        super().__init__(name, version, qos=qos)
        self.topic = f"{topic}/{name}"
        self.next = 0
        self.next_id = 1
        self.under_way: dict[int, tuple[int, bool]] = {}
        self.acked: set[int] = set()
        self.refused: set[int] = set()

    def payload(self, number: int) -> bytes:
        return f"{self.name}:{number}".encode()

    def publish(self, count: int = 1) -> None:
        packets = []
        for _ in range(count):
            if len(self.under_way) > 200:
                break
            while self.next_id in self.under_way:
                self.next_id = self.next_id % 65535 + 1
            self.under_way[self.next_id] = (self.next, False)
            packets.append(self._packet(self.next_id, self.next, False))
            self.next += 1
            self.next_id = self.next_id % 65535 + 1
        if packets:
            self.device.send(*packets)

    def _packet(self, packet_id: int, number: int, dup: bool) -> p.Publish:
        return p.Publish(self.topic, self.payload(number), self.qos, False, dup, packet_id)

    def connected(self) -> None:
        again: list[Any] = [
            Ack(Kind.PUBREL, packet_id) if released else self._packet(packet_id, number, True)
            for packet_id, (number, released) in self.under_way.items()
        ]
        if again:
            self.device.send(*again)

    def take(self, packet: Any) -> None:
        if not isinstance(packet, Ack) or packet.packet_id not in self.under_way:
            return
        number, _ = self.under_way[packet.packet_id]
        if packet.reason >= 0x80 and packet.kind in (Kind.PUBACK, Kind.PUBREC):
            assert packet.reason == 0x97, packet
            del self.under_way[packet.packet_id]
            self.refused.add(number)
        elif packet.kind == Kind.PUBREC:
            self.under_way[packet.packet_id] = (number, True)
            self.acked.add(number)  # from here on it is the broker's
            self.device.send(Ack(Kind.PUBREL, packet.packet_id))
        else:
            del self.under_way[packet.packet_id]
            self.acked.add(number)

    @property
    def idle(self) -> bool:
        return not self.under_way


class Subscriber(Peer):
    def __init__(self, name: str, version: int = 5, *, qos: int = 1, filter: str = "load/#") -> None:
        super().__init__(name, version, qos=qos)
        self.filter = filter
        self.subscribed = False
        self.held: set[int] = set()
        self.got: list[bytes] = []

    def connected(self) -> None:
        if not self.subscribed:
            self.device.send(p.Subscribe(1, (p.Filter(self.filter, self.qos),)))

    def take(self, packet: Any) -> None:
        if isinstance(packet, p.Suback):
            assert packet.reasons[0] == self.qos, packet
            self.subscribed = True
        elif isinstance(packet, p.Publish):
            if packet.qos == 2:
                if packet.packet_id not in self.held:
                    self.held.add(packet.packet_id)
                    self.got.append(packet.payload)
                self.device.send(Ack(Kind.PUBREC, packet.packet_id))
            else:
                self.got.append(packet.payload)
                if packet.qos == 1:
                    self.device.send(Ack(Kind.PUBACK, packet.packet_id))
        elif isinstance(packet, Ack) and packet.kind == Kind.PUBREL:
            self.held.discard(packet.packet_id)
            self.device.send(Ack(Kind.PUBCOMP, packet.packet_id))


class Retainer(Publisher):
    """Publishes retained messages to one topic, and sometimes an empty one; its last acknowledged word stands."""

    def __init__(self, name: str, version: int = 5) -> None:
        super().__init__(name, version, qos=1, topic="kept")

    def payload(self, number: int) -> bytes:
        return b"" if number % 5 == 4 else f"{self.name}:{number}".encode()

    def _packet(self, packet_id: int, number: int, dup: bool) -> p.Publish:
        return p.Publish(self.topic, self.payload(number), 1, True, dup, packet_id)

    def check(self, found: bytes | None) -> None:
        last = max(self.acked, default=-1)
        allowed = {self.payload(number) or None for number in range(max(last, 0), self.next)}
        if last < 0:
            allowed.add(None)
        assert found in allowed, f"{self.topic}: {found!r} is retained, {last} was acknowledged last of {self.next}"


class Mourner(Peer):
    """Has another will with each connection, and never says goodbye."""

    def __init__(self, name: str, version: int = 5, *, qos: int = 1) -> None:
        super().__init__(name, version, qos=qos)
        self.lives = 0
        self.died: list[bytes] = []

    def connect(self, device: Any) -> None:
        self.lives += 1
        self.will = p.Will("load/wills", f"{self.name}:{self.lives}".encode(), self.qos)
        super().connect(device)

    def disconnect(self) -> None:
        if self.up and self.will is not None:
            self.died.append(self.will.payload)
        super().disconnect()


class Group:
    """Members of one shared subscription."""

    def __init__(self, members: list[Subscriber]) -> None:
        self.members = members

    @property
    def got(self) -> list[bytes]:
        return [each for member in self.members for each in member.got]


class Fleet:
    """All peers of a test, and what must hold of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.publishers = [Publisher(f"p{qos}{version}", version, qos=qos) for qos in (1, 2) for version in (4, 5)]
        self.subscribers = [Subscriber(f"s{qos}{version}", version, qos=qos) for qos in (1, 2) for version in (4, 5)]
        members = [Subscriber(f"g{n}", 5, qos=2, filter="$share/team/load/+") for n in range(2)]
        self.group = Group(members)
        self.retainers = [Retainer("r4", 4), Retainer("r5", 5)]
        self.mourner = Mourner("w", 5, qos=2)
        self.members = members

    @property
    def peers(self) -> list[Peer]:
        return [*self.subscribers, *self.members, *self.publishers, *self.retainers, self.mourner]

    def lost(self) -> None:
        """The broker is gone: so are all connections."""
        for peer in self.peers:
            peer.disconnect()

    def check(self) -> None:
        """Everything is connected and drained: compare the books."""
        for who in [*self.subscribers, self.group]:
            counts = Counter(who.got)
            qos = who.qos if isinstance(who, Subscriber) else 2
            for publisher in self.publishers:
                for number in publisher.acked:
                    came = counts[publisher.payload(number)]
                    assert came, f"{publisher.payload(number)!r} was acknowledged and did not come"
                    assert came == 1 or min(qos, publisher.qos) < 2, f"{publisher.payload(number)!r} came {came} times"
                for number in publisher.refused:
                    assert counts[publisher.payload(number)] <= 1 or min(qos, publisher.qos) < 2
            for will in self.mourner.died:
                assert counts[will] == 1 or (counts[will] and qos < 2), f"the will {will!r} came {counts[will]} times"
        for subscriber in self.subscribers:
            self._in_order(subscriber)

    def _in_order(self, subscriber: Subscriber) -> None:
        seen: dict[bytes, int] = {}
        for payload in dict.fromkeys(subscriber.got):
            name, _, number = payload.partition(b":")
            if name != b"w":
                assert int(number) > seen.get(name, -1), f"{payload!r} came after {seen[name]} to {subscriber.name}"
                seen[name] = int(number)


class PatientDevice(Device):
    """A device whose packets wait until they are read: sending takes none of them away."""

    def send(self, *packets: Any) -> list[Any]:
        if not self.closed:
            self.link.received(b"".join(encode(packet, self.version) for packet in packets))
        return []


class KeptWorld:
    """A broker on a faulty disk, and how it ends."""

    def __init__(
        self, fleet: Fleet, sync: Any = "always", segment_bytes: int = 16 << 10, reserve: int = 64 << 10
    ) -> None:
        self.fleet, self.random = fleet, fleet.random
        self.disk = FaultyDisk(MemoryDisk())
        self.clock = FakeClock()
        self.options = PersistenceOptions(
            sync=sync, segment_bytes=segment_bytes, checkpoint_seconds=1e9, reserve_bytes=reserve
        )
        self.dead = False
        self.fault: tuple[tuple[str, ...], tuple[int, str]] | None = None
        self.left = -1
        self.disk.on_call = self._called
        self.kept: KeptBroker
        self.opens = 0
        self.open()

    def _called(self, operation: str, path: str) -> None:
        if self.fault is not None and operation in self.fault[0]:
            raise OSError(*self.fault[1], path)
        if self.left > 0:
            self.left -= 1
            if not self.left:
                self.dead = True
        if self.dead and operation not in ("read_at", "read_into", "map"):
            raise OSError(5, "the machine is off", path)

    def open(self) -> None:
        self.loop = ManualLoop()
        self.kept = KeptBroker("data", None, self.options, loop=self.loop, clock=self.clock, disk=self.disk)
        self.opens += 1
        assert not self.kept.problems, self.kept.problems

    def device(self, version: int) -> Device:
        return PatientDevice(self.kept.broker, version)

    def run(self, seconds: float = 20.0) -> None:
        """Let everything that can go on go on, until nothing does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.dead:
            self.loop.run()
            moved = sum(peer.step() for peer in self.fleet.peers)
            if not moved and not self.loop.soon:
                if not self.kept.gate.busy:
                    return
                time.sleep(0.0005)

    def crash(self, keep: float) -> None:
        """Cut the power; every connection is gone."""
        self.dead = True
        try:
            self.kept.checkpoints._thread.shutdown()
            committer = self.kept.journal._committer
            if committer is not None:
                committer.close()
        finally:
            self.kept.journal.log.close()
            self.kept.checkpoints.store._closed = True
            self.kept.checkpoints.store._log.close()  # type: ignore[union-attr]
        self.fleet.lost()
        self.left, self.dead = -1, False
        self.disk.cut_power(keep=keep, seed=self.random.randrange(1 << 30))
        self.open()

    def everyone(self) -> None:
        for peer in self.fleet.peers:
            if peer.device is None:
                peer.connect(self.device(peer.version))
        self.run()

    def finish(self) -> None:
        for _ in range(20):
            self.everyone()
            if all(peer.up and peer.idle for peer in self.fleet.peers):
                break
        self.fleet.mourner.disconnect()
        self.run()
        self.fleet.check()
        for retainer in self.fleet.retainers:
            kept = self.kept.broker.retained.get(retainer.topic.encode())
            retainer.check(None if kept is None else kept.payload())

    def some_load(self) -> None:
        fleet, chance = self.fleet, self.random
        for peer in fleet.peers:
            if peer.device is None and chance.random() < 0.4:
                peer.connect(self.device(peer.version))
            elif peer.up and chance.random() < 0.15:
                peer.disconnect()
        for publisher in [*fleet.publishers, *fleet.retainers]:
            if publisher.up:
                publisher.publish(chance.randrange(1, 30))
        for _ in range(chance.randrange(1, 4)):
            self.loop.run()
            for peer in fleet.peers:
                peer.step()
