"""Promise: saves of many channels go together, each in its own order, and none pays for the failure of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.channels import FileChannelStore, MemoryChannelStore, Nid, PersistedChannel, channel_hash
from penstock.channels.saver import MAX_SHARE, Saver, save_many
from penstock.disk import FaultyDisk, MemoryDisk
from penstock.errors import OptionsError

MANY = [PersistedChannel(f"ops/{number}") for number in range(5)]
CHANGED = [PersistedChannel(f"ops/{number}", Nid("ann", "localhost")) for number in range(5)]


class Slow(MemoryChannelStore):
    """Notes who saves, and waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.by: dict[str, str] = {}

    def save(self, channel: PersistedChannel) -> str:
        assert self.go.wait(10)
        self.by[channel.handler] = threading.current_thread().name
        return super().save(channel)


async def all_saved(store: Any, channels: Sequence[PersistedChannel], threads: int) -> list[Any]:
    with ThreadPoolExecutor(threads) as executor:
        saver = Saver(store, executor, threads)
        return await asyncio.gather(*map(saver.save, channels), return_exceptions=True)


def steps_of(disk: FaultyDisk) -> list[tuple[str, str]]:
    """Return the steps on metadata in the order they were taken, by the handler they are for."""
    handlers = {channel_hash(channel.handler): channel.handler for channel in MANY}
    wanted = ("create", "write_at", "sync", "rename", "sync_folder")
    found = [(name, handlers.get(path.removeprefix("data/")[:64])) for name, path in disk.calls if name in wanted]
    return [(name, handler) for name, handler in found if handler is not None]


def test_each_save_keeps_its_order_and_all_go_step_by_step() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = FileChannelStore("data", disk)
    for channel in MANY:
        store.save(channel)
    disk.calls.clear()
    assert store.save_many(MANY) == [channel_hash(channel.handler) for channel in MANY]
    steps = steps_of(disk)
    for channel in MANY:
        own = [name for name, handler in steps if handler == channel.handler]
        assert own == ["create", "write_at", "sync", "rename", "sync_folder"]
    together = [name for name, _ in steps]
    assert together == ["create", "write_at"] * 5 + ["sync"] * 5 + ["rename"] * 5 + ["sync_folder"] * 5


@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename", "sync_folder"])
async def test_a_save_that_fails_fails_alone(operation: str) -> None:
    disk = FaultyDisk(MemoryDisk())
    store = FileChannelStore("data", disk)
    for channel in MANY:
        store.save(channel)
    unlucky = MANY[2]
    disk.fail(operation, OSError(28, "No space left on device"), path=channel_hash(unlucky.handler))
    results = await all_saved(store, CHANGED, 1)
    assert [type(result) for result in results] == [type(None), type(None), OSError, type(None), type(None)]
    after = [*CHANGED[:2], CHANGED[2] if operation == "sync_folder" else unlucky, *CHANGED[3:]]
    assert [store.load(channel_hash(channel.handler)) for channel in MANY] == after
    for channel in MANY:
        assert disk.list(f"data/{channel_hash(channel.handler)}") == ["metadata.bin"]


def test_what_cannot_be_encoded_harms_no_other() -> None:
    store = FileChannelStore("data", MemoryDisk())
    too_large = PersistedChannel("big", members=(), config=MANY[0].config.__class__(max_clients=1 << 40))
    first, second, third = store.save_many([MANY[0], too_large, MANY[1]])
    assert isinstance(second, OptionsError)
    assert store.hashes() == sorted([first, third])


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_leaves_each_of_many_old_or_new(seed: int) -> None:
    class PowerCut(BaseException):
        pass

    disk = FaultyDisk(MemoryDisk())
    store = FileChannelStore("data", disk)
    for channel in MANY:
        store.save(channel)
    left = seed % 26

    def on_call(name: str, path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise PowerCut

    disk.on_call = on_call
    done = False
    try:
        store.save_many(CHANGED)
        done = True
    except PowerCut:
        pass
    disk.on_call = None
    disk.cut_power(seed=seed, keep=(seed % 4) / 3)
    for old, wanted in zip(MANY, CHANGED, strict=True):
        assert store.load(channel_hash(old.handler)) in ((wanted,) if done else (old, wanted))


async def test_what_waits_together_is_shared_out_among_the_threads() -> None:
    store = Slow()
    channels = [PersistedChannel(f"ops/{number}") for number in range(12)]
    with ThreadPoolExecutor(3) as executor:
        saver = Saver(store, executor, 3)
        futures = [saver.save(channel) for channel in channels]
        await asyncio.sleep(0)
        store.go.set()
        await asyncio.gather(*futures)
    shares = [list(store.by.values()).count(name) for name in set(store.by.values())]
    assert sorted(shares) == [4, 4, 4]


async def test_what_comes_while_all_threads_are_busy_is_taken_when_one_is_free() -> None:
    store = Slow()
    with ThreadPoolExecutor(1) as executor:
        saver = Saver(store, executor, 1)
        first = saver.save(PersistedChannel("first"))
        await asyncio.sleep(0.01)
        rest = [saver.save(PersistedChannel(f"ops/{number}")) for number in range(2 * MAX_SHARE + 1)]
        assert not first.done()
        store.go.set()
        await asyncio.gather(first, *rest)
    assert len(store.hashes()) == 2 * MAX_SHARE + 2


async def test_an_error_that_is_not_of_one_save_goes_to_all_of_its_share() -> None:
    class Broken(FileChannelStore):
        def save_many(self, channels: Sequence[PersistedChannel]) -> list[str | Exception]:
            raise MemoryError

    results = await all_saved(Broken("data", MemoryDisk()), MANY, 1)
    assert [type(result) for result in results] == [MemoryError] * 5


def test_a_store_without_a_way_for_many_saves_one_by_one() -> None:
    store = MemoryChannelStore()
    assert sorted(map(str, save_many(store, MANY))) == store.hashes()
