"""decode: payloads into the columns of a table; what does not decode goes to a table of errors, never nowhere.

The source is a stream of channels, or a table of the lake: then what was added to it since the last run.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.errors import OptionsError
from penstock.spark import lake
from penstock.spark.decode import decode as decoded, split_errors
from penstock.spark.lake.checkpoint import checkpoint_here
from penstock.spark.pipelines.run import Progress, Summary, error_of, fit_table, follow, same_place, stream, version_of
from penstock.spark.source.options import local_path, path_here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["decode", "decode_added"]

ERRORS: Final = ("channel", "position", "timestamp", "kind", "payload", "error")
"""The columns of a table of errors."""


def decode(
    spark: SparkSession,
    channels: str,
    table: str,
    errors: str,
    checkpoint: str,
    *,
    content: str = "json",
    schema: str | None = None,
    rescue: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Bring a table of decoded records, and one of errors, up to date with channels; each record is in one of them.

    ``channels`` may be a table of the lake, such as ``ingest`` makes; it needs no checkpoint.  ``rescue`` names a
    column for JSON fields that the schema does not name; the summary counts them as ``drift``.
    """
    for one, other in ((channels, table), (channels, errors), (table, errors)):
        if same_place(one, other):  # what is decoded, what is not and where it came from must stay apart
            raise OptionsError(f"{one}: source, table and table of errors must be three places")
    _check_schema(content, schema)
    channels, table, errors = (path_here(spark, place) for place in (channels, table, errors))
    checkpoint = checkpoint_here(spark, checkpoint)
    if lake.open_table(channels) is not None:
        if trigger is not None and "availableNow" not in trigger:
            raise OptionsError(f"{channels}: a table is decoded once for each run, not on and on")
        if options:
            raise OptionsError(f"{channels}: a table of the lake has no option {', '.join(options)}")
        return decode_added(spark, channels, table, errors, content=content, schema=schema, rescue=rescue)
    app = "decode-" + hashlib.sha256(os.path.abspath(local_path(checkpoint)).encode()).hexdigest()[:16]
    source = stream(spark, channels, options)
    missing = [name for name in ERRORS if name not in (*source.columns, "error")]
    if missing:
        raise OptionsError(f"{channels}: there is no column {', '.join(missing)} to decode: not a log")
    frame = decoded(source, content, schema, rescue=rescue)
    fit_table(_parts(frame, content)[0], table)
    before, came = version_of(errors), version_of(table)

    def write(batch_frame: DataFrame, batch: int) -> None:
        # Each table remembers the batch for itself: whichever was missed by a crash is written by the replay.
        known = lake.query_of(checkpoint)
        due = [lake.is_due(target, app, batch, known) for target in (table, errors)]
        if not any(due):
            return
        kept = batch_frame.persist()
        try:
            good, bad = _parts(kept, content)
            lake.append(good, table, app=app, batch=batch, query=known)
            lake.append(bad, errors, app=app, batch=batch, query=known)
        finally:
            kept.unpersist()

    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    summary = follow(query, on_progress)
    summary.bad = lake.committed_records(errors, app, before)
    summary.drift = _drift(spark, table, came, rescue)
    return summary


def decode_added(
    spark: SparkSession,
    source: str,
    table: str,
    errors: str,
    *,
    content: str = "json",
    schema: str | None = None,
    rescue: str | None = None,
) -> Summary:
    """Decode what came to a table of the lake since the last run; the version it has is the number of the batch.

    A source that was made again has the same versions with other rows; its id tells the one from the other.
    """
    begin, summary = time.monotonic(), Summary()
    places = [os.path.abspath(local_path(place)) for place in (source, table)]
    app = "decode-" + hashlib.sha256("\n".join(places).encode()).hexdigest()[:16]
    found = lake.open_table(source)
    if found is None:
        raise OptionsError(f"{source}: there is no table here")
    version, before, made = found.version(), version_of(errors), str(found.metadata().id)
    came = version_of(table)
    for target in (table, errors):
        lake.is_due(target, app, version, made, holes=True)
    done = [lake.committed_batch(target, app) for target in (table, errors)]
    for after in sorted(set(done)):  # two only where a run died between its two commits
        if after >= version:
            continue
        rows = decoded(lake.read_added(spark, source, after, version), content, schema, rescue=rescue).persist()
        try:
            good, bad = _parts(rows, content)
            fit_table(good, table)
            if done[0] == after:
                lake.append(good, table, app=app, batch=version, query=made, holes=True)
            if done[1] == after:
                lake.append(bad, errors, app=app, batch=version, query=made, holes=True)
            summary.rows, summary.batches = max(summary.rows, rows.count()), 1
        finally:
            rows.unpersist()
    summary.bad = lake.committed_records(errors, app, before)
    summary.drift = _drift(spark, table, came, rescue)
    summary.seconds = time.monotonic() - begin
    return summary


def _check_schema(content: str, schema: str | None) -> None:
    """Refuse a schema that Spark cannot read, that says nothing, or that nobody asks for."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    if content != "json":
        if schema is not None:
            raise OptionsError(f"schema={schema!r}: only JSON has one, and these payloads are {content}")
        return
    if schema is None:
        raise OptionsError("JSON needs a schema, such as 'device string, celsius double'")
    try:
        names = [name.lower() for name in cast("StructType", StructType.fromDDL(schema)).fieldNames()]
    except PySparkException as exc:
        raise OptionsError(f"schema={schema!r}: {error_of(str(exc))}") from None
    twice = {name for name in names if names.count(name) > 1}
    if not names or twice or "error" in names:
        fault = f"{', '.join(sorted(twice))} is there twice" if twice else "error is what says why a payload is bad"
        raise OptionsError(f"schema={schema!r}: {fault if names else 'it has no field'}")


def _drift(spark: SparkSession, table: str, before: int, rescue: str | None) -> dict[str, int]:
    """Return which fields this run has rescued, and in how many records."""
    now = version_of(table)
    if rescue is None or now <= before:
        return {}
    from pyspark.sql import functions as F  # noqa: N812

    rows = lake.read_added(spark, table, before, now).where(F.col(f"`{rescue}`").isNotNull())
    names = rows.select(F.explode(F.map_keys(F.from_json(f"`{rescue}`", "map<string,string>"))).alias("name"))
    return {row["name"]: row["count"] for row in names.groupBy("name").count().collect()}


def _parts(frame: DataFrame, content: str) -> tuple[DataFrame, DataFrame]:
    """Return the rows for the table, and those for the table of errors."""
    good, bad = split_errors(frame)
    bad = bad.select(*ERRORS)
    return good if content == "raw" else good.drop("payload"), bad
