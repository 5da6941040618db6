"""A shipped log is read with few requests: pages when their turn comes, segments ahead for who reads on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from ship_use import FORMATS, fill, open_writer, read_all

from penstock.disk import disk_for, object_store_for
from penstock.disk.objectstore import Obstore
from penstock.errors import ReplacedError
from penstock.log.sidecar import sidecar_of
from penstock.ship import ShipOptions, Shipper, TieredLog
from penstock.ship.remote import ShippedLog


class Asked:
    """A store that notes which objects are asked for."""

    def __init__(self, store: Obstore) -> None:
        self._store, self.keys = store, list[str]()
        self.more = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str, **options: Any) -> Any:
        self._note(key)
        return self._store.get(key, **options)

    def get_range(self, key: str, *arguments: Any) -> Any:
        self._note(key)
        return self._store.get_range(key, *arguments)

    def _note(self, key: str) -> None:
        with self.more:
            self.keys.append(key)
            self.more.notify_all()

    def segments(self) -> set[str]:
        return {key for key in self.keys if ".segments/" in key and not key.endswith(".idx")}


def ship(format: str, tmp_path: Path, segments: int, **options: Any) -> Asked:
    store = Obstore(MemoryStore(), "memory://m")
    with open_writer(format, tmp_path / "log") as writer:
        for start in range(0, 10 * segments, 10):
            fill(format, writer, start, 10)
        with Shipper(tmp_path / "log", store, options=ShipOptions(**options)) as shipper:
            while shipper.step():
                pass
    return Asked(store)


@pytest.mark.parametrize("format", FORMATS)
def test_who_reads_on_gets_segments_ahead_and_who_looks_once_does_not(format: str, tmp_path: Path) -> None:
    store = ship(format, tmp_path, 6)
    with ShippedLog("memory://m/log", store, ahead_bytes=1 << 20, ahead_after=1) as log:  # type: ignore[arg-type]
        at = log.read(log.first_position, 5).next_position
        at = log.read(at, 5).next_position
        # A queue is looked up by the headers of its segments, each fetched whole.
        assert len(store.segments()) == (3 if format == "filechannel" else 1)
        log.read(at, 1)
        log.read(log.read(at, 1).next_position, 1)
        with store.more:
            assert store.more.wait_for(lambda: len(store.segments()) == 6, timeout=60)
        assert read_all(log) == [b"record %06d" % number for number in range(60)]
        assert len([key for key in store.keys if ".segments/" in key]) == len({*store.keys} - {"log.shipped.json"})


def test_a_page_is_fetched_when_its_turn_comes(tmp_path: Path) -> None:
    store = ship("messagelog", tmp_path, 300, page_entries=40, batch_bytes=1 << 30)
    with ShippedLog("memory://m/log", store) as log:  # type: ignore[arg-type]
        assert len(log.head.pages) == 7
        log.read(log.first_position, 5)
        assert len({key for key in store.keys if ".pages/" in key}) == 2  # a reader sees 64 segments at once
        store.keys.clear()
        assert log.start_of_newest(25) == 2971
        assert log.start_of_newest(10_000) == 1
        store.keys.clear()
        assert read_all(log)[-1] == b"record 002999"


@pytest.mark.parametrize("format", FORMATS)
def test_a_foreign_log_and_what_was_shipped_of_it_are_one(format: str, tmp_path: Path) -> None:
    with open_writer(format, tmp_path / "log") as writer:
        wanted = fill(format, writer, 0, 50)
        writer.append_many(wanted[:5])
    for left in [*tmp_path.glob("log.penstock-*"), *tmp_path.glob("log/penstock-*")]:
        left.unlink()
    with Shipper(tmp_path / "log", object_store_for(tmp_path / "up")) as shipper:
        assert shipper.step() == 1
    with TieredLog(tmp_path / "log", tmp_path / "up/log") as log:
        assert read_all(log) == wanted + wanted[:5]
    (tmp_path / "other").mkdir()
    with open_writer(format, tmp_path / "other/log") as writer:
        fill(format, writer, 0, 50)
    with pytest.raises(ReplacedError, match="another log"):
        TieredLog(tmp_path / "other/log", tmp_path / "up/log")


def test_a_place_has_one_cursor_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    cursors: set[str] = set()
    with open_writer("messagelog", tmp_path / "log") as writer:
        for place in ("up", "./up/", "../up", str(tmp_path / "up"), f"file://{tmp_path}/up", "up"):
            monkeypatch.chdir(tmp_path / "elsewhere" if place == "../up" else tmp_path)
            fill("messagelog", writer, 0, 10)
            with Shipper(tmp_path / "log", object_store_for(place)) as shipper:
                assert shipper.step() == 1
            cursors |= set(sidecar_of(disk_for(tmp_path), str(tmp_path / "log")).cursors())
        monkeypatch.chdir(tmp_path / "elsewhere")
        with Shipper(tmp_path / "log", object_store_for("up")) as shipper:  # written as before, and another place
            shipper.step()
    assert len(cursors) == 1
    assert len(sidecar_of(disk_for(tmp_path), str(tmp_path / "log")).cursors()) == 2
