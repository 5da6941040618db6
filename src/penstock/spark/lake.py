"""The lake: Delta tables through delta-rs, without a jar.

A batch becomes part of a table by one commit that also carries (application, batch) as Delta's application transaction.
Before anything is written the table is asked how far the application has come; so a batch that Spark replays is
committed once.

``ingest`` moves channels into a table without passing payloads through the JVM: the tasks write zstd Parquet
themselves and hand back one row a file, and the driver commits those.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import ExpiredError, OptionsError, ReplacedError, UnsupportedError
from penstock.spark.columns import BASE, Column, arrow_schema
from penstock.spark.export import EXPORT_OPTIONS, delta_stats
from penstock.spark.options import SourceOptions, local_path
from penstock.spark.plan import find_channels

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

__all__ = [
    "DataFile",
    "app_of",
    "append",
    "commit_files",
    "committed_records",
    "ingest",
    "ingest_once",
    "open_table",
    "read",
    "read_added",
    "replace",
    "committed_batch",
    "table_columns",
]


DELTA: Final = {
    "string": "string",
    "long": "bigint",
    "integer": "int",
    "timestamp": "timestamp",
    "binary": "binary",
    "boolean": "boolean",
    "double": "double",
}
"""Types of a table by Delta's name, as Spark names them; a table of channels has no others."""


class DataFile(msgspec.Struct, frozen=True):
    """A Parquet file in a table's folder that is to become part of the table."""

    file: str
    bytes: int
    records: int
    stats: str


