"""``penstock demo --ticks``: a writer and two readers in processes of their own, and a table of what they do.

The writer appends ticks to a channel.  One reader starts at the first tick, the other goes live a moment later.  Each
process reports through a small channel of its own, which this command tails.  The run is bounded, and at its end the
counts must agree to the record.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from typing import Any

import msgspec
import numpy as np
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.output import emit_json, fail, stdout
from penstock.log.options import Start
from penstock.log.xchannel import Reader, Writer, XChannelLog

__all__ = ["show_ticks"]

SYMBOLS = ("WEIR", "SLUICE", "FLUME", "INTAKE")
TICK = np.dtype([("number", "<u8"), ("symbol", "<u4"), ("size", "<u4"), ("price", "<f8"), ("check", "<u8")])
CHECK = np.uint64(0x9E3779B97F4A7C15)
BURST = 500
LAST = 1
"""The kind of the record that ends the run; every other tick has kind 0."""


class ProcessReport(msgspec.Struct):
    """What a process says of itself."""

    role: str
    records: int = 0
    first: int = -1
    last: int = -1
    broken: int = 0
    seconds: float = 0.0
    files: int = 0
    prices: dict[str, float] = {}
    done: bool = False


def show_ticks(seconds: float, rate: int, *, json: bool) -> None:
    """Run it and say whether every seam is exact."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        reports = _run(folder, seconds, rate, quiet=json)
        channel = XChannelLog(os.path.join(folder, "ticks"))
        problems = [str(problem) for problem in channel.verify()]
        size = channel.stat()["bytes"]
        channel.close()
    _summary(reports, problems, size, json=json)


def _run(folder: str, seconds: float, rate: int, *, quiet: bool) -> dict[str, ProcessReport]:
    """Start the three processes, show what they report, and return their last words."""
    spawn = multiprocessing.get_context("spawn")
    Writer.precreate(os.path.join(folder, "ticks"))
    roles = ("writer", "from start", "live")
    for role in roles:
        Writer.precreate(os.path.join(folder, role))
    processes = {
        "writer": spawn.Process(target=write_ticks, args=(folder, seconds, rate)),
        "from start": spawn.Process(target=read_ticks, args=(folder, "from start", "earliest")),
        "live": spawn.Process(target=read_ticks, args=(folder, "live", "latest")),
    }
    reports = {role: ProcessReport(role) for role in roles}
    tails = {role: Reader.open(os.path.join(folder, role)) for role in roles}
    processes["writer"].start()
    processes["from start"].start()
    late = time.monotonic() + 1.0
    deadline = time.monotonic() + seconds + 60
    with Live(_table(reports), console=stdout, refresh_per_second=8, transient=quiet) as live:
        while not all(report.done for report in reports.values()):
            if processes["live"].pid is None and time.monotonic() > late:
                processes["live"].start()
            for role, tail in tails.items():
                for record in tail.read_batch():
                    reports[role] = msgspec.json.decode(record.payload, type=ProcessReport)
            live.update(_table(reports))
            crashed = [role for role, process in processes.items() if process.exitcode]
            if crashed or time.monotonic() > deadline:
                for process in processes.values():
                    if process.pid is not None:
                        process.terminate()
                fail(f"the {crashed[0] if crashed else 'demo'} did not finish")
            time.sleep(0.1)
    for process in processes.values():
        process.join()
    return reports


def write_ticks(folder: str, seconds: float, rate: int) -> None:
    """Append bursts of ticks, reporting four times a second; the last record says that it is the last.

    It comes when the time is over and the live reader has joined, which on a busy machine may be later.
    """
    rng = np.random.default_rng(7)
    prices = np.array([100.0, 250.0, 40.0, 12.0])
    report = ProcessReport("writer", first=0)
    ticks = np.zeros(BURST, TICK)
    with (
        Writer.open(os.path.join(folder, "ticks"), roll_bytes=32 << 20) as channel,
        Writer.open(os.path.join(folder, "writer")) as voice,
        Reader.open(os.path.join(folder, "live")) as live,
    ):
        begin = said = time.monotonic()
        joined = False
        while (now := time.monotonic()) < begin + seconds or not joined:
            joined = joined or len(live.read_batch()) > 0
            if report.records > (now - begin) * rate:
                time.sleep(0.0005)
                continue
            symbols = rng.integers(0, len(SYMBOLS), BURST)
            prices *= 1 + rng.normal(0, 1e-4, len(SYMBOLS))
            ticks["number"] = np.arange(report.records, report.records + BURST)
            ticks["symbol"], ticks["price"] = symbols, prices[symbols]
            ticks["size"] = rng.integers(1, 500, BURST)
            ticks["check"] = ticks["number"] * CHECK
            raw = ticks.tobytes()
            width = TICK.itemsize
            channel.append_many([raw[at : at + width] for at in range(0, len(raw), width)])
            report.records += BURST
            if now - said > 0.25:
                said = now
                _say(voice, report, begin, channel.file_sequence + 1)
                if _alone():
                    return
        channel.append(b"", kind=LAST)
        report.last, report.done = report.records - 1, True
        _say(voice, report, begin, channel.file_sequence + 1)


