"""Promise: a backup that is put back is noticed by whoever had read beyond it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptionError, ReplacedError
from penstock.fold import AppliedWatch, FollowOptions, WatchScope, each_record, follow
from penstock.kv import EmbeddedConnection, EmbeddedKvStore, StoreConfig
from penstock.log import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.node.erase import erase_in_bucket, erase_in_log
from penstock.store import AppendLogStore, LmdbStore
from penstock.types import KvUpdate, WatchCursor

OPTIONS = MessageLogOptions(content=CONTENT)


def append(path: Path, kind: str, start: int, count: int) -> None:
    records = [encode_envelope(Envelope(b"k.%d" % n, b"%d" % n)) for n in range(start, start + count)]
    with MessageLog.open(path, OPTIONS) if kind == "messagelog" else Writer.open(path) as log:
        for record in records:
            log.append(record)


def newest(batch: Any) -> Any:
    return each_record(lambda record: KvUpdate.put(f"at.{record.position}", bytes(record.payload)))(batch)


async def fold(folder: Path, store: Any, **options: Any) -> WatchCursor:
    with open_log(folder / "log") as log:
        return await follow(log, store, newest, once=True, options=FollowOptions(**options))


def copy(source: Path, target: Path) -> None:
    for path in list(target.parent.iterdir()):
        if path.name.startswith(target.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in list(source.parent.iterdir()):
        if path.name.startswith(source.name):
            to = target.parent / (target.name + path.name[len(source.name) :])
            shutil.copytree(path, to) if path.is_dir() else shutil.copy(path, to)


@pytest.mark.parametrize("backend", [AppendLogStore, LmdbStore])
@pytest.mark.parametrize("kind", ["messagelog", "xchannel"])
async def test_a_log_restored_from_a_backup_stops_the_fold_or_begins_it_again(
    tmp_path: Path, kind: str, backend: Any
) -> None:
    append(tmp_path / "log", kind, 0, 50)
    (tmp_path / "backup").mkdir()
    copy(tmp_path / "log", tmp_path / "backup" / "log")
    append(tmp_path / "log", kind, 50, 50)
    with backend.open(tmp_path / "fold.store") as store:
        await fold(tmp_path, store)
        assert store.count() == 100
        copy(tmp_path / "backup" / "log", tmp_path / "log")
        append(tmp_path / "log", kind, 1000, 100)
        with pytest.raises(ReplacedError, match=r"not the one that was read|no record can be read"):
            await fold(tmp_path, store)
        assert store.count() == 100
        await fold(tmp_path, store, on_replaced="restart")
        with open_log(tmp_path / "log") as log:
            wanted = {f"at.{record.position}": bytes(record.payload) for record in log.read(log.first_position)}
        assert {entry.key: entry.value for entry in store.range()} == wanted
        await fold(tmp_path, store)


async def test_a_log_that_only_grew_goes_on(tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "fold.store") as store:
        for n in range(5):
            append(tmp_path / "log", "messagelog", 10 * n, 10)
            await fold(tmp_path, store)
        assert store.count() == 50


async def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    append(tmp_path / "log", "messagelog", 0, 10)
    with AppendLogStore.open(tmp_path / "fold.store") as store:
        await fold(tmp_path, store)
        await fold(tmp_path, store)
        note = tmp_path / "fold.store.penstock-seen"
        note.write_bytes(b"\xff" * 1024)
        with pytest.raises(CorruptionError, match="penstock-seen"):
            await fold(tmp_path, store)


async def fold_bucket(bucket: EmbeddedKvStore, store: Any, until: int) -> None:
    stop = asyncio.Event()

    def reached(cursor: WatchCursor) -> None:
        if (cursor.token.as_int() or 0) >= until:
            stop.set()

    run = AppliedWatch(
        bucket.watcher, WatchScope.all(), apply=lambda _: None, store=store, reader=bucket.reader, stop=stop,
        on_applied=reached, name="b",
    )  # fmt: skip
    async with asyncio.timeout(60):
        await run.run()


@pytest.mark.parametrize("restored", [True, False])
async def test_a_bucket_restored_from_a_backup_or_made_again_stops_the_fold(tmp_path: Path, restored: bool) -> None:
    config = StoreConfig(name="b")
    async with EmbeddedConnection(tmp_path / "buckets") as connection:
        bucket = await connection.store_with_config(config)
        await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(50))
    shutil.copytree(tmp_path / "buckets", tmp_path / "backup")
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with EmbeddedConnection(tmp_path / "buckets") as connection:
            bucket = await connection.store_with_config(config)
            await fold_bucket(bucket, store, 50)
            await bucket.writer.put_many((f"k.{n}", b"%d" % n) for n in range(50, 100))
            await fold_bucket(bucket, store, 100)
            await bucket.writer.put("one.more", b"1")
            await fold_bucket(bucket, store, 101)
        shutil.rmtree(tmp_path / "buckets")
        if restored:
            shutil.copytree(tmp_path / "backup", tmp_path / "buckets")
        async with EmbeddedConnection(tmp_path / "buckets") as connection:
            bucket = await connection.store_with_config(config)
            await bucket.writer.put_many((f"other.{n}", b"%d" % n) for n in range(200))
            with pytest.raises(ReplacedError, match="restored" if restored else "made again"):
                await fold_bucket(bucket, store, 200)
        assert store.count() == 101


async def test_erasing_the_last_change_that_a_fold_saw_is_no_backup(tmp_path: Path) -> None:
    """What is erased in a bucket is a purge there, and whoever follows it learns of that."""
    config = StoreConfig(name="b")
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with EmbeddedConnection(tmp_path / "buckets") as connection:
            bucket = await connection.store_with_config(config)
            await bucket.writer.put("pump", b"1")
            await bucket.writer.put("ann", b"2")
            await fold_bucket(bucket, store, 2)
        assert erase_in_bucket(str(tmp_path / "buckets" / "b"), "ann") == 1
        async with EmbeddedConnection(tmp_path / "buckets") as connection:
            bucket = await connection.store_with_config(config)
            await fold_bucket(bucket, store, 3)
        assert list(store.keys()) == ["pump"]


async def test_erasing_the_last_record_that_a_fold_saw_is_no_backup(tmp_path: Path) -> None:
    append(tmp_path / "log", "messagelog", 0, 10)
    with AppendLogStore.open(tmp_path / "fold.store") as store:
        await fold(tmp_path, store)
        assert erase_in_log(str(tmp_path / "log"), b"k.9") == 1
        append(tmp_path / "log", "messagelog", 10, 10)
        await fold(tmp_path, store)
        assert store.count() == 20
