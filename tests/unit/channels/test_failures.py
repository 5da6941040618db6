"""Promise: what failed never happened, stops nothing else, and what the original loses is not lost here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from channel_use import ANN, BOB, EVE, payloads, persistent, refused

from penstock.channels import (
    ChannelManager,
    ChannelMessage,
    FileChannelStore,
    Limits,
    ManagerOptions,
    channel_hash,
)
from penstock.disk import PosixDisk
from penstock.errors import ReadOnlyError
from penstock.metrics import REGISTRY
from penstock.testing.channel_stores import FailingChannelStore
from penstock.testing.faulty import FaultyDisk


async def failing(start: Any, tmp_path: Path) -> tuple[ChannelManager, FailingChannelStore]:
    store = FailingChannelStore(FileChannelStore(str(tmp_path / "data")))
    return await start(store=store), store


FULL = OSError(28, "No space left on device")


async def test_a_join_that_cannot_be_saved_did_not_happen(start: Any, tmp_path: Path) -> None:
    manager, store = await failing(start, tmp_path)
    limits = manager.options.limits
    ops = await persistent(manager)
    session = manager.connect(ANN)
    store.fail["save"] = FULL
    with pytest.raises(OSError, match="No space"):
        await ops.join(BOB)
    assert [str(nid) for nid in await ops.members(ANN)] == [ANN]
    assert session.waiting() == []
    store.fail.clear()
    for number in range(limits.max_channels_per_client):  # the slot is free again: all of them fit
        await manager.channel(f"other/{number}").join(BOB)


async def test_a_broadcast_that_cannot_be_stored_reaches_nobody(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager, "ops", ANN, BOB)
        await ops.broadcast(ANN, b"one")
        session = manager.connect(BOB)
        disk.fail("write_at", FULL, path=".log")
        with pytest.raises(OSError, match="No space"):
            await ops.broadcast(ANN, b"two")
        assert session.waiting() == []
        assert await ops.broadcast(ANN, b"three") == 2  # the channel goes on, and no number is spent
        assert [(event.seq, event.payload) for event in session.waiting() if isinstance(event, ChannelMessage)] == [
            (2, b"three")
        ]
        assert await payloads(ops) == [b"one", b"three"]


@pytest.mark.parametrize("interval", [0, 60_000])
async def test_broadcasts_that_find_no_room_spend_no_number(interval: int, tmp_path: Path) -> None:
    """Alone, side by side and many at once; also over segments, where some of a run may be stored."""
    disk = FaultyDisk(PosixDisk())
    options = ManagerOptions(segment_bytes=300)
    async with await ChannelManager.open(tmp_path / "data", options, disk=disk) as manager:
        ops = await persistent(manager, "ops", ANN)
        await ops.configure(ANN, message_flush_interval=interval)
        full = True

        def fail(operation: str, path: str) -> None:
            if full and operation in ("write_at", "write_many_at", "create") and ".log" in path:
                raise FULL

        disk.on_call = fail
        for number in range(5):
            full = True
            with pytest.raises(OSError, match="No space"):
                await ops.broadcast(ANN, b"alone")
            failed = await asyncio.gather(*[ops.broadcast(ANN, b"x") for _ in range(5)], return_exceptions=True)
            assert all(isinstance(answer, OSError) for answer in failed)
            with pytest.raises(OSError, match="No space"):
                await ops.broadcast_many(ANN, [b"many"] * 20)
            full = False
            assert await ops.broadcast(ANN, b"%d" % number) == number + 1
        assert await payloads(ops) == [b"%d" % number for number in range(5)]


async def test_a_sync_that_fails_stops_that_channel_and_no_other(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops, other = await persistent(manager, "ops", ANN, BOB), await persistent(manager, "other")
        await ops.broadcast(ANN, b"one")
        session = manager.connect(BOB)
        disk.fail("sync", OSError(5, "Input/output error"), path=".log")
        with pytest.raises(OSError, match="Input/output"):
            await ops.broadcast(ANN, b"nobody knows")
        with pytest.raises(ReadOnlyError, match="a sync failed"):
            await ops.broadcast(ANN, b"refused")
        assert session.waiting() == []
        await ops.leave(BOB)  # members are not in the log
        assert await other.broadcast(ANN, b"x") == 1
    async with await ChannelManager.open(tmp_path / "data") as manager:
        assert await manager.channel("ops").broadcast(ANN, b"again") > 1


async def test_a_flush_of_the_timer_that_fails_is_told_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk(PosixDisk())
    flushes = REGISTRY.counter("message_log_flushes", "flushes of the logs of channels", labels=("result",))
    before = flushes.value(result="failure")
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager, message_flush_interval=20)
        disk.fail("sync", OSError(5, "Input/output error"), path=".log")
        await ops.broadcast(ANN, b"one")  # acknowledged: it is to be durable later
        async with asyncio.timeout(60):
            while "a flush failed" not in caplog.text:
                await asyncio.sleep(0.01)
        assert "channel ops: a flush failed" in caplog.text
        assert flushes.value(result="failure") == before + 1
        with pytest.raises(ReadOnlyError, match="a sync failed"):
            await ops.broadcast(ANN, b"two")
        assert await payloads(ops) == [b"one"]
        await ops.join(BOB)  # members are not in the log


async def test_a_last_flush_that_fails_is_told_and_the_directory_is_let_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk(PosixDisk())
    manager = await ChannelManager.open(tmp_path / "data", disk=disk)
    ops = await persistent(manager, message_flush_interval=60_000)
    await ops.broadcast(ANN, b"one")
    disk.fail("sync", OSError(5, "Input/output error"), path=".log")
    await manager.close()
    assert "a last flush failed" in caplog.text
    async with await ChannelManager.open(tmp_path / "data") as manager:
        assert await payloads(manager.channel("ops")) == [b"one"]


async def test_a_directory_that_cannot_be_listed_stops_the_start_and_is_let_go(start: Any, tmp_path: Path) -> None:
    await persistent(await start())
    await (await start()).close()
    store = FailingChannelStore(FileChannelStore(str(tmp_path / "data")))
    store.fail["hashes"] = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        await ChannelManager.open(tmp_path / "data", store=store)
    assert (await start()).handlers() == ["ops"]


async def test_metadata_that_cannot_be_read_is_passed_over_and_stays(tmp_path: Path) -> None:
    async with await ChannelManager.open(tmp_path / "data") as manager:
        for name in ("a", "b", "c"):
            await persistent(manager, name)
    disk = FaultyDisk(PosixDisk())
    disk.fail("open", OSError(13, "Permission denied"), path=channel_hash("b"))
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        assert manager.handlers() == ["a", "c"]
        assert manager.broken == {channel_hash("b"): "[Errno 13] Permission denied"}
    async with await ChannelManager.open(tmp_path / "data") as manager:
        assert manager.handlers() == ["a", "b", "c"]


async def test_a_log_that_cannot_be_opened_fails_only_what_needs_it(tmp_path: Path) -> None:
    async with await ChannelManager.open(tmp_path / "data") as manager:
        ops = await persistent(manager, "ops", ANN, BOB)
        await ops.broadcast(ANN, b"one")
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = manager.channel("ops")
        for ask in (lambda: ops.broadcast(ANN, b"x"), lambda: ops.history(ANN), lambda: ops.range(ANN)):
            disk.fail("modify", OSError(13, "Permission denied"), path=".log")
            with pytest.raises(OSError, match="Permission denied"):
                await ask()
            assert len(await ops.members(ANN)) == 2
            await ops.allow(ANN, "read", [ANN, BOB])
        assert await ops.broadcast(ANN, b"two") == 2  # it is tried again each time
        assert await payloads(ops) == [b"one", b"two"]


async def test_rules_that_cannot_be_saved_stay_as_they_were(start: Any, tmp_path: Path) -> None:
    manager, store = await failing(start, tmp_path)
    ops = await persistent(manager)
    store.fail["save"] = FULL
    with pytest.raises(OSError, match="No space"):
        await ops.allow(ANN, "read", [BOB])
    with pytest.raises(OSError, match="No space"):
        await ops.configure(ANN, max_clients=3)
    store.fail.clear()
    assert await ops.allowed(ANN, "read") == []
    assert (await ops.config(ANN))[0].max_clients == 100


async def test_a_leave_that_cannot_be_saved_leaves_the_member(start: Any, tmp_path: Path) -> None:
    manager, store = await failing(start, tmp_path)
    ops = await persistent(manager, "ops", ANN, BOB)
    session = manager.connect(BOB)
    store.fail["save"] = FULL
    with pytest.raises(OSError, match="No space"):
        await ops.leave(BOB)
    await session.close()
    store.fail.clear()
    assert [str(nid) for nid in await ops.members(ANN)] == [ANN, BOB]
    assert [str(nid) for nid in await (await start()).channel("ops").members(ANN)] == [ANN, BOB]


async def test_a_channel_that_cannot_be_deleted_is_still_there(start: Any, tmp_path: Path) -> None:
    manager, store = await failing(start, tmp_path)
    ops = await persistent(manager)
    await ops.broadcast(ANN, b"one")
    store.fail["delete"] = FULL
    for attempt in (ops.delete(ANN), ops.leave(ANN), ops.configure(ANN, persist=False)):
        with pytest.raises(OSError, match="No space"):
            await attempt
    store.fail.clear()
    assert await payloads(ops) == [b"one"]
    assert (await ops.config(ANN))[0].persist
    await ops.delete(ANN)
    assert (await start()).handlers() == []


async def test_a_persistence_that_cannot_be_saved_is_not_switched_on(start: Any, tmp_path: Path) -> None:
    manager, store = await failing(start, tmp_path)
    ops = manager.channel("ops")
    await ops.join(ANN)
    store.fail["save"] = FULL
    with pytest.raises(OSError, match="No space"):
        await ops.configure(ANN, persist=True)
    assert not (await ops.config(ANN))[0].persist
    assert await ops.broadcast(ANN, b"one") == 1


# --- What the original loses (facts 4, 8 and 9), and is not lost here


async def test_a_broken_channel_gets_no_second_life_over_its_old_log(start: Any, tmp_path: Path) -> None:
    manager = await start()
    ops = await persistent(manager)
    await persistent(manager, "other")
    await ops.broadcast(ANN, b"precious")
    await manager.close()
    path = tmp_path / "data" / channel_hash("ops") / "metadata.bin"
    good = path.read_bytes()
    path.write_bytes(b"not valid postcard")
    manager = await start()
    assert manager.handlers() == ["other"]  # one corrupt channel stops nobody else
    assert list(manager.broken) == [channel_hash("ops")]
    with pytest.raises(Exception, match=r"metadata\.bin at byte"):
        await manager.channel("ops").join(BOB)
    await manager.close()
    path.write_bytes(good)
    assert await payloads((await start()).channel("ops")) == [b"precious"]


async def test_what_is_left_of_a_broken_channel_can_be_discarded(start: Any, tmp_path: Path) -> None:
    await (await persistent(await start())).broadcast(ANN, b"x")
    await (await start()).close()
    (tmp_path / "data" / channel_hash("ops") / "metadata.bin").write_bytes(b"")
    manager = await start()
    await manager.discard("ops")
    ops = await persistent(manager)
    assert await ops.broadcast(ANN, b"fresh") == 1


async def test_a_failed_delete_does_not_resurrect_a_channel(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager)
        await ops.broadcast(ANN, b"old")
        disk.fail("remove", OSError(1, "Operation not permitted"), path=".log")
        await ops.delete(ANN)
        folder = tmp_path / "data" / channel_hash("ops")
        assert not (folder / "metadata.bin").exists()
        assert list(folder.glob("*.log"))  # a leftover, which is nobody's channel
        assert manager.handlers() == []
    async with await ChannelManager.open(tmp_path / "data") as manager:
        assert manager.handlers() == []
        assert not folder.exists()


async def test_a_new_channel_does_not_inherit_the_leftovers_of_a_deleted_one(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager)
        for _ in range(5):
            await ops.broadcast(ANN, b"old")
        disk.fail("remove", OSError(1, "Operation not permitted"), path=".log")
        await ops.delete(ANN)
        ops = await persistent(manager, "ops", BOB)
        assert await ops.broadcast(BOB, b"new") == 1
        assert await payloads(ops, who=BOB) == [b"new"]


async def test_leftovers_that_will_not_go_keep_a_new_channel_transient(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager)
        await ops.broadcast(ANN, b"old")
        for _ in range(2):
            disk.fail("remove", OSError(1, "Operation not permitted"), path=".log")
        await ops.delete(ANN)
        await ops.join(BOB)
        with pytest.raises(OSError, match="not permitted"):
            await ops.configure(BOB, persist=True)
        assert not (await ops.config(BOB))[0].persist


async def test_a_folder_that_is_not_the_handlers_is_passed_over(start: Any, tmp_path: Path) -> None:
    await persistent(await start())
    await (await start()).close()
    (tmp_path / "data" / channel_hash("ops")).rename(tmp_path / "data" / channel_hash("else"))
    manager = await start()
    assert manager.handlers() == []
    assert list(manager.broken) == [channel_hash("else")]


async def test_a_second_manager_is_refused(start: Any, tmp_path: Path) -> None:
    await start()
    with pytest.raises(Exception, match="lock"):
        await ChannelManager.open(tmp_path / "data")


async def test_restored_members_are_not_counted_against_the_limits(start: Any) -> None:
    manager = await start()
    for number in range(3):
        await persistent(manager, f"ops/{number}", ANN, BOB)
    manager = await start(ManagerOptions(limits=Limits(max_channels=1, max_channels_per_client=1)))
    assert len(manager.channels(ANN).items) == 3
    with refused("RESOURCE_LIMIT_REACHED"):
        await manager.channel("new").join(EVE)
    await manager.channel("ops/0").join(EVE)
    with refused("POLICY_VIOLATION", "subscription limit reached"):
        await manager.channel("ops/1").join(EVE)


async def test_without_authentication_nothing_is_restored_and_nothing_touched(start: Any, tmp_path: Path) -> None:
    await persistent(await start())
    await (await start()).close()
    stale = tmp_path / "data" / ("a" * 64)
    stale.mkdir()
    manager = await start(ManagerOptions(authenticated=False))
    assert manager.handlers() == []
    ops = manager.channel("ops")
    await ops.join(BOB)
    with refused("FORBIDDEN", "persistence requires auth"):
        await ops.configure(BOB, persist=True)
    await ops.configure(BOB, persist=False)
    assert await ops.broadcast(BOB, b"x") == 1
    assert stale.exists()
    assert [str(nid) for nid in await (await start()).channel("ops").members(ANN)] == [ANN]
