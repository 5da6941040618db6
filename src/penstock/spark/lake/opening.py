"""Opening a Delta table through delta-rs."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptionError, PenstockError, UnsupportedError
from penstock.spark import objects
from penstock.spark.lake.features import check_table
from penstock.spark.source.options import is_remote, place_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["open_table"]

UNKNOWN: Final = re.compile(r"[Uu]nsupported|not supported|[Cc]olumn mapping")


def open_table(table: str) -> DeltaTable | None:
    """Return the table in a folder, or None when there is none yet.

    One of others that uses what is not implemented here is refused by the name of the feature.
    """
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError:
        raise UnsupportedError("the lake needs deltalake: pip install 'penstock[spark]'") from None
    table = place_of(table)
    if is_remote(table):
        remote = objects.open_delta(table)
        if remote is not None:
            check_table(remote, table)
            by = remote.metadata().partition_columns
            if by:
                told = "on an object store such tables are neither read nor added to yet"
                raise UnsupportedError(f"{table}: it is partitioned by {', '.join(by)}: {told}")
        return remote
    if not os.path.isdir(os.path.join(table, "_delta_log")):
        return None
    try:
        found = DeltaTable(table)
    except TableNotFoundError:
        return None
    except DeltaError as exc:
        raise _refusal(table, str(exc)) from None
    check_table(found, table)
    return found


def _refusal(table: str, said: str) -> PenstockError:
    """Return what delta-rs has against a table, as one line: a feature that it does not know either, or damage."""
    reason = (said.splitlines() or [""])[0].removeprefix("Kernel error: ").strip()
    if UNKNOWN.search(reason):
        return UnsupportedError(f"{table}: {reason.removeprefix('Unsupported: ')}")
    return CorruptionError(os.path.join(table, "_delta_log"), 0, reason)
