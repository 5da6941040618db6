"""What ``penstock demo`` runs: a node from a configuration, everything that talks to it, and counts that are exact.

50 devices publish over MQTT, a lab hands its readings to ingest, a mill writes a channel of its own; a Spark driver
streams all of it into the lake; segments are shipped to an S3 server on this machine.  The node is killed once, and so
is the driver, JVM and all, both with SIGKILL in the middle of it.  Then Spark folds, aggregates and reports; what it
found comes back as retained messages and entries of a bucket; a second node begins with an artifact of the first.  At
the end each count is held against what the devices remember, and the ledger must add up: the exit code says so.
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

from penstock.cli.demo_node import (
    DemoNode,
    DemoStore,
    Subscriber,
    edge_config,
    require_tools,
    second_config,
    wait_until,
)
from penstock.cli.demo_readings import (
    DEVICES,
    LIMIT,
    PLACES,
    SITES,
    hand_over_readings,
    load_written,
    share,
    write_mill,
    write_readings,
)
from penstock.cli.output import emit_json, fail, stderr, stdout
from penstock.errors import PenstockError
from penstock.log import open_log
from penstock.log.envelope import open_envelopes
from penstock.log.xchannel import Reader, Writer

__all__ = ["show_readings"]

PACE: Final = 6_000
"""Readings a second that all devices together aim at, so that there is a stream to watch."""

KILL_NODE_AT: Final = 0.2
"""Which part of the readings is acknowledged when the node is killed."""

KILL_AT: Final = 0.35
"""Which part of the readings is in the lake when the driver is killed."""

DEADLINE_SECONDS: Final = 1800
SPEAKERS: Final = (*PLACES, "spark")
KEPT: Final = ("node", "lake", "fold")
"""What ``--keep`` leaves behind."""


def show_readings(readings: int, out: str, *, keep: bool, serve: bool, json: bool) -> None:
    """Run it and say whether every seam is exact."""
    _require_spark()
    report = Path(out).resolve() / "report.html"
    report.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="penstock-demo-")
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended then too
    try:
        with Demo(folder, readings, str(report)) as show:
            show.run()
            exact = _summary(show, report, time.monotonic() - begin, json=json, serve=serve)
            if serve:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
            exact &= show.end()
        if keep:
            for part in KEPT:
                shutil.rmtree(report.parent / part, ignore_errors=True)
                shutil.move(os.path.join(folder, part), report.parent / part)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not exact:
        raise typer.Exit(1)


class Demo:
    """The processes of one run, and what they have said so far; leaving it leaves no process behind."""

    def __init__(self, folder: str, readings: int, report: str) -> None:
        self.folder, self.readings, self.report = folder, readings, report
        self.data = f"{folder}/node"
        self.written = dict.fromkeys(PLACES, 0)
        self.spark: dict[str, Any] = {"step": "starting Spark", "lake": 0, "pid": 0, "done": False}
        self.killed_at: int | None = None
        """Rows in the lake when the driver was killed."""
        self.resumed_at: int | None = None
        """Rows the next driver found there."""
        self.node_killed_at: int | None = None
        """Readings that were acknowledged when the node was killed."""
        self.retained: dict[str, str] = {}
        """The alerts that somebody who came late got, by device."""
        self.waited: dict[str, str] = {}
        """The alerts that waited for somebody who was away."""
        self.entries: dict[str, str] = {}
        """The alerts in the bucket."""
        self.second: dict[str, Any] = {}
        """How the second node began, and what it has."""
        self.ledger: list[Any] = []
        self.twice = 0
        """Readings that are in the channels a second time."""
        self._driver: subprocess.Popen[bytes] | None = None
        self._writers: list[SpawnProcess] = []
        self._begun = time.monotonic()
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            store = DemoStore()
            self._ends.callback(store.stop)
            store.start()
            os.environ.update(store.environment)
            self.node = DemoNode(self.folder, "node", edge_config(self.folder, store.url))
            self.other = DemoNode(self.folder, "second", second_config(self.folder, store.url))
            for end in (self.other.kill, self.node.kill, self._kill_driver, self._end_writers):
                self._ends.callback(end)
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.close()

    def _end_writers(self) -> None:
        for writer in self._writers:
            if writer.is_alive():
                writer.kill()
            writer.join()

    # --- All of it

    def run(self) -> None:
        """Do all of it."""
        for name in ("voices", "scratch", "node", "node/logs"):
            os.mkdir(f"{self.folder}/{name}", 0o700)
        for name in SPEAKERS:
            Writer.precreate(f"{self.folder}/voices/{name}")
        with Board(self.readings) as board:
            self.node.start()
            board.say(f"penstock serve: {_places(self.node.listeners)}")
            night_shift = Subscriber("night-shift", keeps=True)
            night_shift.visit(self.node.port, 0)
            self._start_writers()
            self._start_driver()
            with contextlib.ExitStack() as stack:
                voices = {name: stack.enter_context(Reader.open(f"{self.folder}/voices/{name}")) for name in SPEAKERS}
                while not self.spark["done"]:
                    self._listen(voices)
                    self._watch(board)
                    board.show(self)
                    time.sleep(0.1)
            for writer in self._writers:
                writer.join()
            assert self._driver is not None
            self._driver.wait(60)
            board.step("alerts come back")
            warm = warm_devices(self.folder)
            self.waited = night_shift.visit(self.node.port, len(warm))
            self.retained = Subscriber("operator", keeps=False).visit(self.node.port, len(warm))
            wait_until(lambda: len(self._bucket()) >= len(warm))
            self.entries = self._bucket()
            board.step("the second node begins with an artifact")
            self._bootstrap_second(board)
            board.step("the ledger")
            wait_until(self._settled)

    def _start_writers(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        seconds = max(5.0, self.readings / PACE)
        for place, count in share(self.readings, tuple(PLACES)).items():
            if place in SITES:
                self._writers.append(
                    spawn.Process(target=write_readings, args=(self.folder, place, count, seconds, self.node.port))
                )
            else:
                target = hand_over_readings if place == "lab" else write_mill
                self._writers.append(spawn.Process(target=target, args=(self.folder, place, count, seconds)))
        for writer in self._writers:
            writer.start()

    def _listen(self, voices: dict[str, Reader]) -> None:
        for name, voice in voices.items():
            for record in voice.read_batch():
                if name == "spark":
                    self.spark = msgspec.json.decode(record.payload)
                else:
                    self.written[name] = int(bytes(record.payload))

    def _watch(self, board: Board) -> None:
        """Kill node and driver when their moments have come, and start them again."""
        if any(writer.exitcode for writer in self._writers):
            fail("the devices of a place did not finish")
        acknowledged = sum(self.written.values())
        begun = all(self.written[site] for site in SITES)  # so that every site lives through it
        if self.node_killed_at is None and begun and acknowledged >= self.readings * KILL_NODE_AT:
            self.node.kill()
            self.node_killed_at = acknowledged
            board.say(f"kill -9: the node is gone, with {acknowledged:,} readings acknowledged")
            self.node.start()
            board.say("it is back, under the same addresses")
        if not self.node.alive:
            raise PenstockError(f"the node ended:\n{self.node.last_words()}")
        if not os.path.exists(f"{self.folder}/all-written") and len(load_written(self.folder)) == len(PLACES):
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

    # --- Spark

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

    # --- What comes after

    def _bucket(self) -> dict[str, str]:
        """Return the entries of the bucket that mirrors the alerts."""
        import asyncio

        from penstock.kv import EmbeddedConnection

        async def read() -> dict[str, str]:
            async with EmbeddedConnection(f"{self.data}/buckets") as connection:
                bucket = await connection.store("alerts")
                return {entry.key: bytes(entry.value).decode() for entry in await bucket.reader.entries()}

        return asyncio.run(read())

    def _bootstrap_second(self, board: Board) -> None:
        """Start a second node when the artifact and the shipped log of the lab are complete; note what it has."""
        with open_log(f"{self.data}/logs/lab") as log:
            end = log.next_position
        wait_until(lambda: self.node.ask("/api/parts")["parts"]["export:lab"]["cursor"] == end)
        wait_until(lambda: (self._seam("ship:lab") or {}).get("waiting") == 0)
        self.other.start()
        part: dict[str, Any] = {}

        def folded() -> bool:
            part.update(self.other.ask("/api/parts")["parts"]["fold:lab"])
            return bool(part["state"] == "ready" and part["lag"] == 0)

        wait_until(folded)
        code = self.other.stop()
        digests = [self._digest(name) for name in ("node", "second")]
        self.second = {"way": part.get("bootstrap"), "same": digests[0] == digests[1], "exit": code}
        board.say(f"the second node began by way of the {part.get('bootstrap')}, {len(PLACES)} channels are shipped")

    def _digest(self, node: str) -> str:
        from penstock.store import open_store

        with open_store(f"{self.folder}/{node}/lab.snap") as store:
            return f"{store.cursor().token.as_int()} {store.digest()}"

    def _seam(self, name: str) -> dict[str, Any] | None:
        return next((one for one in self.node.ask("/api/ledger") if one["seam"] == name), None)

    def _settled(self) -> bool:
        """Whether nothing waits at any seam; keeps what was found."""
        from penstock.node.ledger import read_ledger

        self.ledger = read_ledger(self.data)
        return all(one.ok and not one.waiting for one in self.ledger)

    def end(self) -> bool:
        """Stop the node as systemd would; return whether it ended well and the ledger is as it was."""
        from penstock.node.ledger import read_ledger

        code = self.node.stop()
        if code:
            stderr.print(f"the node ended with exit code {code}:")
            for line in self.node.last_words().splitlines():
                stderr.print(line, soft_wrap=True)
        return not code and all(one.ok for one in read_ledger(self.data))

    # --- Counts

    def seams(self) -> list[tuple[str, Any, Any]]:
        """Return every count with what it must be."""
        truth = load_written(self.folder)
        readings = sum(item.readings for item in truth)
        records = different = problems = surplus = 0
        for item in truth:
            with open_log(f"{self.data}/logs/{item.site}") as log:
                numbers: list[Any] = []
                for batch in _batches(log):
                    numbers += [payload.partition(b",")[0] for payload in open_envelopes(batch).to_payloads()]
                records, different = records + len(numbers), different + len(set(numbers))
                surplus += 0 if item.site in SITES else len(numbers) - item.readings
                problems += len(list(log.verify()))
        self.twice = records - different
        warm = warm_devices(self.folder)
        latest = {device: value for item in truth for device, value in item.latest.items()}
        found = self.spark
        return [
            (f"readings acknowledged to {DEVICES} devices, lab and mill", self.readings, readings),
            ("different readings in the channels", readings, different),
            ("readings of lab and mill that came twice", 0, surplus),
            ("problems found in the channels", 0, problems),
            ("records in the lake", records, found["lake"]),
            ("different records in the lake", records, found["distinct"]),
            ("different readings in the lake", readings, found["readings"]),
            ("payloads that did not decode", 0, found["bad"]),
            ("records that went into Spark's fold", records, found["folded"]),
            ("devices in it", len(latest), found["devices"]),
            ("devices folded to the last value sent", len(latest), _agreeing(latest, self._spark_folds())),
            ("machines in the node's own folds", *self._own_folds(latest)),
            ("readings in the aggregate", readings, found["counted"]),
            ("sum of all temperatures, °C", _degrees(truth), f"{found['hundredths'] / 100:,.2f}"),
            ("audit, lake against channels", "ok", "ok" if found["audited"] else "NOT ok"),
            (f"devices above {LIMIT / 100:.0f} °C that Spark found", len(warm), found["alerts"]),
            ("alerts that came back, retained", len(warm), _agreeing(warm, self.retained)),
            ("alerts that waited for who was away", len(warm), _agreeing(warm, self.waited)),
            ("alerts in the bucket", len(warm), _agreeing(warm, self.entries)),
            ("alerts about others", 0, len({*self.retained, *self.waited, *self.entries} - warm.keys())),
            ("the second node began with", "artifact", self.second.get("way")),
            ("its fold, against the first node's", "the same", "the same" if self.second.get("same") else "different"),
            ("seams of the ledger that add up", len(self.ledger), sum(one.ok for one in self.ledger)),
            ("records that wait or are lost at a seam", 0, sum(_open_at(one) for one in self.ledger)),
        ]

    def _spark_folds(self) -> dict[str, str]:
        """Return the entries of Spark's folds: device to newest payload."""
        return {key: value for place in PLACES for key, value in _entries(f"{self.folder}/fold/{place}.snap")}

    def _own_folds(self, latest: dict[str, str]) -> tuple[int, int]:
        """Return how many machines lab and mill have, and how many of them the node folded to the last value."""
        wanted = {key: value for key, value in latest.items() if key.partition("/")[0] in ("lab", "mill")}
        found = {key: value for name in ("lab", "mill") for key, value in _entries(f"{self.data}/{name}.snap")}
        return len(wanted), _agreeing(wanted, found)


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
        self._written = self._bars.add_task("readings acknowledged", total=readings)
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
            self.say(f"{written:,} readings acknowledged, {kept:,} records in the lake; Spark: {step}")

    def step(self, what: str) -> None:
        """Say what is done now."""
        self._bars.update(self._step, description=what)
        if not stderr.is_terminal:
            self.say(what)

    def say(self, sentence: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(f"{time.monotonic() - self._begun:5.0f} s  {sentence}", soft_wrap=True)


def warm_devices(folder: str) -> dict[str, str]:
    """Return the devices that were above the limit and how warm, by what they remember themselves."""
    return {
        topic: f"{value / 100:.2f}"
        for item in load_written(folder)
        for topic, value in item.warmest.items()
        if value > LIMIT
    }


def _entries(store: str) -> Iterator[tuple[str, str]]:
    from penstock.store import open_store

    with open_store(store) as opened:
        yield from [(entry.key, entry.value.decode()) for entry in opened.range()]


def _batches(log: Any) -> Iterator[Any]:
    at = log.first_position
    while len(batch := log.read(at)):
        yield batch
        at = batch.next_position


def _agreeing(wanted: dict[str, str], found: dict[str, str]) -> int:
    return sum(found.get(device) == value for device, value in wanted.items())


def _degrees(truth: list[Any]) -> str:
    return f"{sum(item.hundredths for item in truth) / 100:,.2f}"


def _open_at(seam: Any) -> int:
    return int(seam.waiting + sum(seam.lost.values()))


def _places(listeners: dict[str, str]) -> str:
    return ", ".join(f"{name} on {address}" for name, address in listeners.items())


# --- The end


def _summary(demo: Demo, report: Path, seconds: float, *, json: bool, serve: bool) -> bool:
    """Say whether every seam is exact, and return it."""
    seams = demo.seams()
    exact = all(expected == found for _, expected, found in seams)
    killed = {"killed_at": demo.killed_at, "resumed_at": demo.resumed_at, "node_killed_at": demo.node_killed_at}
    if json:
        counts = {name: {"expected": expected, "found": found} for name, expected, found in seams}
        about = {"twice": demo.twice, "seconds": seconds, "report": report.as_uri(), "listeners": demo.node.listeners}
        emit_json({"exact": exact, **killed, "seams": counts, "ledger": demo.ledger, **about})
    else:
        stdout.print(_table(["", "expected", "found", ""], [_row(*seam) for seam in seams]))
        stdout.print()
        stdout.print("The ledger (penstock ledger), by channel: came = went + waiting + lost")
        stdout.print(_table(["seam", "came", "went", "waiting", "lost", ""], [_ledger_row(one) for one in demo.ledger]))
        stdout.print()
        stdout.print(
            f"The node was killed with {_shown(demo.node_killed_at)} readings acknowledged; of those under way "
            f"{_shown(demo.twice)} came twice (QoS 1). Spark was killed with {_shown(demo.killed_at)} records in the "
            f"lake and found {_shown(demo.resumed_at)} there when it came back. {seconds:.0f} s in all.",
            soft_wrap=True,
        )
        stdout.print(f"Report: {report.as_uri()}", soft_wrap=True)
        http = demo.node.listeners.get("http", "")
        stdout.print(f"Node:   {_places(demo.node.listeners)}", soft_wrap=True)
        if serve:
            stdout.print(
                f"It stays up until Ctrl-C: http://{http}/metrics, penstock top --http {http}, "
                f"penstock ledger {demo.data}",
                soft_wrap=True,
            )
    return exact and demo.killed_at is not None and demo.node_killed_at is not None


def _table(columns: list[str], rows: list[tuple[Any, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _row(name: str, expected: Any, found: Any) -> tuple[Any, ...]:
    mark = Text("exact", "green") if expected == found else Text("NOT EXACT", "red")
    return name, _shown(expected), _shown(found), mark


def _ledger_row(one: Any) -> tuple[Any, ...]:
    mark = Text("exact", "green") if one.ok else Text("does not add up", "red")
    return Text(one.seam), *map(_shown, (one.came, one.went, one.waiting, sum(one.lost.values()))), mark


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _require_spark() -> None:
    """Say at once what is missing, rather than after the writers have begun."""
    from penstock.spark.session import find_java, require_pyspark

    require_pyspark()
    find_java()
    require_tools()
