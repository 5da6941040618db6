"""Promises of the receiving side in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from pathlib import Path

import pytest
from queue_use import FAST, drain, lose_power

from penstock.disk import MemoryDisk
from penstock.errors import (
    ClosedError,
    OptionsError,
    ReplacedError,
    Timeout,
)
from penstock.log.filechannel import AckReceiver, ChannelOptions, FileChannel, sender
from penstock.testing.faulty import FaultyDisk


def test_asyncio_receives_without_blocking(tmp_path: Path) -> None:
    async def scene() -> list[bytes]:
        with FileChannel.open(tmp_path / "c", FAST) as channel:
            tx, rx = channel.tx(), channel.rx()
            waiting = asyncio.create_task(rx.arecv(timeout=60))
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
        found = [payload for task in tasks for payload in await asyncio.wait_for(task, 60)]
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
    to_thread = sender.in_waiting_thread

    async def counted(*arguments: object) -> object:
        changes.append(arguments)
        return await to_thread(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sender, "in_waiting_thread", counted)

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
    lose_power(channel, rx)
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
                        payload = await receiver.arecv(timeout=60)
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
                await asyncio.wait_for(waiting, 60)
            with pytest.raises(ReplacedError):
                rx.recv(timeout=60)
            if not again:
                with pytest.raises(ReplacedError, match="folder is gone"):
                    view.rx("latest")

    asyncio.run(scene())
