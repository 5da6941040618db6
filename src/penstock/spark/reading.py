"""The records of a span as Arrow batches: what a Spark task does."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pyarrow as pa

from penstock.batch import Batch
from penstock.disk import PosixDisk
from penstock.errors import CorruptionError, ExpiredError, ReplacedError
from penstock.log.envelope import CONTENT, open_envelopes
from penstock.log.face import LogReader
from penstock.log.sidecar import identity_of
from penstock.spark.columns import pieces, to_record_batch
from penstock.spark.filters import Filters
from penstock.spark.plan import LISTING, Channel, Span

__all__ = ["check_identity", "read_batches", "read_spans"]

logger = logging.getLogger(__name__)


def read_spans(
    spans: Iterable[Span],
    schema: pa.Schema,
    *,
    batch_bytes: int,
    filters: Filters | None = None,
    fail_on_data_loss: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of these spans in order, as record batches of exactly this schema."""
    LISTING.forget()  # this process may have looked before the spans were planned
    for span in spans:
        for batch in read_batches(span, fail_on_data_loss=fail_on_data_loss):
            passed = batch if filters is None else filters.apply(batch)
            if len(passed):
                for piece in pieces(passed, batch_bytes):
                    yield to_record_batch(piece, span.channel.name, schema)


def read_batches(span: Span, *, fail_on_data_loss: bool = True) -> Iterator[Batch]:
    """Yield the records of one span, envelopes opened; an error names what stands in the way.

    A log that was made again while it was read is noticed at the end, before Spark takes what the task has read.
    """
    check_identity(span.channel)
    with span.channel.open() as log:
        opened = getattr(log, "content", "raw") == CONTENT
        at = span.start
        while at < span.end:
            try:
                batch = _read(log, at)
            except ExpiredError as exc:
                if fail_on_data_loss:
                    raise
                logger.warning("%s: positions %d to %d are lost", log.path, at, min(exc.first, span.end))
                at = exc.first
                continue
            if fail_on_data_loss:
                _check_damage(log)
            if not len(batch) and batch.next_position < span.end:
                if log.next_position >= span.end:
                    break  # a file without a record lies behind the last one
                raise ReplacedError(log.path, f"it ends at {at}, but had records up to {span.end} when it was planned")
            at = batch.next_position
            if at > span.end:
                batch = batch[: int(batch.positions.searchsorted(span.end))]
            if len(batch):
                yield open_envelopes(batch, log.path) if opened else batch
    check_identity(span.channel)


def _read(log: LogReader, position: int) -> Batch:
    """Read on; a file that retention takes between being listed and being opened counts as expired."""
    try:
        return log.read(position)
    except FileNotFoundError:
        LISTING.forget()
        first = log.first_position
        if position >= first:
            raise
        raise ExpiredError(log.path, position, first) from None


def _check_damage(log: LogReader) -> None:
    """Refuse to go on behind damage that the log has stepped over: its records would be missing in silence."""
    for problem in getattr(log, "damage", ()):
        raise CorruptionError(problem.file, problem.byte, problem.reason)


def check_identity(channel: Channel) -> None:
    """Refuse a log that was recreated since it was planned."""
    now = identity_of(PosixDisk(), channel.path)
    if channel.identity and now != channel.identity:
        raise ReplacedError(channel.path, "its log id changed" if now else "it is gone")
