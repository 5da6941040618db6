"""Removing the files of a channel: the oldest after a roll, or all of them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque

from penstock.disk import Disk, ReadFile, disk_for
from penstock.disk.posix import folder_of
from penstock.errors import PenstockError
from penstock.kernel import Cursor
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import ChannelFile, discover, sidecar_prefix
from penstock.log.xchannel.format import RecordStop, file_path, split_position
from penstock.log.xchannel.own import own_newest

__all__ = ["FileRetention", "cleanup", "note_end"]

logger = logging.getLogger(__name__)


class FileRetention:
    """Removes files beyond ``keep``, the newest included; 0 keeps all.  Readers that map them go on undisturbed."""

    def __init__(self, disk: Disk, base: str, keep: int, sequences: list[int]) -> None:
        self._disk, self._base, self._keep = disk, base, keep
        self._sequences = deque(sequences)
        self._sidecar = Sidecar(disk, sidecar_prefix(base))
        self._ends: dict[int, int] = {}

    def rolled(self, sequence: int, ended: int) -> list[ReadFile]:
        """Note that ``sequence`` is the newest now, and remove what is too old; return the last of that, still open.

        ``ended`` is where the one before it did.  The name of what is removed is gone then, but its room is not:
        freeing that takes long, and whoever closes the file last waits.
        """
        self._sequences.extend(range(self._sequences[-1] + 1, sequence + 1))
        if self._keep:
            self._ends[sequence - 1] = ended
        removed: list[ReadFile] = []
        newest = sequence - self._keep if self._keep else -1
        if self._sequences[0] <= newest and (held := self._sidecar.shipped_floor()) is not None:
            newest = min(newest, split_position(held)[0] - 1)  # what is not shipped yet stays
        old = []
        while self._sequences[0] <= newest:
            old.append(self._sequences.popleft())
        if old:
            note_end(self._disk, self._base, old[-1], self._sidecar, self._ends.get(old[-1]))
        for number in old:
            self._ends.pop(number, None)
            path = file_path(self._base, number)
            try:
                removed.append(self._disk.open(path))
                self._disk.remove(path)
            except FileNotFoundError:
                pass
            except OSError as exc:
                logger.warning("%s: cannot be removed, though %d files are enough: %s", path, self._keep, exc)
        for file in removed[:-1]:
            file.close()
        return removed[-1:]


def note_end(disk: Disk, base: str, sequence: int, sidecar: Sidecar, ended: int | None = None) -> None:
    """Note where a file ends before it is removed: who has read that far goes on in the next one, and is not late."""
    if ended is None:
        try:
            file = ChannelFile.open(disk, base, sequence)
        except (OSError, PenstockError):
            return  # nobody can stand at its end
        with contextlib.closing(file):
            cursor = Cursor()
            ended = file.position(file.find_tail(cursor))
            if cursor.status != RecordStop.ROLLED:
                return
    sidecar.note_dropped(ended)


def cleanup(path: str | os.PathLike[str], *, disk: Disk | None = None) -> list[str]:
    """Remove a channel: its files, holes in their numbers or not, and its sidecars; return their names.

    LockedError while a writer has it open.  Readers that map the files go on and then learn that it is gone.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> folder = tempfile.TemporaryDirectory()
    >>> Writer.precreate(folder.name + "/ticks")
    >>> len(cleanup(folder.name + "/ticks")), os.listdir(folder.name)
    (3, [])
    >>> folder.cleanup()
    """
    base, disk = os.fspath(path), disk or disk_for(path)
    if not _names(disk, base):
        return []
    sidecar = Sidecar(disk, sidecar_prefix(base))
    lock = sidecar.lock()
    try:
        owned = own_newest(disk, base)
    except BaseException:
        lock.release()
        raise
    try:
        names = _names(disk, base)  # as they are now that no writer can roll
        names.sort(key=(sidecar.prefix + "lock").__eq__)  # the lock goes last
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(name)
    finally:
        owned.release()
        lock.release()
    return names


def _names(disk: Disk, base: str) -> list[str]:
    """Return the files of a channel and its sidecars."""
    start = os.path.basename(sidecar_prefix(base))
    sidecars = (name for name in disk.list(folder_of(base)) if name.startswith(start))
    return [
        *(file_path(base, sequence) for sequence in discover(disk, base)),
        *(os.path.join(os.path.dirname(base), name) for name in sidecars),
    ]
