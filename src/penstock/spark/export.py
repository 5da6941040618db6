"""A task that writes what it reads to a Parquet file itself, so that payloads never pass through the JVM.

The name of a file is made of the spans in it and of who reads them: a task that runs twice writes the same file twice,
and never that of another query, which may have filtered the same spans in another way.  A file becomes part of a table
only by the commit that names it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import OptionsError
from penstock.spark.columns import Column, arrow_schema, columns_of_batch
from penstock.spark.options import SourceOptions, local_path
from penstock.spark.plan import Span
from penstock.spark.reading import read_spans

__all__ = ["Exporter", "MANIFEST", "EXPORT_OPTIONS", "delta_stats"]

EXPORT_OPTIONS: Final = ("app", "columns", "compression", "whole")
"""What ``penstock-export`` takes besides the options of the source, and ``table``."""

MANIFEST: Final = (
    Column("file", "string"),
    Column("bytes", "bigint"),
    Column("records", "bigint"),
    Column("stats", "string"),
)
ROW_GROUP_BYTES: Final = 32 << 20
LEVEL: Final = 1
REPEATED: Final = (pa.string(), pa.int32())
"""Types whose columns have few values: the channel, the kind, the op."""
NUMBERS: Final = (pa.int64(), pa.timestamp("us", "UTC"))
"""Types whose columns grow from row to row: positions and times.  Their differences are small and cost little to
compress."""
GROWING: Final = "DELTA_BINARY_PACKED"


class Exporter(msgspec.Struct, frozen=True):
    """Where tasks put their files: names in the manifest are relative to ``table``."""

    table: str
    app: str = ""
    """Who reads: the application by which the table knows the query."""
    compression: str = "zstd"
    whole: bool = False
    """Whether a channel with columns that the files do not have is refused."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Exporter:
        """Read Spark's options."""
        table = options.get("table")
        if not table:
            raise OptionsError("no table: penstock-export needs the folder its files go to")
        return cls(
            local_path(table),
            options.get("app") or "",
            options.get("compression") or "zstd",
            options.get("whole") == "true",
        )

    def export(self, spans: Sequence[Span], schema: pa.Schema, options: SourceOptions) -> pa.RecordBatch:
        """Write one file and return the row of the manifest that names it; no row if there were no records."""
        if self.whole:
            for span in spans:
                check_whole(span, schema)
        name = file_name(spans, self.app)
        path = os.path.join(self.table, name)
        os.makedirs(self.table, exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        records = 0
        try:
            level = LEVEL if self.compression == "zstd" else None
            with open(temporary, "wb") as sink:
                with pq.ParquetWriter(
                    sink,
                    schema,
                    compression=self.compression,
                    compression_level=level,
                    use_dictionary=[field.name for field in schema if field.type in REPEATED],
                    column_encoding={field.name: GROWING for field in schema if field.type in NUMBERS},
                    write_statistics=[f.name for f in schema if not pa.types.is_binary(f.type)],
                ) as writer:
                    held: list[pa.RecordBatch] = []
                    for batch in read_spans(
                        spans,
                        schema,
                        batch_bytes=options.batch_bytes,
                        filters=options.filters,
                        fail_on_data_loss=options.fail_on_data_loss,
                    ):
                        held.append(batch)
                        records += len(batch)
                        if sum(each.nbytes for each in held) >= ROW_GROUP_BYTES:
                            writer.write_table(pa.Table.from_batches(held, schema))
                            held = []
                    if held:
                        writer.write_table(pa.Table.from_batches(held, schema))
                sink.flush()
                os.fsync(sink.fileno())
            if not records:
                return pa.RecordBatch.from_pylist([], arrow_schema(MANIFEST))
            os.rename(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return pa.RecordBatch.from_pylist(
            [
                {
                    "file": name,
                    "bytes": os.path.getsize(path),
                    "records": records,
                    "stats": delta_stats(pq.read_metadata(path)),
                }
            ],
            arrow_schema(MANIFEST),
        )


def check_whole(span: Span, schema: pa.Schema) -> None:
    """Refuse a channel that has more columns than the table: they would be lost."""
    with span.channel.open() as log:
        start = max(span.start, log.first_position)  # whether what retention took may be missing is not asked here
        columns = columns_of_batch(log.read(start, 1), str(getattr(log, "content", "raw")))
    lost = [column.name for column in columns if column.name not in schema.names]
    if lost:
        raise OptionsError(
            f"{span.channel.name}: the table has no column {', '.join(lost)}; start the query again to add what is new"
        )


def file_name(spans: Sequence[Span], app: str = "") -> str:
    """Return a name that these spans, read by this application, always have and others never.

    >>> from penstock.spark.plan import Channel
    >>> ticks = Channel("ticks", "ticks", "xchannel", "id")
    >>> file_name([Span(ticks, 80, 128, 48)]) == file_name([Span(ticks, 80, 128, 0)])
    True
    >>> file_name([Span(ticks, 80, 128, 48)]) == file_name([Span(ticks, 80, 152, 48)])
    False
    """
    told = json.dumps([app, *([span.channel.name, span.channel.identity, span.start, span.end] for span in spans)])
    return f"part-{hashlib.sha256(told.encode()).hexdigest()[:24]}.parquet"


def delta_stats(metadata: pq.FileMetaData) -> str:
    """Return what Delta keeps of a file so that readers can skip it: counts, smallest and largest values."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    dropped: set[str] = set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            name, found = column.path_in_schema, column.statistics
            if "." in name or found is None or not found.has_null_count:
                dropped.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            if not found.has_min_max:
                if found.null_count < row_group.num_rows:
                    dropped.add(name)
                continue
            if not (_tellable(found.min) and _tellable(found.max)):
                dropped.add(name)
                continue
            low[name] = min(low.get(name, found.min), found.min)
            high[name] = max(high.get(name, found.max), found.max)
    return json.dumps(
        {
            "numRecords": metadata.num_rows,
            "minValues": {name: _told(value, up=False) for name, value in low.items() if name not in dropped},
            "maxValues": {name: _told(value, up=True) for name, value in high.items() if name not in dropped},
            "nullCount": {name: count for name, count in nulls.items() if name not in dropped},
        }
    )


def _tellable(value: Any) -> bool:
    """Whether a value has a form in Delta's JSON: infinity has none, nor has a time without a zone a moment."""
    match value:
        case bool():
            return False
        case float():
            return math.isfinite(value)
        case dt.datetime():
            return value.tzinfo is not None
    return isinstance(value, int | str)


def _told(value: Any, *, up: bool) -> Any:
    """Return a value as Delta's JSON has it: times in ms, rounded outwards."""
    if not isinstance(value, dt.datetime):
        return value
    floor = value.astimezone(dt.UTC).replace(microsecond=value.microsecond // 1000 * 1000)
    moment = floor + dt.timedelta(milliseconds=1) if up and floor != value else floor
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
