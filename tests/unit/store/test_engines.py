"""Promises of the stores on RocksDB and LMDB beyond the contract."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Backpressure, CorruptionError, OptionsError, UnsupportedError
from penstock.store import (
    AppendLogStore,
    LmdbOptions,
    LmdbStore,
    RocksOptions,
    RocksStore,
    detect_backend,
    digest_entries,
    lightning as lightning_module,
    open_store,
)
from penstock.types import KvUpdate, WatchCursor

ENGINES = pytest.mark.parametrize("kind", [RocksStore, LmdbStore])


def puts(start: int, stop: int, value: bytes = b"v" * 100) -> list[KvUpdate]:
    return [KvUpdate.put(f"k{n:05}", value, n) for n in range(start, stop)]


@ENGINES
def test_an_entry_is_kept_as_version_length_version_value(tmp_path: Path, kind: Any) -> None:
    with kind.open(tmp_path / "fold") as store:
        store.apply([KvUpdate.put("a", b"on", 7), KvUpdate.put("b", b"")], WatchCursor.of(7))
        assert store._read_many([b"a", b"b"]) == [b"\x08" + (7).to_bytes(8, "big") + b"on", b"\x00"]
        assert store._read_meta(b"cursor") == (7).to_bytes(8, "big")


@ENGINES
def test_a_state_that_another_program_moved_on_is_counted_anew(tmp_path: Path, kind: Any) -> None:
    with kind.open(tmp_path / "fold") as store:
        store.apply(puts(0, 3), WatchCursor.of(3))
        store._write({b"foreign": b"\x00x"}, {b"cursor": (4).to_bytes(8, "big")})
    with kind.open(tmp_path / "fold") as store:
        assert (store.count(), store.cursor()) == (4, WatchCursor.of(4))
        assert list(store.verify()) == []


@ENGINES
def test_verify_finds_nothing_wrong_while_others_apply(tmp_path: Path, kind: Any) -> None:
    done, failed = threading.Event(), []
    with kind.open(tmp_path / "fold", sync="none") as store:
        store.apply(puts(0, 2000), WatchCursor.of(1))

        def work() -> None:
            version = 1
            while not done.is_set():
                version += 1
                store.apply(puts(version % 1900, version % 1900 + 20, b"%d" % version), WatchCursor.of(version))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(40):
                failed += list(store.verify())
        finally:
            done.set()
            thread.join()
    assert failed == []


@ENGINES
def test_a_stored_cursor_of_eleven_bytes_is_refused(tmp_path: Path, kind: Any) -> None:
    with kind.open(tmp_path / "fold") as store:
        store._write({}, {b"cursor": bytes(11)})
    with pytest.raises(CorruptionError, match="11 bytes"):
        kind.open(tmp_path / "fold")
    with pytest.raises(CorruptionError, match="11 bytes"):  # and the lock was let go
        kind.open(tmp_path / "fold")


@ENGINES
@pytest.mark.parametrize("record", [b"", b"\x0b" + bytes(11), b"\x08abc"])
def test_what_is_no_value_record_is_corruption(tmp_path: Path, kind: Any, record: bytes) -> None:
    with kind.open(tmp_path / "fold") as store:
        store.apply(puts(0, 3), WatchCursor.of(3))
        store._write({b"bad": record}, {})
        with pytest.raises(CorruptionError, match="bad"):
            store.get("bad")
        assert [problem.reason for problem in store.verify()]


@ENGINES
def test_a_missing_package_is_named(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(UnsupportedError, match=r"penstock\[stores\]"):
        kind.open(tmp_path / "fold")


@pytest.mark.parametrize(
    ("kind", "options"),
    [(RocksStore, RocksOptions(running_digest=False)), (LmdbStore, LmdbOptions(running_digest=False, sync="none"))],
)
def test_without_a_running_digest_count_and_digest_are_computed_when_asked_for(
    tmp_path: Path, kind: Any, options: Any
) -> None:
    with kind.open(tmp_path / "fold", options) as store:
        store.apply(puts(0, 10), WatchCursor.of(1))
        assert (store.count(), store.digest()) == (10, digest_entries(store.range()))
        store.apply([*puts(5, 20, b"new"), KvUpdate.delete("k00001")], WatchCursor.of(1))  # the cursor stays
        assert (store.count(), store.digest()) == (19, digest_entries(store.range()))
    for again in (options, None):
        with kind.open(tmp_path / "fold", again) as store:
            assert (store.count(), store.digest()) == (19, digest_entries(store.range()))
            assert list(store.verify()) == []


def test_the_map_of_lmdb_grows_by_itself(tmp_path: Path) -> None:
    with LmdbStore.open(tmp_path / "fold", LmdbOptions(map_bytes=65536, sync="none")) as store:
        for start in range(0, 5000, 500):
            store.apply(puts(start, start + 500), WatchCursor.of(start))
        assert store.count() == 5000
        assert store._env.info()["map_size"] > 65536
    with LmdbStore.open(tmp_path / "fold", LmdbOptions(map_bytes=65536)) as store:
        assert store.count() == 5000


def test_a_full_map_under_an_open_scan_says_so_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_module, "GROW_SECONDS", 0.05)
    with LmdbStore.open(tmp_path / "fold", LmdbOptions(map_bytes=1 << 20, sync="none")) as store:
        store.apply(puts(0, 100), WatchCursor.of(1))
        scan = store.scan(limit=10)
        next(scan)
        with pytest.raises(Backpressure, match="while a scan is open"):
            store.apply(puts(0, 20_000), WatchCursor.of(2))
        assert (store.count(), store.cursor()) == (100, WatchCursor.of(1))
        scan.close()
        store.apply(puts(0, 20_000), WatchCursor.of(2))
        assert store.count() == 20_000


def test_lmdb_names_the_key_it_cannot_hold(tmp_path: Path) -> None:
    with (
        LmdbStore.open(tmp_path / "fold") as store,
        pytest.raises(OptionsError, match="update 1 has a key of 512 bytes, where LMDB takes 1 to 511"),
    ):
        store.apply([*puts(0, 1), KvUpdate.put("k" * 512, b"")], WatchCursor())


def test_a_rocksdb_store_is_synced_when_asked_for(tmp_path: Path) -> None:
    with RocksStore.open(tmp_path / "fold", RocksOptions(sync="always", cache_bytes=0)) as store:
        assert store._write_options.sync
        store.apply(puts(0, 3), WatchCursor.of(3))
        store.settle()
        assert store.count() == 3


def test_a_rocksdb_store_is_synced_within_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = threading.Semaphore(0), RocksStore._sync_log

    def noted(store: RocksStore) -> int:
        done = sync(store)
        synced.release()
        return done

    monkeypatch.setattr(RocksStore, "_sync_log", noted)
    with RocksStore.open(tmp_path / "fold", sync="interval", sync_seconds=0.01) as store:
        assert not store._write_options.sync
        store.apply(puts(0, 3), WatchCursor.of(3))
        assert synced.acquire(timeout=60)
        store.apply(puts(0, 4), WatchCursor.of(4))
    assert synced.acquire(timeout=60)  # by the interval, or because it was closed


def test_a_store_that_cannot_sync_says_so_before_the_next_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Semaphore(0)

    def fail(_: RocksStore) -> int:
        failed.release()
        raise OSError(5, "Input/output error")

    store = RocksStore.open(tmp_path / "fold", sync="interval", sync_seconds=0.01)
    monkeypatch.setattr(store._committer, "_sync", lambda: fail(store))
    store.apply(puts(0, 3), WatchCursor.of(3))
    assert failed.acquire(timeout=60)
    with pytest.raises(OSError, match="Input/output error"):
        apply_until_told(store)
    with pytest.raises(OSError, match="Input/output error"):
        store.close()
    with RocksStore.open(tmp_path / "fold") as again:  # and it was let go of
        assert again.count() in (3, 4)


def apply_until_told(store: RocksStore) -> None:
    while True:
        store.apply(puts(0, 4), WatchCursor.of(4))


def test_engines_spell_sync_modes_as_everything_else_does() -> None:
    assert [RocksOptions(sync=True).sync, RocksOptions(sync=False).sync] == ["always", "none"]  # type: ignore[arg-type]
    assert [LmdbOptions(sync=True).sync, LmdbOptions(sync=False).sync] == ["always", "none"]  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="sync='sometimes': must be one of none, interval, always"):
        RocksOptions(sync="sometimes")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="sync='interval': must be none or always"):
        LmdbOptions(sync="interval")


def test_rocksdb_is_tuned_and_every_family_can_be_read_by_the_original(tmp_path: Path) -> None:
    """Its build reads lz4 and zstd and nothing else; two settings that do nothing without each other are both there."""
    with RocksStore.open(tmp_path / "fold", RocksOptions(cache_bytes=8 << 20)) as store:
        store.apply(puts(0, 3), WatchCursor.of(3))
    newest = max((tmp_path / "fold").glob("OPTIONS-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    families: dict[str, dict[str, str]] = {}
    for line in newest.read_text().splitlines():
        if line.startswith("["):
            section = families.setdefault(line.strip("[]"), {})
        elif "=" in line:
            name, _, value = line.strip().partition("=")
            section[name] = value
    for family in ("default", "data", "meta"):
        assert families[f'CFOptions "{family}"']["compression"] == "kLZ4Compression", family
    data, table = families['CFOptions "data"'], families['TableOptions/BlockBasedTable "data"']
    assert (data["bottommost_compression"], data["write_buffer_size"]) == ("kZSTD", str(256 << 20))
    assert (table["index_type"], table["partition_filters"]) == ("kTwoLevelIndexSearch", "true")
    assert (table["block_size"], table["cache_index_and_filter_blocks"]) == ("16384", "true")
    assert data["optimize_filters_for_hits"] == "false"
    assert families["DBOptions"]["max_total_wal_size"] == str(1 << 30)


@ENGINES
def test_a_closed_engine_can_be_opened_again_at_once(tmp_path: Path, kind: Any) -> None:
    for number in range(3):
        with kind.open(tmp_path / "fold") as store:
            store.apply(puts(number, number + 1), WatchCursor.of(number))
    with kind.open(tmp_path / "fold", read_only=True) as store:
        assert store.count() == 3


def test_the_backend_is_told_from_the_path(tmp_path: Path) -> None:
    for kind in (AppendLogStore, RocksStore, LmdbStore):
        path = str(tmp_path / kind.backend)
        kind.open(path).close()
        assert detect_backend(path) == kind.backend
        with open_store(path) as store:
            assert type(store) is kind
    with pytest.raises(OptionsError, match="neither"):
        detect_backend(str(tmp_path))


def test_a_folder_of_rubbish_is_refused_by_name(tmp_path: Path) -> None:
    for name, file in (("rocks", "CURRENT"), ("lightning", "data.mdb")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"rubbish" * 3000)
        with pytest.raises((CorruptionError, UnsupportedError, OSError), match=name):
            open_store(tmp_path / name)


def test_damage_of_a_rocksdb_file_is_named_with_its_byte(tmp_path: Path) -> None:
    with RocksStore.open(tmp_path / "fold", RocksOptions(cache_bytes=0)) as store:
        store.apply(puts(0, 300), WatchCursor.of(300))
        store.settle()
    for file in (tmp_path / "fold").glob("*.sst"):
        data = bytearray(file.read_bytes())
        data[20] ^= 0xFF
        file.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"\.sst at byte 0: block checksum mismatch"):
        RocksStore.open(tmp_path / "fold", RocksOptions(cache_bytes=0)).get("k00001")
