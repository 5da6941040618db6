"""replay: records of a table, or of channels, into a log again, in their order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import OptionsError
from penstock.log.detect import open_log
from penstock.spark.source.columns import ENVELOPE
from penstock.spark.source.options import local_path, path_here
from penstock.spark.source.plan import advance

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["replay"]


def replay(
    frame: DataFrame, log: str, *, app: str, batch: int = 0, format: str = "xchannel", content: str = "raw"
) -> int:
    """Append the rows to a log, oldest first, keeping kind and time; once for each (app, batch); return how many.

    The records of a channel keep their order, also where a clock was set back.  Rows with keys need
    ``content="envelope/1"``, which keeps everything an envelope holds.
    """
    from pyspark.sql import (
        Window,
        functions as F,  # noqa: N812
    )

    log = path_here(frame.sparkSession, log)
    missing = [name for name in ("channel", "position", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to replay")
    names = ["payload", "kind", "timestamp_ns", "key"]
    if content != "raw":
        names += [column.name for column in ENVELOPE]
    kept = [name for name in names if name in frame.columns]
    if "timestamp_ns" in frame.columns:
        earlier = Window.partitionBy("channel").orderBy("position").rowsBetween(Window.unboundedPreceding, 0)
        moment = F.max("timestamp_ns").over(earlier)
    else:
        moment = F.lit(0)
    before = _end_of(log)
    (
        frame.withColumn("moment", moment)
        .orderBy("moment", "channel", "position")  # the tasks of a sorted frame are in order, and so is what they stage
        .select(*kept)
        .write.format("penstock")
        .option("appId", app)
        .option("batchId", batch)
        .option("logFormat", format)
        .option("content", content)
        .mode("append")
        .save(log)
    )
    return _count_since(log, before)


def _end_of(path: str) -> int | None:
    """Return where a log ends; None if it is not there."""
    if not os.path.exists(local_path(path)):
        return None
    with open_log(local_path(path)) as log:
        return int(log.next_position)


def _count_since(path: str, start: int | None) -> int:
    """Return how many records a log has behind a position."""
    if not os.path.exists(local_path(path)):
        return 0
    with open_log(local_path(path)) as log:
        return advance(log, log.first_position if start is None else start, log.next_position, None, None).records
