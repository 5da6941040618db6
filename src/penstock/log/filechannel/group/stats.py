"""Where a group stands: for people, and for `penstock queue stat`."""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.disk import Disk
from penstock.errors import CorruptionError
from penstock.log.filechannel.group.core import GroupCore
from penstock.log.filechannel.group.dead import dead_letters, dead_path
from penstock.log.filechannel.segments import Folder, Walk
from penstock.log.options import DEFAULT_LIMIT

__all__ = ["GroupStats", "count_unread", "summarise", "group_names", "look_at_group"]


class GroupStats(msgspec.Struct, frozen=True):
    """How many messages of a group wait, are in work, or lie among the dead letters.

    >>> summarise(GroupCore(start=0), "resizers", unread=7, dead=0, now=0.0, now_ns=0).waiting
    7
    """

    group: str
    waiting: int
    """Not handed out at the moment and free to be, or held back only by their key."""
    delayed: int
    """Failed, and waiting for their delay to end."""
    leased: int
    """In work."""
    dead: int
    """Among the dead letters and not sent again."""
    oldest_position: int | None
    """The position of the oldest message that is not finished; None when all are."""
    oldest_seconds: float | None
    """For how long it has been in work, first handed out until now; None when nobody had it yet."""
    workers: dict[str, int]
    """How many messages each worker has in work."""
    next_position: int
    """From here on nobody has read."""


def summarise(core: GroupCore, name: str, unread: int, dead: int, now: float, now_ns: int) -> GroupStats:
    """Return the figures of a group at one moment."""
    leased = [entry for entry in core.entries.values() if entry.leased and entry.until > now]
    delayed = sum(not entry.leased and entry.until > now for entry in core.entries.values())
    unfinished = len(core.entries) + unread
    oldest = core.entries.get(core.floor)
    return GroupStats(
        group=name,
        waiting=unfinished - len(leased) - delayed,
        delayed=delayed,
        leased=len(leased),
        dead=dead,
        oldest_position=core.floor if unfinished else None,
        oldest_seconds=max(0.0, (now_ns - oldest.first_ns) / 1e9) if oldest is not None and oldest.first_ns else None,
        workers=dict(sorted(Counter(entry.worker for entry in leased).items())),
        next_position=core.next,
    )


def count_unread(folder: Folder, position: int, bound: int | None) -> int:
    """Count the messages from ``position`` on: this reads them, up to the first damage."""
    walk, count = Walk(folder), 0
    try:
        position = max(position, folder.first_position())
        while len(batch := walk.read(position, DEFAULT_LIMIT, bound)):
            count += len(batch)
            position = batch.next_position
    except CorruptionError:
        pass
    finally:
        walk.close()
    return count


def group_names(disk: Disk, path: str) -> list[str]:
    """Return the names of the groups of a queue."""
    start = "penstock-group-"
    names = (name.removeprefix(start) for name in disk.list(path) if name.startswith(start))
    return sorted(name for name in names if not name.endswith(("~", ".bad")))


def look_at_group(disk: Disk, path: str, name: str, now: float, now_ns: int) -> GroupStats | None:
    """Return the figures of a group without taking part in it, and without writing anything; None if there is none."""
    from penstock.log.filechannel.group.journal import read_journal

    found = read_journal(disk, f"{path}/penstock-group-{name}")
    if found is None:
        return None
    core, snapshot = found
    if snapshot.boot != disk.boot_id():
        core.start_again(now, now_ns)
    unread = count_unread(Folder(disk, path), core.next, None)
    dead = sum(1 for _ in dead_letters(disk, dead_path(path, name)))
    return summarise(core, name, unread, dead, now, now_ns)
