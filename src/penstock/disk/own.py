"""The file that the owner of a log writes to: held itself, whatever names lead to it.

The lock beside a log is for those who come by the same name.  A hard link, or a lock file that was removed, leads
around it.
"""

from __future__ import annotations

import errno

from penstock.disk.face import Disk, Lock
from penstock.errors import LockedError, OptionsError

__all__ = ["Owned"]


class Owned:
    """The one file that an owner holds, and goes on from to the next.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> disk.create("ticks").close(); disk.link("ticks", "alias")
    >>> one, two = Owned(disk, "ticks"), Owned(disk, "alias")
    >>> one.take("ticks")
    >>> two.take("alias")
    Traceback (most recent call last):
    penstock.errors.LockedError: alias: another writer has it open, maybe under another name
    >>> one.release(); two.take("alias")
    """

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk, self._name, self._path = disk, name, ""
        self._held: Lock | None = None

    def take(self, path: str | None) -> None:
        """Hold this file, and only then let go of the one before; None changes nothing."""
        if path is None or (path == self._path and self._held is not None):
            return
        try:
            held = self._disk.own(path)
        except LockedError:
            raise LockedError(f"{self._name}: another writer has it open, maybe under another name") from None
        try:
            self._disk.modify(path).close()  # a regular file, and no link
        except OSError as exc:
            held.release()
            if exc.errno == errno.ELOOP:
                raise OptionsError(f"{path}: {exc.strerror}: open what it leads to") from None
            raise
        self.become(path, held)

    def become(self, path: str, held: Lock) -> None:
        """Hold what was taken by hand and has got this name, in place of the one before."""
        before, self._held, self._path = self._held, held, path
        if before is not None:
            before.release()

    def release(self) -> None:
        """Let someone else have it; in the child of a fork it stays the parent's."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
