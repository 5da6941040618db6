"""What commands that run on Spark share: starting and ending it, showing how far it is, and printing what it found."""

from __future__ import annotations

import contextlib
import datetime as dt
import glob
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Self

import msgspec
import typer

from penstock.cli.output import counted, emit_json, progress_bar, stderr, stdout
from penstock.errors import NotFoundError, OptionsError, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.pipelines.run import Progress, Summary
    from penstock.spark.progress import Tasks

__all__ = ["Cores", "Master", "Memory", "named", "on_spark", "print_rows", "say"]

Cores = Annotated[int | None, typer.Option(min=1, help="Cores to use. [default: all]")]
Master = Annotated[
    str | None, typer.Option(help="local[N], spark://host:port or sc://host:port. [default: all cores here]")
]
Memory = Annotated[str, typer.Option(help="Memory of the driver.")]

TERMINATED: Final = 128 + signal.SIGTERM
ENDED: Final = "ended by SIGTERM; what was done is done, and the next run goes on"
END_SECONDS: Final = 20
"""How long Java may take to end when it is told to."""
NOISE: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers of PySpark that print an error as JSON before it is raised."""


def named(path: str | None) -> str | None:
    """Refuse an empty path: it would be the folder the command runs in, or the root.

    >>> named("lake/raw")
    'lake/raw'
    """
    if path is not None and not path.strip():
        raise typer.BadParameter("it is empty")
    return path


@contextlib.contextmanager
def on_spark(
    what: str,
    master: str | None,
    cores: int | None,
    memory: str,
    config: Mapping[str, Any] | None = None,
    *,
    reads: Sequence[str] = (),
    ui: bool = False,
) -> Iterator[tuple[SparkSession, Callable[[Progress], None]]]:
    """Start Spark, or take the session there is; show the tasks it does, and positions once a stream tells them.

    However the block ends, by an error, Ctrl-C or SIGTERM too, the Java that was started for it has ended after it.
    ``reads`` are paths that must be there: that they are not is said at once, and not when Spark has started.  With
    ``ui`` it is said where Spark's own pages are.
    """
    from penstock.spark.pipelines.run import error_of
    from penstock.spark.session import require_pyspark, start
    from penstock.spark.source.options import is_remote, local_path

    if master is not None and cores is not None:
        raise OptionsError("--cores is for this machine: give it or --master, not both")
    if not (master or "").startswith("sc://"):  # whose paths are those of another machine
        for path in reads:
            if is_remote(path):
                continue  # it is looked at when it is read
            place = local_path(path)  # which may be a pattern; and a channel may have lost its first file
            if not (os.path.exists(place) or glob.glob(glob.escape(place) + "*") or glob.glob(place)):
                raise NotFoundError(f"{path}: there is nothing here")
    require_pyspark()
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark import SparkContext
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger

    for name in NOISE:
        PySparkLogger.getLogger(name).disabled = True
    before, started = _children(), set[int]()
    with Interrupt() as interrupt:
        try:
            with progress_bar("starting Spark") as bar:
                bar.add_task("", total=None)
                try:
                    spark, own = start(
                        master=f"local[{cores}]" if cores else master, memory=memory, config=config, ui=ui
                    )
                finally:
                    started = _children() - before
            if ui and hasattr(spark, "sparkContext"):
                stderr.print(f"Spark's pages: {spark.sparkContext.uiWebUrl}", soft_wrap=True)
            interrupt.take()  # PySpark has taken Ctrl-C for itself, and talks to Java in the middle of it
            try:
                with _bar(spark, what) as shown:
                    yield spark, shown
            finally:
                interrupt.settle()
                if own:
                    spark.stop()
        except (PySparkException, Py4JError) as exc:
            raise error_of(str(exc)) from None
        finally:
            interrupt.settle()
            if started:
                _end(started)
                SparkContext._gateway = SparkContext._jvm = None  # whoever starts Spark again starts a Java again


class Interrupt:
    """Lets Ctrl-C and SIGTERM end a block as errors do: what was begun is ended, and of SIGTERM one line is said.

    py4j turns what is raised in the middle of it into an error of its own, or drops it, and what is raised in a
    callback of Python, as at a fork, is only printed.  So it is raised again every second until the block has begun to
    end, and whatever comes out of the block then is what was raised first.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._before: dict[int, Any] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._pass
            self.take()
        return self

    def take(self) -> None:
        """Take the signals, from whoever has taken them meanwhile."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else self._leave)

    def settle(self) -> None:
        """Raise it no more: the block is ending."""
        if self._error is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def __exit__(self, *_: object) -> None:
        self.settle()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            sys.unraisablehook = self._unraisable
        if self._error is not None:
            if isinstance(self._error, SystemExit):
                stderr.print(ENDED, soft_wrap=True)
            raise self._error from None

    def _pass(self, unraisable: sys.UnraisableHookArgs) -> None:
        if self._error is None or unraisable.exc_value is not self._error:
            self._unraisable(unraisable)

    def _leave(self, number: int, _: object) -> NoReturn:
        logging.disable()  # py4j would tell where it was interrupted, and PySpark that it was
        warnings.simplefilter("ignore")
        if number != signal.SIGALRM:
            self._error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(TERMINATED)
            self._before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, self._leave))
        assert self._error is not None
        signal.setitimer(signal.ITIMER_REAL, 1)
        raise self._error


def _children() -> set[int]:
    """Return the processes that this one has started and that still run, where the system tells."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
    return found


