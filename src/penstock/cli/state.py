"""penstock fold: look into a store, whatever its backend."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from penstock.batch import payload_text
from penstock.cli.follow import follow
from penstock.errors import OptionsError, PenstockError
from penstock.store import open_store
from penstock.store.records import token_json

__all__ = ["register", "app"]

app = typer.Typer(help="Look into a fold: append log, RocksDB or LMDB.", no_args_is_help=True)

PathArgument = Annotated[
    str, typer.Argument(help="The file of an append log, or the folder of a RocksDB or LMDB store.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON, for scripts.")]


def register(main: typer.Typer) -> None:
    """Add ``penstock fold`` to the command line."""
    main.add_typer(app, name="fold")


app.command(epilog="Example: penstock fold follow data/orders orders.snap --once")(follow)


def _open(path: str) -> Any:
    try:
        return open_store(path)
    except OptionsError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    except (PenstockError, OSError) as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(1) from None


@app.command()
def dump(
    path: PathArgument,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write every entry in key order.

    Example: penstock fold dump routes.snap --json --prefix svc.
    """
    with _open(path) as store:
        try:
            for batch in store.scan(prefix):
                rows = batch.to_pylist()
                lines = [_entry_json(row) if as_json else _entry_text(row) for row in rows]
                sys.stdout.write("".join(line + "\n" for line in lines))
        except PenstockError as exc:
            typer.echo(str(exc), err=True)
            raise typer.Exit(1) from None


@app.command()
def stat(path: PathArgument, as_json: JsonOption = False) -> None:
    """Say which backend, how many entries, which cursor and which digest.

    Example: penstock fold stat routes.snap --json
    """
    with _open(path) as store:
        found = store.stat()
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found.items():
        typer.echo(f"{name:12} {'none' if value is None else value}")


@app.command()
def verify(path: PathArgument, as_json: JsonOption = False) -> None:
    """Read everything, compute the digest anew, and list what is wrong.

    Example: penstock fold verify routes.snap
    """
    problems: list[dict[str, Any]] = []
    try:
        with open_store(path) as store:
            entries, digest = store.count(), store.digest()
            found = list(store.verify())
    except OptionsError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    except PenstockError as exc:
        entries, digest, found = None, None, []
        problems.append(
            {
                "file": getattr(exc, "file", path),
                "byte": getattr(exc, "byte", 0),
                "reason": getattr(exc, "reason", str(exc)),
            }
        )
    problems += [{"file": p.file, "byte": p.byte, "reason": p.reason} for p in found]
    if as_json:
        typer.echo(json.dumps({"path": path, "entries": entries, "digest": digest, "problems": problems}))
    else:
        for problem in problems:
            typer.echo(f"{problem['file']} at byte {problem['byte']}: {problem['reason']}")
        if not problems:
            typer.echo(f"{path}: {entries} entries, digest {digest}, no problem")
    raise typer.Exit(1 if problems else 0)


def _entry_json(row: dict[str, Any]) -> str:
    name, text = payload_text(row["value"])
    field = "value" if name == "payload" else "value_base64"
    return json.dumps({"key": row["key"], field: text, "version": token_json(row["version"])}, ensure_ascii=False)


def _entry_text(row: dict[str, Any]) -> str:
    version = token_json(row["version"])
    return f"{row['key']}\t{'-' if version is None else version}\t{row['value']!r}"
