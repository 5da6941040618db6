"""Commands on any log: cat, tail, stat, verify."""

from __future__ import annotations

import datetime as dt
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from penstock.batch import Batch
from penstock.cli.output import PROBLEM, emit_json, emit_lines, progress_bar, readable, rows_of, stderr, stdout
from penstock.errors import ExpiredError
from penstock.log.detect import FORMATS, open_log
from penstock.log.envelope import CONTENT, open_envelopes
from penstock.log.face import LogReader
from penstock.log.messagelog import MessageLogReader
from penstock.log.options import DEFAULT_LIMIT

__all__ = ["register"]

PathArgument = Annotated[str, typer.Argument(help="A log: a channel file or a log's folder.", metavar="PATH")]
FormatOption = Annotated[str | None, typer.Option("--format", help=f"Not detected: {', '.join(FORMATS)}.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

EVERYTHING = 1 << 64


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example: penstock cat ticks --json --limit 3")(cat)
    app.command(epilog="Example: penstock tail -f ticks --json")(tail)
    app.command(epilog="Example: penstock stat ticks --count")(stat)
    app.command(epilog="Example: penstock verify ticks --json")(verify)


def cat(
    path: PathArgument,
    json: JsonOption = False,
    from_: Annotated[int | None, typer.Option("--from", help="Begin at this position.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Stop after this many records.")] = None,
    format: FormatOption = None,
) -> None:
    """Print the records of a log, oldest first, and end where it ends now."""
    with open_log(path, format=format) as log:
        if isinstance(log, MessageLogReader) and log.content != CONTENT:
            _cat_entries(log, from_, limit, json=json)
            return
        start = log.first_position if from_ is None else from_
        for batch in _batches(log, start, limit):
            _print(rows_of(batch), json=json)


def _cat_entries(log: MessageLogReader, start: int | None, limit: int | None, *, json: bool) -> None:
    """Print a message log with its own numbers: a foreign one may hold some that no position or time column can."""
    if start is not None and start < log.first_position:
        raise ExpiredError(log.path, start, log.first_position)
    left = EVERYTHING if limit is None else limit
    rows = ({
        "position": entry.seq,
        "timestamp_ns": entry.timestamp_ms * 1_000_000,
        "kind": None,
        "seq": entry.seq,
        **readable("from", entry.sender),
        **readable("payload", entry.payload),
    } for entry in log.entries(start or 1, left))  # fmt: skip
    with progress_bar("reading", "entries") as bar:
        task = bar.add_task("", total=None)
        while chunk := list(islice(rows, DEFAULT_LIMIT)):
            _print(chunk, json=json)
            bar.advance(task, len(chunk))


def tail(
    path: PathArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the newest first.")] = 10,
    json: JsonOption = False,
    format: FormatOption = None,
) -> None:
    """Print the newest records of a log, and with -f those that come."""
    with open_log(path, format=format) as log:
        newest: deque[Batch] = deque()
        position = log.first_position
        for batch in _batches(log, position, None):
            newest.append(batch)
            while sum(map(len, newest)) - len(newest[0]) >= lines:
                newest.popleft()
            position = batch.next_position
        surplus = sum(map(len, newest)) - lines
        for index, batch in enumerate(newest):
            _print(rows_of(batch[surplus:] if index == 0 and surplus > 0 else batch), json=json)
        if follow:
            for batch in log.tail(position):
                _print(rows_of(_opened(log, batch)), json=json)


def stat(
    path: PathArgument,
    count: Annotated[bool, typer.Option("--count", help="Walk the log and count its records.")] = False,
    json: JsonOption = False,
    format: FormatOption = None,
) -> None:
    """Say what a log is: format, positions, sizes, cursors."""
    with open_log(path, format=format) as log:
        facts = log.stat()
        if count:
            facts["records"] = sum(len(batch) for batch in _batches(log, log.first_position, None))
        if json:
            emit_json(facts)
            return
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in facts.items():
            table.add_row(f"[bold]{name}[/]", _readable(value))
        stdout.print(table)


def verify(path: PathArgument, json: JsonOption = False, format: FormatOption = None) -> None:
    """Check every record of a log; exit code 1 if there is a problem."""
    with open_log(path, format=format) as log, progress_bar(f"verifying {path}") as bar:
        bar.add_task("", total=None)
        problems = list(log.verify())
        kind = log.format
    if json:
        emit_json({"path": path, "format": kind, "ok": not problems, "problems": problems})
    elif problems:
        emit_lines(f"{problem}\n".encode() for problem in problems)
    if problems:
        if not json:
            stderr.print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {path}", soft_wrap=True)
        raise typer.Exit(PROBLEM)
    if not json:
        stderr.print(f"{path}: no problem found", soft_wrap=True)


def _batches(log: LogReader, position: int, limit: int | None) -> Iterator[Batch]:
    """Yield what is there now, with a progress bar where that takes long."""
    left = limit
    end = log.stat().get("next_position")
    with progress_bar("reading", "positions") as bar:
        task = bar.add_task("", total=None if end is None else max(end - position, 0))
        first = position
        while left is None or left > 0:
            batch = log.read(position, DEFAULT_LIMIT if left is None else min(left, DEFAULT_LIMIT))
            if not len(batch):
                return
            yield _opened(log, batch)
            position = batch.next_position
            left = None if left is None else left - len(batch)
            bar.update(task, completed=position - first)


def _opened(log: LogReader, batch: Batch) -> Batch:
    return open_envelopes(batch, log.path) if getattr(log, "content", "raw") == CONTENT else batch


def _print(rows: Iterable[dict[str, Any]], *, json: bool) -> None:
    if json:
        encode = msgspec.json.Encoder().encode
        emit_lines(encode(row) + b"\n" for row in rows)
    else:
        emit_lines(_line(row).encode() for row in rows)


def _line(row: dict[str, Any]) -> str:
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


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name}={item}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return "\n".join(_readable(item) for item in value) or "-"
    if value is None:
        return "-"
    return str(value)
