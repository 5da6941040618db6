"""Which files of a table can hold a row that is asked for: by what its log says of each, without opening any.  Pure."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.errors import OptionsError

__all__ = ["Condition", "TableFile", "conditions_in", "files_that_may_match"]

OPERATORS: Final = ("=", "<", "<=", ">", ">=")
MILLISECOND: Final = dt.timedelta(milliseconds=1)
SIMPLE: Final = re.compile(r"\s*`?(\w+)`?\s*(<=|>=|=|<|>)\s*(-?\d+|'[^'\\]*')\s*")
BEYOND: Final = re.compile(r"[()\\]|--|/\*|\b(or|not|between|case|in|like)\b", re.IGNORECASE)
QUOTES: Final = ("'", '"', "`")

Condition = tuple[str, str, Any]
"""A column, one of = < <= > >=, and a value; all of several hold."""


class TableFile(msgspec.Struct, frozen=True):
    """A file of a table: where it is, what its folder says, and what is known of its columns.

    >>> TableFile("/lake/raw/a.parquet").records
    0
    """

    path: str
    partition: dict[str, Any] = {}
    size: int = 0
    modified_ms: int = 0
    records: int = 0
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}


def files_that_may_match(files: Iterable[TableFile], where: Sequence[Condition]) -> list[TableFile]:
    """Return the files in which a row can be for which all conditions hold.

    >>> files = [TableFile("a", low={"n": 1}, high={"n": 5}), TableFile("b", low={"n": 6}, high={"n": 9})]
    >>> [file.path for file in files_that_may_match(files, [("n", ">", 5)])]
    ['b']
    """
    for _, operator, value in where:
        if operator not in OPERATORS or value is None:
            raise OptionsError(f"{operator!r} {value!r}: use one of {' '.join(OPERATORS)} and a value")
    return [file for file in files if all(_may_match(file, *condition) for condition in where)]


def conditions_in(sql: str) -> list[Condition]:
    """Return the conditions of simple SQL, all of which must hold; what is not simple is left to Spark alone.

    >>> conditions_in("kind = 3 and channel = 'site/a' and length(payload) > 5")
    []
    >>> conditions_in("kind = 3 AND channel = 'site/a'")
    [('kind', '=', 3), ('channel', '=', 'site/a')]
    """
    parts = re.split(r"\band\b", sql, flags=re.IGNORECASE)
    if BEYOND.search(sql) or any(part.count(quote) % 2 for part in parts for quote in QUOTES):  # an "and" in a text
        return []
    found: list[Condition] = []
    for part in parts:
        match = SIMPLE.fullmatch(part)
        if match is not None:
            text = match[3]
            found.append((match[1], match[2], text[1:-1] if text.startswith("'") else int(text)))
    return found


def _may_match(file: TableFile, column: str, operator: str, value: Any) -> bool:
    if column in file.partition:
        held = file.partition[column]
        return held is not None and _holds(held, held, operator, value)
    if file.records and file.nulls.get(column) == file.records:
        return False  # a null is not compared with anything
    low, high = file.low.get(column), file.high.get(column)
    if low is None or high is None:
        return True
    if isinstance(high, dt.datetime):
        high += MILLISECOND  # the log keeps milliseconds, and others round them down
    return _holds(low, high, operator, value)


def _holds(low: Any, high: Any, operator: str, value: Any) -> bool:
    if _is_nan(value) or _is_nan(low) or _has_no_zone(value):
        return True
    if isinstance(high, float) and operator in (">", ">="):
        return True  # to Spark NaN is larger than any number, and statistics leave it out
    try:
        match operator:
            case "=":
                return bool(low <= value <= high)
            case "<":
                return bool(low < value)
            case "<=":
                return bool(low <= value)
            case ">":
                return bool(high > value)
            case _:
                return bool(high >= value)
    except TypeError:  # another type: whoever reads says what is wrong with it, or casts it
        return True


def _has_no_zone(value: Any) -> bool:
    """Whether a value is a time that Spark takes for one of a zone of its own."""
    return isinstance(value, dt.datetime) and value.tzinfo is None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def file_of(path: str, row: Mapping[str, Any]) -> TableFile:
    """Return a file from a row of delta-rs's flat table of files."""
    told: dict[str, dict[str, Any]] = {"partition": {}, "min": {}, "max": {}, "null_count": {}}
    for name, value in row.items():
        kind, dot, column = name.partition(".")
        if dot and kind in told and (value is not None or kind == "partition"):
            told[kind][column] = value
    return TableFile(
        path,
        told["partition"],
        row["size_bytes"],
        row["modification_time"],
        row.get("num_records") or 0,
        told["min"],
        told["max"],
        told["null_count"],
    )
