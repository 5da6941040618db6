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
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.disk.plain import make_folders
from penstock.errors import ConflictError, CorruptionError, OptionsError
from penstock.spark import objects
from penstock.spark.lake.checkpoint import check_checkpoint, checkpoint_here, digest_of_place, query_of
from penstock.spark.lake.compaction import TRIES, Compaction, join_small_files
from penstock.spark.lake.features import check_removable
from penstock.spark.lake.opening import open_table
from penstock.spark.lake.reading import actions_of
from penstock.spark.source.columns import BASE, Column, arrow_schema
from penstock.spark.source.export import CHOSEN, delta_stats
from penstock.spark.source.names import check_use
from penstock.spark.source.options import SourceOptions, absolute_path, is_remote, local_path, path_here, place_of
from penstock.spark.source.partition import PARTITIONS, Values, check_partitions, values_in
from penstock.spark.source.plan import find_channels

if TYPE_CHECKING:
    from deltalake import DeltaTable, Field, Schema
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
    "is_due",
    "replace",
    "committed_batch",
    "query_of",
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
    "map": "map<string,binary>",
}
"""Types of a table by Delta's name, as Spark names them: those that columns of channels have."""
UNREADABLE: Final = re.compile(r"%[0-9A-Fa-f]{2}|\\")


class DataFile(msgspec.Struct, frozen=True):
    """A Parquet file in a table's folder that is to become part of the table."""

    file: str
    bytes: int
    records: int
    stats: str
    partition: Values = {}
    """What its folder says, of a partitioned table."""


def committed_batch(table: str, app: str) -> int:
    """Return the last batch of an application that the table has, -1 when there is none."""
    return _batch_of(open_table(table), app)


def committed_records(table: str, app: str, after: int) -> int:
    """Return how many records an application has committed since a version of the table, -1 for all of them."""
    found = open_table(table)
    records = 0
    for version in range(after + 1, 0 if found is None else found.version() + 1):
        actions = actions_of(table, version)
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


def is_due(table: str, app: str, batch: int, query: str, *, holes: bool = False) -> bool:
    """Whether a batch of a stream is not in the table yet; ConflictError when it cannot be the next one."""
    return _is_due(open_table(table), table, app, batch, query, holes=holes)


