"""``spark.read.format("penstock")``: channels as a DataFrame.

The reader plans in a process of its own, is pickled, and reads in Spark's workers; so it keeps options and schemas only
and opens logs where it needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import ExpiredError, OptionsError
from penstock.ship import ShippedLog
from penstock.spark.source import shipped
from penstock.spark.source.bounds import check_chosen, check_named, end_of, start_of
from penstock.spark.source.catalog import keep_options, with_kept_options
from penstock.spark.source.columns import (
    BASE,
    ENVELOPE,
    NODE,
    NUMBERED,
    Column,
    arrow_schema,
    check_columns,
    columns_of_batch,
)
from penstock.spark.source.export import EXPORT_OPTIONS, MANIFEST, Exporter
from penstock.spark.source.names import check_use, is_catalog_table, nearest
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.plan import SourceChannel, Span, bounds_of, find_channels, plan_tasks
from penstock.spark.source.reading import read_spans
from penstock.spark.source.tables import TableReader, schema_of, table_of

__all__ = ["PenstockSource", "ExportSource", "LogPartition"]

USE_OF_TABLE: Final = {"fold": "a fold", "channels": "the table channels", "artifact": "a fold"}
POSITIONS: Final = ("fromPosition", "toPosition")
"""Refused by the stream itself, which says what it has instead."""


class LogPartition(InputPartition):
    """What one task reads: spans, one after another."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        super().__init__(spans)
        self.spans = spans


