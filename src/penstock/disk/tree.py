"""Whole folders on the file system: walked, synced, renamed, removed, with nothing in them but files and folders.

For what is assembled beside its place and then gets its name in one step (artifacts, stores that are brought in).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat as stat_bits
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Final

from penstock.disk.posix import PosixDisk, folder_of
from penstock.errors import CorruptionError, OptionsError

__all__ = ["check_vacant", "free_bytes", "put_in_place", "regular_files", "remove_tree", "staged", "sync_tree"]

LEFT_SECONDS: Final = 3600.0
"""A folder that is being filled is left alone for so long even where its lock does not reach, as from another host."""


def regular_files(root: str) -> list[tuple[str, int]]:
    """Return every file below a folder with its size, by the parts of its path; CorruptionError for a link or device.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.makedirs(folder + "/a"); _ = [open(f"{folder}/{name}", "w").close() for name in ("a.b", "a/b")]
    ...     [name for name, _ in regular_files(folder)]
    ['a/b', 'a.b']
    """
    found: list[tuple[str, int]] = []
    _walk(root, "", found)
    return sorted(found, key=lambda item: item[0].split("/"))


def _walk(root: str, below: str, found: list[tuple[str, int]]) -> None:
    with os.scandir(f"{root}/{below}" if below else root) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            stat = entry.stat(follow_symlinks=False)
            if stat_bits.S_ISDIR(stat.st_mode):
                _walk(root, name, found)
            elif stat_bits.S_ISREG(stat.st_mode):
                found.append((name, stat.st_size))
            else:
                raise CorruptionError(f"{root}/{name}", 0, "a non-regular file: a link, a device or a socket")


def sync_tree(root: str) -> None:
    """Return when every file and name below a folder survives a power cut."""
    disk = PosixDisk()
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            with disk.open(f"{folder}/{name}") as file:
                os.fsync(file.fd)
        disk.sync_folder(folder)


def check_vacant(path: str) -> None:
    """Refuse a place where something is; an empty folder is nothing.

    >>> check_vacant("/tmp")
    Traceback (most recent call last):
    penstock.errors.OptionsError: /tmp: something is here already
    """
    if not os.path.isdir(folder_of(path)):
        raise OptionsError(f"{path}: the folder it is to be in does not exist")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat_bits.S_ISDIR(mode) or os.listdir(path):
        raise OptionsError(f"{path}: something is here already")


@contextlib.contextmanager
def staged(path: str, what: str) -> Iterator[str]:
    """Make a hidden folder beside ``path``, on its file system, which is gone afterwards whatever happens.

    What a process left there that was killed in the middle of the same goes now: it may keep a whole store.
    """
    prefix = f".penstock-{what}-"
    _remove_left(folder_of(path), prefix)
    stage = tempfile.mkdtemp(prefix=prefix, dir=folder_of(path))
    held = _hold(stage)
    try:
        yield stage
    finally:
        remove_tree(stage)
        if held is not None:
            os.close(held)


def _hold(folder: str) -> int | None:
    """Return a descriptor that has the lock of a folder, None where somebody has it or it can have none."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _remove_left(folder: str, prefix: str) -> None:
    """Remove what nobody holds any more; what is young may be of someone who is just about to hold it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            left = f"{folder}/{name}"
            if not name.startswith(prefix) or time.time() - os.lstat(left).st_mtime < LEFT_SECONDS:
                continue
            held = _hold(left)
            if held is not None:
                remove_tree(left)
                os.close(held)


def put_in_place(made: str, path: str, between: Callable[[], None] = lambda: None) -> None:
    """Give a folder or file its name, where nothing may be; the name survives a power cut when this returns."""
    check_vacant(path)
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    between()
    if os.path.lexists(path):  # a rename would replace a file without a word
        raise OptionsError(f"{path}: something is here already")
    try:
        os.rename(made, path)
    except OSError as exc:
        if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise OptionsError(f"{path}: something is here already") from None
        raise
    PosixDisk().sync_folder(folder_of(path))


def remove_tree(path: str) -> None:
    """Remove a folder with everything in it, or a file; fine if it is gone."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def free_bytes(folder: str) -> int:
    """Return how much room there is.

    >>> free_bytes("/") >= 0
    True
    """
    return shutil.disk_usage(folder).free
