"""What ``penstock demo`` runs: a million readings from channels to a report, Spark killed on the way, each count exact.

Four processes write readings.  A Spark driver streams them into the lake; in the middle of that it is killed with
SIGKILL, JVM and all, and started again.  Then it folds, aggregates and reports.  At the end each count is held
against what the writers remember, and the exit code says whether they agree.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.demo_readings import SITES, load_written, share, write_readings
from penstock.cli.output import emit_json, fail, stderr, stdout
from penstock.errors import PenstockError
from penstock.log import open_log
from penstock.log.xchannel import Reader, Writer

__all__ = ["show_readings"]

PACE: Final = 28_000
"""Readings a second that all writers together aim at, so that there is a stream to watch."""

KILL_AT: Final = 0.35
"""Which part of the readings is in the lake when the driver is killed."""

DEADLINE_SECONDS: Final = 1800
SPEAKERS: Final = (*SITES, "spark")


def show_readings(readings: int, out: str, *, keep: bool, json: bool) -> None:
    """Run it and say whether every seam is exact."""
    _require_spark()
    report = Path(out).resolve() / "report.html"
    report.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="penstock-demo-")
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended then too
    try:
        show = Demo(folder, readings, str(report))
        show.run()
        seams = show.seams()
        if keep:
            for part in ("channels", "lake", "fold"):
                shutil.rmtree(report.parent / part, ignore_errors=True)
                shutil.move(os.path.join(folder, part), report.parent / part)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _summary(show, seams, report, time.monotonic() - begin, json=json)


class Demo:
    """The processes of one run, and what they have said so far."""

    def __init__(self, folder: str, readings: int, report: str) -> None:
        self.folder, self.readings, self.report = folder, readings, report
        self.written = dict.fromkeys(SITES, 0)
        self.spark: dict[str, Any] = {"step": "starting Spark", "lake": 0, "pid": 0, "done": False}
        self.killed_at: int | None = None
        """Rows in the lake when the driver was killed."""
        self.resumed_at: int | None = None
        """Rows the next driver found there."""
        self._driver: subprocess.Popen[bytes] | None = None
        self._begun = time.monotonic()

    def run(self) -> None:
        """Do all of it; leave no process behind, whatever happens."""
        os.mkdir(f"{self.folder}/voices")
        os.mkdir(f"{self.folder}/channels")
        os.mkdir(f"{self.folder}/scratch")
        for name in SPEAKERS:
            Writer.precreate(f"{self.folder}/voices/{name}")
        spawn = multiprocessing.get_context("spawn")
        pace = max(5.0, self.readings / PACE)
        writers = [
            spawn.Process(target=write_readings, args=(self.folder, site, count, pace))
            for site, count in share(self.readings).items()
        ]
        try:
            for writer in writers:
                writer.start()
            self._start_driver()
            with contextlib.ExitStack() as stack:
                voices = {name: stack.enter_context(Reader.open(f"{self.folder}/voices/{name}")) for name in SPEAKERS}
                board = stack.enter_context(Board(self.readings))
                while not self.spark["done"]:
                    self._listen(voices)
                    self._watch(writers, board)
                    board.show(self)
                    time.sleep(0.1)
            for writer in writers:
                writer.join()
            assert self._driver is not None
            self._driver.wait(60)
        finally:
            for writer in writers:
                if writer.is_alive():
                    writer.terminate()
            self._kill_driver()

    def _listen(self, voices: dict[str, Reader]) -> None:
        for name, voice in voices.items():
            for record in voice.read_batch():
                if name == "spark":
                    self.spark = msgspec.json.decode(record.payload)
                else:
                    self.written[name] = int(bytes(record.payload))

    def _watch(self, writers: list[SpawnProcess], board: Board) -> None:
        """Kill the driver when its moment has come; start it again whenever it is not there."""
        if any(writer.exitcode for writer in writers):
            fail("a writer did not finish")
        if not os.path.exists(f"{self.folder}/all-written") and len(load_written(self.folder)) == len(SITES):
            Path(self.folder, "all-written").touch()
        if self.killed_at is None and self.spark["lake"] >= self.readings * KILL_AT:
            self._kill_driver()
            self.killed_at = self.spark["lake"]
            board.say(f"kill -9: the driver and its JVM are gone, with {self.killed_at:,} records in the lake")
            self.spark["step"] = "starting Spark again"
            self._start_driver()
        assert self._driver is not None
        ended = self._driver.poll()
        if (ended is not None and not self.spark["done"]) or time.monotonic() - self._begun > DEADLINE_SECONDS:
            raise PenstockError(f"the Spark driver ended or hangs:\n{self._last_words()}")
        if self.killed_at is not None and self.resumed_at is None and self.spark["pid"] == self._driver.pid:
            self.resumed_at = self.spark["lake"]
            board.say(f"it is back, and finds {self.resumed_at:,} records in the lake")

    def _start_driver(self) -> None:
        with open(f"{self.folder}/driver.log", "ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.demo_spark", self.folder, str(self.readings), self.report],
                env={
                    **os.environ,
                    "TMPDIR": f"{self.folder}/scratch",
                },  # what a killed driver leaves goes with the folder
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _kill_driver(self) -> None:
        """End the driver and its JVM at once: nothing of them gets to run another line."""
        if self._driver is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._driver.pid, signal.SIGKILL)
            self._driver.wait(30)

    def _last_words(self) -> str:
        with open(f"{self.folder}/driver.log", encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-15:]).strip()

    def seams(self) -> list[tuple[str, Any, Any]]:
        """Return every count with what it must be."""
        truth = load_written(self.folder)
        readings, records = sum(item.readings for item in truth), sum(item.records for item in truth)
        in_channels = problems = 0
        for site in SITES:
            with open_log(f"{self.folder}/channels/{site}") as log:
                in_channels += sum(len(batch) for batch in _batches(log))
                problems += len(list(log.verify()))
        latest = {device: value for item in truth for device, value in item.latest.items()}
        folded = folded_devices(self.folder)
        found = self.spark
        return [
            ("readings written by four processes", self.readings, readings),
            ("records in the channels", records, in_channels),
            ("problems found in the channels", 0, problems),
            ("records in the lake", records, found["lake"]),
            ("different records in the lake", records, found["distinct"]),
            ("payloads that did not decode", 0, found["bad"]),
            ("records that went into the fold", records, found["folded"]),
            ("devices in the fold", len(latest), found["devices"]),
            ("devices folded to the last value sent", len(latest), _agreeing(latest, folded)),
            ("readings in the aggregate", readings, found["counted"]),
            ("sum of all temperatures, °C", _degrees(truth), f"{found['hundredths'] / 100:,.2f}"),
            ("audit, lake against channels", "ok", "ok" if found["audited"] else "NOT ok"),
        ]


class Board:
    """Bars where there is a terminal, a line now and then where there is none."""

    def __init__(self, readings: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
            disable=not stderr.is_terminal,
        )
        self._written = self._bars.add_task("readings written", total=readings)
        self._lake = self._bars.add_task("records in the lake", total=readings)
        self._step = self._bars.add_task("Spark: starting", total=None)
        self._said = ""
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def show(self, demo: Demo) -> None:
        """Draw where things stand."""
        written, kept, step = sum(demo.written.values()), demo.spark["lake"], demo.spark["step"]
        self._bars.update(self._written, completed=written)
        self._bars.update(self._lake, completed=kept, total=max(demo.readings, kept))
        self._bars.update(self._step, description=f"Spark: {step}")
        if not stderr.is_terminal and step != self._said:
            self._said = step
            self.say(f"{written:,} readings written, {kept:,} records in the lake; Spark: {step}")

    def say(self, sentence: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(f"{time.monotonic() - self._begun:5.0f} s  {sentence}", soft_wrap=True)


def folded_devices(folder: str) -> dict[str, str]:
    """Return the fold's entries: device to newest payload."""
    from penstock.store import open_store

    found: dict[str, str] = {}
    for site in SITES:
        with open_store(f"{folder}/fold/{site}.snap") as store:
            found.update((entry.key, entry.value.decode()) for entry in store.range())
    return found


