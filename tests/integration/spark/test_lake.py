"""Tables of the lake in a real Spark: partitions of ours and of others, earlier states, files that are not opened."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import time
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.log.detect import FORMATS, open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.digest import digest_of

DAY = 86_400 * 10**9
MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)


def files_read(frame: Any) -> int:
    return len(frame.inputFiles())


@pytest.mark.parametrize("odd", [False, True])  # partitions that folders tell, and those that only the log does
def test_a_partitioned_table_of_others_is_read_with_its_types_and_added_to(
    spark: Any, tmp_path: Path, odd: bool
) -> None:
    table = str(tmp_path / "foreign")
    by = ["day", "word", "code", *(["at", "rate", "sum"] if odd else [])]
    rows = {
        "day": [dt.date(2026, 1, 1), dt.date(2026, 1, 2), None],
        "word": ["a b/ü%=*", "01", None],
        "code": pa.array([7, None, -3], pa.int32()),
        "at": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "UTC")),
        "rate": [0.5, None, 2.0],
        "sum": pa.array([1, 2, None], pa.decimal128(10, 2)),
        "n": [1, 2, 3],
    }
    write_deltalake(table, pa.table(rows), partition_by=by)

    def found() -> list[dict[str, Any]]:
        arrow = lake.read(spark, table).orderBy("n").toArrow()
        assert arrow.schema.names == list(rows)
        return arrow.to_pylist()  # type: ignore[no-any-return]

    before = pa.table(rows).to_pylist()
    assert found() == before
    more = spark.createDataFrame(pa.table({**rows, "n": [4, 5, 6]}))
    assert lake.append(more, table, app="more", batch=0)
    assert not lake.append(more, table, app="more", batch=0)
    expected = before + pa.table({**rows, "n": [4, 5, 6]}).to_pylist()
    assert found() == expected
    assert pl.read_delta(table).sort("n").select(list(rows)).to_dicts() == expected  # who had no part in it
    assert lake.read_added(spark, table, 0, 1).count() == 3
    assert files_read(lake.read(spark, table, where=[("day", "=", dt.date(2026, 1, 1))])) == 2
    assert lake.replace(more.where("n = 5"), table) == 1
    assert found() == expected[4:5]
    with pytest.raises(OptionsError, match="the rows have no day"):
        lake.append(more.drop("day"), table, app="more", batch=1)
    with pytest.raises(OptionsError, match="it is partitioned by day"):
        lake.append(more, table, app="more", batch=1, partition_by=["n"])


def test_channels_are_ingested_into_partitions_and_joined_on_the_way(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in" / "site").mkdir(parents=True)
    headers = {"unit": b"C"}
    for name in ("a", "site/b"):
        with Writer.open(tmp_path / "in" / name, content=CONTENT) as writer:
            records = [encode_envelope(Envelope(b"k", b"%d" % n, headers=headers)) for n in range(60)]
            writer.append_many(records, timestamp_ns=[n * DAY // 20 for n in range(60)])
    table, source = str(tmp_path / "lake"), str(tmp_path / "in")
    moments: list[float] = []
    query = lake.ingest(
        spark,
        source,
        table,
        str(tmp_path / "checkpoint"),
        options={"maxRecordsPerTrigger": 12},
        partition_by=("date", "node"),
        node="edge-7",
        compaction=lake.Compaction(every=4, min_files=2, target_bytes=1 << 20),
        on_commit=lambda batch, files: moments.append(time.time()),
    )
    query.awaitTermination(180)
    assert query.exception() is None
    event = query.recentProgress[-1]
    assert event.batchId == 9
    frame = lake.read(spark, table)
    whole = spark.read.format("penstock").load(source)
    assert digest_of(frame.select(*whole.columns)) == digest_of(whole)
    assert {(str(row[0]), row[1]) for row in frame.select("date", "node").distinct().collect()} == {
        ("1970-01-01", "edge-7"), ("1970-01-02", "edge-7"), ("1970-01-03", "edge-7"),
    }  # fmt: skip
    assert len(DeltaTable(table).file_uris()) < 10  # of ten batches and three days
    one = frame.where("date = date'1970-01-02' and channel = 'a'")
    assert one.count() == 20
    assert one.select("headers").first()[0] == headers
    low = lake.read(spark, table, where=[("date", "=", dt.date(1970, 1, 3)), ("channel", "=", "a")])
    assert low.count() == 20
    assert files_read(low) < files_read(frame)
    # Earlier states, by version and by moment
    second = lake.read(spark, table, version=1).count()
    assert second == 24
    (committed,) = (each["timestamp"] for each in DeltaTable(table).history() if each["version"] == 1)
    between = dt.datetime.fromtimestamp(committed / 1000 + 0.002, dt.UTC)
    assert lake.read(spark, table, timestamp=between).count() == 24
    assert lake.read(spark, table, timestamp="2999-01-01").count() == 120
    with pytest.raises(OptionsError, match="there was no table: it begins at"):
        lake.read(spark, table, timestamp="2020-01-01T00:00:00Z")
    with pytest.raises(OptionsError, match="cannot be read as it was"):
        lake.read(spark, table, version=9999)
    # The next run goes on in the partitions that are there
    with Writer.open(tmp_path / "in" / "a", content=CONTENT) as writer:
        writer.append(encode_envelope(Envelope(b"k", b"60")), timestamp_ns=5 * DAY)
    again = lake.ingest(spark, source, table, str(tmp_path / "checkpoint"), node="edge-8")
    again.awaitTermination(180)
    assert again.exception() is None
    assert lake.read(spark, table, where=[("node", "=", "edge-8")]).count() == 1
    with pytest.raises(OptionsError, match="it is partitioned by date, node"):
        lake.ingest(spark, source, table, str(tmp_path / "other"), partition_by=("channel",))


def test_times_of_96_bits_are_read_as_they_are_and_added_to_by_a_session_that_writes_them(
    spark: Any, tmp_path: Path
) -> None:
    times = ["0001-01-01 00:00:00", "1582-10-04 00:00:00", "9999-12-31 23:59:59.999999", f"{MOMENT:%F %T.%f}"]
    table, held = str(tmp_path / "old"), "spark.sql.parquet.outputTimestampType"
    values = ", ".join(f"({n}, timestamp'{time}')" for n, time in enumerate(times))
    frame = spark.sql(f"select * from values {values} as t(n, at)")
    before = spark.conf.get(held)
    spark.conf.set(held, "INT96")  # as a session is that nobody prepared
    try:
        for by, name in (((), "plain"), (("n",), "parts")):
            lake.append(frame, f"{table}-{name}", app="one", batch=0, partition_by=by)
            lake.append(frame.selectExpr("n + 10 as n", "at"), f"{table}-{name}", app="one", batch=1)
    finally:
        spark.conf.set(held, before)
    for name in ("plain", "parts"):
        files = DeltaTable(f"{table}-{name}").file_uris()
        assert all("int96" in str(pq.ParquetFile(file).schema) for file in files)
        assert {
            str(field.type.type) for field in DeltaTable(f"{table}-{name}").schema().fields if field.name == "at"
        } == {"timestamp"}
        found = lake.read(spark, f"{table}-{name}")
        assert found.join(frame.select("at"), "at").count() == 8
        assert (
            found.selectExpr("n", "cast(at as string) at").where("n = 2").first()["at"] == "9999-12-31 23:59:59.999999"
        )
        assert lake.read(spark, f"{table}-{name}", where=[("at", ">", MOMENT)]).count() == 2


def test_a_session_of_another_time_zone_writes_and_reads_the_same_moments(spark: Any, tmp_path: Path) -> None:
    # In New York the first two are half past one, each on its own side of the hour that comes twice.
    texts = ["2026-11-01T05:30:00", "2026-11-01T06:30:00", "2026-03-08T07:00:00", "1970-01-01T00:00:00"]
    moments = [dt.datetime.fromisoformat(text + "+00:00") for text in texts]
    (tmp_path / "in").mkdir()
    with Writer.open(tmp_path / "in" / "a") as writer:
        writer.append_many([b"%d" % n for n in range(4)], timestamp_ns=[int(at.timestamp()) * 10**9 for at in moments])
    source, table, held = str(tmp_path / "in"), str(tmp_path / "parts"), "spark.sql.session.timeZone"

    def instants(frame: Any) -> list[tuple[int, int]]:
        rows = frame.selectExpr("int(string(payload)) n", "unix_micros(timestamp) at").orderBy("n").collect()
        return [(row["n"], row["at"]) for row in rows]

    expected = [(n, int(at.timestamp()) * 10**6) for n, at in enumerate(moments)]
    spark.conf.set(held, "America/New_York")
    try:
        frame = spark.read.format("penstock").load(source)
        assert instants(frame) == expected
        rows = frame.select("payload", "timestamp")
        lake.append(rows, table, app="x", batch=0, partition_by=["timestamp"])
        rows.write.format("penstock").mode("append").save(str(tmp_path / "copy"))
        lake.ingest(
            spark, source, str(tmp_path / "days"), str(tmp_path / "c"), partition_by=["date"]
        ).awaitTermination()
        for number, at in enumerate(moments):
            assert instants(lake.read(spark, table, where=[("timestamp", "=", at)])) == [expected[number]]
        for place in (table, str(tmp_path / "days")):
            assert instants(lake.read(spark, place)) == expected
            assert instants(lake.read_added(spark, place, -1, 0)) == expected
        assert instants(spark.read.format("penstock").load(str(tmp_path / "copy"))) == expected
    finally:
        spark.conf.set(held, "UTC")
    assert instants(lake.read(spark, table)) == expected
    found = pl.read_delta(table).sort("payload")
    assert found["timestamp"].dt.replace_time_zone("UTC").to_list() == moments
    days = pl.read_delta(str(tmp_path / "days")).sort("payload")["date"].to_list()
    assert days == [at.date() for at in moments]


def test_an_ingest_without_a_checkpoint_goes_on_behind_what_is_lost_and_counts_it(spark: Any, tmp_path: Path) -> None:
    options = MessageLogOptions(segment_bytes=1000, max_messages=150)
    source, table = tmp_path / "in", str(tmp_path / "lake")
    source.mkdir()

    def fill(first: int, count: int) -> None:
        with MessageLog.open(source / "a", options) as log:
            for number in range(first, first + count):
                log.append(b"%06d" % number)

    fill(0, 100)
    assert lake.ingest_committed(spark, str(source), table).records == 100
    fill(100, 1000)
    with pytest.raises(ExpiredError):
        lake.ingest_committed(spark, str(source), table)
    damaged = sorted((source / "a").glob("*.log"))[-2]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    for limits in ({}, {"maxRecordsPerTrigger": 60}):
        place = f"{table}-{len(limits)}"
        shutil.copytree(table, place)
        done = lake.ingest_committed(spark, str(source), place, options={"failOnDataLoss": "false", **limits})
        assert (done.records + done.lost, done.lost_bytes, done.commits > 1) == (1000, 0, bool(limits))
        held = [int(row["payload"]) for row in lake.read(spark, place).collect()]
        assert len(held) == len(set(held)) == 100 + done.records
        assert lake.ingest_committed(spark, str(source), place).commits == 0
    for wrong, reason in (
        ({"startingTimestamp": "2026-11-16"}, "the table says where to go on"),
        ({"endingTimestamp": "2026-11-16"}, "the table says where to go on"),
        ({"toPosition": 5}, "the table says where to go on"),
        ({"startingOffsets": "latest"}, "the table says where to go on"),
        ({"cursor": "x"}, "option cursor is not for a batch of logs"),
        ({"app": "x"}, "option app is not known"),
        ({"maxRecordPerTrigger": 5}, "is it maxRecordsPerTrigger"),
        ({"channels": "nope"}, "channels names what is not there: nope; there is a"),
    ):
        with pytest.raises(OptionsError, match=reason):
            lake.ingest_committed(spark, str(source), table, options=wrong)
    for wrong, reason in (
        ({"app": "x"}, "option app is not known"),
        ({"table": "fold"}, "option table is not for a stream"),
        ({"toPosition": 5}, "option toPosition is not for a stream"),
    ):
        with pytest.raises(OptionsError, match=reason):
            lake.ingest(spark, str(source), f"{table}-x", str(tmp_path / "c"), options=wrong)
    with pytest.raises(OptionsError, match="node='edge-7' is for a table that is partitioned by node"):
        lake.ingest(spark, str(source), f"{table}-x", str(tmp_path / "c"), node="edge-7")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("more", [0, 100])
def test_a_log_whose_backup_came_back_is_not_mixed_into_its_table(
    spark: Any, tmp_path: Path, format: str, more: int
) -> None:
    folder, kept, table = tmp_path / "in", tmp_path / "kept", str(tmp_path / "lake")
    folder.mkdir()
    with contextlib.closing(open_writer(str(folder / "ticks"), format=format)) as writer:
        writer.append_many([b"record %d" % n for n in range(50)])
        writer.sync()
        shutil.copytree(folder, kept)
        writer.append_many([b"record %d" % n for n in range(50, 100)])
    assert lake.ingest_committed(spark, str(folder), table).records == 100
    assert lake.ingest_committed(spark, str(folder), table).records == 0
    shutil.rmtree(folder)
    kept.rename(folder)
    with contextlib.closing(open_writer(str(folder / "ticks"), format=format)) as writer:
        writer.append_many([b"of another history %d" % n for n in range(more)])
    with pytest.raises(ReplacedError, match="record" if more else "ends at"):
        lake.ingest_committed(spark, str(folder), table)
    assert lake.read(spark, table).count() == 100
