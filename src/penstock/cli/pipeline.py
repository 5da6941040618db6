"""Commands that run on Spark: ``penstock pipeline ingest | decode | aggregate | audit | replay | compact | report``."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli.output import PROBLEM, counted, emit_json, progress_bar, stderr
from penstock.cli.sparkwork import Cores, Master, Memory, on_spark, say
from penstock.cli.sparkwork import print_rows as _print
from penstock.errors import OptionsError

__all__ = ["register"]

Channels = Annotated[str, typer.Argument(metavar="CHANNELS", help="A channel, or a folder of channels.")]
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Channels, or a table of the lake.")]
TableFolder = Annotated[str, typer.Argument(metavar="TABLE", help="The folder of a table of the lake.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="Where Spark keeps how far it has come. [default: TABLE/_checkpoint]")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
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
        (fold, "penstock pipeline fold data/channels/devices --store data/devices.snap"),
        (audit, "penstock pipeline audit data/channels lake/raw --json"),
        (replay, "penstock pipeline replay lake/raw data/again --app again"),
        (compact, "penstock pipeline compact lake/raw"),
        (report, "penstock pipeline report data/channels report.html"),
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
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Copy channels into a table of the lake, each record once.

    Run it again to go on.
    """
    from penstock.spark.pipelines.ingest import ingest as run

    with on_spark("ingesting", master, cores, memory) as (spark, shown):
        summary = run(
            spark,
            channels,
            table,
            checkpoint or _checkpoint(table),
            trigger=_trigger(every),
            options=_options(max_records, allow_data_loss),
            on_progress=shown,
        )
    say(summary, json, f"{summary.rows} records into {table}")