def _batches(log: Any) -> Iterator[Any]:
    at = log.first_position
    while len(batch := log.read(at)):
        yield batch
        at = batch.next_position


def _agreeing(latest: dict[str, str], folded: dict[str, str]) -> int:
    return sum(folded.get(device) == payload for device, payload in latest.items())


def _degrees(truth: list[Any]) -> str:
    return f"{sum(item.hundredths for item in truth) / 100:,.2f}"


def _summary(demo: Demo, seams: list[tuple[str, Any, Any]], report: Path, seconds: float, *, json: bool) -> None:
    """Say whether every seam is exact; exit code 1 if one is not."""
    exact = all(expected == found for _, expected, found in seams)
    killed = {"killed_at": demo.killed_at, "resumed_at": demo.resumed_at}
    if json:
        counts = {name: {"expected": expected, "found": found} for name, expected, found in seams}
        emit_json({"exact": exact, **killed, "seams": counts, "seconds": seconds, "report": report.as_uri()})
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for column in ("expected", "found", ""):
            table.add_column(column, justify="right")
        for name, expected, found in seams:
            mark = Text("exact", "green") if expected == found else Text("NOT EXACT", "red")
            table.add_row(name, _shown(expected), _shown(found), mark)
        stdout.print(table)
        stdout.print(
            f"\nSpark was killed with {_shown(demo.killed_at)} records in the lake and found {_shown(demo.resumed_at)} "
            f"there when it came back. {seconds:.0f} s in all.",
            soft_wrap=True,
        )
        stdout.print(f"Report: {report.as_uri()}", soft_wrap=True)
    if not exact or demo.killed_at is None:
        raise typer.Exit(1)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _require_spark() -> None:
    """Say at once what is missing, rather than after the writers have begun."""
    from penstock.spark.session import find_java, require_pyspark

    require_pyspark()
    find_java()
