"""What ``penstock demo`` sends: readings of 50 devices over MQTT, of a lab through ingest, of a mill as a file.

Each process is a place and remembers what it sent: the ground truth that every later count is compared with.  The four
sites run their devices, each a client of paho that publishes with QoS 1; a reading counts when the node has
acknowledged it.  QoS 1 is at least once: a reading that was under way when the node was killed may come twice, so each
carries a number.  The lab hands its readings to the node's ingest, which takes each once.  The mill writes a channel by
itself, as a program in Rust would, and the node follows it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any, Final

import msgspec

from penstock.disk import disk_for, save_atomically
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.xchannel import Writer

__all__ = [
    "DEVICES",
    "LIMIT",
    "PLACES",
    "SITES",
    "Written",
    "hand_over_readings",
    "load_written",
    "share",
    "write_mill",
    "write_readings",
]

SITES: Final = {"north": "xchannel", "south": "xchannel", "east": "filechannel", "west": "messagelog"}
"""The channels, and the format of each: every kind of log goes the same way."""

PLACES: Final = {**SITES, "lab": "messagelog", "mill": "xchannel"}
"""All channels: those of the sites, that of ingest, and one that another program writes."""

DEVICES: Final = 50
"""Devices of all sites together; lab and mill have some machines besides."""

MACHINES: Final = 8

LIMIT: Final = 2_500
"""Hundredths of a degree: a device that was ever warmer is told about."""

UNDER_WAY: Final = 1_000
"""Readings of a site that are unacknowledged at most."""

BURST: Final = 50

INGEST_SECONDS: Final = 600.0
"""How long the lab waits for a node that is away."""


class Written(msgspec.Struct):
    """What one process sent, and the node has acknowledged."""

    site: str
    readings: int = 0
    hundredths: int = 0
    """The sum of all temperatures, in hundredths of a degree: exact."""
    latest: dict[str, str] = {}
    """The newest payload of every device, by topic."""
    warmest: dict[str, int] = {}
    """The highest temperature of every device, by topic."""
    done: bool = False


def share(readings: int, places: Collection[str] = tuple(SITES)) -> dict[str, int]:
    """Return how many of the readings each place sends; devices are shared out alike.

    >>> share(10)
    {'north': 3, 'south': 3, 'east': 2, 'west': 2}
    """
    each, left = divmod(readings, len(places))
    return {place: each + (number < left) for number, place in enumerate(places)}


class _Machines:
    """The machines of a place: each draws its next temperature, and what was drawn is remembered."""

    def __init__(self, place: str, count: int) -> None:
        self._chance = random.Random(place)
        self.topics = [f"{place}/{number:02}" for number in range(count)]
        self._celsius = [self._chance.randrange(1_200, 2_600) for _ in self.topics]
        self.written = Written(place)
        self.sent = 0

    def draw(self) -> tuple[int, str, str]:
        """Return a machine, its topic and its reading."""
        number = self._chance.randrange(len(self.topics))
        self._celsius[number] += self._chance.randint(-20, 20)
        topic, value = self.topics[number], self._celsius[number]
        payload = f'{{"number":{self.sent},"celsius":{value / 100:.2f},"battery":{100 - number % 60}}}'
        written = self.written
        self.sent += 1
        written.latest[topic] = payload
        written.warmest[topic] = max(value, written.warmest.get(topic, value))
        written.hundredths += value
        return number, topic, payload

    def records(self, count: int) -> list[bytes]:
        """Return so many readings as records with keys."""
        drawn = [self.draw() for _ in range(count)]
        return [encode_envelope(Envelope(topic.encode(), payload.encode())) for _, topic, payload in drawn]

    def keep(self, folder: str, voice: Writer, acknowledged: int) -> None:
        """Leave what is remembered behind: all of it was taken."""
        self.written.readings, self.written.done = acknowledged, True
        save_atomically(disk_for(folder), _note(folder, self.written.site), msgspec.json.encode(self.written))
        voice.append(b"%d" % acknowledged)


def write_readings(folder: str, site: str, readings: int, seconds: float, port: int) -> None:
    """Publish them within about ``seconds``, telling how many were acknowledged through a channel of its own."""
    machines = _Machines(site, share(DEVICES)[site])
    acked = _Count()
    devices = [_Device(topic, port, acked) for topic in machines.topics]
    with Writer.open(os.path.join(folder, "voices", site)) as voice:
        begin = said = time.monotonic()
        while acked.count < readings:
            for _ in range(min(BURST, readings - machines.sent)):
                number, topic, payload = machines.draw()
                devices[number].publish(topic, payload)
            if time.monotonic() - said > 0.2:
                said = time.monotonic()
                voice.append(b"%d" % acked.count)
            sent = machines.sent
            ahead = begin + seconds * sent / readings - time.monotonic()
            time.sleep(max(ahead, 0.005 if sent == readings or sent - acked.count > UNDER_WAY else 0))
            while sent - acked.count > UNDER_WAY:
                time.sleep(0.005)
        for device in devices:
            device.close()
        machines.keep(folder, voice, acked.count)


def hand_over_readings(folder: str, place: str, readings: int, seconds: float) -> None:
    """Hand them to the node's ingest: each is in the channel once, however often the node is killed."""
    from penstock.node import IngestWriter

    machines = _Machines(place, MACHINES)
    with (
        Writer.open(os.path.join(folder, "voices", place)) as voice,
        IngestWriter(os.path.join(folder, "node"), place, writer=place, content=CONTENT, timeout=INGEST_SECONDS) as out,
    ):
        for _ in _paced(readings, seconds, machines):
            out.append_many(machines.records(min(BURST, readings - machines.sent)))
            voice.append(b"%d" % machines.sent)
        machines.keep(folder, voice, machines.sent)


