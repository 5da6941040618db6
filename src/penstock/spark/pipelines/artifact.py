"""artifact: the fold of a log computed on the cluster, as the artifact a node would export at that cursor.

    log ── latest change of each key ──► ranges of keys, sorted ──► records of an append log, a piece a task
                                                                    └──► put together here, opened, hashed, named

A compacted append log is its header, the live records in key order and the cursor: so pieces that tasks have written,
laid one behind the other by their first keys, are the bytes a node writes.  It goes where any artifact goes: into a
folder, or up under lease and pointer.

A log that has lost its beginning is folded on top of a published artifact that reaches into it: ``base``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from penstock.artifact import (
    ExportLease,
    ExportManifest,
    RoundReport,
    Transport,
    export_store,
    read_manifest,
    run_export_round,
    transport_for,
)
from penstock.artifact.here import split_artifact
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import is_url, object_store_for
from penstock.disk.plain import create_private, make_folders
from penstock.errors import CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT
from penstock.log.face import Cuttable, LogReader
from penstock.ship import ShippedLog, open_shipped
from penstock.spark.objects import put_file
from penstock.spark.pipelines.fold import latest, updates_of
from penstock.spark.source.options import absolute_path, place_of
from penstock.spark.source.shipped import holds_shipped
from penstock.store import AppendLogStore
from penstock.store.pgss import HEADER, cursor_record, encode_updates
from penstock.types import Op, VersionToken, WatchCursor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["build_artifact", "publish_built"]

BUILD: Final = ".penstock-build-"
PIECE: Final = "first binary, last binary, file string, bytes bigint, entries bigint"
COPY_BYTES: Final = 8 << 20


class _Piece(msgspec.Struct, frozen=True, order=True):
    """What one task has written: from which key to which, and where."""

    first: bytes
    last: bytes
    file: str
    bytes: int
    entries: int


def build_artifact(
    spark: SparkSession,
    log: str,
    destination: str | os.PathLike[str],
    *,
    to: int | None = None,
    base: str | None = None,
    scratch: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> ExportManifest:
    """Fold a log of envelopes, local or shipped, into the artifact ``destination``, a folder here.

    ``to`` is the cursor: the end of the log unless given.  ``base`` is an artifact, published or in a folder, whose
    entries are the beginning.  Tasks leave their pieces in ``scratch``, a URL or a folder that all of them share;
    beside the destination unless given.
    """
    log, destination = place_of(log), os.fspath(destination)
    start, floor = None, 0
    if base is not None:
        known = _manifest_of(base)
        start = known.cursor.token.as_int()
        if start is None or known.cursor.at_start:
            raise OptionsError(f"{base}: its cursor is no position of a log")
    with _open(log) as reader:
        if reader.content != CONTENT:
            raise OptionsError(f"{log}: its records are no envelopes, so they have no keys to fold by")
        floor = reader.origin if start is None else start
        if not reader.keeps(floor):
            raise ExpiredError(log, floor, reader.first_position)
        cursor = _cursor(reader, to)
        if cursor < floor:
            raise ReplacedError(log, f"it ends at {cursor}, before {floor} where the base is")
    place = f"{scratch or os.path.dirname(os.path.abspath(destination))}/{BUILD}{uuid.uuid4().hex[:16]}"
    try:
        pieces = _pieces(spark, log, floor, cursor, base, place)
        return export_store(_Built(place, pieces, cursor), destination, clock=clock)  # type: ignore[arg-type]
    finally:
        store = object_store_for(place)
        store.delete([info.key for info in store.objects()])
        if not is_url(place) and os.path.isdir(place):
            os.rmdir(place)


async def publish_built(
    spark: SparkSession,
    log: str,
    url: str,
    lease: ExportLease,
    *,
    ttl_seconds: float = 3600.0,
    to: int | None = None,
    base: str | None = None,
    transport: Transport | None = None,
    scratch: str | None = None,
) -> RoundReport:
    """Run one export round whose artifact is built by Spark: lease, build, upload, pointer, prune.

    ``url`` is where the artifact is published; pieces of the work lie below it meanwhile, unless ``scratch`` is given.
    The lease must outlive the work: ``ttl_seconds``.
    """
    place, key = split_artifact(place_of(url))

    async def export(destination: str) -> ExportManifest:
        return await asyncio.to_thread(
            build_artifact, spark, log, destination, to=to, base=base, scratch=scratch or place
        )

    with tempfile.TemporaryDirectory(prefix="penstock-build-") as folder:
        return await run_export_round(lease, ttl_seconds, export, transport or transport_for(place), key, folder)


# --- The log


def _open(log: str) -> LogReader:
    return open_shipped(log) if holds_shipped(log) else open_log(log)


def _cursor(reader: LogReader, to: int | None) -> int:
    """Return the cursor that a node has which has folded everything below ``to``, or all there is."""
    if to is not None:
        if not reader.first_position <= to <= reader.next_position:
            raise OptionsError(f"to={to}: the log goes from {reader.first_position} to {reader.next_position}")
        reader.read(to, 1)  # it raises where no record begins
        return to
    at = reader.first_position
    if isinstance(reader, ShippedLog) and (there := reader.entries(at, reader.next_position)):
        at = there[-1].first
    elif at < reader.next_position and isinstance(reader, Cuttable):
        at = reader.cut(at, reader.next_position, 1 << 20)[-1][0]
    while len(batch := reader.read(at)):
        at = batch.next_position
    return at


def _manifest_of(base: str) -> ExportManifest:
    if os.path.exists(f"{base}/MANIFEST.json"):
        return read_manifest(base)
    place, key = split_artifact(place_of(base))
    try:
        return transport_for(place).manifest(key)
    except FileNotFoundError:
        raise OptionsError(f"{base}: no artifact is published here") from None


# --- The work on the cluster


def _pieces(spark: SparkSession, log: str, start: int, end: int, base: str | None, place: str) -> list[_Piece]:
    from pyspark.sql import functions as F  # noqa: N812

    if start >= end and base is None:
        return []
    frame: DataFrame = (
        spark.read.format("penstock")
        .schema("position long, key binary, op int, payload binary")
        .option("fromPosition", start)
        .option("toPosition", end)
        .load(absolute_path(log))
    )
    if base is not None:
        held = spark.read.format("penstock").option("table", "artifact").load(absolute_path(base))
        frame = frame.unionByName(
            held.select(
                F.col("revision").alias("position"),
                F.col("key").cast("binary").alias("key"),
                F.lit(int(Op.PUT)).alias("op"),
                F.col("value").alias("payload"),
            )
        )
    live = latest(frame).where(F.col("op") == F.lit(int(Op.PUT))).select("op", "key", "value", "version")
    sorted_ = live.repartitionByRange("key").sortWithinPartitions("key")
    rows = sorted_.mapInArrow(_Encode(place), PIECE).collect()
    pieces = sorted(
        _Piece(bytes(row["first"]), bytes(row["last"]), row["file"], row["bytes"], row["entries"]) for row in rows
    )
    for before, after in itertools.pairwise(pieces):
        if before.last >= after.first:
            raise CorruptionError(place, 0, f"two tasks have keys between {after.first!r} and {before.last!r}")
    return pieces


class _Encode:
    """What one task does: its keys become records, in one object."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first, last, entries = None, b"", 0
        with tempfile.NamedTemporaryFile() as file:
            for batch in batches:
                if not len(batch):
                    continue
                file.write(encode_updates(self.place, updates_of(batch)))
                keys = batch.column("key")
                first = keys[0].as_py() if first is None else first
                last, entries = keys[-1].as_py(), entries + len(batch)
            if first is None:
                return
            file.flush()
            name = uuid.uuid4().hex
            size = put_file(self.place, name, file.name)
        row = {"first": [first], "last": [last], "file": [name], "bytes": [size], "entries": [entries]}
        yield pa.RecordBatch.from_pydict(row)


class _Built:
    """What tasks have made, as the store that an export asks for its data."""

    backend = AppendLogStore.backend
    backend_version = AppendLogStore.backend_version

    def __init__(self, place: str, pieces: list[_Piece], cursor: int) -> None:
        self._place, self._pieces, self._cursor = place, pieces, WatchCursor(VersionToken.of(cursor))

    def cursor(self) -> WatchCursor:
        """Return where it is."""
        return self._cursor

    def count(self) -> int:
        """Return how many entries there are."""
        return sum(piece.entries for piece in self._pieces)

    def write_data(self, folder: str) -> WatchCursor:
        """Write data/fold.snap: header, pieces, cursor."""
        store = object_store_for(self._place)
        make_folders(f"{folder}/data")
        with create_private(f"{folder}/data/fold.snap") as file:
            file.write(HEADER)
            for piece in self._pieces:
                written = sum(file.write(some) for some in store.stream(piece.file, COPY_BYTES))
                if written != piece.bytes:
                    raise CorruptionError(f"{self._place}/{piece.file}", written, f"a task wrote {piece.bytes} bytes")
            file.write(cursor_record(self._cursor.token.raw))
        return self._cursor
