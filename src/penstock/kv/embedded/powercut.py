"""What a power cut leaves in the log of a bucket: a device may write later pages and lose earlier ones.

Then intact changes lie behind a hole, which is damage by the rules of the log.  A bucket is as some write left it, so
they do not count, if three things are so: nobody has written in this boot (``head`` says in which the last one did),
the hole begins at or behind the durable mark, and the log is as it was when this was found out, now under its lock.
"""

from __future__ import annotations

from typing import Final

from penstock.disk import Disk
from penstock.disk.plain import boot_id_of
from penstock.errors import CorruptionError
from penstock.log.messagelog import MessageLogOptions, MessageLogReader
from penstock.log.messagelog.shared import SharedLog
from penstock.log.sidecar import Sidecar

__all__ = ["HoleError", "encode_head", "cut_hole", "lost_power"]

REVISION_BYTES: Final = 8
BOOT_BYTES: Final = 16


class HoleError(CorruptionError):
    """Changes are missing from the log of a bucket, from revision ``missing`` up to ``found``, which is there."""

    def __init__(self, path: str, missing: int, found: int) -> None:
        super().__init__(path, 0, f"the changes from revision {missing} to {found - 1} are missing from the log")
        self.missing, self.found = missing, found


def encode_head(revision: int, boot: bytes) -> bytes:
    """Return the bytes of ``head``: the newest revision, and the boot it was written in.

    >>> encode_head(7, bytes(16)).hex()
    '070000000000000000000000000000000000000000000000'
    """
    return revision.to_bytes(REVISION_BYTES, "little") + boot


def lost_power(folder: str, disk: Disk, hole: HoleError) -> bool:
    """Whether a hole in the log can be what a power cut has left: not of this boot, and never synced."""
    try:
        with disk.open(f"{folder}/head") as file:
            boot = file.read_at(REVISION_BYTES, BOOT_BYTES)
    except FileNotFoundError:
        boot = b""
    durable = Sidecar(disk, f"{folder}/log/penstock-").durable_position()
    now = boot_id_of(disk)
    return now is not None and boot != now and (durable is None or hole.missing >= durable)


def cut_hole(folder: str, disk: Disk, options: MessageLogOptions, hole: HoleError) -> None:
    """Set aside what lies behind a hole, unless another process has done so."""
    log = SharedLog(f"{folder}/log", disk, options)
    try:
        with log.turn():
            with MessageLogReader(f"{folder}/log", disk) as reader:
                batch = reader.read(hole.missing, 1)
                behind = len(batch) > 0 and int(batch.positions[0]) > hole.missing
            if behind and lost_power(folder, disk, hole):
                log.set_aside_behind(hole.missing)
    finally:
        log.close()
