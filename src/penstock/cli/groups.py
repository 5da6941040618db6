"""penstock queue: the groups of a queue, their leases and their dead letters; and what ``recv --group`` does."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import PROBLEM, JsonOption, counted, emit_json, emit_lines, print_facts, say_plain, stderr

if TYPE_CHECKING:
    from penstock.log.filechannel import Group, GroupStats, Jobs

__all__ = ["register", "receive_as_worker"]

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the queue.")]
Name = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group.")]
Positions = Annotated[list[int], typer.Argument(metavar="POSITION", help="Messages, as recv --group printed them.")]
AT_ONCE = 64


def register(app: typer.Typer) -> None:
    """Add the group ``penstock queue``."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Look after the groups of workers that share a queue.",
        epilog="Example: penstock queue stat jobs --json",
    )
    group.command(epilog="Example: penstock queue stat jobs --json")(stat)
    group.command(epilog="Example: penstock queue ack jobs resizers 0 24")(ack)
    group.command(epilog='Example: penstock queue fail jobs resizers 24 --delay 60 --reason "no such picture"')(fail)
    group.command(epilog="Example: penstock queue dead jobs resizers --json")(dead)
    group.command(epilog="Example: penstock queue redrive jobs resizers --limit 10")(redrive)
    group.command(epilog="Example: penstock queue forget jobs resizers")(forget)
    app.add_typer(group, name="queue")


def receive_as_worker(
    folder: str, name: str, *, lease: float, ack: bool, limit: int | None, timeout: float | None, max_tries: int,
    skip_damage: bool, json: bool,
) -> None:  # fmt: skip
    """Take messages as one worker of a group and print them."""
    from penstock.log.filechannel import FileChannel

    with FileChannel.attach(folder) as view:
        options: dict[str, Any] = {"lease_seconds": lease, "max_tries": max_tries}
        group = view.group(name, on_damage="skip" if skip_damage else "raise", **options)
        left, held = limit, []
        while left is None or left > 0:
            jobs = group.take_many(AT_ONCE if left is None else min(left, AT_ONCE), timeout)
            if not jobs:
                break
            _print(jobs, json=json)
            if ack:
                jobs.ack()  # after the lines have left this process, never before
            else:
                held.append(jobs)  # for the heartbeat, which renews what somebody holds
            left = None if left is None else left - len(jobs)
        group.close(give_back=ack)
        for problem in group.problems:
            say_plain(str(problem))
        if group.problems:
            raise typer.Exit(PROBLEM)


def stat(folder: Folder, json: JsonOption = False) -> None:
    """Tell what waits, is in work and is dead.

    For each group, with whom.

    Without a group all messages of the queue wait.
    """
    from penstock.disk import disk_for
    from penstock.log.filechannel import FileChannelLog
    from penstock.log.filechannel.group.stats import count_unread, group_names, look_at_group
    from penstock.log.filechannel.segments import Folder as Segments

    with FileChannelLog(folder) as log:
        known = log.stat()
    disk = disk_for(folder)
    now, now_ns = time.monotonic(), time.time_ns()
    looked = (look_at_group(disk, folder, name, now, now_ns) for name in group_names(disk, folder))
    groups = [one for one in looked if one is not None]
    total = {
        name: sum(getattr(one, name) for one in groups) for name in ("waiting", "delayed", "leased", "dead")
    }  # fmt: skip
    positions = [one.oldest_position for one in groups if one.oldest_position is not None]
    if not groups:
        total["waiting"] = count_unread(Segments(disk, folder), 0, None)
        positions = [known["first_position"]] if total["waiting"] else []
    workers = Counter[str]()
    for one in groups:
        workers.update(one.workers)
    facts = {
        "path": folder,
        **total,
        "oldest_position": min(positions, default=None),
        "oldest_seconds": max((one.oldest_seconds for one in groups if one.oldest_seconds is not None), default=None),
        "workers": dict(sorted(workers.items())),
        "next_position": known["next_position"],
        "bytes": known["bytes"],
        "groups": {one.group: _figures(one) for one in groups},
        "receivers": {name: at for name, at in known["receivers"].items() if not name.startswith("group.")},
    }
    if json:
        emit_json(facts)
        return
    lines: dict[str, str | list[str]] = {name: f"{facts[name]:,}" for name in ("waiting", "delayed", "leased", "dead")}
    for one in groups:
        oldest_told = "nothing" if one.oldest_position is None else f"position {one.oldest_position}"
        if one.oldest_seconds is not None:
            oldest_told += f", {one.oldest_seconds:.1f} s in work"
        told = f"waiting {one.waiting:,}, delayed {one.delayed:,}, leased {one.leased:,}, dead {one.dead:,}"
        busy = [f"  {worker}: {count:,}" for worker, count in one.workers.items()]
        lines[f"group {one.group}"] = [f"{told}; oldest: {oldest_told}", *busy]
    print_facts(lines)


