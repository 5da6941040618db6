"""penstock fold: bring a store up to date, and look into one, whatever its backend."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer

from penstock.cli.output import (
    PROBLEM,
    JsonOption,
    emit_json,
    emit_lines,
    emit_text,
    json_line,
    print_facts,
    say_problem,
    stderr,
)
from penstock.errors import OptionsError, PenstockError
from penstock.types import Problem

__all__ = ["register"]

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="The file of an append log, the folder of a RocksDB or LMDB store, or an artifact; or the URL of any.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group ``penstock fold``."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Fold logs and buckets into a store, and look into it.",
        epilog="Example: penstock fold stat routes.snap --json",
    )
    group.command(epilog="Example: penstock fold follow orders orders.snap --once")(follow)
    group.command(epilog="Example: penstock fold dump routes.snap --json --prefix svc.")(dump)
    group.command(epilog="Example: penstock fold stat routes.snap --json")(stat)
    group.command(epilog="Example: penstock fold verify routes.snap")(verify)
    app.add_typer(group, name="fold")


def follow(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A log whose records are envelopes, the folder of an embedded bucket, or nats://host:port.",
        ),
    ],
    store: Annotated[str, typer.Argument(metavar="STORE", help="Where the fold is; an append log unless it exists.")],
    bucket: Annotated[
        str | None, typer.Option(help="The bucket, when SOURCE is a server or a folder of buckets.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when everything there is now is folded.")] = False,
    on_expired: Annotated[str, typer.Option(help="Of a log, when records are gone: refuse or restart.")] = "refuse",
    on_replaced: Annotated[str, typer.Option(help="Of a log, when it was recreated: refuse or restart.")] = "refuse",
    artifact: Annotated[
        str | None,
        typer.Option(help="Where an artifact of it is published: begin with that if STORE is not here or has expired."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="At the end, one JSON object.")] = False,
) -> None:
    """Fold a log or a bucket into a store and keep it current.

    With --artifact it says which way it took and why: delta, artifact or relist.
    """
    from penstock.cli.follow import fold_into
    from penstock.fold import FollowOptions

    options = FollowOptions(on_expired=on_expired, on_replaced=on_replaced)  # type: ignore[arg-type]  # it checks
    progress = fold_into(store, source, bucket, options, once=once, artifact=artifact)
    if json:
        emit_json(progress.result())
    else:
        stderr.print(progress.line())


def dump(
    path: PathArgument,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    json: JsonOption = False,
) -> None:
    """Write every entry in key order: key, version, value.

    Of a broker's data directory all it keeps, journal included, also while it serves.
    """
    from penstock.cli.records import readable
    from penstock.disk import disk_for, is_url
    from penstock.store.records import token_json

    def line(row: dict[str, Any]) -> bytes:
        key, value, version = row["key"], row["value"], token_json(row["version"])
        if json:
            return json_line({"key": key, **readable("value", value), "version": version})
        return f"{key}\t{'-' if version is None else version}\t{value!r}\n".encode()

    if not is_url(path) and disk_for(path).stat(f"{path}/state.snap") is not None:
        from penstock.mqtt.state_dump import dump as dump_broker

        entries, problems = dump_broker(path)
        emit_lines(
            line({"key": each.key, "value": each.value, "version": each.version.raw})
            for each in entries
            if each.key.startswith(prefix)
        )
        for problem in problems:
            say_problem(str(problem))
        raise typer.Exit(1 if problems else 0)
    with _open(path) as store:
        for batch in store.scan(prefix):
            emit_lines(map(line, batch.to_pylist()))


def stat(path: PathArgument, json: JsonOption = False) -> None:
    """Say which backend, how many entries, which cursor and digest."""
    with _open(path) as store:
        found = {**store.stat(), "path": path}
    if json:
        emit_json(found)
    else:
        print_facts({name: "none" if value is None else str(value) for name, value in found.items()})


def verify(path: PathArgument, json: JsonOption = False) -> None:
    """Read everything again; exit code 1 if something is wrong."""
    entries, digest, problems = None, None, []
    try:
        with _open(path) as store:
            entries, digest = store.count(), store.digest()
            problems = list(store.verify())
    except OptionsError:
        raise
    except PenstockError as exc:  # it cannot even be opened
        place = getattr(exc, "file", path), getattr(exc, "byte", 0)
        problems = [Problem(*place, getattr(exc, "reason", str(exc)))]
    if json:
        emit_json({"path": path, "entries": entries, "digest": digest, "problems": problems})
    elif problems:
        emit_text(map(str, problems))
    else:
        emit_text([f"{path}: {entries} entries, digest {digest}, no problem"])
    if problems:
        raise typer.Exit(PROBLEM)


def _open(path: str) -> AbstractContextManager[Any]:
    """Open a store for reading, or an artifact, here or by URL."""
    from penstock.disk import is_url
    from penstock.store import open_store

    if not is_url(path) and os.path.exists(path) and not os.path.exists(f"{path}/MANIFEST.json"):
        return open_store(path)
    from penstock.artifact import open_fold

    return open_fold(path)
