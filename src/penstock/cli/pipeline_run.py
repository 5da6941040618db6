"""``penstock pipeline run`` and ``prepare``: a user's function, or a pipeline of our own, on any Spark there is."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cli.output import counted, emit_json, progress_bar, stderr
from penstock.cli.sparksource import ChannelNames, Cursor, Option, Start, Ui, pairs, source_options
from penstock.cli.sparkwork import Master, Memory, named, on_spark, print_rows, say
from penstock.errors import OptionsError, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]

EXAMPLE = "penstock pipeline run mine:hottest data/channels --set limit=5 --master 'local[2]'"


def register(app: typer.Typer) -> None:
    """Add the commands to those of ``penstock pipeline``."""
    group = next(info.typer_instance for info in app.registered_groups if info.name == "pipeline")
    assert group is not None
    group.command(epilog=f"Example: {EXAMPLE}")(run)
    group.command(epilog="Example: penstock pipeline prepare")(prepare)


def prepare() -> None:
    """Make Spark start in half the time from now on.

    Once for this Python environment; it takes 190 MB inside it.
    """
    from penstock.spark.archive import make_archive
    from penstock.spark.session import require_pyspark

    require_pyspark()
    with progress_bar("running Spark once") as bar:
        bar.add_task("", total=None)
        path = make_archive()
    stderr.print(f"{os.path.getsize(path) / 1e6:.0f} MB in {path}", soft_wrap=True)


def run(
    function: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="module:function, or the name of a pipeline such as aggregate.")
    ],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Channels, or a table of the lake.", callback=named)],
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="The table of the result; printed if there is none.", callback=named),
    ] = None,
    master: Master = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the function.")
    ] = None,
    option: Option = None,
    start: Start = None,
    only: ChannelNames = None,
    cursor: Cursor = None,
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
        str | None,
        typer.Option(help="Where a stream keeps how far it has come. [default: TABLE/_checkpoint]", callback=named),
    ] = None,
    every: Annotated[
        float | None, typer.Option(min=0.1, help="A stream goes on for ever, a batch every so many seconds.")
    ] = None,
    ui: Ui = False,
    memory: Memory = "2g",
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Run a function on DataFrames, on any Spark.

    Yours as module:function, or one of penstock's pipelines.
    """
    from penstock.spark.pipelines.own import PipelineJob, find_function, run as run_function
    from penstock.spark.pipelines.run import checkpoint_of

    for file in py_files or []:
        if not os.path.exists(file):
            raise OptionsError(f"--py-files {file}: there is no such file")
    try:
        found = find_function(function)
    except ImportError as exc:
        raise PenstockError(f"{function}: {exc}") from exc
    if not stream:
        taken = inspect.signature(found).parameters
        given = (("--every", "trigger", every), ("--checkpoint", "checkpoint", checkpoint))
        for name, parameter, value in given:
            if value is not None and parameter not in taken:
                raise OptionsError(f"{name} is for a stream: give --stream with it")
    job = PipelineJob(
        source=source,
        table=table,
        checkpoint=checkpoint or (None if table is None else checkpoint_of(table)),
        stream=stream,
        options=source_options(option, start=start, channels=only, cursor=cursor),
        trigger={"availableNow": True} if every is None else {"processingTime": f"{every} seconds"},
        settings=pairs(settings),
    )
    with on_spark("running", master, None, memory, pairs(config), reads=[source], ui=ui) as (spark, shown):
        _send(spark, py_files or [])
        _show(run_function(spark, found, job, shown), table, json=json)


def _send(spark: SparkSession, files: list[str]) -> None:
    """Give Python files to the executors."""
    for file in files:
        if hasattr(spark, "_jsparkSession"):
            spark.sparkContext.addPyFile(os.path.abspath(file))
        else:  # Spark Connect
            spark.addArtifacts(os.path.abspath(file), pyfile=True)


def _show(result: Any, table: str | None, *, json: bool) -> None:
    """Print what a function gave: rows, what a query has done, an object, or nothing."""
    from penstock.spark.pipelines.run import Summary

    if hasattr(result, "collect"):
        print_rows(result, json=json)
    elif isinstance(result, Summary):
        say(result, json, f"{counted(result.rows - result.bad, 'record')} into {table}")
    elif isinstance(result, dict) and not json and "table" in result:
        stderr.print(f"{counted(result['rows'], 'row')} in {result['table']}", soft_wrap=True)
    elif result is not None:
        emit_json(msgspec.to_builtins(result))
