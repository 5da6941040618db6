"""A disk in memory, for one process: nothing survives it.

Each file is an anonymous file of the kernel (memfd), so everything that works on a real descriptor
works here: mappings shared between writer and reader, growth under a mapping, reading after unlink.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence

from penstock.disk.face import Disk, Lock, Stat
from penstock.disk.posix import PosixFile, boot_id, folder_of, stat_of
from penstock.errors import LockedError

__all__ = ["MemoryDisk", "Relock"]

Key = str | tuple[int, int]


def anonymous_file() -> int:
    """Return the descriptor of a new file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


class MemoryLock:
    """Files and folders in the disk's set of locks, by what tells them from others."""

    def __init__(self, disk: MemoryDisk, keys: list[Key]) -> None:
        self._disk, self.keys = disk, keys

    def release(self) -> None:
        """Let someone else have it."""
        self._disk.unlock(self)


class Relock:
    """A latch on any disk: its lock, taken anew each time."""

    def __init__(self, disk: Disk, path: str, of: str | None = None) -> None:
        self._disk, self._path, self._of = disk, path, of
        self._held: Lock | None = None

    def take(self) -> bool:
        """Take the lock; False if someone has it."""
        try:
            self._held = self._disk.lock(self._path, self._of)
        except LockedError:
            return False
        return True

    def release(self) -> None:
        """Let someone else have it."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    close = release


class MemoryDisk:
    """A disk in memory.

    >>> disk = MemoryDisk()
    >>> disk.create("a").write_at(0, b"hello")
    >>> disk.list("."), disk.open("a").read_at(1, 3)
    (['a'], b'ell')
    """

    def __init__(self) -> None:
        self._files: dict[str, PosixFile] = {}
        self._folders = {"."}
        self._locks: dict[Key, MemoryLock] = {}
        self._mutex = threading.RLock()

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        folder = _norm(folder)
        with self._mutex:
            if folder not in self._folders:
                raise _error(errno.ENOENT, folder)
            names = (*self._files, *self._folders)
            return sorted(os.path.basename(n) for n in names if folder_of(n) == folder and n != ".")

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None."""
        with self._mutex:
            if _norm(path) in self._folders:
                return Stat(0, True, (0, 0), 0)
            file = self._files.get(_norm(path))
            return None if file is None else stat_of(os.fstat(file.fd))

    def open(self, path: str) -> PosixFile:
        """Open an existing file for reading."""
        return self.modify(path)

    def create(self, path: str) -> PosixFile:
        """Create a file that must not exist."""
        with self._mutex:
            self._vacant(path)
            self._files[_norm(path)] = PosixFile(path, anonymous_file())
            return self.modify(path)

    def modify(self, path: str) -> PosixFile:
        """Open an existing file for writing."""
        with self._mutex:
            return PosixFile(path, os.dup(self._file(path).fd))

    def rename(self, path: str, target: str) -> None:
        """Give a file another name, replacing what has it."""
        with self._mutex:
            file = self._file(path)
            if folder_of(_norm(target)) not in self._folders:
                raise _error(errno.ENOENT, target)
            del self._files[_norm(path)]
            self._files[_norm(target)] = file

    def exchange(self, path: str, other: str) -> None:
        """Let two files have each other's name."""
        with self._mutex:
            one, two = self._file(path), self._file(other)
            self._files[_norm(path)], self._files[_norm(other)] = two, one

    def link(self, path: str, target: str) -> None:
        """Give a file a second name."""
        with self._mutex:
            self._vacant(target)
            self._files[_norm(target)] = self._file(path)

    def remove(self, path: str) -> None:
        """Unlink a file."""
        with self._mutex:
            self._file(path)
            del self._files[_norm(path)]

    def make_folder(self, path: str) -> None:
        """Create a folder; fine if it is there."""
        with self._mutex:
            if _norm(path) in self._folders:
                return
            self._vacant(path)
            self._folders.add(_norm(path))

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        with self._mutex:
            if self.list(path):
                raise _error(errno.ENOTEMPTY, path)
            self._folders.remove(_norm(path))

    def sync_folder(self, path: str) -> None:
        """Memory has nothing to sync."""
        self.list(path)

    def lock(self, path: str, of: str | None = None) -> MemoryLock:
        """Take the lock file at ``path``, and what it protects."""
        with self._mutex:
            if self._key(path) is None:
                self.create(path).close()
            return self._take([path] if of is None else [path, of])

    def latch(self, path: str, of: str | None = None) -> Relock:
        """Return the same lock for who takes it often."""
        return Relock(self, path, of)

    def own(self, path: str) -> MemoryLock:
        """Take a file or folder itself."""
        with self._mutex:
            if self._key(path) is None:
                raise _error(errno.ENOENT, path)
            return self._take([path])

    def unlock(self, lock: MemoryLock) -> None:
        """Release a lock that is still held."""
        with self._mutex:
            for key in lock.keys:
                if self._locks.get(key) is lock:
                    del self._locks[key]

    def _take(self, paths: Sequence[str]) -> MemoryLock:
        keys = [key for path in paths if (key := self._key(path)) is not None]
        for path, key in zip(paths, keys, strict=False):
            if key in self._locks:
                raise LockedError(f"{path}: another handle holds this lock")
        lock = MemoryLock(self, keys)
        self._locks.update(dict.fromkeys(keys, lock))
        return lock

    def _key(self, path: str) -> Key | None:
        """Return what tells a file or folder from others, None when there is none."""
        if _norm(path) in self._folders:
            return _norm(path)
        file = self._files.get(_norm(path))
        return None if file is None else stat_of(os.fstat(file.fd)).identity

    def boot_id(self) -> bytes:
        """Return the boot id of the machine: this disk does not outlive it."""
        return boot_id()

    def _file(self, path: str) -> PosixFile:
        file = self._files.get(_norm(path))
        if file is None:
            raise _error(errno.EISDIR if _norm(path) in self._folders else errno.ENOENT, path)
        return file

    def _vacant(self, path: str) -> None:
        if _norm(path) in self._files or _norm(path) in self._folders:
            raise _error(errno.EEXIST, path)
        if folder_of(_norm(path)) not in self._folders:
            raise _error(errno.ENOENT, path)


def _norm(path: str) -> str:
    return os.path.normpath(path)


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
