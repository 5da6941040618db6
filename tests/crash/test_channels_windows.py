"""Promise: numbers and queues come through the rare moments: old segments go while newer entries are not durable yet,
and entries that were given out are lost with the end of a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import Any

import pytest

from penstock.channels import ChannelManager, ManagerOptions, channel_hash
from penstock.disk import MemoryDisk
from penstock.testing.faulty import FaultyDisk

ANN = "ann@localhost"
OPTIONS = ManagerOptions(segment_bytes=60)  # two elements of one byte fill a segment
MINUTE = 60_000
CUTS = [(seed, keep) for seed in range(12) for keep in (0.0, 0.5, 0.9, 1.0)]


class Machine:
    """A disk, and managers on it that die with the power or with their process."""

    def __init__(self) -> None:
        self.inner = MemoryDisk()
        self.disk = FaultyDisk(self.inner)

    def life(self, work: Callable[[ChannelManager], Awaitable[Any]]) -> Any:
        """Do some work in a manager that is never closed."""

        async def run() -> Any:
            manager = await ChannelManager.open("data", OPTIONS, disk=self.disk)
            try:
                return await work(manager)
            finally:
                wait(manager._working)  # what was under way when the power went

        found = asyncio.run(run())
        self.inner._locks.clear()  # who held them is dead
        return found

    def lose_the_end(self, handler: str, count: int = 5) -> None:
        """Damage the last entry of a log, as bad sectors do."""
        folder = f"data/{channel_hash(handler)}"
        name = max(name for name in self.inner.list(folder) if name.endswith(".log") and self.size(folder, name))
        with self.inner.modify(f"{folder}/{name}") as file:
            file.truncate(file.stat().size - count)

    def size(self, folder: str, name: str) -> int:
        found = self.inner.stat(f"{folder}/{name}")
        return 0 if found is None else found.size


async def queue(manager: ChannelManager, interval: int) -> Any:
    jobs = manager.channel("jobs")
    await jobs.join(ANN)
    await jobs.configure(ANN, persist=True, type="fifo", message_flush_interval=interval)
    return jobs


@pytest.mark.parametrize(("seed", "keep"), CUTS)
def test_a_queue_goes_on_when_its_only_durable_segment_was_done_with(seed: int, keep: float) -> None:
    machine = Machine()

    async def before(manager: ChannelManager) -> None:
        jobs = await queue(manager, MINUTE)
        await jobs.push(ANN, b"a")
        await jobs.push(ANN, b"b")  # fills the first segment
        await jobs.pop(ANN)  # flushes: a and b are durable
        await jobs.push(ANN, b"c")  # not durable yet
        assert (await jobs.pop(ANN)).payload == b"b"  # the first segment is done with

    async def after(manager: ChannelManager) -> tuple[list[bytes], int]:
        jobs = manager.channel("jobs")
        waiting = [(await jobs.pop(ANN)).payload for _ in range(await jobs.length(ANN))]
        await jobs.push(ANN, b"next")
        return waiting, (await jobs.pop(ANN)).seq

    machine.life(before)
    machine.disk.cut_power(seed=seed, keep=keep)
    waiting, number = machine.life(after)
    assert waiting in ([], [b"c"])
    assert number == 3 + len(waiting)


@pytest.mark.parametrize(("seed", "keep"), CUTS)
def test_numbers_go_on_when_retention_took_all_that_was_durable(seed: int, keep: float) -> None:
    machine = Machine()

    async def before(manager: ChannelManager) -> None:
        ops = manager.channel("ops")
        await ops.join(ANN)
        await ops.configure(ANN, persist=True, max_persist_messages=1, message_flush_interval=MINUTE)
        for payload in (b"a", b"b", b"c"):  # b fills the first segment, c lets it go
            await ops.broadcast(ANN, payload)

    machine.life(before)
    machine.disk.cut_power(seed=seed, keep=keep)
    assert machine.life(lambda manager: manager.channel("ops").broadcast(ANN, b"next")) > 2


def test_a_queue_that_lost_its_end_and_was_cleared_stays_usable() -> None:
    machine = Machine()

    async def before(manager: ChannelManager) -> None:
        jobs = await queue(manager, 0)
        for payload in (b"a", b"b", b"c"):
            await jobs.push(ANN, payload)

    async def after(manager: ChannelManager) -> int:
        jobs = manager.channel("jobs")
        assert await jobs.length(ANN) == 0
        await jobs.push(ANN, b"next")
        number: int = (await jobs.pop(ANN)).seq
        return number

    machine.life(before)
    machine.lose_the_end("jobs")
    machine.life(lambda manager: manager.channel("jobs").clear(ANN))
    assert machine.life(after) == 4  # c had number 3, and numbers are not used twice


def test_a_channel_that_lost_its_end_can_become_a_queue() -> None:
    machine = Machine()

    async def before(manager: ChannelManager) -> None:
        ops = manager.channel("ops")
        await ops.join(ANN)
        await ops.configure(ANN, persist=True)
        for payload in (b"a", b"b", b"c"):
            await ops.broadcast(ANN, payload)

    async def after(manager: ChannelManager) -> None:
        ops = manager.channel("ops")
        await ops.configure(ANN, type="fifo")
        await ops.push(ANN, b"first")

    async def later(manager: ChannelManager) -> tuple[int, int, bytes]:
        ops = manager.channel("ops")
        length, entry = await ops.length(ANN), await ops.pop(ANN)
        return length, entry.seq, entry.payload

    machine.life(before)
    machine.lose_the_end("ops")
    machine.life(after)
    assert machine.life(later) == (1, 4, b"first")
