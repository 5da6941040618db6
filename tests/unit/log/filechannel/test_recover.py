"""Opening after a crash: what is trimmed, what is set aside, what stays."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.log.ends import lost_at_end
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.log.sidecar import Sidecar
from penstock.testing.faulty import FaultyDisk

FAST = ChannelOptions(sync="none", compression="none")
SENT = [b"message %02d" % n for n in range(10)]  # frames of 18 bytes


def drain(channel: FileChannel) -> list[bytes]:
    return [p for batch in channel.ack_rx().batches(timeout=0) for p in batch.to_payloads()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many(SENT)
    return tmp_path / "c"


def bad(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".bad"))


@pytest.mark.parametrize("lost", range(1, 37))
def test_a_torn_tail_of_any_length_is_trimmed_to_the_last_whole_message(
    folder: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "segment.0"
    data = path.read_bytes()
    path.write_bytes(data[:-lost])
    whole = (180 - lost) // 18
    with FileChannelLog(folder) as log:  # a reader beside it changes nothing and sees the same
        assert log.next_position == whole * 18
    caplog.set_level(logging.WARNING)
    with FileChannel.open(folder, FAST) as channel:
        assert drain(channel) == SENT[:whole]
        assert bool(channel.problems) == bool((180 - lost) % 18) == ("trimmed" in caplog.text)
        assert channel.append(b"next") == whole * 18
    assert path.stat().st_size == 64 + whole * 18 + 12
    if (180 - lost) % 18 > 4:
        [name] = bad(folder)
        assert (folder / name).read_bytes() == data[64 + whole * 18 : -lost]


def test_a_frame_half_in_the_buffer_of_the_original_is_trimmed(tmp_path: Path) -> None:
    """The original writes 4096 bytes at a time: its crash leaves exactly that much of a larger frame."""
    FileChannel.open(tmp_path / "c", FAST).close()
    path = tmp_path / "c" / "segment.0"
    path.write_bytes(path.read_bytes() + b"\0\0\x10\0crc!" + b"x" * 4088)
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        assert path.stat().st_size == 64
        channel.append(b"new")
        assert drain(channel) == [b"new"]


def test_a_bad_message_in_the_newest_segment_keeps_what_follows_it_aside(folder: Path) -> None:
    path = folder / "segment.0"
    data = bytearray(path.read_bytes())
    data[64 + 4 * 18 + 10] ^= 1
    path.write_bytes(data)
    with FileChannel.open(folder, FAST) as channel:
        assert drain(channel) == SENT[:4]
        [problem] = channel.problems
        assert problem.byte == 64 + 4 * 18
        assert "fails its checksum" in problem.reason
    assert (folder / "penstock-cut-0-136.bad").read_bytes() == data[136:]


def test_a_newest_file_without_a_whole_header_is_set_aside(folder: Path) -> None:
    (folder / "segment.1").write_bytes(b"\0\0\0\1")
    with FileChannel.open(folder, FAST) as channel:
        assert drain(channel) == SENT
        assert channel.append(b"on") == 180
    assert bad(folder) == ["penstock-segment.1.bad"]


def test_when_nothing_is_left_positions_go_on_behind_all_that_is_remembered(folder: Path) -> None:
    with FileChannel.open(folder, FAST) as channel:
        rx = channel.ack_rx("worker")
        rx.recv_many(5)
        rx.ack()
    (folder / "segment.0").write_bytes(b"")
    with FileChannel.open(folder, FAST) as channel:
        assert channel.append(b"on") == 90
        assert channel.ack_rx("worker").recv(timeout=0) == b"on"


def test_leftovers_of_a_crash_are_swept(folder: Path) -> None:
    for name in ("segment.0.z.ing", "penstock-new", "segment.9.z.ing"):
        (folder / name).write_bytes(b"half")
    (folder / "notes.txt").write_bytes(b"mine")
    with FileChannel.open(folder, FAST) as channel:
        assert drain(channel) == SENT
    names = {path.name for path in folder.iterdir()}
    assert "notes.txt" in names
    assert not {name for name in names if name.endswith(".ing") or name == "penstock-new"}


def zeros_after(channel_sync: str, cut: bool) -> list[bytes]:
    """Append zeros behind ten messages, with or without a loss of power in between, and read it again."""
    disk = FaultyDisk(MemoryDisk())
    options = ChannelOptions(sync=channel_sync, compression="none")  # type: ignore[arg-type]
    with FileChannel.open("c", options, disk=disk) as channel:
        channel.append_many([*SENT, b""])
    with disk.modify("c/segment.0") as file:
        file.write_at(64 + 188, bytes(4099))
        file.sync()
    if cut:
        disk.cut_power(keep=1.0)
    with FileChannel.open("c", options, disk=disk) as channel:
        return drain(channel)


def test_zeros_behind_the_mark_of_an_earlier_boot_are_no_messages() -> None:
    assert zeros_after("always", cut=True) == [*SENT, b""]  # the real empty message is below the mark and stays


def test_zeros_are_empty_messages_where_nobody_can_know_better() -> None:
    assert zeros_after("none", cut=True) == [*SENT, b"", *[b""] * 512]
    assert zeros_after("always", cut=False) == [*SENT, b"", *[b""] * 512]


def test_verify_points_at_a_page_of_zeros(folder: Path) -> None:
    path = folder / "segment.0"
    path.write_bytes(path.read_bytes() + bytes(4096))
    with FileChannelLog(folder) as log:
        [problem] = log.verify()
    assert "512 empty messages" in problem.reason


def test_a_destroyed_mark_is_not_believed(folder: Path) -> None:
    (folder / "penstock-mark").write_bytes(b"\xff" * 1024)
    with FileChannel.open(folder, FAST) as channel:
        assert drain(channel) == SENT


def test_cursors_move_back_with_a_trimmed_tail_so_that_nothing_new_is_skipped(folder: Path) -> None:
    with FileChannel.open(folder, FAST) as channel:
        rx = channel.ack_rx("worker")
        rx.recv_many()
        rx.ack()
    path = folder / "segment.0"
    path.write_bytes(path.read_bytes()[:-20])
    with FileChannel.open(folder, FAST) as channel:
        sidecar = Sidecar(MemoryDisk(), "x-")
        assert sidecar.cursor_names() == []
        channel.append_many([b"new one", b"new two"])
        assert [p for b in channel.ack_rx("worker").batches(timeout=0) for p in b.to_payloads()] == [
            b"new one",
            b"new two",
        ]


@pytest.mark.parametrize("cut", [64 + 4 * 18, 64 + 4 * 18 + 5])
def test_messages_that_were_synced_and_are_gone_are_told_of(folder: Path, cut: int) -> None:
    with FileChannel.open(folder, sync="always", compression="none") as channel:
        channel.append(b"synced")
    os.truncate(folder / "segment.0", cut)
    with FileChannel.open(folder, sync="always", compression="none") as channel:
        told = [problem for problem in channel.problems if problem.file.endswith("penstock-mark")]
        assert [(p.byte, "below 194 was synced, but the queue ends at 72" in p.reason) for p in told] == [(16, True)]
        channel.append(b"new")
    with FileChannel.open(folder, sync="always", compression="none") as channel:
        assert channel.problems == []


def test_segments_that_were_removed_are_told_of(folder: Path) -> None:
    FileChannel.open(folder, sync="always", compression="none").close()
    (folder / "segment.0").unlink()
    with FileChannelLog(folder) as log:
        assert lost_at_end(log) is not None
    with FileChannel.open(folder, sync="always", compression="none") as channel:
        assert ["no segment is left" in problem.reason for problem in channel.problems] == [True]
        assert channel.append(b"new") == 180


def test_a_receiver_gets_what_comes_where_messages_were_lost(folder: Path) -> None:
    with FileChannel.open(folder, sync="always", compression="none") as channel:
        rx = channel.ack_rx("worker")
        rx.recv_many()
        rx.ack()
    os.truncate(folder / "segment.0", 64 + 4 * 18)
    with FileChannel.open(folder, FAST) as channel:  # which keeps no mark: later nobody could tell the receiver
        channel.append(b"new")
    with FileChannel.open(folder, FAST) as channel:
        assert channel.ack_rx("worker").recv(timeout=0) == b"new"


def test_damage_in_the_newest_segment_is_no_end_of_it(folder: Path) -> None:
    path = folder / "segment.0"
    data = bytearray(path.read_bytes())
    data[64 + 4 * 18 + 10] ^= 1
    path.write_bytes(data)
    with FileChannelLog(folder, on_damage="skip") as log:
        assert log.next_position == 180
        assert len(log.read(0)) + len(log.read(5 * 18)) == 9
        assert log.damage_count == 0  # nobody read at it yet
        assert len(log.read(4 * 18)) == 5
        assert log.damage_count == 1
    path.write_bytes(data[:-20])  # a torn tail is an end
    with FileChannelLog(folder, on_damage="skip") as log:
        assert log.next_position == 8 * 18


def test_a_channel_of_the_original_gets_an_id_and_keeps_the_places_of_those_who_looked_on(tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "vectors" / "filechannel" / "base-sealed" / "channel"
    folder = tmp_path / "c"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with FileChannel.attach(folder) as view:
        rx = view.ack_rx("mirror")
        for _ in range(7):
            rx.recv(timeout=1)
        rx.ack()
        expected = rx.recv(timeout=1)
    with FileChannel.open(folder, FAST) as channel:
        assert channel.ack_rx("mirror").recv(timeout=1) == expected
