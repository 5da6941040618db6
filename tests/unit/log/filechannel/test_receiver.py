"""Promises of the receiving side."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.disk import FaultyDisk, MemoryDisk, PosixDisk
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    LockedError,
    OptionsError,
    ReplacedError,
    Timeout,
)
from penstock.log.filechannel import AckReceiver, ChannelOptions, FileChannel, FileChannelLog
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
        thread.join(10)
        assert len(seen) == 1
        assert "receiver is closed" in seen[0]

        async def scene() -> None:
            other = channel.ack_rx(name)
            waiting = asyncio.create_task(other.arecv())
            await asyncio.sleep(0.01)
            other.close()
            with pytest.raises(ClosedError, match="receiver is closed"):
                await asyncio.wait_for(waiting, 10)

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


def test_asyncio_learns_that_the_channel_was_closed(tmp_path: Path) -> None:
    async def scene() -> list[bytes]:
        channel = FileChannel.open(tmp_path / "c", FAST)
        one, many, rest = channel.rx(), channel.rx(), channel.ack_rx()

        async def each() -> list[bytes]:
            return [payload async for payload in one]

        async def batched() -> list[bytes]:
            return [payload async for batch in many.abatches() for payload in batch.to_payloads()]

        tasks = [asyncio.create_task(each()), asyncio.create_task(batched())]
        for payload in (b"one", b"two"):
            await asyncio.sleep(0.005)
            await channel.tx().asend(payload)
        channel.close()
        found = [payload for task in tasks for payload in await asyncio.wait_for(task, 10)]
        found += [await rest.arecv(), await rest.arecv()]
        with pytest.raises(ClosedError, match="everything in it was received"):
            await rest.arecv()
        with pytest.raises(ClosedError):
            await channel.tx().asend(b"late")
        return found

    assert asyncio.run(scene()) == [b"one", b"two"] * 3


def test_a_waiting_task_is_woken_by_the_send_and_does_not_look_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        with FileChannel.open(tmp_path / "c", FAST) as channel:
            rx = channel.rx()
            looks = 0
            look = rx.try_recv

            def counted() -> bytes | None:
                nonlocal looks
                looks += 1
                return look()

            monkeypatch.setattr(rx, "try_recv", counted)
            waiting = [asyncio.create_task(rx.arecv()) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert looks <= 4  # each looked, and once more when it began to wait
            await asyncio.to_thread(channel.append_many, [b"one", b"two"])
            assert sorted(await asyncio.gather(*waiting)) == [b"one", b"two"]
            assert channel._spool._waiting == 0
            with pytest.raises(Timeout):
                await rx.arecv(timeout=0.01)
            waiting = [asyncio.create_task(rx.arecv())]
            await asyncio.sleep(0.01)
            waiting[0].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (channel._spool._waiting, channel._spool._listeners) == (0, [])

    asyncio.run(scene())


def test_a_small_send_stays_on_the_event_loop_unless_it_would_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[object] = []
    to_thread = asyncio.to_thread

    async def counted(*arguments: object) -> object:
        changes.append(arguments)
        return await to_thread(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "to_thread", counted)

    async def send(options: ChannelOptions, *payloads: bytes) -> int:
        changes.clear()
        with FileChannel.open(tmp_path / f"c{len(list(tmp_path.iterdir()))}", options) as channel:
            tx = channel.tx()
            positions = [await tx.asend(payload) for payload in payloads]
            changed = len(changes)
            assert (await tx.asend_many([b"a", b"b"])).tolist() == [tx.write_position - 18, tx.write_position - 9]
            assert drain(channel.rx()) == [*payloads, b"a", b"b"]
            assert positions == sorted(set(positions))
        return changed

    async def scene() -> None:
        assert await send(FAST, b"one", b"two", b"x" * 1000) == 0
        assert await send(ChannelOptions(compression="none"), b"one", b"two") == 0
        assert await send(FAST, b"one", b"x" * (65 << 10)) == 1  # large
        assert await send(ChannelOptions(sync="always"), b"one", b"two") == 2  # waits for the disk
        options = ChannelOptions(sync="none", segment_bytes=20, compression="none")
        assert await send(options, b"x" * 20, b"y" * 20, b"z") == 2  # a new segment is made
        bounded = ChannelOptions(sync="none", keep_bytes=2 << 30)
        assert await send(bounded, b"one") == 1  # may have to wait for room
        with pytest.raises(TypeError):
            await send(FAST, "text")  # type: ignore[arg-type]

    asyncio.run(scene())


@pytest.mark.parametrize("sync", ["interval", "always"])
def test_an_ack_from_asyncio_is_kept_and_waits_for_the_disk_on_a_thread(sync: str) -> None:
    disk, loop_thread = FaultyDisk(MemoryDisk()), threading.get_ident()
    waited: list[bool] = []

    def note(operation: str, path: str) -> None:
        if operation == "sync" and path.endswith("cursor-worker"):
            waited.append(threading.get_ident() == loop_thread)

    async def scene(rx: AckReceiver) -> None:
        assert await rx.arecv() == b"one"
        disk.on_call = note
        await rx.aack()
        assert rx.unacked == 0
        with pytest.raises(OptionsError):
            await rx.aack(1)
        disk.on_call = None

    channel = FileChannel.open("c", ChannelOptions(sync=sync, sync_seconds=1e9), disk=disk)  # type: ignore[arg-type]
    channel.append_many([b"one", b"two"])
    rx = channel.ack_rx("worker")
    asyncio.run(scene(rx))
    channel.sync()
    disk.cut_power(keep=0)
    rx.forked()
    channel.forked()
    assert waited == ([False] if sync == "always" else [])
    with FileChannel.open("c", FAST, disk=disk) as again:
        assert again.ack_rx("worker").recv(timeout=0) == (b"two" if sync == "always" else b"one")


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
                    rx.recv(timeout=5)
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


# --- From another process


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


@pytest.mark.parametrize("again", [False, True])
def test_asyncio_notices_a_channel_that_is_gone(tmp_path: Path, again: bool) -> None:
    async def scene() -> None:
        with FileChannel.open(tmp_path / "c", FAST) as channel:
            channel.append(b"old")
        with FileChannel.attach(tmp_path / "c") as view:
            rx = view.rx()
            assert await rx.arecv() == b"old"
            waiting = asyncio.create_task(rx.arecv())
            await asyncio.sleep(0.01)
            shutil.rmtree(tmp_path / "c")
            if again:
                FileChannel.open(tmp_path / "c", FAST).close()
            with pytest.raises(ReplacedError):
                await asyncio.wait_for(waiting, 10)
            with pytest.raises(ReplacedError):
                rx.recv(timeout=5)
            if not again:
                with pytest.raises(ReplacedError, match="folder is gone"):
                    view.rx("latest")

    asyncio.run(scene())


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
