"""Tables as DataFrames: now, at a version or a moment, what came since, and only the files that can match."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from penstock.disk.plain import read_small
from penstock.errors import CorruptionError, ExpiredError, OptionsError, ReplacedError, UnsupportedError
from penstock.spark import objects
from penstock.spark.lake.features import check_table, inside
from penstock.spark.lake.opening import open_table
from penstock.spark.lake.skipping import Condition, TableFile, file_of, files_that_may_match
from penstock.spark.source.options import is_remote, local_path, moment_ns
from penstock.spark.source.partition import folder_name, values_in

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["actions_of", "files_of", "read", "read_added", "table_at"]

MOST_COMMIT_BYTES: Final = 1 << 30
"""No commit is longer."""
PATTERN: Final = re.compile(r"[\[\]{}*?]")
"""What Spark takes for a pattern in the name of a file, unless a backslash is before it."""
UNSEEN: Final = re.compile(r"_[^=]*|\..*|.*\._COPYING_")
"""Names of files that Spark passes over, although it is told to read them."""
FOLDER_TYPES: Final = ("string", "date", "integer", "long", "short", "byte", "boolean")
"""Types of columns whose values Spark reads from the names of folders as the log has them."""


def read(
    spark: SparkSession,
    table: str,
    *,
    version: int | None = None,
    timestamp: str | dt.date | None = None,
    where: Sequence[Condition] = (),
    skip_by: Sequence[Condition] = (),
) -> DataFrame:
    """Return a table as a DataFrame, as it is now, as it was at a version, or as it was at a moment.

    ``where`` are conditions such as ``("position", ">=", 4096)``, all of which rows must meet.  Files that can hold no
    such row, by the statistics in the table's log, are not opened.  ``skip_by`` does that and leaves the choice of
    rows to the caller.
    """
    found = table_at(table, version, timestamp)
    if is_remote(table):
        frame = objects.frame_of(spark, found, table, objects.files_of(found))
        return _only(frame, table, where)
    files = files_of(found, table)
    told = [*where, *skip_by]
    frame = frame_of(spark, found, files_that_may_match(files, told) if told else files)
    return _only(frame, table, where)


def _only(frame: DataFrame, table: str, where: Sequence[Condition]) -> DataFrame:
    """Return the rows that meet all conditions."""
    for column, operator, value in where:
        if column not in frame.columns:
            raise OptionsError(f"{table}: there is no column {column} to choose rows by")
        frame = frame.where(_condition(column, operator, value))
    return frame


def read_added(spark: SparkSession, table: str, after: int, upto: int) -> DataFrame:
    """Return the rows that came to a table after one version and up to another.

    Files that were joined, and what is left of files when old rows were deleted, hold no new rows.  A table that was
    replaced is refused: its rows did not come, they changed.
    """
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    files: list[TableFile] = []
    there: list[tuple[str, int]] = []
    for version in range(after + 1, upto + 1):
        try:
            actions = actions_of(table, version)
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
        added = [action["add"] for action in actions if "add" in action]
        if is_remote(table):
            there += [(unquote(add["path"]), add["size"]) for add in added if add["dataChange"]]
            continue
        files += [
            TableFile(
                inside(local_path(table), add["path"]),
                {name: value or None for name, value in add.get("partitionValues", {}).items()},
            )
            for add in added
            if add["dataChange"]
        ]
    if is_remote(table):
        return objects.frame_of(spark, found, table, there)
    return frame_of(spark, found, files)


def files_of(found: DeltaTable, table: str) -> list[TableFile]:
    """Return the files of a table at the version it was opened at, with what its log says of them.

    Those of a table on an object store go by their names in it.
    """
    rows = pa.table(found.get_add_actions(flatten=True)).to_pylist()
    if is_remote(table):
        return [file_of(row["path"], row) for row in rows]
    return [file_of(inside(local_path(table), row["path"]), row) for row in rows]


def actions_of(table: str, version: int) -> list[dict[str, Any]]:
    """Return what one commit of a table did."""
    if is_remote(table):
        return objects.commit_of(table, version)
    path = os.path.join(local_path(table), "_delta_log", f"{version:020d}.json")
    data = read_small(path, MOST_COMMIT_BYTES)
    try:
        return [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    except msgspec.DecodeError as exc:
        raise CorruptionError(path, 0, f"not a commit: {exc}") from None


def frame_of(spark: SparkSession, found: DeltaTable, files: Sequence[TableFile]) -> DataFrame:
    """Return files of a table as a DataFrame; their names are taken as they are, not as patterns."""
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(msgspec.json.decode(found.schema().to_json()))
    by = found.metadata().partition_columns
    if not files:
        return spark.createDataFrame([], schema)
    place = unquote(found.table_uri.removeprefix("file://")).rstrip("/")
    for file in files:
        if UNSEEN.fullmatch(os.path.basename(file.path)):
            name = os.path.relpath(file.path, place)
            raise UnsupportedError(f"{place}: Spark reads no file of such a name: {name}")
    if not by:
        return spark.read.schema(schema).parquet(*_names(files))
    if all(_is_told_by_folders(file, by, schema, place) for file in files):
        frame = spark.read.schema(schema).option("basePath", _names([TableFile(place)])[0]).parquet(*_names(files))
        return frame.select(*(f"`{name}`" for name in schema.names))
    return _union(spark, schema, by, files)


def _union(spark: SparkSession, schema: StructType, by: Sequence[str], files: Sequence[TableFile]) -> DataFrame:
    """Read each partition for itself, with what the log says of it as columns."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StructType

    inner = StructType([field for field in schema if field.name not in by])
    groups: dict[tuple[Any, ...], list[TableFile]] = {}
    for file in files:
        groups.setdefault(tuple(file.partition.get(name) for name in by), []).append(file)
    frames = []
    for values, held in groups.items():
        told = dict(zip(by, values, strict=True))
        columns = []
        for field in schema:
            if field.name not in told:
                columns.append(F.col(f"`{field.name}`"))
                continue
            value = told[field.name]
            if isinstance(value, str) and field.dataType.typeName() == "timestamp" and not value.endswith("Z"):
                value += "Z"  # Delta's are of UTC where they name no zone
            columns.append(F.lit(value).cast(field.dataType).alias(field.name))
        frames.append(spark.read.schema(inner).parquet(*_names(held)).select(*columns))
    while len(frames) > 1:  # a tree, so that thousands of them are no tower
        pairs = zip(frames[::2], [*frames[1::2], None], strict=False)
        frames = [one if other is None else one.unionByName(other) for one, other in pairs]
    return frames[0]