def _end(processes: set[int]) -> None:
    """End processes of ours and wait until they have; one that does not listen is killed."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while os.waitpid(process, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(process, signal.SIGKILL)
                time.sleep(0.02)


@contextlib.contextmanager
def _bar(spark: SparkSession, what: str) -> Iterator[Callable[[Progress], None]]:
    from penstock.spark.progress import watch_tasks

    with progress_bar(what) as bar:
        task = bar.add_task("", total=None)
        passed = 0

        def tasks(found: Tasks) -> None:
            if not passed:
                bar.update(task, completed=found.done, total=found.total)

        def positions(progress: Progress) -> None:
            nonlocal passed
            bar.update(task, completed=passed + progress.done, total=passed + progress.total)
            passed += progress.done

        if bar.disable:  # nobody looks: Spark is not asked
            yield positions
            return
        with watch_tasks(spark, tasks):
            yield positions


def say(summary: Summary, json: bool, sentence: str) -> None:
    """Say what a query has done."""
    if json:
        emit_json(msgspec.structs.asdict(summary))
        return
    bad = f", {counted(summary.bad, 'bad payload')} in the table of errors" if summary.bad else ""
    lost = f", {counted(summary.lost, 'record')} lost" if summary.lost else ""
    lost += f", at most {counted(summary.lost_bytes, 'byte')} of logs lost" if summary.lost_bytes else ""
    late = f", {counted(summary.late, 'group')} of records too late for their window" if summary.late else ""
    took = f"{counted(summary.batches, 'batch', 'batches')}, {summary.seconds:.1f} s"
    stderr.print(f"{sentence} in {took}{bad}{lost}{late}", soft_wrap=True)


def print_rows(found: DataFrame | Sequence[Mapping[str, Any]], *, json: bool, **more: Any) -> list[dict[str, Any]]:
    """Print a small DataFrame or rows, a JSON object a line or a table, and return the rows; ``more`` is for JSON."""
    if hasattr(found, "toArrow"):
        table = found.toArrow()  # not collect(): that gives times of the machine's zone without saying so
        names, lists = table.column_names, [column.to_pylist(maps_as_pydicts="lossy") for column in table.columns]
        values = list(zip(*lists, strict=True))
    else:
        names, values = list(found[0]) if found else [], [tuple(row.values()) for row in found]
    rows = [dict(zip(names, row, strict=True)) for row in values]
    if json:
        if len(set(names)) < len(names):
            raise PenstockError("two columns have one name, which JSON cannot say: rename one")
        for row in rows:
            emit_json({**more, **_plain(row)})
    elif names:
        _print_table(names, values)
    return rows


def _print_table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*("-" if value is None else str(_plain(value)) for value in row))
    stdout.print(table)


def _plain(value: Any) -> Any:
    r"""Return a value as it is printed: times in UTC, bytes as text, or as base 64 under a name that says so.

    >>> _plain({"key": b"pump", "raw": b"\xff", "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)})
    {'key': 'pump', 'raw_base64': '/w==', 'at': '2026-01-01T00:00:00.000000Z'}
    """
    from penstock.batch import payload_text

    if isinstance(value, dict):
        plain = {}
        for name, item in value.items():
            coded = isinstance(item, bytes) and payload_text(item)[0] != "payload"
            plain[f"{name}_base64" if coded else name] = _plain(item)
        return plain
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return payload_text(value)[1]
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            return value.isoformat(timespec="microseconds")
        return value.astimezone(dt.UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return value
