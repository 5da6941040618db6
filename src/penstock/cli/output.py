"""How commands speak: data on stdout, everything else on stderr.

Every command loads this module before it knows what it will do, so nothing here imports a floor below but ``shown``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from penstock.shown import PlainFormatter, json_line, visible

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.text import Text

__all__ = [
    "JsonOption",
    "counted",
    "emit_bytes",
    "emit_json",
    "emit_lines",
    "emit_text",
    "fail",
    "ignore_early_hangups",
    "json_line",
    "plain_handler",
    "print_facts",
    "progress_bar",
    "say_plain",
    "say_problem",
    "stderr",
    "stdout",
    "visible",
]

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

WIDE = 1000
"""Columns where there is no terminal: no cell of a table is cut for a file or a pipe."""

PROBLEM = 1
WRONG_USE = 2


def plain_handler() -> logging.Handler:
    """Return a handler that writes warnings to stderr, escaped.

    >>> plain_handler().level == logging.WARNING
    True
    """
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(PlainFormatter())
    return handler


class Plain(Console):
    """A console that shows names and payloads as data, and leaves quietly when whoever reads them has left."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if not self.is_terminal:
            self.width = WIDE

    def render_str(self, text: str, **options: Any) -> Text:
        """Return what is shown of a line or of a cell of a table: what a terminal would act upon is escaped."""
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        """Leave as ``emit_lines`` does."""
        _leave_quietly()


stdout = Plain()
stderr = Plain(stderr=True)


def emit_json(value: Any) -> None:
    """Print one object as one line of JSON."""
    emit_lines([json_line(value)])


def emit_bytes(data: bytes) -> None:
    """Print bytes as they are, and nothing else; on a terminal as a line that shows them."""
    if sys.stdout.isatty():
        emit_lines([data + b"\n"])
    else:
        _write(data)


def emit_lines(lines: Iterable[bytes]) -> None:
    """Print many lines with one write; leave quietly when whoever reads them has left.

    On a terminal, what it would act upon is escaped, newlines inside of a line too.
    """
    if sys.stdout.isatty():
        lines = (visible(line.removesuffix(b"\n")).encode() + b"\n" for line in lines)
    _write(b"".join(lines))


def ignore_early_hangups() -> None:
    """Let SIGHUP end no server that is still being loaded: what it asks for, reading files, is about to be done."""
    import signal

    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def emit_text(lines: Iterable[str]) -> None:
    """Print lines of text; what a terminal would act upon is escaped, and so are bytes of names that are not UTF-8."""
    emit_lines(f"{visible(line)}\n".encode() for line in lines)


def _write(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _leave_quietly()


def _leave_quietly() -> NoReturn:
    """Leave without a word: ``penstock cat ticks | head`` has done what was asked."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush finds a place too
    raise typer.Exit(0) from None


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number of things.

    >>> counted(1, "problem"), counted(2000, "problem"), counted(2, "batch", "batches")
    ('1 problem', '2,000 problems', '2 batches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def print_facts(facts: Mapping[str, str | list[str]]) -> None:
    """Print names and values in two columns; a value may have many lines, given as such."""
    width = max(map(len, facts), default=0) + 2
    emit_lines(
        f"{name if place == 0 else '':{width}}{line}\n".encode("utf-8", "backslashreplace")
        for name, value in facts.items()
        for place, line in enumerate([value] if isinstance(value, str) else value)
    )


def fail(message: str, code: int = PROBLEM) -> NoReturn:
    """Say what is wrong and leave."""
    say_problem(message)
    raise typer.Exit(code)


def say_problem(problem: str | BaseException) -> None:
    """Say what is wrong, on one line of stderr."""
    if isinstance(problem, OSError) and problem.strerror:
        places = [str(place) for place in (problem.filename, problem.filename2) if place is not None]
        problem = ": ".join([" -> ".join(places), problem.strerror] if places else [problem.strerror])
    stderr.print("penstock: ", style="bold red", end="")
    say_plain(str(problem) or type(problem).__name__)


def say_plain(text: str) -> None:
    """Print one line on stderr, with what a terminal would act upon escaped."""
    stderr.print(visible(text), soft_wrap=True)


def progress_bar(what: str, unit: str = "", *, printing: bool = False) -> Progress:
    """Return a progress bar on stderr; it shows only where there is a terminal, and leaves nothing behind.

    With ``printing`` data goes to stdout meanwhile: where that is the terminal too, the data is what moves.
    """
    from rich import progress
    from rich.text import Text

    return progress.Progress(
        progress.SpinnerColumn(),
        progress.RenderableColumn(Text(visible(what))),  # a path is no format string
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal or (printing and stdout.is_terminal),
    )
