"""The lake without a JVM: exported files have fixed names, and a batch is committed once."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import OptionsError
from penstock.log.xchannel import Writer
from penstock.spark.lake.table import commit_files, committed_batch, committed_records, data_files, open_table
from penstock.spark.source.columns import BASE, arrow_schema
from penstock.spark.source.export import Exporter
from penstock.spark.source.table import ExportSource


def export(folder: Path, table: Path, **options: str) -> list[dict]:
    source = ExportSource({"path": str(folder), "table": str(table), **options})
    reader = source.reader(None)  # type: ignore[arg-type]
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


@pytest.fixture
def channels(tmp_path: Path) -> Path:
    folder = tmp_path / "channels"
    folder.mkdir()
    with Writer.open(folder / "ticks") as writer:
        writer.append_many([b"%d" % n for n in range(1000)], kind=3, timestamp_ns=[n * 10**9 + 1 for n in range(1000)])
    return folder


def test_an_export_holds_every_record_and_says_what_is_in_it(channels: Path, tmp_path: Path) -> None:
    (row,) = export(channels, tmp_path / "lake")
    table = pq.read_table(tmp_path / "lake" / row["file"])
    assert table.schema.remove_metadata().equals(arrow_schema(BASE))
    assert table.column("payload").to_pylist() == [b"%d" % n for n in range(1000)]
    assert (row["records"], row["bytes"]) == (1000, (tmp_path / "lake" / row["file"]).stat().st_size)
    stats = json.loads(row["stats"])
    assert stats["numRecords"] == 1000
    assert stats["minValues"]["timestamp"] == "1970-01-01T00:00:00.000Z"
    assert stats["maxValues"]["timestamp"] == "1970-01-01T00:16:39.000Z"
    assert stats["maxValues"]["kind"] == 3
    assert stats["nullCount"]["channel"] == 0


def test_a_task_that_runs_twice_writes_the_same_file(channels: Path, tmp_path: Path) -> None:
    first = export(channels, tmp_path / "lake")
    data = (tmp_path / "lake" / first[0]["file"]).read_bytes()
    assert export(channels, tmp_path / "lake") == first
    assert (tmp_path / "lake" / first[0]["file"]).read_bytes() == data
    assert [path.suffix for path in (tmp_path / "lake").iterdir()] == [".parquet"]


def test_records_are_counted_by_who_committed_them_and_since_when(channels: Path, tmp_path: Path) -> None:
    table, schema = str(tmp_path / "lake"), arrow_schema(BASE)
    assert committed_records(table, "app", -1) == 0
    for version, (app, batch) in enumerate((("app", 0), ("other", 0), ("app", 1), ("app", 1))):
        with Writer.open(channels / f"more-{version}") as writer:
            writer.append_many([b"x"] * (10 * version + 1))
        commit_files(table, app, batch, data_files(export(channels / f"more-{version}", tmp_path / "lake")), schema)
    assert committed_records(table, "app", -1) == 1 + 21
    assert committed_records(table, "app", 0) == 21
    assert committed_records(table, "other", -1) == 11


def test_a_batch_is_committed_once(channels: Path, tmp_path: Path) -> None:
    table = str(tmp_path / "lake")
    assert open_table(table) is None
    assert committed_batch(table, "app") == -1
    files, schema = data_files(export(channels, tmp_path / "lake")), arrow_schema(BASE)
    assert commit_files(table, "app", 0, files, schema) is True
    assert commit_files(table, "app", 0, files, schema) is False
    assert committed_batch(table, "app") == 0
    assert commit_files(table, "app", 1, [], schema) is True
    assert commit_files(table, "app", 0, files, schema) is False
    found = DeltaTable(table)
    assert found.version() == 1
    assert sum(json.loads(item.stats)["numRecords"] for item in files) == 1000
    assert len(found.file_uris()) == 1


def test_an_export_needs_a_table() -> None:
    with pytest.raises(OptionsError, match="no table"):
        Exporter.of({})
