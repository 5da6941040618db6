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
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.disk.plain import make_folders, private
from penstock.errors import OptionsError
from penstock.ship import ShippedLog
from penstock.ship.compacted import CompactedLog
from penstock.spark import objects
from penstock.spark.source import shipped
from penstock.spark.source.columns import Column, arrow_schema, columns_of_batch
from penstock.spark.source.options import SourceOptions, absolute_path, is_remote
from penstock.spark.source.partition import Values, check_partitions, folder_name, split_rows
from penstock.spark.source.plan import Span
from penstock.spark.source.reading import read_spans

__all__ = ["CHOSEN", "Exporter", "MANIFEST", "EXPORT_OPTIONS", "delta_stats", "parquet_writer"]

CHOSEN: Final = ("compression",)
"""What whoever fills a table may choose besides the options of the source."""
EXPORT_OPTIONS: Final = (*CHOSEN, "app", "bounds", "columns", "whole", "partitionBy", "node")
"""What ``penstock-export`` takes besides the options of the source, and ``table``."""

MANIFEST: Final = (
    Column("file", "string"),
    Column("bytes", "bigint"),
    Column("records", "bigint"),
    Column("stats", "string"),
    Column("partition", "string"),
)
ROW_GROUP_BYTES: Final = 32 << 20
MOST_OPEN: Final = 64
"""Files that a task has open at a time."""
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
    by: tuple[str, ...] = ()
    """What the table is partitioned by."""
    node: str = ""
    bounds: dict[str, tuple[int, int]] | None = None
    """Of a batch: what is read of each channel; the others are not."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Exporter:
        """Read Spark's options."""
        table = options.get("table")
        if not table:
            raise OptionsError("no table: penstock-export needs the folder its files go to")
        by = tuple(filter(None, (options.get("partitionBy") or "").split(",")))
        return cls(
            absolute_path(table),
            options.get("app") or "",
            options.get("compression") or "zstd",
            options.get("whole") == "true",
            check_partitions(by),
            options.get("node") or "",
            msgspec.json.decode(text, type=dict[str, tuple[int, int]]) if (text := options.get("bounds")) else None,
        )

    def export(self, spans: Sequence[Span], schema: pa.Schema, options: SourceOptions) -> pa.RecordBatch:
        """Write files, one for each partition, and return the rows of the manifest that name them."""
        if self.whole:
            for span in spans:
                check_whole(span, schema)
        batches = read_spans(
            spans,
            schema,
            batch_bytes=options.batch_bytes,
            filters=options.filters,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        rows: list[dict[str, Any]] = []
        with Parts(self, spans, schema) as parts:
            for batch in batches:
                for values, held in split_rows(batch, self.by, self.node) if self.by else (({}, batch),):
                    rows += parts.add(values, held)
            rows += parts.finish()
        return pa.RecordBatch.from_pylist(rows, arrow_schema(MANIFEST))


class Parts:
    """The files that a task writes, one for each partition; few are open at a time.

    A partition whose file was closed to make room gets another one: which, depends on the records alone, so that a
    task that runs twice writes the same files.
    """

    def __init__(self, exporter: Exporter, spans: Sequence[Span], schema: pa.Schema) -> None:
        self._exporter, self._spans = exporter, spans
        self._schema = pa.schema([field for field in schema if field.name not in exporter.by])
        self._open: dict[str, OpenPart] = {}
        self._made: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._open.values():
            part.drop()

    def add(self, values: Values, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Write rows of one partition; return the manifest of a file that was closed to make room."""
        folder, closed = folder_name(values), []
        part = self._open.pop(folder, None)
        if part is None:
            if len(self._open) >= MOST_OPEN:
                closed.append(self._open.pop(next(iter(self._open))).close())
            count = self._made[folder] = self._made.get(folder, 0) + 1
            app = self._exporter.app if not values else f"{self._exporter.app}\n{folder}\n{count}"
            name = os.path.join(folder, file_name(self._spans, app))
            part = OpenPart(self._exporter, name, values, self._schema)
        self._open[folder] = part  # the one that was used last is the last to go
        part.add(batch)
        return closed

    def finish(self) -> list[dict[str, Any]]:
        """Close all files; return their manifest."""
        rows = [part.close() for part in self._open.values()]
        self._open.clear()
        return rows


class OpenPart:
    """A Parquet file that is being written; it gets its name when it is whole and on disk."""

    def __init__(self, exporter: Exporter, name: str, values: Values, schema: pa.Schema) -> None:
        self._name, self._values, self._schema = name, values, schema
        self._table, self._remote = exporter.table, is_remote(exporter.table)
        self._path = os.path.join(tempfile.gettempdir() if self._remote else exporter.table, name)
        make_folders(os.path.dirname(self._path))
        self._temporary = f"{self._path}.{uuid.uuid4().hex}.tmp"
        # A file of a lake has the mode of its umask; one that waits in the temporary folder is nobody else's business.
        self._sink = open(self._temporary, "xb", opener=private if self._remote else None)  # noqa: SIM115
        self._writer = parquet_writer(self._sink, schema, exporter.compression)
        self._held: list[pa.RecordBatch] = []
        self._size = self._records = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows; a group of them is written at a time."""
        self._held.append(batch)
        self._size += batch.nbytes
        self._records += len(batch)
        if self._size >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Make the file durable under its name; return its row of the manifest."""
        try:
            self._flush()
            self._writer.close()
            self._sink.flush()
            if not self._remote:
                os.fsync(self._sink.fileno())
            self._sink.close()
            size, stats = os.path.getsize(self._temporary), delta_stats(pq.read_metadata(self._temporary))
            if self._remote:
                objects.put_file(self._table, self._name, self._temporary)
            else:
                os.rename(self._temporary, self._path)
        finally:
            self.drop()
        return {
            "file": self._name,
            "bytes": size,
            "records": self._records,
            "stats": stats,
            "partition": json.dumps(self._values),
        }

    def drop(self) -> None:
        """Remove what is not whole."""
        self._sink.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held, self._schema))
        self._held, self._size = [], 0


def parquet_writer(sink: Any, schema: pa.Schema, compression: str = "zstd") -> pq.ParquetWriter:
    """Return a writer of Parquet as tables of channels have it."""
    return pq.ParquetWriter(
        sink,
        schema,
        compression=compression,
        compression_level=LEVEL if compression == "zstd" else None,
        use_dictionary=[field.name for field in schema if field.type in REPEATED],
        column_encoding={field.name: GROWING for field in schema if field.type in NUMBERS},
        write_statistics=[
            field.name for field in schema if not (pa.types.is_binary(field.type) or pa.types.is_nested(field.type))
        ],
    )


def check_whole(span: Span, schema: pa.Schema) -> None:
    """Refuse a channel that has more columns than the table: they would be lost."""
    with span.open() as log:
        if isinstance(log, CompactedLog):
            return  # its segments were looked at when they were shipped
        if isinstance(log, ShippedLog):
            _refuse_lost(span, shipped.columns_of(log), schema)
            return
        start = max(span.start, log.first_position)  # whether what retention took may be missing is not asked here
        columns = columns_of_batch(log.read(start, 1), log.content)
    _refuse_lost(span, columns, schema)


def _refuse_lost(span: Span, columns: Sequence[Column], schema: pa.Schema) -> None:
    lost = [column.name for column in columns if column.name not in schema.names]
    if lost:
        raise OptionsError(
            f"{span.channel.name}: the table has no column {', '.join(lost)}; start the query again to add what is new"
        )


def file_name(spans: Sequence[Span], app: str = "") -> str:
    """Return a name that these spans, read by this application, always have and others never.

    >>> from penstock.spark.source.plan import SourceChannel
    >>> ticks = SourceChannel("ticks", "ticks", "xchannel", "id")
    >>> file_name([Span(ticks, 80, 128, 48)]) == file_name([Span(ticks, 80, 128, 0)])
    True
    >>> file_name([Span(ticks, 80, 128, 48)]) == file_name([Span(ticks, 80, 152, 48)])
    False
    """
    told = json.dumps([app, *([span.channel.name, span.channel.identity, span.start, span.end] for span in spans)])
    return f"part-{hashlib.sha256(told.encode()).hexdigest()[:24]}.parquet"


END_OF_TIME: Final = dt.datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=dt.UTC)


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
            try:
                smallest, largest = found.min, found.max
            except OverflowError:  # a time or day that Python has no year for
                smallest = largest = None
            if not (_has_delta_stat(smallest) and _has_delta_stat(largest)):
                dropped.add(name)
                continue
            low[name] = min(low.get(name, smallest), smallest)
            high[name] = max(high.get(name, largest), largest)
    return json.dumps(
        {
            "numRecords": metadata.num_rows,
            "minValues": {name: _delta_json(value, up=False) for name, value in low.items() if name not in dropped},
            "maxValues": {name: _delta_json(value, up=True) for name, value in high.items() if name not in dropped},
            "nullCount": {name: count for name, count in nulls.items() if name not in dropped},
        }
    )


def _has_delta_stat(value: Any) -> bool:
    """Whether a value has a form in Delta's JSON: infinity has none, nor has a time without a zone a moment.

    The last millisecond of the year 9999 cannot be rounded up.
    """
    match value:
        case bool():
            return False
        case float():
            return math.isfinite(value)
        case dt.datetime():
            return value.tzinfo is not None and value <= END_OF_TIME
    return isinstance(value, int | str)


def _delta_json(value: Any, *, up: bool) -> Any:
    """Return a value as Delta's JSON has it: times in ms, rounded outwards."""
    if not isinstance(value, dt.datetime):
        return value
    floor = value.astimezone(dt.UTC).replace(microsecond=value.microsecond // 1000 * 1000)
    moment = floor + dt.timedelta(milliseconds=1) if up and floor != value else floor
    return moment.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
