"""Replace a file by new bytes so that a crash leaves either the old file or the new one, whole."""

from __future__ import annotations

import contextlib

from penstock.disk.face import Disk
from penstock.disk.posix import folder_of

__all__ = ["save_atomically"]


def save_atomically(disk: Disk, path: str, data: bytes, *, temporary: str | None = None) -> None:
    """Write a temporary file beside ``path``, fsync, rename over ``path``, fsync the folder.

    When it returns the new bytes survive a power cut.  When it raises, ``path`` is as it was, unless
    only the last fsync failed: then it is new but may not survive.  ``temporary`` names the file to
    use where a format fixes it; a leftover of that name is replaced.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> save_atomically(disk, "settings", b"{}")
    >>> disk.list("."), disk.open("settings").read_at(0, 9)
    (['settings'], b'{}')
    """
    temporary = temporary or path + ".tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(temporary)
        with disk.create(temporary) as file:
            file.write_at(0, data)
            file.sync()
        disk.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    disk.sync_folder(folder_of(path))
