"""Promise: a save that is interrupted anywhere leaves the old file or the new one, whole."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk, PosixDisk, Replacement, save_atomically, save_many_atomically
from penstock.testing.faulty import FaultyDisk


def fresh() -> FaultyDisk:
    disk = FaultyDisk(MemoryDisk())
    save_atomically(disk, "a", b"old")
    disk.calls.clear()
    return disk


@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename"])
def test_a_failure_leaves_the_old_file_and_no_rubbish(operation: str) -> None:
    disk = fresh()
    disk.fail(operation, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        save_atomically(disk, "a", b"new")
    assert disk.list(".") == ["a"]
    assert disk.open("a").read_at(0, 9) == b"old"


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename", "sync_folder", ""])
def test_a_power_cut_leaves_one_of_the_two(operation: str, seed: int) -> None:
    disk = fresh()

    class PowerCut(BaseException):
        pass

    if operation:
        disk.fail(operation, PowerCut())
    try:
        save_atomically(disk, "a", b"new")
        done = True
    except PowerCut:
        done = False
    disk.cut_power(seed=seed, keep=(seed % 4) / 3)
    found = disk.open("a").read_at(0, 9)
    assert found in ((b"new",) if done else (b"old", b"new"))


def test_the_steps_are_taken_in_order() -> None:
    disk = fresh()
    save_atomically(disk, "a", b"new", temporary="chosen")
    assert [call for call in disk.calls if call[0] != "remove"] == [
        ("create", "chosen"), ("write_at", "chosen"), ("sync", "chosen"), ("rename", "chosen"), ("sync_folder", "."),
    ]  # fmt: skip


def test_a_leftover_is_replaced() -> None:
    disk = fresh()
    disk.create("a.tmp").write_at(0, b"a long leftover")
    save_atomically(disk, "a", b"new")
    assert disk.open("a").read_at(0, 99) == b"new"


def test_many_go_step_by_step_and_one_that_fails_fails_alone() -> None:
    disk = FaultyDisk(MemoryDisk())
    saves = [Replacement(name, name.encode(), f"{name}.tmp") for name in "abc"]
    disk.fail("sync", OSError(5, "Input/output error"), path="b.tmp")
    assert [type(error) for error in save_many_atomically(disk, saves)] == [type(None), OSError, type(None)]
    assert disk.list(".") == ["a", "c"]
    assert [name for name, _ in disk.calls if name in ("write_at", "sync", "rename", "sync_folder")] == [
        "write_at", "write_at", "write_at", "sync", "sync", "sync", "rename", "rename", "sync_folder", "sync_folder",
    ]  # fmt: skip


def test_many_whose_maker_dies_leave_no_rubbish() -> None:
    disk = FaultyDisk(MemoryDisk())
    disk.fail("sync", KeyboardInterrupt(), path="b.tmp")
    with pytest.raises(KeyboardInterrupt):
        save_many_atomically(disk, [Replacement(name, b"x", f"{name}.tmp") for name in "abc"])
    assert disk.list(".") == []


def test_many_on_a_real_disk_each_keep_what_they_promise(tmp_path: Path) -> None:
    """Side by side below Python: new, replaced, kept as a spare, written to a spare, left over, without a folder."""
    disk, names = PosixDisk(), [f"{tmp_path}/{number}" for number in range(100)]
    for name in names:
        os.mkdir(name)
    (tmp_path / "3" / "f.tmp").write_bytes(b"a long leftover of somebody who died")

    def save(data: bytes, *, reuse: bool) -> list[OSError | None]:
        return save_many_atomically(
            disk, [Replacement(f"{name}/f", data, f"{name}/f.tmp", f"{name}/spare", reuse) for name in names]
        )

    assert save(b"first, and the longest", reuse=False) == [None] * 100
    assert {tuple(sorted(os.listdir(name))) for name in names} == {("f",)}
    assert save(b"second", reuse=False) == [None] * 100
    assert save(b"third", reuse=True) == [None] * 100
    shutil.rmtree(names[7])
    os.remove(f"{names[8]}/spare")
    errors = save(b"4", reuse=True)
    assert [type(error) for error in errors[6:9]] == [type(None), FileNotFoundError, type(None)]
    assert errors[7] is not None
    assert errors[7].filename == f"{names[7]}/f"
    for number, name in enumerate(names):
        if number != 7:
            assert Path(name, "f").read_bytes() == b"4"
            assert Path(name, "spare").read_bytes() in (b"third", b"second")
            assert sorted(os.listdir(name)) == ["f", "spare"]


def test_one_that_fails_on_a_real_disk_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    saves = [
        Replacement(f"{tmp_path}/{name}", bytes(size), f"{tmp_path}/{name}.tmp")
        for name, size in (("a", 9999), ("b", 9))
    ]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        errors = save_many_atomically(PosixDisk(), saves)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [error.errno if error else 0 for error in errors] == [errno.EFBIG, 0]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "a").read_bytes() == b"old"
