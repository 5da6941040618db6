"""Promise: a power cut forgets exactly what no sync protected, in any mixture a device may leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.disk import MemoryDisk, PosixDisk
from penstock.testing.faulty import FaultyDisk


def test_synced_bytes_stay_and_others_may_go_page_by_page() -> None:
    seen = set()
    for seed in range(60):
        disk = FaultyDisk(MemoryDisk())
        file = disk.create("a")
        file.write_at(0, b"1" * 8192)
        file.sync()
        disk.sync_folder(".")
        file.write_at(0, b"2" * 8192)
        disk.cut_power(seed=seed)
        data = disk.open("a").read_at(0, 9999)
        assert len(data) == 8192
        assert set(data[:4096]) <= {49, 50}
        assert len(set(data[:4096])) == len(set(data[4096:])) == 1
        seen.add((data[0], data[-1]))
    assert seen == {(49, 49), (49, 50), (50, 49), (50, 50)}


def test_keep_0_and_1_are_the_two_ends() -> None:
    for keep, expected in ((0.0, b"old"), (1.0, b"new and longer")):
        disk = FaultyDisk(MemoryDisk())
        file = disk.create("a")
        file.write_at(0, b"old")
        file.sync()
        disk.sync_folder(".")
        file.write_at(0, b"new and longer")
        disk.cut_power(keep=keep)
        assert disk.open("a").read_at(0, 99) == expected


def test_a_name_needs_its_folder_synced() -> None:
    disk = FaultyDisk(MemoryDisk())
    disk.create("kept").sync()
    disk.sync_folder(".")
    disk.create("lost").sync()
    disk.cut_power(keep=0)
    assert disk.list(".") == ["kept"]


def test_names_survive_in_the_order_they_were_made() -> None:
    for seed in range(50):
        disk = FaultyDisk(MemoryDisk())
        for name in "abcd":
            disk.create(name).sync()
        disk.cut_power(seed=seed, keep=0.7)
        assert "".join(disk.list(".")) in ("", "a", "ab", "abc", "abcd")


def test_an_unsynced_rename_leaves_either_name() -> None:
    seen = set()
    for seed in range(40):
        disk = FaultyDisk(MemoryDisk())
        disk.create("a").sync()
        disk.sync_folder(".")
        disk.rename("a", "b")
        disk.cut_power(seed=seed)
        seen.add(tuple(disk.list(".")))
    assert seen == {("a",), ("b",)}


def test_an_unsynced_removal_may_be_undone_with_its_bytes() -> None:
    disk = FaultyDisk(MemoryDisk())
    with disk.create("a") as file:
        file.write_at(0, b"back")
        file.sync()
    disk.sync_folder(".")
    disk.remove("a")
    disk.cut_power(keep=0)
    assert disk.open("a").read_at(0, 9) == b"back"


def test_what_was_written_through_a_mapping_counts(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    with disk.create(f"{tmp_path}/a") as file:
        file.truncate(4096)
        window = file.map(0, 4096, writable=True)
        memoryview(window)[:4] = b"kept"
        file.sync()
        disk.sync_folder(str(tmp_path))
        memoryview(window)[:4] = b"lost"
    disk.cut_power(keep=0)
    assert (tmp_path / "a").read_bytes()[:4] == b"kept"


def test_a_fault_fails_one_call_after_so_many() -> None:
    disk = FaultyDisk(MemoryDisk())
    file = disk.create("data")
    disk.fail("write_at", OSError(28, "full"), path="dat", after=2)
    file.write_at(0, b"1")
    file.write_at(1, b"2")
    with pytest.raises(OSError, match="full"):
        file.write_at(2, b"3")
    file.write_at(2, b"3")
    disk.fail("write_at", OSError(28, "full"), path="other")
    file.write_at(3, b"4")
    assert file.read_at(0, 9) == b"1234"
    assert disk.calls.count(("write_at", "data")) == 5


def test_every_cut_is_another_boot() -> None:
    disk = FaultyDisk(MemoryDisk())
    boots = [disk.boot_id()]
    for _ in range(3):
        disk.cut_power()
        boots.append(disk.boot_id())
    assert len(set(boots)) == 4


def test_a_handle_from_before_a_cut_fails_and_changes_nothing() -> None:
    disk = FaultyDisk(MemoryDisk())
    with disk.create("a") as old:
        old.write_at(0, b"kept")
        old.sync()
        disk.sync_folder(".")
        disk.cut_power()
        for call in (lambda: old.write_at(0, b"late"), old.sync, lambda: old.read_at(0, 4), lambda: old.truncate(0)):
            with pytest.raises(OSError, match="opened before the power cut"):
                call()
    assert disk.open("a").read_at(0, 9) == b"kept"
