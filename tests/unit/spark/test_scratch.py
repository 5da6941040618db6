"""The folder of a session: gone with its process, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.disk import PosixDisk, disk_for
from penstock.disk.posix import PosixLock
from penstock.spark import scratch

OWNER = """
import sys
from penstock.spark.scratch import make_scratch
print(make_scratch(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def start(room: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(room), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_process(room: Path) -> None:
    process, folder = start(room)
    assert (folder / "tmp").is_dir()
    process.communicate()
    assert not folder.exists()


def test_a_killed_process_leaves_a_folder_that_the_next_session_removes(room: Path) -> None:
    killed, abandoned = start(room)
    living, used = start(room)
    killed.kill()
    killed.communicate()
    (abandoned / "tmp" / "blocks").write_bytes(b"shuffled")
    assert scratch.remove_abandoned() == [str(abandoned)]
    assert used.is_dir()
    assert not abandoned.exists()
    living.communicate()


def test_a_folder_that_is_just_being_made_is_left_alone(room: Path) -> None:
    (room / f"{scratch.PREFIX}new").mkdir()
    (room / "other").mkdir()
    assert scratch.remove_abandoned() == []
    assert sorted(path.name for path in room.iterdir()) == ["other", f"{scratch.PREFIX}new"]


def test_a_session_that_starts_meanwhile_does_not_take_a_new_folder_for_abandoned(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    class Interrupted(PosixDisk):
        def lock(self, path: str) -> PosixLock:
            Path(path).touch()  # the file is there, and nobody holds it yet
            monkeypatch.setattr(scratch, "disk_for", disk_for)
            removed.extend(scratch.remove_abandoned())
            return super().lock(path)

    monkeypatch.setattr(scratch, "disk_for", lambda _: Interrupted())
    folder = Path(scratch.make_scratch())
    assert removed == []
    assert (folder / "tmp").is_dir()
    assert list(room.iterdir()) == [folder]
