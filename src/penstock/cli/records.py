"""Records of a log as rows, and rows as lines: for people, and as JSON."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import typer

from penstock.batch import Batch, payload_text
from penstock.cli.between import TimesBetween
from penstock.cli.output import PROBLEM, emit_lines, json_line, progress_bar, say_plain
from penstock.disk import is_url, read_disk_for
from penstock.errors import CorruptionError, ExpiredError
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, decode_headers, open_envelopes
from penstock.log.face import LogReader, OnDamage
from penstock.log.options import DEFAULT_LIMIT

if TYPE_CHECKING:
    from penstock.log.messagelog import MessageLogReader

__all__ = [
    "batches_in",
    "finish",
    "open_any_log",
    "open_batch",
    "print_rows",
    "readable",
    "rows_in",
    "rows_of",
    "start_of_newest",
]

Row = dict[str, Any]

EVERYTHING = 1 << 64


def open_any_log(path: str, *, format: str | None = None, on_damage: OnDamage | None = None) -> LogReader:
    """Open a log of this machine, one on an object store, or one that was shipped there."""
    if is_url(path) or read_disk_for(path).stat(path) is None:
        from penstock.ship.remote import is_shipped, open_shipped

        if format is None and is_shipped(path):
            return open_shipped(path, on_damage=on_damage)
    return open_log(path, format=format, on_damage=on_damage)


def start_of_newest(log: LogReader, count: int) -> int:
    """Return a position in front of the newest records; of a shipped log what is before is not fetched for them."""
    known: Any = getattr(log, "start_of_newest", None)
    return log.first_position if known is None else int(known(count))


def rows_in(log: LogReader, between: TimesBetween, limit: int | None) -> Iterator[Iterable[Row]]:
    """Yield the rows of a log that are asked for, ``limit`` at the most, many at a time."""
    start, bounded = between.start.position, between.by_time or between.end.position is not None
    if log.format == "messagelog" and log.content != CONTENT and not bounded:
        from penstock.log.messagelog import MessageLogReader

        if isinstance(log, MessageLogReader):  # a shipped one has no numbers above 2^63
            yield from _entries_in(log, start, limit)
            return
    left = limit
    first = log.first_position if start is None else start
    for batch in batches_in(log, first, None if bounded else limit, printing=True):
        kept = between.keep(batch, log.path) if bounded else batch
        if left is not None:
            kept = kept[:left]
            left -= len(kept)
        yield rows_of(kept)
        beyond = between.end.position is not None and batch.next_position >= between.end.position
        if beyond or left == 0:
            return


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


def finish(log: LogReader) -> None:
    """Say what was missing in what was read; exit code 1 if something was."""
    from penstock.log.ends import lost_at_end

    problems = log.damage
    ended = lost_at_end(log)
    if ended is not None:
        problems = [*problems, ended]
    for problem in problems:
        say_plain(str(problem))
    more = log.damage_count - len(log.damage)
    if more:
        say_plain(f"{log.path}: {more:,} more damaged places")
    if problems:
        raise typer.Exit(PROBLEM)


def open_batch(log: LogReader, batch: Batch) -> Batch:
    """Return a batch of a log with its envelopes opened, where it has some."""
    return open_envelopes(batch, log.path) if log.content == CONTENT else batch


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
            if name == "headers" and isinstance(value, bytes):
                ready |= readable_headers(value)
            else:
                ready |= readable(name, value) if isinstance(value, bytes) else {name: value}
        yield ready | readable("payload", payload)


def readable_headers(value: bytes) -> Row:
    """Return the headers of an envelope for JSON, by name; bytes that are none as any other column.

    >>> readable_headers(bytes.fromhex("0300716f7301000000310200696401000000ff"))
    {'headers': {'qos': '1', 'id_base64': '/w=='}}
    """
    try:
        headers = decode_headers(memoryview(value))
    except CorruptionError:
        return readable("headers", value)
    found: dict[str, str] = {}
    for name, each in headers.items():
        found |= readable(name, each)
    return {"headers": found}


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
        emit_lines(map(json_line, rows))
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
