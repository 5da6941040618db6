"""A disk of so many bytes, in memory: what does not fit is refused as a full device refuses it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from penstock.disk import MemoryDisk
from penstock.disk.posix import PosixFile

__all__ = ["SmallDisk"]


class SmallFile(PosixFile):
    disk: SmallDisk

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self.disk.check(self, offset + len(data))
        super().write_at(offset, data)

    def write_many_at(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        self.disk.check(self, offset + sum(map(len, chunks)))
        super().write_many_at(offset, chunks)

    def truncate(self, size: int) -> None:
        self.disk.check(self, size)
        super().truncate(size)

    def allocate(self, offset: int, length: int) -> None:
        self.disk.check(self, offset + length)
        super().allocate(offset, length)


class SmallDisk(MemoryDisk):
    """Counts the sizes of files that have a name; ``room`` may be changed at any time."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    @property
    def used(self) -> int:
        return sum(os.fstat(file.fd).st_size for file in self._files.values())

    def check(self, file: SmallFile, size: int) -> None:
        """Refuse growth for which there is no room."""
        with self._mutex:
            more = size - os.fstat(file.fd).st_size
            if more > 0 and self.used + more > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)

    def modify(self, path: str) -> PosixFile:
        with self._mutex:
            file = SmallFile(path, os.dup(self._file(path).fd))
        file.disk = self
        return file
