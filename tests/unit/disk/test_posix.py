"""What only the file system of the operating system has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from open_files import open_files

from penstock.disk import PosixDisk
from penstock.disk.posix import boot_id, folder_of
from penstock.errors import LockedError


def test_a_lock_is_seen_by_other_processes_and_freed_by_their_death(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.disk import PosixDisk; lock = PosixDisk().lock(sys.argv[1]); "
        "print('held', flush=True); sys.stdin.read()"
    )
    path = str(tmp_path / "lock")
    other = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(LockedError):
        PosixDisk().lock(path)
    other.kill()
    other.wait(30)
    other.stdin.close()
    other.stdout.close()
    PosixDisk().lock(path).release()


def test_a_latch_follows_its_name_when_the_file_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    latch = PosixDisk().latch(str(path))
    assert latch.take()
    latch.release()
    path.unlink()
    held = PosixDisk().lock(str(path))
    assert not latch.take()
    held.release()
    assert latch.take()
    with pytest.raises(LockedError):
        PosixDisk().lock(str(path))
    latch.close()


def test_an_allocation_that_fails_leaves_the_size(tmp_path: Path) -> None:
    with PosixDisk().create(str(tmp_path / "a")) as file:
        file.write_at(0, b"x")
        with pytest.raises(OSError):
            file.allocate(0, 1 << 62)
        assert file.stat().size == 1


def test_the_boot_id_is_the_machine_s() -> None:
    assert PosixDisk().boot_id() == boot_id() != bytes(16)


def test_a_file_that_is_forgotten_is_closed(tmp_path: Path) -> None:
    for number in range(20):
        PosixDisk().create(str(tmp_path / str(number)))
    assert open_files(tmp_path) == []
    assert (folder_of("a/b/c"), folder_of("c"), folder_of("/c")) == ("a/b", ".", "/")
