"""Promise: an element of a queue is handed out at most once, in order, over restarts (facts 6.6)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from channel_use import ANN, BOB, EVE, refused

from penstock.channels import (
    ChannelManager,
    ChannelType,
    Event,
    FileChannelStore,
    ManagerOptions,
    channel_hash,
)
from penstock.disk import PosixDisk
from penstock.errors import CorruptionError
from penstock.metrics import REGISTRY
from penstock.testing.channel_stores import FailingChannelStore
from penstock.testing.faulty import FaultyDisk


async def queue(manager: ChannelManager, *members: str, **settings: Any) -> Any:
    jobs = manager.channel("jobs")
    for member in members or (ANN,):
        await jobs.join(member)
    await jobs.configure(ANN, persist=True, type="fifo", **settings)
    return jobs


async def test_a_queue_must_be_persistent_and_have_a_cap(start: Any) -> None:
    jobs = (await start()).channel("jobs")
    await jobs.join(ANN)
    with refused("BAD_REQUEST", "FIFO requires persist=true and max_persist_messages > 0"):
        await jobs.configure(ANN, type="fifo")
    with refused("BAD_REQUEST", "max_persist_messages"):
        await jobs.configure(ANN, type="fifo", persist=True, max_persist_messages=0)
    with refused("BAD_REQUEST", "unknown channel type: lifo"):
        await jobs.configure(ANN, type="lifo")
    assert (await jobs.config(ANN))[1] is ChannelType.PUBSUB


async def test_a_queue_stays_a_queue(start: Any) -> None:
    jobs = await queue(await start())
    with refused("BAD_REQUEST", "FIFO is one-way; cannot revert to pubsub"):
        await jobs.configure(ANN, type="pubsub")
    with refused("BAD_REQUEST", "FIFO requires persist=true"):
        await jobs.configure(ANN, persist=False)
    await jobs.configure(ANN, type="fifo", max_clients=5)
    config, kind = await (await start()).channel("jobs").config(ANN)
    assert kind is ChannelType.FIFO
    assert config.persist
    assert config.max_clients == 5


async def test_a_queue_has_no_broadcasts_and_a_pubsub_channel_no_elements(start: Any) -> None:
    manager = await start()
    jobs = await queue(manager)
    for ask in (jobs.broadcast(ANN, b"x"), jobs.history(ANN), jobs.range(ANN)):
        with refused("WRONG_TYPE"):
            await ask
    ops = manager.channel("ops")
    await ops.join(ANN)
    for ask in (ops.push(ANN, b"x"), ops.pop(ANN), ops.length(ANN), ops.clear(ANN)):
        with refused("WRONG_TYPE"):
            await ask


async def test_when_the_owner_leaves_the_queue_ends(start: Any, tmp_path: Path) -> None:
    manager = await start()
    jobs = await queue(manager, ANN, BOB)
    session = manager.connect(BOB)
    await jobs.leave(ANN)
    (event,) = session.waiting()
    assert isinstance(event, Event)
    assert (event.kind, event.nid, event.owner) == ("CHANNEL_DELETED", None, None)
    assert manager.handlers() == []
    assert not (tmp_path / "data" / channel_hash("jobs")).exists()


async def test_members_hear_of_changes_and_only_of_changes(start: Any) -> None:
    manager = await start()
    jobs = manager.channel("jobs")
    await jobs.join(ANN)
    await jobs.join(BOB)
    session = manager.connect(BOB)
    await jobs.configure(ANN, persist=True, type="fifo")
    assert [event.kind for event in session.waiting()] == ["CHANNEL_RECONFIGURED"]
    await jobs.configure(ANN, max_clients=9)
    assert [event.kind for event in session.waiting()] == ["CHANNEL_RECONFIGURED"]
    await jobs.configure(ANN, max_clients=9, type="fifo", persist=True)
    assert session.waiting() == []


async def test_what_is_pushed_is_popped_with_the_time_of_the_push(start: Any) -> None:
    jobs = await queue(await start())
    before = time.time_ns() // 1_000_000
    await jobs.push(ANN, b"one")
    entry = await jobs.pop(ANN)
    assert entry.payload == b"one"
    assert before <= entry.timestamp <= time.time_ns() // 1_000_000


async def test_an_empty_queue_says_so(start: Any) -> None:
    jobs = await queue(await start())
    with refused("QUEUE_EMPTY"):
        await jobs.pop(ANN)


async def test_the_cap_is_on_what_waits(start: Any) -> None:
    jobs = await queue(await start(), max_persist_messages=3)
    for number in range(3):
        await jobs.push(ANN, b"%d" % number)
    with refused("QUEUE_FULL"):
        await jobs.push(ANN, b"too many")
    await jobs.pop(ANN)
    await jobs.push(ANN, b"fits")
    with refused("QUEUE_FULL"):
        await jobs.push(ANN, b"too many")


async def test_the_cap_holds_for_pushes_at_the_same_time(start: Any) -> None:
    jobs = await queue(await start(), max_persist_messages=10)
    answers = await asyncio.gather(*(jobs.push(ANN, b"x") for _ in range(15)), return_exceptions=True)
    assert answers[:10] == [None] * 10
    assert [str(answer) for answer in answers[10:]] == ["QUEUE_FULL"] * 5
    assert await jobs.length(ANN) == 10


async def test_who_may_push_pop_look_and_clear(start: Any) -> None:
    jobs = await queue(await start(), ANN, BOB)
    with refused("FORBIDDEN"):
        await jobs.push(BOB, b"x")
    with refused("FORBIDDEN"):
        await jobs.length(BOB)
    with refused("FORBIDDEN"):
        await jobs.clear(BOB)
    for ask in (jobs.pop(EVE), jobs.push(EVE, b"x"), jobs.length(EVE), jobs.clear(EVE)):
        with refused("USER_NOT_IN_CHANNEL"):
            await ask
    await jobs.push(ANN, b"x")
    await jobs.allow(ANN, "read", [BOB])
    with refused("NOT_ALLOWED"):
        await jobs.pop(ANN)
    assert (await jobs.pop(BOB)).payload == b"x"


async def test_a_payload_over_the_limit_is_refused_and_takes_no_number(start: Any) -> None:
    jobs = await queue(await start(), max_payload_size=4)
    with refused("POLICY_VIOLATION", "payload size exceeds channel limit"):
        await jobs.push(ANN, b"12345")
    await jobs.push(ANN, b"1234")
    assert (await jobs.pop(ANN)).seq == 1


async def test_the_length_is_what_waits(start: Any) -> None:
    jobs = await queue(await start())
    assert await jobs.length(ANN) == 0
    for _ in range(3):
        await jobs.push(ANN, b"x")
    assert await jobs.length(ANN) == 3
    await jobs.pop(ANN)
    assert await jobs.length(ANN) == 2


async def test_consumers_share_and_nobody_gets_what_another_got(start: Any) -> None:
    jobs = await queue(await start(), ANN, BOB, EVE)
    for number in range(3):
        await jobs.push(ANN, b"%d" % number)
    asked = await asyncio.gather(*(jobs.pop(who) for who in (BOB, EVE, BOB, EVE, BOB)), return_exceptions=True)
    assert [answer.payload for answer in asked[:3]] == [b"0", b"1", b"2"]
    assert [str(answer) for answer in asked[3:]] == ["QUEUE_EMPTY"] * 2


async def test_a_restart_goes_on_behind_the_last_pop(start: Any) -> None:
    jobs = await queue(await start())
    for payload in (b"one", b"two", b"three"):
        await jobs.push(ANN, payload)
    assert (await jobs.pop(ANN)).payload == b"one"
    jobs = (await start()).channel("jobs")
    assert await jobs.length(ANN) == 2
    assert (await jobs.pop(ANN)).payload == b"two"
    assert (await jobs.pop(ANN)).payload == b"three"
    with refused("QUEUE_EMPTY"):
        await jobs.pop(ANN)


async def test_a_pop_does_not_wait_for_the_flush_timer(start: Any) -> None:
    jobs = await queue(await start(), message_flush_interval=60_000)
    await jobs.push(ANN, b"now")
    assert (await asyncio.wait_for(jobs.pop(ANN), 60)).payload == b"now"


async def test_the_log_is_durable_before_the_cursor_moves(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        jobs = await queue(manager, message_flush_interval=60_000)
        await jobs.push(ANN, b"x")
        disk.calls.clear()
        await jobs.pop(ANN)
        order = [Path(path).suffix or Path(path).name for name, path in disk.calls if name in ("sync", "rename")]
        assert order[0] == ".log"
        assert order[-1] == ".tmp"


async def test_the_first_pop_after_a_restart_makes_the_log_durable(tmp_path: Path) -> None:
    """Whether what was found is durable nobody knows: the process of before may have died before its flush."""
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data") as manager:
        await (await queue(manager)).push(ANN, b"x")
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        await manager.channel("jobs").pop(ANN)
        calls = [(name, Path(path).name) for name, path in disk.calls]
        synced = calls.index(("sync", "00000000000000000001.log"))
        assert synced < calls.index(("rename", "cursor.bin.tmp"))


async def test_a_channel_becomes_a_queue_log_first_then_cursor_then_metadata(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        jobs = manager.channel("jobs")
        await jobs.join(ANN)
        await jobs.configure(ANN, persist=True, message_flush_interval=60_000)
        await jobs.broadcast(ANN, b"old")
        disk.calls.clear()
        await jobs.configure(ANN, type="fifo")
        wanted = ("sync", "rename", "exchange", "sync_folder")
        order = [(name, Path(path).name) for name, path in disk.calls if name in wanted]
        folder = channel_hash("jobs")
        assert order[0] == ("sync", "00000000000000000001.log")
        cursor = [("sync", "cursor.bin.tmp"), ("rename", "cursor.bin.tmp"), ("sync_folder", folder)]
        at = order.index(cursor[0])
        assert order[at : at + 3] == cursor
        assert order[at + 3] == ("sync", "metadata.bin.tmp")
        assert order[-1] == ("sync_folder", folder)


async def test_a_queue_begins_by_the_log_alone(start: Any) -> None:
    jobs = (await start()).channel("jobs")
    await jobs.join(ANN)
    assert [await jobs.broadcast(ANN, b"not kept") for _ in range(2)] == [1, 2]
    await jobs.configure(ANN, persist=True, type="fifo")
    await jobs.push(ANN, b"x")
    assert (await jobs.pop(ANN)).seq == 1


async def test_an_element_is_told_to_nobody(start: Any) -> None:
    manager = await start()
    jobs = await queue(manager, ANN, BOB)
    heard: list[Any] = []
    manager.listen(heard.append)
    await jobs.push(ANN, b"x")
    await jobs.pop(BOB)
    await jobs.clear(ANN)
    assert heard == []


async def test_segments_go_when_they_are_popped_or_cleared_and_not_before(start: Any, tmp_path: Path) -> None:
    jobs = await queue(await start(ManagerOptions(segment_bytes=60)), max_persist_messages=6)  # two elements a segment
    folder = tmp_path / "data" / channel_hash("jobs")

    def segments() -> list[int]:
        return sorted(int(path.stem) for path in folder.glob("*.log"))

    for number in range(6):
        await jobs.push(ANN, b"element %d" % number)
    assert segments() == [1, 3, 5, 7]  # as many elements as the cap: none of them may go
    for _ in range(3):
        await jobs.pop(ANN)
    assert segments() == [3, 5, 7]
    await jobs.clear(ANN)
    assert segments() == [5, 7]  # the one with the last element stays: it tells the numbers
    assert sorted(int(path.stem) for path in folder.glob("*.idx")) == segments()


async def test_a_cleared_queue_is_empty_and_goes_on(start: Any) -> None:
    jobs = await queue(await start())
    await jobs.clear(ANN)
    for _ in range(3):
        await jobs.push(ANN, b"old")
    await jobs.clear(ANN)
    await jobs.clear(ANN)
    assert await jobs.length(ANN) == 0
    with refused("QUEUE_EMPTY"):
        await jobs.pop(ANN)
    await jobs.push(ANN, b"new")
    entry = await jobs.pop(ANN)
    assert (entry.payload, entry.seq) == (b"new", 4)  # clearing resets no numbers


async def test_an_unusable_cursor_is_mended_by_clear(start: Any, tmp_path: Path) -> None:
    jobs = await queue(await start())
    await jobs.push(ANN, b"x")
    await (await start()).close()
    (tmp_path / "data" / channel_hash("jobs") / "cursor.bin").write_bytes(b"\xff" * 16)
    jobs = (await start()).channel("jobs")
    for ask in (jobs.push(ANN, b"y"), jobs.pop(ANN), jobs.length(ANN)):
        with refused("CURSOR_RECOVERY_REQUIRED"):
            await ask
    assert [str(nid) for nid in await jobs.members(ANN)] == [ANN]
    await jobs.clear(ANN)
    await jobs.push(ANN, b"z")
    assert (await jobs.pop(ANN)).payload == b"z"


async def test_messages_of_before_are_not_elements(start: Any) -> None:
    manager = await start()
    jobs = manager.channel("jobs")
    await jobs.join(ANN)
    await jobs.configure(ANN, persist=True, max_payload_size=4)
    await jobs.broadcast(ANN, b"old")
    with refused("POLICY_VIOLATION"):
        await jobs.broadcast(ANN, b"too long")  # spends number 2, which the log never sees
    await jobs.configure(ANN, type="fifo")
    assert await jobs.length(ANN) == 0
    await jobs.push(ANN, b"new")
    jobs = (await start()).channel("jobs")
    assert (await jobs.pop(ANN)).payload == b"new"


async def test_a_change_into_a_queue_that_cannot_be_saved_did_not_happen(start: Any, tmp_path: Path) -> None:
    store = FailingChannelStore(FileChannelStore(str(tmp_path / "data")))
    jobs = (await start(store=store)).channel("jobs")
    await jobs.join(ANN)
    await jobs.configure(ANN, persist=True)
    await jobs.broadcast(ANN, b"one")
    store.fail["save"] = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        await jobs.configure(ANN, type="fifo")
    store.fail.clear()
    assert (await jobs.config(ANN))[1] is ChannelType.PUBSUB
    assert await jobs.broadcast(ANN, b"two") == 2
    jobs = (await start()).channel("jobs")  # the cursor beside it is ignored
    assert [entry.payload for entry in await jobs.history(ANN)] == [b"one", b"two"]


async def test_a_push_that_fails_takes_no_number(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        jobs = await queue(manager)
        await jobs.push(ANN, b"one")
        disk.fail("write_at", OSError(28, "No space left on device"), path=".log")
        with pytest.raises(OSError, match="No space"):
            await jobs.push(ANN, b"lost")
        assert await jobs.length(ANN) == 1
        await jobs.push(ANN, b"two")
        assert [(await jobs.pop(ANN)).seq for _ in range(2)] == [1, 2]


async def test_a_pop_whose_cursor_cannot_be_written_takes_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        jobs = await queue(manager)
        await jobs.push(ANN, b"one")
        disk.fail("rename", OSError(5, "Input/output error"), path="cursor.bin")
        with pytest.raises(OSError, match="Input/output"):
            await jobs.pop(ANN)
        assert await jobs.length(ANN) == 1
        assert (await jobs.pop(ANN)).payload == b"one"


async def test_a_gap_at_the_head_moves_no_cursor(start: Any, tmp_path: Path) -> None:
    jobs = await queue(await start())
    for payload in (b"one", b"two"):
        await jobs.push(ANN, payload)
    await (await start()).close()
    (log,) = (tmp_path / "data" / channel_hash("jobs")).glob("*.log")
    data = log.read_bytes()
    log.write_bytes(data[len(data) // 2 :])  # entry 2 alone: entry 1 is gone
    jobs = (await start()).channel("jobs")
    for _ in range(2):
        with pytest.raises(CorruptionError, match="fifo log has a gap at the head cursor"):
            await jobs.pop(ANN)
    assert await jobs.length(ANN) == 2
    await jobs.clear(ANN)
    assert await jobs.length(ANN) == 0


async def test_a_gap_behind_the_head_hands_out_what_is_before_it_and_drops_nothing_behind(
    start: Any, tmp_path: Path
) -> None:
    options = ManagerOptions(segment_bytes=60)  # two elements a segment
    jobs = await queue(await start(options))
    for number in range(1, 9):
        await jobs.push(ANN, b"element %d" % number)
    await (await start(options)).close()
    folder = tmp_path / "data" / channel_hash("jobs")
    segments = sorted(folder.glob("*.log"))
    segments[1].unlink()  # elements 3 and 4 are gone
    jobs = (await start(options)).channel("jobs")
    asked = await asyncio.gather(*(jobs.pop(ANN) for _ in range(6)), return_exceptions=True)
    assert [getattr(answer, "payload", None) for answer in asked[:2]] == [b"element 1", b"element 2"]
    assert all("gap at the head cursor" in str(answer) for answer in asked[2:])
    assert segments[2].exists()
    with refused("CURSOR_RECOVERY_REQUIRED"):  # the log now begins behind the cursor: the owner has to decide
        await jobs.length(ANN)


@pytest.mark.parametrize("elements", [1, 2, 3])
async def test_a_queue_emptied_just_after_a_segment_was_full_goes_on(start: Any, tmp_path: Path, elements: int) -> None:
    """The last entry is in a full segment and the next one is empty: evicting the full one would lose the number."""
    options = ManagerOptions(segment_bytes=1)  # every element fills its segment
    jobs = await queue(await start(options))
    for _ in range(elements):
        await jobs.push(ANN, b"x")
    for _ in range(elements):
        await jobs.pop(ANN)
    await (await start(options)).close()
    for sidecar in (tmp_path / "data" / channel_hash("jobs")).glob("penstock-*"):
        sidecar.unlink()  # what the files of the original say must be enough
    jobs = (await start(options)).channel("jobs")
    assert await jobs.length(ANN) == 0
    await jobs.push(ANN, b"next")
    assert (await jobs.pop(ANN)).seq == elements + 1


async def test_queue_operations_are_counted_by_their_result(start: Any) -> None:
    pops = REGISTRY.counter("fifo_pops", "pops on queues", labels=("result",))
    before = pops.value(result="success"), pops.value(result="queue_empty")
    jobs = await queue(await start())
    await jobs.push(ANN, b"x")
    await jobs.pop(ANN)
    with refused("QUEUE_EMPTY"):
        await jobs.pop(ANN)
    assert (pops.value(result="success"), pops.value(result="queue_empty")) == (before[0] + 1, before[1] + 1)
