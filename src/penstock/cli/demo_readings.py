"""What ``penstock demo`` sends: readings of many devices, written by processes that remember what they wrote.

Each process owns a channel and a share of the devices.  A record is an envelope whose key is the device, and at the
end a few devices are retired: their last record deletes them.  What a process knows of its own work is the ground
truth that every later count is compared with.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Final

import msgspec

from penstock.disk import PosixDisk, save_atomically
from penstock.log.detect import open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.xchannel import Writer
from penstock.types import Op

__all__ = ["SITES", "Written", "load_written", "share", "write_readings"]

SITES: Final = {"north": "xchannel", "south": "xchannel", "east": "filechannel", "west": "messagelog"}
"""The channels, and the format of each: every kind of log goes the same way."""

DEVICES: Final = 500
"""Devices of one site."""

RETIRED: Final = 10
BURST: Final = 500


class Written(msgspec.Struct):
    """What one process wrote."""

    site: str
    readings: int = 0
    records: int = 0
    hundredths: int = 0
    """The sum of all temperatures, in hundredths of a degree: exact."""
    latest: dict[str, str] = {}
    """The newest payload of every device that was not retired."""
    done: bool = False


def share(readings: int) -> dict[str, int]:
    """Return how many of the readings each site sends.

    >>> share(10)
    {'north': 3, 'south': 3, 'east': 2, 'west': 2}
    """
    each, left = divmod(readings, len(SITES))
    return {site: each + (number < left) for number, site in enumerate(SITES)}


def write_readings(folder: str, site: str, readings: int, seconds: float) -> None:
    """Write them within about ``seconds``, telling how many are there through a channel of its own."""
    chance = random.Random(site)
    devices = [f"{site}/{number:03}" for number in range(DEVICES)]
    celsius = [chance.randrange(1_200, 2_800) for _ in devices]
    written = Written(site)
    path = os.path.join(folder, "channels", site)
    with (
        contextlib.closing(open_writer(path, format=SITES[site], content=CONTENT)) as channel,
        Writer.open(os.path.join(folder, "voices", site)) as voice,
    ):
        begin = said = time.monotonic()
        while written.readings < readings:
            records = []
            for _ in range(min(BURST, readings - written.readings)):
                number = chance.randrange(DEVICES)
                celsius[number] += chance.randint(-20, 20)
                payload = f'{{"celsius":{celsius[number] / 100:.2f},"battery":{100 - number % 60}}}'
                records.append(
                    encode_envelope(Envelope(devices[number].encode(), payload.encode(), event_time_ns=time.time_ns()))
                )
                written.latest[devices[number]] = payload
                written.hundredths += celsius[number]
            channel.append_many(records)
            written.readings += len(records)
            if time.monotonic() - said > 0.2:
                said = time.monotonic()
                voice.append(b"%d" % written.readings)
            ahead = begin + seconds * written.readings / readings - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
        gone = [device for device in devices if device in written.latest][:RETIRED]
        channel.append_many([encode_envelope(Envelope(device.encode(), op=Op.DELETE)) for device in gone])
        for device in gone:
            del written.latest[device]
        written.records = written.readings + len(gone)
        written.done = True
        save_atomically(PosixDisk(), _note(folder, site), msgspec.json.encode(written))
        voice.append(b"%d" % written.readings)


def load_written(folder: str) -> list[Written]:
    """Return what the processes that have ended wrote."""
    found = []
    for site in SITES:
        if os.path.exists(_note(folder, site)):
            with open(_note(folder, site), "rb") as file:
                found.append(msgspec.json.decode(file.read(), type=Written))
    return found


def _note(folder: str, site: str) -> str:
    return os.path.join(folder, f"written-{site}.json")
