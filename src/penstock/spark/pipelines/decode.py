"""decode: payloads into the columns of a table; what does not decode goes to a table of errors, never nowhere.

The source is a stream of channels, or a table of the lake: then what was added to it since the last run.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import OptionsError
from penstock.spark import lake
from penstock.spark.decode import decode as decoded
from penstock.spark.decode import split_errors
from penstock.spark.options import local_path
from penstock.spark.pipelines.run import Progress, Summary, follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["decode", "decode_added"]


def decode(
    spark: SparkSession,
    channels: str,
    table: str,
    errors: str,
    checkpoint: str,
    *,
    content: str = "json",
    schema: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Bring a table of decoded records, and one of errors, up to date with channels; each record is in one of them.

    ``channels`` may be a table of the lake, such as ``ingest`` makes; it needs no checkpoint.
    """
    if lake.open_table(channels) is not None:
        return decode_added(spark, channels, table, errors, content=content, schema=schema)
    app = "decode-" + hashlib.sha256(os.path.abspath(local_path(checkpoint)).encode()).hexdigest()[:16]
    stream = (
        spark.readStream.format("penstock").options(**{k: str(v) for k, v in (options or {}).items()}).load(channels)
    )
    frame = decoded(stream, content, schema)

    def write(batch_frame: DataFrame, batch: int) -> None:
        # Each table remembers the batch for itself: whichever was missed by a crash is written by the replay.
        if min(lake.committed_batch(table, app), lake.committed_batch(errors, app)) >= batch:
            return
        kept = batch_frame.persist()
        try:
            good, bad = _parts(kept, content)
            lake.append(good, table, app=app, batch=batch)
            lake.append(bad, errors, app=app, batch=batch)
        finally:
            kept.unpersist()

    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    return follow(query, on_progress)


def decode_added(
    spark: SparkSession, source: str, table: str, errors: str, *, content: str = "json", schema: str | None = None
) -> Summary:
    """Decode what came to a table of the lake since the last run; the version it has is the number of the batch."""
    begin, summary = time.monotonic(), Summary()
    places = [os.path.abspath(local_path(place)) for place in (source, table)]
    app = "decode-" + hashlib.sha256("\n".join(places).encode()).hexdigest()[:16]
    found = lake.open_table(source)
    if found is None:
        raise OptionsError(f"{source}: there is no table here")
    version = found.version()
    done = [lake.committed_batch(target, app) for target in (table, errors)]
    for after in sorted(set(done)):  # two only where a run died between its two commits
        if after >= version:
            continue
        rows = decoded(lake.read_added(spark, source, after, version), content, schema).persist()
        try:
            good, bad = _parts(rows, content)
            if done[0] == after:
                lake.append(good, table, app=app, batch=version)
            if done[1] == after:
                lake.append(bad, errors, app=app, batch=version)
            summary.rows, summary.batches = max(summary.rows, rows.count()), 1
        finally:
            rows.unpersist()
    summary.seconds = time.monotonic() - begin
    return summary


def _parts(frame: DataFrame, content: str) -> tuple[DataFrame, DataFrame]:
    """Return the rows for the table, and those for the table of errors."""
    good, bad = split_errors(frame)
    bad = bad.select("channel", "position", "timestamp", "kind", "payload", "error")
    return good if content == "raw" else good.drop("payload"), bad
