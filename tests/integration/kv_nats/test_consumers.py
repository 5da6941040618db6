"""What a NATS bucket promises of its consumers: scans that are whole, watches that heal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats_use import WAIT_SECONDS, new_store, purge_below, watch_of

from penstock.errors import (
    NotConnected,
    Timeout,
)
from penstock.kv import NatsConnection, NatsOptions
from penstock.kv.nats.api import JetStream
from penstock.kv.nats.bucket import NatsKvStore
from penstock.kv.nats.lane import Lane
from penstock.kv.nats.watch import NatsWatch
from penstock.testing.kv_conformance import collect
from penstock.testing.nats import NatsServer
from penstock.testing.proxy import TcpProxy


async def test_several_prefixes_cost_one_consumer_and_nothing_is_left_behind(store: NatsKvStore) -> None:
    async def consumers() -> int:
        return (await store._api.info()).state.consumer_count

    await store.writer.put("node.a", b"1")
    async with await store.watcher.watch_prefixes(["node.", "svc.", "x."]) as watch:
        assert await consumers() == 1
        await collect(watch, 1)
    assert await consumers() == 0
    await store.reader.keys()
    await store.reader.scan()
    assert await consumers() == 0
    lane = store._api.client()._ps
    assert isinstance(lane, Lane)
    assert not lane.inboxes


@pytest.mark.parametrize("headers_only", [True, False])
async def test_a_scan_listens_first_and_needs_no_acknowledgements(
    store: NatsKvStore, monkeypatch: pytest.MonkeyPatch, headers_only: bool
) -> None:
    await store.writer.put("a", b"1")
    asked, real = [], JetStream.create_consumer

    async def asking(self: JetStream, config: dict[str, Any]) -> tuple[str, int]:
        asked.append((config, [inbox.subject for inbox in self.client()._ps.inboxes.values()]))
        return await real(self, config)

    monkeypatch.setattr(JetStream, "create_consumer", asking)
    await (store.reader.keys() if headers_only else store.reader.scan())
    async with await store.watcher.watch_all() as watch:
        await collect(watch, 1)
    (scan, before_scan), (live, before_live) = asked
    assert scan["deliver_subject"] in before_scan
    assert live["deliver_subject"] in before_live
    assert (scan["deliver_policy"], scan["ack_policy"], scan["headers_only"]) == (
        "last_per_subject", "none", headers_only,
    )  # fmt: skip
    assert (live["deliver_policy"], live["ack_policy"]) == ("last_per_subject", "none")


async def test_a_scan_over_a_link_that_swallows_everything_ends_in_time(server: NatsServer, store: NatsKvStore) -> None:
    await store.writer.put_many((f"k.{n}", b"x" * 200) for n in range(500))
    with TcpProxy(server.port) as proxy:
        options = NatsOptions(url=f"nats://127.0.0.1:{proxy.port}", ping_seconds=60)
        async with NatsConnection(options) as connection:
            remote = await connection.store(store.name)
            remote._api.seconds = 0.5
            proxy.stall(after=50_000)
            with pytest.raises(Timeout):
                async with asyncio.timeout(WAIT_SECONDS):
                    await remote.reader.scan()
            proxy.heal()


async def test_a_scan_that_stands_still_ends_when_the_server_has_no_more(store: NatsKvStore) -> None:
    """Retention may remove what a scan still waits for: the count at its beginning is not the end."""
    await store.writer.put("a", b"1")
    real = store._api.create_consumer

    async def more_than_there_is(config: dict[str, Any]) -> tuple[str, int]:
        name, pending = await real({**config, "deliver_policy": "new"})
        return name, pending + 5

    store._api.create_consumer = more_than_there_is  # type: ignore[method-assign]
    assert await store.reader.keys() == []


async def test_a_scan_whose_connection_ends_fails_and_is_never_partial(store: NatsKvStore) -> None:
    await store.writer.put("a", b"1")
    real = store._api.create_consumer

    async def cut(config: dict[str, Any]) -> tuple[str, int]:
        answer = await real({**config, "deliver_policy": "new"})
        await store._api.client().close()
        return answer[0], 5

    store._api.create_consumer = cut  # type: ignore[method-assign]
    with pytest.raises(NotConnected):
        await store.reader.keys()


async def test_a_hole_in_the_deliveries_is_healed_where_it_is(store: NatsKvStore) -> None:
    await store.writer.put_many((f"k{n}", b"v") for n in range(5))
    watch = watch_of(store, None, heartbeat_seconds=60)  # no heartbeat will tell
    await watch.attach()
    await collect(watch, 5)
    watch._consumer_seq += 1  # as if a message had been lost on the way
    await store.writer.put_many((f"k{n}", b"v") for n in range(5, 10))
    assert [update.key for update in await collect(watch, 5)] == [f"k{n}" for n in range(5, 10)]
    assert watch.resets >= 1
    await watch.aclose()


async def test_who_gives_up_waiting_while_a_gap_is_looked_into_misses_nothing(store: NatsKvStore) -> None:
    """What had been taken from the inbox was gone, and the next run went on behind it."""
    for key in ("x", "a", "a", "b"):  # the second revision is not kept
        await store.writer.put(key, b"v")
    watch = watch_of(store, 1)
    await watch.attach()
    info, looks, waits = store._api.info, asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        looks.set()
        await waits.wait()
        return await info()

    store._api.info = slowly  # type: ignore[method-assign]
    asked = asyncio.create_task(watch.next_batch())
    async with asyncio.timeout(WAIT_SECONDS):
        await looks.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        waits.set()
        await store.writer.put("c", b"v")
        assert [update.version.as_int() for update in await collect(watch, 3)] == [3, 4, 5]
    await watch.aclose()


@pytest.mark.parametrize("revision", [None, 3])
async def test_a_consumer_lost_before_any_delivery_starts_where_it_was_asked_to(
    connection: NatsConnection, revision: int | None
) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n % 2}", b"%d" % n) for n in range(6))
    watch = watch_of(store, revision)
    await watch.attach()
    watch._broken = True
    found = await collect(watch, 2 if revision is None else 3)
    expected = [5, 6] if revision is None else [4, 5, 6]
    assert [update.version.as_int() for update in found] == expected
    assert watch.resets == 1
    await watch.aclose()


async def test_a_consumer_deleted_behind_our_back_is_made_again(store: NatsKvStore) -> None:
    watch = watch_of(store, None, heartbeat_seconds=0.2)
    await watch.attach()
    await store._api.delete_consumer(watch._consumer)
    await store.writer.put("a", b"1")
    assert [update.key for update in await collect(watch, 1)] == ["a"]
    await watch.aclose()


async def prefix_watch(store: NatsKvStore) -> NatsWatch:
    prefix, quick = f"$KV.{store.name}.", 0.1
    watch = NatsWatch(
        store._api, prefix.encode(), [prefix + "node.>"], None,
        guarded=False, heartbeat_seconds=quick, probe_seconds=quick,
    )  # fmt: skip
    await watch.attach()
    await store.writer.put("node.a", b"1")
    await collect(watch, 1)
    return watch


async def test_a_quiet_prefix_makes_progress(store: NatsKvStore) -> None:
    watch = await prefix_watch(store)
    last = await store.writer.put_many((f"svc.{n}", b"v") for n in range(20))
    waiting = asyncio.create_task(watch.next_batch())
    async with asyncio.timeout(WAIT_SECONDS):
        while watch.progress < (last[-1].as_int() or 0):
            await asyncio.sleep(0.02)
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_quiet_prefix_claims_no_progress_over_removed_history(store: NatsKvStore) -> None:
    watch = await prefix_watch(store)
    await store.writer.put_many((f"svc.{n}", b"v") for n in range(20))
    await purge_below(store, 15)
    waiting = asyncio.create_task(watch.next_batch())
    async with asyncio.timeout(WAIT_SECONDS):
        while watch._heartbeat < 20:
            await asyncio.sleep(0.02)
    probed = watch._probed_at
    async with asyncio.timeout(WAIT_SECONDS):
        while watch._probed_at < probed + 0.2:  # it has looked at least twice since
            await asyncio.sleep(0.02)
    assert watch.progress == 1
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting
