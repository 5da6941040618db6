"""Promise: a message that may become durable later is stored without a change of threads, with the same answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import ChannelManager, ManagerOptions, Message
from penstock.disk import FaultyDisk, PosixDisk
from penstock.errors import Refused

ANN, BOB = "ann@localhost", "bob@localhost"


async def opened(manager: ChannelManager, kind: str = "pubsub", interval: int = 60_000) -> Any:
    ops = manager.channel("ops")
    await ops.join(ANN)
    await ops.join(BOB)
    await ops.configure(ANN, persist=True, type=kind, message_flush_interval=interval)
    if kind == "pubsub":
        await ops.broadcast(ANN, b"first")  # makes the first segment, which is not done at once
    else:
        await ops.push(ANN, b"first")
    return ops


def no_threads(manager: ChannelManager, monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_thread(*args: Any) -> Any:
        raise AssertionError(f"this needs a thread: {args}")

    monkeypatch.setattr(manager, "in_thread", in_thread)


async def test_a_message_is_stored_and_heard_without_a_thread(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = await start()
    ops = await opened(manager)
    session = manager.connect(BOB)
    with monkeypatch.context() as patch:
        no_threads(manager, patch)
        assert await ops.broadcast(ANN, b"second") == 2
        assert await ops.broadcast_many(ANN, [b"third", b"fourth"]) == range(3, 5)
        assert await asyncio.gather(*(ops.broadcast(ANN, b"%d" % n) for n in range(5))) == [5, 6, 7, 8, 9]
        with pytest.raises(Refused, match="FORBIDDEN"):
            await ops.broadcast("eve@localhost", b"no member")
        heard = [(event.seq, event.payload) for event in session.waiting() if isinstance(event, Message)]
    assert heard[:3] == [(2, b"second"), (3, b"third"), (4, b"fourth")]
    stored = [entry.payload for entry in await (await start()).channel("ops").history(ANN, 2)]
    assert stored == [payload for _, payload in heard]


async def test_an_element_is_pushed_without_a_thread(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = await start()
    jobs = await opened(manager, "fifo")
    with monkeypatch.context() as patch:
        no_threads(manager, patch)
        await jobs.push(ANN, b"second")
    jobs = (await start()).channel("ops")
    assert [(await jobs.pop(ANN)).payload for _ in range(2)] == [b"first", b"second"]


@pytest.mark.parametrize(
    ("interval", "segment_bytes", "payload"),
    [(0, 1 << 20, b"x"), (60_000, 300, b"x"), (60_000, 1 << 20, b"x" * 65_536), (60_000, 1 << 20, b"x" * 40_000)],
    ids=["durable first", "may fill its segment", "large", "large together"],
)
async def test_what_has_to_wait_goes_to_a_thread(
    start: Any, monkeypatch: pytest.MonkeyPatch, interval: int, segment_bytes: int, payload: bytes
) -> None:
    manager = await start(ManagerOptions(segment_bytes=segment_bytes))
    ops = await opened(manager, interval=interval)
    no_threads(manager, monkeypatch)
    with pytest.raises(AssertionError, match="this needs a thread"):
        await ops.broadcast_many(ANN, [payload, payload])
    monkeypatch.undo()


async def test_a_message_that_cannot_be_written_reaches_nobody_and_the_next_one_does(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await opened(manager)
        session = manager.connect(BOB)
        disk.fail("write_at", OSError(28, "No space left on device"), path=".log")
        with pytest.raises(OSError, match="No space left"):
            await ops.broadcast(ANN, b"lost")
        assert session.waiting() == []
        assert await ops.broadcast(ANN, b"kept") == 3  # the number of the lost one is spent
        assert [entry.payload for entry in await ops.history(ANN)] == [b"first", b"kept"]


async def test_a_push_that_cannot_be_written_takes_no_number(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        jobs = await opened(manager, "fifo")
        disk.fail("write_at", OSError(28, "No space left on device"), path=".log")
        with pytest.raises(OSError, match="No space left"):
            await jobs.push(ANN, b"lost")
        await jobs.push(ANN, b"kept")
        assert await jobs.length(ANN) == 2
        assert [(entry.seq, entry.payload) for entry in [await jobs.pop(ANN), await jobs.pop(ANN)]] == [
            (1, b"first"), (2, b"kept"),
        ]  # fmt: skip


async def test_what_was_stored_at_once_is_durable_after_the_interval(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await opened(manager, interval=20)
        await asyncio.sleep(0.2)
        disk.calls.clear()
        await ops.broadcast(ANN, b"second")
        assert not [path for name, path in disk.calls if name == "sync"]
        for _ in range(200):
            if [path for name, path in disk.calls if name == "sync" and path.endswith(".log")]:
                return
            await asyncio.sleep(0.02)
        pytest.fail("no sync within four seconds")
