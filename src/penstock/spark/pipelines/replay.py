"""replay: records of a table, or of channels, into a log again, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import OptionsError
from penstock.spark.columns import ENVELOPE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["replay"]


def replay(
    frame: DataFrame, log: str, *, app: str, batch: int = 0, format: str = "xchannel", content: str = "raw"
) -> None:
    """Append the rows to a log, oldest first, keeping kind and time; once for each (app, batch).

    Rows with keys need ``content="envelope/1"``, which keeps everything an envelope holds.
    """
    missing = [name for name in ("channel", "position", "payload") if name not in frame.columns]
    if missing:
        raise OptionsError(f"there is no column {', '.join(missing)} to replay")
    names = ["payload", "kind", "timestamp_ns", "key"]
    if content != "raw":
        names += [column.name for column in ENVELOPE]
    kept = [name for name in names if name in frame.columns]
    order = [name for name in ("timestamp_ns", "channel", "position") if name in frame.columns]
    (
        frame.orderBy(*order)  # the tasks of a sorted frame are in order, and so is what they stage
        .select(*kept)
        .write.format("penstock")
        .option("appId", app)
        .option("batchId", batch)
        .option("logFormat", format)
        .option("content", content)
        .mode("append")
        .save(log)
    )