def commit_files(
    table: str,
    app: str,
    batch: int,
    files: Sequence[DataFile],
    schema: pa.Schema,
    *,
    mode: str = "append",
    query: str | None = None,
    holes: bool = False,
    partition_by: Sequence[str] = (),
    more: Mapping[str, int] | None = None,
) -> bool:
    """Make files part of the table in one commit, or all of it; False when it has this batch already.

    ``query`` is the id of the stream whose batch this is, empty where that is not known.  With ``holes`` its batches
    have numbers that grow by more than one.  Columns that the table lacks are added to it; one of another type is
    refused.  ``partition_by`` is for a table that is made; one that is there has its own.  ``more`` are other
    applications, and the number each has with this commit.
    """
    from deltalake import CommitProperties, Schema, Transaction
    from deltalake.exceptions import CommitFailedError, DeltaError
    from deltalake.transaction import AddAction, create_table_with_add_actions

    existing = open_table(table)
    if not _is_due(existing, table, app, batch, query, holes=holes):
        return False
    remote = is_remote(table)
    for item in files:
        if remote:
            objects.check_file(table, item.file, item.bytes)
            continue
        path = os.path.join(local_path(table), item.file)
        if not os.path.exists(path) or os.path.getsize(path) != item.bytes:
            raise CorruptionError(
                path, 0, f"its task wrote {item.bytes} bytes, which are gone before they were committed"
            )
    now = int(time.time() * 1000)
    actions: list[Any] = [AddAction(item.file, item.bytes, item.partition, now, True, item.stats) for item in files]
    transactions = [Transaction(app, batch)]
    if query:
        transactions.append(Transaction(f"{app}@{query}", batch))
    transactions += [Transaction(name, number) for name, number in (more or {}).items()]
    # delta-rs would put a replacement behind commits that it has not seen, and leave what those have added.
    properties = CommitProperties(app_transactions=transactions, max_commit_retries=0 if mode == "overwrite" else None)
    delta = Schema.from_arrow(schema)
    if existing is None:
        place = place_of(table)
        if not remote:
            if UNREADABLE.search(os.path.abspath(place)):
                raise OptionsError(f"{table}: delta-rs takes % with two digits, and a backslash, for another character")
            make_folders(place)
        told: dict[str, Any] = {"commit_properties": properties, "storage_options": objects.storage_options(place)}
        try:
            by = list(partition_by) or None
            create_table_with_add_actions(place, delta, actions, mode="error", partition_by=by, **told)
        except (DeltaError, OSError):
            if open_table(table) is None:
                raise
            # Another one made it meanwhile, or this one did and was not told.
            return commit_files(table, app, batch, files, schema, mode=mode, query=query, holes=holes, more=more)
        return True
    folders, seen = existing.metadata().partition_columns, existing.version()
    wrong = [item.file for item in files if list(item.partition) != folders]
    if wrong:
        raise OptionsError(f"{table}: it is partitioned by {', '.join(folders) or 'nothing'}, not so {wrong[0]}")
    if mode == "append":
        _check_nulls(existing, table, files, schema)
        if _add_columns(existing, table, delta):  # once more, on what the table is now
            return commit_files(table, app, batch, files, schema, query=query, holes=holes, more=more)
    try:
        existing.create_write_transaction(
            actions, mode, delta, partition_by=folders or None, commit_properties=properties
        )
    except CommitFailedError as exc:
        if mode == "overwrite":
            raise ConflictError(f"{table}: it was changed while it was to be replaced: {exc}") from None
        again = open_table(table)
        if again is None or again.version() <= seen:
            raise ConflictError(f"{table}: it could not be committed: {exc}") from None
        # Once more, on what the table is now.  Who was first has changed its columns, say, or is another driver of this
        # query; or it was this one, and was not told.
        return commit_files(table, app, batch, files, schema, query=query, holes=holes, more=more)
    return True


def append(
    frame: DataFrame,
    table: str,
    *,
    app: str,
    batch: int,
    query: str | None = None,
    holes: bool = False,
    partition_by: Sequence[str] = (),
) -> bool:
    """Append a DataFrame to a table as one batch; False when the table has it already.

    ``query`` (``query_of`` its checkpoint) is the id of the stream whose batch this is: so one whose checkpoint, or
    whose table, was made again is told with ConflictError.  ``holes`` and ``partition_by`` as in ``commit_files``.

    Spark writes Parquet into a folder of the table that belongs to this attempt alone; one that is never committed
    stays until the table is vacuumed.
    """
    existing = open_table(table)
    if not _is_due(existing, table, app, batch, query, holes=holes):
        return False
    by = partitions_of(existing, table, partition_by)
    files, schema = write_files(frame, table, by)
    return commit_files(table, app, batch, files, schema, query=query, holes=holes, partition_by=by)


def replace(frame: DataFrame, table: str, *, partition_by: Sequence[str] = ()) -> int:
    """Make a DataFrame the whole content of a table, in one commit; return how many rows it has.

    Earlier versions stay readable until the table is vacuumed.
    """
    existing = open_table(table)
    check_removable(existing, table)
    by = partitions_of(existing, table, partition_by)
    files, schema = write_files(frame, table, by)
    replace_files(table, f"replace-{uuid.uuid4().hex}", files, schema, by)
    return sum(item.records for item in files)


def replace_files(
    table: str, app: str, files: Sequence[DataFile], schema: pa.Schema, partition_by: Sequence[str]
) -> None:
    """Make files all of a table, as it is when this is committed: behind others that commit meanwhile."""
    for left in reversed(range(TRIES)):
        try:
            commit_files(table, app, 0, files, schema, mode="overwrite", partition_by=partition_by)
        except ConflictError:
            if not left:
                raise
        else:
            return


