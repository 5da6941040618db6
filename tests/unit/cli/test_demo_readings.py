"""What the demo's devices and machines remember is what is in the channels of its node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from penstock.cli.demo_node import DemoNode, edge_config
from penstock.cli.demo_readings import (
    DEVICES,
    PLACES,
    SITES,
    hand_over_readings,
    load_written,
    share,
    write_mill,
)
from penstock.log import open_log
from penstock.log.envelope import open_envelopes
from penstock.log.xchannel import Writer

WRITE: Final = """
import sys
from penstock.cli.demo_readings import write_readings
write_readings(sys.argv[1], sys.argv[2], 321, 0.0, int(sys.argv[3]))
"""


def publish_readings(folder: Path, place: str, port: int) -> None:
    """Be the devices of a place in a process of their own, as in the demo: paho cannot use descriptors above 1,023."""
    subprocess.run([sys.executable, "-c", WRITE, str(folder), place, str(port)], check=True, timeout=120)


def test_every_reading_is_someones() -> None:
    assert sum(share(1_000_003).values()) == 1_000_003
    assert sum(share(DEVICES).values()) == DEVICES
    assert sum(share(100_001, tuple(PLACES)).values()) == 100_001


def test_what_each_place_remembers_is_in_the_channels_of_the_node(tmp_path: Path) -> None:
    (tmp_path / "voices").mkdir()
    (tmp_path / "node" / "logs").mkdir(parents=True)
    parts = edge_config(str(tmp_path), "unused").partition("[[export]]")[0]  # without what needs an object store
    node = DemoNode(str(tmp_path), "node", parts)
    node.start()
    try:
        for place in PLACES:
            Writer.precreate(tmp_path / "voices" / place)
            if place in SITES:
                publish_readings(tmp_path, place, node.port)
            else:
                (hand_over_readings if place == "lab" else write_mill)(str(tmp_path), place, 321, 0.0)
        assert node.stop() == 0
    finally:
        node.kill()
    found = load_written(str(tmp_path))
    assert [written.site for written in found] == list(PLACES)
    for written in found:
        latest: dict[str, str] = {}
        warmest: dict[str, int] = {}
        total = count = 0
        with open_log(str(tmp_path / "node" / "logs" / written.site)) as log:
            assert log.format == PLACES[written.site]
            for row in open_envelopes(log.read(log.first_position)).to_pylist():
                count += 1
                key = row["key"].decode()
                latest[key] = row["payload"].decode()
                value = round(msgspec.json.decode(row["payload"])["celsius"] * 100)
                warmest[key] = max(value, warmest.get(key, value))
                total += value
        assert (written.readings, count) == (321, 321)
        assert (written.latest, written.warmest, written.hundredths) == (latest, warmest, total)
