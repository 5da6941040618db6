"""Promise: files read together have the bytes they have by themselves, and one that cannot be read harms no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from open_files import open_files

from penstock import kernel
from penstock.disk import MemoryDisk, PosixDisk, exist_many, read_many


@pytest.mark.parametrize("count", [0, 1, 33, 1000])
def test_every_file_has_its_own_bytes(tmp_path: Path, count: int) -> None:
    paths = [str(tmp_path / str(number)) for number in range(count)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(b"%d" % number * (number % 7))
    assert kernel.native, kernel.reason
    assert read_many(PosixDisk(), paths, 100) == [Path(path).read_bytes() for path in paths]


def test_what_is_large_missing_or_no_file_is_left_out(tmp_path: Path) -> None:
    for name, size in (("small", 3), ("just", 10), ("large", 11), ("empty", 0)):
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "folder").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    names = ["small", "large", "missing", "just", "folder", "dangling", "loop", "empty", "small/below"]
    paths = [str(tmp_path / name) for name in names]
    assert exist_many(PosixDisk(), paths) == [os.path.exists(path) for path in paths]
    found = read_many(PosixDisk(), paths, 10)
    assert found == [b"xxx", None, None, b"x" * 10, None, None, None, b"", None]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    for _ in range(5):
        read_many(PosixDisk(), [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b")] * 50, 0)
    assert open_files(tmp_path) == []


def test_a_disk_that_is_not_the_operating_systems_leaves_it_to_the_caller() -> None:
    disk = MemoryDisk()
    disk.create("a").write_at(0, b"x")
    assert read_many(disk, ["a", "b"], 10) == [None, None]
    assert exist_many(disk, ["a", "b"]) == [False, False]
