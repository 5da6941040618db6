"""Promise: what was shipped is untrusted: no name in a manifest and no link in its folder leads anywhere else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.disk import object_store_for
from penstock.errors import CorruptionError
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.ship import Shipper, open_shipped
from penstock.ship.manifest import Head, decode_head, decode_page, encode_page, head_key
from penstock.ship.prune import empty_trash, forget_before
from penstock.ship.restore import restore_span

NAMES = ["../../climbed", "/tmp/absolute", "a/b", "..", "", "a\0b"]


def shipped(tmp_path: Path, kind: str) -> Path:
    """Ship a small log; return the folder of objects."""
    path: Any = tmp_path / "ticks"
    if kind == "xchannel":
        with Writer.open(path, region_bytes=4096, roll_bytes=4096) as writer:
            for _ in range(4):
                writer.append(b"x" * 3000)
    else:
        with MessageLog.open(path, segment_bytes=100) as log:
            for _ in range(4):
                log.append(b"x" * 80)
    with Shipper(str(path), object_store_for(str(tmp_path / "up"))) as shipper:
        while shipper.step():
            pass
    return tmp_path / "up"


def head_of(up: Path) -> Head:
    return decode_head((up / head_key("ticks")).read_bytes())


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["xchannel", "messagelog"])
def test_a_manifest_that_names_files_elsewhere_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    up = shipped(tmp_path, kind)
    head = head_of(up)
    crafted = msgspec.to_builtins(head)
    crafted["segments"][0]["name"] = name
    (up / head_key("ticks")).write_bytes(msgspec.json.encode(crafted))
    before = below(tmp_path)
    with pytest.raises(CorruptionError, match="no name of a file"):
        restore_span(str(up / "ticks"), str(tmp_path / "deep"))
    assert below(tmp_path) == before
    page = msgspec.json.encode(crafted["segments"][:1])
    with pytest.raises(CorruptionError, match="no name of a file"):
        decode_page(page, "page", "ticks")
    assert decode_page(encode_page(head.segments), "page", "ticks") == head.segments


def test_pruning_follows_no_linked_folder(tmp_path: Path) -> None:
    up = shipped(tmp_path, "messagelog")
    store = object_store_for(str(up))
    assert forget_before(store, "ticks", 1 << 60).trash
    segments = up / "ticks.segments"
    (tmp_path / "mine").mkdir()
    for path in segments.iterdir():
        (tmp_path / "mine" / path.name).write_bytes(b"precious")
    os.rename(segments, tmp_path / "moved")
    segments.symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"):
        empty_trash(store, "ticks", 0)
    assert all(path.read_bytes() == b"precious" for path in (tmp_path / "mine").iterdir())
    with open_shipped(str(up / "ticks")) as log:
        with pytest.raises(OSError, match="symbolic link"):
            log.read(log.first_position)
        assert any("symbolic link" in str(problem) for problem in log.verify())


@pytest.mark.parametrize("key", ["orders.segments/x", "precious", "../precious", "ticks.segments/../../precious"])
def test_a_manifest_that_names_objects_of_others_is_refused(key: str, tmp_path: Path) -> None:
    up = shipped(tmp_path, "messagelog")
    head = msgspec.to_builtins(head_of(up))
    segments = [{**head["segments"][0], "key": key}, *head["segments"][1:]]
    for other in ({"trash": [{"key": key, "at_ns": 0}]}, {"segments": segments}, {"channel": "orders"}):
        other = {**head, **other}
        (up / head_key("ticks")).write_bytes(msgspec.json.encode(other))
        with pytest.raises(CorruptionError, match="ticks"):
            empty_trash(object_store_for(str(up)), "ticks", 0)


def test_an_object_is_not_written_through_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "a").symlink_to(tmp_path / "mine")
    store = object_store_for(str(tmp_path / "up"))
    for use in (
        lambda: store.put("a/b", b"x"),
        lambda: store.create("a/b", b"x"),
        lambda: store.delete(["a/b"]),
        lambda: store.get("a/b"),
        lambda: store.put("a/deep/b", b"x"),
    ):
        with pytest.raises(OSError, match="symbolic link"):
            use()
    assert list((tmp_path / "mine").iterdir()) == []


def test_links_that_fan_out_in_a_folder_of_objects_cost_nothing(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"link{number}").symlink_to(tmp_path)
    store = object_store_for(str(tmp_path))
    store.put("a/b", b"x")
    begun = time.process_time()
    assert [info.key for info in store.objects()] == ["a/b"]
    assert time.process_time() - begun < 5


def test_a_folder_of_objects_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "up").symlink_to(tmp_path / "real")
    store = object_store_for(str(tmp_path / "up"))
    store.put("a/b", b"x")
    assert store.get("a/b")[0] == b"x"
