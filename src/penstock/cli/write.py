"""The command that writes to any log."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import emit_json, stderr
from penstock.errors import NotFoundError, OptionsError

if TYPE_CHECKING:
    from penstock.log.face import LogWriter

__all__ = ["register"]

CHUNK = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog="Example: producer | penstock write ticks --kind 1")(write)


def write(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A log; made if it is not there.")],
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Records; - or none: a record a line of stdin.")
    ] = None,
    kind: Annotated[int, typer.Option(min=0, help="What kind of record it is, where the format keeps one.")] = 0,
    key: Annotated[str | None, typer.Option(help="Write envelopes with this key, for folds and Spark.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="With --key: say that the key is gone.")] = False,
    format: Annotated[
        str | None, typer.Option(help="xchannel, messagelog or filechannel. [default: what is there; xchannel if new]")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="Hand them to a running node: its data directory, socket or HOST:PORT.", metavar="NODE"),
    ] = None,
    sync: Annotated[bool, typer.Option("--sync/--no-sync", help="Leave when it survives a power cut.")] = True,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Append records to a log.

    Each is visible to readers at once. A log has one writer at a time: while another process writes it, this says so.

    With --node, PATH is a channel of that node, which writes for any number of producers.
    """
    from penstock.log.envelope import CONTENT, Envelope, encode_envelope
    from penstock.types import Op

    if delete and (key is None or text):
        raise OptionsError("--delete needs --key and no text: what is deleted is the key")
    content = "raw" if key is None else CONTENT
    if node is not None and format is not None:
        raise OptionsError("--format: a node knows how its channels are kept")
    raw_key = (key or "").encode("utf-8", "surrogateescape")
    count, first, last = 0, None, None
    writer = _open(path, format, content) if node is None else _reach(node, path, content)
    try:
        for lines in [[b""]] if delete else _texts(text):
            records = lines
            if key is not None:
                op = Op.DELETE if delete else Op.PUT
                records = [encode_envelope(Envelope(raw_key, line, op)) for line in lines]
            positions = writer.append_many(records, kind=kind)
            count, last = count + len(records), int(positions[-1])
            first = int(positions[0]) if first is None else first
        if sync:
            writer.sync()
    finally:
        writer.close()
    if json:
        emit_json({"written": count, "first_position": first, "last_position": last})
    else:
        stderr.print(f"{count} written")


def _open(path: str, format: str | None, content: str) -> LogWriter:
    """Open a log for writing, made if it is not there."""
    from penstock.log.detect import detect, open_log, open_writer

    try:
        kept_as = format or detect(path)
        with open_log(path, format=kept_as) as log:
            found = log.stat().get("content", "raw")
        if found != content:
            raise OptionsError(f"{path}: its content is {found}; {'leave out' if content != 'raw' else 'give'} --key")
    except NotFoundError:
        kept_as = format or "xchannel"
    return open_writer(path, format=kept_as, content=content)


def _reach(node: str, channel: str, content: str) -> LogWriter:
    """Return what hands records to a node."""
    from penstock.node.ingest.client import IngestWriter

    return IngestWriter(node, channel, content=content, timeout=10.0)


def _texts(text: list[str] | None) -> Iterator[list[bytes]]:
    if text and text != ["-"]:
        yield [one.encode("utf-8", "surrogateescape") for one in text]
        return
    for lines in itertools.takewhile(bool, (sys.stdin.buffer.readlines(CHUNK) for _ in itertools.count())):
        yield [line.removesuffix(b"\n") for line in lines]
