"""Promise: whoever resumes by position notices that the log at that position is another one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import OptionsError, ReplacedError
from penstock.log.detect import FORMATS, open_log, open_writer
from penstock.log.face import OnDamage
from penstock.log.filechannel import FileChannel
from penstock.log.fingerprint import Fingerprint, check_fingerprint, fingerprint_of
from penstock.log.sidecar import Register, Sidecar
from penstock.log.xchannel import Reader

Fill = Callable[[range], None]


@pytest.fixture(params=sorted(FORMATS))
def log_path(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "here" / "log"), request.param


def fill(log: tuple[str, str], numbers: range, width: int = 40) -> None:
    path, kind = log
    Path(path).parent.mkdir(exist_ok=True)
    writer: Any = open_writer(path, format=kind)
    for number in numbers:
        writer.append(f"record {number}".ljust(width).encode())
    writer.sync()
    writer.close()


def backup(log: tuple[str, str]) -> Path:
    folder = Path(log[0]).parent
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    return kept


def restore(log: tuple[str, str], kept: Path) -> None:
    folder = Path(log[0]).parent
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


def last_seen(log: tuple[str, str]) -> Fingerprint:
    with open_log(log[0]) as reader:
        position, seen = reader.first_position, None
        while len(batch := reader.read(position)):
            position, seen = batch.next_position, fingerprint_of(batch)
    assert seen is not None
    return seen


def check(log: tuple[str, str], seen: Fingerprint) -> bool:
    with open_log(log[0]) as reader:
        return check_fingerprint(reader, seen)


def test_a_log_that_went_on_is_the_same(log_path: tuple[str, str]) -> None:
    fill(log_path, range(50))
    seen = last_seen(log_path)
    fill(log_path, range(50, 100))
    assert check(log_path, seen) is True


def test_a_backup_that_came_back_is_noticed(log_path: tuple[str, str]) -> None:
    fill(log_path, range(50))
    kept = backup(log_path)
    fill(log_path, range(50, 100))
    seen = last_seen(log_path)
    restore(log_path, kept)
    with pytest.raises(ReplacedError, match="before the record"):
        check(log_path, seen)


@pytest.mark.parametrize("width", [40, 56, 33, 300])
@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_backup_that_came_back_and_went_on_is_noticed(
    log_path: tuple[str, str], width: int, on_damage: OnDamage
) -> None:
    fill(log_path, range(50))
    kept = backup(log_path)
    fill(log_path, range(50, 100))
    seen = last_seen(log_path)
    restore(log_path, kept)
    fill(log_path, range(1000, 1100), width)
    with open_log(log_path[0], on_damage=on_damage) as reader, pytest.raises(ReplacedError, match="read"):
        check_fingerprint(reader, seen)


def test_a_record_that_retention_took_says_nothing(tmp_path: Path) -> None:
    from penstock.log.xchannel import Writer

    path = str(tmp_path / "ticks")
    with Writer.open(path, roll_bytes=4096, region_bytes=4096, keep_files=2) as writer:
        writer.append(b"first")
        with open_log(path) as log:
            seen = fingerprint_of(log.read(log.first_position))
        for _ in range(40):
            writer.append(bytes(1000))
    with open_log(path) as log:
        assert check_fingerprint(log, seen) is False
        assert check_fingerprint(log, None) is False


def test_what_is_no_fingerprint_is_refused() -> None:
    for text in ("", "12", "12-", "x-0011223344556677", "12-001122334455667", "-1-0011223344556677"):
        with pytest.raises(OptionsError, match="not the fingerprint"):
            Fingerprint.parse(text)


def test_a_cursor_keeps_the_last_record_it_saw() -> None:
    disk = MemoryDisk()
    sidecar = Sidecar(disk, "log.penstock-")
    sidecar.create_identity()
    seen = Fingerprint(80, b"12345678")
    sidecar.write_cursor("billing", 104, seen=seen)
    assert sidecar.cursor_seen("billing") == seen
    assert sidecar.read_cursor("billing") == 104
    sidecar.write_cursor("billing", 128)
    assert sidecar.cursor_seen("billing") is None
    assert Register(disk, "nothing").seen() is None


def other_log(log: tuple[str, str], kept: Path, width: int) -> None:
    """Put the backup's data back, with other records behind it; cursors and what else is beside it stay newer."""
    elsewhere = kept.with_name("elsewhere")
    shutil.copytree(kept, elsewhere)
    fill((str(elsewhere / Path(log[0]).name), log[1]), range(1000, 1100), width)
    for file in elsewhere.rglob("*"):
        target = Path(log[0]).parent / file.relative_to(elsewhere)
        if file.is_file() and "cursor" not in file.name:
            shutil.copy2(file, target)


