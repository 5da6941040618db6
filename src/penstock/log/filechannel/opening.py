"""What opening a queue for sending does first, under its lock: sweep, give it an id, find its end."""

from __future__ import annotations

import logging

from penstock.disk import Disk
from penstock.disk.doors import in_a_folder, refuse_foreign
from penstock.disk.posix import folder_of
from penstock.errors import CorruptionError, NotFoundError, OptionsError
from penstock.log.filechannel.group.clamp import clamp_groups
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.recover import NEW, Tail, clamp_cursors, find_tail, readable_cursors
from penstock.log.filechannel.segments import Folder
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

__all__ = ["make_folder", "find_end"]

logger = logging.getLogger(__name__)


def make_folder(disk: Disk, path: str, options: ChannelOptions) -> None:
    """Make the folder of a queue, or refuse if it is not there and not to be made."""
    refuse_foreign(disk, path, "queue")
    if options.create:
        with in_a_folder(path):
            disk.make_folder(path)
        if options.sync != "none":
            disk.sync_folder(folder_of(path))
    elif disk.stat(path) is None:
        raise NotFoundError(f"{path}: there is no channel here, and it is not to be created")


def find_end(disk: Disk, folder: Folder, sidecar: Sidecar, options: ChannelOptions) -> tuple[Tail, list[Problem]]:
    """Return where to write on, and what had to be trimmed or set aside for it; only under the lock."""
    for name in disk.list(folder.path):  # what a crash left half made
        if name == NEW or (name.startswith("segment.") and name.endswith(".z.ing")):
            disk.remove(f"{folder.path}/{name}")
    _identify(sidecar, options.content)
    tail, problems = find_tail(disk, folder, sidecar)
    clamp_groups(disk, sidecar, folder.path, tail.end, sure=not problems)
    if options.sync == "none":
        clamp_cursors(sidecar, tail.end, kept=False)  # without a mark nobody can tell their receivers later
        sidecar.remove_mark()  # with sync="none" the mark means nothing
    return tail, problems


def _identify(sidecar: Sidecar, content: str) -> None:
    """Give a queue of the original its id; receivers that had looked on before keep their places."""
    try:
        identity = sidecar.identity()
    except CorruptionError as exc:
        logger.warning("%s; the channel gets a new id", exc)
        identity = None
    if identity is None:
        cursors = readable_cursors(sidecar)
        sidecar.create_identity(content)
        for name, position in cursors.items():
            sidecar.write_cursor(name, position)
    elif content not in ("raw", identity.content):
        raise OptionsError(f"{sidecar.prefix}id: the records of this queue are {identity.content}, not {content}")
