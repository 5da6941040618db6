"""Folders of a partitioned table: which one a row goes to, and what its name says.

A table of channels may be partitioned by ``date`` (the UTC day a record was written or, where a format keeps no time,
of its event), ``channel``, and ``node`` (a name that whoever ingests gives).  Files lie where Hive, Spark and DuckDB
look for them, ``date=2026-11-16/channel=site%2Fticks/…``; columns that a folder says are not in its files.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.errors import OptionsError

__all__ = ["PARTITIONS", "Values", "check_partitions", "folder_name", "split_rows", "values_in"]

PARTITIONS: Final[dict[str, pa.DataType]] = {"date": pa.date32(), "channel": pa.string(), "node": pa.string()}
"""What a table of channels may be partitioned by."""
NULL: Final = "__HIVE_DEFAULT_PARTITION__"
ESCAPED: Final = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")
"""What Spark escapes in the name of such a folder."""
CODE: Final = re.compile(r"%([0-9A-Fa-f]{2})")
DAY_MICROS: Final = 86_400_000_000
DAY_NANOS: Final = 86_400_000_000_000

Values = dict[str, str | None]
"""Column → value, as Delta's log writes it: text, or nothing for null."""


def check_partitions(by: Sequence[str]) -> tuple[str, ...]:
    """Refuse what a table of channels cannot be partitioned by.

    >>> check_partitions(["date", "kind"])
    Traceback (most recent call last):
    penstock.errors.OptionsError: partition by kind: a table of channels has folders for date, channel, node
    """
    for name in by:
        if name not in PARTITIONS:
            raise OptionsError(f"partition by {name}: a table of channels has folders for {', '.join(PARTITIONS)}")
    if len(set(by)) < len(by):
        raise OptionsError(f"partition by {', '.join(by)}: name each once")
    return tuple(by)


def folder_name(values: Mapping[str, str | None]) -> str:
    """Return the folder of a partition.

    >>> folder_name({"date": None, "channel": "site/a"})
    'date=__HIVE_DEFAULT_PARTITION__/channel=site%2Fa'
    """
    parts = []
    for name, value in values.items():
        text = NULL if value is None or value == "" else ESCAPED.sub(lambda m: f"%{ord(m[0]):02X}", value)
        parts.append(f"{name}={text}")
    return "/".join(parts)


def values_in(folder: str) -> Values:
    """Return what the name of such a folder says.

    >>> values_in("date=2026-11-16/channel=site%2Fa")
    {'date': '2026-11-16', 'channel': 'site/a'}
    """
    values: Values = {}
    for part in folder.split("/"):
        name, _, text = part.partition("=")
        values[_unescaped(name)] = None if text == NULL else _unescaped(text)
    return values


def split_rows(batch: pa.RecordBatch, by: Sequence[str], node: str) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Yield the rows of one channel by partition, in order, without the columns that the folder says.

    >>> batch = pa.RecordBatch.from_pydict({"channel": ["a", "a"], "payload": [b"1", b"2"]})
    >>> [(values, len(rows)) for values, rows in split_rows(batch, ["channel", "node"], "edge-7")]
    [({'channel': 'a', 'node': 'edge-7'}, 2)]
    """
    fixed: Values = {"node": node, "channel": None}
    if "node" in batch.schema.names:  # of shipped logs
        fixed["node"] = batch.column("node")[0].as_py()
    if "channel" in by:
        fixed["channel"] = batch.column("channel")[0].as_py()
    kept = batch.select([name for name in batch.schema.names if name not in by])
    if "date" not in by:
        yield {name: fixed[name] for name in by}, kept
        return
    days = _days(batch)
    bounds = np.flatnonzero(np.diff(days)) + 1
    if len(bounds) and len(np.unique(days)) == len(bounds) + 1:  # they follow one another, as time does
        groups = [(int(days[start]), kept.slice(start, end - start)) for start, end in _runs(bounds, len(days))]
    else:
        groups = [
            (int(day), kept if len(days) == count else kept.filter(pa.array(days == day)))
            for day, count in zip(*np.unique(days, return_counts=True), strict=True)
        ]
    for day, rows in groups:
        told = None if day < 0 else (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()
        yield {name: told if name == "date" else fixed[name] for name in by}, rows


def _unescaped(text: str) -> str:
    """Read a name as Spark does: letter by letter, not as UTF-8."""
    return CODE.sub(lambda match: chr(int(match[1], 16)), text)


def _runs(bounds: np.ndarray, count: int) -> Iterator[tuple[int, int]]:
    starts = [0, *bounds.tolist()]
    yield from zip(starts, [*starts[1:], count], strict=True)


def _days(batch: pa.RecordBatch) -> np.ndarray:
    """Return the day of each row, -1 where it has no time."""
    if "timestamp" not in batch.schema.names:
        raise OptionsError("a table by date needs the column timestamp")
    micros = batch.column("timestamp").view(pa.int64())
    days = np.where(np.asarray(micros.is_null()), -1, np.asarray(micros.fill_null(0)) // DAY_MICROS)
    if "event_time_ns" in batch.schema.names and (days < 0).any():
        event = np.asarray(batch.column("event_time_ns").fill_null(0))
        days = np.where((days < 0) & (event > 0), event // DAY_NANOS, days)
    return days
