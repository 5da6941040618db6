"""Folds of any backend as a table: append logs, RocksDB and LMDB stores.

A fold is read by one task, in one scan, so that its rows belong to one moment:
docs/decisions/126-a-fold-is-one-task.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from penstock.batch import Batch, UpdateBatch
from penstock.disk import ReadDisk, read_disk_for
from penstock.errors import NotFoundError, OptionsError
from penstock.spark.source.columns import pieces
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.tables import TablePart
from penstock.store import AppendLogOptions, AppendLogStore, StoreReader, detect_backend, open_store

__all__ = ["SCHEMA", "plan", "read", "recognise"]

SCHEMA: Final = StructType(
    [
        StructField("fold", StringType()),
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("version", BinaryType()),
        StructField("revision", LongType()),
    ]
)
PGSS: Final = b"PGSS"
REVISION_BYTES: Final = 8


def recognise(disk: ReadDisk, path: str) -> bool:
    """Whether ``path`` is a store: a file that begins as an append log does, or the folder of an engine."""
    found = disk.stat(path)
    if found is None:
        return False
    if not found.is_folder:
        if found.size < len(PGSS):  # or no file at all: opening a pipe would wait for its writer
            return False
        with disk.open(path) as file:
            return file.read_at(0, len(PGSS)) == PGSS
    try:
        return bool(detect_backend(path, disk))
    except OptionsError:
        return False


def plan(options: SourceOptions) -> list[TablePart]:
    """Return the stores at and below the paths, by name."""
    disk = read_disk_for(options.paths[0])
    parts: dict[str, TablePart] = {}
    for path in options.paths:
        if disk.stat(path) is None:
            raise NotFoundError(f"{path}: there is nothing here")
        for part in _stores(disk, path, os.path.basename(path), ""):
            known = parts.setdefault(part.name, part)
            if known != part:
                raise OptionsError(f"two folds are called {part.name}: {known.path} and {part.path}")
    return [parts[name] for name in sorted(parts)]


def read(part: TablePart, options: SourceOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the entries of one store in key order."""
    with _open(part.path) as store:
        for found in store.scan(options.key_prefix):
            extra = {"key": found.keys, "version": found.versions}
            whole = Batch(found.buffer, np.arange(len(found), dtype=np.int64), found.values, extra=extra)
            at = 0
            for piece in pieces(whole, options.batch_bytes):
                batch = found[at : at + len(piece)]
                at += len(piece)
                yield pa.RecordBatch.from_arrays([_column(batch, part, field.name) for field in schema], schema=schema)


def _open(path: str) -> StoreReader:
    """Open a store at one cursor: the end of an append log may be an apply that is being written."""
    if detect_backend(path) == AppendLogStore.backend:
        return AppendLogStore.open(path, AppendLogOptions(unfinished="drop"), read_only=True)
    return open_store(path)


def _stores(disk: ReadDisk, path: str, name: str, prefix: str) -> Iterator[TablePart]:
    if recognise(disk, path):
        yield TablePart(name, path)
        return
    found = disk.stat(path)
    if found is not None and found.is_folder:
        for entry in disk.list(path):
            if not entry.startswith(".") and ".penstock-" not in entry:
                yield from _stores(disk, os.path.join(path, entry), prefix + entry, f"{prefix}{entry}/")


def _column(batch: UpdateBatch, part: TablePart, name: str) -> pa.Array:
    match name:
        case "fold":
            return pa.repeat(pa.scalar(part.name), len(batch))
        case "key":
            return batch.keys.to_arrow(batch.buffer, view=False).cast(pa.string())
        case "value":
            return batch.values.to_arrow(batch.buffer, view=False)
        case "version":
            return batch.versions.to_arrow(batch.buffer, view=False)
    return _revisions(batch)


def _revisions(batch: UpdateBatch) -> pa.Array:
    """Return the versions that are revisions as numbers, null for the others."""
    numbers = np.full(len(batch), -1, np.int64)
    numbers[batch.versions.lengths == REVISION_BYTES] = batch.revisions().view(np.int64)
    return pa.array(numbers, mask=numbers < 0)