def write_mill(folder: str, place: str, readings: int, seconds: float) -> None:
    """Write them into a channel of its own, in the format of the Rust library: the node need not even be there."""
    machines = _Machines(place, MACHINES)
    with (
        Writer.open(os.path.join(folder, "voices", place)) as voice,
        Writer.open(os.path.join(folder, "node", "logs", place), content=CONTENT) as channel,
    ):
        for _ in _paced(readings, seconds, machines):
            channel.append_many(machines.records(min(BURST, readings - machines.sent)))
            voice.append(b"%d" % machines.sent)
        machines.keep(folder, voice, machines.sent)


def _paced(readings: int, seconds: float, machines: _Machines) -> Iterator[None]:
    """Yield until all is sent, so that it takes about as long as it should."""
    begin = time.monotonic()
    while machines.sent < readings:
        yield
        time.sleep(max(0.0, begin + seconds * machines.sent / readings - time.monotonic()))


class _Count:
    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()


class _Device:
    """A client of paho that connects again by itself, and sends again what was not acknowledged.

    It publishes only while it is connected and has nothing to send again: paho sends what is published before the
    CONNACK ahead of what had to wait for it, and the newest reading of a device would not be the last in its channel.
    """

    def __init__(self, topic: str, port: int, acked: _Count) -> None:
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        self._acked, self._ready, self._lock = acked, threading.Event(), threading.Lock()
        self._connected, self._under_way = False, 0
        client = Client(CallbackAPIVersion.VERSION2, client_id=topic.replace("/", "-"), clean_session=False)
        client.max_inflight_messages_set(100)
        client.reconnect_delay_set(1, 1)
        client.on_publish = self._published
        client.on_connect = self._came
        client.on_disconnect = self._went
        client.connect_async("127.0.0.1", port)  # the node may be away at the moment: it is tried until it is there
        client.loop_start()
        self._client = client

    def publish(self, topic: str, payload: str) -> None:
        self._ready.wait()
        with self._lock:
            self._under_way += 1
        self._client.publish(topic, payload, qos=1)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _published(self, *_: Any) -> None:
        with self._acked.lock:
            self._acked.count += 1
        with self._lock:
            self._under_way -= 1
            if self._connected and not self._under_way:
                self._ready.set()

    def _came(self, _client: Any, _userdata: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        with self._lock:
            self._connected = not reason.is_failure
            if self._connected and not self._under_way:
                self._ready.set()

    def _went(self, *_: Any) -> None:
        with self._lock:
            self._connected = False
            self._ready.clear()


def load_written(folder: str) -> list[Written]:
    """Return what the processes that have ended sent."""
    found = []
    for site in PLACES:
        if os.path.exists(_note(folder, site)):
            with open(_note(folder, site), "rb") as file:
                found.append(msgspec.json.decode(file.read(), type=Written))
    return found


def _note(folder: str, site: str) -> str:
    return os.path.join(folder, f"written-{site}.json")
