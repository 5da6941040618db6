"""compact: the many small files of a table into few large ones, and old rows out of it.  Needs no Spark."""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

from penstock.errors import OptionsError
from penstock.spark.lake.opening import open_table

__all__ = ["SAFE_HOURS", "compact"]

SAFE_HOURS: Final = 168
"""A week, as long as Delta keeps files."""


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
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    before, deleted = len(found.file_uris()), 0
    if keep_days is not None:
        types = {field.name: str(field.type.type) for field in found.schema().fields}
        if types.get(time_column) != "timestamp":
            raise OptionsError(f"{table}: there is no column {time_column} of times to tell the age of a row by")
        bound = dt.datetime.now(dt.UTC) - dt.timedelta(days=keep_days)
        moment = bound.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        name = '"' + time_column.replace('"', '""') + '"'
        gone = found.delete(f"{name} < arrow_cast('{moment}', 'Timestamp(Microsecond, Some(\"UTC\"))')")
        deleted = int(gone.get("num_deleted_rows") or 0)
    found.optimize.compact(target_size=target_bytes)
    removed = []
    if vacuum_hours is not None:
        removed = found.vacuum(vacuum_hours, dry_run=False, enforce_retention_duration=False, full=True)
    return {
        "files_before": before,
        "files_after": len(found.file_uris()),
        "deleted_rows": deleted,
        "removed": len(removed),
        "version": found.version(),
    }
