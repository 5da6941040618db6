"""``penstock pipeline run`` and ``prepare``: a user's function, or a pipeline of our own, on any Spark there is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cli.output import emit_json, progress_bar, stderr
from penstock.errors import OptionsError, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.pipelines.run import Progress
    from penstock.spark.progress import Tasks

__all__ = ["register"]

EXAMPLE = "penstock pipeline run mine:hottest data/channels --set limit=5 --master 'local[2]'"


def register(app: typer.Typer) -> None:
    """Add the commands to those of ``penstock pipeline``."""
    group = next(info.typer_instance for info in app.registered_groups if info.name == "pipeline")
    assert group is not None
    group.command(epilog=f"Example: {EXAMPLE}")(run)
    group.command(epilog="Example: penstock pipeline prepare")(prepare)


def prepare() -> None:
    """Make Spark start in half the time from now on: once for this Python environment, 190 MB inside it."""
    from penstock.spark.archive import make_archive
    from penstock.spark.session import require_pyspark

    require_pyspark()
    with progress_bar("running Spark once") as bar:
        bar.add_task("", total=None)
        path = make_archive()
    stderr.print(f"{os.path.getsize(path) / 1e6:.0f} MB in {path}", soft_wrap=True, highlight=False)


def run(
    function: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="module:function, or the name of a pipeline such as aggregate.")
    ],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Channels, or a table of the lake.")],
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="The table of the result; printed if there is none.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="local[N], spark://host:port or sc://host:port. [default: all cores here]")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the function.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="An option of the source.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="NAME=VALUE", help="A setting of Spark.")
    ] = None,
    py_files: Annotated[
        list[str] | None, typer.Option("--py-files", help="A Python file that the executors need too.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Read the source as a stream; run it again to go on.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="Where a stream keeps how far it has come. [default: TABLE/_checkpoint]")
    ] = None,
    every: Annotated[
        float | None, typer.Option(min=0.1, help="A stream goes on for ever, a batch every so many seconds.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory of the driver.")] = "2g",
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Run a function on DataFrames: yours as module:function, or one of penstock's pipelines, on any Spark."""
    from penstock.spark.pipelines.own import Job, find_function
    from penstock.spark.pipelines.own import run as run_function

    found = find_function(function)
    job = Job(
        source=source,
        table=table,
        checkpoint=checkpoint or (None if table is None else f"{table.rstrip('/')}/_checkpoint"),
        stream=stream,
        options=_pairs(options),
        trigger={"availableNow": True} if every is None else {"processingTime": f"{every} seconds"},
        settings=_pairs(settings),
    )
    with _session(master, memory, _pairs(config), py_files or []) as spark, _bar(spark) as on_progress:
        _show(run_function(spark, found, job, on_progress), json=json)


def _pairs(words: list[str] | None) -> dict[str, str]:
    pairs = {}
    for word in words or []:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise OptionsError(f"{word!r}: write it as name=value")
        pairs[name] = value
    return pairs


@contextlib.contextmanager
def _session(master: str | None, memory: str, config: dict[str, str], py_files: list[str]) -> Iterator[SparkSession]:
    from penstock.spark.pipelines.run import reason_of
    from penstock.spark.session import start

    with progress_bar(f"starting Spark on {master or 'this machine'}") as bar:
        bar.add_task("", total=None)
        spark, own = start("penstock", master=master, memory=memory, config=config)
    from pyspark.errors import PySparkException

    try:
        for file in py_files:
            if hasattr(spark, "_jsparkSession"):
                spark.sparkContext.addPyFile(os.path.abspath(file))
            else:
                spark.addArtifacts(os.path.abspath(file), pyfile=True)
        yield spark
    except PySparkException as exc:
        raise PenstockError(reason_of(str(exc))) from None
    finally:
        if own:
            spark.stop()


@contextlib.contextmanager
def _bar(spark: SparkSession) -> Iterator[Callable[[Progress], None]]:
    """Show positions of a stream once there are any, and until then the tasks that Spark has done."""
    from penstock.spark.progress import watch_tasks

    with progress_bar("running", "") as bar:
        task = bar.add_task("tasks", total=None)
        passed = 0

        def tasks(found: Tasks) -> None:
            if not passed:
                bar.update(task, completed=found.done, total=found.total)

        def positions(progress: Progress) -> None:
            nonlocal passed
            bar.update(task, completed=passed + progress.done, total=passed + progress.total)
            passed += progress.done

        with watch_tasks(spark, tasks):
            yield positions


def _show(result: Any, *, json: bool) -> None:
    """Print what a function gave: rows, an object, or nothing."""
    from penstock.cli.sparkwork import print_rows

    if hasattr(result, "collect"):
        print_rows(result, json=json)
    elif isinstance(result, msgspec.Struct):
        emit_json(msgspec.to_builtins(result))
    elif isinstance(result, dict) and not json and "table" in result:
        stderr.print(f"{result['rows']} rows in {result['table']}", soft_wrap=True, highlight=False)
    elif result is not None:
        emit_json(result)
