"""Commands on Spark: ``penstock pipeline ingest | decode | aggregate | fold | audit | replay | compact | report``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cli.output import PROBLEM, JsonOption, counted, emit_json, progress_bar, stderr
from penstock.cli.sparksource import ChannelNames, Cursor, Option, Start, Ui, source_options
from penstock.cli.sparkwork import Cores, Master, Memory, named, on_spark, print_rows, say
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["register"]

Channels = Annotated[
    str,
    typer.Argument(
        metavar="CHANNELS", help="A channel, a folder of channels, or shipped logs: s3://bucket/fleet.", callback=named
    ),
]
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Channels, or a table of the lake.", callback=named)]
TableFolder = Annotated[str, typer.Argument(metavar="TABLE", help="The folder of a table of the lake.", callback=named)]
Checkpoint = Annotated[
    str | None,
    typer.Option(help="Where Spark keeps how far it has come. [default: TABLE/_checkpoint]", callback=named),
]
MaxRecords = Annotated[int | None, typer.Option(min=1, help="Records in a batch.")]
Every = Annotated[float | None, typer.Option(min=0.1, help="Go on for ever, a batch every so many seconds.")]
Loss = Annotated[bool, typer.Option("--allow-data-loss", help="Go on, and count, where retention was faster.")]
PartitionBy = Annotated[
    str | None, typer.Option(help="Folders of a table that is made, with commas: date, channel, node.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Carry channels through Spark: into the lake, decoded, counted.",
        epilog="Example: penstock pipeline ingest data/channels lake/raw",
    )
    for command, example in (
        (ingest, "penstock pipeline ingest data/channels lake/raw"),
        (decode, "penstock pipeline decode data/channels lake/typed --schema 'device string, celsius double'"),
        (aggregate, "penstock pipeline aggregate lake/raw lake/hourly --every '1 hour'"),
        (fold, "penstock pipeline fold data/channels/devices --store data/devices.snap"),
        (audit, "penstock pipeline audit s3://bucket/fleet s3://bucket/lake/raw --edge data/channels --json"),
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
    option: Option = None,
    start: Start = None,
    only: ChannelNames = None,
    cursor: Cursor = None,
    partition_by: PartitionBy = None,
    node: Annotated[str | None, typer.Option(help="Whose channels these are. [default: this machine]")] = None,
    compact_every: Annotated[
        int | None, typer.Option(min=1, help="Join small files of the table after so many batches.")
    ] = None,
    ui: Ui = False,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Copy channels into a table of the lake, each record once.

    Run it again to go on.  A table on an object store needs no checkpoint: it says itself how far it has come.
    """
    from penstock.spark.lake import Compaction
    from penstock.spark.pipelines.ingest import ingest as run
    from penstock.spark.pipelines.run import checkpoint_of, same_place
    from penstock.spark.source.options import is_remote
    from penstock.spark.source.partition import check_partitions

    given = source_options(option, start=start, channels=only, cursor=cursor, max_records=max_records)
    by = check_partitions([name.strip() for name in (partition_by or "").split(",") if name.strip()])
    if same_place(channels, table):
        raise OptionsError(f"{table}: these are the channels, the table must be elsewhere")
    if checkpoint is None and is_remote(table):
        if partition_by or compact_every or node is not None:
            raise OptionsError("--partition-by, --node and --compact-every are for tables of a file system")
        with on_spark("ingesting", master, cores, memory, reads=[channels], ui=ui) as (spark, _):
            while True:
                summary = run(spark, channels, table, None, options=_options(given, allow_data_loss))
                say(summary, json, f"{counted(summary.rows, 'record')} into {table}")
                if every is None:
                    return
                time.sleep(every)
    with on_spark("ingesting", master, cores, memory, reads=[channels], ui=ui) as (spark, shown):
        summary = run(
            spark,
            channels,
            table,
            checkpoint or checkpoint_of(table),
            trigger=_trigger(every),
            options=_options(given, allow_data_loss),
            partition_by=by,
            node=node,
            compaction=None if compact_every is None else Compaction(every=compact_every),
            on_progress=shown,
        )
    say(summary, json, f"{counted(summary.rows, 'record')} into {table}")


