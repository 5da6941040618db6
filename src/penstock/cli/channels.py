"""Commands on channels: ls and show look into a data directory and change nothing; serve and what talks to a server
are beside this module.
"""  # noqa: D205

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.channels_serve import serve
from penstock.cli.channels_use import register_use
from penstock.cli.output import PROBLEM, JsonOption, emit_json, print_facts, say_problem, stdout
from penstock.errors import NotFoundError, PenstockError

if TYPE_CHECKING:
    from penstock.channels.model import PersistedChannel

__all__ = ["register"]

DataDir = Annotated[str, typer.Argument(help="The data directory of channels.", metavar="DATA_DIR")]


def register(app: typer.Typer) -> None:
    """Add the group ``penstock channels``."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Serve channels, use them, look into their data directory.",
        epilog="Example: penstock channels ls data --json",
    )
    group.command(epilog="Example: penstock channels ls data --json")(ls)
    group.command(epilog="Example: penstock channels show data ops/east --json")(show)
    group.command(epilog="Example: penstock channels serve --data data --plain-port 0 --json")(serve)
    register_use(group)
    app.add_typer(group, name="channels")


def ls(data_dir: DataDir, json: JsonOption = False) -> None:
    """List the channels by handler; exit code 1 if one is unreadable."""
    found, problems = read_all(data_dir)
    if json:
        for channel in found:
            emit_json(channel.to_json())
    else:
        _print_table(found)
    for problem in problems:
        say_problem(problem)
    if problems:
        raise typer.Exit(PROBLEM)


def show(
    data_dir: DataDir,
    handler: Annotated[str, typer.Argument(help="The channel, like ops/east.", metavar="HANDLER")],
    json: JsonOption = False,
) -> None:
    """Show one channel: owner, settings, lists, members and its log."""
    from penstock.channels.store import FileChannelStore, channel_hash

    store = FileChannelStore(checked(data_dir))
    digest = channel_hash(handler)
    try:
        channel = store.load(digest)
    except FileNotFoundError:
        raise NotFoundError(f"{data_dir}: there is no channel {handler!r}") from None
    if json:
        emit_json(channel.to_json())
        return
    facts = {**channel.to_json(), "folder": store.folder(digest), **log_of(store.folder(digest))}
    print_facts({name: text_of(value) for name, value in facts.items()})


def read_all(data_dir: str) -> tuple[list[PersistedChannel], list[PenstockError | OSError]]:
    """Return the channels by handler, and what stands in the way of the others.  Nothing is swept."""
    from penstock.channels.model import PersistedChannel
    from penstock.channels.survey import survey

    found: list[PersistedChannel] = []
    problems: list[PenstockError | OSError] = []
    for _, channel in survey(checked(data_dir)):
        if isinstance(channel, PersistedChannel):
            found.append(channel)
        else:
            problems.append(channel)
    return sorted(found, key=lambda channel: channel.handler), problems


def _print_table(found: list[PersistedChannel]) -> None:
    from rich.table import Table

    table = Table("handler", "type", "owner", "members", "persist", box=None, pad_edge=False)
    for channel in found:
        kind, owner = channel.channel_type.word, "" if channel.owner is None else str(channel.owner)
        table.add_row(channel.handler, kind, owner, str(len(channel.members)), str(channel.config.persist))
    stdout.print(table)


def checked(data_dir: str) -> str:
    """Return the data directory, or say that it is none."""
    from penstock.disk import disk_for

    found = disk_for(data_dir).stat(data_dir)
    if found is None or not found.is_folder:
        raise NotFoundError(f"{data_dir}: there is no such data directory")
    return data_dir.rstrip("/") or "/"


def log_of(folder: str) -> dict[str, Any]:
    """Return the first and last number of a channel's log, as far as they can be known."""
    from penstock.log.messagelog import MessageLogReader

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
