"""Times as Spark and Impala once wrote them, in 96 bits: in tables of others they are what they were."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from penstock.spark.lake import Compaction, join_small_files
from penstock.spark.objects import FilePartition, FilesReader
from penstock.spark.pipelines.compact import compact

SCHEMA = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
TIMES = [
    dt.datetime(1, 1, 1, tzinfo=dt.UTC),  # in nanoseconds these three are out of reach
    dt.datetime(1582, 10, 10, tzinfo=dt.UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
    dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC),
    None,
]


def int96_table(table: Path, files: int = 3) -> list[dict[str, Any]]:
    """A table of files with such times; return its rows."""
    rows = [{"n": n, "at": TIMES[n % len(TIMES)]} for n in range(files * len(TIMES))]
    for number in range(files):
        name, some = f"{number}.parquet", rows[number * len(TIMES) : (number + 1) * len(TIMES)]
        table.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(some, schema=SCHEMA), table / name, use_deprecated_int96_timestamps=True)
        assert "int96" in str(pq.ParquetFile(table / name).schema)
        add = AddAction(name, os.path.getsize(table / name), {}, 1, True, json.dumps({"numRecords": len(some)}))
        schema = Schema.from_arrow(SCHEMA)
        found = DeltaTable(str(table)) if number else DeltaTable.create(str(table), schema)
        found.create_write_transaction([add], "append", schema)
    return rows


def rows_of(table: Path) -> list[dict[str, Any]]:
    files = DeltaTable(str(table)).file_uris()
    joined = pa.concat_tables(
        pq.ParquetFile(file, coerce_int96_timestamp_unit="us").read().cast(SCHEMA) for file in files
    )
    return joined.sort_by("n").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("join", [join_small_files, compact])
def test_times_of_96_bits_are_the_same_in_files_that_were_joined(tmp_path: Path, join: Any) -> None:
    rows = int96_table(tmp_path / "t")
    if join is join_small_files:
        assert join_small_files(str(tmp_path / "t"), Compaction(min_files=2, min_age_seconds=0)).files == 3
    else:
        compact(str(tmp_path / "t"))
    assert len(DeltaTable(str(tmp_path / "t")).file_uris()) == 1
    assert rows_of(tmp_path / "t") == rows


def test_rows_of_a_table_keep_times_of_96_bits_when_others_are_deleted_by_age(tmp_path: Path) -> None:
    rows = int96_table(tmp_path / "t")
    compact(str(tmp_path / "t"), keep_days=1, time_column="at")
    kept = [row for row in rows if row["at"] is None or row["at"] > dt.datetime.now(dt.UTC) - dt.timedelta(days=1)]
    assert rows_of(tmp_path / "t") == kept


def test_times_of_96_bits_are_read_from_a_table_on_an_object_store(tmp_path: Path) -> None:
    rows = int96_table(tmp_path / "t", files=1)
    schema = StructType([StructField("n", LongType()), StructField("at", TimestampType())])
    reader = FilesReader(f"file://{tmp_path}/t", [("0.parquet", 1)], schema)
    assert [row for batch in reader.read(FilePartition(("0.parquet",))) for row in batch.to_pylist()] == rows
