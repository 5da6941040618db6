"""fold: the latest value of each key, as a DataFrame, a table, or a store that ``fold/follow`` goes on with.

Spark does what a fold of one process does record by record: of all changes of a key the one with the highest position
counts, and a key whose latest change is a delete or a purge is not there.  Buckets write a purge when a key expires;
for logs where nobody does, ``now_ns`` leaves out what has expired by then.

A store is brought from its cursor to the end of the log as it was when the pipeline began, in these steps:

    changes behind the cursor ── latest per key ──► Parquet beside the store ── apply, cursor last ──► store

An increment is one apply.  A store that begins from nothing is filled in parts under a cursor that is no position; the
last part brings the cursor.  So a crash leaves either the old state or one that is begun again here and refused
elsewhere: who went on with it would keep keys that the log has deleted and forgotten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.batch import Spans, UpdateBatch
from penstock.disk import disk_for
from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.fold.seen import SeenNote, owner_of
from penstock.fold.source import Source, SourceNote, source_of
from penstock.kv.embedded.format import EXPIRES, EXPIRES_HEAD, EXPIRES_NAME
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT
from penstock.log.fingerprint import fingerprint_of
from penstock.spark.source.options import absolute_path, local_path
from penstock.store import AppendLogStore, LmdbStore, RocksStore, SnapshotStore, open_store
from penstock.types import Op, VersionToken, WatchCursor

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["FoldSummary", "fold", "fold_into", "latest", "staged_latest", "updates_of"]

PART_ROWS: Final = 65_536
BACKENDS: Final = {kind.backend: kind for kind in (AppendLogStore, RocksStore, LmdbStore)}
TOKEN_BYTES: Final = 8
FILLING: Final = WatchCursor(VersionToken(b"filling"))


class FoldSummary(msgspec.Struct):
    """What a fold into a store has done.

    >>> FoldSummary(entries=3).records
    0
    """

    records: int = 0
    """Changes read from the log."""
    updates: int = 0
    """Keys put or deleted in the store."""
    entries: int = 0
    cursor: int | None = None
    digest: str = ""
    seconds: float = 0.0


def latest(frame: DataFrame, *, by: Sequence[str] = ("key",), keep: Sequence[str] = ()) -> DataFrame:
    """Return the last change of each key: columns of ``by``, op, value, version, ``keep``, and how many changes it had.

    Rows without ``op`` are puts.  A row without a key is an error, not nothing.
    """
    from pyspark.sql import functions as F  # noqa: N812

    missing = [name for name in (*by, "position", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to fold by")
    op = F.coalesce(F.col("op"), F.lit(0)) if "op" in frame.columns else F.lit(0)
    key = F.coalesce(F.col("key"), F.raise_error(F.lit("a record has no key: it cannot be folded")).cast("binary"))
    value = F.when(op == F.lit(int(Op.PUT)), F.col("payload")).otherwise(F.lit(b""))
    last = F.max_by(F.struct(op.cast("int").alias("op"), value.alias("value"), *map(F.col, keep)), F.col("position"))
    return (
        frame.withColumn("key", key)
        .groupBy(*by)
        .agg(last.alias("last"), F.max("position").alias("version"), F.count("*").alias("changes"))
        .select(*by, "last.op", "last.value", "version", *(f"last.{name}" for name in keep), "changes")
    )


def fold(frame: DataFrame, *, by: Sequence[str] | None = None, now_ns: int | None = None) -> DataFrame:
    """Return the live keys: node of a shipped log, channel, key, value, version (the position), when, how many changes.

    Positions order the records of one log: keys are told apart by node, channel and key unless ``by`` says otherwise.
    With ``now_ns``, keys whose time to live is over by then are left out, as a bucket does; without it only what the
    log itself deletes or purges is gone, as with ``fold/follow``.
    """
    from pyspark.sql import functions as F  # noqa: N812

    by = by if by is not None else [name for name in ("node", "channel", "key") if name in frame.columns]
    keep: list[str] = [name for name in ("timestamp", "timestamp_ns", "event_time_ns") if name in frame.columns]
    if now_ns is not None:
        if not {"flags", "headers"} <= set(frame.columns):
            raise OptionsError("expiry needs the columns flags and headers of envelopes")
        frame = frame.withColumn("expires_ns", _expires_ns(frame.schema["headers"].dataType.typeName() == "map"))
        keep.append("expires_ns")
    live = latest(frame, by=by, keep=keep).where(F.col("op") == F.lit(int(Op.PUT))).drop("op")
    if now_ns is not None:
        live = live.where(F.col("expires_ns").isNull() | (F.col("expires_ns") > F.lit(now_ns)))
    return live


def fold_into(spark: SparkSession, log: str, store: str, *, backend: str = AppendLogStore.backend) -> FoldSummary:
    """Bring a store up to date with a log of envelopes; the store is made if it is not there.

    The outcome is the one of ``penstock.fold.follow``: the same entries, versions, cursor and digest.  Either may go on
    with what the other left.
    """
    begin, log, store = time.monotonic(), local_path(log), local_path(store)
    with _open_store(store, backend) as target:
        start, end, source = _bounds(log, target)
        summary = FoldSummary()
        if start < end:
            with contextlib.closing(staged_latest(spark, log, f"{store}.penstock-staged", start, end)) as staged:
                summary = _apply(log, source, target, staged)
        target.settle()
        summary.entries, summary.digest = target.count(), target.digest()
        summary.cursor = target.cursor().token.as_int()
    summary.seconds = time.monotonic() - begin
    return summary


def updates_of(batch: pa.RecordBatch) -> UpdateBatch:
    """Return rows of op, key, value and version (a position) as updates; no Python runs per row.

    >>> rows = {"op": [0], "key": [b"a"], "value": [b"1"], "version": [7]}
    >>> updates_of(pa.RecordBatch.from_pydict(rows)).to_pylist()[0]["version"].hex()
    '0000000000000007'
    """
    ops = batch.column("op").cast(pa.uint8()).to_numpy(zero_copy_only=False)
    versions = batch.column("version").to_numpy().astype(">u8").tobytes()
    keys, key_data = _spans(batch.column("key"))
    values, value_data = _spans(batch.column("value"))
    tokens = Spans(np.arange(len(ops), dtype=np.int64) * TOKEN_BYTES, np.full(len(ops), TOKEN_BYTES, np.int64))
    moved = [keys, Spans(values.offsets + len(key_data), values.lengths)]
    moved.append(Spans(tokens.offsets + len(key_data) + len(value_data), tokens.lengths))
    return UpdateBatch(b"".join((key_data, value_data, versions)), ops, *moved)


def _spans(array: pa.Array) -> tuple[Spans, memoryview]:
    array = array.cast(pa.large_binary())
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    low = int(ends[0])
    held = memoryview(b"") if data is None else memoryview(data)[low : int(ends[-1])]
    return Spans(ends[:-1] - low, np.diff(ends)), held


def _expires_ns(maps: bool) -> Column:
    """Return when a record expires, null if it never does: the header that buckets write, a u64 little-endian."""
    from pyspark.sql import functions as F  # noqa: N812

    width, headers = len(EXPIRES_HEAD), F.col("headers")
    if maps:
        found = headers[EXPIRES_NAME.decode()]
        marked = found.isNotNull()
    else:  # a table of before they were a map
        found = F.substring(headers, width + 1, TOKEN_BYTES)
        marked = F.substring(headers, 1, width) == F.lit(bytearray(EXPIRES_HEAD))
    text = F.hex(found)
    turned = F.concat(*(F.substring(text, at, 2) for at in range(2 * TOKEN_BYTES - 1, 0, -2)))
    marked = marked & (F.col("flags").bitwiseAND(F.lit(EXPIRES)) != 0)
    return F.when(marked, F.conv(turned, 16, 10).cast("decimal(20,0)"))


# --- The store


@contextlib.contextmanager
def _open_store(path: str, backend: str) -> Iterator[SnapshotStore]:
    if backend not in BACKENDS:
        raise OptionsError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    store = open_store(path, read_only=False) if os.path.exists(path) else BACKENDS[backend].open(path)
    try:
        yield store
    finally:
        store.close()


def _bounds(log: str, store: SnapshotStore) -> tuple[int, int, Source]:
    """Return where the fold goes on and where the log ends, or say why it cannot go on; see fold/follow."""
    with open_log(log) as reader:
        if reader.content != CONTENT:
            raise OptionsError(f"{log}: its records are no envelopes: make keys with a DataFrame and use fold()")
        note, source, token = SourceNote(disk_for(store.path), store.path), source_of(reader), store.cursor().token
        first, end = reader.first_position, reader.next_position
        if not token.known or token == FILLING.token:
            note.write(source)
            with contextlib.closing(SeenNote(disk_for(store.path), store.path)) as seen:
                seen.forget(owner_of(source.log_id))
            return first, end, source
        at = token.as_int()
        if at is None:
            raise OptionsError(f"{store.path}: its cursor is {token!r}, which is no position of a log")
        note.check(source)
        if at > end:
            raise ReplacedError(log, f"it ends at {end}, before the fold's cursor at {at}")
        if at < first:
            raise ExpiredError(log, at, first)
        with contextlib.closing(SeenNote(disk_for(store.path), store.path)) as seen:
            seen.check_log(reader)
        return at, end, source


def staged_latest(spark: SparkSession, log: str, staging: str, start: int, end: int) -> Generator[pa.RecordBatch]:
    """Yield the latest change of each key between two positions of a log; meanwhile they lie in the folder ``staging``.

    Spark writes them to files: they may be more than the memory of this process takes.  What a run that was killed has
    left there is replaced.
    """
    frame = (
        spark.read.format("penstock")
        .schema("position long, key binary, op int, payload binary")
        .option("fromPosition", start)
        .option("toPosition", end)
        .load(absolute_path(log))
    )
    staging = os.path.abspath(staging)  # Java may have begun in another folder
    try:
        latest(frame).write.mode("overwrite").option("compression", "lz4").parquet(staging)
        for name in sorted(os.listdir(staging)):
            if name.endswith(".parquet"):
                with pq.ParquetFile(os.path.join(staging, name)) as file:
                    for batch in file.iter_batches(PART_ROWS):
                        if len(batch):
                            yield batch
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _apply(log: str, source: Source, store: SnapshotStore, staged: Iterable[pa.RecordBatch]) -> FoldSummary:
    """Apply what Spark found, the cursor with the last of it."""
    summary, last = FoldSummary(), -1
    from_nothing = store.cursor().at_start or store.cursor() == FILLING
    whole: list[UpdateBatch] = []
    if from_nothing:
        _empty(store)  # what a run that died half way left
    for batch in staged:
        last = max(last, int(np.asarray(batch.column("version")).max()))
        summary.records += int(np.asarray(batch.column("changes")).sum())
        summary.updates += len(batch)
        updates = updates_of(batch)
        if from_nothing:
            store.apply(updates, FILLING)
        else:
            whole.append(updates)
    if last >= 0:
        with open_log(log) as reader:
            if source_of(reader).log_id != source.log_id:
                raise ReplacedError(log, "its log id changed while it was folded")
            batch = reader.read(last, 1)
            cursor, found = WatchCursor.of(batch.next_position), fingerprint_of(batch)
        with contextlib.closing(SeenNote(disk_for(store.path), store.path)) as seen:
            seen.write(owner_of(source.log_id), batch.next_position, found)
        store.apply(UpdateBatch.concat(whole) if whole else UpdateBatch.of([]), cursor)
    return summary


def _empty(store: SnapshotStore) -> None:
    for batch in store.scan():
        none = Spans(np.zeros(len(batch), np.int64), np.zeros(len(batch), np.int64))
        deletes = UpdateBatch(batch.buffer, np.full(len(batch), Op.DELETE, np.uint8), batch.keys, none, none)
        store.apply(deletes, FILLING)
