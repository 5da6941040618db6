"""What a batch looks like to Spark: names, types, and the Arrow record batches that have exactly those.

Spark compares the Arrow schema of the first batch with its own and refuses anything else, so the types here are the
ones it takes: no views, no dictionaries, no unsigned numbers, times in µs UTC.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from penstock.batch import MAX_SPAN, Batch, Spans
from penstock.errors import OptionsError
from penstock.log.envelope import CONTENT, headers_of

__all__ = [
    "Column",
    "BASE",
    "ENVELOPE",
    "NODE",
    "NUMBERED",
    "arrow_schema",
    "columns_of_batch",
    "pieces",
    "to_record_batch",
]

ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "binary": pa.binary(),
    "map<string,binary>": pa.map_(pa.string(), pa.binary()),
}
HEADERS: Final = ARROW["map<string,binary>"]
MAX_ROWS: Final = 65_536
FEW_ROWS: Final = 4096
"""A column of a name is made anew for so few rows: a small channel has only one batch."""


class Column(msgspec.Struct, frozen=True):
    """A column: its name and its type, as Spark's ``simpleString`` has it.

    >>> Column("position", "bigint").ddl
    '`position` bigint'
    """

    name: str
    type: str
    nullable: bool = True

    @property
    def ddl(self) -> str:
        """The column as Spark's schemas write it."""
        return f"`{self.name}` {self.type}{'' if self.nullable else ' not null'}"


BASE: Final = (
    Column("channel", "string"),
    Column("position", "bigint"),
    Column("timestamp", "timestamp"),
    Column("timestamp_ns", "bigint"),
    Column("kind", "int"),
    Column("key", "binary"),
    Column("payload", "binary"),
)
"""The columns that every channel has; those a format lacks are null."""

ENVELOPE: Final = (
    Column("op", "int"),
    Column("flags", "int"),
    Column("event_time_ns", "bigint"),
    Column("headers", "map<string,binary>"),
)
"""What logs of content ``envelope/1`` add.  Headers may also be asked for as they are stored, as binary."""

NUMBERED: Final = (Column("seq", "bigint"), Column("from", "binary"))
"""What message logs add."""

NODE: Final = Column("node", "string")
"""What shipped logs add: whose log it is."""


