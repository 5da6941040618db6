"""Promises of the receiving side."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from queue_use import FAST, SMALL, drain

from penstock.disk import MemoryDisk
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
from penstock.testing.faulty import FaultyDisk


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
                    found[number].append(receivers[number].recv(timeout=60))
                else:
                    found[number] += receivers[number].recv_many(17 + number, timeout=60).to_payloads()

        threads = [threading.Thread(target=follow, args=(n,)) for n in found]
        for thread in threads:
            thread.start()
        for payload in sent:
            channel.append(payload)
        for thread in threads:
            thread.join(60)
    assert all(received == sent for received in found.values())


def test_a_waiting_receiver_is_woken_by_a_send(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        rx, found = channel.rx(), []
        thread = threading.Thread(target=lambda: found.append(rx.recv(timeout=60)))
        thread.start()
        time.sleep(0.02)
        channel.append(b"hello")
        thread.join(60)
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
        rx.seek("earliest")
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
    thread.join(60)
    assert seen == ["closed"]


@pytest.mark.parametrize("name", [None, "worker"])
def test_closing_a_receiver_wakes_whoever_waits_in_it(tmp_path: Path, name: str | None) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        rx, seen = channel.ack_rx(name), []

        def wait() -> None:
            try:
                rx.recv()
            except ClosedError as exc:
                seen.append(str(exc))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.02)
        rx.close()
        thread.join(60)
        assert len(seen) == 1
        assert "receiver is closed" in seen[0]

        async def scene() -> None:
            other = channel.ack_rx(name)
            waiting = asyncio.create_task(other.arecv())
            await asyncio.sleep(0.01)
            other.close()
            with pytest.raises(ClosedError, match="receiver is closed"):
                await asyncio.wait_for(waiting, 60)

        asyncio.run(scene())


def test_a_receiver_that_acknowledges_drains_after_close_unless_it_has_a_name(tmp_path: Path) -> None:
    channel = FileChannel.open(tmp_path / "c", FAST)
    channel.append_many([b"one", b"two"])
    rx, named = channel.ack_rx(), channel.ack_rx("worker")
    assert rx.recv() == named.recv() == b"one"
    channel.close()
    assert list(rx) == [b"two"]
    rx.ack()
    assert list(named) == []  # its name is free
    with pytest.raises(ClosedError):
        named.recv(timeout=0)
    with FileChannel.open(tmp_path / "c", FAST) as again:
        assert again.ack_rx("worker").recv(timeout=0) == b"one"


def test_a_few_at_a_time_are_read_ahead() -> None:
    disk = FaultyDisk(MemoryDisk())
    with FileChannel.open("c", FAST, disk=disk) as channel:
        sent = [b"%d" % n for n in range(1000)]
        channel.append_many(sent)
        rx = channel.rx()
        disk.calls.clear()
        assert [rx.recv_many(1 + n % 3).to_payloads()[0] for n in range(100)] == [
            sent[n // 3 * 6 + (0, 1, 3)[n % 3]] for n in range(100)
        ]
        reads = [path for operation, path in disk.calls if operation == "read_at" and "segment" in path]
        assert len(reads) <= 2  # the header, and all of it


# --- From another process


@pytest.mark.filterwarnings("ignore:This process")
def test_senders_and_receivers_do_not_survive_a_fork_and_the_parent_goes_on(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel, FileChannel.attach(tmp_path / "c") as view:
        channel.append_many([b"one", b"two"])
        tx, handles = channel.tx(), [channel.rx(), channel.ack_rx(), channel.ack_rx("worker"), view.rx()]
        assert [rx.recv(timeout=1) for rx in handles] == [b"one"] * 4
        with pytest.raises(LockedError) as refused:  # as long as this is remembered, so is what could not be opened
            FileChannel.open(tmp_path / "c", FAST)
        child = os.fork()
        if not child:
            told = 0
            for call in (*(rx.try_recv for rx in handles), channel.rx, view.rx, lambda: tx.send(b"x")):
                try:
                    call()
                except ClosedError:
                    told += 1
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert [rx.recv(timeout=1) for rx in handles] == [b"two"] * 4
        handles[2].ack()  # type: ignore[attr-defined]
        assert tx.send(b"three") == 22
        with pytest.raises(LockedError):
            view.ack_rx("worker")
        del refused


def test_a_receiver_without_a_name_holds_nothing_in_another_process_and_is_told(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", SMALL) as channel, FileChannel.attach(tmp_path / "c") as view:
        channel.append_many([b"x" * 50] * 50)
        rx = view.rx()
        assert len(drain(channel.rx())) == 50
        channel.gc()
        with pytest.raises(ExpiredError, match="0") as caught:
            rx.recv(timeout=1)
        assert caught.value.first == channel.stats().first_position > 0


def test_a_second_process_tails_a_live_channel(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.log.filechannel import FileChannel\n"
        "with FileChannel.attach(sys.argv[1]) as view:\n"
        "    rx = view.ack_rx('mirror')\n"
        "    print('ready', flush=True)\n"
        "    for _ in range(300):\n"
        "        print(rx.recv(timeout=60).decode(), flush=True)\n"
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
        assert rx.recv(timeout=60) == b"one"
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
        rx.seek("earliest")
        assert rx.held == caught.value.first
        assert rx.recv(timeout=0) == b"x" * 50


def test_a_recreated_channel_is_noticed(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel.append(b"old")
    with FileChannel.attach(tmp_path / "c") as view, FileChannelLog(tmp_path / "c") as log:
        rx = view.rx()
        assert rx.recv(timeout=1) == b"old"
        assert len(log.read(0)) == 1
        shutil.rmtree(tmp_path / "c")
        FileChannel.open(tmp_path / "c", FAST).close()
        with pytest.raises(ReplacedError):
            rx.recv(timeout=60)
        with pytest.raises(ReplacedError):
            log.read(11)
