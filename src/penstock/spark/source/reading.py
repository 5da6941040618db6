"""The records of a span as Arrow batches: what a Spark task does."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Iterator

import pyarrow as pa

from penstock.batch import Batch
from penstock.disk import read_disk_for
from penstock.disk.posix import folder_of
from penstock.errors import ExpiredError, NotFoundError, ReplacedError
from penstock.log.envelope import CONTENT, open_envelopes
from penstock.log.face import LogReader
from penstock.log.sidecar import identity_of
from penstock.ship import Head
from penstock.ship.compacted import CompactedPart
from penstock.spark.source.columns import pieces, to_record_batch
from penstock.spark.source.filters import Filters
from penstock.spark.source.plan import SourceChannel, Span

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
    for span in spans:
        for batch in read_batches(span, fail_on_data_loss=fail_on_data_loss):
            passed = batch if filters is None else filters.apply(batch)
            if len(passed):
                for piece in pieces(passed, batch_bytes):
                    yield to_record_batch(piece, span.channel.label, schema, span.channel.node)


def read_batches(span: Span, *, fail_on_data_loss: bool = True) -> Iterator[Batch]:
    """Yield the records of one span, envelopes opened; an error names what stands in the way.

    A log that was made again while it was read is noticed at the end, before Spark takes what the task has read.
    """
    check_identity(span.channel)
    with span.open(on_damage="raise" if fail_on_data_loss else "skip") as log:
        opened = log.content == CONTENT
        at = span.start
        while at < span.end:
            try:
                batch = _read(log, at)
            except ExpiredError as exc:
                if fail_on_data_loss:
                    raise
                first = exc.first if span.part is None else _behind(span.part, at)
                logger.warning("%s: positions %d to %d are lost", log.path, at, min(first, span.end))
                at = first
                continue
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


def _behind(part: Head | CompactedPart, position: int) -> int:
    """Return where the segment with a position ends: its object is gone, and so is all of it."""
    if isinstance(part, CompactedPart):
        return part.next
    return next((entry.next for entry in part.segments if entry.next > position), part.next)


def _read(log: LogReader, position: int) -> Batch:
    """Read on; a file that retention takes between being listed and being opened counts as expired."""
    try:
        return log.read(position)
    except FileNotFoundError:
        first = log.first_position
        if position >= first:
            raise
        raise ExpiredError(log.path, position, first) from None


def check_identity(channel: SourceChannel) -> None:
    """Refuse a log that was recreated since it was planned, or that this machine does not see.

    Objects that were shipped never change.
    """
    if channel.node is not None:
        return
    disk = read_disk_for(channel.path)
    now = identity_of(disk, channel.path)
    if not now and disk.stat(folder_of(channel.path)) is None:
        raise NotFoundError(
            f"{channel.path}: the machine of this task ({platform.node()}) does not see it: put it where all workers "
            "read it, or ship it to an object store"
        )
    if channel.identity and now != channel.identity:
        raise ReplacedError(channel.path, "its log id changed" if now else "it is gone")
