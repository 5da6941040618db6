"""What commands that run on Spark share: starting it, showing how far it is, and printing what it found."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cli.output import emit_json, progress_bar, stderr, stdout
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.pipelines.run import Progress, Summary
    from penstock.spark.progress import Tasks

__all__ = ["Cores", "Master", "Memory", "on_spark", "print_rows", "say"]

Cores = Annotated[int | None, typer.Option(min=1, help="Cores to use. [default: all]")]
Master = Annotated[
    str | None, typer.Option(help="local[N], spark://host:port or sc://host:port. [default: all cores here]")
]
Memory = Annotated[str, typer.Option(help="Memory of the driver.")]


@contextlib.contextmanager
def on_spark(
    what: str,
    master: str | None,
    cores: int | None,
    memory: str,
    config: Mapping[str, Any] | None = None,
) -> Iterator[tuple[SparkSession, Callable[[Progress], None]]]:
    """Start Spark, or take the session there is; show the tasks it does, and positions once a stream tells them."""
    from penstock.spark.pipelines.run import error_of
    from penstock.spark.session import start

    if master is not None and cores is not None:
        raise OptionsError("--cores is for this machine: give it or --master, not both")
    with progress_bar("starting Spark") as bar:
        bar.add_task("", total=None)
        spark, own = start(master=f"local[{cores}]" if cores else master, memory=memory, config=config)
    from pyspark.errors import PySparkException

    try:
        with _bar(spark, what) as shown:
            yield spark, shown
    except PySparkException as exc:
        raise error_of(str(exc)) from None
    finally:
        if own:
            spark.stop()


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
    lost = f", {summary.lost} positions lost to retention" if summary.lost else ""
    late = f", {summary.late} groups of records too late for their window" if summary.late else ""
    stderr.print(f"{sentence} in {summary.batches} batches, {summary.seconds:.1f} s{lost}{late}", soft_wrap=True)


def print_rows(found: DataFrame | list[dict[str, Any]], *, json: bool, **more: Any) -> list[dict[str, Any]]:
    """Print a small DataFrame or rows, a JSON object a line or a table, and return the rows; ``more`` is for JSON."""
    rows = found if isinstance(found, list) else [row.asDict(recursive=True) for row in found.collect()]
    if json:
        for row in rows:
            emit_json({**more, **{name: _plain(value) for name, value in row.items()}})
        return rows
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0] if isinstance(found, list) and rows else () if isinstance(found, list) else found.columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*("-" if value is None else str(_plain(value)) for value in row.values()))
    stdout.print(table)
    return rows


def _plain(value: Any) -> Any:
    return value.isoformat(timespec="microseconds") if isinstance(value, dt.datetime) else value
