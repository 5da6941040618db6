"""Every store passes the one suite of penstock.testing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.store import AppendLogOptions, AppendLogStore, LmdbOptions, LmdbStore, RocksOptions, RocksStore
from penstock.testing.store_conformance import StoreConformance, fixture_batches
from penstock.types import WatchCursor


class TestAppendLog(StoreConformance):
    opener = "penstock.store:AppendLogStore.open"

    def open(self, path: str, *, read_only: bool = False) -> Any:
        return AppendLogStore.open(path, read_only=read_only)

    def exported(self, data: Path) -> str:
        return str(data / "fold.snap")


class TestAppendLogAllOrNothing(TestAppendLog):
    """Synced, an unfinished apply forgotten, and rewritten in the background all the time."""

    def open(self, path: str, *, read_only: bool = False) -> Any:
        options = AppendLogOptions(sync="interval", unfinished="drop", compact_threshold_bytes=100)
        return AppendLogStore.open(path, options, read_only=read_only)


class TestRocks(StoreConformance):
    opener = "penstock.store:RocksStore.open"

    def open(self, path: str, *, read_only: bool = False) -> Any:
        return RocksStore.open(path, RocksOptions(cache_bytes=8 << 20), read_only=read_only)


class TestLmdb(StoreConformance):
    opener = "penstock.store:LmdbStore.open"
    longest_key = 511
    takes_empty_key = False

    def open(self, path: str, *, read_only: bool = False) -> Any:
        return LmdbStore.open(path, LmdbOptions(map_bytes=1 << 20, sync="none"), read_only=read_only)


def test_all_backends_have_the_same_digest(tmp_path: Path) -> None:
    digests = set()
    for kind in (AppendLogStore, RocksStore, LmdbStore):
        with kind.open(tmp_path / kind.backend) as store:
            for batch, cursor in fixture_batches():
                store.apply(batch, WatchCursor.of(cursor))
            digests.add((store.digest(), store.count()))
    assert len(digests) == 1


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore, LmdbStore])
def test_load_returns_where_to_resume(tmp_path: Path, kind: Any) -> None:
    cursor, store = kind.load(tmp_path / "fold")
    assert cursor.at_start
    store.apply([], WatchCursor.of(5))
    store.close()
    cursor, store = kind.load(tmp_path / "fold")
    assert cursor == WatchCursor.of(5)
    store.close()
