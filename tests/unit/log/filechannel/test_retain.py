"""Which segments go, and which stay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.disk import Threads, in_waiting_thread
from penstock.errors import Backpressure, ClosedError, LockedError, OptionsError, Timeout
from penstock.log.filechannel import AckReceiver, ChannelOptions, FileChannel

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


def test_a_refused_send_names_the_slowest_whoever_it_is(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=1000, keep_bytes=5000, compression="none")
    with FileChannel.open(tmp_path / "c", options) as channel:
        with pytest.raises(Backpressure, match="there is no receiver"):
            [channel.append(b"x" * 100) for _ in range(1000)]
        named, unnamed = channel.ack_rx("named"), channel.rx()
        named.recv_many(5)
        named.ack()
        with pytest.raises(Backpressure, match="'#0' at 0, "):
            channel.append(b"x" * 100)
        unnamed.close()
        with pytest.raises(Backpressure, match="'named' at 540, "):
            channel.append(b"x" * 100)


# --- Waiting for room

BLOCK = ChannelOptions(sync="none", segment_bytes=1000, keep_bytes=5000, compression="none", policy="block")


def fill(channel: FileChannel) -> int:
    """Send until there is no room; return how many were sent."""
    for number in range(1000):
        try:
            channel.tx().send(b"%07d" % number + b"x" * 93, timeout=0)
        except Timeout:
            return number
    raise AssertionError("the bound was never reached")


@pytest.mark.parametrize("beside", [False, True], ids=["of the owner", "of another process"])
@pytest.mark.parametrize("batch", [False, True], ids=["one", "many"])
def test_a_send_that_blocks_goes_on_when_a_receiver_has_made_room(tmp_path: Path, batch: bool, beside: bool) -> None:
    with FileChannel.open(tmp_path / "c", BLOCK) as channel, FileChannel.attach(tmp_path / "c") as view:
        slow, sent = (view if beside else channel).ack_rx("slow"), fill(channel)
        end = channel.stats().write_position
        with pytest.raises(Timeout, match="slowest receiver is 'slow' at 0"):
            channel.tx().send_many([b"never" * 20] * 3, timeout=0.02)
        assert channel.stats().write_position == end
        late = b"late" * 30
        sending = threading.Thread(target=lambda: channel.append_many([late]) if batch else channel.append(late))
        sending.start()
        sending.join(0.05)
        assert sending.is_alive()
        assert drain(slow) == sent
        slow.ack()
        sending.join(60)
        assert slow.recv(timeout=1) == late
        with pytest.raises(OptionsError, match="too many for keep_bytes"):  # no room will ever be enough
            channel.append(b"x" * 6000)


def test_closing_the_channel_ends_a_send_that_blocks(tmp_path: Path) -> None:
    channel = FileChannel.open(tmp_path / "c", BLOCK)
    channel.ack_rx("slow").close()
    fill(channel)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            channel.append(b"late" * 30)
        except ClosedError as exc:
            raised.append(exc)

    sending = threading.Thread(target=send)
    sending.start()
    sending.join(0.05)
    channel.close()
    sending.join(60)
    assert len(raised) == 1


def test_a_cancelled_send_that_blocks_sends_nothing_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(1, "one")
    monkeypatch.setattr("penstock.disk.executor._waiting", lambda _process: threads)

    async def scene(channel: FileChannel, rx: AckReceiver, sent: int) -> None:
        tx = channel.tx()
        with pytest.raises(Timeout):
            await tx.asend(b"too late" * 15, timeout=0.02)
        sending = asyncio.create_task(tx.asend_many([b"cancelled" * 15]))
        await asyncio.sleep(0.02)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        await in_waiting_thread(lambda: None)  # there is one thread: its last turn is over
        assert drain(rx) == sent
        rx.ack()
        await asyncio.wait_for(tx.asend(b"room"), 60)

    with FileChannel.open(tmp_path / "c", BLOCK) as channel:
        rx = channel.ack_rx("slow")
        asyncio.run(scene(channel, rx, fill(channel)))
        assert [p for b in rx.batches(timeout=0) for p in b.to_payloads()] == [b"room"]


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


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_receivers_come_and_go_while_others_move_on(tmp_path: Path) -> None:
    """Each move looks at all open receivers, of which others open and close some at the same moment."""
    options = ChannelOptions(sync="none", segment_bytes=200, compression="none")
    failed: list[BaseException] = []
    done = threading.Event()
    with FileChannel.open(tmp_path / "c", options) as channel:
        slow = channel.ack_rx("slow")  # nothing is collected, so that every move looks

        def come_and_go() -> None:
            try:
                while not done.is_set():
                    some = [channel.rx("latest") for _ in range(5)]
                    channel.stats()
                    del some
            except BaseException as exc:
                failed.append(exc)

        def move_on() -> None:
            try:
                rx = channel.ack_rx()
                for _ in range(1500):
                    rx.recv(timeout=60)
                    rx.ack()
            except BaseException as exc:
                failed.append(exc)

        threads = [threading.Thread(target=come_and_go) for _ in range(2)]
        moving = [threading.Thread(target=move_on) for _ in range(2)]
        for thread in (*threads, *moving):
            thread.start()
        for number in range(1500):
            channel.append(b"%d" % number)
        for thread in moving:
            thread.join(60)
        done.set()
        for thread in threads:
            thread.join(60)
        assert failed == []
        assert slow.recv(timeout=1) == b"0"


def test_forgetting_a_receiver(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", OPTIONS) as channel:
        channel.append_many(LOAD)
        for wrong in ("nobody", "../x"):
            with pytest.raises(OptionsError, match="no receiver named"):
                channel.forget(wrong)
        rx = channel.ack_rx("away")
        with pytest.raises(LockedError, match="'away'"):
            channel.forget("away")
        rx.close()
        (tmp_path / "c" / "penstock-cursor-away").write_bytes(b"\xff" * 1024)  # holds everything
        assert drain(channel.rx()) == 100
        assert channel.gc() == 0
        channel.forget("away")
        assert len(segments(tmp_path / "c")) == 1
        assert channel.ack_rx("away").held == channel.stats().first_position


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
