"""What Spark reads as a table, in batch: folds, and the metadata of channels.

A kind of table is one entry of TABLES.  Its module has

    SCHEMA                        the columns, as Spark types
    recognise(disk, path)         whether a path can be nothing else, so that ``load`` needs no option ``table``
    plan(options)                 what is read: one ``TablePart`` a task
    read(part, options, schema)   the record batches of a part, of exactly this Arrow schema

Everything is opened read-only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, cast

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.disk import ReadDisk, read_disk_for
from penstock.errors import OptionsError
from penstock.spark.source.options import SourceOptions, is_remote

__all__ = ["TABLES", "TablePart", "Table", "TableReader", "table_of"]

TABLES: Final = {
    "fold": "penstock.spark.source.tables.fold",
    "channels": "penstock.spark.source.tables.channels",
    "artifact": "penstock.spark.source.tables.artifact",
}


class TablePart(msgspec.Struct, frozen=True):
    """What one task reads: a name that goes into a column, and where it is.

    >>> TablePart("latest", "data/latest.snap").name
    'latest'
    """

    name: str
    path: str


class Table(Protocol):
    """What the module of a kind of table has."""

    SCHEMA: StructType

    def recognise(self, disk: ReadDisk, path: str) -> bool:
        """Whether ``path`` is such a table and nothing else."""

    def plan(self, options: SourceOptions) -> list[TablePart]:
        """Return what there is to read."""

    def read(self, part: TablePart, options: SourceOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""


class TablePartition(InputPartition):
    """One part, as Spark carries it to a worker."""

    def __init__(self, part: TablePart) -> None:
        super().__init__(part)
        self.part = part


class TableReader(DataSourceReader):
    """Reads a table as it is when its tasks run.

    >>> TableReader("fold", SourceOptions(paths=("data/latest.snap",)), schema_of("fold")).name
    'fold'
    """

    def __init__(self, name: str, options: SourceOptions, schema: StructType) -> None:
        known = {field.name: field.dataType.simpleString() for field in _module(name).SCHEMA.fields}
        for field in schema.fields:
            if known.get(field.name) != field.dataType.simpleString():
                columns = ", ".join(f"{column} {kind}" for column, kind in known.items())
                raise OptionsError(f"{field.name} {field.dataType.simpleString()}: the columns here are {columns}")
        self.name, self.options, self.schema = name, options, schema

    def partitions(self) -> Sequence[InputPartition]:
        """Plan a task for each part."""
        return [TablePartition(part) for part in _module(self.name).plan(self.options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task."""
        if isinstance(partition, TablePartition):  # Spark makes up an empty partition where there is none
            schema = to_arrow_schema(self.schema, timezone="UTC")
            yield from _module(self.name).read(partition.part, self.options, schema)


def table_of(options: SourceOptions) -> str | None:
    """Return which kind of table is to be read, or None: logs.

    >>> table_of(SourceOptions(paths=("data",), table="fold"))
    'fold'
    """
    if options.table is not None:
        if options.table not in TABLES:
            raise OptionsError(f"table={options.table!r}: must be one of {', '.join(TABLES)}")
        return options.table
    if is_remote(options.paths[0]):
        return None  # by URL there are logs, unless the option says otherwise: nothing is asked only to find out
    disk = read_disk_for(options.paths[0])
    for name in TABLES:
        found = [_module(name).recognise(disk, path) for path in options.paths]
        if any(found) and not all(found):
            raise OptionsError(
                f"{options.paths[found.index(True)]} is a {name}, the other paths are not: load it alone"
            )
        if any(found):
            return name
    return None


def schema_of(name: str) -> StructType:
    """Return the columns of a kind of table.

    >>> schema_of("fold").names
    ['fold', 'key', 'value', 'version', 'revision']
    """
    return _module(name).SCHEMA


def _module(name: str) -> Table:
    return cast("Table", importlib.import_module(TABLES[name]))