class PenstockSource(DataSource):
    """The format ``penstock``: reads channels, alone or by the folder, in batch and as a stream, and writes logs.

    >>> PenstockSource.name()
    'penstock'
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(...)``."""
        return "penstock"

    def schema(self) -> str | StructType:
        """Return the columns every channel has and those that the formats found here add; or those of a table."""
        options = SourceOptions.of(self.options)
        table = table_of(options)
        if table is not None:
            return keep_options(schema_of(table), self.options) if is_catalog_table(self.options) else schema_of(table)
        columns = (*BASE, *added_columns(find_channels(options.paths, options.format)))
        if is_catalog_table(self.options):
            return keep_options(from_arrow_schema(arrow_schema(columns)), self.options)
        return ", ".join(column.ddl for column in columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        check_schema(schema)
        given = with_kept_options(self.options, schema)
        options = SourceOptions.of(given)
        table = table_of(options)
        if table is not None:
            check_use(given, USE_OF_TABLE[table])
            return TableReader(table, options, schema)
        check_use(given, "a batch of logs")
        return LogSourceReader(options, wanted_columns(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the stream reader."""
        from penstock.spark.source.stream import LogStreamReader

        check_schema(schema)
        given = with_kept_options(self.options, schema)
        options = SourceOptions.of(given)
        table = table_of(options)
        if table is not None:
            raise OptionsError(f"{options.paths[0]}: a table ({table}) is read in batch; stream the log behind it")
        check_use(given, "a stream", POSITIONS)
        return LogStreamReader(options, wanted_columns(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the batch writer."""
        from penstock.spark.sink.choice import batch_writer

        # Not the options kept in the schema: that is the schema of what is written, and would name where it was read.
        writer: DataSourceWriter = batch_writer(self.options, schema, overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the stream writer."""
        from penstock.spark.sink.choice import stream_writer

        writer: DataSourceStreamWriter = stream_writer(self.options, schema, overwrite)
        return writer


class ExportSource(DataSource):
    """The format ``penstock-export``: each task writes a Parquet file and its row says where; see lake.py.

    >>> ExportSource.name()
    'penstock-export'
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(...)``."""
        return "penstock-export"

    def schema(self) -> str:
        """Return the columns of the manifest."""
        return ", ".join(column.ddl for column in MANIFEST)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """Return the batch reader."""
        check_use(self.options, "a batch of logs", ("table", *EXPORT_OPTIONS))
        return LogSourceReader(self._options(), self._columns(), Exporter.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002
        """Return the stream reader."""
        from penstock.spark.source.stream import LogStreamReader

        check_use(self.options, "a stream", ("table", *POSITIONS, *EXPORT_OPTIONS))
        return LogStreamReader(self._options(), self._columns(), Exporter.of(self.options))

    def _options(self) -> SourceOptions:
        return SourceOptions.of(self.options, also=EXPORT_OPTIONS)

    def _columns(self) -> tuple[Column, ...]:
        text = self.options.get("columns")
        if text is None:
            return BASE
        pairs = (item.rsplit(" ", 1) for item in text.split(";"))
        return tuple(Column(name.strip(), kind.strip()) for name, kind in pairs)


class LogSourceReader(DataSourceReader):
    """Reads what is in the channels at the moment of planning."""

    def __init__(self, options: SourceOptions, columns: Sequence[Column], exporter: Exporter | None = None) -> None:
        self.options, self.columns, self.exporter = options, tuple(columns), exporter

    def partitions(self) -> Sequence[InputPartition]:
        """Plan spans over everything that is visible now."""
        found = find_channels(self.options.paths, self.options.format)
        given = None if self.exporter is None else self.exporter.bounds
        if given is not None:
            return partitions_of(
                [(channel, *given[channel.name]) for channel in found if channel.name in given], self.options
            )
        check_chosen(self.options, found)
        bounds, channels = [], [channel for channel in found if self.options.filters.takes(channel)]
        check_named(self.options, (channel.name for channel in channels))
        for channel in channels:
            with channel.open() as log:
                first, end = bounds_of(log, lenient=not self.options.fail_on_data_loss)
            start = start_of(channel, self.options, first, end)
            if start < first and self.options.fail_on_data_loss:
                raise ExpiredError(channel.path, start, first)
            bounds.append((channel, max(start, first), end_of(channel, self.options, first, end)))
        return partitions_of(bounds, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task."""
        return read_partition(partition, self.options, self.columns, self.exporter)


def partitions_of(bounds: Iterable[tuple[SourceChannel, int, int]], options: SourceOptions) -> list[LogPartition]:
    """Return the tasks that read these channels between their bounds."""
    tasks = plan_tasks(bounds, options.partition_bytes, options.partitions, options.filters)
    return [LogPartition(task) for task in tasks]


def read_partition(
    partition: InputPartition,
    options: SourceOptions,
    columns: Sequence[Column],
    exporter: Exporter | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a task, or export them and yield where they are."""
    if not isinstance(partition, LogPartition) or not partition.spans:  # Spark makes a task of none where there is none
        return
    if exporter is not None:
        yield exporter.export(partition.spans, arrow_schema(columns), options)
        return
    yield from read_spans(
        partition.spans,
        arrow_schema(columns),
        batch_bytes=options.batch_bytes,
        filters=options.filters,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def check_schema(schema: StructType) -> None:
    """Refuse a schema of nothing: Spark would count no rows, whatever there is."""
    if not schema.fields:
        raise OptionsError("a schema without a column: name one, or leave the schema out")


def wanted_columns(schema: StructType, options: SourceOptions) -> tuple[Column, ...]:
    """Return the columns that Spark asks for: the whole schema, or what ``.schema(...)`` named.

    A column that no format has and none of the channels that are there is a misspelt one, and refused.
    """
    wanted = tuple(Column(field.name, field.dataType.simpleString(), field.nullable) for field in schema.fields)
    check_columns(wanted, (*BASE, *ENVELOPE, NODE))
    arrow_schema(wanted)
    known = [column.name for column in (*BASE, *ENVELOPE, *NUMBERED, NODE)]
    if not all(column.name in known for column in wanted):
        known += [column.name for column in added_columns(find_channels(options.paths, options.format))]
    for column in wanted:
        if column.name not in known:
            raise OptionsError(f"no channel has a column {column.name}{nearest(column.name, dict.fromkeys(known))}")
    return wanted


def added_columns(channels: Iterable[SourceChannel]) -> tuple[Column, ...]:
    """Return what the formats of these channels add, looking at one record for each format and content."""
    seen: set[tuple[str, str]] = set()
    added: dict[str, Column] = {}
    for channel in channels:
        with channel.open() as log:
            if isinstance(log, ShippedLog):
                added |= {column.name: column for column in shipped.columns_of(log)}
                continue
            content = log.content
            if (channel.format, content) in seen:
                continue
            batch = log.read(log.first_position, 1)
        if len(batch):  # an empty log may say less
            seen.add((channel.format, content))
        for column in columns_of_batch(batch, content):
            if added.setdefault(column.name, column).type != column.type:
                raise OptionsError(f"column {column.name} has two types in these channels: give a schema(...)")
    return tuple(added.values())