def partitions_of(existing: DeltaTable | None, table: str, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return what a table is partitioned by; other wishes than those of the table that is there are refused."""
    if existing is None:
        if wanted and is_remote(table):
            raise OptionsError(f"{table}: tables on object stores have no partitions yet")
        return tuple(wanted)
    held = tuple(existing.metadata().partition_columns)
    if wanted and tuple(wanted) != held:
        raise OptionsError(f"{table}: it is partitioned by {', '.join(held) or 'nothing'}, not {', '.join(wanted)}")
    return held


def write_files(frame: DataFrame, table: str, by: Sequence[str] = ()) -> tuple[list[DataFile], pa.Schema]:
    """Let Spark write a DataFrame into a new folder of a table; return its files and their schema.

    Files of partitions are moved from there to the folders of their partitions.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    if is_remote(table):
        rows, schema = objects.write_frame(frame, table, delta_stats)
        return [DataFile(*row) for row in rows], schema
    missing = [name for name in by if name not in frame.columns]
    if missing:
        raise OptionsError(f"{table}: it is partitioned by {', '.join(by)}, and the rows have no {', '.join(missing)}")
    told = to_arrow_schema(frame.schema, timezone="UTC")
    for name in by:
        if pa.types.is_binary(told.field(name).type):
            raise OptionsError(f"{table}: partition by {name}: bytes make no name of a folder: turn them into text")
    part = f"spark-{uuid.uuid4().hex[:16]}"
    place = absolute_path(table)  # Java may have begun in another folder
    folder = os.path.join(place, part)
    # The names of folders are in UTC, as Delta's log has them: in a zone with summer time two hours have one name.
    frame.write.option("compression", "zstd").option("timeZone", "UTC").partitionBy(*by).parquet(folder)
    files, schema = [], None
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            if not name.endswith(".parquet"):
                continue
            path, file = os.path.join(root, name), f"{part}/{name}"
            metadata = pq.read_metadata(path)
            schema = schema or _schema_in(path, told)
            if not metadata.num_rows:
                continue
            values: Values = {}
            if by:
                inner = os.path.relpath(root, folder)
                values, file = values_in(inner), f"{inner}/{part}-{name}"
                make_folders(os.path.join(place, inner))
                os.rename(path, os.path.join(place, file))
            size = os.path.getsize(os.path.join(place, file))
            files.append(DataFile(file, size, metadata.num_rows, delta_stats(metadata), values))
    if by:
        shutil.rmtree(folder, ignore_errors=True)
        known = {} if schema is None else {field.name: field.type for field in schema}
        schema = pa.schema([pa.field(field.name, known.get(field.name, field.type)) for field in told])
    if schema is None:
        raise OptionsError(f"{table}: Spark wrote no file, not even an empty one")
    return sorted(files, key=lambda item: item.file), schema.remove_metadata()


def _schema_in(path: str, told: pa.Schema) -> pa.Schema:
    """Return the schema of a file that Spark wrote; times of 96 bits, which it writes unless told otherwise, are times.

    Arrow takes them for nanoseconds, which no table here has.
    """
    schema = pq.read_schema(path)
    for index, field in enumerate(schema):
        if _holds_nanoseconds(field.type):
            schema = schema.set(index, field.with_type(told.field(field.name).type))
    return schema


def _holds_nanoseconds(kind: pa.DataType) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return kind == pa.timestamp("ns") or any(map(_holds_nanoseconds, inner))


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
    partition_by: Sequence[str] = (),
    node: str | None = None,
    compaction: Compaction | None = None,
    on_commit: Callable[[int, list[DataFile]], None] | None = None,
) -> StreamingQuery:
    """Start a query that keeps a table up to date with channels, each record in it exactly once.

    It reads what is there and stops unless ``trigger`` says otherwise (``{"processingTime": "1 second"}``).
    ``options`` are the source's.  The query is known to the table by its checkpoint unless ``app`` names it.  The table
    has every column that the channels have unless ``columns`` names them; a channel that comes later with more of them
    ends the query, which adds them when it is started again.  ``partition_by`` of a table that is made: ``date``,
    ``channel``, ``node``; ``node`` is whose channels these are, this machine's name unless given.  With ``compaction``
    small files are joined between batches.  ``on_commit`` is called where batches are committed: in this process, or
    beside a Spark Connect server.
    """
    channels, table = path_here(spark, channels), path_here(spark, place_of(table))
    checkpoint = checkpoint_here(spark, check_checkpoint(checkpoint))
    check_use(dict(options or {}), "a stream", CHOSEN)
    chosen = table_columns(channels, table, options) if columns is None else tuple(columns)
    known = app or app_of(checkpoint)
    by = check_partitions(partitions_of(open_table(table), table, partition_by))
    if node is not None and "node" not in by:
        raise OptionsError(f"{table}: node={node!r} is for a table that is partitioned by node")
    schema = schema_of(chosen, by)
    told = export_options(table, chosen, options, known, whole=columns is None, by=by, node=node)
    manifest = spark.readStream.format("penstock-export").options(**told).load(channels)

    def commit(frame: DataFrame, batch: int) -> None:
        query = query_of(checkpoint)
        if is_due(table, known, batch, query):
            files = data_files(frame.collect())
            commit_files(table, known, batch, files, schema, query=query, partition_by=by)
            if on_commit is not None:
                on_commit(batch, files)
            if compaction is not None and batch % compaction.every == compaction.every - 1:
                join_small_files(table, compaction)

    writer = manifest.writeStream.foreachBatch(commit).option("checkpointLocation", checkpoint)
    return writer.trigger(**(trigger or {"availableNow": True})).start()


