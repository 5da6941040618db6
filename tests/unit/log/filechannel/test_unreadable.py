"""Promises: an oldest segment that cannot be read, and a length that is wrong, are named and can be stepped over."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog, repair
from penstock.log.filechannel.ages import Ages
from penstock.testing.clock import FakeClock

OPTIONS = ChannelOptions(sync="none", segment_bytes=100, compression="none")
MESSAGES = [b"message %02d" % number for number in range(20)]


def fill(folder: Path) -> list[int]:
    with FileChannel.open(folder, OPTIONS) as channel:
        return [channel.append(message) for message in MESSAGES]


@pytest.mark.parametrize("length", [0, 10, 63])
def test_an_oldest_segment_shorter_than_its_header_is_named(length: int, tmp_path: Path) -> None:
    fill(tmp_path)
    with (tmp_path / "segment.0").open("r+b") as file:
        file.truncate(length)
    with FileChannel.attach(tmp_path) as view:
        with pytest.raises(CorruptionError, match=r"segment\.0 at byte"):
            view.rx().recv(timeout=1)
        rx = view.rx(on_damage="skip")
        found = rx.recv_many(timeout=0).to_payloads()
        assert found[0] == MESSAGES[6] or found[0] in MESSAGES[1:]
        assert len(rx.problems) == 1
    with FileChannelLog(tmp_path, on_damage="skip") as log:
        assert log.read(log.first_position).to_payloads()[0] == found[0]
        assert log.damage_count == 1


def test_a_named_receiver_is_not_moved_past_a_segment_that_cannot_be_read(tmp_path: Path) -> None:
    fill(tmp_path)
    with FileChannel.attach(tmp_path) as view, view.ack_rx("slow") as rx:
        rx.recv(timeout=1)
        rx.ack()
    with (tmp_path / "segment.0").open("r+b") as file:
        file.truncate(10)
    header = pytest.raises(CorruptionError, match="the file ends inside the segment header")
    with FileChannel.attach(tmp_path) as view, view.ack_rx("slow") as rx, header:
        rx.recv(timeout=1)


@pytest.mark.parametrize("length", [0, 1, 9, 200, 1 << 31])
def test_a_wrong_length_in_the_newest_segment_is_stepped_over_by_the_checksum(length: int, tmp_path: Path) -> None:
    with FileChannel.open(tmp_path, ChannelOptions(sync="none", compression="none")) as channel:
        positions = [channel.append(message) for message in MESSAGES]
    with (tmp_path / "segment.0").open("r+b") as file:
        file.seek(64 + positions[5])
        file.write(length.to_bytes(4, "big"))
    with FileChannelLog(tmp_path) as log:
        assert log.read(0).to_payloads() == MESSAGES[:5]
        with pytest.raises(CorruptionError, match=f"position {positions[5]}"):
            log.read(positions[5])
    with FileChannel.attach(tmp_path) as view:
        rx = view.rx(on_damage="skip")
        found = [*rx.recv_many(timeout=0).to_payloads(), *rx.recv_many(timeout=0).to_payloads()]
        assert found == MESSAGES[:5] + MESSAGES[6:]
        assert len(rx.problems) == 1


def test_repair_says_how_many_messages_it_kept(tmp_path: Path) -> None:
    positions = fill(tmp_path)
    data = bytearray((tmp_path / "segment.1").read_bytes())
    data[64 + 8] ^= 1
    (tmp_path / "segment.1").write_bytes(data)
    found = repair(tmp_path)
    assert len(found) == 1
    assert (found.kept, found.aside, found.aside_bytes) == (19, 0, 18)
    assert repair(tmp_path) == []
    assert positions[0] == 0


def test_a_clock_that_is_set_makes_no_segment_older(tmp_path: Path) -> None:
    clock, disk = FakeClock(), MemoryDisk()
    ages = Ages(disk, "penstock-ages", clock)
    ages.note(1)
    written = clock.now_ns()
    clock.pass_(10)
    clock.jump(7200)
    assert ages.age(0, written) == 10
    clock.jump(-2 * 7200)
    assert ages.age(0, written) == 10
    clock.jump(7200)
    assert ages.age(0, written) == pytest.approx(10)
    again = Ages(disk, "penstock-ages", clock)  # another process, the same machine
    clock.pass_(5)
    assert again.age(0) == pytest.approx(15)


def test_a_clock_that_was_set_back_and_is_right_again_makes_no_segment_older() -> None:
    clock, disk = FakeClock(), MemoryDisk()
    ages = Ages(disk, "penstock-ages", clock)
    clock.pass_(10)
    clock.jump(-7200)
    written = clock.now_ns()
    ages.note(1)
    clock.jump(7200)
    clock.pass_(10)
    assert ages.age(0, written) == 10
    assert Ages(disk, "penstock-ages", clock).age(0, written) == 10  # another process, the same machine


def test_a_clock_that_is_set_is_seen_by_a_queue_without_a_sealed_segment(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path, ChannelOptions(keep_seconds=60, policy="drop_oldest", sync="none")) as channel:
        retention = channel._retention
        assert retention._ages is not None
        clock = retention._ages._clock = FakeClock()
        retention._ages._ahead = retention._ages._wall_ahead()
        clock.jump(-7200)
        channel.append(b"one")
        clock.jump(7200)
        assert not retention._ages.look()
