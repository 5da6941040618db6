"""One flipped bit in a log of RocksDB, on which RocksDB itself would never come back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.store import RocksStore
from penstock.types import KvUpdate, WatchCursor

NUMBERED = (5, 6, 7, 8, 11)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A store as a kill leaves it: six batches in its write-ahead log."""
    with RocksStore.open(tmp_path / "fold") as store:
        for number in range(6):
            store.apply([KvUpdate.put(f"k{number}", b"v" * 50, number)], WatchCursor.of(number + 1))
        shutil.copytree(tmp_path / "fold", tmp_path / "live")
    return tmp_path / "live"


def kinds(path: Path) -> list[int]:
    """Return where the kinds of the records are, of a file that is shorter than a block."""
    data, at, found = path.read_bytes(), 0, []
    while at + 7 <= len(data):
        found.append(at + 6)
        at += 7 + int.from_bytes(data[at + 4 : at + 6], "little")
    return found


def flip(path: Path, byte: int, kind: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        file.write(bytes([kind]))


@pytest.mark.parametrize("kind", NUMBERED)
def test_a_manifest_that_rocksdb_would_read_for_ever_is_named(live: Path, kind: int) -> None:
    (path,) = live.glob("MANIFEST-*")
    byte = kinds(path)[3]
    flip(path, byte, kind)
    for read_only in (True, False):
        with pytest.raises(CorruptionError, match="a record of a kind that does not belong") as caught:
            RocksStore.open(live, read_only=read_only)
        assert (caught.value.file, caught.value.byte) == (str(path), byte - 6)


@pytest.mark.parametrize("kind", NUMBERED)
def test_a_log_that_rocksdb_would_read_for_ever_is_cut_there_and_the_rest_set_aside(live: Path, kind: int) -> None:
    (path,) = (found for found in live.glob("*.log") if found.stat().st_size)
    rest, byte = path.read_bytes(), kinds(path)[3]
    flip(path, byte, kind)
    with pytest.raises(CorruptionError, match="a record of a kind that does not belong") as caught:
        RocksStore.open(live, read_only=True)
    assert (caught.value.file, caught.value.byte) == (str(path), byte - 6)
    with RocksStore.open(live) as store:
        assert sorted(entry.key for entry in store.range()) == ["k0", "k1", "k2"]
        assert store.cursor() == WatchCursor.of(3)
    aside = live / f"{path.name}.{byte - 6}.bad"
    assert aside.read_bytes()[7:] == rest[byte + 1 :]
    with RocksStore.open(live) as store:
        assert store.count() == 3
