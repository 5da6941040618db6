"""Which file of a channel its writer holds: the newest, and the next one from before it is used."""

from __future__ import annotations

import contextlib

from penstock.disk import Disk, Owned
from penstock.log.xchannel.files import discover
from penstock.log.xchannel.format import file_path

__all__ = ["newest_file", "own_newest"]


def newest_file(disk: Disk, base: str) -> str | None:
    """Return the path of the newest file of a channel, None when there is none."""
    sequences = discover(disk, base, making=True)
    return file_path(base, sequences[-1]) if sequences else None


def own_newest(disk: Disk, base: str) -> Owned:
    """Take the newest file of a channel; LockedError if someone has it, by whatever name."""
    owned = Owned(disk, base)
    with contextlib.suppress(FileNotFoundError):  # its writer is at work: the lock beside it says so
        owned.take(newest_file(disk, base))
    return owned
