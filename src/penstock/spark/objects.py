"""Tables on an object store: delta-rs commits by conditional put, files go up and come down without the JVM.

Spark itself knows no object store here, so its rows are written by Python in its tasks, and read by a source of its
own.  Credentials and endpoint are those of each process's environment: nothing of them is in an option, a plan or an
error.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock.disk import object_store_for
from penstock.disk.objectstore import environment_endpoint, may_use_http
from penstock.errors import CorruptionError, OptionsError, RetryError
from penstock.spark.source.options import is_remote

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "FilesSource",
    "check_file",
    "commit_of",
    "files_of",
    "frame_of",
    "open_delta",
    "put_file",
    "storage_options",
    "write_frame",
]

SMALL_BYTES: Final = 5 << 20
CHUNK_BYTES: Final = 1 << 20
TASK_BYTES: Final = 64 << 20
ROW_GROUP_BYTES: Final = 32 << 20


def storage_options(table: str) -> dict[str, str] | None:
    """Return what delta-rs has to be told beside what it finds in the environment; None of a table on this machine."""
    if not is_remote(table):
        return None
    scheme = table.partition("://")[0]
    told = {}
    endpoint = environment_endpoint(table)
    if endpoint and scheme in ("s3", "s3a"):
        told["aws_endpoint_url"] = endpoint
    if may_use_http(table):
        told["allow_http"] = "true"
    return told


def open_delta(table: str, version: int | None = None) -> DeltaTable | None:
    """Return the table at a URL, None where there is none."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        return DeltaTable(table, version=version, storage_options=storage_options(table))
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as exc:
        raise RetryError(f"{table}: {_line(exc)}") from None


def check_file(table: str, file: str, size: int) -> None:
    """Refuse a file of a table that is not there with this size."""
    found = object_store_for(table).head(file)
    if found is None or found.size != size:
        raise CorruptionError(
            f"{table}/{file}", 0, f"its task wrote {size} bytes, which are gone before they were committed"
        )


def commit_of(table: str, version: int) -> list[dict[str, Any]]:
    """Return what one commit of a table did; FileNotFoundError when its log is gone."""
    data, _ = object_store_for(table).get(f"_delta_log/{version:020d}.json")
    return [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]


def put_file(table: str, name: str, path: str) -> int:
    """Send a file up into a table's place and return its size."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        store = object_store_for(table)
        if size <= SMALL_BYTES:
            store.put(name, file.read())
        else:
            store.put(name, iter(lambda: file.read(CHUNK_BYTES), b""))
    return size


# --- Rows of Spark, up


def write_frame(
    frame: DataFrame, table: str, stats: Callable[[Any], str]
) -> tuple[list[tuple[str, int, int, str]], pa.Schema]:
    """Have each task of a DataFrame write one Parquet file into a table's place.

    Return (file, bytes, rows, statistics) for each that has rows, and their schema.
    """
    schema = to_arrow_schema(frame.schema, timezone="UTC")
    part = f"spark-{uuid.uuid4().hex[:16]}"
    write = _Writer(table, part, schema, stats)
    rows = frame.mapInArrow(write, "file string, bytes bigint, rows bigint, stats string").collect()
    return sorted((row["file"], row["bytes"], row["rows"], row["stats"]) for row in rows), schema


class _Writer:
    """What one task does with its rows; Spark carries it there."""

    def __init__(self, table: str, part: str, schema: pa.Schema, stats: Callable[[Any], str]) -> None:
        self.table, self.part, self.schema, self.stats = table, part, schema, stats

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            rows = 0
            with pq.ParquetWriter(file.name, self.schema, compression="zstd") as writer:
                for batch in batches:
                    if len(batch):
                        writer.write_batch(batch.cast(self.schema), row_group_size=None)
                        rows += len(batch)
            if not rows:
                return
            name = f"{self.part}/part-{uuid.uuid4().hex}.parquet"  # a task that runs again leaves the first for vacuum
            size = put_file(self.table, name, file.name)
            told = self.stats(pq.read_metadata(file.name))
        columns = {"file": [name], "bytes": [size], "rows": [rows], "stats": [told]}
        yield pa.RecordBatch.from_pydict(columns)


# --- Files of a table, down


def frame_of(spark: SparkSession, table: DeltaTable, url: str, files: Iterable[tuple[str, int]]) -> DataFrame:
    """Return files of a table as a DataFrame: names below the table and their sizes."""
    schema = from_arrow_schema(pa.schema(table.schema().to_arrow()))
    spark.dataSource.register(FilesSource)
    told = msgspec.json.encode(sorted(files)).decode()
    return spark.read.format(FilesSource.name()).schema(schema).option("files", told).load(url)


def files_of(table: DeltaTable) -> list[tuple[str, int]]:
    """Return the files of a table as it is, with their sizes."""
    actions = pa.table(table.get_add_actions())
    return list(zip(actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist(), strict=True))


class FilesSource(DataSource):
    """The format ``penstock-files``: Parquet files below a URL, which the caller names.

    >>> FilesSource.name()
    'penstock-files'
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(...)``."""
        return "penstock-files"

    def schema(self) -> StructType:
        """Refuse: the caller gives it."""
        raise OptionsError("penstock-files reads what its caller says: give a schema(...)")

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader."""
        files = msgspec.json.decode(self.options["files"], type=list[tuple[str, int]])
        return FilesReader(self.options["path"], files, schema)


class FilePartition(InputPartition):
    """The files of one task."""

    def __init__(self, files: tuple[str, ...]) -> None:
        super().__init__(files)
        self.files = files


class FilesReader(DataSourceReader):
    """Reads Parquet files, some in each task."""

    def __init__(self, url: str, files: Sequence[tuple[str, int]], schema: StructType) -> None:
        self.url, self.files, self.schema = url, list(files), schema

    def partitions(self) -> Sequence[InputPartition]:
        """Share the files out."""
        tasks: list[list[str]] = []
        held = TASK_BYTES
        for name, size in self.files:
            if held + size > TASK_BYTES:
                tasks.append([])
                held = 0
            tasks[-1].append(name)
            held += size
        return [FilePartition(tuple(task)) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task's files; columns that a file lacks are null."""
        if not isinstance(partition, FilePartition):  # Spark makes a task of none where there is none
            return
        schema = to_arrow_schema(self.schema, timezone="UTC")
        store = object_store_for(self.url)
        for name in partition.files:
            data, _ = store.get(name)
            with pq.ParquetFile(pa.BufferReader(data), coerce_int96_timestamp_unit="us") as file:
                wanted = [field.name for field in schema if field.name in file.schema_arrow.names]
                for batch in file.iter_batches(columns=wanted):
                    columns = [
                        batch.column(field.name).cast(field.type)
                        if field.name in wanted
                        else pa.nulls(len(batch), field.type)
                        for field in schema
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:300]
