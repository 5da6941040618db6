"""A fold of a real NATS bucket: restarts, expiry, outages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fold_fakes import MemoryStore
from nats_use import new_store

from penstock.batch import UpdateBatch
from penstock.errors import NotConnected, ReplacedError
from penstock.fold import AppliedWatch, BatchConfig, WatchScope
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.kv.nats.bucket import NatsKvStore
from penstock.kv.nats.watch import NatsWatch
from penstock.testing.nats import NatsServer

ALL = WatchScope.all()
QUICK = BatchConfig(window_seconds=0.005)


@pytest.fixture
async def bucket(connection: NatsConnection) -> NatsKvStore:
    return await new_store(connection, history=5)


class Folding:
    """A fold in the background, and the keys it was given."""

    def __init__(self, bucket: NatsKvStore, store: Any, scope: WatchScope = ALL, *, reader: bool = True) -> None:
        self.keys: list[str] = []
        self.store = store
        self.stop = asyncio.Event()
        self.run = AppliedWatch(
            bucket.watcher, scope, apply=self._apply, store=store,
            reader=bucket.reader if reader else None, config=QUICK, stop=self.stop,
        )  # fmt: skip
        self.task = asyncio.create_task(self.run.run())

    def _apply(self, batch: UpdateBatch) -> None:
        self.keys += [update.key for update in batch]

    async def reaches(self, revision: int) -> None:
        async with asyncio.timeout(60):
            while (self.store.revision or 0) < revision and not self.task.done():
                await asyncio.sleep(0.005)
        if self.task.done():
            self.task.result()

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(60):
            await self.task


@contextlib.asynccontextmanager
async def folding(*args: Any, **settings: Any) -> AsyncIterator[Folding]:
    fold = Folding(*args, **settings)
    try:
        yield fold
    finally:
        await fold.end()


async def live(bucket: NatsKvStore, prefix: str = "") -> dict[str, bytes]:
    return {entry.key: entry.value for entry in await bucket.reader.entries(prefix)}


async def last_revision(bucket: NatsKvStore) -> int:
    return (await bucket._api.info()).state.last_seq


async def lose_history(bucket: NatsKvStore) -> None:
    """Delete a key and make the bucket forget that it did; write something, so that the cursor is behind."""
    await bucket.writer.delete("node.gone")
    await bucket.writer.put("node.stays", b"2")
    await bucket._api.call(f"STREAM.PURGE.{bucket._api.stream}", {"seq": await last_revision(bucket)})


async def test_a_fold_follows_its_bucket_and_a_restart_gets_the_delta_only(bucket: NatsKvStore) -> None:
    store = MemoryStore()
    await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(300))
    async with folding(bucket, store) as first:
        await first.reaches(300)
        async with asyncio.timeout(60):
            while not first.run.hydrated:
                await asyncio.sleep(0.005)
        assert first.run.lag == 0
        await bucket.writer.delete("k.7")
        await bucket.writer.put("k.8", b"new")
        await first.reaches(302)
    assert store.entries == await live(bucket)
    await bucket.writer.put("k.9", b"newer")
    await bucket.writer.delete("k.10")
    async with folding(bucket, store) as second:
        await second.reaches(304)
    assert second.keys == ["k.9", "k.10"]
    assert store.entries == await live(bucket)


@pytest.mark.parametrize("scope", [ALL, WatchScope.prefix("node."), WatchScope.of(["node.", "x."])])
async def test_an_expired_cursor_is_repaired_and_nothing_stale_stays(bucket: NatsKvStore, scope: WatchScope) -> None:
    store = MemoryStore()
    await bucket.writer.put_many([("node.stays", b"1"), ("node.gone", b"1")])
    async with folding(bucket, store, scope) as first:
        await first.reaches(2)
    await lose_history(bucket)
    async with folding(bucket, store, scope) as second:
        await second.reaches(await last_revision(bucket))
        assert second.run.resyncs == 1
    assert store.entries == await live(bucket) == {"node.stays": b"2"}


async def test_without_a_reader_a_vanished_key_stays(bucket: NatsKvStore) -> None:
    store = MemoryStore()
    await bucket.writer.put_many([("node.stays", b"1"), ("node.gone", b"1")])
    async with folding(bucket, store, reader=False) as first:
        await first.reaches(2)
    await lose_history(bucket)
    async with folding(bucket, store, reader=False) as second:
        await second.reaches(await last_revision(bucket))
    assert store.entries.keys() == {"node.stays", "node.gone"}


async def test_a_live_fold_overrun_by_retention_repairs_itself(
    bucket: NatsKvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NatsWatch.__init__.__kwdefaults__, "heartbeat_seconds", 0.1)
    store = MemoryStore()
    await bucket.writer.put_many([("node.stays", b"1"), ("node.gone", b"1")])
    async with folding(bucket, store) as fold:
        await fold.reaches(2)
        watch = fold.run._watch
        assert isinstance(watch, NatsWatch)
        await bucket._api.delete_consumer(watch._consumer)  # it hears nothing while history passes by
        await lose_history(bucket)
        await fold.reaches(await last_revision(bucket))
        assert fold.run.resyncs == 1
    assert store.entries == await live(bucket) == {"node.stays": b"2"}


async def test_a_prefix_fold_overrun_by_retention_hears_of_it_at_the_next_start(bucket: NatsKvStore) -> None:
    """Its gaps are normal, so a running watch of a prefix cannot tell; the cursor it left behind can."""
    store, scope = MemoryStore(), WatchScope.prefix("node.")
    await bucket.writer.put_many([("node.stays", b"1"), ("node.gone", b"1")])
    async with folding(bucket, store, scope) as first:
        await first.reaches(2)
        watch = first.run._watch
        assert isinstance(watch, NatsWatch)
        await bucket._api.delete_consumer(watch._consumer)  # it hears nothing while history passes by
        await lose_history(bucket)
        assert (first.run.resyncs, store.revision) == (0, 2)
        assert store.entries.keys() == {"node.stays", "node.gone"}
    async with folding(bucket, store, scope) as second:
        await second.reaches(await last_revision(bucket))
        assert second.run.resyncs == 1
    assert store.entries == await live(bucket, "node.") == {"node.stays": b"2"}


async def test_a_recreated_bucket_stops_the_fold(connection: NatsConnection, bucket: NatsKvStore) -> None:
    store = MemoryStore()
    await bucket.writer.put_many((f"k{n}", b"v") for n in range(5))
    async with folding(bucket, store) as first:
        await first.reaches(5)
    await bucket._api.call(f"STREAM.DELETE.{bucket._api.stream}")
    again = await connection.store_with_config(StoreConfig(name=bucket.name))
    await again.writer.put("a", b"1")
    with pytest.raises(ReplacedError):
        await AppliedWatch(again.watcher, ALL, apply=lambda batch: None, store=store).run()
    assert store.revision == 5


async def test_a_fold_goes_on_after_a_crash_of_the_server(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path)) as server:
        async with NatsConnection(NatsOptions(url=server.url)) as connection:
            bucket = await connection.store("crash")
            store = MemoryStore()
            await bucket.writer.put("a", b"1")
            async with folding(bucket, store) as fold:
                await fold.reaches(1)
                server.stop()
                server.start()
                with pytest.raises(NotConnected):  # it was under way when the connection broke
                    await bucket.writer.put("b", b"1")
                await bucket.writer.put("b", b"2")
                await fold.reaches(2)
            assert store.entries == {"a": b"1", "b": b"2"}
            assert fold.keys == ["a", "b"]
