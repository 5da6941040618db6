"""How commands speak: data on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.batch import Batch, payload_text

__all__ = ["emit_json", "emit_lines", "fail", "progress_bar", "readable", "rows_of", "stderr", "stdout"]

stdout = Console()
stderr = Console(stderr=True)

PROBLEM = 1
WRONG_USE = 2


def emit_json(value: Any) -> None:
    """Print one object as one line of JSON."""
    emit_lines([msgspec.json.encode(value), b"\n"])


def emit_lines(lines: Iterable[bytes]) -> None:
    """Print many lines with one write; leave quietly when whoever reads them has left."""
    try:
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def fail(message: str, code: int = PROBLEM) -> NoReturn:
    """Say what is wrong and leave."""
    stderr.print(f"[bold red]penstock:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def rows_of(batch: Batch) -> Iterable[dict[str, Any]]:
    """Yield one JSON-ready dict a record: position, time, kind, what the format adds, and the payload last.

    >>> list(rows_of(Batch.of([b"hi"], kinds=[1], timestamps=[7])))
    [{'position': 0, 'timestamp_ns': 7, 'kind': 1, 'payload': 'hi'}]
    """
    for row in batch.to_pylist():
        payload = row.pop("payload")
        ready: dict[str, Any] = {}
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


def progress_bar(what: str, unit: str = "") -> Progress:
    """Return a progress bar on stderr; it shows only where there is a terminal, and leaves nothing behind."""
    return Progress(
        SpinnerColumn(),
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
