"""One flipped bit in a log of RocksDB, on which RocksDB itself would never come back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.store import RocksStore
from penstock.store.options import RocksOptions
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


def test_damage_in_a_log_is_said_and_what_follows_is_set_aside(live: Path, tmp_path: Path) -> None:
    """RocksDB alone ends there without a word, and removes the rest."""
    (path,) = (found for found in live.glob("*.log") if found.stat().st_size)
    whole, third = path.read_bytes(), kinds(path)[3] - 6
    for byte in (third, third + 4, third + 5, third + 6, third + 7, third + 40):
        copy = tmp_path / f"at-{byte}"
        shutil.copytree(live, copy)
        flip(copy / path.name, byte, whole[byte] ^ 0x80)
        for read_only in (True, False):
            with RocksStore.open(copy, read_only=read_only) as store:
                (problem,) = store.verify()
                assert (problem.file, problem.byte) == (str(copy / path.name), third)
                assert (store.count(), store.cursor()) == (3, WatchCursor.of(3))
        rest = (copy / f"{path.name}.{third}.bad").read_bytes()
        assert rest[byte - third + 1 :] == whole[byte + 1 :]


def test_zeros_in_the_place_of_records_are_said(live: Path) -> None:
    (path,) = (found for found in live.glob("*.log") if found.stat().st_size)
    third = kinds(path)[3] - 6
    path.write_bytes(path.read_bytes()[:third].ljust(path.stat().st_size, b"\0"))
    for read_only in (True, False):
        with RocksStore.open(live, read_only=read_only) as store:
            assert [(problem.file, problem.byte) for problem in store.verify()] == [(str(path), third)]
            assert store.count() == 3


def test_a_record_that_a_kill_left_unfinished_is_no_damage(live: Path) -> None:
    (path,) = (found for found in live.glob("*.log") if found.stat().st_size)
    whole, last = path.read_bytes(), kinds(path)[-1] - 6
    for end in (last + 1, last + 7, last + 20, len(whole) - 1):
        path.write_bytes(whole[:end])
        with RocksStore.open(live, read_only=True) as store:
            assert (list(store.verify()), store.count()) == ([], 5)


@pytest.mark.parametrize("how", ["kind", "payload", "cut"])
def test_an_older_log_that_is_damaged_is_not_opened(tmp_path: Path, how: str) -> None:
    """What newer logs hold would be put on top of a hole."""
    with RocksStore.open(tmp_path / "fold") as store:
        for number in range(6):
            store.apply([KvUpdate.put(f"k{number}", b"v" * 50, number)], WatchCursor.of(number + 1))
            if number == 3:
                store._meta.flush(True)
        shutil.copytree(tmp_path / "fold", tmp_path / "live")
    path = min((tmp_path / "live").glob("*.log"))
    byte = kinds(path)[2] - 6
    if how == "cut":
        path.write_bytes(path.read_bytes()[: byte + 20])
    else:
        flip(path, byte + (6 if how == "kind" else 30), 5)
    before = {found.name: found.read_bytes() for found in (tmp_path / "live").iterdir()}
    for read_only in (True, False):
        with pytest.raises(CorruptionError) as caught:
            RocksStore.open(tmp_path / "live", read_only=read_only)
        assert (caught.value.file, caught.value.byte) == (str(path), byte)
    assert {found.name: found.read_bytes() for found in (tmp_path / "live").iterdir()} == before


def test_a_store_without_current_is_not_begun_anew(tmp_path: Path) -> None:
    """RocksDB makes an empty one, and removes the tables."""
    fold = tmp_path / "fold"
    with RocksStore.open(fold) as store:
        store.apply([KvUpdate.put("k", b"v", 1)], WatchCursor.of(1))
    for log in fold.glob("*.log"):
        log.unlink()
    current, names = (fold / "CURRENT").read_bytes(), sorted(found.name for found in fold.iterdir())
    for left in (None, b"", b"\0" * len(current), current[:-1], b"../x\n"):
        (fold / "CURRENT").unlink()
        if left is not None:
            (fold / "CURRENT").write_bytes(left)
        for read_only in (True, False):
            with pytest.raises(CorruptionError) as caught:
                RocksStore.open(fold, read_only=read_only)
            assert (caught.value.file, caught.value.byte) == (str(fold / "CURRENT"), 0)
        (fold / "CURRENT").write_bytes(current)
        assert sorted(found.name for found in fold.iterdir()) == names
    with RocksStore.open(fold) as store:
        assert store.count() == 1


def test_a_store_whose_making_was_cut_short_is_made(tmp_path: Path) -> None:
    with RocksStore.open(tmp_path / "other"):
        pass
    (manifest,) = (tmp_path / "other").glob("MANIFEST-*")
    (tmp_path / "fold").mkdir()
    shutil.copy(manifest, tmp_path / "fold" / "MANIFEST-000001")
    with RocksStore.open(tmp_path / "fold") as store:
        assert store.count() == 0


def test_a_missing_manifest_or_table_is_named(tmp_path: Path) -> None:
    fold = tmp_path / "fold"
    with RocksStore.open(fold) as store:
        store.apply([KvUpdate.put("k", b"v", 1)], WatchCursor.of(1))
    for path in [*fold.glob("MANIFEST-*"), *fold.glob("*.sst")]:
        path.rename(tmp_path / path.name)
        for read_only in (True, False):
            with pytest.raises(CorruptionError) as caught:
                RocksStore.open(fold, read_only=read_only)
            assert caught.value.file == str(path)
        (tmp_path / path.name).rename(path)


def test_a_damaged_table_is_no_other_owner(tmp_path: Path) -> None:
    """ "block checksum mismatch" has a lock in it."""
    fold = tmp_path / "fold"
    with RocksStore.open(fold) as store:
        store.apply([KvUpdate.put(f"k{n}", b"v" * 50, n) for n in range(20)], WatchCursor.of(20))
    said = 0
    for table in fold.glob("*.sst"):
        whole = table.read_bytes()
        for byte in range(0, len(whole), 41):
            table.write_bytes(bytes(value ^ (at == byte) for at, value in enumerate(whole)))
            try:
                with RocksStore.open(fold, RocksOptions(cache_bytes=0), read_only=True) as store:
                    list(store.verify())
            except CorruptionError as exc:
                said += exc.file == str(table)
        table.write_bytes(whole)
    assert said


def test_a_second_name_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    """Numbers of tables come again: what was set aside before is neither taken for the new one nor removed."""
    with RocksStore.open(tmp_path / "fold") as store:
        store.apply([KvUpdate.put("k", b"v", 1)], WatchCursor.of(1))
        store.settle()
        shutil.copytree(tmp_path / "fold", tmp_path / "live")
    live = tmp_path / "live"
    (path,) = live.glob("MANIFEST-*")
    whole, tables = path.read_bytes(), {found.name: found.read_bytes() for found in live.glob("*.sst")}
    for name in tables:
        (live / f"{name}.bad").write_bytes(b"of an earlier time")
    path.write_bytes(whole[:-3])
    try:
        RocksStore.open(live).close()
    except CorruptionError:
        pass
    for name, data in tables.items():
        assert (live / f"{name}.bad").read_bytes() == b"of an earlier time"
        assert data in [found.read_bytes() for found in (live / name, live / f"{name}.1.bad") if found.exists()]


def test_second_names_that_a_kill_left_are_removed(tmp_path: Path) -> None:
    from penstock.disk import PosixDisk
    from penstock.store.rockslog import hold_tables

    fold = tmp_path / "fold"
    with RocksStore.open(fold) as store:
        store.apply([KvUpdate.put("k", b"v", 1)], WatchCursor.of(1))
    assert hold_tables(PosixDisk(), str(fold))
    (fold / "000001.sst.bad").write_bytes(b"of an earlier time")
    with RocksStore.open(fold) as store:
        assert [found.name for found in fold.glob("*.bad")] == ["000001.sst.bad"]
        assert store.count() == 1


def test_a_note_that_cannot_be_removed_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fold = tmp_path / "fold"
    RocksStore.open(fold).close()

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error", "penstock-closed")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.store.rocks.forget_closed", fails)
        with pytest.raises(OSError, match="penstock-closed") as caught:
            RocksStore.open(fold)
        assert caught.traceback
        RocksStore.open(fold, read_only=True).close()
    with RocksStore.open(fold) as store:  # while the error, and what it holds, is still there
        assert store.count() == 0


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
        assert not any((torn / found.name.removesuffix(".bad")).exists() for found in torn.glob("*.bad"))
    assert named
