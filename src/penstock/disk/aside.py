"""What is set aside as ``.bad``: a copy or a second name beside what it comes from, never in the place of another."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Final

from penstock.disk.face import Disk, ReadDisk, ReadFile
from penstock.disk.posix import folder_of
from penstock.disk.sparse import copy_data, data_end, data_runs

__all__ = ["bad_path", "keep_bytes", "keep_name", "move_aside"]

BAD: Final = ".bad"
WINDOW_BYTES: Final = 4 << 20


def _names(path: str) -> Iterator[str]:
    yield path + BAD
    for number in itertools.count(1):
        yield f"{path}.{number}{BAD}"


def bad_path(disk: ReadDisk, path: str) -> str:
    """Return a free name beside ``path`` for what is set aside.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk(); disk.create("log.42.bad").close()
    >>> bad_path(disk, "log.42"), bad_path(disk, "log.43")
    ('log.42.1.bad', 'log.43.bad')
    """
    return next(name for name in _names(path) if disk.stat(name) is None)


def keep_bytes(disk: Disk, path: str, file: ReadFile, start: int, stop: int | None = None) -> str:
    """Copy what a file has from ``start`` on beside ``path``, whole or not at all; return the name of the copy.

    A copy of the same bytes that is there is taken for it: whoever was killed before it cut the file comes again.  A
    hole at the end is left out.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> with disk.create("log") as file:
    ...     for data in b"abcd", b"abcd", b"abXX":
    ...         file.write_at(0, data)
    ...         keep_bytes(disk, "log.2", file, 2)
    'log.2.bad'
    'log.2.bad'
    'log.2.1.bad'
    """
    stop = file.stat().size if stop is None else stop
    stop = max(start, min(stop, data_end(file)))
    for name in _names(path):
        try:
            with disk.open(name) as kept:
                if _same(kept, file, start, stop):
                    return name
        except FileNotFoundError:
            temporary = name + ".tmp"
            with contextlib.suppress(FileNotFoundError):
                disk.remove(temporary)
            try:
                with disk.create(temporary) as copy:
                    copy_data(file, start, stop, copy)
                    copy.sync()
                disk.rename(temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    disk.remove(temporary)
                raise
            disk.sync_folder(folder_of(name))
            return name
    raise AssertionError("there is always another name")


def keep_name(disk: Disk, path: str) -> str:
    """Give a file a second name, unless it has one; return it.

    >>> import tempfile
    >>> from penstock.disk import PosixDisk
    >>> folder, disk = tempfile.TemporaryDirectory(), PosixDisk()
    >>> disk.create(folder.name + "/7.sst").close()
    >>> [keep_name(disk, folder.name + "/7.sst").removeprefix(folder.name) for _ in range(2)]
    ['/7.sst.bad', '/7.sst.bad']
    >>> folder.cleanup()
    """
    found = disk.stat(path)
    if found is None:
        raise FileNotFoundError(2, "No such file or directory", path)
    for name in _names(path):
        other = disk.stat(name)
        if other is None:
            disk.link(path, name)
            return name
        if other.identity == found.identity:
            return name
    raise AssertionError("there is always another name")


def move_aside(disk: Disk, path: str) -> str:
    """Rename a file so that nobody reads it; return its new name, one that was free.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> for _ in range(2):
    ...     disk.create("log").close(); move_aside(disk, "log")
    'log.bad'
    'log.1.bad'
    """
    name = bad_path(disk, path)
    disk.rename(path, name)
    return name


def _same(kept: ReadFile, file: ReadFile, start: int, stop: int) -> bool:
    """Whether a copy has the bytes of a file between two places; what is a hole in both is not read."""
    if kept.stat().size != stop - start:
        return False
    runs = [*data_runs(kept), *((max(first - start, 0), last - start) for first, last in data_runs(file, start, stop))]
    return all(
        kept.read_at(at, min(WINDOW_BYTES, last - at)) == file.read_at(start + at, min(WINDOW_BYTES, last - at))
        for first, last in runs
        for at in range(first, last, WINDOW_BYTES)
    )