def decode(
    source: Source,
    table: TableFolder,
    schema: Annotated[str | None, typer.Option(help="The fields of JSON payloads, as Spark writes schemas.")] = None,
    content: Annotated[str, typer.Option(help="What payloads are: json, text or raw.")] = "json",
    errors: Annotated[
        str | None, typer.Option(help="The table of bad payloads. [default: TABLE-errors]", callback=named)
    ] = None,
    checkpoint: Checkpoint = None,
    rescue: Annotated[
        str | None, typer.Option(help="A column for JSON fields that the schema does not name.", callback=named)
    ] = None,
    max_records: MaxRecords = None,
    every: Every = None,
    allow_data_loss: Loss = False,
    option: Option = None,
    start: Start = None,
    only: ChannelNames = None,
    cursor: Cursor = None,
    ui: Ui = False,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Decode payloads into a table.

    Those that do not decode go into a table of errors.
    """
    from penstock.spark.pipelines.decode import decode as run
    from penstock.spark.pipelines.run import checkpoint_of

    if content == "json" and schema is None:
        raise OptionsError("JSON needs --schema, such as 'device string, celsius double'")
    given = source_options(option, start=start, channels=only, cursor=cursor, max_records=max_records)
    with on_spark("decoding", master, cores, memory, reads=[source], ui=ui) as (spark, shown):
        summary = run(
            spark,
            source,
            table,
            errors or table.rstrip("/") + "-errors",
            checkpoint or checkpoint_of(table),
            content=content,
            schema=schema,
            trigger=_trigger(every),
            rescue=rescue,
            options=_options(given, allow_data_loss),
            on_progress=shown,
        )
    say(summary, json, f"{counted(summary.rows - summary.bad, 'record')} decoded into {table}")
    if summary.drift and not json:
        told = ", ".join(f"{name} ({count:,})" for name, count in sorted(summary.drift.items()))
        stderr.print(f"fields that the schema does not name, kept in {rescue}: {told}", soft_wrap=True)


def aggregate(
    source: Source,
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="The table to replace; printed if there is none.", callback=named),
    ] = None,
    every: Annotated[str, typer.Option(help="Length of a window of time, or 'all'.")] = "1 hour",
    by: Annotated[str, typer.Option(help="Columns to group by, with commas.")] = "channel,kind",
    watermark: Annotated[
        str | None,
        typer.Option(help="Read SOURCE as a stream and add each window to TABLE when it is this long over."),
    ] = None,
    checkpoint: Checkpoint = None,
    max_records: MaxRecords = None,
    allow_data_loss: Loss = False,
    option: Option = None,
    start: Start = None,
    only: ChannelNames = None,
    cursor: Cursor = None,
    ui: Ui = False,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Count records and bytes by time and key.

    All there are, or with a watermark as they come.
    """
    from penstock.spark.pipelines.aggregate import aggregate as aggregated, aggregate_stream, duration_micros
    from penstock.spark.pipelines.run import checkpoint_of, load, replace

    given = source_options(option, start=start, channels=only, cursor=cursor, max_records=max_records)
    keys = [name.strip() for name in by.split(",") if name.strip()]
    if every != "all":
        duration_micros(every)
    if watermark is None:
        if checkpoint is not None or max_records is not None:
            raise OptionsError("--checkpoint and --max-records are for a stream: give --watermark with them")
        if allow_data_loss:
            given["failOnDataLoss"] = "false"
        with on_spark("aggregating", master, cores, memory, reads=[source], ui=ui) as (spark, _):
            frame = aggregated(load(spark, source, given), every=None if every == "all" else every, by=keys)
            if table is None:
                print_rows(frame, json=json)
            else:
                _tell_table(table, replace(frame, table), json=json)
        return
    if table is None or every == "all":
        raise OptionsError("a stream of windows needs a TABLE and a length of time")
    duration_micros(watermark, "watermark")
    with on_spark("aggregating", master, cores, memory, reads=[source], ui=ui) as (spark, shown):
        summary = aggregate_stream(
            spark,
            source,
            table,
            checkpoint or checkpoint_of(table),
            every=every,
            by=keys,
            watermark=watermark,
            options=_options(given, allow_data_loss),
            on_progress=shown,
        )
    read = counted(summary.read, "record")
    say(summary, json, f"{counted(summary.rows, 'row')} of closed windows into {table}, {read} read")


def fold(
    source: Source,
    store: Annotated[
        str | None, typer.Option(help="The store to bring up to date; made if it is not there.", callback=named)
    ] = None,
    table: Annotated[str | None, typer.Option(help="The table to replace with the live keys.", callback=named)] = None,
    backend: Annotated[str, typer.Option(help="Of a store that is made: append-log, rocksdb or lmdb.")] = "append-log",
    drop_expired: Annotated[
        bool, typer.Option("--drop-expired", help="Into a table: leave out keys whose time to live is over.")
    ] = False,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Keep the latest value of each key in a store or a table.

    Deletes and expiry are followed.
    """
    from penstock.spark.pipelines.fold import fold as folded, fold_into
    from penstock.spark.pipelines.run import load, replace

    if (store is None) == (table is None):
        raise OptionsError("say where the keys go: --store or --table")
    if store is not None:
        if drop_expired:
            raise OptionsError("a store follows its log: keys expire there by the purges that buckets write")
        with on_spark("folding", master, cores, memory, reads=[source]) as (spark, _):
            summary = fold_into(spark, source, store, backend=backend)
        done = msgspec.structs.asdict(summary)
        folded_now = f"{counted(summary.records, 'record')} folded"
        sentence = f"{counted(summary.entries, 'key')} in {store}, exact at {summary.cursor}: {folded_now}"
    else:
        assert table is not None
        with on_spark("folding", master, cores, memory, reads=[source]) as (spark, _):
            rows = replace(folded(load(spark, source), now_ns=time.time_ns() if drop_expired else None), table)
        done, sentence = {"table": table, "entries": rows}, f"{counted(rows, 'key')} in {table}"
    if json:
        emit_json(done)
    else:
        stderr.print(sentence, soft_wrap=True)


def audit(
    channels: Channels,
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="A table made from them, to be compared.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="A store folded from CHANNELS, one log of envelopes: its fold is computed again.")
    ] = None,
    edge: Annotated[
        str | None, typer.Option(help="Of shipped CHANNELS: the logs on this machine, compared with what was shipped.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="The data directory of a node: note there what TABLE has.", metavar="DATA")
    ] = None,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Check logs, and a table or a fold made from them.

    Everything is read again; the exit code is 1 if something is wrong.  Shipped logs are compared with the table, and
    with the logs of an edge node, segment by segment: the first position that differs is named.
    """
    from penstock.spark import lake
    from penstock.spark.pipelines.audit import audit as compared, audit_fold, audit_logs, beginnings
    from penstock.spark.pipelines.run import require_channels
    from penstock.spark.source.options import is_remote, path_here
    from penstock.spark.source.shipped import holds_shipped

    if ledger is not None and (table is None or is_remote(channels) or edge is not None):
        raise OptionsError("--ledger notes what a TABLE has of the logs of this machine")
    if is_remote(channels) or edge is not None or holds_shipped(channels):
        if store is not None:
            raise OptionsError("--store is for logs of this machine: see penstock artifact build for shipped ones")
        _audit_shipped(channels, table, edge, (master, cores, memory), json=json)
        return
    made = [path for path in (table, store) if path is not None]
    with on_spark("auditing", master, cores, memory, reads=[channels, *made]) as (spark, _):
        require_channels(channels)
        held = None if table is None else lake.read(spark, table)
        logs = audit_logs(spark, channels)
        if not logs:
            raise OptionsError(f"{channels}: there are no channels here")
        rows = print_rows([{**msgspec.structs.asdict(item), "ok": item.ok} for item in logs], json=json, check="log")
        if held is not None:
            source = spark.read.format("penstock").load(path_here(spark, channels))
            compared_rows = print_rows(compared(source, held, beginnings(channels)), json=json, check="table")
            rows += compared_rows
            if ledger is not None:
                from penstock.node.ledger.reckon import note_lake

                note_lake(ledger, compared_rows)
        if store is not None:
            found = audit_fold(spark, channels, store)
            rows += print_rows([{**msgspec.structs.asdict(found), "ok": found.ok}], json=json, check="fold")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(PROBLEM)


def _audit_shipped(
    channels: str,
    table: str | None,
    edge: str | None,
    where: tuple[str | None, int | None, str],
    *,
    json: bool,
) -> None:
    from penstock.spark.pipelines.audit import audit_logs
    from penstock.spark.pipelines.loop import audit_loop, by_log

    with on_spark("auditing", *where, reads=[path for path in (channels, table, edge) if path is not None]) as (
        spark,
        _,
    ):
        logs = audit_logs(spark, channels)
        if not logs:
            raise OptionsError(f"{channels}: nothing was shipped here")
        rows = print_rows([{**msgspec.structs.asdict(item), "ok": item.ok} for item in logs], json=json, check="log")
        if table is not None or edge is not None:
            spans = audit_loop(spark, channels, edge=edge, table=table)
            bad = [item for item in spans if not item.ok]
            found = [{**msgspec.structs.asdict(item), "ok": item.ok} for item in by_log(spans)]
            rows += print_rows(found, json=json, check="stage")
            if bad:
                found = [{**msgspec.structs.asdict(item), "ok": item.ok} for item in bad]
                rows += print_rows(found, json=json, check="span")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(PROBLEM)


def replay(
    source: Source,
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="The log to append to; created if it is not there.", callback=named)
    ],
    app: Annotated[str, typer.Option(help="Whose replay this is: repeated under one name it is done once.")],
    where: Annotated[str | None, typer.Option(help="Only rows for which this is true, in SQL.")] = None,
    content: Annotated[str, typer.Option(help="What the records are: raw, or envelope/1 to keep keys.")] = "raw",
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Append records of a table or of channels to a log again.

    Oldest first.
    """
    from penstock.spark.pipelines.replay import replay as run
    from penstock.spark.pipelines.run import load

    with on_spark("replaying", master, cores, memory, reads=[source]) as (spark, _):
        frame = load(spark, source, where=where)
        appended = run(frame if where is None else _only(frame, where), log, app=app, content=content)
    if json:
        emit_json({"log": log, "app": app, "appended": appended})
    elif not appended:
        stderr.print(f"nothing to append to {log}: no row, or {app} has been there", soft_wrap=True)
    else:
        stderr.print(f"{counted(appended, 'record')} replayed into {log}", soft_wrap=True)


def compact(
    table: TableFolder,
    target_mb: Annotated[int, typer.Option(min=1, help="Size of a file, in MiB.")] = 256,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Delete rows that are older than so many days.")
    ] = None,
    vacuum_hours: Annotated[
        int | None, typer.Option(min=0, help="Remove files that no version of the last hours needs, at least 168.")
    ] = None,
    vacuum_anyway: Annotated[
        bool, typer.Option("--vacuum-anyway", help="Vacuum younger files too: nothing reads or writes the table now.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Join the small files of a table; delete what is too old."""
    from penstock.spark.pipelines.compact import compact as run

    with progress_bar("compacting") as bar:
        bar.add_task("", total=None)
        done = run(
            table,
            target_bytes=target_mb << 20,
            keep_days=keep_days,
            vacuum_hours=vacuum_hours,
            vacuum_anyway=vacuum_anyway,
        )
    if json:
        emit_json(done)
    else:
        deleted = f", {counted(done['deleted_rows'], 'row')} deleted" if keep_days is not None else ""
        removed = f", {counted(done['removed'], 'old file')} removed" if vacuum_hours is not None else ""
        files = f"{counted(done['files_before'], 'file')}, now {done['files_after']:,}"
        stderr.print(f"{table}: {files}{deleted}{removed}", soft_wrap=True)


def report(
    source: Source,
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="PAGE", help="The HTML file to write; one row a channel is printed without.", callback=named
        ),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="A table that is filled from SOURCE: show how far it is behind.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read every log again, as audit does, and show it.")] = False,
    title: Annotated[str | None, typer.Option(help="The title of the page. [default: the name of SOURCE]")] = None,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Say of each channel how much it holds, from when to when.

    As a page also rates, sizes, lag, gaps and keys.
    """
    from penstock.spark.pipelines.report import report as told, write_report
    from penstock.spark.pipelines.run import load

    if page is None and (table is not None or check or title is not None):
        raise OptionsError("--table, --check and --title are for a page: say where it goes")
    with on_spark("reporting", master, cores, memory, reads=[source]) as (spark, _):
        if page is None:
            print_rows(told(load(spark, source)), json=json)
            return
        found = write_report(spark, source, page, title=title, table=table, check=check)
    if json:
        emit_json({"page": page, "channels": len(found.channels), "records": sum(p.records for p in found.channels)})
    else:
        stderr.print(f"wrote {page}: {counted(len(found.channels), 'channel')}", soft_wrap=True)


def _tell_table(table: str, rows: int, *, json: bool) -> None:
    if json:
        emit_json({"table": table, "rows": rows})
    else:
        stderr.print(f"{counted(rows, 'row')} in {table}", soft_wrap=True)


def _only(frame: DataFrame, where: str) -> DataFrame:
    """Return the rows for which a condition holds; one that is none is wrong use."""
    from pyspark.errors import PySparkException

    from penstock.spark.pipelines.run import error_of

    try:
        return frame.where(where)
    except PySparkException as exc:
        raise OptionsError(f"--where {where!r}: {error_of(str(exc))}") from None


def _trigger(every: float | None) -> dict[str, Any]:
    return {"availableNow": True} if every is None else {"processingTime": f"{every} seconds"}


def _options(given: dict[str, Any], allow_data_loss: bool) -> dict[str, Any]:
    return {**given, "failOnDataLoss": "false"} if allow_data_loss else given
