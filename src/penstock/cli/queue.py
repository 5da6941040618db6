"""Commands for queues: send, recv, compact, gc, repair.  Data on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.batch import payload_text
from penstock.errors import Backpressure, ClosedError, PenstockError
from penstock.log.filechannel import ChannelOptions, FileChannel, repair
from penstock.log.filechannel.receiver import Receiver
from penstock.log.options import SyncMode

__all__ = ["register"]

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the channel")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object a line")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command("send")(send)
    app.command("recv")(recv)
    app.command("compact")(compact)
    app.command("gc")(gc)
    app.command("repair")(repair_folder)


def send(
    folder: Folder,
    text: Annotated[list[str] | None, typer.Argument(help="messages; - or none: a message a line of stdin")] = None,
    sync: Annotated[str, typer.Option(help="none, interval or always: when it survives a power cut")] = "always",
    json: Json = False,
) -> None:
    """Send messages into a channel, made if it is not there.

    Example: penstock send jobs "resize 7.jpg" "resize 8.jpg"
    """
    with _problems(), FileChannel.open(folder, _options(sync)) as channel:
        if text and text != ["-"]:
            positions = channel.append_many([one.encode("utf-8", "surrogateescape") for one in text]).tolist()
        else:
            positions = []
            while lines := sys.stdin.buffer.readlines(1 << 20):
                positions += channel.append_many([line.removesuffix(b"\n") for line in lines]).tolist()
        if json:
            _print({"sent": len(positions), "positions": positions, "next_position": channel.stats().write_position})
        else:
            typer.echo(f"{len(positions)} sent", err=True)


def recv(
    folder: Folder,
    ack: Annotated[bool, typer.Option("--ack", help="acknowledge each message once it is printed")] = False,
    name: Annotated[str | None, typer.Option(help="go on where the receiver of this name stopped")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="stop after so many")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="stop after so many seconds without any")] = None,
    skip_damage: Annotated[bool, typer.Option("--skip-damage", help="report damage and go on behind it")] = False,
    json: Json = False,
) -> None:
    """Print messages as they come, also while another process sends.

    Without --name everything is printed from the first message on and nothing is remembered.  With --name and --ack
    the next call goes on behind the last message that was printed.

    Example: penstock recv jobs --name worker --ack --limit 10 --timeout 5 --json
    """
    if ack and name is None:
        typer.echo("--ack needs --name: there is nothing else to remember it by", err=True)
        raise typer.Exit(2)
    with _problems(), FileChannel.attach(folder) as view:
        damage = "skip" if skip_damage else "raise"
        rx: Receiver
        if name is None:
            rx = view.rx(on_damage=damage)  # type: ignore[arg-type]
        else:
            rx = acked = view.ack_rx(name, on_damage=damage)  # type: ignore[arg-type]
        left = limit
        while left is None or left > 0:
            batch = rx.recv_many(1024 if left is None else min(left, 1024), timeout)
            if not len(batch):
                break
            for record in batch:
                if json:
                    key, value = payload_text(record.payload)
                    _print({"position": record.position, "timestamp_ns": None, "kind": None, key: value})
                else:
                    sys.stdout.buffer.write(bytes(record.payload) + b"\n")
            sys.stdout.flush()
            sys.stdout.buffer.flush()
            if ack:
                acked.ack()  # after the lines have left this process, never before
            left = None if left is None else left - len(batch)
        for problem in rx.problems:
            typer.echo(str(problem), err=True)
        if rx.problems:
            raise typer.Exit(1)


def compact(folder: Folder, json: Json = False) -> None:
    """Compress the sealed segments now, all but the newest of them.

    Example: penstock compact jobs
    """
    with _problems(), FileChannel.open(folder, _options("interval", collect=False)) as channel:
        before = channel.stats().disk_bytes
        channel.compact()
        after = channel.stats().disk_bytes
        if json:
            _print({"bytes_before": before, "bytes_after": after})
        else:
            typer.echo(f"{before} bytes before, {after} after", err=True)


def gc(folder: Folder, json: Json = False) -> None:
    """Remove the segments that every named receiver has acknowledged.

    Example: penstock gc jobs
    """
    with _problems(), FileChannel.open(folder, _options("interval", collect=False, compression="none")) as channel:
        removed = channel.gc()
        if json:
            _print({"removed": removed, "first_position": channel.stats().first_position})
        else:
            typer.echo(f"{removed} segments removed", err=True)


def repair_folder(folder: Folder, json: Json = False) -> None:
    """Make a sound channel of what is whole in a damaged one; what is not is kept beside it as .bad.

    Example: penstock repair jobs
    """
    with _problems():
        problems = repair(folder)
        if json:
            _print({"mended": [msgspec.to_builtins(problem) for problem in problems]})
        else:
            for problem in problems:
                typer.echo(str(problem), err=True)
            typer.echo(f"{len(problems)} problems mended" if problems else "nothing to mend", err=True)


def _options(sync: str, *, collect: bool = True, compression: str = "snappy") -> ChannelOptions:
    mode: SyncMode = sync  # type: ignore[assignment]  # checked by the options themselves
    return ChannelOptions(sync=mode, collect=collect, compression=compression)  # type: ignore[arg-type]


def _print(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


class _problems:  # noqa: N801 - it reads as what it does: with _problems(): …
    """Turn errors into one line on stderr: 2 for wrong use, 1 for everything else."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, exc: BaseException | None, tb: object) -> None:
        if isinstance(exc, (PenstockError, OSError)):
            typer.echo(str(exc), err=True)
            wrong_use = isinstance(exc, ValueError) and not isinstance(exc, (Backpressure, ClosedError))
            raise typer.Exit(2 if wrong_use else 1) from exc
