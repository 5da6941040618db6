"""A shipped log is read with few requests: pages when their turn comes, segments ahead for who reads on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from ship_use import FORMATS, fill, open_writer, read_all

from penstock.disk.objectstore import Obstore
from penstock.ship import ShipOptions, Shipper
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
