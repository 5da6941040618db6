"""The lake: Delta tables through delta-rs, without a jar.

A batch becomes part of a table by one commit that also carries (application, batch) as Delta's application transaction.
Before anything is written the table is asked how far the application has come; so a batch that Spark replays is
committed once.  The commit of a stream also carries (application@query, batch): so another query of that name, or one
whose checkpoint was made again, is told from it.

``ingest`` moves channels into a table without passing payloads through the JVM: the tasks write zstd Parquet
themselves and hand back one row a file, and the driver commits those.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import (
    ConflictError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    ReplacedError,
    UnsupportedError,
)
from penstock.spark.checkpoint import digest_of_place, query_of
from penstock.spark.columns import BASE, Column, arrow_schema
from penstock.spark.export import EXPORT_OPTIONS, delta_stats
from penstock.spark.options import SourceOptions, local_path
from penstock.spark.plan import find_channels

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

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
"""Types of a table by Delta's name, as Spark names them: those that columns of channels have."""
PATTERN: Final = re.compile(r"[\[\]{}*?]")
"""What Spark takes for a pattern in the name of a file, unless a backslash is before it."""
UNREADABLE: Final = re.compile(r"%[0-9A-Fa-f]{2}|\\")


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
    return _batch_of(open_table(table), app)


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
    return "penstock-" + digest_of_place(checkpoint)


def is_due(table: str, app: str, batch: int, query: str) -> bool:
    """Whether a batch of a stream is not in the table yet; ConflictError when it cannot be the next one."""
    return _is_due(open_table(table), table, app, batch, query)


def commit_files(
    table: str,
    app: str,
    batch: int,
    files: Sequence[DataFile],
    schema: pa.Schema,
    *,
    mode: str = "append",
    query: str | None = None,
) -> bool:
    """Make files part of the table in one commit, or all of it; False when it has this batch already.

    ``query`` is the id of the stream whose batch this is, empty where that is not known.  Columns that the table lacks
    are added to it; one of another type is refused.
    """
    from deltalake import CommitProperties, Schema, Transaction
    from deltalake.exceptions import CommitFailedError
    from deltalake.transaction import AddAction, create_table_with_add_actions

    existing = open_table(table)
    if not _is_due(existing, table, app, batch, query):
        return False
    for item in files:
        path = os.path.join(local_path(table), item.file)
        if not os.path.exists(path) or os.path.getsize(path) != item.bytes:
            raise CorruptionError(
                path, 0, f"its task wrote {item.bytes} bytes, which are gone before they were committed"
            )
    now = int(time.time() * 1000)
    actions: list[Any] = [AddAction(item.file, item.bytes, {}, now, True, item.stats) for item in files]
    transactions = [Transaction(app, batch)]
    if query:
        transactions.append(Transaction(f"{app}@{query}", batch))
    properties = CommitProperties(app_transactions=transactions)
    delta = Schema.from_arrow(schema)
    if existing is None:
        if UNREADABLE.search(os.path.abspath(local_path(table))):
            raise OptionsError(f"{table}: delta-rs takes % with two digits, and a backslash, for another character")
        os.makedirs(local_path(table), exist_ok=True)
        create_table_with_add_actions(local_path(table), delta, actions, mode="error", commit_properties=properties)
        return True
    if mode == "append" and _add_columns(existing, table, delta):
        return commit_files(table, app, batch, files, schema, query=query)  # on what the table is now
    try:
        existing.create_write_transaction(actions, mode, delta, commit_properties=properties)
    except CommitFailedError:
        if committed_batch(table, app) < batch:
            raise
        return False  # another driver of this query was first
    return True


def append(frame: DataFrame, table: str, *, app: str, batch: int) -> bool:
    """Append a DataFrame to a table as one batch; False when the table has it already.

    Spark writes Parquet into a folder of the table that belongs to this attempt alone; one that is never committed
    stays until the table is vacuumed.
    """
    if committed_batch(table, app) >= batch:
        return False
    files, schema = write_files(frame, table)
    return commit_files(table, app, batch, files, schema)


def replace(frame: DataFrame, table: str) -> int:
    """Make a DataFrame the whole content of a table, in one commit; return how many rows it has.

    Earlier versions stay readable until the table is vacuumed.
    """
    files, schema = write_files(frame, table)
    commit_files(table, f"replace-{uuid.uuid4().hex}", 0, files, schema, mode="overwrite")
    return sum(item.records for item in files)


