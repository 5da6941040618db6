"""Commands on any log: cat, tail, stat, verify."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import (
    PROBLEM,
    JsonOption,
    counted,
    emit_json,
    emit_text,
    print_facts,
    progress_bar,
    say_plain,
    visible,
)

if TYPE_CHECKING:
    from penstock.batch import Batch

__all__ = ["register"]

LOOKED_THROUGH_BYTES = 256 << 20
"""``stat`` looks for damage in logs up to this size."""
MOST_PROBLEMS = 10_000
"""``verify`` names so many problems; of the others it says that there are more."""

PathArgument = Annotated[
    str, typer.Argument(help="A log: a channel file, a log's folder, or the URL of either.", metavar="PATH")
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="xchannel, messagelog or filechannel. [default: what PATH looks like]")
]
SkipOption = Annotated[
    bool, typer.Option("--skip-damage", help="Go on behind damage, report it and leave with 1; message logs always do.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example: penstock cat ticks --from 2026-11-16T08:30 --to 15m --json --limit 3")(cat)
    app.command(epilog="Example: penstock tail -f ticks --json")(tail)
    app.command(epilog="Example: penstock stat ticks --count")(stat)
    app.command(epilog="Example: penstock verify ticks --json")(verify)


def cat(
    path: PathArgument,
    json: JsonOption = False,
    from_: Annotated[str | None, typer.Option("--from", metavar="WHERE", help="Begin here; see above.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="WHERE", help="Stop before this; see above.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, help="Stop after this many records.")] = None,
    skip_damage: SkipOption = False,
    format: FormatOption = None,
) -> None:
    """Print the records of a log, oldest first, up to its present end.

    WHERE is earliest, latest, a position (a whole number), a time (2026-11-16T08:30, UTC unless it has a zone) or an
    age (90s, 15m, 2h, 7d).  Times of a log need not ascend: all of it is looked through.  Exit code 1 if some are
    missing.
    """
    from penstock.cli.between import TimesBetween, parse_bound
    from penstock.cli.records import finish, open_any_log, print_rows, rows_in

    between = TimesBetween(parse_bound(from_, "--from"), parse_bound(to, "--to"))
    with open_any_log(path, format=format, on_damage="skip" if skip_damage else None) as log:
        if between.start.end or between.end.end:  # else numbers need not be positions
            between = between.of(log.first_position, log.next_position)
        for rows in rows_in(log, between, limit):
            print_rows(rows, json=json)
        finish(log)


def tail(
    path: PathArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")] = False,
    limit: Annotated[int, typer.Option("--limit", "--lines", "-n", min=0, help="How many of the newest first.")] = 10,
    json: JsonOption = False,
    skip_damage: SkipOption = False,
    format: FormatOption = None,
) -> None:
    """Print the newest records of a log, and with -f those that come.

    Exit code 1 if some before them are missing.
    """
    from penstock.cli.records import batches_in, finish, open_any_log, open_batch, print_rows, rows_of, start_of_newest

    with open_any_log(path, format=format, on_damage="skip" if skip_damage else None) as log:
        newest: deque[Batch] = deque()
        position = start_of_newest(log, limit)
        for batch in batches_in(log, position):
            newest.append(batch)
            while newest and sum(map(len, newest)) - len(newest[0]) >= limit:
                newest.popleft()
            position = batch.next_position
        surplus = sum(map(len, newest)) - limit
        for index, batch in enumerate(newest):
            print_rows(rows_of(batch[surplus:] if index == 0 and surplus > 0 else batch), json=json)
        if follow:
            for batch in log.tail(position):
                print_rows(rows_of(open_batch(log, batch)), json=json)
        finish(log)


def stat(
    path: PathArgument,
    count: Annotated[bool, typer.Option("--count", help="Walk the log and count its records.")] = False,
    json: JsonOption = False,
    format: FormatOption = None,
) -> None:
    """Say what a log is: format, positions, sizes, cursors.

    Damage is looked for in logs of up to 256 MiB, and with --count in any; exit code 1 if there is some.
    """
    from penstock.cli.records import batches_in, open_any_log
    from penstock.errors import PenstockError
    from penstock.log.ends import lost_at_end
    from penstock.types import Problem

    with open_any_log(path, format=format, on_damage="skip") as log:
        facts = log.stat()
        damage: list[Any] = []
        if count or facts["bytes"] <= LOOKED_THROUGH_BYTES:
            records = 0
            try:
                for batch in batches_in(log, log.first_position):
                    records += len(batch)
            except PenstockError as exc:
                if count:
                    raise
                place = getattr(exc, "file", path), getattr(exc, "byte", 0)
                damage.append(Problem(*place, getattr(exc, "reason", str(exc))))
            if count:
                facts["records"] = records
        damage = [*log.damage, *damage]
        ended = lost_at_end(log)
        facts["damage"] = [str(problem) for problem in ([*damage, ended] if ended else damage)]
    if json:
        emit_json(facts)
    else:
        print_facts({name: _readable(value).split("\n") for name, value in facts.items()})
    if facts["damage"]:
        raise typer.Exit(PROBLEM)


def verify(path: PathArgument, json: JsonOption = False, format: FormatOption = None) -> None:
    """Check every record of a log; exit code 1 if there is a problem."""
    from penstock.cli.records import open_any_log
    from penstock.log.ends import lost_at_end
    from penstock.types import Problem

    with open_any_log(path, format=format) as log, progress_bar(f"verifying {path}") as bar:
        bar.add_task("", total=None)
        problems = list(islice(log.verify(), MOST_PROBLEMS + 1))
        kind = log.format
        if len(problems) > MOST_PROBLEMS:
            problems[-1] = Problem(path, 0, "and more: the rest is not listed")
        ended = lost_at_end(log)
        if ended is not None and not any("synced" in problem.reason for problem in problems):
            problems.append(ended)
    if json:
        emit_json({"path": path, "format": kind, "ok": not problems, "problems": problems})
    else:
        emit_text(map(str, problems))
        found = counted(len(problems), "problem") if problems else "no problem found"
        say_plain(f"{path}: {found}")
    if problems:
        raise typer.Exit(PROBLEM)


def _readable(value: Any) -> str:
    """Return a fact for people: lists, and dicts of dicts, a line an item.

    >>> _readable({"worker": {"position": 22, "lag_bytes": 13}}), _readable([]), _readable(None)
    ('worker  position=22  lag_bytes=13', '-', '-')
    """
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return "\n".join(f"{visible(name)}  {_readable(item)}" for name, item in value.items())
    if isinstance(value, dict):
        return visible("  ".join(f"{name}={item}" for name, item in value.items())) or "-"
    if isinstance(value, list):
        return "\n".join(map(_readable, value)) or "-"
    return "-" if value is None else visible(str(value))