def ingest_once(
    spark: SparkSession, channels: str, table: str, *, options: Mapping[str, Any] | None = None, app: str, batch: int
) -> int:
    """Export what the channels hold now as one batch; return how many records, 0 when the table has the batch."""
    if committed_batch(table, app) >= batch:
        return 0
    check_use(dict(options or {}), "a batch of logs", CHOSEN)
    channels = path_here(spark, channels)
    columns = table_columns(channels, table, options)
    by = check_partitions(partitions_of(open_table(table), table, ()))
    told = export_options(table, columns, options, f"{app}-{batch}", whole=True, by=by)
    files = data_files(spark.read.format("penstock-export").options(**told).load(channels).collect())
    commit_files(table, app, batch, files, schema_of(columns, by))
    return sum(item.records for item in files)


def schema_of(columns: Iterable[Column], by: Sequence[str]) -> pa.Schema:
    """Return the schema of a table with these columns, and those that its folders say."""
    schema = arrow_schema(columns)
    for name in by:
        if name not in schema.names:
            schema = schema.append(pa.field(name, PARTITIONS[name]))
    return schema


def table_columns(channels: str, table: str, options: Mapping[str, Any] | None = None) -> tuple[Column, ...]:
    """Return the columns that a table of these channels has, adding to the table that is there what it lacks.

    A delete is told from an empty value by ``op``: a table without the columns of envelopes would not be the log.
    """
    from penstock.spark.source.table import added_columns

    given = {key: str(value) for key, value in (options or {}).items()}
    told = SourceOptions.of({**given, "path": channels}, also=CHOSEN)
    found = [channel for channel in find_channels(told.paths, told.format) if told.filters.takes(channel)]
    wanted = {column.name: column for column in (*BASE, *added_columns(found))}
    existing = open_table(table)
    if existing is None:
        return tuple(wanted.values())
    from deltalake import Schema

    folders = {name for name in existing.metadata().partition_columns if name not in wanted}
    held = {
        field.name: Column(field.name, DELTA[_name(field.type)])
        for field in existing.schema().fields
        if _name(field.type) in DELTA and field.name not in folders
    }
    if held.get("headers", Column("headers", "")).type == "binary":  # a table of before they were a map keeps them so
        wanted.pop("headers", None)
    _add_columns(existing, table, Schema.from_arrow(arrow_schema(wanted.values())))
    return tuple((held | wanted).values())


def _batch_of(table: DeltaTable | None, app: str) -> int:
    version = None if table is None else table.transaction_version(app)
    return -1 if version is None else int(version)


