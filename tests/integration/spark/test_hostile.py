"""Sinks and pipelines in a real Spark when something was removed, made again, set back or planted."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConflictError, PenstockError
from penstock.fold import follow
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope, open_envelopes
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.pipelines.aggregate import aggregate_stream
from penstock.spark.pipelines.audit import audit, audit_fold, audit_logs, beginnings
from penstock.spark.pipelines.decode import decode, decode_added
from penstock.spark.pipelines.fold import fold_into
from penstock.spark.pipelines.own import PipelineJob, run as run_job
from penstock.spark.pipelines.replay import replay
from penstock.store import AppendLogStore, LmdbStore, RocksStore, open_store
from penstock.testing.log_conformance import contents
from penstock.types import KvUpdate, Op


def ended(query: Any) -> str:
    """Wait for a query to end; return what it failed with."""
    try:
        query.awaitTermination(120)
    except Exception as exc:
        return str(exc)
    return ""


def fill(path: Path, first: int, count: int) -> None:
    with Writer.open(path) as writer:
        numbers = range(first, first + count)
        writer.append_many([b"%d" % n for n in numbers], kind=[n % 2 for n in numbers])


def test_two_queries_share_a_table_with_an_odd_name(spark: Any, tmp_path: Path) -> None:
    fill(tmp_path / "ticks", 0, 100)
    table = str(tmp_path / "a [b]{c}* 50% ü#" / "day=5")
    for kind in (0, 1):
        query = lake.ingest(
            spark, str(tmp_path / "ticks"), table, str(tmp_path / f"checkpoint-{kind}"), options={"kinds": kind}
        )
        assert ended(query) == ""
    rows = lake.read(spark, table)
    assert sorted(int(row["payload"]) for row in rows.collect()) == list(range(100))
    assert "day" not in rows.columns
    added = lake.read_added(spark, table, 0, 1)
    assert {row["kind"] for row in added.collect()} == {1}


def test_a_checkpoint_or_a_table_that_was_made_again_is_noticed(spark: Any, tmp_path: Path) -> None:
    log, table, checkpoint = tmp_path / "ticks", str(tmp_path / "lake"), str(tmp_path / "checkpoint")

    def ingest() -> str:
        return ended(lake.ingest(spark, str(log), table, checkpoint))

    fill(log, 0, 10)
    assert ingest() == ""
    fill(log, 10, 10)
    assert ingest() == ""
    fill(log, 20, 10)
    os.rename(checkpoint, checkpoint + "-kept")
    assert "its checkpoint was made again" in ingest()  # it would have taken its batch 0 for the one that is there
    shutil.rmtree(checkpoint)
    os.rename(checkpoint + "-kept", checkpoint)
    os.rename(table, table + "-kept")
    assert "the table was made again" in ingest()  # it would have gone on with the records from 20
    shutil.rmtree(table, ignore_errors=True)
    os.rename(table + "-kept", table)
    assert ingest() == ""
    assert sorted(int(row["payload"]) for row in lake.read(spark, table).collect()) == list(range(30))


def pipelines(spark: Any, log: str, table: str, checkpoint: str) -> dict[str, Callable[[], Any]]:
    """Every pipeline that adds the batches of a stream to a table."""
    job = PipelineJob(source=log, table=table, checkpoint=checkpoint, stream=True)
    return {
        "decode": lambda: decode(spark, log, table, table + "-errors", checkpoint, content="text"),
        "aggregate": lambda: aggregate_stream(spark, log, table, checkpoint),
        "run --stream": lambda: run_job(spark, itself, job),
    }


def itself(frame: Any) -> Any:
    return frame


@pytest.mark.parametrize("name", ["decode", "aggregate", "run --stream"])
def test_a_checkpoint_or_a_table_of_any_pipeline_that_was_made_again_is_noticed(
    spark: Any, tmp_path: Path, name: str
) -> None:
    log, table, checkpoint = tmp_path / "ticks", str(tmp_path / "lake"), str(tmp_path / "checkpoint")
    run = pipelines(spark, str(log), table, checkpoint)[name]
    fill(log, 0, 10)
    run()
    fill(log, 10, 10)
    os.rename(checkpoint, checkpoint + "-kept")
    with pytest.raises(PenstockError, match="its checkpoint was made again"):
        run()  # its batch 0 has other records than the one that is there
    shutil.rmtree(checkpoint)
    os.rename(checkpoint + "-kept", checkpoint)
    os.rename(table, table + "-kept")
    with pytest.raises(PenstockError, match="the table was made again"):
        run()
    shutil.rmtree(table, ignore_errors=True)
    os.rename(table + "-kept", table)
    run()
    if name != "aggregate":  # its only window is still open
        assert lake.read(spark, table).count() == 20


def test_a_table_of_the_lake_that_was_made_again_is_noticed_by_decode(spark: Any, tmp_path: Path) -> None:
    log, raw, table = tmp_path / "ticks", str(tmp_path / "raw"), str(tmp_path / "typed")
    fill(log, 0, 10)
    assert ended(lake.ingest(spark, str(log), raw, str(tmp_path / "checkpoint"))) == ""
    assert decode_added(spark, raw, table, table + "-errors", content="text").rows == 10
    shutil.rmtree(raw)
    fill(log, 10, 10)
    assert ended(lake.ingest(spark, str(log), raw, str(tmp_path / "checkpoint-again"))) == ""
    with pytest.raises(ConflictError, match="another query"):  # the version it has now is one that was decoded
        decode_added(spark, raw, table, table + "-errors", content="text")


def test_a_stream_into_a_log_whose_checkpoint_was_made_again_is_noticed(spark: Any, tmp_path: Path) -> None:
    log, out, checkpoint = tmp_path / "ticks", str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def copy() -> str:
        frame = spark.readStream.format("penstock").load(str(log)).select("payload", "kind", "timestamp_ns")
        writer = frame.writeStream.format("penstock").option("checkpointLocation", checkpoint)
        return ended(writer.trigger(availableNow=True).start(out))

    fill(log, 0, 10)
    assert copy() == ""
    fill(log, 10, 10)
    os.rename(checkpoint, checkpoint + "-kept")
    assert "its checkpoint was made again" in copy()
    shutil.rmtree(checkpoint)
    os.rename(checkpoint + "-kept", checkpoint)
    assert copy() == ""
    with open_log(out) as found:
        assert contents(found) == [b"%d" % n for n in range(20)]
    assert not [name for name in os.listdir(tmp_path) if "staged" in name]


def test_a_replay_keeps_the_order_of_a_channel_whose_clock_was_set_back(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    times = {"a": [10, 20, 5, 6, 30], "b": [1, 15, 16, 2, 40]}
    for name, moments in times.items():
        with Writer.open(tmp_path / "in" / name, content=CONTENT) as writer:
            for number, moment in enumerate(moments):
                envelope = Envelope(b"k", b"%s%d" % (name.encode(), number), event_time_ns=2**64 - 1)
                writer.append(encode_envelope(envelope), timestamp_ns=moment)
    frame = spark.read.format("penstock").load(str(tmp_path / "in"))
    for _ in range(2):
        replay(frame, str(tmp_path / "out"), app="again", content=CONTENT)
    with open_log(str(tmp_path / "out")) as log:
        found = open_envelopes(log.read(log.first_position))
    assert found.to_payloads() == [b"b0", b"a0", b"b1", b"b2", b"b3", b"a1", b"a2", b"a3", b"a4", b"b4"]
    assert found.timestamps is not None
    assert found.timestamps.tolist() == [1, 10, 15, 16, 2, 20, 5, 6, 30, 40]
    assert {int(time) for time in found.extra["event_time_ns"]} == {2**64 - 1}


def test_an_audit_finds_changed_records_and_leaves_expired_ones_alone(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    fill(tmp_path / "in" / "ticks", 0, 50)
    with FileChannel.open(str(tmp_path / "in" / "queue"), ChannelOptions(segment_bytes=4096)) as queue:
        for _ in range(4):
            queue.append_many([b"x" * 200] * 20)
        source = str(tmp_path / "in")
        assert ended(lake.ingest(spark, source, str(tmp_path / "lake"), str(tmp_path / "checkpoint"))) == ""
        table = lake.read(spark, str(tmp_path / "lake"))
        queue.rotate()
        receiver = queue.ack_rx("all")
        for _ in range(80):
            receiver.recv(timeout=10)
        receiver.ack()
        queue.gc()  # retention leaves not one record

    def check(frame: Any) -> dict[str, Any]:
        rows = audit(spark.read.format("penstock").load(source), frame, beginnings(source)).collect()
        return {row["channel"]: row.asDict() for row in rows}

    found = check(table)
    assert (found["ticks"]["ok"], found["queue"]["ok"]) == (True, True), found
    assert found["queue"]["expired"] == 80
    changed = table.selectExpr(
        "channel", "position", "kind", "timestamp_ns", "key", "if(payload = '7', cast('8' as binary), payload) payload"
    )
    assert (check(changed)["ticks"]["changed"], check(changed)["ticks"]["ok"]) == (1, False)


@pytest.mark.parametrize("backend", [AppendLogStore, RocksStore, LmdbStore])
def test_odd_keys_are_folded_alike_and_an_audit_of_a_shortened_log_finds_what_is_wrong(
    spark: Any, tmp_path: Path, backend: Any
) -> None:
    log, store = str(tmp_path / "log"), str(tmp_path / "store")
    keys = [b"y", b"k", b"k.1", b"a b", b"\0", "ü".encode(), b"gone", b"x" * 300]
    if backend is not LmdbStore:  # which has no room for it, and says so
        keys[0] = b""
    with Writer.open(log, content=CONTENT, region_bytes=4096, roll_bytes=8192, keep_files=2) as writer:

        def put(*pairs: tuple[bytes, bytes], op: Op = Op.PUT) -> None:
            writer.append_many([encode_envelope(Envelope(key, value, op)) for key, value in pairs])

        put(*((key, b"%d" % n) for n in range(3) for key in keys))
        put((b"gone", b""), op=Op.PURGE)
        (tmp_path / f"{store}.penstock-staged").mkdir()  # left by a run that was killed
        fold_into(spark, log, store, backend=backend.backend)
        with open_log(log) as reader, AppendLogStore.open(tmp_path / "one") as one:
            asyncio.run(follow(reader, one, once=True))
            with open_store(store) as held:
                assert (held.digest(), held.count(), held.cursor()) == (one.digest(), 7, one.cursor())
        assert audit_fold(spark, log, store).ok
        for _ in range(4):  # the log loses its first records, step by step; the fold goes on
            put(*((b"later.%d" % n, b"v" * 100) for n in range(40)))
            with open_log(log) as reader, backend.open(store) as held:
                asyncio.run(follow(reader, held, once=True))
        put((b"k", b""), op=Op.DELETE)
        put((b"k.1", b"new"))
        with open_log(log) as reader, backend.open(store) as held:
            asyncio.run(follow(reader, held, once=True))
    sound = audit_fold(spark, log, store)
    assert sound.ok, sound
    assert sound.first_position > 80
    assert sound.unchecked == 5
    with backend.open(store) as held:
        cursor = held.cursor()
        held.apply([KvUpdate.put("k", b"2", 100)], cursor)  # a delete that was missed
    found = audit_fold(spark, log, store)
    assert (found.stale, found.ok) == (1, False)
    with backend.open(store) as held:
        held.apply([KvUpdate.delete("k"), KvUpdate.put("later.3", b"wrong", sound.cursor - 1)], cursor)
    assert not audit_fold(spark, log, store).ok
    assert not [name for name in os.listdir(tmp_path) if "staged" in name]


def test_relative_paths_mean_the_folder_of_this_process_wherever_java_began(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    with Writer.open(tmp_path / "in" / "devices", content=CONTENT) as writer:
        writer.append_many([encode_envelope(Envelope(b"k%d" % n, b"%d" % n)) for n in range(10)])
    monkeypatch.chdir(tmp_path)  # the session is older
    assert fold_into(spark, "in/devices", "latest.snap").entries == 10
    assert audit_fold(spark, "in/devices", "latest.snap").ok
    assert [check.records for check in audit_logs(spark, "in")] == [10]
    assert ended(lake.ingest(spark, "in", "raw", "checkpoints/raw")) == ""
    assert lake.ingest_once(spark, "in", "once", app="once", batch=0) == 10
    assert lake.ingest_committed(spark, "in", "own").records == 10
    assert lake.append(lake.read(spark, "raw"), "copy", app="copy", batch=0)
    assert decode(spark, "in", "typed", "bad", "checkpoints/typed", content="text").rows == 10
    aggregate_stream(spark, "in", "counts", "checkpoints/counts")
    run_job(spark, itself, PipelineJob(source="in", table="same", checkpoint="checkpoints/same", stream=True))
    assert replay(lake.read(spark, "raw"), "again", app="again", content=CONTENT) == 10
    for table in ("raw", "once", "own", "copy", "typed", "same"):
        assert lake.read(spark, str(tmp_path / table)).count() == 10, table
    for name in ("raw", "typed", "counts", "same"):
        assert (tmp_path / "checkpoints" / name / "metadata").exists(), name
