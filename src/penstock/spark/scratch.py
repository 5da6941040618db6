"""The folder that belongs to one running session: its settings, the JVM's output, and Spark's temporary files.

It is removed when the process ends.  A process that was killed cannot do that; so each holds a lock in its folder, and
the next session that starts removes the folders whose lock nobody holds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat as stat_bits
import tempfile
from typing import Final

from penstock.disk import Lock, disk_for
from penstock.errors import LockedError

__all__ = ["TEMPORARY", "make_scratch", "remove_abandoned"]

PREFIX: Final = "penstock-spark-"
LOCK: Final = "lock"
TEMPORARY: Final = "tmp"
_held: dict[str, Lock] = {}


def make_scratch() -> str:
    """Make the folder of a session and return its path, after removing what killed processes have left.

    >>> import os
    >>> os.path.isdir(os.path.join(make_scratch(), TEMPORARY))
    True
    """
    remove_abandoned()
    # It gets its name when its lock is held: another session that starts now must not take it for abandoned.
    unnamed = tempfile.mkdtemp(prefix=f".{PREFIX}")
    held = disk_for(unnamed).lock(os.path.join(unnamed, LOCK))
    os.mkdir(os.path.join(unnamed, TEMPORARY))
    folder = os.path.join(os.path.dirname(unnamed), os.path.basename(unnamed)[1:])
    os.rename(unnamed, folder)
    _held[folder] = held
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a process forked from this one
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def remove_abandoned() -> list[str]:
    """Remove the folders of sessions whose process is gone; return their paths.

    >>> folder = make_scratch()
    >>> folder in remove_abandoned()
    False
    """
    room = tempfile.gettempdir()
    removed = []
    for name in sorted(os.listdir(room)):
        lock = os.path.join(room, name, LOCK)
        if name.startswith(PREFIX) and _is_ours(os.path.join(room, name)) and os.path.exists(lock):
            with contextlib.suppress(OSError, LockedError):
                held = disk_for(lock).lock(lock)
                shutil.rmtree(os.path.dirname(lock), ignore_errors=True)
                held.release()
                removed.append(os.path.dirname(lock))
    return removed


def _is_ours(path: str) -> bool:
    """Whether a folder, and no link to one, belongs to this user: those of others are left alone."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat_bits.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
