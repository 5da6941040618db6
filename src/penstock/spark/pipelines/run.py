"""What pipelines share: loading channels or tables, and following a query to its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import OptionsError, PenstockError
from penstock.spark.lake import open_table, read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Progress", "Summary", "follow", "load"]

POLL_SECONDS = 0.1
PYTHON_ERROR = re.compile(r"(?!java\.|org\.|pyspark\.)[\w.]+(Error|Exception)\b: ")
"""The line of a traceback that says what happened."""


class Summary(msgspec.Struct):
    """What a query has done.

    >>> Summary(batches=2, rows=1000).rows
    1000
    """

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    lost: int = 0
    """Positions that retention took before they were read."""
    late: int = 0
    """Records that came when their window was closed; those of one window, key and task count as one."""


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
            summary.late += sum(item.get("numRowsDroppedByWatermark", 0) for item in event.get("stateOperators", ()))
            if on_progress is not None:
                on_progress(Progress.of(event))
        if not active:
            break
        query.awaitTermination(POLL_SECONDS)  # type: ignore[arg-type]
    summary.seconds = time.monotonic() - begin
    failed = query.exception()
    if failed is not None:
        raise error_of(str(failed))
    return summary


def load(spark: SparkSession, path: str, options: Mapping[str, Any] | None = None) -> DataFrame:
    """Return a table of the lake, or channels, whichever the path holds.

    >>> load(spark, "data/ticks").count()  # doctest: +SKIP
    """
    if open_table(path) is not None:
        return read(spark, path)
    return spark.read.format("penstock").options(**{k: str(v) for k, v in (options or {}).items()}).load(path)


def error_of(text: str) -> PenstockError:
    r"""Return what a long Spark error comes down to: the last error of ours that Python raised, or its first line.

    >>> error_of("Job aborted\nTraceback …\n  File x\npenstock.errors.OptionsError: no path\n\tat org.x")
    OptionsError('no path')
    >>> error_of("Failed\nTraceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'x'\n")
    PenstockError("ModuleNotFoundError: No module named 'x'")
    """
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if line.startswith("penstock.errors.")]
    if not raised:
        python = [line for line in lines if PYTHON_ERROR.match(line)] if "Traceback (most" in text else []
        return PenstockError(python[-1] if python else next(filter(None, lines), text))
    name, _, said = raised[-1].removeprefix("penstock.errors.").partition(": ")
    return OptionsError(said) if name == "OptionsError" else PenstockError(f"{name}: {said}")


def _places(offset: Any) -> dict[str, Any]:
    if isinstance(offset, str):
        offset = msgspec.json.decode(offset)
    return offset.get("channels", {}) if isinstance(offset, dict) else {}


def _plain(event: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(event.json)
    return found
