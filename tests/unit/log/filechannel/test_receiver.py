"""Promises of the receiving side."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.disk import PosixDisk
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    LockedError,
    OptionsError,
    ReplacedError,
    Timeout,
)
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.log.sidecar import Sidecar

FAST = ChannelOptions(sync="none", compression="none")
SMALL = ChannelOptions(sync="none", segment_bytes=500)


def drain(rx: object) -> list[bytes]:
    return [p for batch in rx.batches(timeout=0) for p in batch.to_payloads()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("compression", ["snappy", "gzip", "none"])
def test_random_messages_arrive_whole_through_every_kind_of_segment(tmp_path: Path, compression: str) -> None:
    rng = random.Random(7)
    sent = [rng.randbytes(rng.randrange(512)) for _ in range(4000)]
    options = ChannelOptions(sync="none", segment_bytes=50_000, compression=compression)  # type: ignore[arg-type]
    with FileChannel.open(tmp_path / "c", options) as channel:
        early = channel.rx()
        for start in range(0, len(sent), 100):
            channel.append_many(sent[start : start + 100])
        channel.compact()
        late = channel.rx()
        assert drain(early) == sent
        assert [late.recv(timeout=1) for _ in sent] == sent
        with pytest.raises(Timeout):
            late.recv(timeout=0.001)


def test_four_receivers_each_see_everything_at_their_own_pace(tmp_path: Path) -> None:
    sent = [b"%d" % n for n in range(3000)]
    found: dict[int, list[bytes]] = {n: [] for n in range(4)}
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", segment_bytes=2000)) as channel:
        receivers = [channel.rx() for _ in found]

        def follow(number: int) -> None:
            while len(found[number]) < len(sent):
                if number % 2:
                    found[number].append(receivers[number].recv(timeout=20))
                else:
                    found[number] += receivers[number].recv_many(17 + number, timeout=20).to_payloads()

        threads = [threading.Thread(target=follow, args=(n,)) for n in found]
        for thread in threads:
            thread.start()
        for payload in sent:
            channel.append(payload)
        for thread in threads:
            thread.join(30)
    assert all(received == sent for received in found.values())


def test_a_waiting_receiver_is_woken_by_a_send(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        rx, found = channel.rx(), []
        thread = threading.Thread(target=lambda: found.append(rx.recv(timeout=10)))
        thread.start()
        time.sleep(0.02)
        channel.append(b"hello")
        thread.join(10)
    assert found == [b"hello"]


def test_what_is_received_stays_valid(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append_many([b"first", b"second"])
        rx = channel.rx()
        first = rx.recv()
        batch = rx.recv_many()
        channel.append(b"third")
        assert (first, batch.to_payloads()) == (b"first", [b"second"])


def test_a_receiver_starts_at_the_first_the_latest_or_a_position(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", segment_bytes=500, collect=False)) as channel:
        positions = channel.append_many([b"%d" % n for n in range(200)])
        channel.compact()
        assert channel.rx().recv() == b"0"
        assert channel.rx("latest").try_recv() is None
        for index in (0, 1, 57, 199):
            assert channel.rx(int(positions[index])).recv() == b"%d" % index
        for wrong in (1, int(positions[-1]) + 3, -1, "middle"):
            with pytest.raises(OptionsError):
                channel.rx(wrong)  # type: ignore[arg-type]


def test_peek_and_seek(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", segment_bytes=500, collect=False)) as channel:
        positions = channel.append_many([b"%d" % n for n in range(200)]).tolist()
        rx = channel.rx()
        assert (rx.peek(), rx.peek(), rx.recv(), rx.position) == (b"0", b"0", b"0", positions[1])
        rx.seek(positions[150])
        assert (rx.recv(), rx.recv_many(2).to_payloads(), rx.recv()) == (b"150", [b"151", b"152"], b"153")
        before = rx.position
        with pytest.raises(OptionsError):
            rx.seek(positions[3] + 1)
        assert rx.position == before
        rx.seek("latest")
        assert rx.try_recv() is None
        assert rx.peek() is None
        rx.seek("first")
        assert rx.recv() == b"0"
        assert rx.depth() == 199
        assert rx.depth(limit=5) == 5
        assert rx.lag_bytes == channel.stats().write_position - positions[1]


def test_after_close_receivers_drain_what_was_sent_and_then_learn_it(tmp_path: Path) -> None:
    channel = FileChannel.open(tmp_path / "c", FAST)
    rx, idle = channel.rx(), channel.rx("latest")
    channel.append_many([b"one", b"two"])
    channel.close()
    channel.close()
    assert rx.recv() == b"one"
    assert list(rx) == [b"two"]
    assert rx.try_recv() is None
    with pytest.raises(ClosedError):
        rx.recv(timeout=1)
    assert drain(idle) == [b"one", b"two"]
    with pytest.raises(ClosedError):
        channel.rx()
    rx.close()
    rx.close()
    with pytest.raises(ClosedError):
        rx.try_recv()


def test_closing_the_channel_wakes_who_waits(tmp_path: Path) -> None:
    channel = FileChannel.open(tmp_path / "c", FAST)
    rx, seen = channel.rx(), []

    def wait() -> None:
        try:
            rx.recv()
        except ClosedError:
            seen.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    channel.close()
    thread.join(10)
    assert seen == ["closed"]


def test_asyncio_receives_without_blocking(tmp_path: Path) -> None:
    async def scene() -> list[bytes]:
        with FileChannel.open(tmp_path / "c", FAST) as channel:
            tx, rx = channel.tx(), channel.rx()
            waiting = asyncio.create_task(rx.arecv(timeout=5))
            await asyncio.sleep(0.01)
            await tx.asend(b"one")
            found = [await waiting]
            tx.send_many([b"two", b"three", b"four"])
            async for payload in rx:
                found.append(payload)
                if len(found) == 3:
                    break
            async for batch in rx.abatches():
                found += batch.to_payloads()
                break
            with pytest.raises(Timeout):
                await rx.arecv(timeout=0.01)
            return found

    assert asyncio.run(scene()) == [b"one", b"two", b"three", b"four"]


def test_a_cancelled_receive_takes_nothing_with_it(tmp_path: Path) -> None:
    async def scene() -> list[bytes]:
        with FileChannel.open(tmp_path / "c", FAST) as channel:
            rx, named, found = channel.rx(), channel.ack_rx("worker"), []
            for number in range(20):
                waiting = [asyncio.create_task(rx.arecv()), asyncio.create_task(named.arecv())]
                await asyncio.sleep(0.001 * (number % 3))
                channel.append(b"%d" % number)
                for task in waiting:
                    task.cancel()
                for receiver, task in zip((rx, named), waiting, strict=True):
                    try:
                        payload = await task
                    except asyncio.CancelledError:
                        payload = await receiver.arecv(timeout=5)
                    found.append(payload)
            assert named.unacked == 20
            return found

    assert asyncio.run(scene()) == [b"%d" % (number // 2) for number in range(40)]


def test_a_cancelled_send_happened_whole_or_not_at_all(tmp_path: Path) -> None:
    async def scene() -> None:
        with FileChannel.open(tmp_path / "c", ChannelOptions(sync="always")) as channel:
            tx = channel.tx()
            for number in range(20):
                sending = asyncio.create_task(tx.asend(b"%d" % number * 100))
                await asyncio.sleep(0.0002 * (number % 4))
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sending
            await tx.asend(b"last")

    asyncio.run(scene())
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        assert channel.problems == []
        found = drain(channel.rx())
    whole = [b"%d" % number * 100 for number in range(20)]
    assert b"last" in found
    assert set(found) - {b"last"} <= set(whole)
    assert len(found) == len(set(found))


# --- Acknowledging


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


# --- From another process


def test_a_second_process_tails_a_live_channel(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.log.filechannel import FileChannel\n"
        "with FileChannel.attach(sys.argv[1]) as view:\n"
        "    rx = view.ack_rx('mirror')\n"
        "    print('ready', flush=True)\n"
        "    for _ in range(300):\n"
        "        print(rx.recv(timeout=20).decode(), flush=True)\n"
        "    rx.ack(250)\n"
    )
    options = ChannelOptions(sync="none", segment_bytes=400)
    with FileChannel.open(tmp_path / "c", options) as channel:
        reader = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        own = channel.rx()
        for number in range(300):
            channel.append(b"%d" % number)
            own.recv(timeout=1)
        out = reader.communicate(timeout=60)[0].split()
        assert out == [str(number) for number in range(300)]
        channel.gc()
        assert channel.stats().first_position > 0  # passed by both
        again = channel.ack_rx("mirror")
        assert again.recv(timeout=1) == b"250"


def test_a_view_waits_by_looking_and_closes(tmp_path: Path) -> None:
    with pytest.raises(OptionsError):
        FileChannel.attach(tmp_path / "nothing")
    with FileChannel.open(tmp_path / "c", FAST) as channel, FileChannel.attach(tmp_path / "c") as view:
        rx = view.rx()
        with pytest.raises(Timeout):
            rx.recv(timeout=0.01)
        channel.append(b"one")
        assert rx.recv(timeout=5) == b"one"
    with pytest.raises(ClosedError):
        rx.recv(timeout=1)


# --- Damage


def test_damage_stops_a_receiver_until_it_steps_over(tmp_path: Path) -> None:
    with FileChannel.open(
        tmp_path / "c", ChannelOptions(sync="none", segment_bytes=100, compression="none")
    ) as channel:
        positions = channel.append_many([b"message %02d" % n for n in range(30)]).tolist()
        path = tmp_path / "c" / "segment.1"
        data = bytearray(path.read_bytes())
        data[64 + 18 + 10] ^= 1  # the second message of the segment
        path.write_bytes(data)
        rx, other = channel.ack_rx(), channel.rx(on_damage="skip")
        with pytest.raises(CorruptionError, match=r"segment\.1 at byte 82"):
            [rx.recv(timeout=0) for _ in range(30)]
        before = rx.unacked
        with pytest.raises(CorruptionError):
            rx.recv(timeout=0)
        problem = rx.skip_damage()
        assert problem is not None
        assert problem.byte == 82
        assert rx.skip_damage() is None
        assert rx.unacked == before
        rest = [rx.recv(timeout=0) for _ in range(29 - before)]
        rx.ack()
        assert rx.held == channel.stats().write_position
        assert len(drain(other)) == 29
        assert [p.byte for p in other.problems] == [82]
        assert rest[0] == b"message %02d" % (before + 1)
        assert positions[before + 1] - positions[before] == 18


def test_a_dropped_position_has_expired(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=200, keep_bytes=1000, policy="drop_oldest", compression="none")
    with FileChannel.open(tmp_path / "c", options) as channel:
        channel.append(b"x" * 50)
        rx = channel.ack_rx("slow")
        for _ in range(60):
            channel.append(b"x" * 50)
        with pytest.raises(ExpiredError) as caught:
            rx.recv(timeout=0)
        rx.seek("first")
        assert rx.held == caught.value.first
        assert rx.recv(timeout=0) == b"x" * 50


def test_a_recreated_channel_is_noticed(tmp_path: Path) -> None:
    import shutil

    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append(b"old")
    with FileChannel.attach(tmp_path / "c") as view, FileChannelLog(tmp_path / "c") as log:
        rx = view.rx()
        assert rx.recv(timeout=1) == b"old"
        assert len(log.read(0)) == 1
        shutil.rmtree(tmp_path / "c")
        FileChannel.open(tmp_path / "c", FAST).close()
        with pytest.raises(ReplacedError):
            rx.recv(timeout=1)
        with pytest.raises(ReplacedError):
            log.read(11)
