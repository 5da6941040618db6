"""Rows of a DataFrame as records of a log: which columns they may have, and what each becomes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from penstock.errors import OptionsError
from penstock.log.envelope import CONTENT, encode_envelopes

__all__ = ["RAW", "STAGED", "check_schema", "records_of", "enveloped"]

MAX_KIND: Final = 65_535
LAST_NS: Final = (1 << 63) - 1
"""The last time that Spark reads back as it was written, in 2262."""
RAW: Final = "raw"
BYTES: Final = ("binary", "string")
HEADERS: Final = ("map<string,binary>", *BYTES)
NUMBER: Final = ("int", "tinyint", "smallint", "bigint")
TYPES: Final = {"payload": BYTES, "kind": NUMBER, "timestamp_ns": ("bigint",), "timestamp": ("timestamp",)}
ENVELOPE_TYPES: Final = {"key": BYTES, "op": NUMBER, "flags": NUMBER, "event_time_ns": NUMBER, "headers": HEADERS}
STAGED: Final = pa.schema([("payload", pa.binary()), ("kind", pa.int32()), ("timestamp_ns", pa.int64())])


def check_schema(schema: StructType, content: str = RAW) -> None:
    """Refuse rows that cannot become records: there must be a ``payload`` of binary or string.

    ``channel`` and ``position`` say where a row came from and are not kept.
    """
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if "payload" not in types:
        raise OptionsError("rows for a log need a column payload of type binary or string")
    if content == CONTENT and "key" not in types:
        raise OptionsError(f"rows for {CONTENT} need a column key")
    known = TYPES | ENVELOPE_TYPES if content == CONTENT else TYPES
    unknown = types.keys() - known.keys() - {"channel", "position", "key"}
    if unknown:
        raise OptionsError(f"a record has no column {', '.join(sorted(unknown))}: put it into the payload")
    for name, allowed in known.items():
        if types.get(name, allowed[0]) not in allowed:
            raise OptionsError(f"column {name} must be {' or '.join(allowed)}, not {types[name]}")


def records_of(batch: pa.RecordBatch, now_ns: int, content: str = RAW) -> pa.RecordBatch:
    """Return rows as records: payload, kind and time, with defaults where a column is missing or null.

    >>> batch = pa.RecordBatch.from_pydict({"payload": ["hi"]})
    >>> records_of(batch, 7).to_pylist()
    [{'payload': b'hi', 'kind': 0, 'timestamp_ns': 7}]
    """
    names = set(batch.schema.names)
    payload = batch.column("payload").cast(pa.binary())
    if payload.null_count:
        raise OptionsError("a payload is null: filter such rows out before they are written to a log")
    if content == CONTENT:
        payload = enveloped(batch, payload)
    elif "key" in names and batch.column("key").null_count < len(batch):
        raise OptionsError(f"a raw record has no key: drop the column, or write with content={CONTENT}")
    kind = batch.column("kind").cast(pa.int32()) if "kind" in names else pa.repeat(pa.scalar(0, pa.int32()), len(batch))
    if "timestamp_ns" in names:
        when = batch.column("timestamp_ns").cast(pa.int64())
        _check_times("timestamp_ns", when, LAST_NS)
    elif "timestamp" in names:
        when = batch.column("timestamp").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        _check_times("timestamp", when, LAST_NS // 1000)
        when = pc.multiply_checked(when, 1000)
    else:
        when = pa.nulls(len(batch), pa.int64())
    kind, when = pc.fill_null(kind, 0), pc.fill_null(when, now_ns)
    if len(batch) and (pc.min(kind).as_py() < 0 or pc.max(kind).as_py() > MAX_KIND):
        raise OptionsError(f"kind must be between 0 and {MAX_KIND}")
    return pa.RecordBatch.from_arrays([payload, kind, when], schema=STAGED)


def _check_times(name: str, when: pa.Array, last: int) -> None:
    """Refuse times that no record can have, with the row; ``last`` is the greatest in the unit of the column."""
    bad = pc.indices_nonzero(pc.or_(pc.less(when, 0), pc.greater(when, last)))
    if len(bad):
        value, unit = when[bad[0].as_py()].as_py(), "ns" if last == LAST_NS else "µs"
        found = np.datetime64(value, "ns" if unit == "ns" else "us")
        raise OptionsError(
            f"{name} {found}Z ({value} {unit}): a record has times from 1970-01-01 to 2262-04-11 23:47:16"
        )


def enveloped(batch: pa.RecordBatch, payload: pa.Array) -> pa.Array:
    """Return payloads in envelopes, with key, op, flags, time and headers from the columns of those names.

    >>> from penstock.log.envelope import Envelope, encode_envelope
    >>> batch = pa.RecordBatch.from_pydict({"key": ["k"]})
    >>> enveloped(batch, pa.array([b"v"])).to_pylist() == [encode_envelope(Envelope(b"k", b"v"))]
    True
    """

    def column(name: str, kind: pa.DataType, default: Any) -> pa.Array:
        if name not in batch.schema.names:
            return pa.repeat(pa.scalar(default, kind), len(batch))
        return pc.fill_null(batch.column(name).cast(kind), pa.scalar(default, kind))

    times = column("event_time_ns", pa.int64(), 0).to_numpy().view(np.uint64)  # the bits as read
    made = encode_envelopes(
        column("key", pa.binary(), b""),
        payload,
        ops=column("op", pa.int64(), 0).to_numpy(),
        flags=column("flags", pa.int64(), 0).to_numpy(),
        event_times_ns=times,
        headers=_headers(batch) if _has_maps(batch) else column("headers", pa.binary(), b""),
    )
    return made.payloads.to_arrow(made.buffer, view=False)


def _has_maps(batch: pa.RecordBatch) -> bool:
    return "headers" in batch.schema.names and pa.types.is_map(batch.schema.field("headers").type)


def _headers(batch: pa.RecordBatch) -> pa.Array:
    """Return headers as an array of maps; one without a value is refused: a header has bytes, maybe none."""
    maps = batch.column("headers")
    if maps.items.null_count:
        raise OptionsError("a header is null: leave it out of the map, or make it empty")
    return maps
