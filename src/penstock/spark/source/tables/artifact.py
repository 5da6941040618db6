"""An artifact as a table: a published one by its URL, or the folder of one.

    spark.read.format("penstock").option("table", "artifact").load("s3://bucket/folds/routes")

It is fetched whole by one task, every byte hashed and the store in it opened, before a row of it is seen; the columns
are those of a fold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from penstock.artifact import import_artifact
from penstock.artifact.here import artifact_here
from penstock.artifact.manifest import MANIFEST_FILE
from penstock.disk import ReadDisk, is_url
from penstock.errors import OptionsError
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.tables import TablePart, fold

__all__ = ["SCHEMA", "plan", "read", "recognise"]

SCHEMA: Final = fold.SCHEMA


def recognise(disk: ReadDisk, path: str) -> bool:
    """Whether ``path`` is the folder of an artifact; what is published is told by the option ``table``."""
    return not is_url(path) and disk.stat(f"{path}/{MANIFEST_FILE}") is not None


def plan(options: SourceOptions) -> list[TablePart]:
    """Return one part an artifact, by the last part of its path."""
    parts: dict[str, TablePart] = {}
    for path in options.paths:
        name = path.rpartition("/")[2]
        if parts.setdefault(name, TablePart(name, path)).path != path:
            raise OptionsError(f"two artifacts are called {name}: {parts[name].path} and {path}")
    return [parts[name] for name in sorted(parts)]


def read(part: TablePart, options: SourceOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the entries of one artifact in key order."""
    with tempfile.TemporaryDirectory(prefix="penstock-artifact-") as folder:
        store = f"{folder}/store"
        with artifact_here(part.path) as artifact:
            import_artifact(artifact, store)
        yield from fold.read(TablePart(part.name, store), options, schema)
