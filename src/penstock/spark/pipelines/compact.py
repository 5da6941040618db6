"""compact: the many small files of a table into few large ones, and old rows out of it.  Needs no Spark."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConflictError, OptionsError
from penstock.spark.lake.compaction import TRIES, Compaction, join_small_files
from penstock.spark.lake.features import check_removable
from penstock.spark.lake.opening import open_table
from penstock.spark.source.options import is_remote, local_path

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["SAFE_HOURS", "compact"]

SAFE_HOURS: Final = 168
"""A week, as long as Delta keeps files."""
MOST_DAYS: Final = 365_000
"""A thousand years."""


def compact(
    table: str,
    *,
    target_bytes: int = 256 << 20,
    keep_days: float | None = None,
    time_column: str = "timestamp",
    vacuum_hours: int | None = None,
    vacuum_anyway: bool = False,
) -> dict[str, Any]:
    """Rewrite small files as files of about ``target_bytes``.

    With ``keep_days``, rows whose ``time_column`` is older are deleted first; rows without a time stay.

    With ``vacuum_hours``, files that no version of the last hours needs are removed; that includes files left by
    tasks whose batch never was committed.  Files of a batch that is being written, and those that a reader of an older
    version has yet to open, look the same: so less than SAFE_HOURS is refused unless ``vacuum_anyway`` says that there
    are none.
    """
    if vacuum_hours is not None and vacuum_hours < SAFE_HOURS and not vacuum_anyway:
        raise OptionsError(
            f"{table}: vacuum of {vacuum_hours} hours could remove what batches and readers under way need: at least "
            f"{SAFE_HOURS}, or --vacuum-anyway where nothing runs"
        )
    if keep_days is not None and not 0 <= keep_days <= MOST_DAYS:
        raise OptionsError(f"keep_days={keep_days}: must be between 0 and {MOST_DAYS:,}")
    found = _there(table)
    if vacuum_hours is not None and not is_remote(table):
        _check_alone(local_path(table))
    before, deleted = len(found.file_uris()), 0
    if keep_days is not None:
        check_removable(found, table)
        types = {field.name: str(field.type.type) for field in found.schema().fields}
        if types.get(time_column) != "timestamp":
            raise OptionsError(f"{table}: there is no column {time_column} of times to tell the age of a row by")
        bound = dt.datetime.now(dt.UTC) - dt.timedelta(days=keep_days)
        moment = bound.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        name = '"' + time_column.replace('"', '""') + '"'
        deleted = _delete(table, f"{name} < arrow_cast('{moment}', 'Timestamp(Microsecond, Some(\"UTC\"))')")
    _join(table, target_bytes)
    found, removed = _there(table), []
    if vacuum_hours is not None:
        removed = found.vacuum(vacuum_hours, dry_run=False, enforce_retention_duration=False, full=True)
    return {
        "files_before": before,
        "files_after": len(found.file_uris()),
        "deleted_rows": deleted,
        "removed": len(removed),
        "version": found.version(),
    }


def _there(table: str) -> DeltaTable:
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    return found


def _delete(table: str, condition: str) -> int:
    """Delete rows, again behind commits of others; return how many, as far as delta-rs tells."""
    from deltalake.exceptions import CommitFailedError

    for _ in range(TRIES):
        with contextlib.suppress(CommitFailedError):
            return int(_there(table).delete(condition).get("num_deleted_rows") or 0)
    raise ConflictError(f"{table}: others kept on committing while old rows were to be deleted: try again")


def _join(table: str, target_bytes: int) -> None:
    """Join small files of any size until there are none, some of them in each commit.

    Not by delta-rs: two that join the same files at once both succeed there, and all rows are in the table twice.
    """
    budget = max(Compaction().budget_bytes, target_bytes)  # so any two files fit that are small enough
    plan = Compaction(target_bytes=target_bytes, min_files=2, of_one_size=False, budget_bytes=budget)
    conflicts = 0
    while conflicts < TRIES:
        done = join_small_files(table, plan)
        if not done.conflict and not done.files:
            return
        conflicts = conflicts + 1 if done.conflict else 0
    raise ConflictError(
        f"{table}: others kept on joining, or deleting from, the files that were to be joined: try again"
    )


def _check_alone(table: str) -> None:
    """Refuse a table with something else in its folder: a vacuum removes what the table's own log does not name."""
    for folder, folders, names in os.walk(table):
        what = None
        if "_delta_log" in folders and folder != table:
            what = "another table"
        elif {"offsets", "commits"} <= set(folders):
            what = "the checkpoint of a stream"
        elif any(name.startswith("penstock-") or ".penstock-" in name for name in names):
            what = "a log"
        if what is not None:
            raise OptionsError(f"{table}: in {folder} is {what}: a vacuum would remove its files, so move it away")
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]  # which a vacuum leaves alone
