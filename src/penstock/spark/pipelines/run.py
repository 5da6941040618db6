"""What pipelines share: loading channels or tables, and following a query to its end."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import OptionsError, PenstockError
from penstock.spark import lake
from penstock.spark.lake.skipping import conditions_in
from penstock.spark.lake.table import alter_columns, check_cases
from penstock.spark.source.offsets import unpack_offset
from penstock.spark.source.options import is_remote, local_path, path_here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Progress", "Summary", "fit_table", "follow", "load", "replace", "require_channels", "stream"]

POLL_SECONDS = 0.1
PYTHON_ERROR = re.compile(r"(?!java\.|org\.|py4j\.protocol\.Py4JJavaError)[\w.]+(Error|Exception)\b(: |$)")
"""The line of a traceback that says what happened."""
JAVA_ERROR = re.compile(r"(?::|Caused by:) (?:(?:[\w$]+\.)+[\w$]+: )*")
"""What stands before the words of an error in Java; one that wraps another has the names of both."""
DECORATION = re.compile(r"^\[USER_RAISED_EXCEPTION\] |\.?\s*SQLSTATE: \w{5}\b|[;:\s]+$")


class Summary(msgspec.Struct):
    """What a query has done.

    >>> Summary(batches=2, rows=1000).rows
    1000
    """

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    read: int = 0
    """Records that were read, where that is not what ``rows`` counts."""
    lost: int = 0
    """Records that retention took, or damage hides, before they were read: those that can be counted."""
    lost_bytes: int = 0
    """Bytes of logs, at most, in which records were lost that cannot be counted."""
    bad: int = 0
    """Payloads that did not decode."""
    late: int = 0
    """Records that came when their window was closed; those of one window, key and task count as one."""
    drift: dict[str, int] = {}
    """Fields of payloads that the schema does not name, and how many records have each."""


class Progress(msgspec.Struct, frozen=True):
    """How far a query has come in its channels: positions done of positions there are."""

    done: int
    total: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Progress:
        """Read one of Spark's progress events.

        >>> place = lambda at: {"channels": {"ticks": {"id": "", "at": at}}}
        >>> source = {"startOffset": place(80), "endOffset": place(180), "latestOffset": place(280)}
        >>> Progress.of({"sources": [source]})
        Progress(done=100, total=200)
        """
        done = total = 0
        for source in event.get("sources", ()):
            ends, latest = _places(source.get("endOffset")), _places(source.get("latestOffset"))
            starts = _places(source.get("startOffset"))
            for name, place in ends.items():
                begin = starts.get(name, {}).get("at", place.get("from", place["at"]))
                done += place["at"] - begin
                total += max(latest.get(name, place)["at"], place["at"]) - begin
        return cls(done, total)


def follow(query: StreamingQuery, on_progress: Callable[[Progress], None] | None = None) -> Summary:
    """Wait for a query to end, handing out its progress; raise what it failed with.

    >>> follow(stream.start(), on_progress=print).rows  # doctest: +SKIP
    """
    from pyspark.errors import StreamingQueryException

    summary, seen, begin = Summary(), -1, time.monotonic()
    while True:
        active = query.isActive
        for event in map(_plain, query.recentProgress):
            if event["batchId"] <= seen or not event["sources"]:
                continue
            seen = event["batchId"]
            summary.batches += 1
            # Spark Connect has the number only with the sources.
            summary.rows += event.get("numInputRows") or sum(item.get("numInputRows", 0) for item in event["sources"])
            places = [place for source in event["sources"] for place in _places(source.get("endOffset")).values()]
            summary.lost = sum(place.get("lost", 0) for place in places)
            summary.lost_bytes = sum(place.get("lost_bytes", 0) for place in places)
            summary.late += sum(item.get("numRowsDroppedByWatermark", 0) for item in event.get("stateOperators", ()))
            if on_progress is not None:
                on_progress(Progress.of(event))
        if not active:
            break
        with contextlib.suppress(StreamingQueryException):  # it is told below, in one line
            query.awaitTermination(POLL_SECONDS)  # type: ignore[arg-type]
    summary.seconds = time.monotonic() - begin
    failed = query.exception()
    if failed is not None:
        raise error_of(str(failed))
    return summary


def load(
    spark: SparkSession, path: str, options: Mapping[str, Any] | None = None, *, where: str | None = None
) -> DataFrame:
    """Return a table of the lake, or channels, whichever the path holds.

    Options are for channels; of a table there are ``version`` and ``timestamp``, an earlier state.  ``where`` is SQL
    that rows are chosen by later: files of a table that can hold none of them are not opened.

    >>> load(spark, "data/ticks").count()  # doctest: +SKIP
    """
    if "*" in path or lake.open_table(path) is None:
        return spark.read.format("penstock").options(**texts(options)).load(path_here(spark, path))
    given = {name.lower(): str(value) for name, value in (options or {}).items()}
    unknown = given.keys() - {"version", "timestamp"}
    if unknown:
        raise OptionsError(f"{path}: a table of the lake has no option {', '.join(sorted(unknown))}")
    version = given.get("version")
    if version is not None and not version.isdecimal():
        raise OptionsError(f"version={version!r}: must be a number")
    return lake.read(
        spark,
        path,
        version=None if version is None else int(version),
        timestamp=given.get("timestamp"),
        skip_by=conditions_in(where or ""),
    )


def stream(spark: SparkSession, channels: str, options: Mapping[str, Any] | None = None) -> DataFrame:
    """Return channels as a stream.

    >>> stream(spark, "data/ticks", {"maxRecordsPerTrigger": 1000}).isStreaming  # doctest: +SKIP
    True
    """
    require_channels(channels)
    return spark.readStream.format("penstock").options(**texts(options)).load(path_here(spark, channels))


def require_channels(path: str) -> None:
    """Refuse a table of the lake where channels are wanted: it would be read as a folder without any, and give nothing.

    >>> require_channels("data/ticks")
    """
    if "*" not in path and lake.open_table(path) is not None:
        raise OptionsError(f"{path}: this is a table of the lake, not channels")


def fit_table(frame: DataFrame, table: str) -> None:
    """Add to a table the columns of a DataFrame that it lacks, as far as it is there; refuse one of another type.

    Rows whose columns have other types could be added, but then nobody could read the table any more.

    >>> fit_table(frame, "lake/typed")  # doctest: +SKIP
    """
    found = lake.open_table(table)
    if found is None:
        return
    from deltalake import Field
    from pyspark.sql.types import StructField, StructType

    held = {field.name: field.dataType for field in StructType.fromJson(msgspec.json.decode(found.schema().to_json()))}
    check_cases(table, held, frame.columns)
    more = []
    for field in frame.schema:
        if field.name not in held:
            more.append(Field.from_json(StructField(field.name, field.dataType).json()))
        elif held[field.name].simpleString() != field.dataType.simpleString():
            types = f"{held[field.name].simpleString()}, not {field.dataType.simpleString()}"
            raise OptionsError(f"{table}: the column {field.name} is {types}: give another table")
    if more and not alter_columns(found, table, more):
        fit_table(frame, table)


def version_of(table: str) -> int:
    """Return the version of a table, -1 where there is none.

    >>> version_of("nowhere")
    -1
    """
    found = lake.open_table(table)
    return -1 if found is None else int(found.version())


def replace(frame: DataFrame, table: str) -> int:
    """Make a DataFrame the whole content of a table, unless a stream adds to it; return how many rows it has.

    >>> replace(frame, "lake/hourly")  # doctest: +SKIP
    24
    """
    if not is_remote(table) and os.path.isdir(local_path(checkpoint_of(table))) and lake.open_table(table) is not None:
        raise OptionsError(f"{table}: a stream adds to this table, it is not replaced: give another one")
    return lake.replace(frame, table)


def checkpoint_of(table: str) -> str:
    """Return where a stream into a table keeps how far it has come, unless it is told otherwise.

    >>> checkpoint_of("lake/raw/")
    'lake/raw/_checkpoint'
    """
    return f"{table.rstrip('/')}/_checkpoint"


def same_place(one: str, other: str) -> bool:
    """Return whether two paths name one folder.

    >>> same_place("lake/raw/", "file:" + os.path.abspath("lake/raw")), same_place("lake/raw", "lake")
    (True, False)
    """
    if is_remote(one) or is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(local_path(one)) == os.path.realpath(local_path(other))


def texts(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return options as Spark takes them.

    >>> texts({"partitions": 2}), texts(None)
    ({'partitions': '2'}, {})
    """
    return {name: str(value) for name, value in (options or {}).items()}