def _is_due(
    held: DeltaTable | None, table: str, app: str, batch: int, query: str | None, *, holes: bool = False
) -> bool:
    last = _batch_of(held, app)
    if query and last >= 0 and _batch_of(held, f"{app}@{query}") != last:
        raise ConflictError(
            f"{table}: batches of {app} are those of another query, or its checkpoint was made again: what it would "
            "write may be there already; name it with app= if it is not"
        )
    if query is not None and not holes and batch > last + 1:
        raise ConflictError(
            f"{table}: batch {batch} of {app} is here, but not batch {last + 1}: the table was made again; start the "
            "query with a new checkpoint"
        )
    return last < batch


def _add_columns(held: DeltaTable, table: str, wanted: Schema) -> bool:
    """Give a table the columns it lacks, and say whether there were any; refuse one that has another type there."""
    known = {field.name: field.type for field in held.schema().fields}
    check_cases(table, known, [field.name for field in wanted.fields])
    for field in wanted.fields:
        if known.get(field.name, field.type) != field.type:
            raise OptionsError(
                f"{table}: column {field.name} is {_name(known[field.name])} there, not {_name(field.type)}"
            )
    more = [field for field in wanted.fields if field.name not in known]
    if more and not alter_columns(held, table, more):
        again = open_table(table)
        assert again is not None
        _add_columns(again, table, wanted)
    return bool(more)


def alter_columns(held: DeltaTable, table: str, more: Sequence[Field]) -> bool:
    """Give a table more columns; False where another one has changed it since it was opened: look at it again."""
    from deltalake.exceptions import CommitFailedError

    seen = held.version()
    try:
        held.alter.add_columns(list(more))
    except CommitFailedError as exc:
        again = open_table(table)
        if again is None or again.version() <= seen:
            raise ConflictError(f"{table}: it could not be committed: {exc}") from None
        return False
    return True


def _check_nulls(held: DeltaTable, table: str, files: Iterable[DataFile], schema: pa.Schema) -> None:
    """Refuse rows without a value in a column that may not be null, as far as statistics tell."""
    needed = [field.name for field in held.schema().fields if not field.nullable]
    for item in files if needed else ():
        nulls = msgspec.json.decode(item.stats).get("nullCount", {})
        for name in needed:
            there = item.partition[name] is not None if name in item.partition else name in schema.names
            if not there or nulls.get(name):
                raise OptionsError(f"{table}: column {name} is not null there, and {item.file} has rows without it")


def check_cases(table: str, known: Iterable[str], wanted: Iterable[str]) -> None:
    """Refuse a column that differs from one of a table in its letters' case only: Spark could read neither.

    >>> check_cases("lake/raw", ["Device"], ["device"])
    Traceback (most recent call last):
    penstock.errors.OptionsError: lake/raw: column device is called Device there
    """
    there = {name.lower(): name for name in known}
    for name in wanted:
        if there.get(name.lower(), name) != name:
            raise OptionsError(f"{table}: column {name} is called {there[name.lower()]} there")


def _name(kind: Any) -> str:
    """Return the name of a Delta type, of a nested one only struct, array or map."""
    return str(kind.type)


def export_options(
    table: str,
    columns: Sequence[Column],
    options: Mapping[str, Any] | None,
    app: str,
    *,
    whole: bool,
    by: Sequence[str] = (),
    node: str | None = None,
) -> dict[str, str]:
    told = {
        **{key: str(value) for key, value in (options or {}).items()},
        "app": app,
        "table": absolute_path(table),
        "columns": ";".join(f"{column.name} {column.type}" for column in columns),
        "whole": str(whole).lower(),
    }
    if by:
        told |= {"partitionBy": ",".join(by), "node": node or platform.node()}
    return told


def data_files(rows: Iterable[Any]) -> list[DataFile]:
    """Return the files of a manifest, in the order of their names."""
    files = [
        DataFile(row["file"], row["bytes"], row["records"], row["stats"], msgspec.json.decode(row["partition"]))
        for row in rows
    ]
    return sorted(files, key=lambda item: item.file)
