"""decode: payloads into the columns of a table; what does not decode goes to a table of errors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.spark import lake
from penstock.spark.decode import decode as decoded
from penstock.spark.decode import split_errors
from penstock.spark.options import local_path
from penstock.spark.pipelines.run import Progress, Summary, follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["decode"]


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
    """Bring a table of decoded records, and one of errors, up to date with channels; each record is in one of them."""
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
            good, bad = split_errors(kept)
            lake.append(good.drop("payload") if content != "raw" else good, table, app=app, batch=batch)
            lake.append(
                bad.select("channel", "position", "timestamp", "kind", "payload", "error"), errors, app=app, batch=batch
            )
        finally:
            kept.unpersist()

    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    return follow(query, on_progress)
