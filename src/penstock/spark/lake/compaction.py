"""Small files of a table joined into larger ones, a little at a time: between the batches of a stream, or by itself.

Files of one partition and about one size are joined, the oldest first: so a row is written again only as often as its
file grows eightfold.  The commit is made on a version that still has every file that was joined, and on no other: after
a commit in between the table is looked at again, and where one of them is gone the files are joined another time.
Joined files hold no new rows, and the commit says so; those that follow a table pass over them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.disk import object_store_for
from penstock.disk.plain import private
from penstock.errors import OptionsError
from penstock.spark import objects
from penstock.spark.lake.opening import open_table
from penstock.spark.lake.reading import files_of
from penstock.spark.lake.skipping import TableFile
from penstock.spark.source.export import ROW_GROUP_BYTES, delta_stats, parquet_writer
from penstock.spark.source.options import is_remote, place_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["Compaction", "Joined", "choose", "join_small_files"]

TIER: Final = 8
"""Files are joined with those of at most so many times their size."""
TRIES: Final = 8
"""How often a commit is tried again behind those of others."""


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """Which small files are joined, and how much of that at once.

    >>> Compaction(target_bytes=1 << 20).min_files
    8
    """

    target_bytes: int = 128 << 20
    """About how large joined files become; those of more than half of it stay as they are."""
    min_files: int = 8
    """So many small files of about one size there must be."""
    min_age_seconds: float = 0.0
    """Younger files are left alone."""
    budget_bytes: int = 512 << 20
    """How much is read and written again in one turn."""
    every: int = 10
    """Of a stream: a turn after so many batches."""
    of_one_size: bool = True
    """Whether files wait for others of about their size."""

    def __post_init__(self) -> None:
        for name in ("target_bytes", "budget_bytes", "every"):
            if getattr(self, name) < 1:
                raise OptionsError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.min_files < 2 or self.min_age_seconds < 0:
            raise OptionsError("min_files must be at least 2, and no age is below 0")


class Joined(msgspec.Struct):
    """What a turn did.

    >>> Joined().files
    0
    """

    files: int = 0
    """Small files that were joined."""
    into: int = 0
    """Files that they became."""
    bytes: int = 0
    conflict: bool = False
    """Whether someone committed meanwhile, so that nothing was done."""


def choose(files: Iterable[TableFile], plan: Compaction, now_ms: int) -> list[list[TableFile]]:
    """Return groups of files to be joined, each into one, as far as the budget goes.

    >>> files = [TableFile(f"{n}", size=10) for n in range(20)]
    >>> [len(group) for group in choose(files, Compaction(target_bytes=100), 0)]
    [10, 10]
    """
    tiers: dict[tuple[Any, ...], list[TableFile]] = {}
    for file in sorted(files, key=lambda item: (item.modified_ms, item.path)):
        old = file.modified_ms <= now_ms - plan.min_age_seconds * 1000
        if old and file.size * 2 < plan.target_bytes:
            tier = 0
            while plan.of_one_size and file.size * TIER ** (tier + 1) < plan.target_bytes:
                tier += 1
            tiers.setdefault((*file.partition.items(), tier), []).append(file)
    groups: list[list[TableFile]] = []
    left = plan.budget_bytes
    for held in tiers.values():
        group: list[TableFile] = []
        size = 0
        for file in held:
            group.append(file)
            size += file.size
            if size >= plan.target_bytes:
                groups, group, left, size = [*groups, group], [], left - size, 0
            while group and size >= left and len(group) < plan.min_files:  # too much for the others to wait behind it
                size -= group.pop(0).size
            if size >= left:
                break
        if len(group) >= plan.min_files:
            groups, left = [*groups, group], left - size
        if left <= 0:
            break
    return [group for group in groups if len(group) > 1]


def join_small_files(table: str, plan: Compaction | None = None) -> Joined:
    """Join small files of a table in one commit; return what was done."""
    from deltalake.transaction import AddAction, RemoveAction

    plan, table = plan or Compaction(), place_of(table)
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    now = int(time.time() * 1000)
    groups = choose(files_of(found, table), plan, now)
    done = Joined()
    if not groups:
        return done
    by = found.metadata().partition_columns
    actions: list[AddAction | RemoveAction] = []
    schema = _inner_schema(found, by)
    made: list[str] = []
    for group in groups:
        name, size, stats = _join(table, group, schema)
        made.append(name)
        texts = {name: _text(group[0].partition.get(name)) for name in by}
        actions.append(AddAction(name, size, texts, now, False, stats))
        for file in group:
            actions.append(RemoveAction(_name_in(table, file), False, now, file.size, texts))
            done.files, done.bytes = done.files + 1, done.bytes + file.size
        done.into += 1
    joined = {_name_in(table, file) for group in groups for file in group}
    if _commit(found, table, actions, joined, made[0]):
        return done
    for name in made:
        if is_remote(table):
            object_store_for(table).delete([name])
            continue
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(table, name))
    return Joined(conflict=True)


def _commit(found: DeltaTable, table: str, actions: list[Any], joined: set[str], made: str) -> bool:
    """Commit on the version a table was opened at, or on a later one that has these files too; False where none does.

    delta-rs must not try again by itself: it does not notice that another one has joined the same files.
    """
    from deltalake import CommitProperties
    from deltalake.exceptions import CommitFailedError

    for _ in range(TRIES):
        try:
            found.create_write_transaction(
                actions,
                "append",
                found.schema(),
                partition_by=found.metadata().partition_columns or None,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError:
            again = open_table(table)
            there = set() if again is None else {_name_in(table, file) for file in files_of(again, table)}
            if made in there:  # it was committed, and not told
                return True
            if again is None or not joined <= there:
                return False
            found = again
        else:
            return True
    return False


def _name_in(table: str, file: TableFile) -> str:
    return file.path if is_remote(table) else os.path.relpath(file.path, os.path.abspath(table))


def _join(table: str, group: Sequence[TableFile], schema: pa.Schema) -> tuple[str, int, str]:
    """Write the rows of some files into one; return its name in the table, its size and its statistics."""
    told = json.dumps([file.path for file in group])
    name = f"joined-{hashlib.sha256(told.encode()).hexdigest()[:24]}-{uuid.uuid4().hex[:8]}.parquet"
    name = os.path.join(os.path.dirname(_name_in(table, group[0])), name)
    remote = is_remote(table)
    path = os.path.join(tempfile.gettempdir(), os.path.basename(name)) if remote else os.path.join(table, name)
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "xb", opener=private if remote else None) as sink:
            with parquet_writer(sink, schema) as writer:
                held: list[pa.Table] = []
                held_bytes = 0
                for file in group:
                    data = pa.BufferReader(object_store_for(table).get(file.path)[0]) if remote else file.path
                    with pq.ParquetFile(data, coerce_int96_timestamp_unit="us") as source:
                        for index in range(source.num_row_groups):
                            held.append(_fit(source.read_row_group(index), schema))
                            held_bytes += held[-1].nbytes
                            if held_bytes >= ROW_GROUP_BYTES:
                                writer.write_table(pa.concat_tables(held))
                                held, held_bytes = [], 0
                if held:
                    writer.write_table(pa.concat_tables(held))
            sink.flush()
            os.fsync(sink.fileno())
        size, stats = os.path.getsize(temporary), delta_stats(pq.read_metadata(temporary))
        if remote:
            objects.put_file(table, name, temporary)
        else:
            os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return name, size, stats


def _fit(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the columns that the table has now."""
    columns = [
        rows.column(field.name).cast(field.type) if field.name in rows.schema.names else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _inner_schema(found: DeltaTable, by: Sequence[str]) -> pa.Schema:
    whole = pa.schema(found.schema().to_arrow())
    return pa.schema([pa.field(field.name, field.type, field.nullable) for field in whole if field.name not in by])


def _text(value: Any) -> str | None:
    """Return the value of a partition as Delta's log writes it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "hour"):
        return str(value.replace(tzinfo=None).isoformat(" ", timespec="microseconds"))
    return str(value)
