"""What only the disk in memory has; the rest is in tests/conformance/test_disks.py."""

from __future__ import annotations

import pytest

from penstock.disk import MemoryDisk


def test_paths_are_normalised() -> None:
    disk = MemoryDisk()
    disk.make_folder("./data")
    disk.create("data//a").write_at(0, b"x")
    assert disk.open("./data/../data/a").read_at(0, 1) == b"x"
    assert disk.list(".") == ["data"]


def test_a_folder_is_no_file() -> None:
    disk = MemoryDisk()
    disk.make_folder("data")
    with pytest.raises(IsADirectoryError):
        disk.open("data")
    with pytest.raises(FileExistsError):
        disk.create("data")
    disk.create("a").close()
    with pytest.raises(FileExistsError):
        disk.make_folder("a")


def test_two_disks_share_nothing() -> None:
    one, other = MemoryDisk(), MemoryDisk()
    one.create("a").close()
    assert other.list(".") == []
