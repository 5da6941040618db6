"""Commands for queues: send, recv, forget, compact, gc, repair."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import PROBLEM, JsonOption, counted, emit_json, emit_lines, say_plain, stderr
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from penstock.log.filechannel import ChannelOptions, Receiver

__all__ = ["register"]

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the queue.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog='Example: penstock send jobs "resize 7.jpg" "resize 8.jpg"')(send)
    app.command(epilog="Example: penstock recv jobs --group resizers --lease 60 --ack --limit 10 --timeout 5 --json")(
        recv
    )
    app.command(epilog="Example: penstock forget jobs worker")(forget)
    app.command(epilog="Example: penstock compact jobs")(compact)
    app.command(epilog="Example: penstock gc jobs")(gc)
    app.command(epilog="Example: penstock repair jobs")(repair)


def send(
    folder: Folder,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Messages; - or none: a message a line of stdin.")
    ] = None,
    sync: Annotated[str, typer.Option(help="When it survives a power cut: none, interval or always.")] = "always",
    json: JsonOption = False,
) -> None:
    """Send messages into a queue, made if need be.

    Any number of processes may send at the same time.
    """
    from penstock.log.filechannel import FileChannel

    _require_queue(folder, make=True)
    with FileChannel.share(folder, _options(sync)) as channel:
        if text and text != ["-"]:
            positions = channel.append_many([one.encode("utf-8", "surrogateescape") for one in text]).tolist()
        else:
            positions = []
            while lines := sys.stdin.buffer.readlines(1 << 20):
                positions += channel.append_many([line.removesuffix(b"\n") for line in lines]).tolist()
        end = channel.stats().write_position
    if json:
        emit_json({"sent": len(positions), "positions": positions, "next_position": end})
    else:
        stderr.print(f"{len(positions)} sent")


def recv(
    folder: Folder,
    ack: Annotated[bool, typer.Option("--ack", help="Acknowledge each message once it is printed.")] = False,
    name: Annotated[str | None, typer.Option(help="Go on where the receiver of this name stopped.")] = None,
    group: Annotated[str | None, typer.Option(help="Share the messages with the other workers of this group.")] = None,
    lease: Annotated[
        float | None,
        typer.Option(min=0.001, help="With --group: seconds a message is this worker's own. [default: 30]"),
    ] = None,
    max_tries: Annotated[
        int | None,
        typer.Option(min=0, help="With --group: tries before a message is a dead letter. [default: 0, never]"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Stop after so many seconds without any.")] = None,
    skip_damage: Annotated[bool, typer.Option("--skip-damage", help="Report damage and go on behind it.")] = False,
    json: JsonOption = False,
) -> None:
    """Print messages as they come, also while another process sends.

    Without --name everything is printed from the first message on and nothing is remembered.
    With --name and --ack the next call goes on behind the last message that was printed.
    With --group each message goes to one of the workers; without --ack it comes again when its lease
    has ended, unless penstock queue ack was called meanwhile.  Leases are renewed while this command runs.
    """
    from penstock.cli.groups import receive_as_worker
    from penstock.cli.records import print_rows, rows_of
    from penstock.log.filechannel import FileChannel

    if group is not None:
        if name is not None:
            raise OptionsError("--group and --name exclude each other")
        receive_as_worker(
            folder, group, lease=30.0 if lease is None else lease, ack=ack, limit=limit, timeout=timeout,
            max_tries=max_tries or 0, skip_damage=skip_damage, json=json,
        )  # fmt: skip
        return
    for option, value in (("--lease", lease), ("--max-tries", max_tries)):
        if value is not None:
            raise OptionsError(f"{option} needs --group")
    if ack and name is None:
        raise OptionsError("--ack needs --name or --group: there is nothing else to remember it by")
    with FileChannel.attach(folder) as view:
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
            if json:
                print_rows(rows_of(batch), json=True)
            else:
                emit_lines(payload + b"\n" for payload in batch.to_payloads())
            if ack:
                acked.ack()  # after the lines have left this process, never before
            left = None if left is None else left - len(batch)
        for problem in rx.problems:
            say_plain(str(problem))
        if rx.problems:
            raise typer.Exit(PROBLEM)


def forget(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The receiver that will not come back.")],
    json: JsonOption = False,
) -> None:
    """Remove a named receiver; nothing more is kept for it."""
    from penstock.log.filechannel import FileChannel

    with FileChannel.attach(folder) as view:
        view.forget(name)
    if json:
        emit_json({"forgotten": name})
    else:
        say_plain(f"{name} is forgotten")


def compact(folder: Folder, json: JsonOption = False) -> None:
    """Compress the sealed segments of a queue, all but the newest."""
    from penstock.disk import disk_for
    from penstock.log.filechannel import FileChannelLog
    from penstock.log.filechannel.group.dead import open_when_free

    _require_queue(folder)
    with FileChannelLog(folder) as log:  # before it is opened, which begins to compress
        before = log.stat()["bytes"]
    with open_when_free(folder, _options("interval", collect=False), disk_for(folder)) as channel:
        channel.compact()
        after = channel.stats().disk_bytes
    if json:
        emit_json({"bytes_before": before, "bytes_after": after})
    else:
        stderr.print(f"{before:,} bytes before, {after:,} after")


def gc(folder: Folder, json: JsonOption = False) -> None:
    """Remove what every named receiver of a queue has acknowledged."""
    from penstock.disk import disk_for
    from penstock.log.filechannel.group.dead import open_when_free

    _require_queue(folder)
    with open_when_free(folder, _options("interval", collect=False, compression="none"), disk_for(folder)) as channel:
        removed = channel.gc()
        first = channel.stats().first_position
    if json:
        emit_json({"removed": removed, "first_position": first})
    else:
        stderr.print(f"{counted(removed, 'segment')} removed")


def repair(folder: Folder, json: JsonOption = False) -> None:
    """Mend a damaged queue; what is not whole is kept aside as .bad."""
    from penstock.log.filechannel import repair as mend

    _require_queue(folder)
    problems = mend(folder)
    counts = {"kept": problems.kept, "set_aside": problems.aside, "set_aside_bytes": problems.aside_bytes}
    if json:
        emit_json({"mended": list(problems), **counts})
        return
    for problem in problems:
        say_plain(str(problem))
    stderr.print(f"{counted(len(problems), 'problem')} mended" if problems else "nothing to mend")
    if problems:
        aside = f"{counted(problems.aside, 'message')} and {counted(problems.aside_bytes, 'byte')}"
        stderr.print(f"{counted(problems.kept, 'message')} kept; {aside} of others lie in .bad files")


def _require_queue(folder: str, *, make: bool = False) -> None:
    """Refuse what is no queue, because opening it would make one there; with ``make`` only what is something else."""
    from penstock.log.detect import detect

    try:
        found = detect(folder)
    except OptionsError:
        if make:
            return
        raise
    if found != "filechannel":
        what = "a file" if os.path.isfile(folder) else f"a log of format {found}"
        raise OptionsError(f"{folder}: this is {what}, not a queue")


def _options(sync: str, *, collect: bool = True, compression: str = "snappy") -> ChannelOptions:
    from penstock.log.filechannel import ChannelOptions

    return ChannelOptions(sync=sync, collect=collect, compression=compression)  # type: ignore[arg-type]  # they check
