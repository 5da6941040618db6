"""Promises of acknowledging: named receivers, nacks, dead letters."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from queue_use import FAST, SMALL, drain

from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import (
    LockedError,
    OptionsError,
)
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.sidecar import Sidecar
from penstock.testing.faulty import FaultyDisk


def test_acks_count_from_the_oldest_across_batches(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", SMALL) as channel:
        positions = channel.append_many([b"%d" % n for n in range(300)]).tolist()
        rx = channel.ack_rx("a")
        rx.recv()
        rx.recv_many(10)
        for _ in range(200):
            rx.recv()
        assert rx.unacked == 211
        rx.ack(5)
        assert (rx.unacked, rx.held) == (206, positions[5])
        rx.ack(200)
        assert (rx.unacked, rx.held) == (6, positions[205])
        for wrong in (7, -1):
            with pytest.raises(OptionsError):
                rx.ack(wrong)
        assert (rx.unacked, rx.held) == (6, positions[205])
        rx.ack(0)
        rx.ack()
        assert (rx.unacked, rx.held) == (0, positions[211])
        rx.ack()
        assert rx.held == positions[211]


def test_a_named_receiver_goes_on_at_its_first_unacknowledged_message(tmp_path: Path) -> None:
    for expected in range(0, 30, 3):
        with FileChannel.open(tmp_path / "c", SMALL) as channel:
            if not expected:
                channel.append_many([b"message %d" % n for n in range(40)])
            rx = channel.ack_rx("worker")
            assert [rx.recv(timeout=1) for _ in range(5)] == [b"message %d" % (expected + n) for n in range(5)]
            rx.ack(3)
    with FileChannel.open(tmp_path / "c", SMALL) as channel:
        assert channel.rx().position <= channel.ack_rx("worker").held


def test_a_name_belongs_to_one_receiver_at_a_time(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        rx = channel.ack_rx("worker")
        with pytest.raises(LockedError, match="worker"):
            channel.ack_rx("worker")
        rx.close()
        channel.ack_rx("worker").close()
        for wrong in ("", "a/b", "../x", "x" * 65):
            with pytest.raises(OptionsError):
                channel.ack_rx(wrong)


def test_without_a_name_everything_comes_again_after_a_restart(tmp_path: Path) -> None:
    sent = [b"%d" % n for n in range(500)]
    with FileChannel.open(tmp_path / "c", SMALL) as channel:
        channel.append_many(sent)
        assert drain(channel.ack_rx()) == sent
    with FileChannel.open(tmp_path / "c", SMALL) as channel:
        assert drain(channel.ack_rx()) == sent


def test_a_cursor_past_the_end_falls_back_to_the_end(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many([b"one", b"two"])
        channel.ack_rx("worker").close()
    sidecar = Sidecar(PosixDisk(), str(tmp_path / "c") + "/penstock-")
    sidecar.write_cursor("worker", 10_000)
    sidecar.close()
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append(b"three")
        assert channel.ack_rx("worker").recv(timeout=1) == b"three"


def test_a_cursor_between_two_messages_falls_back_to_its_segment(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many([b"one", b"two"])
    sidecar = Sidecar(PosixDisk(), str(tmp_path / "c") + "/penstock-")
    sidecar.write_cursor("worker", 13)
    sidecar.close()
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        assert channel.ack_rx("worker").recv(timeout=1) == b"one"


def test_a_destroyed_cursor_starts_at_the_first_message(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many([b"one", b"two"])
        rx = channel.ack_rx("worker")
        rx.recv()
        rx.ack()
    (tmp_path / "c" / "penstock-cursor-worker").write_bytes(b"\xff" * 1024)
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        assert channel.gc() == 0
        assert channel.ack_rx("worker").recv(timeout=1) == b"one"


def test_a_nacked_message_comes_again_and_in_the_end_goes_to_the_dead_letters(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many([b"bad", b"good", b"fine"])
        rx = channel.ack_rx("worker", max_tries=3)
        for _ in range(2):
            assert rx.recv_many().to_payloads() == [b"bad", b"good", b"fine"]
            assert rx.nack() == 0
        assert rx.recv() == b"bad"
        assert rx.nack() == 1
        assert rx.recv_many().to_payloads() == [b"good", b"fine"]
        rx.ack()
        assert rx.lag_bytes == 0
        with pytest.raises(OptionsError):
            rx.nack()
    with FileChannel.open(str(tmp_path / "c") + "-dead", FAST) as dead:
        assert drain(dead.rx()) == [b"bad"]


def test_every_failed_message_is_counted_in_whichever_batch_it_came(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", segment_bytes=40)) as channel:
        sent = [b"message %d" % n for n in range(10)]  # three to a segment
        channel.append_many(sent)
        rx = channel.ack_rx("worker", max_tries=2)
        assert [rx.recv() for _ in range(9)] == sent[:9]
        assert rx.nack(8) == 0
        assert (rx.unacked, rx.recv()) == (0, sent[0])
        rx.ack()
        assert [rx.recv() for _ in range(8)] == sent[1:9]
        assert rx.nack(8) == 7  # the second time for seven of them, the first for the eighth
        assert (rx.unacked, drain(rx)) == (0, sent[8:])
        rx.ack()
        assert rx._tries == {}
    with FileChannel.open(str(tmp_path / "c") + "-dead", FAST) as dead:
        assert drain(dead.rx()) == sent[1:8]


def test_dead_letters_of_several_receivers_go_to_one_channel(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many([b"%d" % n for n in range(10)])
        failed: list[BaseException] = []

        def work(name: str) -> None:
            try:
                rx = channel.ack_rx(name, max_tries=1, dead_letters=tmp_path / "dead")
                for _ in range(10):
                    rx.recv(timeout=60)
                    assert rx.nack() == 1
            except BaseException as exc:
                failed.append(exc)

        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failed == []
    with FileChannel.open(tmp_path / "dead", FAST) as dead:
        assert sorted(drain(dead.rx())) == sorted([b"%d" % n for n in range(10)] * 3)


def test_an_ack_that_cannot_be_written_changes_nothing() -> None:
    disk = FaultyDisk(MemoryDisk())
    with FileChannel.open("c", FAST, disk=disk) as channel:
        positions = channel.append_many([b"%d" % n for n in range(5)]).tolist()
        rx = channel.ack_rx("worker")
        rx.recv_many(3)
        disk.fail("write_at", OSError(errno.EIO, "Input/output error"), path="cursor-worker")
        with pytest.raises(OSError, match="Input/output"):
            rx.ack(2)
        assert (rx.unacked, rx.held) == (3, 0)
        rx.ack(1)
        assert (rx.unacked, rx.held) == (2, positions[1])


def test_acks_one_at_a_time_behind_many_that_wait(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", SMALL) as channel:
        rx, positions = channel.ack_rx("a"), []
        for number in range(300):  # each is read by itself
            positions.append(channel.append(b"%d" % number))
            assert rx.recv() == b"%d" % number
            if number >= 200:
                rx.ack(1)
                assert (rx.unacked, rx.held) == (200, positions[number - 199])
        assert len(rx._chunks) == 200
        rx.ack()
        assert (rx.unacked, rx.held, len(rx._chunks)) == (0, channel.stats().write_position, 0)
