"""Retention leaves what was asked for and never gets in the way; cleanup removes a channel and nothing else."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from xchannels import CountingDisk

from penstock.disk import PosixDisk
from penstock.errors import LockedError
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel import Reader, Writer, cleanup
from penstock.testing.faulty import FaultyDisk


def contents(path: Path) -> list[bytes]:
    with Reader.open(path) as reader:
        return [bytes(record.payload) for record in reader.records(timeout=0)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "penstock-" not in path.name)


def test_keep_files_leaves_the_newest(tmp_path: Path) -> None:  # 26
    with Writer.open(tmp_path / "chan", region_bytes=4096, roll_bytes=1 << 30, keep_files=2) as writer:
        for number in range(5):
            writer.append(b"%d" % number)
            writer.roll()
    assert names(tmp_path) == ["chan.4", "chan.5"]
    assert contents(tmp_path / "chan") == [b"4"]


def test_what_an_earlier_writer_kept_goes_with_the_next_roll(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        for _ in range(6):
            writer.roll()
    (tmp_path / "chan.2").unlink()  # a hole
    with Writer.open(path, roll_bytes=1 << 30, keep_files=3) as writer:
        assert names(tmp_path) == ["chan", "chan.1", "chan.3", "chan.4", "chan.5", "chan.6"]
        writer.roll()
        assert names(tmp_path) == ["chan.5", "chan.6", "chan.7"]


@pytest.mark.parametrize("shipped", [False, True])
def test_a_roll_asks_the_disk_as_often_however_many_files_are_kept(tmp_path: Path, shipped: bool) -> None:
    asked = []
    for files in (4, 60):
        path, disk = tmp_path / f"chan{files}", CountingDisk()
        with Writer.open(path, region_bytes=4096, roll_bytes=4096, keep_files=files, disk=disk) as writer:
            if shipped:
                Sidecar(PosixDisk(), f"{path}.penstock-").write_cursor("ship-there", 1 << 60)
            for _ in range(files + 3):
                writer.append(b"one")
                writer.roll()
            disk.calls = 0
            for _ in range(3):
                writer.append(b"one")
                writer.roll()
            asked.append(disk.calls)
        assert len(list(tmp_path.glob(f"chan{files}.[0-9]*"))) == files
    assert asked[0] == asked[1]


def test_a_file_that_was_adopted_is_kept_and_removed_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096, roll_bytes=1 << 30, keep_files=2) as writer:
        Writer.precreate(tmp_path / "other", region_bytes=4096)
        (tmp_path / "other").rename(tmp_path / "chan.1")
        writer.roll()
        assert names(tmp_path) == ["chan", "chan.1"]
        writer.roll()
        writer.roll()
        assert names(tmp_path) == ["chan.2", "chan.3"]


def test_a_file_that_cannot_be_removed_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk: Any = FaultyDisk(PosixDisk())
    path = tmp_path / "chan"

    def refuse(operation: str, name: str) -> None:
        if (operation, name) == ("remove", str(path)):
            raise OSError(errno.EPERM, "Operation not permitted")

    disk.on_call = refuse
    with Writer.open(path, region_bytes=4096, roll_bytes=1 << 30, keep_files=1, disk=disk) as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
        assert names(tmp_path) == ["chan", "chan.1"]
        assert "chan: cannot be removed, though 1 files are enough" in caplog.text
        writer.roll()
        assert names(tmp_path) == ["chan", "chan.2"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_name_goes_at_once_and_the_room_of_its_file_soon(tmp_path: Path) -> None:
    path, region = tmp_path / "chan", 256 << 10
    with Writer.open(path, region_bytes=region, roll_bytes=2 * region, keep_files=1) as writer:
        for _ in range(9):
            writer.append(bytes(region - 200))
            assert names(tmp_path) == [f"chan.{writer.file_sequence}" if writer.file_sequence else "chan"]
        assert writer.file_sequence == 4
        deadline = time.monotonic() + 60
        while held(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert held(tmp_path) == []


def held(folder: Path) -> list[str]:
    """Files without a name that this process still has open."""
    found = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)) and target.endswith(" (deleted)"):
            found.append(target)
    return found


def test_cleanup_removes_the_channel_and_nothing_else(tmp_path: Path) -> None:  # 52
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096, sync="always") as writer:
        for _ in range(3):
            writer.append(b"x")
            writer.roll()
        with pytest.raises(LockedError):
            cleanup(path)
    (tmp_path / "chan.1").unlink()  # a hole
    for other in ("chan.old", "chan.01", "chanx", "chanx.1"):
        (tmp_path / other).touch()
    removed = cleanup(path)
    assert {os.path.basename(name) for name in removed} >= {"chan", "chan.2", "chan.3", "chan.penstock-id"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chan.01", "chan.old", "chanx", "chanx.1"]
    assert cleanup(path) == []


def test_cleanup_takes_what_was_rolled_while_it_waited_for_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
    disk: Any = FaultyDisk(PosixDisk())

    def a_writer_comes_and_goes(operation: str, name: str) -> None:
        if operation == "lock":
            disk.on_call = None
            with Writer.open(path) as writer:
                writer.roll()

    disk.on_call = a_writer_comes_and_goes
    assert len(cleanup(path, disk=disk)) == 4
    assert list(tmp_path.iterdir()) == []