def decode(
    source: Source,
    table: TableFolder,
    schema: Annotated[str | None, typer.Option(help="The fields of JSON payloads, as Spark writes schemas.")] = None,
    content: Annotated[str, typer.Option(help="What payloads are: json, text or raw.")] = "json",
    errors: Annotated[str | None, typer.Option(help="The table of bad payloads. [default: TABLE-errors]")] = None,
    checkpoint: Checkpoint = None,
    max_records: MaxRecords = None,
    every: Every = None,
    allow_data_loss: Loss = False,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Decode payloads into a table.

    Those that do not decode go into a table of errors.
    """
    from penstock.spark.pipelines.decode import decode as run

    if content == "json" and schema is None:
        raise OptionsError("JSON needs --schema, such as 'device string, celsius double'")
    with on_spark("decoding", master, cores, memory) as (spark, shown):
        summary = run(
            spark,
            source,
            table,
            errors or table.rstrip("/") + "-errors",
            checkpoint or _checkpoint(table),
            content=content,
            schema=schema,
            trigger=_trigger(every),
            options=_options(max_records, allow_data_loss),
            on_progress=shown,
        )
    say(summary, json, f"{summary.rows} records decoded into {table}")


def aggregate(
    source: Source,
    table: Annotated[str | None, typer.Argument(help="The table to replace; printed if there is none.")] = None,
    every: Annotated[str, typer.Option(help="Length of a window of time, or 'all'.")] = "1 hour",
    by: Annotated[str, typer.Option(help="Columns to group by, with commas.")] = "channel,kind",
    watermark: Annotated[
        str | None,
        typer.Option(help="Read SOURCE as a stream and add each window to TABLE when it is this long over."),
    ] = None,
    checkpoint: Checkpoint = None,
    max_records: MaxRecords = None,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Count records and bytes by time and key.

    All there are, or with a watermark as they come.
    """
    from penstock.spark import lake
    from penstock.spark.pipelines.aggregate import aggregate as aggregated
    from penstock.spark.pipelines.aggregate import aggregate_stream
    from penstock.spark.pipelines.run import load

    keys = [name.strip() for name in by.split(",") if name.strip()]
    if watermark is not None:
        if table is None or every == "all":
            raise OptionsError("a stream of windows needs a TABLE and a length of time")
        with on_spark("aggregating", master, cores, memory) as (spark, shown):
            summary = aggregate_stream(
                spark,
                source,
                table,
                checkpoint or _checkpoint(table),
                every=every,
                by=keys,
                watermark=watermark,
                options=_options(max_records, allow_data_loss=False),
                on_progress=shown,
            )
        say(summary, json, f"{summary.rows} records counted into {table}")
        return
    with on_spark("aggregating", master, cores, memory) as (spark, _):
        frame = aggregated(load(spark, source), every=None if every == "all" else every, by=keys)
        if table is None:
            _print(frame, json=json)
            return
        rows = lake.replace(frame, table)
    if json:
        emit_json({"table": table, "rows": rows})
    else:
        stderr.print(f"{rows} rows in {table}", soft_wrap=True)


def fold(
    source: Source,
    store: Annotated[str | None, typer.Option(help="The store to bring up to date; made if it is not there.")] = None,
    table: Annotated[str | None, typer.Option(help="The table to replace with the live keys.")] = None,
    backend: Annotated[str, typer.Option(help="Of a store that is made: append-log, rocksdb or lmdb.")] = "append-log",
    drop_expired: Annotated[
        bool, typer.Option("--drop-expired", help="Into a table: leave out keys whose time to live is over.")
    ] = False,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Keep the latest value of each key in a store or a table.

    Deletes and expiry are followed.
    """
    from penstock.spark import lake
    from penstock.spark.pipelines.fold import fold as folded
    from penstock.spark.pipelines.fold import fold_into
    from penstock.spark.pipelines.run import load

    if (store is None) == (table is None):
        raise OptionsError("say where the keys go: --store or --table")
    if store is not None:
        if drop_expired:
            raise OptionsError("a store follows its log: keys expire there by the purges that buckets write")
        with on_spark("folding", master, cores, memory) as (spark, _):
            summary = fold_into(spark, source, store, backend=backend)
        done = msgspec.structs.asdict(summary)
        sentence = f"{summary.entries} keys in {store}, exact at {summary.cursor}: {summary.records} records folded"
    else:
        assert table is not None
        with on_spark("folding", master, cores, memory) as (spark, _):
            rows = lake.replace(folded(load(spark, source), now_ns=time.time_ns() if drop_expired else None), table)
        done, sentence = {"table": table, "entries": rows}, f"{rows} keys in {table}"
    if json:
        emit_json(done)
    else:
        stderr.print(sentence, soft_wrap=True, highlight=False)


def audit(
    channels: Channels,
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="A table made from them, to be compared.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="A store folded from CHANNELS, one log of envelopes: its fold is computed again.")
    ] = None,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Check logs, and a table or a fold made from them.

    Everything is read again; the exit code is 1 if something is wrong.
    """
    from penstock.spark import lake
    from penstock.spark.pipelines.audit import audit as compared
    from penstock.spark.pipelines.audit import audit_fold, audit_logs, beginnings

    with on_spark("auditing", master, cores, memory) as (spark, _):
        logs = audit_logs(spark, channels)
        rows = _print([{**msgspec.structs.asdict(item), "ok": item.ok} for item in logs], json=json, check="log")
        if table is not None:
            source = spark.read.format("penstock").load(channels)
            rows += _print(compared(source, lake.read(spark, table), beginnings(channels)), json=json, check="table")
        if store is not None:
            found = audit_fold(spark, channels, store)
            rows += _print([{**msgspec.structs.asdict(found), "ok": found.ok}], json=json, check="fold")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(PROBLEM)


def replay(
    source: Source,
    log: Annotated[str, typer.Argument(metavar="LOG", help="The log to append to; created if it is not there.")],
    app: Annotated[str, typer.Option(help="Whose replay this is: repeated under one name it is done once.")],
    where: Annotated[str | None, typer.Option(help="Only rows for which this is true, in SQL.")] = None,
    content: Annotated[str, typer.Option(help="What the records are: raw, or envelope/1 to keep keys.")] = "raw",
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
) -> None:
    """Append records of a table or of channels to a log again.

    Oldest first.
    """
    from penstock.spark.pipelines.replay import replay as run
    from penstock.spark.pipelines.run import load

    with on_spark("replaying", master, cores, memory) as (spark, _):
        frame = load(spark, source)
        run(frame if where is None else frame.where(where), log, app=app, content=content)
    stderr.print(f"replayed into {log}", soft_wrap=True)


def compact(
    table: TableFolder,
    target_mb: Annotated[int, typer.Option(min=1, help="Size of a file, in MiB.")] = 256,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Delete rows that are older than so many days.")
    ] = None,
    vacuum_hours: Annotated[
        int | None, typer.Option(min=0, help="Remove files that no version of the last hours needs.")
    ] = None,
    json: Json = False,
) -> None:
    """Join the small files of a table; delete what is too old."""
    from penstock.spark.pipelines.compact import compact as run

    with progress_bar("compacting") as bar:
        bar.add_task("", total=None)
        done = run(table, target_bytes=target_mb << 20, keep_days=keep_days, vacuum_hours=vacuum_hours)
    if json:
        emit_json(done)
    else:
        stderr.print(f"{table}: {counted(done['files_before'], 'file')}, now {done['files_after']}", soft_wrap=True)


def report(
    source: Source,
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="The HTML file to write; one row a channel is printed without.")
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="A table that is filled from SOURCE: show how far it is behind.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read every log again, as audit does, and show it.")] = False,
    title: Annotated[str | None, typer.Option(help="The title of the page. [default: the name of SOURCE]")] = None,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: Json = False,
) -> None:
    """Say of each channel how much it holds, from when to when.

    As a page also rates, sizes, lag, gaps and keys.
    """
    from penstock.spark.pipelines.report import report as told
    from penstock.spark.pipelines.report import write_report
    from penstock.spark.pipelines.run import load

    with on_spark("reporting", master, cores, memory) as (spark, _):
        if page is None:
            _print(told(load(spark, source)), json=json)
            return
        found = write_report(spark, source, page, title=title, table=table, check=check)
    if json:
        emit_json({"page": page, "channels": len(found.channels), "records": sum(p.records for p in found.channels)})
    else:
        stderr.print(f"wrote {page}: {len(found.channels)} channels", soft_wrap=True, highlight=False)


def _checkpoint(table: str) -> str:
    return f"{table.rstrip('/')}/_checkpoint"


def _trigger(every: float | None) -> dict[str, Any]:
    return {"availableNow": True} if every is None else {"processingTime": f"{every} seconds"}


def _options(max_records: int | None, allow_data_loss: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"failOnDataLoss": str(not allow_data_loss).lower()}
    return options if max_records is None else {**options, "maxRecordsPerTrigger": max_records}
