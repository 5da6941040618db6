"""ingest: channels into the lake, each record once, as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import OptionsError
from penstock.spark import lake
from penstock.spark.pipelines.run import Progress, Summary, follow, require_channels, same_place, version_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ingest"]


def ingest(
    spark: SparkSession,
    channels: str,
    table: str,
    checkpoint: str,
    *,
    trigger: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Bring a table up to date with channels; rows of the summary are the records that its commits hold."""
    require_channels(channels)
    if same_place(channels, table):
        raise OptionsError(f"{table}: these are the channels, the table must be elsewhere")
    before = version_of(table)
    query = lake.ingest(spark, channels, table, checkpoint, trigger=trigger, options=options)
    summary = follow(query, on_progress)
    summary.rows = lake.committed_records(table, lake.app_of(checkpoint), before)
    return summary
