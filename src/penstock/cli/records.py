"""Records of a log as rows, and rows as lines: for people, and as JSON."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.batch import Batch, payload_text
from penstock.cli.output import emit_lines, progress_bar
from penstock.errors import ExpiredError
from penstock.log.envelope import CONTENT, open_envelopes
from penstock.log.face import LogReader
from penstock.log.options import DEFAULT_LIMIT

if TYPE_CHECKING:
    from penstock.log.messagelog import MessageLogReader

__all__ = ["batches_in", "content_of", "open_batch", "print_rows", "readable", "rows_in", "rows_of"]

Row = dict[str, Any]

EVERYTHING = 1 << 64


def rows_in(log: LogReader, start: int | None, limit: int | None) -> Iterator[Iterable[Row]]:
    """Yield the rows of a log from ``start`` on, or from its first record, many at a time."""
    if log.format == "messagelog" and content_of(log) != CONTENT:
        from penstock.log.messagelog import MessageLogReader

        assert isinstance(log, MessageLogReader)
        yield from _entries_in(log, start, limit)
        return
    for batch in batches_in(log, log.first_position if start is None else start, limit, printing=True):
        yield rows_of(batch)


def batches_in(log: LogReader, position: int, limit: int | None = None, *, printing: bool = False) -> Iterator[Batch]:
    """Yield what is there now, with a progress bar; ``printing`` if each batch is printed before the next is read."""
    left = limit
    end = log.stat().get("next_position")
    with progress_bar("reading", "positions", printing=printing) as bar:
        task = bar.add_task("", total=None if end is None else max(end - position, 0))
        first = position
        while left is None or left > 0:
            batch = log.read(position, DEFAULT_LIMIT if left is None else min(left, DEFAULT_LIMIT))
            if not len(batch):
                return
            yield open_batch(log, batch)
            position = batch.next_position
            left = None if left is None else left - len(batch)
            bar.update(task, completed=position - first)


def open_batch(log: LogReader, batch: Batch) -> Batch:
    """Return a batch of a log with its envelopes opened, where it has some."""
    return open_envelopes(batch, log.path) if content_of(log) == CONTENT else batch


def content_of(log: LogReader) -> str:
    """Return what the records of a log are: ``raw``, or envelopes."""
    return getattr(log, "content", "raw")


def _entries_in(log: MessageLogReader, start: int | None, limit: int | None) -> Iterator[list[Row]]:
    """Yield a message log with its own numbers: a foreign one may hold some that no position or time column can."""
    if start is not None and start < log.first_position:
        raise ExpiredError(log.path, start, log.first_position)
    rows = ({
        "position": entry.seq,
        "timestamp_ns": entry.timestamp_ms * 1_000_000,
        "kind": None,
        "seq": entry.seq,
        **readable("from", entry.sender),
        **readable("payload", entry.payload),
    } for entry in log.entries(start or 1, EVERYTHING if limit is None else limit))  # fmt: skip
    with progress_bar("reading", "entries", printing=True) as bar:
        task = bar.add_task("", total=None)
        while chunk := list(islice(rows, DEFAULT_LIMIT)):
            yield chunk
            bar.advance(task, len(chunk))


def rows_of(batch: Batch) -> Iterator[Row]:
    """Yield one JSON-ready dict a record: position, time, kind, what the format adds, and the payload last.

    >>> list(rows_of(Batch.of([b"hi"], kinds=[1], timestamps=[7])))
    [{'position': 0, 'timestamp_ns': 7, 'kind': 1, 'payload': 'hi'}]
    """
    for row in batch.to_pylist():
        payload = row.pop("payload")
        ready: Row = {}
        for name, value in row.items():
            ready |= readable(name, value) if isinstance(value, bytes) else {name: value}
        yield ready | readable("payload", payload)


def readable(name: str, value: bytes) -> dict[str, str]:
    """Return a column of bytes for JSON: as text where it is UTF-8, else under ``<name>_base64``.

    >>> readable("from", b"ann"), readable("payload", bytes([255]))
    ({'from': 'ann'}, {'payload_base64': '/w=='})
    """
    form, text = payload_text(value)
    return {form.replace("payload", name): text}


def print_rows(rows: Iterable[Row], *, json: bool) -> None:
    """Print rows, a line each."""
    if json:
        encode = msgspec.json.Encoder().encode
        emit_lines(encode(row) + b"\n" for row in rows)
    else:
        emit_lines(_line(row).encode() for row in rows)


def _line(row: Row) -> str:
    """Return a record for people: position, time, kind, what the format adds, payload."""
    position, when, kind = row.pop("position"), row.pop("timestamp_ns"), row.pop("kind")
    text = row.pop("payload", None)
    if text is None:
        text = f"base64:{row.pop('payload_base64')}"
    extra = "".join(f"{name}={value}  " for name, value in row.items())
    shown = "" if kind is None else f"{kind:>5}  "
    return f"{position:>14}  {_time(when)}{shown}{extra}{text}\n"


def _time(when: int | None) -> str:
    if when is None:
        return ""
    try:
        moment = dt.datetime.fromtimestamp(when // 1_000_000_000, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{when:>30}  "
    return f"{moment:%Y-%m-%d %H:%M:%S}.{when % 1_000_000_000:09d}Z  "
