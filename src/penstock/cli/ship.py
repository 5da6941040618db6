"""penstock ship: sealed segments of logs to an object store, and what is there."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.output import (
    PROBLEM,
    JsonOption,
    counted,
    emit_json,
    emit_text,
    print_facts,
    progress_bar,
    say_plain,
    say_problem,
)
from penstock.errors import CorruptionError, NotFoundError, OptionsError, UnsupportedError

__all__ = ["register"]

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="A shipped log, or a place with many below it.")]


def register(app: typer.Typer) -> None:
    """Add the group ``penstock ship``."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Ship sealed segments of logs to an object store.",
        epilog="Example: penstock ship run data/ticks s3://bucket/fleet/edge-1 --once",
    )
    group.command(epilog="Example: penstock ship run data/ticks data/orders s3://bucket/fleet/edge-1")(run)
    group.command(epilog="Example: penstock ship status s3://bucket/fleet --json")(status)
    group.command(epilog="Example: penstock ship verify s3://bucket/fleet/edge-1/ticks")(verify)
    group.command(epilog="Example: penstock ship restore s3://bucket/fleet/edge-1/ticks ticks --from 80")(restore)
    group.command(epilog="Example: penstock ship prune s3://bucket/fleet/edge-1/ticks --before 5000")(prune)
    group.command(epilog="Example: penstock ship compact s3://bucket/fleet")(compact)
    app.add_typer(group, name="ship")