def _is_told_by_folders(file: TableFile, by: Sequence[str], schema: StructType, place: str) -> bool:
    """Whether Spark reads from the name of a file's folder what the log says of it."""
    if not all(schema[name].dataType.typeName() in FOLDER_TYPES for name in by):
        return False
    texts = {name: _text(file.partition.get(name)) for name in by}
    folder = os.path.relpath(os.path.dirname(file.path), place)
    return (
        "" not in texts.values()
        and folder.count("/") == len(by) - 1
        and all("=" in part for part in folder.split("/"))
        and values_in(folder) == texts
        and list(values_in(folder)) == list(by)
        and folder_name(texts).count("/") == folder.count("/")
    )


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


def _names(files: Iterable[TableFile]) -> list[str]:
    return [PATTERN.sub(r"\\\g<0>", file.path) for file in files]


def table_at(table: str, version: int | None, timestamp: str | dt.date | None) -> DeltaTable:
    """Return a table as it is now, as it was at a version, or as it was at a moment, or when a day began."""
    from deltalake.exceptions import DeltaError

    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    if version is not None and timestamp is not None:
        raise OptionsError("a version and a timestamp: give one of them")
    try:
        if version is not None:
            found.load_as_version(version)
        elif timestamp is not None:
            if isinstance(timestamp, str):
                timestamp = dt.datetime.fromtimestamp(moment_ns(timestamp) / 1e9, dt.UTC)
            elif not isinstance(timestamp, dt.datetime):  # a day: as it begins
                timestamp = dt.datetime(timestamp.year, timestamp.month, timestamp.day, tzinfo=dt.UTC)
            elif timestamp.tzinfo is None:
                timestamp = timestamp.replace(tzinfo=dt.UTC)
            found.load_as_version(_version_at(found, table, timestamp))
    except OptionsError:
        raise
    except (DeltaError, FileNotFoundError, OverflowError, ValueError) as exc:
        raise OptionsError(f"{table}: it cannot be read as it was: {exc}") from None
    check_table(found, table)  # what it used then
    return found


def _version_at(found: DeltaTable, table: str, moment: dt.datetime) -> int | dt.datetime:
    """Return the version that a table had at a moment, as its commits say: a copy of it has files of another time.

    Where they do not say it, the moment is returned, and delta-rs goes by the times of the files.
    """
    commits = found.history()[::-1]
    first = commits[0]
    infos = [action["commitInfo"] for action in actions_of(table, first["version"]) if "commitInfo" in action]
    if "timestamp" not in first or [info.get("timestamp") for info in infos] != [first["timestamp"]]:
        return moment  # versions are counted back from the newest: a commit that says nothing shifts the others
    begin = dt.datetime.fromtimestamp(first["timestamp"] / 1e3, dt.UTC)
    if moment < begin:
        told = begin.isoformat(timespec="milliseconds")
        what = "what it was is not kept: its log begins" if first["version"] else "there was no table: it begins"
        raise OptionsError(f"{table}: at {moment.isoformat()} {what} at {told}")
    wanted = (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)
    latest = 0  # a clock that was set back makes no version older than the one before
    for commit in commits:
        latest = max(latest, commit.get("timestamp") or 0)
        if latest > wanted:
            return int(commit["version"]) - 1
    return int(commits[-1]["version"])


def _condition(column: str, operator: str, value: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    held, wanted = F.col(f"`{column}`"), F.lit(value)
    return {
        "=": held == wanted, "<": held < wanted, "<=": held <= wanted, ">": held > wanted, ">=": held >= wanted,
    }[operator]  # fmt: skip
