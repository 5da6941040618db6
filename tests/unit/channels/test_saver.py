"""Promise: saves of many channels go together, each in its own order, and none pays for the failure of another."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import UnsupportedOperation
from typing import Any

import pytest

from penstock.channels import FileChannelStore, MemoryChannelStore, Nid, PersistedChannel, channel_hash
from penstock.channels.model import StoredConfig
from penstock.channels.saver import MAX_SHARE, Saver, save_many
from penstock.disk import MemoryDisk
from penstock.errors import OptionsError
from penstock.testing.faulty import FaultyDisk

MANY = [PersistedChannel(f"ops/{number}") for number in range(5)]
CHANGED = [PersistedChannel(f"ops/{number}", Nid("ann", "localhost")) for number in range(5)]


class Slow(MemoryChannelStore):
    """Notes who saves, and waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.at: set[str] = set()
        self.by: dict[str, str] = {}

    def save(self, channel: PersistedChannel) -> str:
        self.at.add(threading.current_thread().name)
        assert self.go.wait(60)
        self.by[channel.handler] = threading.current_thread().name
        return super().save(channel)


async def all_saved(store: Any, channels: Sequence[PersistedChannel], threads: int) -> list[Any]:
    with ThreadPoolExecutor(threads) as executor:
        saver = Saver(store, executor, threads)
        return await asyncio.gather(*map(saver.save, channels), return_exceptions=True)


def steps_of(disk: FaultyDisk) -> list[tuple[str, str]]:
    """Return the steps on metadata in the order they were taken, by the handler they are for."""
    handlers = {channel_hash(channel.handler): channel.handler for channel in MANY}
    wanted = ("create", "modify", "write_at", "sync", "rename", "exchange", "sync_folder")
    found = [(name, handlers.get(path.removeprefix("data/")[:64])) for name, path in disk.calls if name in wanted]
    return [(name, handler) for name, handler in found if handler is not None]


def test_each_save_keeps_its_order_and_all_go_step_by_step() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = FileChannelStore("data", disk)
    for channel in MANY:
        store.save(channel)
    for renamed in (["exchange", "rename"], ["exchange"], ["exchange"]):  # once there is a spare it is written again
        disk.calls.clear()
        assert store.save_many(MANY) == [channel_hash(channel.handler) for channel in MANY]
        steps = steps_of(disk)
        opened = "create" if len(renamed) > 1 else "modify"
        for channel in MANY:
            own = [name for name, handler in steps if handler == channel.handler]
            assert own == [opened, "write_at", "sync", *renamed, "sync_folder"]
        together = [name for name, _ in steps]
        assert together == [opened, "write_at"] * 5 + ["sync"] * 5 + renamed * 5 + ["sync_folder"] * 5


@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "exchange", "sync_folder"])
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
        assert "metadata.bin.tmp" not in disk.list(f"data/{channel_hash(channel.handler)}")


def test_what_cannot_be_encoded_harms_no_other() -> None:
    store = FileChannelStore("data", MemoryDisk())
    too_large = PersistedChannel("big", members=(), config=StoredConfig(max_clients=1 << 40))
    first, second, third = store.save_many([MANY[0], too_large, MANY[1]])
    assert isinstance(second, OptionsError)
    assert store.hashes() == sorted([first, third])


