"""DataFrames into a key-value bucket, embedded or on NATS: upserts that may be repeated.

    write(Stream).format("penstock").option("bucket", NAME) … save/start(FOLDER or nats://host:port)

Rows are changes of keys, in the order of the frame: of a key's rows in one batch the last counts.  Tasks fold their
rows to one a key and hand them to the driver, which looks each key up and writes only what differs.  So a batch that
Spark repeats, whole or half done, changes nothing: no value, no revision, nothing a watcher would see.  The price is a
read for each key, and that a batch repeated after someone else changed its keys sets them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.errors import OptionsError, UnsupportedError
from penstock.kv import EmbeddedConnection, KvConnection, KvStore, NatsConnection, NatsOptions, StoreConfig
from penstock.kv.keys import check_key
from penstock.spark.source.columns import BASE, ENVELOPE
from penstock.spark.source.names import check_use
from penstock.spark.source.options import local_path
from penstock.types import Op

__all__ = ["BucketOptions", "BucketRows", "Upserts", "batch_writer", "stream_writer", "fold_rows", "upsert"]

SERVERS: Final = ("nats://", "tls://")
IN_FLIGHT: Final = 256
ROWS: Final = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("op", pa.uint8())])
FROM_FOLD: Final = {"value", "version", "changes"}
"""Columns that pipeline ``fold`` adds; those that are no part of an entry are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """Which bucket rows go to.

    >>> BucketOptions.of({"path": "data/buckets", "bucket": "devices"}).is_nats
    False
    """

    place: str
    """The folder of embedded buckets, or ``nats://host:port``."""

    bucket: str
    """Its name; made with default settings if it is not there."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> BucketOptions:
        """Read Spark's options, whose names have no case."""
        check_use(options, "a bucket")
        found = {name.lower(): value for name, value in options.items()}
        if "path" not in found:
            raise OptionsError("no path: give the folder of the bucket, or nats://host:port, to start() or save()")
        place = found["path"]
        return cls(place=place if place.startswith(SERVERS) else local_path(place), bucket=found["bucket"])

    @property
    def is_nats(self) -> bool:
        """Whether the bucket is on a server."""
        return self.place.startswith(SERVERS)

    def connection(self) -> KvConnection:
        """Return a connection that is not open yet."""
        return NatsConnection(NatsOptions(url=self.place)) if self.is_nats else EmbeddedConnection(self.place)


@dataclass
class BucketRows(WriterCommitMessage):
    """What a task tells the driver: its rows, one a key, as an Arrow stream."""

    data: bytes
    rows: int


class Upserts(msgspec.Struct):
    """What a batch came to.

    >>> Upserts(put=1).same
    0
    """

    put: int = 0
    deleted: int = 0
    same: int = 0
    """Keys that were so already."""


class BucketWriter:
    """What both writers share."""

    def __init__(self, options: BucketOptions, schema: StructType) -> None:
        check_schema(schema)
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BucketRows:
        """Fold the rows of one task."""
        table = fold_rows([rows_of(batch) for batch in iterator])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, ROWS) as writer:
            writer.write_table(table)
        return BucketRows(sink.getvalue().to_pybytes(), len(table))

    def apply(self, messages: Sequence[WriterCommitMessage | None]) -> Upserts:
        """Write what differs."""
        lost = sum(message is None for message in messages)
        if lost:
            raise UnsupportedError(f"{lost} tasks reported nothing: the batch cannot be committed")
        tables = [
            pa.ipc.open_stream(message.data).read_all()
            for message in messages
            if isinstance(message, BucketRows) and message.rows
        ]
        return asyncio.run(self._apply(fold_rows(tables))) if tables else Upserts()

    async def _apply(self, table: pa.Table) -> Upserts:
        async with self.options.connection() as connection:
            store = await connection.store_with_config(StoreConfig(name=self.options.bucket))  # a sink makes its bucket
            return await upsert(store, table)