@pytest.mark.parametrize("width", [40, 48, 7, 51, 300])
def test_a_named_receiver_of_a_queue_whose_backup_came_back_is_told(tmp_path: Path, width: int) -> None:
    log = str(tmp_path / "here" / "jobs"), "filechannel"
    fill(log, range(50))
    kept = backup(log)
    fill(log, range(50, 100))
    with FileChannel.open(log[0]) as queue:
        receiver = queue.ack_rx("billing")
        assert len(receiver.recv_many()) == 100
        receiver.ack(3)
        receiver.ack(91)  # in the same moment: closing writes what it was
        receiver.close()
        queue.ack_rx("billing").close()  # opening and closing again forgets nothing
    other_log(log, kept, width)
    with FileChannel.open(log[0]) as queue:
        with pytest.raises(ReplacedError, match="receiver 'billing' has acknowledged; forget the receiver"):
            queue.ack_rx("billing")
        with FileChannel.attach(log[0]) as beside, pytest.raises(ReplacedError, match="billing"):
            beside.ack_rx("billing")
        queue.forget("billing")
        assert len(queue.ack_rx("billing").recv_many()) == 150


@pytest.mark.parametrize("width", [40, 48, 7])
@pytest.mark.parametrize("each", ["batch", "record", "position"])
def test_a_named_reader_of_a_channel_whose_backup_came_back_is_told(tmp_path: Path, width: int, each: str) -> None:
    log = str(tmp_path / "here" / "ticks"), "xchannel"
    fill(log, range(50))
    kept = backup(log)
    fill(log, range(50, 100))
    with Reader.open(log[0], name="audit") as reader:
        if each == "record":
            for _ in range(90):
                assert reader.try_read() is not None
            reader.ack()
        else:
            batch = reader.read_batch()
            reader.ack(int(batch.positions[90]) if each == "position" else None)
    with Reader.open(log[0], name="audit") as reader:
        assert len(reader.read_batch()) == (0 if each == "batch" else 10)
    other_log(log, kept, width)
    with pytest.raises(ReplacedError, match=r"reader 'audit' has read.*to begin anew, remove .*cursor-audit"):
        Reader.open(log[0], name="audit")
    Path(log[0] + ".penstock-cursor-audit").unlink()
    with Reader.open(log[0], name="audit") as reader:
        assert len(reader.read_batch()) == 150


def test_a_receiver_that_acknowledges_one_by_one_keeps_a_fingerprint(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs")
    with FileChannel.open(path, sync="always") as queue:
        queue.append_many([b"%d" % number for number in range(20)])
        receiver = queue.ack_rx("billing")
        for _ in range(12):
            receiver.recv()
            receiver.ack()
        register = Register(PosixDisk(), path + "/penstock-cursor-billing")
        first = register.seen()  # of one of the twelve, while it is open
        assert first is not None
        receiver.close()
        with open_log(path) as log:
            assert register.seen() == fingerprint_of(log.read(0, 12))
        receiver = queue.ack_rx("billing")
        receiver.seek("earliest")
        assert register.seen() is None
        receiver.close()


@pytest.mark.parametrize("width", [40, 48, 7, 300])
@pytest.mark.parametrize("rest", [0, 5])
def test_a_group_of_a_queue_whose_backup_came_back_is_told(tmp_path: Path, width: int, rest: int) -> None:
    log = str(tmp_path / "here" / "jobs"), "filechannel"
    fill(log, range(50))
    kept = backup(log)
    fill(log, range(50, 100))
    with FileChannel.open(log[0]) as queue:
        group = queue.group("workers")
        jobs = group.take_many(100)
        for job in list(jobs)[: 100 - rest]:
            group.ack([job])
    with FileChannel.open(log[0]) as queue:  # nothing was replaced yet
        assert len(queue.group("workers").take_many(100)) == rest
    other_log(log, kept, width)
    with FileChannel.open(log[0]) as queue:
        with pytest.raises(ReplacedError, match="group 'workers' has finished; forget the group to begin anew"):
            queue.group("workers")
        with FileChannel.attach(log[0]) as beside, pytest.raises(ReplacedError, match="workers"):
            beside.group("workers")
        queue.forget_group("workers")
        assert len(queue.group("workers").take_many(200)) == 150


def test_workers_of_a_group_in_turns_keep_the_newest_fingerprint(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs")
    with FileChannel.open(path) as queue, FileChannel.attach(path) as beside:
        queue.append_many([b"%d" % number for number in range(30)])
        here, there = queue.group("workers"), beside.group("workers")
        for _ in range(5):
            for group in (here, there):
                group.ack(group.take_many(2))
        late = here.take_many(1)
        there.ack(there.take_many(5))
        there.close()
        register = Register(PosixDisk(), path + "/penstock-cursor-group.workers")
        with open_log(path) as log:
            twentieth, last = (fingerprint_of(log.read(0, count)) for count in (20, 26))
            assert register.seen() == twentieth  # the next one is not finished
            here.ack(late)
            here.close()
            assert register.seen() in (last, fingerprint_of(log.read(0, 21)))
