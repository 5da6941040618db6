"""The disk of the operating system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat as stat_bits
import subprocess
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from io import UnsupportedOperation
from types import TracebackType
from typing import Final, Self

from penstock import kernel
from penstock.disk.face import Stat
from penstock.errors import LockedError, OptionsError
from penstock.kernel import Mapping

__all__ = ["PosixDisk", "PosixFile", "folder_of"]

IOV_MAX: Final = 1024
PLAIN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # of these O_NONBLOCK means nothing to a file


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


def _named(exc: OSError, path: str) -> OSError:
    """Return an error of a call by descriptor with the path it was about."""
    if exc.filename is None and exc.errno is not None:
        return OSError(exc.errno, exc.strerror or os.strerror(exc.errno), path)
    return exc


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
        try:
            data = os.pread(self.fd, length, offset)
        except OSError as exc:
            raise _named(exc, self.path) from None
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
        try:
            if type(data) is bytes:  # nearly always done in one call
                written = os.pwrite(self.fd, data, offset)
                if written == len(data):
                    return
                data, offset = data[written:], offset + written
            view = memoryview(data).cast("B")
            while view:
                written = os.pwrite(self.fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as exc:
            raise _named(exc, self.path) from None

    def write_many_at(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        """Write all chunks one after another."""
        for start in range(0, len(chunks), IOV_MAX):
            part = chunks[start : start + IOV_MAX]
            size = sum(memoryview(chunk).nbytes for chunk in part)
            try:
                written = os.pwritev(self.fd, part, offset)
            except OSError as exc:
                raise _named(exc, self.path) from None
            if written < size:  # a full disk says so on the next call
                self.write_at(offset + written, b"".join(part)[written:])
            offset += size

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        try:
            os.ftruncate(self.fd, size)
        except OSError as exc:
            raise _named(exc, self.path) from None

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
        try:
            if sys.platform == "darwin":  # fsync there leaves the data in the drive's cache
                fcntl.fcntl(self.fd, fcntl.F_FULLFSYNC)
            else:
                os.fdatasync(self.fd)
        except OSError as exc:
            raise _named(exc, self.path) from None

    def close(self) -> None:
        """Let go of the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_held: weakref.WeakSet[PosixLatch | PosixOwned] = weakref.WeakSet()
"""What has descriptors with a lock: the child of a fork lets go of them, or the parent could not."""


def _after_fork() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_after_fork)


class PosixLatch:
    """flock on a file of its own, and on what it protects; both descriptors stay open between turns.

    What is owned is the data: its inode is locked, whatever name it was reached by and whatever became of the lock
    file, which is there for those who know nothing else.  ``of`` may be absent yet: then the lock file alone counts.
    """

    def __init__(self, path: str, of: str | None = None) -> None:
        self._path, self._of = path, of
        self._fds: list[int] = []
        _held.add(self)

    def take(self) -> bool:
        """Take the lock; False if someone has it."""
        while True:
            if not self._fds:
                self._open()
            for number, fd in enumerate(self._fds):
                if not _flock(fd, self._name(number)):
                    for taken in self._fds[:number]:
                        fcntl.flock(taken, fcntl.LOCK_UN)
                    return False
            if all(_still_there(fd, self._name(number)) for number, fd in enumerate(self._fds)):
                return True
            self.close()  # somebody removed or moved it: those who come later lock another one

    def _name(self, number: int) -> str:
        return self._path if number == 0 or self._of is None else self._of

    def _open(self) -> None:
        self._fds = [_open_lock(self._path)]
        try:
            if self._of is not None:
                self._fds.append(_open_owned(self._of))
        except FileNotFoundError:
            pass  # not made yet
        except BaseException:
            self.close()
            raise

    def release(self) -> None:
        """Let someone else have it."""
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the descriptors; a lock that another process shares since a fork stays that one's."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class PosixLock:
    """A lock that was taken: released when its process ends, however it ends."""

    def __init__(self, latch: PosixLatch | PosixOwned) -> None:
        self._latch = latch

    def release(self) -> None:
        """Let someone else have it.  The file stays."""
        self._latch.close()


