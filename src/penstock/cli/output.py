"""How commands speak: data on stdout, everything else on stderr.

Every command loads this module before it knows what it will do, so nothing here imports a floor below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = [
    "counted",
    "emit_json",
    "emit_lines",
    "fail",
    "print_facts",
    "progress_bar",
    "say_problem",
    "stderr",
    "stdout",
]

WIDE = 1000
"""Columns where there is no terminal: no cell of a table is cut for a file or a pipe."""

PROBLEM = 1
WRONG_USE = 2


class Plain(Console):
    """A console that prints names and payloads as they are, and leaves quietly when whoever reads them has left."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if not self.is_terminal:
            self.width = WIDE

    def on_broken_pipe(self) -> None:
        """Leave as ``emit_lines`` does."""
        _leave_quietly()


stdout = Plain()
stderr = Plain(stderr=True)


def emit_json(value: Any) -> None:
    """Print one object as one line of JSON."""
    emit_lines([msgspec.json.encode(value), b"\n"])


def emit_lines(lines: Iterable[bytes]) -> None:
    """Print many lines with one write; leave quietly when whoever reads them has left."""
    try:
        sys.stdout.buffer.write(b"".join(lines))
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


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values in two columns; a value may have many lines."""
    width = max(map(len, facts), default=0) + 2
    below = "\n" + " " * width
    emit_lines(f"{name:{width}}{value.replace(chr(10), below)}\n".encode() for name, value in facts.items())


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
    stderr.print(str(problem) or type(problem).__name__, soft_wrap=True)


def progress_bar(what: str, unit: str = "", *, printing: bool = False) -> Progress:
    """Return a progress bar on stderr; it shows only where there is a terminal, and leaves nothing behind.

    With ``printing`` data goes to stdout meanwhile: where that is the terminal too, the data is what moves.
    """
    from rich import progress
    from rich.text import Text

    return progress.Progress(
        progress.SpinnerColumn(),
        progress.RenderableColumn(Text(what)),  # a path is no format string
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal or (printing and stdout.is_terminal),
    )