class Death(BaseException):
    """Of the process, or of the power: nothing may catch it and go on."""


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_between_saves_each_channel_is_as_acknowledged_or_newer(seed: int) -> None:
    """Failures, deaths of the process and power cuts at any step, over many generations of each channel."""
    rng = random.Random(seed)
    disk = FaultyDisk(MemoryDisk())
    store = FileChannelStore("data", disk)
    handlers = [channel.handler for channel in MANY]
    possible: dict[str, set[int]] = {handler: {0} for handler in handlers}
    store.save_many([version(handler, 0) for handler in handlers])
    for generation in range(1, 12):
        left, ending = rng.randrange(60), rng.choice(("error", "kill", "cut"))
        for handler in handlers:
            possible[handler].add(generation)

        def on_call(name: str, path: str, ending: str = ending) -> None:
            nonlocal left
            left -= 1
            if left == 0 and ending == "error":
                raise OSError(5, "Input/output error")
            if left <= 0 and ending != "error":
                raise Death

        disk.on_call = on_call
        try:
            for handler, result in zip(
                handlers, store.save_many([version(handler, generation) for handler in handlers]), strict=True
            ):
                if isinstance(result, str):
                    possible[handler] = {generation}
        except Death:
            store = FileChannelStore("data", disk)
        finally:
            disk.on_call = None
        if ending == "cut":
            disk.cut_power(seed=rng.randrange(1 << 30), keep=rng.choice((0.0, 0.5, 0.9)))
            store = FileChannelStore("data", disk)
            for handler in handlers:
                found = store.load(channel_hash(handler)).config.max_clients
                assert found in possible[handler]
                possible[handler] = {found or 0}


def version(handler: str, generation: int) -> PersistedChannel:
    members = tuple(Nid(f"user{number:04}", "localhost") for number in range(generation * 37 % 400))
    return PersistedChannel(handler, None, StoredConfig(max_clients=generation), members=members)


def test_a_file_system_that_cannot_exchange_names_is_saved_to_all_the_same() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = FileChannelStore("data", disk)
    for generation in range(4):
        disk.fail("exchange", UnsupportedOperation(22, "Invalid argument"))
        (digest,) = store.save_many([version("ops", generation)])
        assert isinstance(digest, str)
        assert store.load(digest) == version("ops", generation)
        assert disk.list(f"data/{digest}") == ["metadata.bin"]


def test_a_spare_that_is_gone_is_made_again() -> None:
    disk = MemoryDisk()
    store = FileChannelStore("data", disk)
    for generation in range(6):
        (digest,) = store.save_many([version("ops", generation)])
        assert store.load(str(digest)) == version("ops", generation)
        if generation == 3:
            disk.remove(f"data/{digest}/penstock-spare")
    assert disk.list(f"data/{digest}") == ["metadata.bin", "penstock-spare"]


async def test_what_waits_together_is_shared_out_among_the_threads() -> None:
    store = Slow()
    channels = [PersistedChannel(f"ops/{number}") for number in range(12)]
    with ThreadPoolExecutor(3) as executor:
        saver = Saver(store, executor, 3)
        futures = [saver.save(channel) for channel in channels]
        async with asyncio.timeout(60):
            while len(store.at) < 3:  # one that begins late would find its share taken
                await asyncio.sleep(0.001)
        store.go.set()
        await asyncio.gather(*futures)
    shares = [list(store.by.values()).count(name) for name in set(store.by.values())]
    assert sorted(shares) == [4, 4, 4]


async def test_what_comes_while_all_threads_are_busy_is_taken_when_one_is_free() -> None:
    store = Slow()
    with ThreadPoolExecutor(1) as executor:
        saver = Saver(store, executor, 1)
        first = saver.save(PersistedChannel("first"))
        async with asyncio.timeout(60):
            while not store.at:
                await asyncio.sleep(0.001)
        rest = [saver.save(PersistedChannel(f"ops/{number}")) for number in range(2 * MAX_SHARE + 1)]
        assert not first.done()
        store.go.set()
        await asyncio.gather(first, *rest)
    assert len(store.hashes()) == 2 * MAX_SHARE + 2


async def test_an_error_that_is_not_of_one_save_goes_to_all_of_its_share() -> None:
    class Broken(FileChannelStore):
        def save_many(self, channels: Sequence[PersistedChannel], *, spares: bool = True) -> list[str | Exception]:
            raise MemoryError

    results = await all_saved(Broken("data", MemoryDisk()), MANY, 1)
    assert [type(result) for result in results] == [MemoryError] * 5


def test_a_store_without_a_way_for_many_saves_one_by_one() -> None:
    store = MemoryChannelStore()
    assert sorted(map(str, save_many(store, MANY))) == store.hashes()
