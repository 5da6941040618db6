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


def test_a_store_that_was_closed_is_whole_or_refused(tmp_path: Path) -> None:
    fold = tmp_path / "fold"
    with RocksStore.open(fold) as store:
        store.apply([KvUpdate.put(f"k{n}", b"v" * 50, n) for n in range(20)], WatchCursor.of(20))
    (path,) = fold.glob("MANIFEST-*")
    whole, names = path.read_bytes(), sorted(found.name for found in fold.iterdir())
    flipped = bytes(byte ^ (at == len(whole) // 2) for at, byte in enumerate(whole))
    for data in [whole[:at] for at in range(0, len(whole), 7)] + [flipped]:
        path.write_bytes(data)
        for read_only in (True, False):
            with pytest.raises(CorruptionError, match="the store was closed") as caught:
                RocksStore.open(fold, read_only=read_only)
            assert caught.value.file == str(path)
        assert sorted(found.name for found in fold.iterdir()) == names
    path.unlink()
    with pytest.raises((CorruptionError, OSError)):
        RocksStore.open(fold)
    path.write_bytes(whole)
    with RocksStore.open(fold) as store:
        assert store.count() == 20


def test_who_had_a_closed_store_open_meanwhile_is_believed(live: Path, tmp_path: Path) -> None:
    """A note is of one close: neither a kill after it nor another program makes it a lie."""
    with RocksStore.open(tmp_path / "fold"):
        assert not (tmp_path / "fold" / "penstock-closed").exists()
    note = (tmp_path / "fold" / "penstock-closed").read_bytes()
    (live / "penstock-closed").write_bytes(note)  # of an earlier life: CURRENT names another manifest now
    with RocksStore.open(live) as store:
        assert store.count() == 6


def test_tables_that_a_torn_manifest_no_longer_names_are_kept(tmp_path: Path) -> None:
    with RocksStore.open(tmp_path / "fold") as store:
        for number in range(2):
            store.apply([KvUpdate.put(f"k{number}", b"v" * 50, number)], WatchCursor.of(number + 1))
            store.settle()
        shutil.copytree(tmp_path / "fold", tmp_path / "live")
    (path,) = (tmp_path / "live").glob("MANIFEST-*")
    whole, named = path.read_bytes(), 0
    tables = {found.name: found.read_bytes() for found in (tmp_path / "live").glob("*.sst")}
    borders = {at - 6 for at in kinds(path)}
    for at in set(range(len(whole) - 1, 0, -11)) - borders:
        torn = tmp_path / f"torn-{at}"
        shutil.copytree(tmp_path / "live", torn)
        (torn / path.name).write_bytes(whole[:at])
        try:
            with RocksStore.open(torn) as store:
                named += any("the middle of a record" in str(problem) for problem in store.verify())
        except CorruptionError:
            continue
        for name, data in tables.items():
            kept = torn / name if (torn / name).exists() else torn / f"{name}.bad"
            assert kept.read_bytes() == data
        assert not any((torn / name[:-4]).exists() for name in map(str, torn.glob("*.bad")))
    assert named
