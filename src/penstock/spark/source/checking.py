"""Reading logs to see whether they are whole: what the tasks of pipeline ``audit`` do.

Each span of a channel is read once, as a query would read it; that checks what the format can (checksums, lengths,
commit marks, envelopes).  On the way positions are held against each other.  One more task a channel runs the format's
own ``verify``, which also looks at what reading steps over.  Records never leave the task: one row a span does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.batch import Batch
from penstock.errors import CorruptionError, ExpiredError
from penstock.log.detect import gaps_in
from penstock.spark.source.bounds import check_chosen
from penstock.spark.source.columns import Column, arrow_schema
from penstock.spark.source.names import check_use
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.plan import SourceChannel, Span, find_channels, plan_tasks
from penstock.spark.source.reading import read_batches

__all__ = ["CheckSource", "Finding", "LogCheck", "check_span", "join_findings"]

MOST_PROBLEMS: Final = 100

FINDINGS: Final = (Column("finding", "binary"),)


class Finding(msgspec.Struct):
    """What one task found in one span, or what ``verify`` found in one channel."""

    channel: str
    format: str
    start: int = -1
    next: int = -1
    """Where reading went on behind the last record; -1 without any."""
    first: int = -1
    last: int = -1
    records: int = 0
    bytes: int = 0
    gaps: int = 0
    disorder: int = 0
    back_in_time: int = 0
    expired: bool = False
    """Whether retention took some of the span while it was read."""
    problems: list[str] = []


class LogCheck(msgspec.Struct):
    """What is to be said of one channel.

    >>> LogCheck("ticks", "xchannel").ok
    True
    """

    channel: str
    format: str
    records: int = 0
    bytes: int = 0
    first_position: int | None = None
    last_position: int | None = None
    gaps: int = 0
    """Places where records are missing: numbers of a message log, bytes of a queue, files of a channel."""
    disorder: int = 0
    """Records whose position is not above the one before."""
    back_in_time: int = 0
    """Records written at an earlier time than the one before: a clock that was set, no fault of the log."""
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether the log is whole."""
        return not (self.gaps or self.disorder or self.problems)


def check_span(span: Span) -> Finding:
    """Read a span and say what is in it and what is wrong with it; what retention takes meanwhile is no fault."""
    try:
        return _check_span(span)
    except ExpiredError as exc:
        found = check_span(msgspec.structs.replace(span, start=min(exc.first, span.end)))
        found.start, found.expired = span.start, True
        return found


def _check_span(span: Span) -> Finding:
    found = Finding(span.channel.name, span.channel.format, span.start)
    expected: int | None = None
    time_before: int | None = None
    try:
        for batch in read_batches(span):
            positions = batch.positions
            found.gaps += gaps_in(found.format, expected, batch)
            found.disorder += int((np.diff(positions) <= 0).sum()) + int(positions[0] <= found.last)
            if batch.timestamps is not None:
                times = batch.timestamps
                found.back_in_time += int((times[1:] < times[:-1]).sum())
                found.back_in_time += int(time_before is not None and int(times[0]) < time_before)
                time_before = int(times[-1])
            found.first = int(positions[0]) if found.first < 0 else found.first
            found.last, found.next = int(positions[-1]), batch.next_position
            found.records += len(batch)
            found.bytes += int(batch.payloads.lengths.sum())
            expected = batch.next_position
    except CorruptionError as exc:
        found.problems.append(str(exc))
    return found


def verify_channel(channel: SourceChannel) -> Finding:
    """Run the format's own check."""
    found = Finding(channel.name, channel.format)
    with channel.open() as log:
        for problem in log.verify():
            found.problems.append(str(problem))
            if len(found.problems) >= MOST_PROBLEMS:
                found.problems.append("and more")
                break
    return found


def join_findings(findings: Iterable[Finding]) -> list[LogCheck]:
    """Put the spans of each channel together again, with what lies between them.

    >>> one = Finding("t", "messagelog", start=1, next=4, first=1, last=3, records=3)
    >>> two = Finding("t", "messagelog", start=4, next=8, first=6, last=7, records=2)
    >>> check, = join_findings([two, one])
    >>> check.records, check.gaps, check.ok
    (5, 1, False)
    """
    checks: dict[str, LogCheck] = {}
    before: dict[str, Finding] = {}
    for found in sorted(findings, key=lambda item: (item.channel, item.start)):
        check = checks.setdefault(found.channel, LogCheck(found.channel, found.format))
        for name in ("records", "bytes", "gaps", "disorder", "back_in_time"):
            setattr(check, name, getattr(check, name) + getattr(found, name))
        check.problems = [*check.problems, *(text for text in found.problems if text not in check.problems)]
        if found.expired:
            before.pop(found.channel, None)  # the log begins here now
        if not found.records:
            continue
        known = before.get(found.channel)
        if known is None:
            check.first_position = found.first
        elif not known.problems:  # what a problem hides is told by the problem
            check.gaps += gaps_in(found.format, known.next, Batch.of([b""], positions=[found.first]))
            check.disorder += int(found.first <= known.last)
        check.last_position = found.last
        before[found.channel] = found
    return list(checks.values())


class CheckPartition(InputPartition):
    """What one task checks: spans, or one channel by its own ``verify``."""

    def __init__(self, spans: tuple[Span, ...], channel: SourceChannel | None = None) -> None:
        super().__init__(spans)
        self.spans, self.channel = spans, channel


class CheckSource(DataSource):
    """The format ``penstock-check``: one row a span, what was found in it, as JSON.

    >>> CheckSource.name()
    'penstock-check'
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(...)``."""
        return "penstock-check"

    def schema(self) -> str:
        """Return the one column."""
        return ", ".join(column.ddl for column in FINDINGS)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """Return the reader."""
        check_use(self.options, "a check of logs")
        return CheckReader(SourceOptions.of(self.options))


class CheckReader(DataSourceReader):
    """Checks what is in the channels at the moment of planning."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan spans as a query would, and one more task a channel."""
        channels = find_channels(self.options.paths, self.options.format)
        check_chosen(self.options, channels)
        channels = [channel for channel in channels if self.options.filters.takes(channel)]
        bounds = []
        for channel in channels:
            with channel.open() as log:
                bounds.append((channel, log.first_position, log.next_position))
        tasks = plan_tasks(bounds, self.options.partition_bytes, self.options.partitions)
        return [
            *(CheckPartition(task) for task in tasks),
            *(CheckPartition((), channel) for channel in channels),
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Check, and yield what was found."""
        if not isinstance(partition, CheckPartition):  # Spark makes a task of none where there is no channel
            return
        found = [check_span(span) for span in partition.spans]
        if partition.channel is not None:
            found.append(verify_channel(partition.channel))
        rows = [msgspec.json.encode(item) for item in found]
        yield pa.RecordBatch.from_arrays([pa.array(rows, pa.binary())], schema=arrow_schema(FINDINGS))
