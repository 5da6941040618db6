"""Promise: what a release has written is read by every later one, and goes on.

The archives of tests/vectors/released were written by the releases of their names (tests/support/released.py).
"""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructType
from released import ANN, ARCHIVES, changes, folded, make, payloads

from penstock.artifact import import_artifact, verify_artifact
from penstock.channels import ChannelManager
from penstock.disk import object_store_for
from penstock.fold import follow
from penstock.kv import EmbeddedConnection
from penstock.log.detect import open_log, open_writer
from penstock.log.filechannel import FileChannel
from penstock.log.xchannel import Reader
from penstock.ship import Shipper, open_shipped
from penstock.spark.source.table import PenstockSource
from penstock.store import AppendLogStore, open_store
from penstock.types import KvUpdate, WatchCursor

RELEASES = sorted(path.name.removesuffix(".tar.gz") for path in ARCHIVES.glob("*.tar.gz"))


def test_there_is_an_archive_of_a_release() -> None:
    assert "0.1.0" in RELEASES


@pytest.fixture(params=[*RELEASES, "now"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "now":  # so that the archive of the next release will be readable as well
        make(tmp_path / "now")
    else:
        with tarfile.open(ARCHIVES / f"{request.param}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param


def contents(path: Path) -> list[bytes]:
    with open_log(path) as log:
        assert list(log.verify()) == []
        found, position = [], log.first_position
        while len(batch := log.read(position)):
            found += batch.to_payloads()
            position = batch.next_position
    return found


@pytest.mark.parametrize(
    ("name", "count"), [("ticks", 150), ("ops", 60), ("jobs-none", 60), ("jobs-snappy", 60), ("jobs-gzip", 60)]
)
def test_logs_are_read_and_appended_to(root: Path, name: str, count: int) -> None:
    assert contents(root / name) == payloads(count)
    with open_log(root / name) as log:
        kind = log.format
    with open_writer(root / name, format=kind) as writer:
        writer.append_many([b"and on", b"and on"])
    assert contents(root / name) == [*payloads(count), b"and on", b"and on"]


def test_names_and_groups_go_on_where_they_were(root: Path) -> None:
    with Reader.open(root / "ticks", name="audit") as reader:
        found = [bytes(record.payload) for record in reader.records(timeout=0)]
        assert found == payloads(150)[25:]
    for name in ("jobs-none", "jobs-snappy", "jobs-gzip"):
        with FileChannel.open(root / name) as queue:
            assert queue.ack_rx("billing").recv_many().to_payloads()[0] == payloads()[10]
            group = queue.group("workers")
            jobs = group.take_many(60)
            assert [bytes(job.payload) for job in jobs] == payloads()[3:]
            assert [job.tries for job in jobs[:3]] == [2, 2, 1]


def test_buckets_are_read_and_written_and_watched(root: Path) -> None:
    async def work() -> None:
        connection = EmbeddedConnection(str(root / "buckets"))
        await connection.connect()
        bucket = await connection.store("state")
        expected = {**folded(), "lease": b"held"}
        found = {update.key: update.value for update in await bucket.reader.scan()}
        assert found == expected
        assert [update.value for update in await bucket.reader.history("k01")] == [b"v1", b"v21", b"v41"]
        watch = await bucket.watcher.watch_all_from(WatchCursor.of(30))
        token = await bucket.writer.put("new", b"value")
        assert token.as_int() == 65
        seen = 0
        while seen < 65:
            seen = int((await watch.next_batch()).revisions()[-1])
        await watch.aclose()
        await connection.shutdown()

    asyncio.run(work())


@pytest.mark.parametrize("backend", ["append-log", "lmdb", "rocksdb"])
def test_stores_are_read_and_applied_to(root: Path, backend: str) -> None:
    expected = {f"k{n:02}": b"v%d" % n for n in range(20) if n != 3}
    with open_store(root / f"store-{backend}") as store:
        assert {entry.key: entry.value for entry in store.range()} == expected
        assert store.cursor().token.as_int() == 21
        digest = store.digest()
    with open_store(root / f"store-{backend}", read_only=False) as store:
        assert store.digest() == digest
        store.apply([KvUpdate.put("new", b"value", 22)], WatchCursor.of(22))
    with open_store(root / f"store-{backend}") as store:
        assert store.count() == 20


def test_an_artifact_is_verified_and_imported(root: Path, tmp_path: Path) -> None:
    assert verify_artifact(root / "artifact") == []
    import_artifact(root / "artifact", tmp_path / "imported")
    with open_store(tmp_path / "imported") as store, open_store(root / "store-append-log") as source:
        assert store.digest() == source.digest()


def test_a_fold_goes_on(root: Path) -> None:
    assert contents(root / "changes") == changes()
    with AppendLogStore.open(root / "fold.snap") as store:
        assert {entry.key: entry.value for entry in store.range()} == folded()
        with open_writer(root / "changes", format="messagelog") as writer:
            writer.append(changes()[0])
        with open_log(root / "changes") as log:
            asyncio.run(follow(log, store, once=True))
        assert store.get("k00") is not None


def test_channels_with_members_go_on(root: Path) -> None:
    async def work() -> None:
        async with await ChannelManager.open(str(root / "channels")) as manager:
            assert manager.broken == {}
            room, jobs = manager.channel("room"), manager.channel("jobs")
            assert [entry.payload for entry in await room.history(ANN)] == payloads(20)
            assert [str(nid) for nid in await room.allowed(ANN, "publish")] == [ANN]
            assert await room.broadcast(ANN, b"and on") == 21
            assert await jobs.length(ANN) == 4
            assert (await jobs.pop(ANN)).payload == payloads()[1]

    asyncio.run(work())


def test_a_shipped_log_is_read_and_shipped_on(root: Path) -> None:
    with open_shipped(root / "up" / "ops") as log:
        shipped = log.next_position - 1
        found, position = [], log.first_position
        while len(batch := log.read(position)):
            found += batch.to_payloads()
            position = batch.next_position
    assert found == payloads()[:shipped]
    with open_writer(root / "ops", format="messagelog") as writer:
        writer.append(b"and on")
        writer.roll()
    with Shipper(root / "ops", object_store_for(root / "up"), node="edge-1") as shipper:
        while shipper.step():
            pass
        assert shipper.head.next == 62


def test_an_offset_of_spark_is_resumed(root: Path) -> None:
    start = json.loads((root / "spark-offset.json").read_text())
    stream: Any = PenstockSource({"path": str(root / "ticks")}).streamReader(StructType().add("payload", BinaryType()))
    end = stream.latestOffset(start, ReadAllAvailable())
    found = [
        row["payload"]
        for task in stream.partitions(start, end)
        for batch in stream.read(task)
        for row in batch.to_pylist()
    ]
    stream.stop()
    assert found == payloads(150)[100:]
