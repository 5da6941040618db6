"""Which segments go, and which stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.errors import Backpressure, OptionsError
from penstock.log.filechannel import ChannelOptions, FileChannel

OPTIONS = ChannelOptions(sync="none", segment_bytes=1000, compression="none")
LOAD = [b"x" * 100] * 100


def segments(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("segment."))


def drain(rx: object) -> int:
    return sum(len(batch) for batch in rx.batches(timeout=0))  # type: ignore[attr-defined]


def test_a_channel_that_was_read_keeps_one_segment(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        channel.append_many(LOAD)
        rx = channel.rx()
        assert drain(rx) == 100
        rx.close()
        assert len(segments(tmp_path / "c")) == 1


def test_without_any_receiver_everything_is_kept(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        channel.append_many(LOAD)
        assert channel.gc() == 0
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        assert channel.gc() == 0
        assert drain(channel.rx()) == 100


def test_what_was_not_acknowledged_stays_after_its_receiver_is_closed(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        channel.append_many(LOAD)
        rx = channel.ack_rx()
        assert drain(rx) == 100
        rx.close()
        assert segments(tmp_path / "c")[0] == "segment.0"


@pytest.mark.parametrize("slow_first", [False, True])
def test_the_slowest_open_receiver_holds_whenever_it_was_opened(tmp_path: Path, slow_first: bool) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        slow = channel.rx() if slow_first else None
        channel.append_many(LOAD)
        fast = channel.rx()
        slow = slow or channel.rx()
        third = channel.ack_rx()
        drain(fast)
        third.recv_many(60)
        third.ack()
        assert segments(tmp_path / "c")[0] == "segment.0"
        assert [slow.recv(timeout=0) for _ in range(100)] == LOAD
        assert slow.try_recv() is None
        third.recv_many()
        third.close()
        channel.gc()
        assert len(segments(tmp_path / "c")) == 1


def test_a_named_receiver_holds_while_it_is_away(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        channel.append_many(LOAD)
        named = channel.ack_rx("away")
        for _ in range(35):
            named.recv()
        named.ack()
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        assert drain(channel.rx()) == 100 - 30  # whole segments below message 35 are gone
        channel.gc()
        assert segments(tmp_path / "c")[0] == "segment.3"
        assert channel.stats().lag_bytes["away"] == 65 * 108
        channel.forget("away")
        assert len(segments(tmp_path / "c")) == 1


def test_a_bound_in_bytes_refuses_until_the_slow_one_has_caught_up(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=1000, keep_bytes=5000, compression="none")
    with FileChannel.open(tmp_path / "c", options) as channel:
        rx = channel.ack_rx("slow")
        with pytest.raises(Backpressure, match="'slow'"):
            [channel.append(b"x" * 100) for _ in range(1000)]
        sent = channel.stats().write_position // 108
        assert 40 <= sent < 50
        end = channel.stats().write_position
        with pytest.raises(Backpressure):
            channel.append_many([b"x" * 100] * 5)
        assert channel.stats().write_position == end
        assert channel.stats().disk_bytes <= 5000
        assert drain(rx) == sent
        with pytest.raises(Backpressure):
            channel.append(b"x" * 100)
        rx.ack()
        channel.append(b"x" * 100)
        with pytest.raises(OptionsError):
            channel.append(b"x" * 6000)


def test_a_bound_in_bytes_drops_the_oldest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ChannelOptions(sync="none", segment_bytes=1000, keep_bytes=5000, policy="drop_oldest", compression="none")
    with FileChannel.open(tmp_path / "c", options) as channel:
        channel.ack_rx("slow").close()
        for _ in range(500):
            channel.append(b"x" * 100)
        assert channel.stats().disk_bytes <= 5000
        assert "dropped segment 0" in caplog.text
        rx = channel.ack_rx("slow")
        assert rx.position == channel.stats().first_position > 0
        assert "lost the messages from 0" in caplog.text


@pytest.mark.parametrize("policy", ["refuse", "drop_oldest"])
def test_a_bound_in_age(tmp_path: Path, policy: str) -> None:
    options = ChannelOptions(
        sync="none",
        segment_bytes=1000,
        keep_seconds=60,
        policy=policy,
        compression="none",  # type: ignore[arg-type]
    )
    with FileChannel.open(tmp_path / "c", options) as channel:
        channel.ack_rx("slow").close()
        channel.append_many(LOAD)
        old = time.time() - 100
        for name in segments(tmp_path / "c")[:3]:
            os.utime(tmp_path / "c" / name, (old, old))
        channel._retention._aged = -1e9  # the age is looked at once a second
        if policy == "refuse":
            with pytest.raises(Backpressure, match="keep_seconds"):
                channel.append(b"late")
        else:
            channel.append(b"late")
            assert segments(tmp_path / "c") == ["segment.10", *(f"segment.{n}" for n in range(3, 10))]


def test_collecting_can_be_left_to_the_hand(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=1000, compression="none", collect=False)
    with FileChannel.open(tmp_path / "c", options) as channel:
        channel.append_many(LOAD)
        drain(channel.rx())
        assert len(segments(tmp_path / "c")) == 10
        assert channel.gc() == 9


def test_stats_say_where_everyone_stands(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        fresh = channel.stats()
        assert (fresh.disk_bytes, fresh.write_position, fresh.receivers) == (64, 0, {})
        channel.append_many([b"one", b"two"])
        rx = channel.rx()
        rx.recv()
        named = channel.ack_rx("billing")
        named.recv()
        named.ack()
        stats = channel.stats()
        assert (stats.first_position, stats.write_position, stats.visible_position) == (0, 22, 22)
        assert stats.lag_bytes["billing"] == 11
        assert stats.disk_bytes == 64 + 22
        assert rx.lag_bytes == 11