class BucketBatchWriter(BucketWriter, DataSourceArrowWriter):
    """Upserts the rows of a DataFrame."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Write what differs."""
        self.apply(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing was written."""


class BucketStreamWriter(BucketWriter, DataSourceStreamArrowWriter):
    """Upserts the batches of a stream; a batch that is repeated changes nothing."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        """Write what differs."""
        self.apply(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing was written."""


def batch_writer(options: Mapping[str, str], schema: StructType) -> BucketBatchWriter:
    """Return the writer of a batch query; see sinks.py."""
    return BucketBatchWriter(BucketOptions.of(options), schema)


def stream_writer(options: Mapping[str, str], schema: StructType) -> BucketStreamWriter:
    """Return the writer of a stream; see sinks.py."""
    return BucketStreamWriter(BucketOptions.of(options), schema)


def check_schema(schema: StructType) -> None:
    """Refuse rows that cannot become entries: there must be a ``key``, and a ``payload`` or ``value``."""
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if types.get("key") not in ("binary", "string"):
        raise OptionsError("rows for a bucket need a column key of type string or binary")
    values = [name for name in ("payload", "value") if name in types]
    if len(values) != 1 or types[values[0]] not in ("binary", "string"):
        raise OptionsError("rows for a bucket need one column payload or value, of type binary or string")
    if types.get("op", "int") not in ("tinyint", "smallint", "int", "bigint"):
        raise OptionsError(f"column op must be a number, not {types['op']}")
    unknown = types.keys() - {column.name for column in (*BASE, *ENVELOPE)} - FROM_FOLD
    if unknown:
        raise OptionsError(f"an entry has no column {', '.join(sorted(unknown))}: put it into the payload")


def rows_of(batch: pa.RecordBatch) -> pa.Table:
    """Return rows as changes: key, value and op, which is 0 (put) where it is missing or null.

    >>> rows_of(pa.RecordBatch.from_pydict({"key": ["a"], "payload": ["1"]})).to_pylist()
    [{'key': b'a', 'value': b'1', 'op': 0}]
    """
    names = batch.schema.names
    key = batch.column("key").cast(pa.binary())
    value = batch.column("payload" if "payload" in names else "value").cast(pa.binary())
    op = batch.column("op").cast(pa.int64()) if "op" in names else pa.nulls(len(batch), pa.int64())
    op = pc.fill_null(op, int(Op.PUT))
    if key.null_count:
        raise OptionsError("a key is null: filter such rows out before they are written to a bucket")
    if len(batch) and not 0 <= pc.min(op).as_py() <= pc.max(op).as_py() <= max(Op):
        raise OptionsError(f"op must be between 0 and {max(Op)}")
    if pc.any(pc.and_(pc.is_null(value), pc.equal(op, int(Op.PUT)))).as_py():
        raise OptionsError("a value is null: give its row op 1 to delete the key, or filter it out")
    return pa.Table.from_arrays([key, pc.fill_null(value, b""), op.cast(pa.uint8())], schema=ROWS)


def fold_rows(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the last row of each key, in the order of these rows.

    >>> rows = [{"key": k, "value": v, "op": 0} for k, v in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3"))]
    >>> fold_rows([pa.Table.from_pylist(rows, ROWS)]).column("value").to_pylist()
    [b'2', b'3']
    """
    whole = pa.concat_tables(tables).combine_chunks() if tables else ROWS.empty_table()
    if not len(whole):
        return whole
    numbered = whole.select(["key"]).append_column("row", pa.array(range(len(whole)), pa.int64()))
    last = numbered.group_by("key").aggregate([("row", "max")]).column("row_max").combine_chunks()
    return whole.take(last.sort())


async def upsert(store: KvStore, table: pa.Table) -> Upserts:
    """Put and delete what is not so already; each key is in the table once.

    A key that is gone, or a tombstone, is not deleted or purged again.  One that no bucket can have is refused before
    anything is written.
    """
    reader, writer = store.reader, store.writer
    if writer is None:
        raise UnsupportedError(f"{store.name}: this bucket cannot be written")
    done = Upserts()
    every_key = [_key(raw) for raw in table.column("key").to_pylist()]
    for start in range(0, len(table), IN_FLIGHT):
        part, keys = table.slice(start, IN_FLIGHT), every_key[start : start + IN_FLIGHT]
        values, ops = part.column("value").to_pylist(), part.column("op").to_pylist()
        found = await asyncio.gather(*map(reader.entry, keys))
        puts = []
        for key, value, op, entry in zip(keys, values, ops, found, strict=True):
            if op == Op.PUT and (entry is None or entry.value != value):
                puts.append((key, value))
            elif op != Op.PUT and entry is not None and entry.value:
                await (writer.delete(key) if op == Op.DELETE else writer.purge(key))
                done.deleted += 1
            else:
                done.same += 1
        await writer.put_many(puts)
        done.put += len(puts)
    return done


def _key(raw: bytes) -> str:
    try:
        return check_key(raw.decode())
    except UnicodeDecodeError:
        raise OptionsError(f"key {raw!r}: the keys of a bucket are text") from None
