"""``penstock bench``: what this machine and this disk do, in a few seconds."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import emit_json, progress_bar, stdout
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from penstock.log.xchannel import Reader

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: penstock bench . --size 256 --json")(bench)


def bench(
    folder: Annotated[str, typer.Argument(help="A folder on the disk to try.", metavar="FOLDER")] = ".",
    size: Annotated[int, typer.Option(min=0, max=1 << 16, help="Bytes in a payload.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long each line runs.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure appending and reading on a disk, and tidy up after it."""
    from rich.table import Table

    from penstock.log.xchannel import Writer

    if not os.path.isdir(folder):
        raise OptionsError(f"{folder}: not a folder")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as room, progress_bar("measuring") as bar:
        path = os.path.join(room, "channel")
        payload, many = bytes(size), [bytes(size)] * 10_000
        rates: dict[str, float] = {}
        task = bar.add_task("", total=4)
        with Writer.open(path, roll_bytes=64 << 20, keep_files=2) as writer:
            rates["append"] = _rate(seconds, 1000, lambda: [writer.append(payload) for _ in range(1000)])
            bar.advance(task)
            rates["append_many"] = _rate(seconds, 10_000, lambda: writer.append_many(many))
            bar.advance(task)
        rates["read_batch"] = _reading(path, seconds, lambda reader: len(reader.read_batch()))
        bar.advance(task)
        rates["try_read"] = _reading(path, seconds, lambda reader: 0 if reader.try_read() is None else 1)
        bar.advance(task)
    if json:
        emit_json({"folder": folder, "size": size, "records_per_second": rates})
        return
    table = Table(title=f"{size}-byte payloads in {folder}")
    table.add_column("call")
    table.add_column("records/s", justify="right")
    table.add_column("MB/s", justify="right")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}", f"{rate * size / 1e6:,.0f}")
    stdout.print(table)


def _rate(seconds: float, records: int, work: Callable[[], object]) -> float:
    turns, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds:
        work()
        turns += 1
    return turns * records / took


def _reading(path: str, seconds: float, take: Callable[[Reader], int]) -> float:
    """Read the channel over and over, opening it anew at its end."""
    from penstock.log.xchannel import Reader

    records, begin = 0, time.perf_counter()
    while True:
        with Reader.open(path) as reader:
            while count := take(reader):
                records += count
                if (took := time.perf_counter() - begin) >= seconds:
                    return records / took