def run(
    places: Annotated[list[str], typer.Argument(metavar="LOG… URL", help="Logs, and where they go, each by its name.")],
    once: Annotated[
        bool,
        typer.Option("--once", help="End when everything there is now is shipped, but what a writer still has open."),
    ] = False,
    node: Annotated[str, typer.Option(help="The name of this node in the manifests. [default: the host's]")] = "",
    rate: Annotated[float, typer.Option(min=0, help="Bytes a second on average; 0 sets no bound.")] = 0.0,
    roll: Annotated[
        float | None,
        typer.Option(
            min=0, help="End a segment older than this many seconds that no writer has open. [default: 0 with --once]"
        ),
    ] = None,
    delete_local: Annotated[
        bool, typer.Option("--delete-local", help="Remove segments here that are shipped and passed by every cursor.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Ship logs, each under its own name below URL, until interrupted.

    SIGUSR1 pauses it, SIGUSR2 has it go on.
    """
    if len(places) < 2:
        raise OptionsError("give at least one log, and the URL it goes to")
    from penstock.cli.shipping import ship_logs
    from penstock.ship import ShipOptions

    options = ShipOptions(bytes_per_second=rate, delete_local=delete_local)
    found, problem = ship_logs(places[:-1], places[-1], node, options, once=once, roll_seconds=roll)
    for about in found:
        if json:
            emit_json(about)
        elif "shipped_to" in about:
            say_plain(
                f"{about['log']}: shipped to position {about['shipped_to']}, {about['shipped_bytes']:,} bytes sent"
            )
        else:
            say_plain(f"{about['log']}: nothing was shipped; {about['reason'] or 'it had not begun'}")
    if problem is not None:
        raise problem


def status(url: UrlArgument, json: JsonOption = False) -> None:
    """Say what is shipped: positions, sizes, when.

    Exit code 1 if a manifest cannot be read.
    """
    import time

    from penstock.ship import open_shipped

    bad = False
    for place in _logs(url):
        try:
            with open_shipped(place) as log:
                facts = {name: value for name, value in log.stat().items() if name not in ("files", "cursors")}
        except (CorruptionError, UnsupportedError, NotFoundError) as exc:
            bad = True
            if json:
                emit_json({"path": place, "error": str(exc)})
            else:
                say_problem(exc)
            continue
        facts["seconds_ago"] = round(max(0.0, time.time() - facts["written_ns"] / 1e9), 3)
        if json:
            emit_json(facts)
        else:
            print_facts({name: "-" if value is None else str(value) for name, value in facts.items()})
    if bad:
        raise typer.Exit(PROBLEM)


def verify(url: UrlArgument, json: JsonOption = False) -> None:
    """Fetch and check every shipped segment.

    Exit code 1 if there is a problem.
    """
    from penstock.ship import open_shipped
    from penstock.types import Problem

    bad = False
    for place in _logs(url):
        try:
            with open_shipped(place) as log, progress_bar(f"verifying {place}") as bar:
                bar.add_task("", total=None)
                problems = list(log.verify())
        except (CorruptionError, UnsupportedError, NotFoundError) as exc:
            at = (exc.file, exc.byte, exc.reason) if isinstance(exc, CorruptionError) else (place, 0, str(exc))
            problems = [Problem(*at)]
        bad = bad or bool(problems)
        if json:
            emit_json({"path": place, "ok": not problems, "problems": problems})
        else:
            emit_text(map(str, problems))
            say_plain(f"{place}: {counted(len(problems), 'problem') if problems else 'no problem found'}")
    if bad:
        raise typer.Exit(PROBLEM)


def restore(
    url: Annotated[str, typer.Argument(metavar="URL", help="A shipped log.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="The log to make; nothing may be there.")],
    from_: Annotated[int | None, typer.Option("--from", help="The first position wanted.")] = None,
    to: Annotated[int | None, typer.Option(help="The position behind the last one wanted.")] = None,
    json: JsonOption = False,
) -> None:
    """Bring the segments that hold a span back to a local log."""
    from penstock.ship import restore_span

    with progress_bar(f"fetching {url}", "bytes") as bar:
        task = bar.add_task("", total=None)
        first, following = restore_span(url, path, from_, to, lambda size: bar.advance(task, size))
    if json:
        emit_json({"path": path, "first_position": first, "next_position": following})
    else:
        say_plain(f"{path}: positions {first} to {following}")


def prune(
    url: Annotated[str, typer.Argument(metavar="URL", help="A shipped log.")],
    before: Annotated[int | None, typer.Option(help="Forget whole segments below this position.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for which they stay, for who reads them.")] = 86400.0,
    orphans: Annotated[bool, typer.Option("--orphans", help="Also look for what nothing names.")] = False,
    json: JsonOption = False,
) -> None:
    """Forget old segments, and remove them later.

    Those go that were forgotten longer ago than the grace.
    """
    from penstock.disk import object_store_for
    from penstock.ship import empty_trash, forget_before, remove_orphans
    from penstock.ship.remote import split_place

    above, channel = split_place(url)
    store = object_store_for(above)
    if before is not None:
        forget_before(store, channel, before)
    gone = empty_trash(store, channel, grace)
    if orphans:
        gone += remove_orphans(store, channel, grace)
    if json:
        emit_json({"url": url, "removed": gone})
    else:
        say_plain(f"{url}: {counted(len(gone), 'object')} removed")


def compact(
    url: Annotated[str, typer.Argument(metavar="URL", help="A place with shipped logs below it.")],
    file_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a file's records, 64 and the payload each.")] = 128
    << 20,
    forget: Annotated[bool, typer.Option("--forget", help="Forget the originals; prune removes them.")] = False,
    json: JsonOption = False,
) -> None:
    """Join small shipped segments for Spark.

    What was shipped since the last time goes into few Parquet files, under a manifest of their own.
    """
    from penstock.ship import compact_fleet, find_shipped, forget_compacted

    with progress_bar(f"compacting {url}") as bar:
        bar.add_task("", total=None)
        manifest = compact_fleet(url, file_bytes=file_bytes)
        shorter = forget_compacted(url) if forget else []
    if not manifest.files and not find_shipped(url):
        raise NotFoundError(f"{url}: nothing was shipped below this place")
    rows = sum(file.rows for file in manifest.files)
    if json:
        emit_json({"url": url, "files": len(manifest.files), "rows": rows, "forgotten": shorter})
    else:
        say_plain(f"{url}: {counted(len(manifest.files), 'file')}, {counted(rows, 'row')}")


def _logs(url: str) -> list[Any]:
    from penstock.ship import find_shipped, is_shipped

    found = [url] if is_shipped(url) else find_shipped(url)
    if not found:
        raise NotFoundError(f"{url}: nothing was shipped here")
    return found