def write_files(frame: DataFrame, table: str) -> tuple[list[DataFile], pa.Schema]:
    """Let Spark write a DataFrame into a new folder of a table; return its files and their schema."""
    part = f"spark-{uuid.uuid4().hex[:16]}"
    folder = os.path.join(local_path(table), part)
    frame.write.option("compression", "zstd").parquet(folder)
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
    return _frame_of(spark, found, map(unquote, found.file_uris()))


def read_added(spark: SparkSession, table: str, after: int, upto: int) -> DataFrame:
    """Return the rows that came to a table after one version and up to another.

    Files that were joined, and what is left of files when old rows were deleted, hold no new rows.  A table that was
    replaced is refused: its rows did not come, they changed.
    """
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
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
    return _frame_of(spark, found, files)


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
    told = _export_options(table, chosen, options, known, whole=columns is None)
    manifest = spark.readStream.format("penstock-export").options(**told).load(channels)

    def commit(frame: DataFrame, batch: int) -> None:
        query = query_of(checkpoint)
        if is_due(table, known, batch, query):
            files = data_files(frame.collect())
            commit_files(table, known, batch, files, schema, query=query)
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
    told = _export_options(table, columns, options, f"{app}-{batch}", whole=True)
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
    from deltalake import Schema

    held = {
        field.name: Column(field.name, DELTA[_name(field.type)])
        for field in existing.schema().fields
        if _name(field.type) in DELTA
    }
    _add_columns(existing, table, Schema.from_arrow(arrow_schema(wanted.values())))
    return tuple((held | wanted).values())


def _actions(table: str, version: int) -> list[dict[str, Any]]:
    """Return what one commit of a table did."""
    with open(os.path.join(local_path(table), "_delta_log", f"{version:020d}.json"), "rb") as log:
        return [msgspec.json.decode(line) for line in log if line.strip()]


def _batch_of(table: DeltaTable | None, app: str) -> int:
    version = None if table is None else table.transaction_version(app)
    return -1 if version is None else int(version)


def _is_due(held: DeltaTable | None, table: str, app: str, batch: int, query: str | None) -> bool:
    last = _batch_of(held, app)
    if query and last >= 0 and _batch_of(held, f"{app}@{query}") != last:
        raise ConflictError(
            f"{table}: batches of {app} are those of another query, or its checkpoint was made again: what it would "
            "write may be there already; name it with app= if it is not"
        )
    if query is not None and batch > last + 1:
        raise ConflictError(
            f"{table}: batch {batch} of {app} is here, but not batch {last + 1}: the table was made again; start the "
            "query with a new checkpoint"
        )
    return last < batch


def _add_columns(held: DeltaTable, table: str, wanted: Schema) -> bool:
    """Give a table the columns it lacks, and say whether there were any; refuse one that has another type there."""
    known = {field.name: field.type for field in held.schema().fields}
    for field in wanted.fields:
        if known.get(field.name, field.type) != field.type:
            raise OptionsError(
                f"{table}: column {field.name} is {_name(known[field.name])} there, not {_name(field.type)}"
            )
    more = [field for field in wanted.fields if field.name not in known]
    if more:
        held.alter.add_columns(more)
    return bool(more)


def _name(kind: Any) -> str:
    """Return the name of a Delta type, of a nested one only struct, array or map."""
    return str(kind.type)


def _frame_of(spark: SparkSession, table: DeltaTable, files: Iterable[str]) -> DataFrame:
    """Return files of a table as a DataFrame; their names are taken as they are, not as patterns."""
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(msgspec.json.decode(table.schema().to_json()))
    paths = list(files)
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*(PATTERN.sub(r"\\\g<0>", path) for path in paths))


def _export_options(
    table: str, columns: Sequence[Column], options: Mapping[str, Any] | None, app: str, *, whole: bool
) -> dict[str, str]:
    return {
        **{key: str(value) for key, value in (options or {}).items()},
        "app": app,
        "table": local_path(table),
        "columns": ",".join(f"{column.name} {column.type}" for column in columns),
        "whole": str(whole).lower(),
    }


def data_files(rows: Iterable[Any]) -> list[DataFile]:
    """Return the files of a manifest, in the order of their names."""
    files = [DataFile(row["file"], row["bytes"], row["records"], row["stats"]) for row in rows]
    return sorted(files, key=lambda item: item.file)
