"""A manifest of shipped segments that somebody else has written: it is refused, and leads nowhere."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from ship_use import FORMATS, fill, open_writer, read_all

from penstock.disk import object_store_for
from penstock.errors import CorruptionError, ExpiredError
from penstock.log.xchannel import Writer
from penstock.ship import ShipOptions, Shipper, empty_trash, restore_span
from penstock.ship.remote import ShippedLog


@pytest.fixture(params=FORMATS)
def shipped(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder to which a log was shipped, in segments and a page."""
    with open_writer(request.param, tmp_path / "log") as writer:
        for start in range(0, 50, 10):
            fill(request.param, writer, start, 10)
        options = ShipOptions(page_entries=2)
        with Shipper(tmp_path / "log", object_store_for(tmp_path / "up"), node="edge", options=options) as shipper:
            while shipper.step():
                pass
    return tmp_path / "up"


def change_head(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / "log.shipped.json"
    head = json.loads(path.read_bytes())
    change(head)
    path.write_bytes(json.dumps(head).encode())


def last_entry(head: Any) -> Any:
    return head["segments"][-1]


HOSTILE: dict[str, Callable[[Any], None]] = {
    "a name that leads elsewhere": lambda head: last_entry(head).update(name="../../../escaped"),
    "a name that is a path": lambda head: last_entry(head).update(name="a/b"),
    "an empty name": lambda head: last_entry(head).update(name=""),
    "a key that leads elsewhere": lambda head: last_entry(head).update(key="log.segments/../../x"),
    "a key of another channel": lambda head: last_entry(head).update(key="other.segments/x"),
    "trash of another channel": lambda head: head["trash"].append({"key": "other.segments/x", "at_ns": 0}),
    "a key that is no segment": lambda head: head["trash"].append({"key": "other.shipped.json", "at_ns": 0}),
    "a size that fits no file": lambda head: last_entry(head).update(bytes=1 << 64),
    "a size below zero": lambda head: last_entry(head).update(bytes=-1),
    "a hash that is none": lambda head: last_entry(head).update(blake3="n" * 64),
    "a span past all positions": lambda head: (last_entry(head).update(next=1 << 70), head.update(next=1 << 70)),
    "an id that is none": lambda head: head.update(log_id="D" * 32),
    "a page with no name of one": lambda head: head["pages"][0].update(key="log.shipped.json"),
    "a page that is gone": lambda head: head["pages"][0].update(key="log.pages/gone.json"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_no_shipper_writes_is_damage_whoever_reads_it(shipped: Path, name: str, tmp_path: Path) -> None:
    change_head(shipped, HOSTILE[name])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptionError), ShippedLog(shipped / "log") as log:
        read_all(log)
    with pytest.raises(CorruptionError):
        restore_span(shipped / "log", tmp_path / "back")
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_of_another_channel_is_pruned(shipped: Path) -> None:
    other = shipped / "other.segments" / "x"
    other.parent.mkdir()
    other.write_bytes(b"precious")
    change_head(shipped, HOSTILE["trash of another channel"])
    with pytest.raises(CorruptionError, match="is no key of an object of 'log'"):
        empty_trash(object_store_for(shipped), "log", 0)
    assert other.read_bytes() == b"precious"


@pytest.mark.parametrize("change", [b'"records":1', b'"first":'])
def test_a_page_that_was_changed_is_damage(shipped: Path, change: bytes) -> None:
    page = next((shipped / "log.pages").glob("*.json"))
    data = page.read_bytes()
    page.write_bytes(data.replace(change, change + b" "))  # it says the same, but is not what was shipped
    assert page.read_bytes() != data
    with pytest.raises(CorruptionError, match="another hash"), ShippedLog(shipped / "log") as log:
        read_all(log)


def test_a_page_that_names_objects_of_another_channel_is_damage(shipped: Path) -> None:
    page = next((shipped / "log.pages").glob("*.json"))
    data = page.read_bytes().replace(b'"key":"log.segments/', b'"key":"other.segments/')
    name = f"{page.name.partition('-')[0]}-{blake3(data).hexdigest()[:16]}.json"
    page.with_name(name).write_bytes(data)
    change_head(shipped, lambda head: head["pages"][0].update(key=f"log.pages/{name}"))
    with pytest.raises(CorruptionError, match="is no key of an object of 'log'"), ShippedLog(shipped / "log") as log:
        read_all(log)


@pytest.mark.parametrize("harm", ["hole", "begin", "end", "empty", "order"])
def test_a_page_that_leaves_segments_out_is_damage(shipped: Path, harm: str) -> None:
    page = next((shipped / "log.pages").glob("*.json"))
    entries = json.loads(page.read_bytes())
    head = json.loads((shipped / "log.shipped.json").read_bytes())
    if harm == "hole":
        entries[1]["first"] += 1
    else:
        entries = {"begin": entries[1:], "end": entries[:-1], "empty": [], "order": entries[::-1]}[harm]
    data = json.dumps(entries).encode()
    name = f"{page.name.partition('-')[0]}-{blake3(data).hexdigest()[:16]}.json"
    page.with_name(name).write_bytes(data)
    number = next(n for n, ref in enumerate(head["pages"]) if ref["key"].endswith(page.name))
    change_head(shipped, lambda head: head["pages"][number].update(key=f"log.pages/{name}"))
    with pytest.raises(CorruptionError, match=r"log\.pages/"), ShippedLog(shipped / "log") as log:
        read_all(log)


@pytest.mark.parametrize("size", [-4096, 1, 4097, 1 << 32, 1 << 62])
def test_a_region_that_no_channel_has_is_damage(tmp_path: Path, size: int) -> None:
    with open_writer("xchannel", tmp_path / "log") as writer:
        fill("xchannel", writer, 0, 10)
        with Shipper(tmp_path / "log", object_store_for(tmp_path / "up")) as shipper:
            shipper.step()
    change_head(tmp_path / "up", lambda head: head.update(region_bytes=size))
    with pytest.raises(CorruptionError, match="region"), ShippedLog(tmp_path / "up" / "log") as log:
        read_all(log)
    with pytest.raises(CorruptionError, match="region"):
        restore_span(tmp_path / "up" / "log", tmp_path / "back")


def test_what_a_manifest_makes_up_costs_neither_memory_nor_room(tmp_path: Path) -> None:
    region = 1 << 30
    with Writer.open(str(tmp_path / "log"), region_bytes=8192) as writer:
        writer.append(b"hello")
        writer.roll()
        with Shipper(tmp_path / "log", object_store_for(tmp_path / "up")) as shipper:
            shipper.step()
    change_head(tmp_path / "up", lambda head: head.update(region_bytes=region))
    tracemalloc.start()
    with ShippedLog(tmp_path / "up" / "log") as log:
        with pytest.raises(CorruptionError, match="region_size"):
            read_all(log)
        kept = [os.fstat(fd) for fd, _ in log._disk._kept.values()]
    assert tracemalloc.get_traced_memory()[1] < region // 100
    tracemalloc.stop()
    assert max(found.st_size for found in kept) == region
    assert sum(found.st_blocks for found in kept) * 512 < region // 100


@pytest.mark.parametrize("entry", [0, -1])
@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_a_segment_that_is_not_what_was_shipped_ends_no_log_in_silence(shipped: Path, entry: int, harm: str) -> None:
    with ShippedLog(shipped / "log") as log:
        path = shipped / list(log.entries(log.first_position, log.next_position))[entry].key
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-5] if harm == "cut" else bytes([*data[:70], data[70] ^ 1, *data[71:]]))
    for on_damage in ("raise", None):
        with ShippedLog(shipped / "log", on_damage=on_damage) as log:  # type: ignore[arg-type]
            with pytest.raises((CorruptionError, ExpiredError)):
                read_all(log)
            assert list(log.verify())
