"""A store belongs to one fold at a time: two would take its cursor back and forth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import LockedError
from penstock.fold import AppliedWatch, Follow, WatchScope, follow
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.store import AppendLogStore


def make_log(path: Path, count: int = 10) -> None:
    with MessageLog.open(path, MessageLogOptions(content=CONTENT)) as log:
        for n in range(count):
            log.append(encode_envelope(Envelope(b"k.%d" % n, b"%d" % n)))


async def test_a_second_fold_on_one_open_store_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path / "log")
    async with EmbeddedConnection(tmp_path / "buckets") as connection:
        bucket = await connection.store_with_config(StoreConfig(name="b"))
        await bucket.writer.put("a", b"1")
        with AppendLogStore.open(tmp_path / "fold.snap") as store, open_log(tmp_path / "log") as log:
            stop, ready = asyncio.Event(), asyncio.Event()
            first = AppliedWatch(
                bucket.watcher, WatchScope.all(), apply=lambda _: ready.set(), store=store, stop=stop, name="first"
            )
            running = asyncio.create_task(first.run())
            await asyncio.wait_for(ready.wait(), 60)
            with pytest.raises(LockedError, match="first"):
                await AppliedWatch(bucket.watcher, WatchScope.all(), apply=print, store=store).run()
            with pytest.raises(LockedError, match="first"):
                await follow(log, store, once=True)
            stop.set()
            cursor = await running
            assert store.cursor() == cursor


async def test_a_store_is_free_again_when_its_fold_has_ended(tmp_path: Path) -> None:
    make_log(tmp_path / "log")
    with AppendLogStore.open(tmp_path / "fold.snap") as store, open_log(tmp_path / "log") as log:
        first, second = Follow(log, store), Follow(log, store)
        await first.step()
        with pytest.raises(LockedError):
            await second.step()
        first.close()
        assert await second.run(once=True) == store.cursor()
        assert await follow(log, store, once=True) == store.cursor()


async def test_a_fold_that_failed_lets_go_of_its_store(tmp_path: Path) -> None:
    make_log(tmp_path / "log")

    def broken(_batch: object) -> None:
        raise ValueError("no")

    with AppendLogStore.open(tmp_path / "fold.snap") as store, open_log(tmp_path / "log") as log:
        with pytest.raises(ValueError, match="no"):
            await follow(log, store, broken, once=True)  # type: ignore[arg-type]
        await follow(log, store, once=True)
        assert store.count() == 10
