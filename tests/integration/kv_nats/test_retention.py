"""What a NATS bucket promises when history is taken away under a watch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats_use import WAIT_SECONDS, new_store, purge_below, watch_of

from penstock.errors import (
    ExpiredError,
    ReplacedError,
    Timeout,
)
from penstock.fold import WatchScope
from penstock.kv import NatsConnection, StoreConfig
from penstock.kv.nats.api import JetStream
from penstock.kv.nats.bucket import NatsKvStore
from penstock.testing.kv_conformance import collect
from penstock.types import WatchCursor


async def test_a_live_watch_overrun_by_retention_is_told_before_the_batch(connection: NatsConnection) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3))
    watch = watch_of(store, 3)
    await watch.attach()
    # Deliveries stop while the history passes by: the consumer goes on behind what was evicted.
    await watch._drop()
    await store.writer.put_many((f"k{n}", b"v") for n in range(3, 8))
    await purge_below(store, 7)
    await watch._open(4)
    with pytest.raises(ExpiredError) as caught:
        await watch.next_batch()
    assert (caught.value.position, caught.value.first) == (3, 7)
    await watch.aclose()


async def test_a_server_starts_behind_what_it_has_evicted_without_a_word(connection: NatsConnection) -> None:
    """The trap itself: were it ever to say so, the checks around it would be one too many."""
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(6))
    await purge_below(store, 5)
    watch = watch_of(store, None, guarded=False)
    await watch._open(3)  # as a resume at revision 2 would, without the checks
    assert [update.version.as_int() for update in await collect(watch, 2)] == [5, 6]
    await watch.aclose()
    for scope in (WatchScope.all(), WatchScope.prefix("k."), WatchScope.of(["k.", "x."])):
        with pytest.raises(ExpiredError):
            await scope.watch_from(store.watcher, WatchCursor.of(2))


async def test_a_gap_that_lost_nothing_is_passed(connection: NatsConnection) -> None:
    store = await new_store(connection, history=1)
    await store.writer.put_many([("a", b"1"), ("b", b"2"), ("b", b"3"), ("b", b"4"), ("c", b"5")])
    watch = watch_of(store, 1)
    await watch.attach()
    assert [update.version.as_int() for update in await collect(watch, 2)] == [4, 5]
    await watch.aclose()


async def test_a_gap_nobody_can_judge_is_delivered_again(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await new_store(connection, history=1)
    await store.writer.put_many([("a", b"1"), ("b", b"2"), ("b", b"3"), ("c", b"4")])
    watch = watch_of(store, 1)
    await watch.attach()
    real, unanswered = JetStream.info, [Timeout("no answer")]

    async def info(self: JetStream) -> Any:
        if unanswered:
            raise unanswered.pop()
        return await real(self)

    monkeypatch.setattr(JetStream, "info", info)
    assert [update.version.as_int() for update in await collect(watch, 2)] == [3, 4]
    assert not unanswered
    assert watch.resets == 1
    await watch.aclose()


async def test_a_list_cut_short_is_guarded_where_it_goes_on(connection: NatsConnection) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3))
    watch = watch_of(store, None)
    await watch.attach()
    await collect(watch, 3)
    watch._hydrated = False  # as if more of the list had been to come when the connection broke
    await watch._drop()
    await store.writer.put_many((f"k{n}", b"v") for n in range(3, 8))
    await purge_below(store, 7)
    await watch._open(4)
    with pytest.raises(ExpiredError):
        await asyncio.wait_for(watch.next_batch(), WAIT_SECONDS)
    await watch.aclose()


async def test_an_idle_watch_finds_out_too(connection: NatsConnection) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3))
    watch = watch_of(store, 3, heartbeat_seconds=0.1, probe_seconds=0.2)
    await watch.attach()
    await store._api.delete_consumer(watch._consumer)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3, 8))
    await purge_below(store, 8)
    with pytest.raises(ExpiredError):
        await asyncio.wait_for(watch.next_batch(), WAIT_SECONDS)
    await watch.aclose()


async def test_the_window_is_checked_again_after_attaching(store: NatsKvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.writer.put_many((f"k{n}", b"v") for n in range(6))
    real = JetStream.create_consumer

    async def overtaken(self: JetStream, config: dict[str, Any]) -> tuple[str, int]:
        await purge_below(store, 5)
        return await real(self, config)

    monkeypatch.setattr(JetStream, "create_consumer", overtaken)
    with pytest.raises(ExpiredError):
        await store.watcher.watch_all_from(WatchCursor.of(2))


async def test_a_bucket_deleted_and_made_again_is_noticed(connection: NatsConnection) -> None:
    store = await new_store(connection)
    await store.writer.put("a", b"1")
    watch = watch_of(store, None, heartbeat_seconds=0.1)
    await watch.attach()
    await collect(watch, 1)
    await store._api.call(f"STREAM.DELETE.{store._api.stream}")
    with pytest.raises(ReplacedError):
        await store.writer.put("a", b"2")
    again = await connection.store_with_config(StoreConfig(name=store.name))
    await again.writer.put("a", b"other")
    with pytest.raises(ReplacedError):
        await asyncio.wait_for(watch.next_batch(), WAIT_SECONDS)
    await watch.aclose()
