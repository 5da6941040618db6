"""The next file is made ready before it is needed, and nobody sees it before it is rolled to."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.disk import PosixDisk
from penstock.log.xchannel import Reader, Writer, XChannelLog, ahead, cleanup
from penstock.log.xchannel.draft import Draft
from penstock.log.xchannel.files import discover
from penstock.log.xchannel.log import logs_in
from penstock.log.xchannel.options import WriterOptions
from penstock.testing.faulty import FaultyDisk

REGION = 64 << 10
ROLL = 4 * REGION
PIECE = bytes(REGION - 200)


def draft_of(path: Path) -> Path:
    return path.with_name("chan.penstock-new")


def fill_but_one(writer: Writer, path: Path) -> None:
    """Fill a file up to its last region, and wait for the next one to be ready."""
    while writer.next_position % (1 << 40) < ROLL - REGION:
        writer.append(PIECE)
    if sys.platform == "linux":
        deadline = time.monotonic() + 60
        while draft_of(path).stat().st_size < REGION and time.monotonic() < deadline:
            time.sleep(0.001)
        assert draft_of(path).stat().st_size == REGION


def contents(path: Path) -> list[int]:
    with Reader.open(path) as reader:
        return [len(record.payload) for record in reader.records(timeout=0)]


def test_the_next_file_is_ready_before_it_is_needed_and_the_roll_takes_it(path: Path) -> None:  # 108, 138
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        for number in range(1, 4):
            fill_but_one(writer, path)
            ready = draft_of(path).stat().st_ino
            assert discover(PosixDisk(), str(path)) == list(range(number))
            assert logs_in(PosixDisk(), str(path.parent)) == ["chan"]
            with Reader.open(path, "latest") as live, XChannelLog(path) as log:
                assert live.file_sequence == number - 1
                assert list(log.verify()) == []
                assert writer.append(PIECE) >> 40 == number
                taken = path.with_name(f"chan.{number}").stat()
                assert (taken.st_ino, taken.st_size, taken.st_nlink) == (ready, REGION, 1)
                assert not draft_of(path).exists()
                assert len(live.read(timeout=60).payload) == len(PIECE)


@pytest.mark.parametrize("roll", [ROLL, ROLL + 8, ROLL + 1000, ROLL + REGION - 8])  # 118
def test_a_roll_by_hand_takes_it_too(roll: int, path: Path) -> None:
    with Writer.open(path, region_bytes=REGION, roll_bytes=roll) as writer:
        while writer.next_position < (roll - 32) // REGION * REGION:  # the last region that has room for a record
            assert not draft_of(path).exists()
            writer.append(bytes(100))
        assert draft_of(path).exists()
        writer.roll()
        assert not draft_of(path).exists()
        assert writer.append(b"x") == (1 << 40) + 80
    assert contents(path)[-1] == 1


def test_a_file_that_is_not_needed_goes_away_with_its_writer(path: Path) -> None:  # 141
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        fill_but_one(writer, path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["chan", "chan.penstock-id", "chan.penstock-lock"]


def test_a_writer_that_nobody_closed_leaves_a_draft_that_the_next_one_removes(path: Path) -> None:
    writer = Writer.open(path, region_bytes=REGION, roll_bytes=ROLL)
    fill_but_one(writer, path)
    del writer
    gc.collect()
    assert draft_of(path).exists()
    Writer.open(path).close()
    assert not draft_of(path).exists()


SCRIPT = """
import sys, time
from penstock.log.xchannel import Writer
writer = Writer.open(sys.argv[1], region_bytes=64 << 10, roll_bytes=256 << 10)
for _ in range(4):
    writer.append(bytes((64 << 10) - 200))