def read_ticks(folder: str, role: str, start: Start) -> None:
    """Read ticks in batches, check each, and keep the newest price of every symbol."""
    report = ProcessReport(role)
    with (
        Reader.open(os.path.join(folder, "ticks"), start) as channel,
        Writer.open(os.path.join(folder, role)) as voice,
    ):
        begin = said = time.monotonic()
        _say(voice, report, begin, channel.file_sequence + 1)
        while not report.done:
            batch = channel.read_batch(20_000)
            if not len(batch):
                if not channel.wait(0.05) and _alone():
                    return
                continue
            assert batch.kinds is not None
            report.done = bool(batch.kinds[-1] == LAST)
            ticks = np.frombuffer(b"".join(batch.to_payloads()), TICK)
            if len(ticks):
                _check(report, ticks)
            if report.done or time.monotonic() - said > 0.25:
                said = time.monotonic()
                _say(voice, report, begin, channel.file_sequence + 1)


def _alone() -> bool:
    """Whether the command that started this process was killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _check(report: ProcessReport, ticks: np.ndarray[Any, Any]) -> None:
    """Count ticks that are out of order, missing or torn, and note the newest prices."""
    numbers = ticks["number"]
    if report.first < 0:
        report.first = int(numbers[0])
        report.last = report.first - 1
    expected = np.arange(report.last + 1, report.last + 1 + len(ticks), dtype=np.uint64)
    report.broken += int((numbers != expected).sum() + (ticks["check"] != numbers * CHECK).sum())
    report.records += len(ticks)
    report.last = int(numbers[-1])
    for index, symbol in enumerate(SYMBOLS):
        own = np.flatnonzero(ticks["symbol"] == index)
        if len(own):
            report.prices[symbol] = round(float(ticks["price"][own[-1]]), 4)


def _say(voice: Writer, report: ProcessReport, begin: float, files: int) -> None:
    report.seconds, report.files = time.monotonic() - begin, files
    voice.append(msgspec.json.encode(report))


def _table(reports: dict[str, ProcessReport]) -> Table:
    table = Table(title="one writer, two readers, one channel", title_style="bold", box=None, pad_edge=False)
    for column in ("process", "ticks", "ticks/s", "file", "bad", *SYMBOLS):
        table.add_column(column, justify="left" if column == "process" else "right", no_wrap=True)
    for report in reports.values():
        speed = f"{report.records / report.seconds:,.0f}" if report.seconds else ""
        prices = [f"{report.prices[symbol]:.2f}" if symbol in report.prices else "" for symbol in SYMBOLS]
        broken = "" if report.role == "writer" else str(report.broken)
        table.add_row(report.role, f"{report.records:,}", speed, str(report.files), broken, *prices)
    return table


def _summary(reports: dict[str, ProcessReport], problems: list[str], size: int, *, json: bool) -> None:
    """Say whether every seam is exact; exit code 1 if one is not."""
    writer, first, live = reports.values()
    exact = {
        "the reader from the start saw every tick": first.records == writer.records and first.first == 0,
        "the live reader saw every tick since it joined": live.records == writer.records - live.first,
        "no tick was torn, lost or out of order": first.broken == live.broken == 0,
        "verify finds no problem": not problems,
    }
    if json:
        emit_json({"exact": exact, "bytes": size, "reports": list(reports.values())})
    else:
        stdout.print()
        for claim, holds in exact.items():
            stdout.print(Text("  yes" if holds else "  NO ", "green" if holds else "red"), "", claim)
        stdout.print()
        stdout.print(
            f"{writer.records:,} ticks in {writer.files} files, {size / 1e6:.0f} MB; "
            f"the live reader joined at tick {live.first:,}.",
        )
    if not all(exact.values()):
        raise typer.Exit(1)
