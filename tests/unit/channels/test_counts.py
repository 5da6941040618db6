"""Promise: everything the original counts about channels, their store and their logs is counted, where it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.channels import FailingChannelStore, FileChannelStore, ManagerOptions
from penstock.channels.counts import ENTRIES, RECOVERY_SECONDS, SECONDS
from penstock.errors import Refused
from penstock.metrics import REGISTRY

ANN, BOB = "ann@localhost", "bob@localhost"


def now() -> dict[str, float]:
    """Return how often each thing was counted so far; a histogram counts its observations."""
    found = {}
    for sample in REGISTRY.samples():
        result = sample.labels.get("result")
        name = sample.name if result is None else f"{sample.name}:{result}"
        found[name] = float(sample.count) if sample.kind == "histogram" else sample.value
    return found


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


async def test_a_restart_counts_the_enumeration_and_each_load(start: Any, counted: Any) -> None:
    manager = await start()
    for handler in ("a", "b"):
        await manager.channel(handler).join(ANN)
        await manager.channel(handler).configure(ANN, persist=True)
    counted()
    await start()
    assert counted() == {"store_loads:success": 3, "store_load_duration_seconds": 2}


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
