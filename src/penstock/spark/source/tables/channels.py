"""The metadata of a channel data directory as a table: what ``penstock channels ls --json`` says, a row a channel.

``channel`` is the name of the channel's folder, by which the records of its log are known: the two can be joined.  A
channel that cannot be read is a row as well, with nothing but its folder and an ``error``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from penstock.channels.model import PersistedChannel
from penstock.channels.survey import survey
from penstock.disk import ReadDisk
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.tables import TablePart

__all__ = ["SCHEMA", "plan", "read", "recognise"]

ROWS: Final = 4096
ALLOWED: Final = MapType(StringType(), ArrayType(StringType()))
SCHEMA: Final = StructType(
    [
        StructField("channel", StringType()),
        StructField("handler", StringType()),
        StructField("owner", StringType()),
        StructField(
            "config",
            StructType(
                [
                    StructField("max_clients", LongType()),
                    StructField("max_payload_size", LongType()),
                    StructField("max_persist_messages", LongType()),
                    StructField("persist", BooleanType()),
                    StructField("message_flush_interval", LongType()),
                ]
            ),
        ),
        StructField("acl", StructType([StructField(kind, ALLOWED) for kind in ("join", "publish", "read")])),
        StructField("members", ArrayType(StringType())),
        StructField("channel_type", StringType()),
        StructField("error", StringType()),
    ]
)


def recognise(disk: ReadDisk, path: str) -> bool:  # noqa: ARG001
    """Return False: a data directory is also a folder of logs, and those are what ``load`` reads."""
    return False


def plan(options: SourceOptions) -> list[TablePart]:
    """Return the data directories."""
    return [TablePart(path, path) for path in options.paths]


def read(part: TablePart, options: SourceOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:  # noqa: ARG001
    """Yield the channels of one data directory.  There are thousands of them, not millions: rows will do."""
    rows: list[dict[str, Any]] = []
    for name, found in survey(part.path):
        row = {"channel": name}
        if isinstance(found, PersistedChannel):
            row |= found.to_json()  # type: ignore[arg-type]
        else:
            row["error"] = str(found)
        rows.append({column: row.get(column) for column in schema.names})
        if len(rows) == ROWS:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)
