"""Commands that run on Spark: ``penstock pipeline ingest | decode | aggregate | audit | replay | compact | report``."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from penstock.cli.output import PROBLEM, emit_json, progress_bar, stderr, stdout
from penstock.errors import OptionsError, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.pipelines.run import Progress, Summary

__all__ = ["register"]

Channels = Annotated[str, typer.Argument(metavar="CHANNELS", help="A channel, or a folder of channels.")]
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Channels, or a table of the lake.")]
TableFolder = Annotated[str, typer.Argument(metavar="TABLE", help="The folder of a table of the lake.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="Where Spark keeps how far it has come. [default: TABLE/_checkpoint]")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Cores = Annotated[int | None, typer.Option(min=1, help="Cores to use. [default: all]")]
Memory = Annotated[str, typer.Option(help="Memory of the driver.")]
MaxRecords = Annotated[int | None, typer.Option(min=1, help="Records in a batch.")]
Every = Annotated[float | None, typer.Option(min=0.1, help="Go on for ever, a batch every so many seconds.")]
Loss = Annotated[bool, typer.Option("--allow-data-loss", help="Go on, and count, where retention was faster.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(no_args_is_help=True, help="Carry channels through Spark: into the lake, decoded, counted.")
    for command, example in (
        (ingest, "penstock pipeline ingest data/channels lake/raw"),
        (decode, "penstock pipeline decode data/channels lake/typed --schema 'device string, celsius double'"),
        (aggregate, "penstock pipeline aggregate lake/raw lake/hourly --every '1 hour'"),
        (audit, "penstock pipeline audit data/channels lake/raw --json"),
        (replay, "penstock pipeline replay lake/raw data/again --app again"),
        (compact, "penstock pipeline compact lake/raw"),
        (report, "penstock pipeline report data/channels --json"),
    ):
        group.command(epilog=f"Example: {example}")(command)
    app.add_typer(group, name="pipeline")


def ingest(
    channels: Channels,
    table: TableFolder,
    checkpoint: Checkpoint = None,
    max_records: MaxRecords = None,
    every: Every = None,
    allow_data_loss: Loss = False,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Copy channels into a table of the lake, each record once; run it again to go on."""
    from penstock.spark.pipelines.ingest import ingest as run

    with _session(cores, memory) as spark, _bar("ingesting") as shown:
        summary = run(
            spark,
            channels,
            table,
            checkpoint or _checkpoint(table),
            trigger=_trigger(every),
            options=_options(max_records, allow_data_loss),
            on_progress=shown,
        )
    _say(summary, json, f"{summary.rows} records into {table}")


