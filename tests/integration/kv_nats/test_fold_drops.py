"""What a bucket drops without a change (age, discard=old, a purge by an administrator) leaves its folds too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats_use import new_store, watch_of

from penstock.batch import UpdateBatch
from penstock.errors import ReplacedError
from penstock.fold import AppliedWatch, BatchConfig, WatchScope
from penstock.kv import NatsConnection, NatsOptions
from penstock.kv.nats.bucket import NatsKvStore
from penstock.kv.nats.wire import bucket_body
from penstock.kv.roles import StoreConfig
from penstock.lifecycle import State
from penstock.store import AppendLogStore
from penstock.testing.nats import NatsServer
from penstock.types import Op

ALL = WatchScope.all()
QUICK = BatchConfig(window_seconds=0.005, reconcile_seconds=0.1)


class Mirror:
    """A fold that also keeps a dict, as an application would."""

    def __init__(self, bucket: NatsKvStore, store: AppendLogStore | None, scope: WatchScope = ALL) -> None:
        self.view: dict[str, bytes] = {}
        self.stop = asyncio.Event()
        self.run = AppliedWatch(
            bucket.watcher, scope, apply=self._apply, store=store, reader=bucket.reader, config=QUICK, stop=self.stop
        )
        self.task = asyncio.create_task(self.run.run())

    def _apply(self, batch: UpdateBatch) -> None:
        for update in batch:
            if update.op is Op.PUT:
                self.view[update.key] = update.value
            else:
                self.view.pop(update.key, None)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition() and not self.task.done():
                await asyncio.sleep(0.005)
        if self.task.done():
            self.task.result()


@contextlib.asynccontextmanager
async def mirror(*args: Any, **settings: Any) -> AsyncIterator[Mirror]:
    fold = Mirror(*args, **settings)
    try:
        yield fold
    finally:
        fold.stop.set()
        async with asyncio.timeout(60):
            await fold.task


async def equal(bucket: NatsKvStore, store: AppendLogStore, prefix: str = "") -> None:
    """Wait until the store has exactly what the bucket has."""
    async with asyncio.timeout(60):
        while True:
            theirs = {e.key: (e.value, e.version) for e in await bucket.reader.entries(prefix)}
            ours = {e.key: (e.value, e.version) for e in store.range(prefix)}
            if ours == theirs:
                return
            await asyncio.sleep(0.02)


async def without_markers(connection: NatsConnection, **settings: Any) -> NatsKvStore:
    """Make a bucket as an old server or another client would: nothing is said about what is dropped."""
    store = await new_store(connection)
    name = f"{store.name}x"
    body = bucket_body(StoreConfig(name=name, **settings), deny_delete=False)
    for field in ("subject_delete_marker_ttl", "allow_msg_ttl"):
        body.pop(field, None)
    await store._api.call(f"STREAM.CREATE.KV_{name}", body)
    return await connection.store(name)  # type: ignore[return-value]


async def drop(bucket: NatsKvStore, **body: Any) -> None:
    await bucket._api.call(f"STREAM.PURGE.{bucket._api.stream}", body)


@pytest.mark.parametrize("markers", [True, False])
async def test_keys_that_went_by_age_leave_the_fold(connection: NatsConnection, tmp_path: Path, markers: bool) -> None:
    make = new_store if markers else without_markers
    bucket = await make(connection, max_age_seconds=1.5)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store) as fold:
            await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(20))
            await fold.until(lambda: len(fold.view) == 20)
            await fold.until(lambda: not fold.view)
            await equal(bucket, store)
            assert store.count() == 0


async def test_a_bucket_made_here_says_itself_what_went_by_age(connection: NatsConnection) -> None:
    bucket = await new_store(connection, max_age_seconds=1.0)
    async with await bucket.watcher.watch_all() as watch:
        await bucket.writer.put("a", b"1")
        found: list[Any] = []
        async with asyncio.timeout(60):
            while len(found) < 2:
                found += list(await watch.next_batch())
    assert [(update.op, update.key) for update in found] == [(Op.PUT, "a"), (Op.PURGE, "a")]


async def test_keys_that_a_full_bucket_discarded_leave_the_fold(connection: NatsConnection, tmp_path: Path) -> None:
    bucket = await new_store(connection, max_bytes=20_000, discard="old")
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store):
            for n in range(0, 400, 20):
                await bucket.writer.put_many((f"k.{m}", b"x" * 100) for m in range(n, n + 20))
            await equal(bucket, store)
            assert 0 < store.count() < 400


@pytest.mark.parametrize("scope", [ALL, WatchScope.prefix("k."), WatchScope.of(["k.", "x."])])
async def test_keys_that_were_purged_leave_the_fold(
    connection: NatsConnection, tmp_path: Path, scope: WatchScope
) -> None:
    bucket = await new_store(connection)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store, scope=scope) as fold:
            await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(21))
            await fold.until(lambda: len(fold.view) == 21)
            await drop(bucket, filter=f"$KV.{bucket.name}.k.7")
            await fold.until(lambda: len(fold.view) == 20)
            assert "k.7" not in fold.view
            await drop(bucket)
            await bucket.writer.put("k.new", b"1")
            await fold.until(lambda: set(fold.view) == {"k.new"})
            await equal(bucket, store, "k.")


async def test_what_was_dropped_while_a_fold_was_away_is_gone_before_it_says_it_is_hydrated(
    connection: NatsConnection, tmp_path: Path
) -> None:
    bucket = await new_store(connection)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store) as fold:
            await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(20))
            await fold.until(lambda: fold.run.hydrated and len(fold.view) == 20)
        await drop(bucket)
        async with mirror(bucket, store) as again:
            await again.until(lambda: again.run.hydrated)
            assert store.count() == 0


async def test_a_value_that_came_back_from_history_comes_back_in_the_fold(
    connection: NatsConnection, tmp_path: Path
) -> None:
    bucket = await without_markers(connection, history=5)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store) as fold:
            await bucket.writer.put("a", b"old")
            await bucket.writer.put("b", b"there")
            newest = await bucket.writer.put("a", b"new")
            await bucket.writer.delete("b")
            await fold.until(lambda: fold.view == {"a": b"new"})
            for sequence in (newest.as_int(), 4):
                await bucket._api.call(f"STREAM.MSG.DELETE.{bucket._api.stream}", {"seq": sequence})
            await fold.until(lambda: fold.view == {"a": b"old", "b": b"there"})
            await equal(bucket, store)
            assert fold.run.applied.token.as_int() == 4
            assert store.cursor().token.as_int() == 4


async def test_a_fold_without_a_store_drops_them_too(connection: NatsConnection) -> None:
    bucket = await new_store(connection)
    async with mirror(bucket, None) as fold:
        await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(20))
        await fold.until(lambda: len(fold.view) == 20)
        await drop(bucket)
        await fold.until(lambda: not fold.view)


async def test_a_bucket_that_loses_nothing_is_not_listed_again(
    connection: NatsConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = await new_store(connection)
    listed = 0
    real = bucket.reader.revisions

    async def counted(prefix: str = "") -> UpdateBatch:
        nonlocal listed
        listed += 1
        return await real(prefix)

    monkeypatch.setattr(bucket.reader, "revisions", counted)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store) as fold:
            await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(20))
            await fold.until(lambda: len(fold.view) == 20)
            before = fold.run.looks
            await fold.until(lambda: fold.run.looks > before + 3)
        assert listed == 0


async def test_a_server_that_is_away_shows_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "nats").mkdir()
    caplog.set_level(logging.WARNING, "penstock")
    with NatsServer(str(tmp_path / "nats")) as server, AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with NatsConnection(NatsOptions(url=server.url)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name="b"))
            async with mirror(bucket, store) as fold:
                await bucket.writer.put("a", b"1")
                await fold.until(lambda: fold.view and fold.run.hydrated)
                assert fold.run.lag == 0
                assert fold.run.health().state is State.READY
                server.stop()
                await fold.until(lambda: fold.run.lag is None)
                assert not fold.run.hydrated
                assert fold.run.health().state is State.DEGRADED
                await fold.until(lambda: "away" in caplog.text)
                server.start()
                await fold.until(lambda: fold.run.hydrated)
                assert fold.run.lag == 0
                await fold.until(lambda: "back" in caplog.text)
                assert fold.view == {"a": b"1"}


async def test_a_server_that_says_nothing_is_away_after_two_heartbeats(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path)) as server:
        async with NatsConnection(NatsOptions(url=server.url)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name="b"))
            await bucket.writer.put("a", b"1")
            watch = watch_of(bucket, None, heartbeat_seconds=0.2)
            await watch.attach()
            assert len(await watch.next_batch()) == 1
            waiting = asyncio.create_task(watch.next_batch())
            server.pause()  # the connection stands, and nothing comes
            async with asyncio.timeout(60):
                while watch.in_touch:
                    await asyncio.sleep(0.01)
            server.resume()
            await bucket.writer.put("b", b"2")
            assert [update.key for update in await asyncio.wait_for(waiting, 60)] == ["b"]
            assert watch.in_touch
            await watch.aclose()


async def test_a_bucket_made_again_behind_the_back_of_a_fold_is_noticed(
    connection: NatsConnection, tmp_path: Path
) -> None:
    bucket = await new_store(connection)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with mirror(bucket, store) as fold:
            await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(20))
            await fold.until(lambda: len(fold.view) == 20)
        assert await connection.delete(bucket.name)
        again = await connection.store_with_config(StoreConfig(name=bucket.name))
        await again.writer.put_many((f"k.{n}", b"%d" % n) for n in range(40))
        late = Mirror(again, store)
        with pytest.raises(ReplacedError, match="made again"):
            await asyncio.wait_for(late.task, 60)
        assert store.count() == 20
