"""Folds, channel metadata and keys from payloads in a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, PersistedChannel, StoredConfig
from penstock.channels.store import FileChannelStore
from penstock.log import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.mqtt.carried import encode_carried, headers_for
from penstock.mqtt.packets import Properties
from penstock.mqtt.properties import encode_properties
from penstock.spark.decode import with_key, with_trace
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, WatchCursor


def load(spark: Any, path: Path, **options: Any) -> Any:
    return spark.read.format("penstock").options(**options).load(str(path))


@pytest.mark.parametrize("backend", [AppendLogStore, RocksStore, LmdbStore])
def test_a_fold_is_a_dataframe(spark: Any, tmp_path: Path, backend: Any) -> None:
    with backend.open(tmp_path / "latest") as store:
        store.apply([KvUpdate.put(f"k{n}", b"%d" % n, n + 1) for n in range(1000)], WatchCursor.of(1000))
    frame = load(spark, tmp_path / "latest")
    assert frame.columns == ["fold", "key", "value", "version", "revision"]
    found = frame.selectExpr("count(*)", "sum(revision)", "sum(cast(cast(value as string) as long))", "min(key)")
    assert found.collect()[0] == (1000, 500_500, 499_500, "k0")


def test_channel_metadata_is_a_dataframe_that_joins_the_records(spark: Any, tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    ann = Nid.parse("ann@localhost")
    acl = ChannelAcl().replace("join", Allow().add([ann]))
    east = store.save(PersistedChannel("ops/east", ann, StoredConfig(max_clients=5, persist=True), acl, (ann,)))
    store.save(PersistedChannel("ops/west"))
    with MessageLog.open(tmp_path / east) as log:
        log.append_many([b"one", b"two"], sender="ann@localhost")
    channels = load(spark, tmp_path, table="channels")
    row = channels.where("handler = 'ops/east'").collect()[0]
    assert (row["owner"], row["config"]["max_clients"], row["config"]["persist"]) == ("ann@localhost", 5, True)
    assert row["acl"]["join"] == {"localhost": ["ann"]}
    assert row["members"] == ["ann@localhost"]
    assert channels.count() == 2
    joined = load(spark, tmp_path).join(channels, "channel").groupBy("handler").count()
    assert [tuple(found) for found in joined.collect()] == [("ops/east", 2)]


def test_a_key_comes_from_the_envelope_or_from_a_path_into_the_payload(spark: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "readings") as writer:
        writer.append_many([b'{"site": {"id": 7}}', b"not json", b'{"site": {}}', b"\xff", b'{"site": {"id": "x"}}'])
    with Writer.open(tmp_path / "state", content=CONTENT) as writer:
        writer.append(encode_envelope(Envelope(b"own", b'{"site": {"id": 9}}')))
    found = with_key(load(spark, tmp_path), "$.site.id").orderBy("channel", "position").select("key").collect()
    assert [None if row["key"] is None else bytes(row["key"]) for row in found] == [
        b"7",
        None,
        None,
        None,
        b"x",
        b"own",
    ]
    without = load(spark, tmp_path / "readings").select("payload")
    assert with_key(without, "$.site.id").where("key is not null").count() == 2


def test_a_trace_of_an_mqtt_message_or_an_envelope_is_a_column(spark: Any, tmp_path: Path) -> None:
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    parent = f"00-{trace}-{span}-01".encode()
    tapped = headers_for(
        1, False, "pump-7", encode_properties(Properties(user=(("traceparent", parent.decode()),)), length=False)
    )
    with Writer.open(tmp_path / "plant", content=CONTENT) as writer:
        writer.append(encode_carried(b"plant/7", b"21.5", tapped, 1))
        writer.append(encode_envelope(Envelope(b"own", b"on", headers={"traceparent": parent})))
        writer.append(encode_envelope(Envelope(b"bad", b"on", headers={"traceparent": b"nonsense"})))
        writer.append(encode_envelope(Envelope(b"none", b"on")))
    rows = with_trace(load(spark, tmp_path)).orderBy("position").select("traceparent", "trace_id", "span_id").collect()
    known = (parent.decode(), trace, span)
    assert [tuple(row) for row in rows] == [known, known, (None,) * 3, (None,) * 3]


def test_a_table_of_the_catalog_and_a_view_are_made_with_what_spark_adds(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "ticks")
    with Writer.open(path) as writer:
        writer.append_many([b"a", b"b"], kind=3)
        writer.append(b"c")
    spark.sql(f"CREATE TEMPORARY VIEW ticks_view USING penstock OPTIONS (path '{path}')")
    assert spark.sql("SELECT * FROM ticks_view").count() == 3
    said = f"OPTIONS (path '{path}', kinds '3') COMMENT 'all' TBLPROPERTIES (team='x')"
    spark.sql(f"CREATE TABLE ticks USING penstock {said}")
    spark.sql(f"CREATE TABLE all_ticks USING penstock LOCATION '{path}'")
    spark.sql(f"CREATE TABLE bare (payload binary) USING penstock OPTIONS (path '{path}')")
    try:
        assert spark.sql("SELECT count(*), max(kind) FROM ticks").collect()[0] == (2, 3)
        assert spark.sql("SELECT * FROM ticks WITH (kinds = '0')").count() == 1
        assert spark.table("all_ticks").where("kind = 0").count() == 1
        query = spark.readStream.table("ticks").writeStream.format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        assert sum(event.numInputRows for event in query.recentProgress) == 2
        with pytest.raises(PySparkException, match=r"no path: .* INSERT INTO"):  # it would go where it was read from
            spark.sql("INSERT INTO all_ticks SELECT * FROM ticks")
        copy = str(tmp_path / "copy")
        spark.sql(f"INSERT INTO all_ticks WITH (path = '{copy}') SELECT * FROM ticks")
        with open_log(copy) as log:
            assert log.read(log.first_position).to_payloads() == [b"a", b"b"]
        spark.sql(f"INSERT INTO all_ticks WITH (path = '{path}') SELECT * FROM ticks")
        assert spark.sql("SELECT * FROM ticks").count() == 4
        assert spark.sql(f"SELECT * FROM bare WITH (path = '{path}')").count() == 5
        with pytest.raises(PySparkException, match=r"no path: .* without columns"):
            spark.sql("SELECT * FROM bare").count()  # Spark keeps the options of such a table to itself
        with pytest.raises(PySparkException, match="option partition is not known: is it partitions"):
            spark.sql(f"CREATE TABLE more USING penstock OPTIONS (path '{path}', partition '2')")
    finally:
        for name in ("ticks", "all_ticks", "bare"):
            spark.sql(f"DROP TABLE {name}")
