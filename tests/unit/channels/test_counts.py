"""Promise: everything the original counts about channels, their store and their logs is counted, where it happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from channel_use import ANN, BOB, CAT

from penstock.channels import (
    ChannelId,
    ChannelManager,
    FileChannelStore,
    ManagerOptions,
    Nid,
    channel_hash,
    commands as c,
)
from penstock.channels.counts import ENTRIES, RECOVERY_SECONDS, SECONDS
from penstock.disk import PosixDisk
from penstock.errors import Refused
from penstock.metrics import REGISTRY
from penstock.testing.channel_stores import FailingChannelStore
from penstock.testing.faulty import FaultyDisk


def now() -> dict[str, float]:
    """Return how often each thing was counted so far; a histogram counts its observations."""
    found = {}
    for sample in REGISTRY.samples():
        result = sample.labels.get("result")
        name = sample.name if result is None else f"{sample.name}:{result}"
        found[name] = float(sample.count) if sample.kind == "histogram" else sample.value
    return {name: value for name, value in found.items() if not math.isnan(value)}  # no NaN is the one before it


@pytest.fixture
def counted() -> Callable[[], dict[str, float]]:
    """Return what was counted since the last call."""
    last = now()

    def since() -> dict[str, float]:
        nonlocal last
        before, last = last, now()
        return {name: value - before.get(name, 0.0) for name, value in last.items() if value != before.get(name, 0.0)}

    return since


async def test_each_thing_is_counted_where_it_happens(start: Any, counted: Any) -> None:
    ops = (await start(ManagerOptions(segment_bytes=100))).channel("ops")
    counted()
    await ops.join(ANN)
    assert counted() == {"channel_joins:success": 1, "channels_active": 1}
    with pytest.raises(Refused):
        await ops.join(ANN)
    assert counted() == {"channel_joins:failure": 1}
    await ops.configure(ANN, persist=True, max_persist_messages=2)
    assert counted() == {"store_saves:success": 1, "store_save_duration_seconds": 1}
    await ops.broadcast(ANN, b"one")
    assert counted() == {
        "message_log_recovery_duration_seconds": 1, "message_log_append_duration_seconds": 1,
        "message_log_flushes:success": 1, "message_log_flush_duration_seconds": 1,
    }  # fmt: skip
    await ops.history(ANN)
    assert counted() == {
        "message_log_reads:success": 1, "message_log_read_duration_seconds": 1, "message_log_entries_returned": 1,
    }  # fmt: skip
    await ops.broadcast_many(ANN, [b"x" * 100] * 3)
    found = counted()
    assert found["message_log_segments_rolled"] == 3
    assert found["message_log_segments_evicted"] == 1
    assert found["message_log_evicted_bytes"] > 100
    await ops.join(BOB)
    await ops.leave(BOB)
    assert counted() == {
        "channel_joins:success": 1, "channel_leaves": 1, "store_saves:success": 2, "store_save_duration_seconds": 2,
    }  # fmt: skip
    await ops.delete(ANN)
    assert counted() == {
        "channels_deleted": 1, "channels_active": -1, "store_deletes:success": 1, "message_log_deletes:success": 1,
    }  # fmt: skip


async def test_a_restart_counts_the_enumeration_and_each_load(start: Any, counted: Any, tmp_path: Path) -> None:
    manager = await start()
    for handler in ("a", "b"):
        await manager.channel(handler).join(ANN)
        await manager.channel(handler).configure(ANN, persist=True)
    (tmp_path / "data" / channel_hash("c")).mkdir()
    (tmp_path / "data" / channel_hash("c") / "metadata.bin").write_bytes(b"")
    await manager.close()
    counted()
    await start()
    assert counted() == {
        "store_loads:success": 3, "store_loads:failure": 1, "store_load_duration_seconds": 2, "channels_active": 2,
    }  # fmt: skip


async def test_managers_of_one_process_count_their_channels_together(tmp_path: Path, counted: Any) -> None:
    one = await ChannelManager.open(tmp_path / "one")
    two = await ChannelManager.open(tmp_path / "two")
    for handler in ("a", "b"):
        await one.channel(handler).join(ANN)
    await two.channel("a").join(ANN)
    assert counted()["channels_active"] == 3
    await one.close()
    assert counted() == {"channels_active": -2}
    await two.close()
    assert counted() == {"channels_active": -1}


async def test_what_is_asked_of_a_queue_is_counted_by_its_result(start: Any, counted: Any) -> None:
    jobs = (await start()).channel("jobs")
    await jobs.join(ANN)
    await jobs.configure(ANN, persist=True, type="fifo", max_persist_messages=1)
    found = counted()
    assert found["fifo_cursor_fsync_seconds"] == 1
    await jobs.push(ANN, b"x")
    with pytest.raises(Refused):
        await jobs.push(ANN, b"y")
    await jobs.pop(ANN)
    with pytest.raises(Refused):
        await jobs.pop(ANN)
    with pytest.raises(Refused):
        await jobs.pop(BOB)
    await jobs.clear(ANN)
    found = {name: value for name, value in counted().items() if name.startswith("fifo_")}
    assert found == {
        "fifo_pushes:success": 1, "fifo_pushes:queue_full": 1, "fifo_pops:success": 1, "fifo_pops:queue_empty": 1,
        "fifo_pops:user_not_in_channel": 1, "fifo_clears:success": 1, "fifo_cursor_fsync_seconds": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "who", "where", "reason"),
    [
        (c.Push, ANN, "jobs@x.io", "not_implemented"),
        (c.Push, ANN, "none@localhost", "channel_not_found"),
        (c.Push, ANN, "ops@localhost", "wrong_type"),
        (c.Push, ANN, "broken@localhost", "cursor_recovery_required"),
        (c.Push, CAT, "jobs@localhost", "user_not_in_channel"),
        (c.Push, BOB, "jobs@localhost", "forbidden"),
        (c.Push, ANN, "jobs@localhost", "policy_violation"),
        (c.Pop, ANN, "jobs@x.io", "not_implemented"),
        (c.Pop, ANN, "none@localhost", "channel_not_found"),
        (c.Pop, ANN, "ops@localhost", "wrong_type"),
        (c.Pop, ANN, "broken@localhost", "cursor_recovery_required"),
        (c.Pop, CAT, "jobs@localhost", "user_not_in_channel"),
        (c.Pop, ANN, "jobs@localhost", "not_allowed"),
        (c.Clear, ANN, "jobs@x.io", "not_implemented"),
        (c.Clear, ANN, "none@localhost", "channel_not_found"),
        (c.Clear, ANN, "ops@localhost", "wrong_type"),
        (c.Clear, CAT, "jobs@localhost", "user_not_in_channel"),
        (c.Clear, BOB, "jobs@localhost", "forbidden"),
    ],
)
async def test_every_refusal_of_a_queue_is_counted_by_its_reason(
    start: Any, counted: Any, tmp_path: Path, kind: Any, who: str, where: str, reason: str
) -> None:
    manager = await start()
    for handler in ("ops", "jobs", "broken"):
        for member in (ANN, BOB):
            await manager.channel(handler).join(member)
    for handler in ("jobs", "broken"):
        await manager.channel(handler).configure(ANN, persist=True, type="fifo", max_payload_size=3)
    await manager.channel("jobs").allow(ANN, "read", [BOB])
    (tmp_path / "data" / channel_hash("broken") / "cursor.bin").write_bytes(b"")
    manager = await start()
    await manager.channel("ops").join(ANN)
    counted()
    parts = (b"long", 1) if kind is c.Push else ()
    with pytest.raises(Refused, match=f"^{reason.upper()}"):
        await manager.submit(kind(ChannelId.parse(f"!{where}"), Nid.parse(who), *parts))
    name = {c.Push: "fifo_pushes", c.Pop: "fifo_pops", c.Clear: "fifo_clears"}[kind]
    assert {key: value for key, value in counted().items() if key.startswith("fifo_")} == {f"{name}:{reason}": 1}


async def test_failures_on_disk_are_counted_where_they_happen(tmp_path: Path, counted: Any) -> None:
    disk = FaultyDisk(PosixDisk())
    broken = OSError(5, "Input/output error")
    async with await ChannelManager.open(tmp_path / "data", disk=disk) as manager:
        for handler in ("ops", "jobs"):
            await manager.channel(handler).join(ANN)
            await manager.channel(handler).configure(ANN, persist=True, type="pubsub" if handler == "ops" else "fifo")
        ops, jobs = manager.channel("ops"), manager.channel("jobs")
        await ops.broadcast(ANN, b"one")
        await jobs.push(ANN, b"one")
        counted()
        disk.fail("sync", broken, path="metadata.bin")
        with pytest.raises(OSError, match="Input/output"):
            await ops.join(BOB)
        assert counted() == {"channel_joins:failure": 1, "store_saves:failure": 1}
        disk.fail("rename", broken, path="cursor.bin")
        with pytest.raises(OSError, match="Input/output"):
            await jobs.pop(ANN)
        assert counted()["fifo_pops:failure"] == 1
        disk.fail("rename", broken, path="metadata.bin")
        with pytest.raises(OSError, match="Input/output"):
            await ops.delete(ANN)
        assert counted() == {"store_deletes:failure": 1}
        disk.fail("sync", broken, path=".log")
        with pytest.raises(OSError, match="Input/output"):
            await ops.broadcast(ANN, b"two")
        found = counted()
        assert found["message_log_flushes:failure"] == 1
        assert "message_log_flush_duration_seconds" not in found  # only what went well is timed


async def test_failures_are_counted_as_such(start: Any, counted: Any, tmp_path: Any) -> None:
    store = FailingChannelStore(FileChannelStore(str(tmp_path / "data")))
    ops = (await start(store=store)).channel("ops")
    await ops.join(ANN)
    await ops.configure(ANN, persist=True)
    counted()
    store.fail["save"] = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        await ops.join(BOB)
    assert counted() == {"channel_joins:failure": 1}


def test_the_buckets_are_those_of_the_original() -> None:
    assert (len(SECONDS), SECONDS[0], SECONDS[-1]) == (16, 0.0001, 0.0001 * 2**15)
    assert (len(RECOVERY_SECONDS), RECOVERY_SECONDS[0]) == (16, 0.001)
    assert (ENTRIES[0], ENTRIES[-1], len(ENTRIES)) == (1, 1024, 11)