def open_table(table: str) -> DeltaTable | None:
    """Return the table in a folder, or None when there is none yet."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError
    except ImportError:
        raise UnsupportedError("the lake needs deltalake: pip install 'penstock[spark]'") from None
    table = local_path(table)
    if not os.path.isdir(os.path.join(table, "_delta_log")):
        return None
    try:
        return DeltaTable(table)
    except TableNotFoundError:
        return None


def committed_batch(table: str, app: str) -> int:
    """Return the last batch of an application that the table has, -1 when there is none."""
    found = open_table(table)
    version = None if found is None else found.transaction_version(app)
    return -1 if version is None else int(version)


def committed_records(table: str, app: str, after: int) -> int:
    """Return how many records an application has committed since a version of the table, -1 for all of them."""
    found = open_table(table)
    records = 0
    for version in range(after + 1, 0 if found is None else found.version() + 1):
        actions = _actions(table, version)
        if any(action["txn"]["appId"] == app for action in actions if "txn" in action):
            added = (action["add"] for action in actions if "add" in action)
            records += sum(int(msgspec.json.decode(add["stats"])["numRecords"]) for add in added)
    return records


def app_of(checkpoint: str) -> str:
    """Return the name by which a table knows the query with this checkpoint.

    >>> app_of("lake/raw/_checkpoint") == app_of("file:" + os.path.abspath("lake/raw/_checkpoint"))
    True
    """
    return "penstock-" + hashlib.sha256(os.path.abspath(local_path(checkpoint)).encode()).hexdigest()[:16]


def commit_files(
    table: str, app: str, batch: int, files: Sequence[DataFile], schema: pa.Schema, *, mode: str = "append"
) -> bool:
    """Make files part of the table in one commit, or all of it; False when it has this batch already."""
    from deltalake import CommitProperties, Schema, Transaction
    from deltalake.transaction import AddAction, create_table_with_add_actions

    if committed_batch(table, app) >= batch:
        return False
    now = int(time.time() * 1000)
    actions: list[Any] = [AddAction(item.file, item.bytes, {}, now, True, item.stats) for item in files]
    properties = CommitProperties(app_transactions=[Transaction(app, batch)])
    delta = Schema.from_arrow(schema)
    existing = open_table(table)
    if existing is None:
        os.makedirs(local_path(table), exist_ok=True)
        create_table_with_add_actions(local_path(table), delta, actions, mode="error", commit_properties=properties)
    else:
        existing.create_write_transaction(actions, mode, delta, commit_properties=properties)
    return True


def append(frame: DataFrame, table: str, *, app: str, batch: int) -> bool:
    """Append a DataFrame to a table as one batch; False when the table has it already.

    Spark writes Parquet into a folder of the table that belongs to this batch alone; a second attempt replaces it.
    """
    if committed_batch(table, app) >= batch:
        return False
    files, schema = write_files(frame, table, f"spark-{hashlib.sha256(app.encode()).hexdigest()[:12]}-{batch}")
    return commit_files(table, app, batch, files, schema)


def replace(frame: DataFrame, table: str) -> int:
    """Make a DataFrame the whole content of a table, in one commit; return how many rows it has.

    Earlier versions stay readable until the table is vacuumed.
    """
    name = uuid.uuid4().hex
    files, schema = write_files(frame, table, f"spark-{name[:12]}")
    commit_files(table, f"replace-{name}", 0, files, schema, mode="overwrite")
    return sum(item.records for item in files)


def write_files(frame: DataFrame, table: str, part: str) -> tuple[list[DataFile], pa.Schema]:
    """Let Spark write a DataFrame into the folder ``part`` of a table; return its files and their schema."""
    folder = os.path.join(local_path(table), part)
    shutil.rmtree(folder, ignore_errors=True)
    frame.write.mode("overwrite").option("compression", "zstd").parquet(folder)
    files, schema = [], None
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".parquet"):
            continue
        path = os.path.join(folder, name)
        metadata = pq.read_metadata(path)
        schema = schema or pq.read_schema(path)
        if metadata.num_rows:
            files.append(DataFile(f"{part}/{name}", os.path.getsize(path), metadata.num_rows, delta_stats(metadata)))
    if schema is None:
        raise OptionsError(f"{table}: Spark wrote no file, not even an empty one")
    return files, schema.remove_metadata()


def read(spark: SparkSession, table: str, *, version: int | None = None) -> DataFrame:
    """Return a table as a DataFrame, as it is now or as it was at a version."""
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    if version is not None:
        found.load_as_version(version)
    schema = _spark_schema(found)
    files = found.file_uris()
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*files)


def read_added(spark: SparkSession, table: str, after: int, upto: int) -> DataFrame:
    """Return the rows that came to a table after one version and up to another.

    Files that were joined, and what is left of files when old rows were deleted, hold no new rows.  A table that was
    replaced is refused: its rows did not come, they changed.
    """
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    schema = _spark_schema(found)
    files: list[str] = []
    for version in range(after + 1, upto + 1):
        try:
            actions = _actions(table, version)
        except FileNotFoundError as exc:
            raise ExpiredError(exc.filename, version, upto) from None
        removed = any(action["remove"].get("dataChange", True) for action in actions if "remove" in action)
        if removed:
            operation = next(
                (action["commitInfo"].get("operation") for action in actions if "commitInfo" in action), ""
            )
            if operation != "DELETE":
                raise ReplacedError(table, f"its rows were changed by {operation or 'someone'} in version {version}")
            continue
        added = (action["add"] for action in actions if "add" in action)
        files += [os.path.join(local_path(table), unquote(add["path"])) for add in added if add["dataChange"]]
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


def ingest(
    spark: SparkSession,
    channels: str,
    table: str,
    checkpoint: str,
    *,
    trigger: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Iterable[Column] | None = None,
    app: str | None = None,
    on_commit: Callable[[int, list[DataFile]], None] | None = None,
) -> StreamingQuery:
    """Start a query that keeps a table up to date with channels, each record in it exactly once.

    It reads what is there and stops unless ``trigger`` says otherwise (``{"processingTime": "1 second"}``).
    ``options`` are the source's.  The query is known to the table by its checkpoint unless ``app`` names it.  The table
    has every column that the channels have unless ``columns`` names them; a channel that comes later with more of them
    ends the query, which adds them when it is started again.  ``on_commit`` is called where batches are committed:
    in this process, or beside a Spark Connect server.
    """
    table = local_path(table)
    chosen = table_columns(channels, table, options) if columns is None else tuple(columns)
    known = app or app_of(checkpoint)
    schema = arrow_schema(chosen)
    told = _export_options(table, chosen, options, whole=columns is None)
    manifest = spark.readStream.format("penstock-export").options(**told).load(channels)

    def commit(frame: DataFrame, batch: int) -> None:
        if committed_batch(table, known) < batch:
            files = data_files(frame.collect())
            commit_files(table, known, batch, files, schema)
            if on_commit is not None:
                on_commit(batch, files)

    writer = manifest.writeStream.foreachBatch(commit).option("checkpointLocation", checkpoint)
    return writer.trigger(**(trigger or {"availableNow": True})).start()


def ingest_once(
    spark: SparkSession, channels: str, table: str, *, options: Mapping[str, Any] | None = None, app: str, batch: int
) -> int:
    """Export what the channels hold now as one batch; return how many records, 0 when the table has the batch."""
    if committed_batch(table, app) >= batch:
        return 0
    columns = table_columns(channels, table, options)
    told = _export_options(table, columns, options, whole=True)
    files = data_files(spark.read.format("penstock-export").options(**told).load(channels).collect())
    commit_files(table, app, batch, files, arrow_schema(columns))
    return sum(item.records for item in files)


def table_columns(channels: str, table: str, options: Mapping[str, Any] | None = None) -> tuple[Column, ...]:
    """Return the columns that a table of these channels has, adding to the table that is there what it lacks.

    A delete is told from an empty value by ``op``: a table without the columns of envelopes would not be the log.
    """
    from penstock.spark.source import added_columns

    given = {key: str(value) for key, value in (options or {}).items()}
    told = SourceOptions.of({**given, "path": channels}, also=EXPORT_OPTIONS)
    found = [channel for channel in find_channels(told.paths, told.format) if told.filters.channel_passes(channel.name)]
    wanted = {column.name: column for column in (*BASE, *added_columns(found))}
    existing = open_table(table)
    if existing is None:
        return tuple(wanted.values())
    held = {field.name: Column(field.name, DELTA[field.type.type]) for field in existing.schema().fields}
    more = [column for name, column in wanted.items() if name not in held]
    if more:
        from deltalake import Schema

        existing.alter.add_columns(list(Schema.from_arrow(arrow_schema(more)).fields))
    return (*held.values(), *more)


def _actions(table: str, version: int) -> list[dict[str, Any]]:
    """Return what one commit of a table did."""
    with open(os.path.join(local_path(table), "_delta_log", f"{version:020d}.json"), "rb") as log:
        return [msgspec.json.decode(line) for line in log if line.strip()]


def _spark_schema(table: DeltaTable) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(msgspec.json.decode(table.schema().to_json()))


def _export_options(
    table: str, columns: Sequence[Column], options: Mapping[str, Any] | None, *, whole: bool
) -> dict[str, str]:
    return {
        **{key: str(value) for key, value in (options or {}).items()},
        "table": local_path(table),
        "columns": ",".join(f"{column.name} {column.type}" for column in columns),
        "whole": str(whole).lower(),
    }


def data_files(rows: Iterable[Any]) -> list[DataFile]:
    """Return the files of a manifest, in the order of their names."""
    files = [DataFile(row["file"], row["bytes"], row["records"], row["stats"]) for row in rows]
    return sorted(files, key=lambda item: item.file)
