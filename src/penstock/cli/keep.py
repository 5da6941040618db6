"""Backups of a whole node, and erasing what belongs to a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import PROBLEM, JsonOption, emit_json, stderr
from penstock.errors import NotFoundError, OptionsError

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example: penstock backup ./penstock-data /backup/2026-01-31")(backup)
    app.command(epilog="Example: penstock restore /backup/2026-01-31 ./penstock-data")(restore)
    app.command(epilog="Example: penstock erase ./penstock-data --key pump-7 --logs")(erase)


def backup(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data directory of a node, running or not.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder that is made.")],
    json: JsonOption = False,
) -> None:
    """Copy a whole node while it runs.

    The copy is read again and compared with the original, record by record, before it gets its name.
    """
    from penstock.node.backup import back_up
    from penstock.node.version import require_node

    require_node(data)
    report = back_up(data, target, lambda step: None if json else stderr.print(f"{step} …"))
    if json:
        emit_json(report)
        return
    records = sum(log.records for log in report.logs)
    stderr.print(f"{target}: {len(report.files)} files, {len(report.logs)} logs, {records} records", soft_wrap=True)
    for name in report.left_out:
        stderr.print(
            f"left out: {name}; it is made again from its log, or carried by penstock artifact", soft_wrap=True
        )


def restore(
    source: Annotated[str, typer.Argument(metavar="BACKUP", help="What penstock backup made.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data directory; it must not be there.")],
    json: JsonOption = False,
) -> None:
    """Bring a backup of a node back.

    What is restored is compared with what was backed up before it gets its name.
    """
    from penstock.node.backup import restore as bring_back

    report = bring_back(source, data, lambda step: None if json else stderr.print(f"{step} …"))
    if json:
        emit_json(report)
    else:
        stderr.print(f"{data}: restored as of {report.created}", soft_wrap=True)


def erase(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data directory of a node that is stopped.")],
    key: Annotated[str, typer.Option(help="Whose data are erased.")],
    logs: Annotated[
        bool, typer.Option("--logs", help="Rewrite logs too: records keep their numbers and lose their content.")
    ] = False,
    topic: Annotated[
        list[str] | None, typer.Option(help="A retained message of it under another topic; repeatable.")
    ] = None,
    lake: Annotated[
        list[str] | None, typer.Option(help="A Delta table with a column key; repeatable.", metavar="TABLE")
    ] = None,
    outside: Annotated[
        bool, typer.Option("--outside", help="Folds and logs outside of the data directory, too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Erase what belongs to a key.

    In folds, buckets and retained messages, with --logs in logs, with --lake in tables. Backups and shipped segments
    are not touched; they are named as not erased.
    """
    from penstock.node.erase import Erased, erase_key, left_behind
    from penstock.node.node import hold_data
    from penstock.node.version import require_node

    require_node(data)
    tables = {table: _table_with_keys(table) for table in lake or ()}  # before anything is erased
    with hold_data(data):
        found = erase_key(data, key, logs=logs, topics=topic or (), outside=outside)
        left = left_behind(data, logs=logs, outside=outside)
    for table, opened in tables.items():
        done = opened.delete(f"key = '{key.replace(chr(39), chr(39) * 2)}'")
        found.append(Erased(table, "lake", int(done.get("num_deleted_rows") or 0)))
    for one in (*found, *left):
        if json:
            emit_json(one)
        else:
            told = f"{one.count} erased" if isinstance(one, Erased) else f"not erased: {one.left}"
            stderr.print(f"{one.place}: {told}", soft_wrap=True)
    if not all(isinstance(one, Erased) for one in found):
        raise typer.Exit(PROBLEM)


def _table_with_keys(table: str) -> DeltaTable:
    from penstock.spark.lake.opening import open_table

    opened = open_table(table)
    if opened is None:
        raise NotFoundError(f"{table}: there is no table here")
    if all(field.name != "key" for field in opened.schema().fields):
        raise OptionsError(f"{table}: it has no column key")
    return opened
