"""Promise: what Spark folds is, entry by entry, what the fold of one process is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import pipeline
from penstock.errors import ExpiredError, OptionsError, PenstockError, ReplacedError
from penstock.fold import follow
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log.detect import open_log, open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.pipelines.fold import FILLING, fold, fold_into, latest
from penstock.spark.sink.records import enveloped
from penstock.store import AppendLogStore, open_store
from penstock.testing.nats import NatsServer
from penstock.types import Op


def changes(seed: int, count: int, keys: int) -> list[bytes]:
    chance = random.Random(seed)
    made = []
    for number in range(count):
        op = chance.choices((Op.PUT, Op.DELETE, Op.PURGE), (8, 2, 1))[0]
        value = b"" if op else b"value %d " % number * chance.randrange(4)
        made.append(encode_envelope(Envelope(b"key.%d" % chance.randrange(keys), value, op, event_time_ns=number)))
    return made


def followed(log: str, store: Path) -> tuple[Any, ...]:
    with open_log(log) as reader, AppendLogStore.open(store) as target:
        asyncio.run(follow(reader, target, once=True))
    return state_of(str(store))


def state_of(path: str) -> tuple[Any, ...]:
    with open_store(path) as store:
        return store.cursor(), store.digest(), store.range()


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
def test_a_fold_on_spark_is_the_fold_of_one_process(spark: Any, tmp_path: Path, format: str) -> None:
    log, store = str(tmp_path / "log"), str(tmp_path / "spark.snap")
    writer = open_writer(log, format=format, content=CONTENT)
    try:
        writer.append_many(changes(1, 3000, 200))
        summary = fold_into(spark, log, store)
        first = followed(log, tmp_path / "one.snap")
        assert state_of(store) == first
        assert (summary.records, summary.entries, summary.digest) == (3000, len(first[2]), first[1])
        assert fold_into(spark, log, store).records == 0  # nothing new changes nothing
        assert state_of(store) == first
        writer.append_many(changes(2, 500, 300))  # an increment, deletes of known and of unknown keys in it
        assert fold_into(spark, log, store).records == 500
        assert state_of(store) == followed(log, tmp_path / "one.snap") != first
        writer.append_many(changes(3, 50, 300))
        assert followed(log, Path(store)) == followed(log, tmp_path / "one.snap")  # follow goes on with what Spark left
    finally:
        writer.close()


@pytest.mark.parametrize("backend", ["rocksdb", "lmdb"])
def test_the_command_folds_into_any_backend(spark: Any, tmp_path: Path, backend: str) -> None:
    log, store = str(tmp_path / "log"), str(tmp_path / "store")
    with Writer.open(log, content=CONTENT) as writer:
        writer.append_many(changes(4, 400, 50))
    said = json.loads(run("fold", log, "--store", store, "--backend", backend, "--json").stdout)
    expected = followed(log, tmp_path / "one.snap")
    assert state_of(store) == expected
    assert said["digest"] == expected[1]


def test_keys_of_many_channels_go_to_a_table(spark: Any, tmp_path: Path) -> None:
    expected = {}
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        with Writer.open(tmp_path / "in" / name, content=CONTENT) as writer:
            writer.append_many(changes(ord(name), 300, 40))
        for entry in followed(str(tmp_path / "in" / name), tmp_path / f"{name}.snap")[2]:
            expected[name, entry.key] = (entry.value, entry.version.as_int())
    run("fold", str(tmp_path / "in"), "--table", str(tmp_path / "table"))
    rows = lake.read(spark, str(tmp_path / "table")).collect()
    found = {(row["channel"], row["key"].decode()): (bytes(row["value"]), row["version"]) for row in rows}
    assert found == expected


def test_a_bucket_is_folded_from_its_log_with_what_has_expired(spark: Any, tmp_path: Path) -> None:
    async def fill() -> None:
        async with EmbeddedConnection(str(tmp_path)) as connection:
            writer = (await connection.store_with_config(StoreConfig(name="b"))).writer
            assert writer is not None
            await writer.put("stays", b"1")
            await writer.put_with_ttl("soon", b"2", 0.05)
            await writer.put_with_ttl("later", b"3", 3600)
            await writer.put_with_ttl("renewed", b"4", 0.05)
            await writer.put("renewed", b"5")
            await writer.delete("stays")
            await writer.put("other", b"6")

    asyncio.run(fill())
    time.sleep(0.1)
    log = str(tmp_path / "b" / "log")
    fold_into(spark, log, str(tmp_path / "spark.snap"))
    assert state_of(str(tmp_path / "spark.snap")) == followed(log, tmp_path / "one.snap")
    frame = spark.read.format("penstock").load(log)

    def live(now_ns: int | None) -> set[str]:
        return {bytes(row["key"]).decode() for row in fold(frame, now_ns=now_ns).collect()}

    assert live(None) == {"soon", "later", "renewed", "other"}
    assert live(time.time_ns()) == {"later", "renewed", "other"}
    assert live(time.time_ns() + 3700 * 10**9) == {"renewed", "other"}

    async def expire() -> set[str]:
        async with EmbeddedConnection(str(tmp_path)) as connection:
            bucket = await connection.store("b")
            assert bucket.writer is not None
            await bucket.writer.put("other", b"7")  # a turn of writing purges what has expired
            return set(await bucket.reader.keys())

    assert asyncio.run(expire()) == {"later", "renewed", "other"}
    fold_into(spark, log, str(tmp_path / "spark.snap"))
    assert state_of(str(tmp_path / "spark.snap")) == followed(log, tmp_path / "one.snap")
    assert [entry.key for entry in state_of(str(tmp_path / "spark.snap"))[2]] == ["later", "other", "renewed"]


def test_a_fold_that_died_half_way_is_begun_again(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, store = str(tmp_path / "log"), str(tmp_path / "spark.snap")
    with Writer.open(log, content=CONTENT) as writer:
        writer.append_many([encode_envelope(Envelope(b"k%d" % n, b"1")) for n in range(10)])
        applied = AppendLogStore.apply

        def dies_at_the_cursor(self: Any, updates: Any, cursor: Any) -> None:
            if cursor != FILLING:
                raise KeyboardInterrupt
            applied(self, updates, cursor)

        with monkeypatch.context() as patch:
            patch.setattr(AppendLogStore, "apply", dies_at_the_cursor)
            with pytest.raises(KeyboardInterrupt):
                fold_into(spark, log, store)
        assert state_of(store)[0] == FILLING
        with pytest.raises(OptionsError, match="no position of a log"):  # follow cannot tell what of it is true
            followed(log, Path(store))
        writer.append(encode_envelope(Envelope(b"k0", b"", Op.DELETE)))
        fold_into(spark, log, store)
        assert state_of(store) == followed(log, tmp_path / "one.snap")
        assert not [path.name for path in tmp_path.iterdir() if "staged" in path.name]


def test_a_fold_refuses_what_it_cannot_go_on_with(spark: Any, tmp_path: Path) -> None:
    log, store = str(tmp_path / "log"), str(tmp_path / "s.snap")
    with Writer.open(tmp_path / "raw") as raw:
        raw.append(b"x")
    with pytest.raises(OptionsError, match="no envelopes"):
        fold_into(spark, str(tmp_path / "raw"), str(tmp_path / "r.snap"))
    with pytest.raises(Exception, match="a record has no key"):
        fold(spark.read.format("penstock").load(str(tmp_path / "raw"))).collect()
    with pytest.raises(OptionsError, match="no column position, payload"):
        latest(spark.sql("select 'a' key"))
    with Writer.open(log, content=CONTENT, region_bytes=4096, roll_bytes=8192, keep_files=2) as writer:
        writer.append_many(changes(5, 20, 10))
        fold_into(spark, log, store)
        for _ in range(20):
            writer.append_many(changes(6, 100, 10))
        with pytest.raises(ExpiredError):
            fold_into(spark, log, store)
    for path in tmp_path.glob("log*"):
        path.unlink()
    with Writer.open(log, content=CONTENT) as writer:
        writer.append_many(changes(7, 500, 10))
    with pytest.raises(ReplacedError):
        fold_into(spark, log, store)
    with pytest.raises(OptionsError, match="--store or --table"):
        run("fold", log)


@pytest.mark.parametrize("first", ["spark", "follow"])
def test_a_log_whose_backup_came_back_and_went_on_is_refused_by_both(spark: Any, tmp_path: Path, first: str) -> None:
    log, kept, store = str(tmp_path / "log"), str(tmp_path / "kept"), str(tmp_path / "s.snap")
    with MessageLog.open(log, content=CONTENT) as writer:
        writer.append_many(changes(8, 50, 10))
        shutil.copytree(log, kept)
        writer.append_many(changes(9, 50, 10))
    if first == "spark":
        fold_into(spark, log, store)
    else:
        followed(log, Path(store))
    before = state_of(store)
    shutil.rmtree(log)
    os.rename(kept, log)
    with MessageLog.open(log) as writer:
        writer.append_many(changes(10, 100, 20))
    with pytest.raises(ReplacedError, match="record at 100"):
        fold_into(spark, log, store)
    with pytest.raises(ReplacedError, match="record at 100"):
        followed(log, Path(store))
    assert state_of(store) == before


def test_a_stream_reaches_a_bucket_and_a_repeated_batch_changes_nothing(spark: Any, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    with Writer.open(log, content=CONTENT) as writer:
        writer.append_many(changes(8, 400, 30))
    expected = {entry.key: entry.value for entry in followed(log, tmp_path / "one.snap")[2]}
    with NatsServer(str(tmp_path)) as server:
        for place in (str(tmp_path / "buckets"), server.url):
            found = []
            for attempt in ("first", "second"):  # without its checkpoint every batch is repeated
                query = (
                    spark.readStream.format("penstock")
                    .option("maxRecordsPerTrigger", 400)
                    .load(log)
                    .select("key", "payload", "op")
                    .writeStream.format("penstock")
                    .option("bucket", "devices")
                    .option("checkpointLocation", str(tmp_path / attempt / place.replace("/", "_")))
                    .trigger(availableNow=True)
                    .start(place)
                )
                assert query.awaitTermination(120)
                assert query.exception() is None, query.exception()
                found.append(asyncio.run(bucket_entries(place)))
            assert {key: value for key, (value, _) in found[0].items()} == {k: v for k, v in expected.items() if v}
            assert found[0] == found[1]


async def bucket_entries(place: str) -> dict[str, tuple[bytes, int | None]]:
    from penstock.spark.sink.bucket import BucketOptions

    async with BucketOptions(place=place, bucket="devices").connection() as connection:
        found = await (await connection.store("devices")).reader.entries()
        return {entry.key: (entry.value, entry.version.as_int()) for entry in found}


@pytest.mark.timeout(1800)
def test_ten_million_updates_of_a_million_keys(spark: Any, tmp_path: Path, long_run: bool) -> None:
    if not long_run:
        pytest.skip("the long form takes minutes: --long")
    log, count, keys = str(tmp_path / "log"), 10_000_000, 1_000_000
    chance = np.random.default_rng(7)
    with Writer.open(log, content=CONTENT, roll_bytes=256 << 20, region_bytes=16 << 20) as writer:
        for start in range(0, count, 500_000):
            numbers = np.arange(start, start + 500_000)
            ops = chance.choice([0, 0, 0, 0, 0, 0, 0, 1, 1, 2], 500_000)
            columns = {
                "key": [b"key.%d" % n for n in chance.integers(0, keys, 500_000).tolist()],
                "op": pa.array(ops, pa.int32()),
                "event_time_ns": pa.array(numbers),
            }
            values = pa.array([b"value %d" % n if not op else b"" for n, op in zip(numbers, ops, strict=True)])
            writer.append_many(enveloped(pa.RecordBatch.from_pydict(columns), values))
    summary = fold_into(spark, log, str(tmp_path / "spark.snap"))
    assert summary.records == count
    assert state_of(str(tmp_path / "spark.snap")) == followed(log, tmp_path / "one.snap")


def run(*words: str, code: int = 0) -> Any:
    app = typer.Typer()
    pipeline.register(app)
    done = CliRunner().invoke(app, ["pipeline", *words])
    if isinstance(done.exception, PenstockError):
        raise done.exception
    assert done.exit_code == code, (done.output, done.exception)
    return done
