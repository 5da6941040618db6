"""compact: the many small files of a table into few large ones.  Needs no Spark."""

from __future__ import annotations

from typing import Any

from penstock.errors import OptionsError
from penstock.spark.lake import open_table

__all__ = ["compact"]


def compact(table: str, *, target_bytes: int = 256 << 20, vacuum_hours: int | None = None) -> dict[str, Any]:
    """Rewrite small files as files of about ``target_bytes``.

    With ``vacuum_hours``, files that no version of the last hours needs are removed; that includes files left by
    tasks whose batch never was committed.  Give more hours than any batch takes: files of a batch that is being written
    look the same.
    """
    found = open_table(table)
    if found is None:
        raise OptionsError(f"{table}: there is no table here")
    before = len(found.file_uris())
    found.optimize.compact(target_size=target_bytes)
    removed = []
    if vacuum_hours is not None:
        removed = found.vacuum(vacuum_hours, dry_run=False, enforce_retention_duration=False, full=True)
    return {
        "files_before": before,
        "files_after": len(found.file_uris()),
        "removed": len(removed),
        "version": found.version(),
    }