def columns_of_batch(batch: Batch, content: str = "raw") -> tuple[Column, ...]:
    """Return what this batch's format adds to BASE.

    >>> columns_of_batch(Batch.of([b"x"])), columns_of_batch(Batch.of([]), "envelope/1") == ENVELOPE
    ((), True)
    """
    added = {column.name: column for column in ENVELOPE} if content == CONTENT else {}
    for name, values in batch.extra.items():
        added.setdefault(name, Column(name, _type_of(values)))
    base = {column.name for column in BASE}
    return tuple(column for name, column in added.items() if name not in base)


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return the Arrow schema that Spark expects for these columns.

    >>> arrow_schema([Column("kind", "int")]).field("kind").type
    DataType(int32)
    """
    fields = []
    for column in columns:
        if column.type not in ARROW:
            raise OptionsError(f"column {column.name}: {column.type} is not a type that a log has")
        fields.append(pa.field(column.name, ARROW[column.type], column.nullable))
    return pa.schema(fields)


def check_columns(wanted: Sequence[Column], known: Iterable[Column]) -> None:
    """Refuse a schema that asks for other types than the log has; unknown names are null columns.

    Spark takes ``Payload`` and ``payload`` for one column, so a name in another case is not an unknown one.

    >>> check_columns([Column("payload", "string")], BASE)
    Traceback (most recent call last):
    penstock.errors.OptionsError: column payload is binary, not string: see penstock.spark.decode
    """
    types = {column.name: column.type for column in known}
    for column in wanted:
        if (column.name, column.type) == ("headers", "binary"):
            continue
        if column.name not in types and column.name.lower() in types:
            raise OptionsError(f"column {column.name}: it is called {column.name.lower()}")
        if types.get(column.name, column.type) != column.type:
            hint = ": see penstock.spark.decode" if column.name == "payload" else ""
            raise OptionsError(f"column {column.name} is {types[column.name]}, not {column.type}{hint}")


def pieces(batch: Batch, batch_bytes: int) -> Iterator[Batch]:
    """Cut a batch into even pieces of at most ``batch_bytes`` of payload (or one record) and 65536 records.

    >>> [len(piece) for piece in pieces(Batch.of([b"x" * 10] * 6), 40)]
    [3, 3]
    """
    lengths = batch.payloads.lengths
    total = int(lengths.sum())
    if len(batch) <= MAX_ROWS and total <= batch_bytes:
        yield batch
        return
    piece_bytes = -(-total // -(-total // batch_bytes)) if total else batch_bytes
    ends = np.cumsum(lengths)
    at = 0
    while at < len(batch):
        base = int(ends[at - 1]) if at else 0
        stop = int(np.searchsorted(ends, base + piece_bytes, "right"))
        stop = min(max(stop, at + 1), at + MAX_ROWS, len(batch))
        yield batch[at:stop]
        at = stop


def to_record_batch(batch: Batch, channel: str, schema: pa.Schema, node: str | None = None) -> pa.RecordBatch:
    """Return the columns of ``schema``, and only those: what is not asked for is not touched.

    >>> batch = Batch.of([b"one", b"two"])
    >>> to_record_batch(batch, "ticks", arrow_schema(BASE)).column("channel").to_pylist()
    ['ticks', 'ticks']
    """
    columns = [_column(batch, channel, field, node) for field in schema]
    for field, column in zip(schema, columns, strict=True):
        if column.null_count and not field.nullable:
            raise OptionsError(f"column {field.name} is not null in the schema, but has nulls in {channel}")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(batch: Batch, channel: str, field: pa.Field, node: str | None = None) -> pa.Array:
    count = len(batch)
    match field.name:
        case "channel":
            return _named(channel)[:count] if FEW_ROWS < count <= MAX_ROWS else pa.repeat(pa.scalar(channel), count)
        case "node" if node is not None:
            return _named(node)[:count] if FEW_ROWS < count <= MAX_ROWS else pa.repeat(pa.scalar(node), count)
        case "position":
            return pa.array(batch.positions)
        case "timestamp" | "timestamp_ns" if batch.timestamps is not None:
            signed = batch.timestamps.view(np.int64)
            if field.name == "timestamp_ns":
                return pa.array(signed)
            mask = signed < 0  # a time past 2262
            return pa.array(signed // 1000, mask=mask if mask.any() else None).view(field.type)
        case "kind" if batch.kinds is not None:
            return pa.array(batch.kinds.astype(np.int32))
        case "payload":
            return _binary(batch, batch.payloads, field.name)
    values = batch.extra.get(field.name)
    if values is None or field.name in ("timestamp", "timestamp_ns", "kind"):
        return pa.nulls(count, field.type)
    if field.name == "headers" and field.type == HEADERS:
        found = headers_of(batch, channel)
        names = found.names.to_arrow(found.buffer, view=False).cast(pa.string())
        values = found.values.to_arrow(found.buffer, view=False)
        return pa.MapArray.from_arrays(pa.array(found.starts.astype(np.int32)), names, values, type=HEADERS)
    if ARROW[_type_of(values)] != field.type:
        raise OptionsError(f"column {field.name} of {channel} is {_type_of(values)}, not {field.type}")
    if isinstance(values, Spans):
        return _binary(batch, values, field.name)
    if values.dtype == np.uint64:
        values = values.view(np.int64)  # the bits as stored, like timestamp_ns
    return pa.array(values.astype(field.type.to_pandas_dtype(), copy=False))


@functools.lru_cache(maxsize=16)
def _named(channel: str) -> pa.Array:
    """Return a column that says the channel in every row, to be cut to length: made once, not for every batch."""
    return pa.repeat(pa.scalar(channel), MAX_ROWS)


def _binary(batch: Batch, spans: Spans, name: str) -> pa.Array:
    if int(spans.lengths.sum()) > MAX_SPAN:
        index = int(spans.lengths.argmax())
        raise OptionsError(
            f"{name} of the record at position {batch.positions[index]} has {spans.lengths[index]} bytes; "
            "Spark takes less than 2 GiB in a batch"
        )
    return spans.to_arrow(batch.buffer, view=False)


def _type_of(values: Any) -> str:
    if isinstance(values, Spans):
        return "binary"
    match values.dtype.kind, values.dtype.itemsize:
        case ("b", _):
            return "boolean"
        case ("f", _):
            return "double"
        case ("i", size) if size <= 4:
            return "int"
        case ("u", size) if size <= 2:
            return "int"
    return "bigint"
