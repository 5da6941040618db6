"""The bucket sink as a Python object: tasks fold, the driver writes what differs, once or twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

from penstock.errors import OptionsError, RetryError, UnsupportedError
from penstock.kv import EmbeddedConnection
from penstock.kv.nats.bucket import NatsKvWriter
from penstock.spark.sink.bucket import BucketOptions, Upserts, fold_rows, rows_of
from penstock.spark.source.table import PenstockSource
from penstock.testing.nats import NatsServer

SCHEMA = StructType().add("key", StringType()).add("payload", StringType()).add("op", IntegerType())


def batch(*rows: tuple[str, str | None, int]) -> pa.RecordBatch:
    keys, payloads, ops = zip(*rows, strict=True)
    return pa.RecordBatch.from_pydict({"key": keys, "payload": payloads, "op": ops})


@pytest.fixture(params=["embedded", "nats"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "embedded":
        yield str(tmp_path / "buckets")
        return
    with NatsServer(str(tmp_path)) as server:
        yield server.url


def writer_of(place: str) -> Any:
    return PenstockSource({"path": place, "bucket": "devices"}).streamWriter(SCHEMA, False)


def entries(place: str) -> dict[str, tuple[bytes, int | None]]:
    async def read() -> dict[str, tuple[bytes, int | None]]:
        async with BucketOptions(place=place, bucket="devices").connection() as connection:
            found = await (await connection.store("devices")).reader.entries()
            return {entry.key: (entry.value, entry.version.as_int()) for entry in found}

    return asyncio.run(read())


def test_a_batch_that_is_repeated_changes_nothing(place: str) -> None:
    writer = writer_of(place)
    worker = cloudpickle.loads(cloudpickle.dumps(writer))
    messages = [
        worker.write(iter([batch(("a", "1", 0), ("b", "1", 0)), batch(("a", "2", 0))])),
        worker.write(iter(())),
        worker.write(iter([batch(("b", None, 1), ("c", "3", 0), ("gone", None, 2))])),
    ]
    writer.commit(messages, 0)
    once = entries(place)
    assert {key: value for key, (value, _) in once.items()} == {"a": b"2", "c": b"3"}
    writer.commit(messages, 0)
    assert entries(place) == once  # the revisions too
    writer.commit([worker.write(iter([batch(("a", "2", 0), ("c", None, 2), ("d", "4", 0))]))], 1)
    assert {key: value for key, (value, _) in entries(place).items()} == {"a": b"2", "d": b"4"}
    assert entries(place)["a"] == once["a"]


def test_a_batch_that_was_half_done_is_finished(place: str) -> None:
    writer = writer_of(place)
    writer.commit([writer.write(iter([batch(("a", "1", 0))]))], 0)  # what a driver that died has written of batch 0
    half = entries(place)
    assert writer.apply([writer.write(iter([batch(("a", "1", 0), ("b", "2", 0))]))]) == Upserts(put=1, same=1)
    assert entries(place)["a"] == half["a"]
    assert writer.apply([writer.write(iter([batch(("a", None, 1), ("x", None, 1))]))]) == Upserts(deleted=1, same=1)


def test_more_rows_than_are_in_flight_at_once(tmp_path: Path) -> None:
    writer = writer_of(str(tmp_path))
    rows = [batch(*((f"k.{n}", str(n), 0) for n in range(start, start + 100))) for start in range(0, 1000, 100)]
    assert writer.apply([writer.write(iter(rows)), writer.write(iter(rows[:1]))]) == Upserts(put=1000)
    assert entries(str(tmp_path))["k.777"][0] == b"777"


@pytest.mark.parametrize("bad", [b"\xff", b"", b"a b", b"x..y", b">"])
def test_a_key_that_no_bucket_can_have_is_refused_before_anything_is_written(tmp_path: Path, bad: bytes) -> None:
    schema = StructType().add("key", BinaryType()).add("value", BinaryType())
    writer = PenstockSource({"path": str(tmp_path), "bucket": "devices"}).streamWriter(schema, False)
    keys = [*(b"k.%d" % n for n in range(300)), bad]
    rows = pa.RecordBatch.from_pydict({"key": keys, "value": [b"1"] * len(keys)})
    with pytest.raises(OptionsError, match="key"):
        writer.commit([writer.write(iter([rows]))], 0)
    assert entries(str(tmp_path)) == {}


def test_a_server_that_is_restarted_in_the_middle_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NatsServer(str(tmp_path)) as server:
        writer = writer_of(server.url)
        writer.commit([writer.write(iter([batch(("k.3", "old", 0), ("k.700", "gone", 0))]))], 0)
        rows = batch(*((f"k.{n}", str(n), 0) for n in range(600)), ("k.700", None, 1))
        messages = [writer.write(iter([rows]))]
        put_many, half = NatsKvWriter.put_many, {}

        async def put_and_lose_the_server(self: Any, puts: Any) -> Any:
            done = await put_many(self, puts)
            if not half:
                half.update({key: token.as_int() for (key, _), token in zip(puts, done, strict=True)})
                server.stop()
                server.start()
            return done

        with monkeypatch.context() as patch:
            patch.setattr(NatsKvWriter, "put_many", put_and_lose_the_server)
            with contextlib.suppress(RetryError):  # or the connection was back in time
                writer.commit(messages, 1)
        writer.commit(messages, 1)  # Spark replays the batch
        found = entries(server.url)
        assert {key: value for key, (value, _) in found.items()} == {f"k.{n}": b"%d" % n for n in range(600)}
        assert len(half) == 256
        assert {key: found[key][1] for key in half} == half


def test_rows_that_are_no_entries_are_refused(tmp_path: Path) -> None:
    source = PenstockSource({"path": str(tmp_path), "bucket": "b"})
    for schema, reason in (
        (StructType().add("payload", StringType()), "need a column key"),
        (StructType().add("key", StringType()), "payload or value"),
        (StructType().add("key", StringType()).add("payload", LongType()), "payload or value"),
        (StructType().add("key", StringType()).add("payload", StringType()).add("op", StringType()), "op must be"),
        (StructType().add("key", StringType()).add("value", StringType()).add("celsius", LongType()), "no column"),
    ):
        with pytest.raises(OptionsError, match=reason):
            source.writer(schema, False)
    with pytest.raises(OptionsError, match="never overwritten"):
        source.writer(SCHEMA, True)
    with pytest.raises(OptionsError, match="no path"):
        PenstockSource({"bucket": "b"}).writer(SCHEMA, False)
    with pytest.raises(OptionsError, match="a value is null"):
        rows_of(batch(("a", None, 0)))
    with pytest.raises(OptionsError, match="op must be between"):
        rows_of(batch(("a", "1", 3)))
    with pytest.raises(OptionsError, match="a key is null"):
        rows_of(pa.RecordBatch.from_pydict({"key": pa.nulls(1, pa.string()), "value": ["1"]}))
    with pytest.raises(UnsupportedError, match="1 tasks"):
        source.writer(SCHEMA, False).commit([None])
    assert len(fold_rows([])) == 0


def test_a_stream_into_a_bucket_needs_no_name() -> None:
    assert PenstockSource({"path": "nats://localhost:1", "BUCKET": "b"}).streamWriter(SCHEMA, False).options.is_nats
    assert isinstance(BucketOptions(place="x", bucket="b").connection(), EmbeddedConnection)
