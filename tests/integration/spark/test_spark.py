"""Channels in a real Spark: DataFrames, streams, logs and the lake."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.log.detect import open_log
from penstock.log.xchannel import Writer
from penstock.spark import lake, session
from penstock.spark.decode import decode_json, decode_text, split_errors
from penstock.testing.log_conformance import contents


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "site").mkdir()
    with Writer.open(folder / "site" / "ticks", region_bytes=1 << 16, roll_bytes=1 << 20) as writer:
        writer.append_many(
            [b'{"device": "d%d", "celsius": %d.5}' % (n % 10, n % 40) for n in range(50_000)],
            kind=[n % 4 for n in range(50_000)],
            timestamp_ns=[n * 1_000_000_000 for n in range(50_000)],
        )
    with Writer.open(folder / "orders") as writer:
        writer.append_many([b"order %d" % n for n in range(100)], kind=9, timestamp_ns=5)
        writer.append(b"\xff\xfe", kind=10, timestamp_ns=2**64 - 1)
    return folder


def load(spark: Any, path: Path, **options: Any) -> Any:
    return spark.read.format("penstock").options(**options).load(str(path))


def test_a_tree_of_channels_is_a_dataframe(spark: Any, tree: Path) -> None:
    frame = load(spark, tree)
    assert frame.columns == ["channel", "position", "timestamp", "timestamp_ns", "kind", "key", "payload"]
    counts = {row["channel"]: row["count"] for row in frame.groupBy("channel").count().collect()}
    assert counts == {"orders": 101, "site/ticks": 50_000}
    last = frame.where("kind = 10").collect()[0]
    assert (bytes(last["payload"]), last["timestamp"], last["timestamp_ns"]) == (b"\xff\xfe", None, -1)
    assert frame.select("position").where("channel = 'site/ticks'").distinct().count() == 50_000


def test_queries_on_one_dataframe_do_not_disturb_each_other(spark: Any, tree: Path) -> None:
    # With pushed filters PySpark 4.3 gives the rows of one query to the next: docs/decisions/123-filters.md
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(spark, tree)
        assert frame.where("kind in (1, 2)").count() == 25_000
        assert frame.where("kind = 1 or kind = 9").count() == 12_600
        assert frame.count() == 50_101
        assert frame.where("kind = 9").union(frame).count() == 50_201
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_options_leave_out_what_is_not_wanted(spark: Any, tree: Path) -> None:
    ticks = load(spark, tree, channels="site/*")
    middle = sorted(row["position"] for row in ticks.select("position").collect())
    bounds = {"fromPosition": middle[25_000], "toPosition": middle[25_010]}
    narrow = load(spark, tree, channels="site/ticks", **bounds)
    assert sorted(row["position"] for row in narrow.collect()) == middle[25_000:25_010]
    assert narrow.rdd.getNumPartitions() == 1
    assert load(spark, tree, kinds="1,9").count() == 12_600


def test_a_schema_prunes_columns(spark: Any, tree: Path) -> None:
    frame = spark.read.format("penstock").schema("kind int, position long").load(str(tree))
    assert frame.groupBy("kind").count().count() == 6


def test_json_is_decoded_in_spark_and_bad_payloads_stay_beside_their_error(spark: Any, tree: Path) -> None:
    frame = decode_json(load(spark, tree), "device string, celsius double")
    good, bad = split_errors(frame)
    assert good.count() == 50_000
    assert good.agg({"celsius": "max"}).collect()[0][0] == 39.5
    errors = {bytes(row["payload"]): row["error"] for row in bad.collect()}
    assert len(errors) == 101
    assert errors[b"\xff\xfe"] == "the payload is not UTF-8"
    assert errors[b"order 7"].startswith("the payload is not JSON")
    assert bad.where("device is not null or celsius is not null").count() == 0


def test_what_follows_a_json_object_is_not_dropped_in_silence(spark: Any) -> None:
    payloads = [b'{"device":"a"}{"device":"b"}', b'{"device":"a"} and more', b'{"device":"a"},{}', b'[{"device":"a"}]']
    frame = spark.createDataFrame([(payload,) for payload in [*payloads, b' {"device":"c"}\n']], "payload binary")
    good, bad = split_errors(decode_json(frame, "device string"))
    assert [row["device"] for row in good.collect()] == ["c"]
    assert sorted(bytes(row["payload"]) for row in bad.collect()) == sorted(payloads)


def test_the_running_session_is_found_from_any_thread(spark: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(session).result()
    assert found.sparkContext is spark.sparkContext


def test_an_option_that_is_not_known_fails_the_query_by_name(spark: Any, tree: Path) -> None:
    with pytest.raises(Exception, match="option maxrecordpertrigger is not known: is it maxRecordsPerTrigger"):
        load(spark, tree, maxRecordPerTrigger="5").count()


def test_text_is_decoded_in_spark(spark: Any, tree: Path) -> None:
    good, bad = split_errors(decode_text(load(spark, tree / "orders")))
    assert sorted(row["text"] for row in good.collect())[:2] == ["order 0", "order 1"]
    assert bad.count() == 1


def run(query: Any) -> list[dict]:
    assert query.awaitTermination(120)
    if query.exception() is not None:
        raise query.exception()
    return [json.loads(progress.json) for progress in query.recentProgress]


def test_a_stream_goes_on_where_its_checkpoint_says(spark: Any, tmp_path: Path) -> None:
    source, sink = tmp_path / "in", tmp_path / "out"
    source.mkdir()

    def copy() -> list[dict]:
        frame = spark.readStream.format("penstock").option("maxRecordsPerTrigger", 400).load(str(source))
        return run(
            frame.select("payload", "kind", "timestamp_ns")
            .writeStream.format("penstock")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(sink))
        )

    with Writer.open(source / "a") as writer:
        writer.append_many([b"%d" % n for n in range(1000)], kind=5, timestamp_ns=7)
        progress = copy()
        assert [item["numInputRows"] for item in progress if item["numInputRows"]] == [400, 400, 200]
        writer.append_many([b"%d" % n for n in range(1000, 1100)])
        with Writer.open(source / "b") as other:
            other.append(b"from a channel that came later")
        copy()
        copy()
    with open_log(str(sink)) as log:
        found = contents(log)
        assert log.read(log.first_position, 1)[0].kind == 5
        assert log.read(log.first_position, 1)[0].timestamp_ns == 7
    assert found[:1000] == [b"%d" % n for n in range(1000)]
    assert sorted(found[1000:]) == sorted([*(b"%d" % n for n in range(1000, 1100)), b"from a channel that came later"])


def test_the_lake_holds_every_record_once_and_goes_on(spark: Any, tree: Path, tmp_path: Path) -> None:
    table, checkpoint = str(tmp_path / "lake"), str(tmp_path / "checkpoint")
    options = {"maxRecordsPerTrigger": 30_000}
    run(lake.ingest(spark, str(tree), table, checkpoint, options=options))
    run(lake.ingest(spark, str(tree), table, checkpoint, options=options))
    frame = lake.read(spark, table)
    assert frame.count() == 50_101
    assert frame.select("channel", "position").distinct().count() == 50_101
    assert frame.where("channel = 'orders'").agg({"kind": "max"}).collect()[0][0] == 10
    assert lake.open_table(table).version() >= 1  # type: ignore[union-attr]
    first = lake.read(spark, table, version=0).count()
    assert 0 < first <= 30_000


def test_a_dataframe_is_appended_to_the_lake_as_one_batch(spark: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "results")
    frame = spark.sql("select id, cast(id as string) name, timestamp '2026-01-02 03:04:05' at from range(100)")
    assert lake.append(frame, table, app="a", batch=0)
    assert not lake.append(frame, table, app="a", batch=0)
    assert lake.append(frame.where("id < 10"), table, app="a", batch=1)
    assert lake.append(frame.where("id < 0"), table, app="a", batch=2)
    assert lake.read(spark, table).count() == 110
    assert lake.read(spark, table).dtypes == frame.dtypes


def test_rows_are_written_to_a_log_in_batch(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    frame = spark.sql("select cast(id as string) payload, cast(id as int) kind from range(0, 50, 1, 1)")
    frame.write.format("penstock").mode("append").save(path)
    with open_log(path) as log:
        assert contents(log) == [b"%d" % n for n in range(50)]


def test_an_error_of_the_source_names_what_is_wrong(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nothing here"):
        load(spark, tmp_path / "absent").count()