print("written", flush=True)
time.sleep(60)
"""


def test_the_draft_of_a_killed_writer_is_not_history_and_the_next_one_removes_it(path: Path) -> None:  # 104, 142
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert draft_of(path).exists()
    before = path.read_bytes()
    assert contents(path) == [len(PIECE)] * 4
    with XChannelLog(path) as log:
        assert list(log.verify()) == []
    with Reader.open(path, "latest") as live, Writer.open(path, roll_bytes=ROLL) as writer:
        assert not draft_of(path).exists()
        assert path.read_bytes() == before
        writer.append(PIECE)
        assert live.read(timeout=60).position == (1 << 40) + 80
    assert contents(path) == [len(PIECE)] * 5


def test_a_refused_open_leaves_the_draft_of_the_one_that_is_open(path: Path) -> None:
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        fill_but_one(writer, path)
        with pytest.raises(Exception, match="another writer has it open"):
            Writer.open(path)
        with pytest.raises(Exception, match="another writer has it open"):
            cleanup(path)
        assert draft_of(path).exists()
        assert writer.append(PIECE) >> 40 == 1


def test_a_file_that_got_the_name_meanwhile_is_taken_instead(path: Path) -> None:  # 109
    other = path.with_name("other")
    with Writer.open(other, region_bytes=REGION) as writer:
        writer.append(b"theirs")
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        fill_but_one(writer, path)
        shutil.copy(other, path.with_name("chan.1"))
        writer.append(PIECE)
        assert not draft_of(path).exists()
    assert contents(path) == [len(PIECE)] * 4 + [len(b"theirs"), len(PIECE)]


def test_a_draft_that_cannot_be_had_is_tried_once_a_file_and_the_roll_says_why(path: Path) -> None:  # 100
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        draft_of(path).mkdir()  # in the way
        for _ in range(4):
            writer.append(PIECE)
        before = path.read_bytes()
        for _ in range(2):
            with pytest.raises(OSError, match="penstock-new"):
                writer.append(PIECE)
        assert path.read_bytes() == before
        writer.append(b"small")  # this file has room for it
        draft_of(path).rmdir()
        writer.append(PIECE)
    assert contents(path) == [len(PIECE)] * 4 + [len(b"small"), len(PIECE)]


@pytest.mark.parametrize("operation", ["create", "allocate", "link", "map", "write_at", "modify"])
def test_a_full_disk_fails_the_append_and_not_the_channel(
    operation: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "SMALLEST", 1)
    disk = FaultyDisk(PosixDisk())
    written: list[int] = []
    failures = 0
    with Writer.open(path, region_bytes=4096, roll_bytes=8192, disk=disk) as writer:
        for number in range(60):
            disk.fail(operation, OSError(errno.ENOSPC, "No space left on device"))
            try:
                writer.append(bytes(number * 20))
            except OSError:
                failures += 1
                writer.append(bytes(number * 20))  # room was made
            disk._faults.clear()
            written.append(number * 20)
        made = [name for call, name in disk.calls if call == "create" and name.endswith("new")]
        assert len(made) >= writer.file_sequence
    assert failures > 1
    assert contents(path) == written
    with XChannelLog(path) as log:
        assert list(log.verify()) == []


@pytest.mark.filterwarnings("ignore:This process")
def test_the_child_of_a_fork_leaves_the_draft_to_its_parent(path: Path) -> None:
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        fill_but_one(writer, path)
        child = os.fork()
        if child == 0:
            writer.close()
            del writer
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert draft_of(path).exists()
        assert writer.append(PIECE) >> 40 == 1
    assert contents(path) == [len(PIECE)] * 5


def test_a_file_never_takes_the_place_of_another(path: Path) -> None:  # 107
    path.with_name("chan.3").write_bytes(b"someone else's")
    draft = Draft(PosixDisk(), str(path), 3, 4096, WriterOptions())
    with pytest.raises(FileExistsError):
        draft.finish(has_room=False)
    assert path.with_name("chan.3").read_bytes() == b"someone else's"
    assert not draft_of(path).exists()


@pytest.mark.parametrize("taken", [False, True])
def test_without_hard_links_a_file_is_renamed_and_still_never_takes_the_place_of_another(
    taken: bool, path: Path
) -> None:
    disk = FaultyDisk(PosixDisk())
    disk.fail("link", OSError(errno.EPERM, "Operation not permitted"))
    if taken:
        path.write_bytes(b"someone else's")
    draft = Draft(disk, str(path), 0, 4096, WriterOptions())
    if taken:
        with pytest.raises(FileExistsError):
            draft.finish(has_room=False)
        assert path.read_bytes() == b"someone else's"
    else:
        draft.finish(has_room=False)
        assert contents(path) == []
    assert not draft_of(path).exists()
