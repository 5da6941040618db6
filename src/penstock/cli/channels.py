"""Commands on the data directory of channels: ls, show.  They read, and change nothing."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from penstock.channels.model import PersistedChannel
from penstock.channels.store import FileChannelStore, channel_hash
from penstock.channels.survey import survey
from penstock.errors import OptionsError, PenstockError
from penstock.log.messagelog import MessageLogReader

__all__ = ["register"]

DataDir = Annotated[str, typer.Argument(help="The data directory of channels.", metavar="DATA_DIR")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
PROBLEM = 1

stdout, stderr = Console(), Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    channels = typer.Typer(no_args_is_help=True, help="Look into the data directory of channels.")
    channels.command(epilog="Example: penstock channels ls data --json")(ls)
    channels.command(epilog="Example: penstock channels show data ops/east --json")(show)
    app.add_typer(channels, name="channels")


def ls(data_dir: DataDir, json: JsonOption = False) -> None:
    """List the channels of a data directory by handler; exit code 1 if one cannot be read."""
    found, problems = read_all(data_dir)
    if json:
        for channel in found:
            typer.echo(msgspec.json.encode(channel.to_json()).decode())
    else:
        table = Table("handler", "type", "owner", "members", "persist", box=None)
        for channel in found:
            kind, owner = channel.channel_type.word, "" if channel.owner is None else str(channel.owner)
            table.add_row(channel.handler, kind, owner, str(len(channel.members)), str(channel.config.persist))
        stdout.print(table)
    for problem in problems:
        stderr.print(f"[bold red]penstock:[/] {type(problem).__name__}: ", end="", highlight=False)
        stderr.print(str(problem), markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(PROBLEM)


def show(
    data_dir: DataDir,
    handler: Annotated[str, typer.Argument(help="The channel, like ops/east.", metavar="HANDLER")],
    json: JsonOption = False,
) -> None:
    """Show one channel: owner, settings, lists, members, and how far its log goes."""
    store = FileChannelStore(checked(data_dir))
    digest = channel_hash(handler)
    try:
        channel = store.load(digest)
    except FileNotFoundError:
        raise OptionsError(f"{data_dir}: there is no channel {handler!r}") from None
    if json:
        typer.echo(msgspec.json.encode(channel.to_json()).decode())
        return
    table = Table(box=None, show_header=False)
    for name, value in {**channel.to_json(), "folder": store.folder(digest), **log_of(store.folder(digest))}.items():
        table.add_row(name, text_of(value))
    stdout.print(table)


def read_all(data_dir: str) -> tuple[list[PersistedChannel], list[PenstockError | OSError]]:
    """Return the channels by handler, and what stands in the way of the others.  Nothing is swept."""
    found: list[PersistedChannel] = []
    problems: list[PenstockError | OSError] = []
    for _, channel in survey(checked(data_dir)):
        if isinstance(channel, PersistedChannel):
            found.append(channel)
        else:
            problems.append(channel)
    return sorted(found, key=lambda channel: channel.handler), problems


def checked(data_dir: str) -> str:
    """Return the data directory, or say that it is none."""
    if not os.path.isdir(data_dir):
        raise OptionsError(f"{data_dir}: there is no such data directory")
    return data_dir.rstrip("/") or "/"


def log_of(folder: str) -> dict[str, Any]:
    """Return the first and last number of a channel's log, as far as they can be known."""
    try:
        with MessageLogReader(folder) as log:
            last = log.last_seq
            return {"first_seq": log.first_position if last else 0, "last_seq": last}
    except (PenstockError, OSError) as exc:
        return {"log": str(exc)}


def text_of(value: Any) -> str:
    """Return a field for people.

    >>> text_of({"persist": True}), text_of(["ann@localhost"]), text_of({})
    ('persist=True', 'ann@localhost', '-')
    """
    if isinstance(value, dict):
        return "  ".join(f"{name}={text_of(item) if item != [] else '*'}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