def ack(folder: Folder, name: Name, positions: Positions, json: JsonOption = False) -> None:
    """Say that the work on messages is done.

    Those which recv --group printed without --ack.
    """
    _settle(folder, name, positions, lambda jobs: jobs.ack(), "acknowledged", json=json)


def fail(
    folder: Folder,
    name: Name,
    positions: Positions,
    delay: Annotated[float | None, typer.Option(min=0, help="Seconds until they come again; grows otherwise.")] = None,
    reason: Annotated[str, typer.Option(help="Why: it is shown among the dead letters.")] = "",
    max_tries: Annotated[int, typer.Option("--max-tries", min=0, help="Tries before they are dead; 0: never.")] = 0,
    json: JsonOption = False,
) -> None:
    """Say that the work on messages failed.

    They come again, or are dead.
    """
    _settle(folder, name, positions, lambda jobs: jobs.fail(delay, reason), "failed", json=json, max_tries=max_tries)


def dead(folder: Folder, name: Name, json: JsonOption = False) -> None:
    """Print the dead letters of a group.

    Messages that failed too often, with why, when and how often.
    """
    from penstock.cli.records import readable
    from penstock.disk import disk_for
    from penstock.log.filechannel.group.dead import dead_letters, dead_path

    _require_group(folder, name)
    for _, letter in dead_letters(disk_for(folder), dead_path(folder, name)):
        facts = {"position": letter.position, "tries": letter.tries, "reason": letter.reason, "time_ns": letter.time_ns}
        if json:
            emit_json({**facts, **readable("payload", letter.payload)})
        else:
            head = f"{letter.position:>14}  {letter.tries} tries  {letter.reason}  "
            emit_lines([head.encode() + letter.payload + b"\n"])


def redrive(
    folder: Folder,
    name: Name,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest first.")] = None,
    json: JsonOption = False,
) -> None:
    """Send the dead letters of a group again.

    They go to their queue: everyone who reads it sees them.
    """
    with _part_of(folder, name) as group:
        done = group.redrive(limit)
    if json:
        emit_json({"redriven": done})
    else:
        stderr.print(f"{counted(done, 'message')} sent again")


def forget(folder: Folder, name: Name, json: JsonOption = False) -> None:
    """Remove a group that nobody works for.

    Nothing more is kept for it, but its dead letters.
    """
    from penstock.log.filechannel import FileChannel

    with FileChannel.attach(folder) as view:
        view.forget_group(name)
    if json:
        emit_json({"forgotten": name})
    else:
        stderr.print(f"{name} is forgotten", highlight=False)


def _settle(
    folder: str, name: str, positions: list[int], settle: Any, told: str, *, json: bool, max_tries: int = 0
) -> None:
    with _part_of(folder, name, max_tries=max_tries) as group:
        settle(group.in_work(positions))
    if json:
        emit_json({told: positions})
    else:
        stderr.print(f"{counted(len(positions), 'message')} {told}")


def _part_of(folder: str, name: str, **options: Any) -> Group:
    """Return a part in a group that is there."""
    from penstock.log.filechannel import FileChannel

    _require_group(folder, name)
    return FileChannel.attach(folder).group(name, heartbeat=False, any_order=True, **options)


def _require_group(folder: str, name: str) -> None:
    from penstock.disk import disk_for
    from penstock.errors import NotFoundError, OptionsError
    from penstock.log.filechannel.group.stats import group_names

    disk = disk_for(folder)
    if disk.stat(folder) is None:
        raise NotFoundError(f"{folder}: there is no channel here")
    if name not in group_names(disk, folder):
        raise OptionsError(f"{folder}: there is no group named {name!r}")


def _figures(one: GroupStats) -> dict[str, Any]:
    return {
        "waiting": one.waiting,
        "delayed": one.delayed,
        "leased": one.leased,
        "dead": one.dead,
        "oldest_position": one.oldest_position,
        "oldest_seconds": one.oldest_seconds,
        "workers": one.workers,
        "next_position": one.next_position,
    }


def _print(jobs: Jobs, *, json: bool) -> None:
    from penstock.cli.records import print_rows, readable

    if json:
        rows = ({"position": job.position, "tries": job.tries, **readable("payload", job.payload)} for job in jobs)
        print_rows(rows, json=True)
    else:
        emit_lines(job.payload + b"\n" for job in jobs)
