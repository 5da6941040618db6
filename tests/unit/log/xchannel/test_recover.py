"""Promise: after a power cut the channel ends at its durable mark, and doing it twice changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.disk import PosixDisk
from penstock.errors import CorruptionError
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel import Reader, Writer, XChannelLog, ahead
from penstock.log.xchannel.files import sidecar_prefix
from penstock.log.xchannel.recover import cut_back
from penstock.testing.faulty import FaultyDisk


def contents(path: str, disk: FaultyDisk) -> list[bytes]:
    with Reader.open(path, disk=disk) as reader:
        return [bytes(record.payload) for record in reader.records(timeout=0)]


def lost(tmp_path: Path) -> tuple[str, FaultyDisk]:
    """A channel whose machine lost power behind its mark, everything still on disk as it happens."""
    disk, path = FaultyDisk(PosixDisk()), str(tmp_path / "chan")
    writer = Writer.open(path, region_bytes=4096, disk=disk)
    writer.append(b"kept")
    writer.sync()
    writer.append(b"behind")
    writer.append(b"x" * 4000)
    disk.cut_power(keep=1)
    writer.forked()
    return path, disk


def test_readers_stop_at_the_mark_before_anyone_cleaned_up(tmp_path: Path) -> None:
    path, disk = lost(tmp_path)
    assert contents(path, disk) == [b"kept"]
    with Reader.open(path, "latest", disk=disk) as reader:
        assert reader.position == 104
    with XChannelLog(path, disk) as log:
        assert log.next_position == log.durable_position == 104


def test_a_waiting_reader_goes_on_once_a_writer_has_cleaned_up(tmp_path: Path) -> None:
    path, disk = lost(tmp_path)
    with Reader.open(path, disk=disk) as reader:
        assert [bytes(record.payload) for record in reader.records(timeout=0)] == [b"kept"]
        with Writer.open(path, disk=disk) as writer:
            assert writer.append(b"new") == 104
            assert bytes(reader.read(timeout=60).payload) == b"new"


def test_cutting_twice_changes_nothing(tmp_path: Path) -> None:
    path, disk = lost(tmp_path)
    sidecar = Sidecar(disk, sidecar_prefix(path))
    aside = cut_back(disk, path, sidecar)
    assert [Path(name).name for name in aside] == ["chan.penstock-cut-0-104.bad"]
    after = Path(path).read_bytes()
    assert len(after) == 4096
    assert cut_back(disk, path, sidecar) == []
    assert Path(path).read_bytes() == after
    with XChannelLog(path, disk) as log:
        assert list(log.verify()) == []


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize("operation", ["write_at", "truncate", "sync", "rename", "sync_folder", "create"])
def test_a_power_cut_during_the_cut_leaves_the_same_end(operation: str, tmp_path: Path) -> None:
    for after in range(4):
        folder = tmp_path / str(after)
        folder.mkdir()
        path, disk = lost(folder)
        disk.fail(operation, PowerCut(), after=after)
        try:
            Writer.open(path, sync="always", disk=disk).forked()
        except PowerCut:
            pass
        disk._faults.clear()
        disk.cut_power(seed=after, keep=0.5)
        with Writer.open(path, sync="always", disk=disk) as writer:
            assert contents(path, disk) == [b"kept"]
            writer.append(b"new")
        assert contents(path, disk) == [b"kept", b"new"]


def test_damage_before_the_mark_is_not_taken_for_the_power_cut(tmp_path: Path) -> None:
    path, disk = lost(tmp_path)
    with Path(path).open("r+b") as file:
        file.seek(80)
        file.write(b"\7")
    before = Path(path).read_bytes()
    with pytest.raises(CorruptionError, match="damaged before the durable mark at byte 104"):
        Writer.open(path, disk=disk)
    assert Path(path).read_bytes() == before


def test_a_mark_of_this_boot_cuts_nothing(tmp_path: Path) -> None:
    disk, path = FaultyDisk(PosixDisk()), str(tmp_path / "chan")
    writer = Writer.open(path, region_bytes=4096, disk=disk)
    writer.append(b"durable")
    writer.sync()
    writer.append(b"visible")
    writer.forked()  # killed, but the machine went on
    Writer.open(path, disk=disk).close()
    assert contents(path, disk) == [b"durable", b"visible"]


@pytest.mark.parametrize("sync", ["none", "always"])
@pytest.mark.parametrize("move", ["region", "file", "file made ready"])
def test_a_writer_that_dies_at_any_step_of_a_move_strands_nobody(
    move: str, sync: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 115: its life ends at the n-th thing it asks of the disk, for every n
    ready = move == "file made ready"
    if ready:
        monkeypatch.setattr(ahead, "SMALLEST", 1)
        monkeypatch.setattr(ahead, "REGIONS_BEFORE", 1)
    drafts = steps = 0
    while True:
        folder = tmp_path / str(steps)
        folder.mkdir()
        disk, path = FaultyDisk(PosixDisk()), str(folder / "chan")
        writer = Writer.open(path, region_bytes=4096, roll_bytes=8192 if ready else 0, disk=disk, sync=sync)
        writer.append(b"a" * 3000)
        left = [steps]

        def die(operation: str, path: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise PowerCut

        with Reader.open(path) as attached:
            assert attached.try_read() is not None
            disk.on_call = die
            finished = True
            try:
                if move == "file":
                    writer.roll()
                if ready:
                    writer.append(b"-" * 3000)  # in the last region: the next file is made ready
                writer.append(b"b" * 3000)
            except PowerCut:
                finished = False
            disk.on_call = None
            writer.forked()
            drafts += (folder / "chan.penstock-new").exists()
            with Writer.open(path, disk=disk, sync=sync) as again:
                assert not (folder / "chan.penstock-new").exists()
                again.append(b"c")
            found = [bytes(record.payload)[:1] for record in attached.records(timeout=0.02)]
            found = [first for first in found if first != b"-"]
            assert found in ([b"b", b"c"], [b"c"])
            assert found == [b"b", b"c"] or not finished
            assert [payload[:1] for payload in contents(path, disk) if payload[:1] != b"-"] == [b"a", *found]
            with XChannelLog(path, disk) as log:
                assert [str(problem) for problem in log.verify()] == []
            before = {file.name: file.read_bytes() for file in folder.iterdir() if "penstock-" not in file.name}
            Writer.open(path, disk=disk, sync=sync).close()
            assert before == {f.name: f.read_bytes() for f in folder.iterdir() if "penstock-" not in f.name}
        if finished:
            assert steps >= 1  # it died at least once on the way
            assert drafts >= 1 or move == "region"  # and once in the middle of making a file
            return
        steps += 1


def test_a_named_reader_that_had_read_what_a_power_cut_took_reads_what_comes_there(tmp_path: Path) -> None:
    disk, path = FaultyDisk(PosixDisk()), str(tmp_path / "chan")
    writer = Writer.open(path, region_bytes=4096, disk=disk)
    writer.append(b"kept")
    writer.sync()
    writer.append(b"lost 1")
    writer.append(b"lost 2")
    with Reader.open(path, name="audit", disk=disk) as reader:
        assert len(reader.read_batch()) == 3
        reader.ack(sync=True)
    disk.cut_power(keep=1)
    writer.forked()
    with Writer.open(path, disk=disk) as writer:
        for word in (b"new 1", b"new 2", b"new 3"):
            writer.append(word)
    with Reader.open(path, name="audit", disk=disk) as reader:
        assert [bytes(record.payload) for record in reader.records(timeout=0)] == [b"new 1", b"new 2", b"new 3"]
