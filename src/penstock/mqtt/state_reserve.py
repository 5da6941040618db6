"""Room that a broker keeps for the day its disk is full: a file that goes away when a write finds no room.

What is written into that room is what makes room again: acknowledgements, sessions that come back for what waits for
them, sessions that end, a checkpoint.  New messages are refused until the file is back, with as much room beside it as
it takes itself.

    held ──► a write finds no room: the file is removed ──► spent ──► segments went: the file is made again ──► held
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.disk import Disk

__all__ = ["Reserve"]

_log = logging.getLogger(__name__)

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


class Reserve:
    """One file of a broker's folder; methods may be called from any thread.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> reserve = Reserve(disk, "penstock-reserve", 8192)
    >>> reserve.hold(); reserve.spent, disk.stat("penstock-reserve").size
    ('', 8192)
    >>> reserve.release(OSError(28, "No space left on device")), reserve.spent, disk.list(".")
    (True, 'No space left on device', [])
    >>> reserve.restore(), reserve.spent
    (True, '')
    """

    def __init__(self, disk: Disk, path: str, size: int) -> None:
        """``size`` 0: there is none, and a full disk takes nothing at all."""
        self._disk, self.path, self.size = disk, path, size
        self._mutex = threading.Lock()
        self._held = False
        self.spent = ""
        """Why it was given up, until it is back."""

    def hold(self) -> None:
        """Make the file, or go on with the one that is there."""
        with self._mutex:
            try:
                if self.size:
                    self._allocate(self.size)
                    self._held = True
                elif self._disk.stat(self.path) is not None:
                    self._disk.remove(self.path)
            except OSError as exc:
                if exc.errno in NO_ROOM:
                    self._remove()
                    self.spent = exc.strerror or str(exc)
                else:
                    _log.warning("%s: no room is kept for a full disk: %s", self.path, exc)

    def release(self, exc: OSError) -> bool:
        """Give up the room if that is what a write lacked; return whether it is worth another try."""
        if exc.errno not in NO_ROOM:
            return False
        with self._mutex:
            if not self._held and self._disk.stat(self.path) is None:
                return False
            self._remove()
            if not self.spent:
                _log.error("the disk is full: only what makes room is written, from %d bytes kept for it", self.size)
            self.spent = exc.strerror or str(exc)
            return True

    def restore(self) -> bool:
        """Take the room back if there is twice as much; return whether it is there now."""
        with self._mutex:
            if not self.spent:
                return True
            try:
                self._allocate(2 * self.size)
            except OSError as exc:
                self._remove()
                self.spent = exc.strerror or str(exc)
                return False
            self._held, self.spent = True, ""
            _log.warning("the disk has room again")
            return True

    def with_room(self, action: Callable[[], T]) -> T:
        """Do something, and once more with the room that is kept if the disk had none for it."""
        try:
            return action()
        except OSError as exc:
            if not self.release(exc):
                raise
        return action()

    def _allocate(self, size: int) -> None:
        disk = self._disk
        with disk.create(self.path) if disk.stat(self.path) is None else disk.modify(self.path) as file:
            file.allocate(0, size)
            if file.stat().size > self.size:
                file.truncate(self.size)

    def _remove(self) -> None:
        self._held = False
        try:
            if self._disk.stat(self.path) is not None:
                self._disk.remove(self.path)
        except OSError as exc:
            _log.warning("%s could not be removed: %s", self.path, exc)
