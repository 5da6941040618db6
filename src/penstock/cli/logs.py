"""Commands on any log: cat, tail, stat, verify."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import PROBLEM, counted, emit_json, emit_lines, print_facts, progress_bar, stderr

if TYPE_CHECKING:
    from penstock.batch import Batch

__all__ = ["register"]

PathArgument = Annotated[str, typer.Argument(help="A log: a channel file or a log's folder.", metavar="PATH")]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="xchannel, messagelog or filechannel. [default: what PATH looks like]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


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
    """Print the records of a log, oldest first, up to its present end."""
    from penstock.cli.records import print_rows, rows_in
    from penstock.log.detect import open_log

    with open_log(path, format=format) as log:
        for rows in rows_in(log, from_, limit):
            print_rows(rows, json=json)


def tail(
    path: PathArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the newest first.")] = 10,
    json: JsonOption = False,
    format: FormatOption = None,
) -> None:
    """Print the newest records of a log, and with -f those that come."""
    from penstock.cli.records import batches_in, open_batch, print_rows, rows_of
    from penstock.log.detect import open_log

    with open_log(path, format=format) as log:
        newest: deque[Batch] = deque()
        position = log.first_position
        for batch in batches_in(log, position):
            newest.append(batch)
            while sum(map(len, newest)) - len(newest[0]) >= lines:
                newest.popleft()
            position = batch.next_position
        surplus = sum(map(len, newest)) - lines
        for index, batch in enumerate(newest):
            print_rows(rows_of(batch[surplus:] if index == 0 and surplus > 0 else batch), json=json)
        if follow:
            for batch in log.tail(position):
                print_rows(rows_of(open_batch(log, batch)), json=json)


def stat(
    path: PathArgument,
    count: Annotated[bool, typer.Option("--count", help="Walk the log and count its records.")] = False,
    json: JsonOption = False,
    format: FormatOption = None,
) -> None:
    """Say what a log is: format, positions, sizes, cursors."""
    from penstock.cli.records import batches_in
    from penstock.log.detect import open_log

    with open_log(path, format=format) as log:
        facts = log.stat()
        if count:
            facts["records"] = sum(len(batch) for batch in batches_in(log, log.first_position))
    if json:
        emit_json(facts)
    else:
        print_facts({name: _readable(value) for name, value in facts.items()})


def verify(path: PathArgument, json: JsonOption = False, format: FormatOption = None) -> None:
    """Check every record of a log; exit code 1 if there is a problem."""
    from penstock.log.detect import open_log

    with open_log(path, format=format) as log, progress_bar(f"verifying {path}") as bar:
        bar.add_task("", total=None)
        problems = list(log.verify())
        kind = log.format
    if json:
        emit_json({"path": path, "format": kind, "ok": not problems, "problems": problems})
    else:
        emit_lines(f"{problem}\n".encode() for problem in problems)
        found = counted(len(problems), "problem") if problems else "no problem found"
        stderr.print(f"{path}: {found}", soft_wrap=True)
    if problems:
        raise typer.Exit(PROBLEM)


def _readable(value: Any) -> str:
    """Return a fact for people: lists, and dicts of dicts, a line an item.

    >>> _readable({"worker": {"position": 22, "lag_bytes": 13}}), _readable([]), _readable(None)
    ('worker  position=22  lag_bytes=13', '-', '-')
    """
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return "\n".join(f"{name}  {_readable(item)}" for name, item in value.items())
    if isinstance(value, dict):
        return "  ".join(f"{name}={item}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return "\n".join(map(_readable, value)) or "-"
    return "-" if value is None else str(value)
