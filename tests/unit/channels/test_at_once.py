"""Promises: a message that may become durable later is stored without a change of threads, and one that is alone is
made durable without it as long as the disk is quick; the answers are the same.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from channel_use import ANN, BOB

from penstock.channels import ChannelManager, ChannelMessage, ManagerOptions, files
from penstock.channels.patience import FEWEST
from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import OptionsError, ReadOnlyError, Refused
from penstock.testing.faulty import FaultyDisk


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
        heard = [(event.seq, event.payload) for event in session.waiting() if isinstance(event, ChannelMessage)]
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
    ("interval", "segment_bytes", "payloads"),
    [
        (60_000, 300, [b"x"] * 2), (60_000, 1 << 20, [b"x" * 65_536] * 6),
        (0, 300, [b"x"] * 2), (0, 1 << 20, [b"x" * 40_000] * 2),
    ],
    ids=["may fill its segment", "large together", "durable, may fill its segment", "durable, large together"],
)  # fmt: skip
async def test_what_has_to_wait_goes_to_a_thread(
    start: Any, monkeypatch: pytest.MonkeyPatch, interval: int, segment_bytes: int, payloads: list[bytes]
) -> None:
    manager = await start(ManagerOptions(segment_bytes=segment_bytes, sync_on_loop_seconds=60))
    ops = await opened(manager, interval=interval)
    no_threads(manager, monkeypatch)
    with pytest.raises(AssertionError, match="this needs a thread"):
        await ops.broadcast_many(ANN, payloads)
    monkeypatch.undo()


async def test_what_one_read_of_a_socket_brings_is_written_on_the_loop(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await start(ManagerOptions(segment_bytes=1 << 20))
    ops = await opened(manager, interval=60_000)
    with monkeypatch.context() as patch:
        no_threads(manager, patch)
        assert list(await ops.broadcast_many(ANN, [b"x" * 16_384] * 16)) == list(range(2, 18))


async def test_a_message_that_cannot_be_written_reaches_nobody_and_the_next_one_does(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await opened(manager)
        session = manager.connect(BOB)
        disk.fail("write_at", OSError(28, "No space left on device"), path=".log")
        with pytest.raises(OSError, match="No space left"):
            await ops.broadcast(ANN, b"lost")
        assert session.waiting() == []
        assert await ops.broadcast(ANN, b"kept") == 2  # the number of the one that failed is given out again
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
    async with await ChannelManager.open(tmp_path / "late", disk=disk) as manager:
        ops = await opened(manager, interval=60_000)
        disk.calls.clear()
        await ops.broadcast(ANN, b"second")
        assert not [path for name, path in disk.calls if name == "sync"]

    def syncs() -> int:
        return sum(name == "sync" and path.endswith(".log") for name, path in disk.calls)

    async with await ChannelManager.open(tmp_path / "soon", disk=disk) as manager:
        disk.calls.clear()
        ops = await opened(manager, interval=20)
        for wanted in (1, 2):
            async with asyncio.timeout(60):
                while syncs() < wanted:
                    await asyncio.sleep(0.01)
            before = syncs()
            await ops.broadcast(ANN, b"more")
        async with asyncio.timeout(60):
            while syncs() == before:
                await asyncio.sleep(0.01)


# --- Durable first


class Watched(FaultyDisk):
    """Notes which thread syncs logs, and is as slow at it as it is told to be: its clock does nothing else."""

    def __init__(self) -> None:
        super().__init__(MemoryDisk())
        self.by: list[str] = []
        self.seconds = self.clock = 0.0
        self.on_call = self.note

    def perf_counter(self) -> float:
        self.clock += 1e-6
        return self.clock

    def note(self, name: str, path: str) -> None:
        if name == "sync" and path.endswith(".log"):
            self.by.append("loop" if threading.current_thread() is threading.main_thread() else "thread")
            self.clock += self.seconds

    def taken(self) -> list[str]:
        by, self.by = self.by, []
        return by


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched()
    monkeypatch.setattr(files, "time", made)
    return made


QUICK = ManagerOptions(sync_on_loop_seconds=0.5)


async def test_a_message_alone_is_made_durable_on_the_loop(disk: Watched) -> None:
    async with await ChannelManager.open("data", QUICK, disk=disk) as manager:
        ops = await opened(manager, interval=0)
        assert disk.taken() == ["thread"]  # nobody knows yet how quick the disk is, and the segment has to be made
        assert await ops.broadcast(ANN, b"second") == 2
        assert await ops.broadcast_many(ANN, [b"third", b"fourth"]) == range(3, 5)
        assert disk.taken() == ["loop", "loop"]
        written = [path for name, path in disk.calls if path.endswith(".log") and name in ("write_at", "sync")]
        assert len(written) == 6  # a write and a sync each, no more
        jobs = manager.channel("jobs")
        await jobs.join(ANN)
        await jobs.configure(ANN, persist=True, type="fifo")
        disk.taken()
        for payload in (b"one", b"two"):
            await jobs.push(ANN, payload)
        assert disk.taken() == ["thread", "loop"]
        assert [(await jobs.pop(ANN)).payload for _ in range(2)] == [b"one", b"two"]


async def test_messages_that_come_together_share_a_sync_in_a_thread(disk: Watched) -> None:
    async with await ChannelManager.open("data", QUICK, disk=disk) as manager:
        ops = await opened(manager, interval=0)
        disk.taken()
        assert await asyncio.gather(*(ops.broadcast(ANN, b"x") for _ in range(50))) == list(range(2, 52))
        assert disk.taken() == ["thread"]


async def test_who_asks_for_something_else_meanwhile_is_not_kept_waiting_on_the_loop(disk: Watched) -> None:
    async with await ChannelManager.open("data", QUICK, disk=disk) as manager:
        ops, other = await opened(manager, interval=0), manager.channel("other")
        await other.join(ANN)
        await other.configure(ANN, persist=True)
        disk.taken()
        await asyncio.gather(ops.broadcast(ANN, b"x"), other.join(BOB))
        assert disk.taken() == ["thread"]  # another channel has something under way
        seq, found = await asyncio.gather(ops.broadcast(ANN, b"y"), ops.history(ANN))
        assert disk.taken() == ["thread"]  # and so has this one
        assert [entry.seq for entry in found] == [1, 2, seq]  # what was asked first was done first
        assert manager.busy == 0
        await ops.broadcast(ANN, b"z")
        assert disk.taken() == ["loop"]


async def test_a_slow_disk_is_waited_for_in_a_thread_until_it_is_quick_again(disk: Watched) -> None:
    async with await ChannelManager.open("data", QUICK, disk=disk) as manager:
        ops = await opened(manager, interval=0)
        disk.taken()
        disk.seconds = 0.6
        await ops.broadcast(ANN, b"slow, and nobody knew")
        disk.seconds = 0.0
        for _ in range(FEWEST + 2):
            await ops.broadcast(ANN, b"quick, and nobody knows")
        assert disk.taken() == ["loop", *["thread"] * FEWEST, "loop", "loop"]


async def test_it_can_be_forbidden(disk: Watched) -> None:
    async with await ChannelManager.open("data", ManagerOptions(sync_on_loop_seconds=0), disk=disk) as manager:
        ops = await opened(manager, interval=0)
        for _ in range(3):
            await ops.broadcast(ANN, b"x")
        assert set(disk.taken()) == {"thread"}
    with pytest.raises(OptionsError, match="sync_on_loop_seconds=-1"):
        ManagerOptions(sync_on_loop_seconds=-1)


async def test_a_sync_that_fails_on_the_loop_is_the_callers_and_stops_the_channel(disk: Watched) -> None:
    async with await ChannelManager.open("data", QUICK, disk=disk) as manager:
        ops = await opened(manager, interval=0)
        await ops.broadcast(ANN, b"second")
        session = manager.connect(BOB)
        disk.taken()
        disk.fail("sync", OSError(5, "Input/output error"), path=".log")
        with pytest.raises(OSError, match="Input/output"):
            await ops.broadcast(ANN, b"nobody knows")
        assert disk.taken() == ["loop"]
        assert session.waiting() == []
        with pytest.raises(ReadOnlyError, match="a sync failed"):
            await ops.broadcast(ANN, b"refused")
