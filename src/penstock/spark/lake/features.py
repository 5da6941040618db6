"""Which Delta tables of others are read and added to: those that use nothing but what is implemented here.

A feature that is not would not be seen: rows that a deletion vector takes away would come back, columns that are mapped
would be null.  So each is refused by name before anything is read or written.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec

from penstock.errors import CorruptionError, OptionsError, UnsupportedError

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["check_removable", "check_table", "inside"]

READER: Final = {"timestampNtz", "vacuumProtocolCheck"}
WRITER: Final = {"appendOnly", "invariants", "timestampNtz", "vacuumProtocolCheck"}
"""Features that are either implemented, or ask nothing of who does not use them; those of a table that is not new are
looked for in its settings and its schema."""
SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:/")
LISTED: Final = (3, 7)
"""The versions of reader and writer from which on a table lists its features; before, only what it uses tells them."""
SETTINGS: Final = {
    "delta.columnMapping.mode": ("none", "columnMapping"),
    "delta.enableChangeDataFeed": ("false", "changeDataFeed"),
    "delta.enableDeletionVectors": ("false", "deletionVectors"),
    "delta.enableRowTracking": ("false", "rowTracking"),
}
"""Settings that change what a file of the table means, the value with which they do not, and the feature."""
OF_FIELDS: Final = {
    "delta.invariants": "invariants",
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "delta.columnMapping.id": "columnMapping",
}


def check_table(found: DeltaTable, table: str) -> None:
    """Refuse a table that uses a feature that is not implemented, by its name."""
    used = _features(found)
    if used:
        raise UnsupportedError(
            f"{table}: it uses {', '.join(sorted(used))}, which is not implemented: its rows would be misread"
        )


def check_removable(found: DeltaTable | None, table: str) -> None:
    """Refuse to take rows out of a table whose owner has said that they are only added."""
    settings = {} if found is None else found.metadata().configuration or {}
    if str(settings.get("delta.appendOnly") or "false").lower() == "true":
        raise OptionsError(f"{table}: it is append-only (delta.appendOnly): no rows are taken out of it")


def inside(table: str, path: str) -> str:
    """Return the path of a file of a table, as its log names it; one that leads out of the table is refused.

    >>> inside("/lake/raw", "day%3D5/a.parquet")
    '/lake/raw/day=5/a.parquet'
    >>> inside("/lake/raw", "../other/a.parquet")
    Traceback (most recent call last):
    penstock.errors.CorruptionError: /lake/raw/_delta_log at byte 0: it names ../other/a.parquet, not in the table
    """
    name = unquote(path)
    whole = os.path.normpath(os.path.join(os.path.abspath(table), name))
    if (
        SCHEME.match(name)
        or "\0" in name
        or not whole.startswith((os.path.abspath(table) + os.sep, os.path.realpath(table) + os.sep))
        or not os.path.realpath(whole).startswith(os.path.realpath(table) + os.sep)
    ):
        raise CorruptionError(os.path.join(table, "_delta_log"), 0, f"it names {name}, not in the table")
    return whole


def _features(found: DeltaTable) -> set[str]:
    protocol = found.protocol()
    used = set(protocol.reader_features or ()) - READER | set(protocol.writer_features or ()) - WRITER
    for kind, version, listed in zip(
        ("reader", "writer"), (protocol.min_reader_version, protocol.min_writer_version), LISTED, strict=True
    ):
        if version > listed:
            used.add(f"{kind} version {version}")
    settings = found.metadata().configuration or {}
    for name, (harmless, feature) in SETTINGS.items():
        if str(settings.get(name) or harmless).lower() != harmless:
            used.add(feature)
    used |= {"checkConstraints" for name in settings if name.startswith("delta.constraints.")}
    by = found.metadata().partition_columns
    for field in msgspec.json.decode(found.schema().to_json())["fields"]:
        if field["name"] in by and field["type"] == "binary":  # which writers put into words in different ways
            used.add(f"partitions of bytes ({field['name']})")
        used |= _of_field(field)
    return used


def _of_field(kind: Any) -> set[str]:
    """Return the features that a field uses, or one inside of it."""
    if not isinstance(kind, dict):
        return set()
    used = {feature for name, feature in OF_FIELDS.items() if name in kind.get("metadata", {})}
    inner = [kind.get(name) for name in ("type", "elementType", "keyType", "valueType")]
    return used.union(*map(_of_field, [*inner, *kind.get("fields", [])]))