class PosixOwned:
    """flock on a file or folder itself."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        _held.add(self)
        while True:
            self._fd = _open_owned(path)
            try:
                if not _flock(self._fd, path):
                    raise LockedError(f"{path}: another process or handle has it open, maybe under another name")
                if _still_there(self._fd, path):
                    return
            except BaseException:
                self.close()
                raise
            self.close()

    def close(self) -> None:
        """Let go of the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _flock(fd: int, path: str) -> bool:
    """Lock a descriptor; False if someone has it.  A file system without locks is an error with the path."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise OSError(exc.errno, f"it cannot be locked here: {os.strerror(exc.errno or 0)}", path) from None
    return True


def _still_there(fd: int, path: str) -> bool:
    """Whether a path still leads to what is open."""
    here = os.fstat(fd)
    try:
        there = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _open_lock(path: str) -> int:
    """Open a lock file, created if need be: a regular file and no link."""
    return checked_fd(path, os.open(path, os.O_RDWR | os.O_CREAT | PLAIN, 0o600))


def _open_owned(path: str) -> int:
    """Open what is to be owned: a file or a folder, by whatever name."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    return fd if stat_bits.S_ISDIR(os.fstat(fd).st_mode) else checked_fd(path, fd)


def checked_fd(path: str, fd: int) -> int:
    """Return a descriptor of a regular file; anything else is an error, and never a wait."""
    mode = os.fstat(fd).st_mode
    if stat_bits.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat_bits.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "neither a file nor a folder but a pipe, a socket or a device", path)


def _open_plain(path: str, flags: int, mode: int = 0) -> int:
    """Open a regular file that is no link, without ever waiting for somebody at the other end."""
    try:
        return checked_fd(path, os.open(path, flags | PLAIN, mode))
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.EMLINK) and os.path.islink(path):
            raise OSError(exc.errno, "a symbolic link, which is not followed here", path) from None
        if exc.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "neither a file nor a folder but a pipe, a socket or a device", path) from None
        raise


def check_plain(folder: str) -> None:
    """Raise for a link, a pipe or a device in a folder that an engine opens, which would follow it; fine if absent.

    >>> check_plain("/nowhere/at/all")
    """
    try:
        with os.scandir(folder) as entries:
            plain = {e.path: e.is_file(follow_symlinks=False) or e.is_dir(follow_symlinks=False) for e in entries}
    except FileNotFoundError:
        return
    strange = [path for path, good in plain.items() if not good]
    if strange:
        raise OSError(errno.EINVAL, "a link, a pipe or a device, where files are expected", min(strange))


def followed(path: str) -> str:
    """Return where a path leads, if what it names is a link: for those who read, and begin with that path.

    >>> followed("/nowhere/at/all")
    '/nowhere/at/all'
    """
    return os.path.realpath(path) if os.path.islink(path) else path


class PosixDisk:
    """The file system.

    New files are readable and writable by their owner alone, and new folders likewise; ``shared=True`` leaves both to
    the umask.  Files are opened by descriptor, as regular files that are no links: neither a link nor a pipe in the
    place of a file leads anywhere.

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

    def __init__(self, *, shared: bool = False) -> None:
        self.file_mode, self._folder_mode = (0o666, 0o777) if shared else (0o600, 0o700)

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None."""
        try:
            return stat_of(os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a zero byte
            raise OptionsError(f"{path!r}: no path has a zero byte in it") from None

    def open(self, path: str) -> PosixFile:
        """Open an existing file for reading."""
        return PosixFile(path, _open_plain(path, os.O_RDONLY))

    def create(self, path: str) -> PosixFile:
        """Create a file that must not exist."""
        return PosixFile(path, _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.file_mode))

    def modify(self, path: str) -> PosixFile:
        """Open an existing file for writing."""
        return PosixFile(path, _open_plain(path, os.O_RDWR))

    def is_link(self, path: str) -> bool:
        """Whether a name is a symbolic link, wherever that leads."""
        return os.path.islink(path)

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
        try:
            os.mkdir(path, self._folder_mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

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

    def lock(self, path: str, of: str | None = None) -> PosixLock:
        """Take the lock file at ``path``, and what it protects."""
        latch = PosixLatch(path, of)
        if not latch.take():
            latch.close()
            raise LockedError(f"{path}: another process or handle holds this lock")
        return PosixLock(latch)

    def latch(self, path: str, of: str | None = None) -> PosixLatch:
        """Return the same lock for who takes it often."""
        return PosixLatch(path, of)

    def own(self, path: str) -> PosixLock:
        """Take a file or folder itself."""
        return PosixLock(PosixOwned(path))

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
