"""Files and folders taken for what they are, for those who reach them by a plain path: settings, keys, staged files.

What is read may be reached through a link that a user gave, is a regular file, and is no longer than it may be.  What
is made belongs to its owner alone.  What is cleared is a folder and no link to one, held by its descriptor meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import stat as stat_bits
from collections.abc import Callable, Collection
from typing import Any, BinaryIO, Final

from penstock.disk.face import Disk, ReadDisk
from penstock.disk.posix import PLAIN, PosixDisk, checked_fd
from penstock.errors import CorruptionError, OptionsError

__all__ = [
    "boot_id_of",
    "check_name",
    "clear_folder",
    "create_private",
    "is_below",
    "make_folders",
    "open_below",
    "parse_toml",
    "private",
    "read_small",
    "read_whole",
    "refuse_link",
    "stays_below",
]

SMALL: Final = 8 << 20
"""No file of settings, keys or passwords is as long as that."""
DEPTH: Final = 100
"""No key of settings has as many parts as that."""
DEEP: Final = re.compile(rf"[\s\[{{]*(?:[^\s.=\[\]#]*\s*\.){{{DEPTH}}}")
LINK: Final = "a symbolic link, which is not followed here"


def read_small(path: str, most: int = SMALL) -> bytes:
    """Return the bytes of a small file; OSError for a pipe or a device, OptionsError for one that is too long.

    >>> read_small("/dev/zero")
    Traceback (most recent call last):
    OSError: [Errno 22] not a file: '/dev/zero'
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:
        raise OptionsError(f"{path!r}: no path has a zero byte in it") from None
    mode = os.fstat(fd).st_mode
    if not stat_bits.S_ISREG(mode):
        os.close(fd)
        if stat_bits.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a file", path)
    with os.fdopen(fd, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OptionsError(f"{path}: it is longer than {most} bytes, which such a file never is")
    return data


def read_whole(disk: ReadDisk, path: str, most: int = SMALL) -> bytes:
    """Return the bytes of a small file of ours; CorruptionError for one that is longer than we ever write it.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> with disk.create("note") as file:
    ...     file.write_at(0, b"hello")
    >>> read_whole(disk, "note")
    b'hello'
    """
    with disk.open(path) as file:
        size = file.stat().size
        if size > most:
            raise CorruptionError(path, most, f"it has {size} bytes, and such a file has never more than {most}")
        return file.read_at(0, size)


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Return what a file of settings says; OptionsError for what is no TOML, or goes deeper than settings do.

    >>> parse_toml("port = 1883", "penstock.toml")
    {'port': 1883}
    """
    import tomllib

    for line in text.splitlines():
        if line.count(".") > DEPTH and DEEP.match(line):
            raise OptionsError(f"{path}: a key with more than {DEPTH} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise OptionsError(f"{path}: it goes too deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # the one other: Python reads no number of so many digits
        raise OptionsError(f"{path}: a number with more digits than any that is meant here") from None


def create_private(path: str) -> BinaryIO:
    """Make a file that must not exist, and that nobody else may read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, create_private(folder + "/new") as file:
    ...     oct(os.fstat(file.fileno()).st_mode & 0o777)
    '0o600'
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "w+b")


def private(path: str, flags: int) -> int:
    """Open a file for ``open(…, opener=private)``: one that is made belongs to its owner alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, open(folder + "/new", "ab", opener=private) as file:
    ...     oct(os.fstat(file.fileno()).st_mode & 0o777)
    '0o600'
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_folders(path: str) -> None:
    """Make a folder, and those above it that are missing, for their owner alone; fine if it is there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_folders(folder + "/a/b")
    ...     [oct(os.stat(folder + name).st_mode & 0o777) for name in ("/a", "/a/b")]
    ['0o700', '0o700']
    """
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        above = os.path.dirname(path.rstrip("/"))
        if above == path:
            break
        path = above
    for name in reversed(missing):
        PosixDisk().make_folder(name)


def boot_id_of(disk: ReadDisk) -> bytes | None:
    """Return 16 bytes that change with every start of the machine; None on a disk for reading only, which has none.

    >>> boot_id_of(PosixDisk()) == PosixDisk().boot_id()
    True
    """
    boot_id: Callable[[], bytes] | None = getattr(disk, "boot_id", None)
    return None if boot_id is None else boot_id()


def check_name(root: str, name: str) -> str:
    """Return the path of something directly in a folder; OptionsError for a name that leads anywhere else.

    >>> check_name("data", "ab12"), check_name("data", "../../outside")
    Traceback (most recent call last):
    penstock.errors.OptionsError: data: '../../outside' is no name of something in this folder
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise OptionsError(f"{root}: {name!r} is no name of something in this folder")
    return f"{root}/{name}"


