"""Groups of a queue that lost its end: what comes at those positions next has not been seen by any worker.

Whoever opens the queue for sending does this before it sends: a group that was opened only later could not tell the new
messages from the ones it remembers.
"""

from __future__ import annotations

import contextlib
import logging

from penstock import kernel
from penstock.disk import Disk, save_atomically
from penstock.errors import CorruptionError
from penstock.log.filechannel.format import FRAME_HEAD
from penstock.log.filechannel.group.format import encode_event
from penstock.log.filechannel.group.journal import read_journal, snapshot_of, split
from penstock.log.filechannel.group.state import TURN_SECONDS, group_turns, journal_path, safe_bound
from penstock.log.filechannel.group.stats import group_names
from penstock.log.filechannel.segments import Folder
from penstock.log.sidecar import Sidecar

__all__ = ["clamp_groups"]

logger = logging.getLogger(__name__)


def clamp_groups(disk: Disk, sidecar: Sidecar, path: str, end: int, *, sure: bool) -> None:
    """Let every group forget what it knows of positions at or behind ``end``.

    ``sure`` when the end was found whole: then only a group of an earlier life of the machine can know more.
    """
    names, folder = group_names(disk, path), Folder(disk, path)
    newest = folder.newest_bound() if names else None
    bounds: dict[int, int] = {}  # thousands of groups stand at few positions
    for name in names:
        journal = journal_path(sidecar, name)
        with contextlib.suppress(CorruptionError):  # whoever opens the group sets it aside
            if not sure or _boot_of(disk, journal) != disk.boot_id():
                _clamp(disk, sidecar, name, folder, newest, end, bounds)


def _clamp(
    disk: Disk,
    sidecar: Sidecar,
    name: str,
    folder: Folder,
    newest: tuple[int, int] | None,
    end: int,
    bounds: dict[int, int],
) -> None:
    path = folder.path
    turns = group_turns(disk, sidecar, name, path)
    turns.take(TURN_SECONDS)
    try:
        found = read_journal(disk, journal_path(sidecar, name))
        if found is None:
            return
        core, snapshot = found
        bound = bounds.get(core.next, -1)
        if bound < 0:
            bound = bounds[core.next] = safe_bound(folder, newest, core.next, lambda: end, end)
        if bound >= core.next:
            return
        logger.warning("%s: group %r had read up to %d, it goes on at %d", path, name, core.next, bound)
        core.cut(bound)
        message = encode_event(core.snapshot(snapshot.log_id, snapshot.boot))
        save_atomically(disk, journal_path(sidecar, name), kernel.encode_frame(message))
    finally:
        turns.release()
        turns.close()


def _boot_of(disk: Disk, journal: str) -> bytes:
    """Return in which life of the machine the snapshot of a journal was written; reads that record alone."""
    with disk.open(journal) as file:
        head = file.read_at(0, FRAME_HEAD)
        messages, _ = split(head + file.read_at(FRAME_HEAD, int.from_bytes(head[:4], "big")))
    return snapshot_of(journal, messages).boot
