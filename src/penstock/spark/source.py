"""``spark.read.format("penstock")``: channels as a DataFrame.

The reader plans in a process of its own, is pickled, and reads in Spark's workers; so it keeps options and schemas only
and opens logs where it needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from penstock.errors import OptionsError
from penstock.spark.columns import BASE, ENVELOPE, Column, arrow_schema, check_columns, columns_of_batch
from penstock.spark.export import EXPORT_OPTIONS, MANIFEST, Exporter
from penstock.spark.options import SourceOptions
from penstock.spark.plan import Channel, Span, find_channels, plan_tasks
from penstock.spark.reading import read_spans
from penstock.spark.tables import TableReader, schema_of, table_of

__all__ = ["PenstockSource", "ExportSource", "LogPartition"]


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
            return schema_of(table)
        return ", ".join(column.ddl for column in (*BASE, *added_columns(find_channels(options.paths, options.format))))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        options = SourceOptions.of(self.options)
        table = table_of(options)
        if table is not None:
            return TableReader(table, options, schema)
        return LogSourceReader(options, wanted_columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the stream reader."""
        from penstock.spark.stream import LogStreamReader

        options = SourceOptions.of(self.options)
        table = table_of(options)
        if table is not None:
            raise OptionsError(f"{options.paths[0]}: a table ({table}) is read in batch; stream the log behind it")
        return LogStreamReader(options, wanted_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the batch writer."""
        from penstock.spark.sinks import batch_writer

        writer: DataSourceWriter = batch_writer(self.options, schema, overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the stream writer."""
        from penstock.spark.sinks import stream_writer

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
        return LogSourceReader(self._options(), self._columns(), Exporter.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002
        """Return the stream reader."""
        from penstock.spark.stream import LogStreamReader

        return LogStreamReader(self._options(), self._columns(), Exporter.of(self.options))

    def _options(self) -> SourceOptions:
        return SourceOptions.of(self.options, also=EXPORT_OPTIONS)

    def _columns(self) -> tuple[Column, ...]:
        text = self.options.get("columns")
        if text is None:
            return BASE
        pairs = (item.rsplit(" ", 1) for item in text.split(","))
        return tuple(Column(name.strip(), kind.strip()) for name, kind in pairs)


class LogSourceReader(DataSourceReader):
    """Reads what is in the channels at the moment of planning."""

    def __init__(self, options: SourceOptions, columns: Sequence[Column], exporter: Exporter | None = None) -> None:
        self.options, self.columns, self.exporter = options, tuple(columns), exporter

    def partitions(self) -> Sequence[InputPartition]:
        """Plan spans over everything that is visible now."""
        bounds = []
        for channel in find_channels(self.options.paths, self.options.format):
            if self.options.filters.channel_passes(channel.name):
                with channel.open() as log:
                    bounds.append((channel, log.first_position, log.next_position))
        return partitions_of(bounds, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task."""
        return read_partition(partition, self.options, self.columns, self.exporter)


def partitions_of(bounds: Iterable[tuple[Channel, int, int]], options: SourceOptions) -> list[LogPartition]:
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


def wanted_columns(schema: StructType) -> tuple[Column, ...]:
    """Return the columns that Spark asks for: the whole schema, or what ``.schema(...)`` named."""
    wanted = tuple(Column(field.name, field.dataType.simpleString(), field.nullable) for field in schema.fields)
    check_columns(wanted, (*BASE, *ENVELOPE))
    arrow_schema(wanted)
    return wanted


def added_columns(channels: Iterable[Channel]) -> tuple[Column, ...]:
    """Return what the formats of these channels add, looking at one record for each format and content."""
    seen: set[tuple[str, str]] = set()
    added: dict[str, Column] = {}
    for channel in channels:
        with channel.open() as log:
            content = str(getattr(log, "content", "raw"))
            if (channel.format, content) in seen:
                continue
            batch = log.read(log.first_position, 1)
        if len(batch):  # an empty log may say less
            seen.add((channel.format, content))
        for column in columns_of_batch(batch, content):
            if added.setdefault(column.name, column).type != column.type:
                raise OptionsError(f"column {column.name} has two types in these channels: give a schema(...)")
    return tuple(added.values())