def stays_below(name: str) -> bool:
    """Whether a path from somebody else names something below a folder: it is not absolute, and climbs nowhere.

    >>> [stays_below(name) for name in ("logs/a", "../a", "/etc/passwd", "a//b", "")]
    [True, False, False, False, False]
    """
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def is_below(folder: str, path: str) -> bool:
    """Whether a path leads to something below a folder, with every link followed.

    >>> is_below("/usr", "/usr/../etc"), is_below("/usr", "/usr/bin/nothing")
    (False, True)
    """
    return os.path.realpath(path).startswith(os.path.realpath(folder).rstrip("/") + "/")


def open_below(root: str, name: str) -> BinaryIO:
    """Open a file below a folder for reading, through no link on the way; OptionsError for a name that leads elsewhere.

    >>> open_below("/proc", "self/status")
    Traceback (most recent call last):
    OSError: [Errno 40] a symbolic link, which is not followed here: '/proc/self/status'
    """
    path = os.path.join(root, name)
    if not stays_below(name):
        raise OptionsError(f"{root}: {name!r} is no name of something in this folder")
    *above, last = name.split("/")
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in above:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        file = os.open(last, os.O_RDONLY | PLAIN, dir_fd=fd)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(errno.ELOOP, LINK, path) from None
        raise type(exc)(exc.errno, exc.strerror, path) from None
    finally:
        os.close(fd)
    return os.fdopen(checked_fd(path, file), "rb")


def refuse_link(disk: ReadDisk, path: str) -> None:
    """Raise OSError for a name that is a symbolic link; fine if nothing is there.

    >>> refuse_link(PosixDisk(), "/nowhere/at/all")
    """
    is_link: Callable[[str], bool] | None = getattr(disk, "is_link", None)
    if is_link is not None and is_link(path):
        raise OSError(errno.ELOOP, LINK, path)


def clear_folder(
    disk: Disk, path: str, *, keep: Collection[str] = (), last: Collection[str] = (), remove: bool = True
) -> None:
    """Remove the files of a folder, those in ``last`` last, and the folder; fine if it is gone.

    Folders in it stay, and then so does it.  A link in the place of the folder is an error, and leads nowhere.
    """
    refuse_link(disk, path)
    try:
        if isinstance(disk, PosixDisk):
            emptied = _clear_here(path, keep, last)
        else:
            emptied = _clear(disk, path, keep, last)
    except FileNotFoundError:
        return
    if remove and emptied:
        try:
            disk.remove_folder(path)
        except FileNotFoundError:
            pass


def _clear(disk: Disk, path: str, keep: Collection[str], last: Collection[str]) -> bool:
    emptied = True
    for name in sorted(disk.list(path), key=lambda name: name in last):
        found = disk.stat(f"{path}/{name}")
        if name in keep or (found is not None and found.is_folder):
            emptied = False
            continue
        try:
            disk.remove(f"{path}/{name}")
        except FileNotFoundError:
            pass
    return emptied


def _clear_here(path: str, keep: Collection[str], last: Collection[str]) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    emptied = True
    try:
        for name in sorted(os.listdir(fd), key=lambda name: name in last):
            try:
                if name in keep or stat_bits.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    emptied = False
                    continue
                os.unlink(name, dir_fd=fd)
            except FileNotFoundError:
                pass
    finally:
        os.close(fd)
    return emptied
