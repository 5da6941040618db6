"""The disk of the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat as stat_bits
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from io import UnsupportedOperation
from types import TracebackType
from typing import Self

from penstock import kernel
from penstock.disk.face import Stat
from penstock.errors import LockedError
from penstock.kernel import Mapping

__all__ = ["PosixDisk", "PosixFile", "folder_of"]

IOV_MAX = 1024


def folder_of(path: str) -> str:
    """Return the folder a path is in.

    >>> folder_of("a/b"), folder_of("b")
    ('a', '.')
    """
    return os.path.dirname(path) or "."


def stat_of(found: os.stat_result) -> Stat:
    """Return the parts of a stat that a disk promises."""
    return Stat(
        found.st_size,
        stat_bits.S_ISDIR(found.st_mode),
        (found.st_dev, found.st_ino),
        found.st_mtime_ns,
    )


class PosixFile:
    """A file by its descriptor; ``read_at`` and ``write_at`` never move a file offset."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def fd(self) -> int:
        """The descriptor."""
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)
        return self._fd

    def stat(self) -> Stat:
        """Return what is known of the open file."""
        return stat_of(os.fstat(self.fd))

    def read_at(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``."""
        data = os.pread(self.fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]  # a signal, or more than one call can move: go on to the end of the file
        got = len(data)
        while got < length and (data := os.pread(self.fd, length - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset``."""
        got = 0
        while got < len(target) and (n := os.preadv(self.fd, [target[got:]], offset + got)):
            got += n
        return got

    def map(self, offset: int, length: int, *, writable: bool = False) -> Mapping:
        """Return those bytes as memory."""
        return Mapping(self.fd, offset, length, writable)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``."""
        if type(data) is bytes:  # nearly always done in one call
            written = os.pwrite(self.fd, data, offset)
            if written == len(data):
                return
            data, offset = data[written:], offset + written
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self.fd, view, offset)
            view, offset = view[written:], offset + written

    def write_many_at(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        """Write all chunks one after another."""
        for start in range(0, len(chunks), IOV_MAX):
            part = chunks[start : start + IOV_MAX]
            size = sum(memoryview(chunk).nbytes for chunk in part)
            written = os.pwritev(self.fd, part, offset)
            if written < size:  # a full disk says so on the next call
                self.write_at(offset + written, b"".join(part)[written:])
            offset += size

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        os.ftruncate(self.fd, size)

    def allocate(self, offset: int, length: int) -> None:
        """Give those bytes room on the device, or fail and change nothing."""
        if kernel.native and sys.platform == "linux":
            failed = kernel.ahead.give_room(self.fd, offset, length)
            if failed:
                raise OSError(failed, os.strerror(failed), self.path)
            return
        size = os.fstat(self.fd).st_size
        if not hasattr(os, "posix_fallocate"):  # macOS
            os.ftruncate(self.fd, max(size, offset + length))
            return
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError:
            if os.fstat(self.fd).st_size > size:
                os.ftruncate(self.fd, size)
            raise

    def sync(self) -> None:
        """Return when bytes and size survive a power cut."""
        if sys.platform == "darwin":  # fsync there leaves the data in the drive's cache
            fcntl.fcntl(self.fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(self.fd)

    def close(self) -> None:
        """Let go of the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PosixLatch:
    """flock on a file of its own whose descriptor stays open: a tenth of the cost of opening it for each time."""

    def __init__(self, path: str) -> None:
        self._path, self._fd = path, -1

    def take(self) -> bool:
        """Take the lock; False if someone has it."""
        while True:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if os.fstat(self._fd).st_nlink:
                return True
            self.close()  # somebody removed the file: those who come later lock another one

    def release(self) -> None:
        """Let someone else have it."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the descriptor; a lock that another process shares since a fork stays that one's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class PosixLock:
    """A lock that was taken: released when its process ends, however it ends."""

    def __init__(self, latch: PosixLatch) -> None:
        self._latch = latch

    def release(self) -> None:
        """Let someone else have it.  The file stays."""
        self._latch.close()


class PosixDisk:
    """The file system.

    >>> import tempfile
    >>> disk = PosixDisk()
    >>> folder = tempfile.TemporaryDirectory()
    >>> with disk.create(folder.name + "/a") as file:
    ...     file.write_at(0, b"hello")
    ...     file.sync()
    >>> disk.sync_folder(folder.name)
    >>> disk.list(folder.name), disk.stat(folder.name + "/a").size
    (['a'], 5)
    >>> folder.cleanup()
    """

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None."""
        try:
            return stat_of(os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, path: str) -> PosixFile:
        """Open an existing file for reading."""
        return PosixFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def create(self, path: str) -> PosixFile:
        """Create a file that must not exist."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return PosixFile(path, os.open(path, flags, 0o666))

    def modify(self, path: str) -> PosixFile:
        """Open an existing file for writing."""
        return PosixFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def rename(self, path: str, target: str) -> None:
        """Give a file another name, replacing what has it."""
        os.rename(path, target)

    def exchange(self, path: str, other: str) -> None:
        """Let two files have each other's name, where the operating system and the file system can."""
        swap = _exchanger()
        if swap is None:
            raise UnsupportedOperation(errno.ENOSYS, "two files cannot exchange their names here", path)
        code = swap(os.fsencode(path), os.fsencode(other))
        if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise UnsupportedOperation(code, os.strerror(code), path)
        if code:
            raise OSError(code, os.strerror(code), path, None, other)

    def link(self, path: str, target: str) -> None:
        """Give a file a second name."""
        os.link(path, target)

    def remove(self, path: str) -> None:
        """Unlink a file."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Create a folder; fine if it is there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> PosixLock:
        """Take the lock file at ``path``."""
        latch = PosixLatch(path)
        if not latch.take():
            latch.close()
            raise LockedError(f"{path}: another process or handle holds this lock")
        return PosixLock(latch)

    def latch(self, path: str) -> PosixLatch:
        """Return the same lock for who takes it often."""
        return PosixLatch(path)

    def boot_id(self) -> bytes:
        """Return 16 bytes that change with every start of the machine."""
        return boot_id()


@cache
def _exchanger() -> Callable[[bytes, bytes], int] | None:
    """Return what swaps two names and returns an error number, None where the C library has no such call."""
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        call, here, swap = getattr(library, "renameatx_np", None), -2, 2  # AT_FDCWD, RENAME_SWAP
    else:
        call, here, swap = getattr(library, "renameat2", None), -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call is None:
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]

    def exchange(path: bytes, other: bytes) -> int:
        return ctypes.get_errno() if call(here, path, here, other, swap) else 0

    return exchange


@cache
def boot_id() -> bytes:
    """Return the boot id of this machine."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    else:
        with open("/proc/sys/kernel/random/boot_id") as file:
            text = file.read()
    return uuid.UUID(text.strip()).bytes
