"""Verify explains, repair mends; the damaged folders of the original are in tests/conformance."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import LockedError, OptionsError
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog, repair
from penstock.testing.log_conformance import contents

OPTIONS = ChannelOptions(sync="none", segment_bytes=100, compression="none", collect=False)


def make(folder: Path) -> None:
    with FileChannel.open(folder, OPTIONS) as channel:
        channel.append_many([b"message %02d" % n for n in range(30)])
        rx = channel.ack_rx("worker")
        for _ in range(20):
            rx.recv()
        rx.ack()


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_a_repair_that_moves_positions_gives_a_new_id_and_redelivers_from_the_damage(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    make(folder)
    with FileChannelLog(folder) as log:
        before = log.stat()["log_id"]
    flip(folder / "segment.1", 64 + 18 + 10)  # message 7
    assert len(repair(folder)) == 1
    assert (folder / "penstock-segment.1.bad").exists()
    with FileChannelLog(folder) as log:
        assert log.stat()["log_id"] != before
        assert log.stat()["set_aside"] == ["penstock-segment.1.bad"]
        assert contents(log) == [b"message %02d" % n for n in range(30) if n != 7]
    with FileChannel.open(folder, OPTIONS) as channel:
        assert channel.ack_rx("worker").recv(timeout=0) == b"message 08"


def test_a_torn_tail_is_mended_without_a_new_id(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    make(folder)
    with FileChannelLog(folder) as log:
        before = log.stat()["log_id"]
    newest = folder / "segment.4"
    newest.write_bytes(newest.read_bytes()[:-3])
    [problem] = repair(folder)
    assert "cut short" in problem.reason
    with FileChannelLog(folder) as log:
        assert log.stat()["log_id"] == before
        assert contents(log) == [b"message %02d" % n for n in range(29)]


def test_a_missing_segment_is_named_and_the_gap_closed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    make(folder)
    (folder / "segment.2").unlink()
    with FileChannelLog(folder) as log:
        [problem] = log.verify()
        assert problem.file.endswith("segment.2")
    repair(folder)
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith("segment.")) == [
        "segment.0", "segment.1", "segment.2", "segment.3",
    ]  # fmt: skip
    with FileChannelLog(folder) as log:
        assert list(log.verify()) == []
        assert contents(log) == [b"message %02d" % n for n in (*range(12), *range(18, 30))]


def test_a_repair_needs_the_channel_for_itself(tmp_path: Path) -> None:
    with pytest.raises(OptionsError):
        repair(tmp_path / "nothing")
    make(tmp_path / "c")
    with FileChannel.open(tmp_path / "c", OPTIONS), pytest.raises(LockedError):
        repair(tmp_path / "c")
