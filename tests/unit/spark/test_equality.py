"""Promise: what Spark reads of a log is what ``penstock cat --json`` prints.  Here without a JVM, log by log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cat_frames import cat, generate, printed_row, restore_vectors
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.log.detect import FORMATS
from penstock.spark.source.table import PenstockSource

TYPES = {
    "string": StringType(), "bigint": LongType(), "timestamp": TimestampType(), "int": IntegerType(),
    "binary": BinaryType(),
}  # fmt: skip


def rows(path: Path, **options: str) -> list[dict[str, Any]]:
    source = PenstockSource({"path": str(path), **options})
    ddl = source.schema()
    assert isinstance(ddl, str)
    pairs = (item.replace("`", "").split() for item in ddl.split(","))
    reader = source.reader(StructType([StructField(name, TYPES[kind]) for name, kind in pairs]))
    parts = reader.partitions()
    return [printed_row(row) for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_every_sound_vector_is_read_as_it_is_printed(tmp_path: Path) -> None:
    logs = restore_vectors(tmp_path)
    assert len(logs) > 60
    for log in logs:
        printed = CliRunner().invoke(app, ["cat", "--json", str(log)])
        assert printed.exit_code == 0, log
        expected = [json.loads(line) for line in printed.stdout.splitlines()]
        assert rows(log) == expected, log
        assert rows(log, partitionBytes="64k", batchBytes="1k", partitions="3") == expected, log


@pytest.mark.parametrize("kind", FORMATS)
def test_generated_records_are_read_as_they_are_printed(tmp_path: Path, kind: str) -> None:
    generate(tmp_path / "log", kind, 20_000)
    expected = cat(tmp_path / "log")
    assert len(expected) == 20_000
    assert rows(tmp_path / "log", partitionBytes="100k", partitions="5") == expected