def error_of(text: str) -> PenstockError:
    r"""Return what a long Spark error comes down to, as one line.

    That is the last error of ours that Python raised, or the last error of Python's, or Java's words and their cause.

    >>> error_of("Job aborted\nTraceback …\n  File x\npenstock.errors.OptionsError: no path\n\tat org.x")
    OptionsError('no path')
    >>> error_of("Failed\nTraceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'x'\n")
    PenstockError("ModuleNotFoundError: No module named 'x'")
    >>> error_of("An error occurred while calling o1.start.\n: java.io.IOException: failed\nCaused by: a.B: disk full")
    PenstockError('failed: disk full')
    """
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if line.startswith("penstock.errors.")]
    if raised:
        name, _, said = raised[-1].removeprefix("penstock.errors.").partition(": ")
        return OptionsError(said) if name in ("OptionsError", "NotFoundError") else PenstockError(f"{name}: {said}")
    python = [line for line in lines if PYTHON_ERROR.match(line)] if "Traceback (most" in text else []
    if python:
        return PenstockError(DECORATION.sub("", python[-1].removeprefix("pyspark.errors.exceptions.captured.")))
    java = [line for line in lines if JAVA_ERROR.match(line)]
    if not java:
        return PenstockError(DECORATION.sub("", next(filter(None, lines), text)))
    words = [DECORATION.sub("", JAVA_ERROR.sub("", line, count=1)) for line in (java[0], java[-1])]
    return PenstockError(": ".join(dict.fromkeys(words)))


def _places(offset: Any) -> dict[str, Any]:
    if isinstance(offset, str):
        offset = msgspec.json.decode(offset)
    return unpack_offset(offset) if isinstance(offset, dict) else {}


def _plain(event: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(event.json)
    return found
