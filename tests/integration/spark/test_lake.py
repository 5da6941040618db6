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

from penstock.errors import OptionsError, ReplacedError
from penstock.log.detect import FORMATS, open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
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
    written = (tmp_path / "lake" / "_delta_log" / f"{1:020d}.json").stat().st_mtime  # what delta-rs goes by
    between = dt.datetime.fromtimestamp(written + 0.002, dt.UTC)
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
