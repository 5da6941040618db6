"""Promise: what a persistent channel acknowledged is there after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from channel_use import ANN, BOB, CAT, EVE, payloads, persistent, refused

from penstock.channels import (
    ChannelManager,
    ChannelMessage,
    ChannelType,
    Config,
    FileChannelStore,
    Limits,
    ManagerOptions,
    MemoryChannelStore,
    Nid,
    PersistedChannel,
    channel_hash,
)
from penstock.disk import PosixDisk
from penstock.testing.faulty import FaultyDisk

SMALL = ManagerOptions(segment_bytes=256)


async def test_a_persistent_channel_survives_a_restart(start: Any) -> None:
    await persistent(await start(), "ops", ANN, BOB, max_clients=7)
    manager = await start()
    assert manager.channels(BOB).items == ("!ops@localhost",)
    ops = manager.channel("ops")
    assert [str(nid) for nid in await ops.members(ANN)] == [ANN, BOB]
    assert (await ops.config(BOB))[0].max_clients == 7
    with refused("USER_IN_CHANNEL"):
        await ops.join(BOB)
    session = manager.connect(BOB)  # who comes back hears at once: it never ceased to be a member
    await ops.broadcast(ANN, b"welcome back")
    assert [event.payload for event in session.waiting() if isinstance(event, ChannelMessage)] == [b"welcome back"]


async def test_owner_rules_and_type_survive_a_restart(start: Any) -> None:
    manager = await start()
    ops = await persistent(manager, "ops", CAT, BOB, ANN, max_payload_size=50, max_persist_messages=9)
    await ops.leave(CAT)  # the first in NID order inherits
    ops = (await start()).channel("ops")
    await ops.configure(ANN, message_flush_interval=70)
    await ops.allow(ANN, "join", [BOB, "example.com"])
    await ops.allow(ANN, "publish", [CAT])
    await ops.allow(ANN, "read", ["localhost"])
    ops = (await start()).channel("ops")
    assert await ops.config(BOB) == (Config(100, 50, 9, persist=True, message_flush_interval=70), ChannelType.PUBSUB)
    found = {kind: [str(nid) for nid in await ops.allowed(ANN, kind)] for kind in ("join", "publish", "read")}
    assert found == {"join": ["example.com", BOB], "publish": [CAT], "read": ["localhost"]}
    with refused("FORBIDDEN"):
        await ops.allowed(BOB, "join")
    with refused("NOT_ALLOWED"):
        await ops.broadcast(ANN, b"only cat may")


async def test_a_channel_that_has_no_owner_is_owned_by_who_joins_next(start: Any, tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path / "data"))
    store.save(PersistedChannel("ops", None, members=(Nid.parse(ANN),)))
    ops = (await start()).channel("ops")
    with refused("FORBIDDEN"):
        await ops.configure(ANN, max_clients=5)
    await ops.join(BOB)
    assert store.load(channel_hash("ops")).owner == Nid.parse(BOB)
    await (await start()).channel("ops").configure(BOB, max_clients=5)


async def test_members_are_restored_in_order_and_each_once_however_they_were_written(
    start: Any, tmp_path: Path
) -> None:
    store = FileChannelStore(str(tmp_path / "data"))
    members = tuple(map(Nid.parse, ("zoe@localhost", ANN, "ann.b@localhost", ANN, BOB)))
    store.save(PersistedChannel("ops", Nid.parse(ANN), members=members))
    ops = (await start()).channel("ops")
    assert [str(nid) for nid in await ops.members(ANN)] == [ANN, "ann.b@localhost", BOB, "zoe@localhost"]
    await ops.join(CAT)
    await ops.leave(BOB)
    saved = store.load(channel_hash("ops")).members
    assert [str(nid) for nid in saved] == [ANN, "ann.b@localhost", CAT, "zoe@localhost"]


async def test_each_change_is_one_save_of_what_is_about_to_be(start: Any, tmp_path: Path) -> None:
    class Noting(MemoryChannelStore):
        """Notes each save, and what members see at that moment."""

        def __init__(self) -> None:
            super().__init__()
            self.saved: list[tuple[PersistedChannel, Any]] = []

        def save(self, channel: PersistedChannel) -> str:
            self.saved.append((channel, manager._core("ops").channels["ops"].snapshot()))
            return super().save(channel)

    store = Noting()
    manager = await start(store=store)
    ops = manager.channel("ops")
    await ops.join(ANN)
    await ops.broadcast(ANN, b"x")
    assert store.saved == []  # a transient channel is not saved
    await ops.configure(ANN, persist=True)
    for change in (
        lambda: ops.join(BOB),
        lambda: ops.join(EVE),
        lambda: ops.allow(ANN, "read", [BOB]),
        lambda: ops.disallow(ANN, "read", [BOB]),
        lambda: ops.configure(ANN, max_clients=9),
        lambda: ops.leave(EVE),
        lambda: ops.leave(ANN),
        lambda: ops.configure(BOB, type="fifo"),
    ):
        store.saved.clear()
        before = manager._core("ops").channels["ops"].snapshot()
        await change()
        after = manager._core("ops").channels["ops"].snapshot()
        assert before != after
        assert store.saved == [(after, before)]  # saved first, applied afterwards, once
    store.saved.clear()
    await ops.configure(BOB, max_clients=9)  # nothing changes, and it is saved all the same, as the original does
    assert [saved for saved, _ in store.saved] == [after]
    store.saved.clear()
    await ops.push(BOB, b"x")
    await ops.pop(BOB)
    async with manager.connect(BOB):
        await ops.members(BOB)
    assert store.saved == []  # messages and sessions are not metadata


async def test_the_same_members_give_the_same_bytes(start: Any, tmp_path: Path) -> None:
    ops = await persistent(await start(), "ops", ANN, CAT)
    path = tmp_path / "data" / channel_hash("ops") / "metadata.bin"
    before = path.read_bytes()
    await ops.join(BOB)
    assert path.read_bytes() != before
    await ops.leave(BOB)
    assert path.read_bytes() == before


async def test_metadata_and_log_leave_each_other_alone(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager)
        await ops.broadcast(ANN, b"one")
        disk.calls.clear()
        await ops.broadcast(ANN, b"two")
        await ops.history(ANN)
        assert not [path for _, path in disk.calls if Path(path).name.startswith("metadata")]
        disk.calls.clear()
        await ops.join(BOB)
        await ops.allow(ANN, "read", [BOB])
        assert not [path for _, path in disk.calls if path.endswith((".log", ".idx"))]


@pytest.mark.parametrize("shards", [1, 3, 64])
async def test_any_number_of_shards_finds_every_channel(start: Any, shards: int) -> None:
    manager = await start(ManagerOptions(shards=8))
    names = [f"ops/{number}" for number in range(20)]
    for name in names:
        await persistent(manager, name)
    manager = await start(ManagerOptions(shards=shards))
    assert manager.handlers() == sorted(names)
    for name in names:
        await manager.channel(name).join(BOB)
        assert [str(nid) for nid in await manager.channel(name).members(ANN)] == [ANN, BOB]


async def test_a_transient_channel_does_not(start: Any) -> None:
    await (await start()).channel("ops").join(ANN)
    manager = await start()
    assert manager.handlers() == []
    assert manager.channels(ANN).items == ()


async def test_persistence_needs_a_cap(start: Any) -> None:
    with refused("BAD_REQUEST", "max_persist_messages must be greater than 0 for persistent channels"):
        await persistent(await start(), max_persist_messages=0)


async def test_persistence_switched_off_is_not_restored(start: Any, tmp_path: Path) -> None:
    ops = await persistent(await start())
    await ops.broadcast(ANN, b"one")
    await ops.configure(ANN, persist=False)
    assert not (tmp_path / "data" / channel_hash("ops")).exists()
    assert (await start()).handlers() == []


async def test_history_returns_what_was_stored_in_order(start: Any) -> None:
    ops = await persistent(await start())
    sent = [b"message %d" % number for number in range(5)]
    for payload in sent:
        await ops.broadcast(ANN, payload)
    found = await ops.history(ANN)
    assert [entry.payload for entry in found] == sent
    assert [entry.seq for entry in found] == [1, 2, 3, 4, 5]
    assert {entry.sender for entry in found} == {ANN}


async def test_the_range_follows_the_broadcasts(start: Any) -> None:
    ops = await persistent(await start())
    assert await ops.range(ANN) == (0, 0)
    assert await ops.history(ANN) == []
    for _ in range(3):
        await ops.broadcast(ANN, b"x")
    assert await ops.range(ANN) == (1, 3)
    ops = (await start()).channel("ops")
    assert await ops.range(ANN) == (1, 3)


async def test_history_begins_and_ends_where_it_is_told(start: Any) -> None:
    ops = await persistent(await start())
    for number in range(1, 11):
        await ops.broadcast(ANN, b"%d" % number)
    assert await payloads(ops, 6, 3) == [b"6", b"7", b"8"]
    assert await payloads(ops, 999, 10) == []
    assert await payloads(ops, 1, 0) == []


async def test_history_after_a_restart_needs_no_new_join(start: Any) -> None:
    ops = await persistent(await start(), "ops", ANN, BOB)
    for payload in (b"one", b"two", b"three"):
        await ops.broadcast(ANN, payload)
    ops = (await start()).channel("ops")
    assert await payloads(ops) == [b"one", b"two", b"three"]
    assert {entry.sender for entry in await ops.history(BOB)} == {ANN}


async def test_numbers_go_on_after_a_restart(start: Any) -> None:
    ops = await persistent(await start())
    assert [await ops.broadcast(ANN, b"x") for _ in range(3)] == [1, 2, 3]
    ops = (await start()).channel("ops")
    assert await ops.broadcast(ANN, b"y") == 4


async def test_history_is_limited_by_the_server(start: Any) -> None:
    ops = await persistent(await start(ManagerOptions(limits=Limits(max_history_limit=2))))
    for _ in range(5):
        await ops.broadcast(ANN, b"x")
    assert len(await ops.history(ANN, 1, 100)) == 2


async def test_old_segments_go_and_stay_gone(start: Any) -> None:
    ops = await persistent(await start(SMALL), max_persist_messages=5)
    for number in range(1, 21):
        await ops.broadcast(ANN, b"message %02d" % number)
    first, last = await ops.range(ANN)
    assert first > 1
    assert last == 20
    found = await ops.history(ANN, 1, 100)
    assert found[0].seq >= first
    assert [entry.seq for entry in found][-5:] == [16, 17, 18, 19, 20]
    ops = (await start(SMALL)).channel("ops")
    assert await ops.range(ANN) == (first, last)
    assert await ops.history(ANN, 1, 100) == found


async def test_channels_keep_their_own_logs(start: Any) -> None:
    manager = await start()
    first, second = await persistent(manager, "a"), await persistent(manager, "b")
    await first.broadcast(ANN, b"for a")
    await second.broadcast(ANN, b"for b")
    assert await payloads(first) == [b"for a"]
    assert await payloads(second) == [b"for b"]


async def test_a_transient_channel_has_no_history(start: Any) -> None:
    ops = (await start()).channel("ops")
    await ops.join(ANN)
    for ask in (ops.history(ANN), ops.range(ANN)):
        with refused("PERSISTENCE_NOT_ENABLED"):
            await ask


async def test_persistence_off_and_on_again_keeps_counting(start: Any) -> None:
    ops = await persistent(await start())
    for _ in range(5):
        await ops.broadcast(ANN, b"old")
    await ops.configure(ANN, persist=False)
    await ops.configure(ANN, persist=True)
    for number in range(3):
        await ops.broadcast(ANN, b"new %d" % number)
    assert await ops.range(ANN) == (6, 8)
    assert await payloads(ops) == [b"new 0", b"new 1", b"new 2"]
    assert (await (await start()).channel("ops").range(ANN))[1] == 8


async def test_history_begins_with_the_first_message_after_persistence_was_switched_on(start: Any) -> None:
    ops = (await start()).channel("ops")
    await ops.join(ANN)
    assert [await ops.broadcast(ANN, b"not kept") for _ in range(2)] == [1, 2]
    await ops.configure(ANN, persist=True)
    assert await ops.range(ANN) == (0, 0)
    assert await ops.broadcast(ANN, b"kept") == 3
    assert await ops.range(ANN) == (3, 3)
    ops = (await start()).channel("ops")
    assert await payloads(ops) == [b"kept"]
    assert await ops.broadcast(ANN, b"next") == 4


async def test_many_broadcasts_with_a_flush_timer_all_arrive(start: Any) -> None:
    ops = await persistent(await start(), message_flush_interval=10)
    numbers = await asyncio.gather(*(ops.broadcast(ANN, b"%d" % number) for number in range(200)))
    assert numbers == list(range(1, 201))
    assert await ops.range(ANN) == (1, 200)
    ops = (await start()).channel("ops")
    assert await ops.range(ANN) == (1, 200)


async def test_many_at_once_are_numbered_in_a_row_and_stored_together(start: Any) -> None:
    manager = await start()
    ops = await persistent(manager, "ops", ANN, BOB, max_payload_size=10)
    session = manager.connect(BOB)
    runs = await asyncio.gather(*(ops.broadcast_many(ANN, [b"%d.%d" % (run, n) for n in range(5)]) for run in range(4)))
    assert runs == [range(1, 6), range(6, 11), range(11, 16), range(16, 21)]
    assert await ops.broadcast_many(ANN, []) == range(21, 21)
    with refused("POLICY_VIOLATION"):
        await ops.broadcast_many(ANN, [b"fits", b"too long for it"])
    assert await ops.broadcast(BOB, b"next") == 21
    expected = [b"%d.%d" % (run, n) for run in range(4) for n in range(5)] + [b"next"]
    assert [event.payload for event in session.waiting() if isinstance(event, ChannelMessage)] == expected
    assert await payloads((await start()).channel("ops")) == expected


async def test_the_flush_interval_can_change_while_messages_flow(start: Any) -> None:
    ops = await persistent(await start(), message_flush_interval=60_000)
    await ops.broadcast(ANN, b"one")
    await ops.configure(ANN, message_flush_interval=0)
    await ops.broadcast(ANN, b"two")
    await ops.configure(ANN, message_flush_interval=5)
    await ops.broadcast(ANN, b"three")
    assert await payloads((await start()).channel("ops")) == [b"one", b"two", b"three"]


async def test_a_change_of_the_flush_interval_flushes_first(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())

    def syncs() -> int:
        return sum(name == "sync" and path.endswith(".log") for name, path in disk.calls)

    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager, message_flush_interval=60_000)
        await ops.broadcast(ANN, b"one")
        assert syncs() == 0
        await ops.configure(ANN, message_flush_interval=50_000)
        assert syncs() == 1
        await ops.configure(ANN, max_clients=7)  # another setting is no reason
        await ops.broadcast(ANN, b"two")
        assert syncs() == 1
        await ops.configure(ANN, message_flush_interval=0)
        assert syncs() == 2


async def test_a_stored_message_waits_for_its_sync_only_when_the_interval_is_zero(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        ops = await persistent(manager)
        await ops.broadcast(ANN, b"one")
        assert [name for name, path in disk.calls if name == "sync" and path.endswith(".log")] == ["sync"]
        await ops.configure(ANN, message_flush_interval=60_000)
        disk.calls.clear()
        await ops.broadcast(ANN, b"two")
        assert not [path for name, path in disk.calls if name == "sync"]