def decode(
    channels: Channels,
    table: TableFolder,
    schema: Annotated[str | None, typer.Option(help="The fields of JSON payloads, as Spark writes schemas.")] = None,
    content: Annotated[str, typer.Option(help="What payloads are: json, text or raw.")] = "json",
    errors: Annotated[str | None, typer.Option(help="The table of bad payloads. [default: TABLE-errors]")] = None,
    checkpoint: Checkpoint = None,
    max_records: MaxRecords = None,
    every: Every = None,
    allow_data_loss: Loss = False,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Decode payloads into a table, and those that do not decode into a table of errors."""
    from penstock.spark.pipelines.decode import decode as run

    if content == "json" and schema is None:
        raise OptionsError("JSON needs --schema, such as 'device string, celsius double'")
    with _session(cores, memory) as spark, _bar("decoding") as shown:
        summary = run(
            spark,
            channels,
            table,
            errors or table.rstrip("/") + "-errors",
            checkpoint or _checkpoint(table),
            content=content,
            schema=schema,
            trigger=_trigger(every),
            options=_options(max_records, allow_data_loss),
            on_progress=shown,
        )
    _say(summary, json, f"{summary.rows} records decoded into {table}")


def aggregate(
    source: Source,
    table: Annotated[str | None, typer.Argument(help="The table to replace; printed if there is none.")] = None,
    every: Annotated[str, typer.Option(help="Length of a window of time, or 'all'.")] = "1 hour",
    by: Annotated[str, typer.Option(help="Columns to group by, with commas.")] = "channel,kind",
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Count records and bytes by time and key."""
    from penstock.spark import lake
    from penstock.spark.pipelines.aggregate import aggregate as counted
    from penstock.spark.pipelines.run import load

    keys = [name.strip() for name in by.split(",") if name.strip()]
    with _session(cores, memory) as spark:
        frame = counted(load(spark, source), every=None if every == "all" else every, by=keys)
        if table is None:
            _print(frame, json=json)
            return
        rows = lake.replace(frame, table)
    if json:
        emit_json({"table": table, "rows": rows})
    else:
        stderr.print(f"{rows} rows in {table}", soft_wrap=True)


def audit(
    channels: Channels, table: TableFolder, cores: Cores = None, memory: Memory = "2g", json: Json = False
) -> None:
    """Compare a table with the channels it was made from; exit code 1 if it is not what it should be."""
    from penstock.spark import lake
    from penstock.spark.pipelines.audit import audit as compared

    with _session(cores, memory) as spark:
        source = spark.read.format("penstock").schema("channel string, position long").load(channels)
        rows = _print(compared(source, lake.read(spark, table).select("channel", "position")), json=json)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(PROBLEM)


def replay(
    source: Source,
    log: Annotated[str, typer.Argument(metavar="LOG", help="The log to append to; created if it is not there.")],
    app: Annotated[str, typer.Option(help="Whose replay this is: repeated under one name it is done once.")],
    where: Annotated[str | None, typer.Option(help="Only rows for which this is true, in SQL.")] = None,
    content: Annotated[str, typer.Option(help="What the records are: raw, or envelope/1 to keep keys.")] = "raw",
    cores: Cores = None,
    memory: Memory = "2g",
) -> None:
    """Append records of a table, or of channels, to a log again, oldest first."""
    from penstock.spark.pipelines.replay import replay as run
    from penstock.spark.pipelines.run import load

    with _session(cores, memory) as spark:
        frame = load(spark, source)
        run(frame if where is None else frame.where(where), log, app=app, content=content)
    stderr.print(f"replayed into {log}", soft_wrap=True)


def compact(
    table: TableFolder,
    target_mb: Annotated[int, typer.Option(min=1, help="Size of a file, in MiB.")] = 256,
    vacuum_hours: Annotated[
        int | None, typer.Option(min=0, help="Remove files that no version of the last hours needs.")
    ] = None,
    json: Json = False,
) -> None:
    """Rewrite the small files of a table as large ones."""
    from penstock.spark.pipelines.compact import compact as run

    done = run(table, target_bytes=target_mb << 20, vacuum_hours=vacuum_hours)
    if json:
        emit_json(done)
    else:
        stderr.print(f"{table}: {done['files_before']} files, now {done['files_after']}", soft_wrap=True)


def report(source: Source, cores: Cores = None, memory: Memory = "2g", json: Json = False) -> None:
    """Say of each channel how much it holds, of how many kinds, from when to when."""
    from penstock.spark.pipelines.report import report as told
    from penstock.spark.pipelines.run import load

    with _session(cores, memory) as spark:
        _print(told(load(spark, source)), json=json)


@contextlib.contextmanager
def _session(cores: int | None, memory: str) -> Iterator[SparkSession]:
    from penstock.spark.pipelines.run import reason_of
    from penstock.spark.session import start

    with progress_bar("starting Spark") as bar:
        bar.add_task("", total=None)
        spark, own = start(master=f"local[{cores}]" if cores else None, memory=memory)
    from pyspark.errors import PySparkException

    try:
        yield spark
    except PySparkException as exc:
        raise PenstockError(reason_of(str(exc))) from None
    finally:
        if own:
            spark.stop()


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[Progress], None]]:
    with progress_bar(what, "positions") as bar:
        task = bar.add_task("", total=None)
        passed = 0

        def show(progress: Progress) -> None:
            nonlocal passed
            bar.update(task, completed=passed + progress.done, total=passed + progress.total)
            passed += progress.done

        yield show


def _checkpoint(table: str) -> str:
    return f"{table.rstrip('/')}/_checkpoint"


def _trigger(every: float | None) -> dict[str, Any]:
    return {"availableNow": True} if every is None else {"processingTime": f"{every} seconds"}


def _options(max_records: int | None, allow_data_loss: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"failOnDataLoss": str(not allow_data_loss).lower()}
    return options if max_records is None else {**options, "maxRecordsPerTrigger": max_records}


def _say(summary: Summary, json: bool, sentence: str) -> None:
    if json:
        emit_json(msgspec.structs.asdict(summary))
        return
    lost = f", {summary.lost} positions lost to retention" if summary.lost else ""
    stderr.print(f"{sentence} in {summary.batches} batches, {summary.seconds:.1f} s{lost}", soft_wrap=True)


def _print(frame: DataFrame, *, json: bool) -> list[dict[str, Any]]:
    """Print a small DataFrame, a JSON object a line or a table, and return its rows."""
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    if json:
        for row in rows:
            emit_json({name: _plain(value) for name, value in row.items()})
        return rows
    table = Table(box=None, pad_edge=False)
    for name in frame.columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*("-" if value is None else str(_plain(value)) for value in row.values()))
    stdout.print(table)
    return rows


def _plain(value: Any) -> Any:
    return value.isoformat(timespec="microseconds") if isinstance(value, dt.datetime) else value
