"""Files with holes: what they hold, found without reading the zeros that take no room on the device.

A file of four kilobytes can claim a terabyte.  Whoever goes over a file that came from somewhere, to look for what is
left in it, to copy or to send it, goes over its runs of data.  It takes as many steps as there are runs, whatever the
size; a disk or file system that does not tell has one run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Final

from penstock.disk.face import File, ReadFile
from penstock.disk.posix import PosixFile

__all__ = ["data_runs", "data_end", "first_hole", "holes", "is_empty", "copy_data"]

WINDOW_BYTES: Final = 4 << 20


def data_runs(file: ReadFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield where the runs of data between two bytes begin and end; the rest are holes, and read as zeros.

    >>> import tempfile
    >>> from penstock.disk import PosixDisk
    >>> with tempfile.NamedTemporaryFile() as made, PosixDisk().modify(made.name) as file:
    ...     file.write_at(1 << 39, b"x"); file.truncate(1 << 40)
    ...     [(first >> 39, last - first <= 1 << 20) for first, last in data_runs(file)]
    [(1, True)]
    """
    size = file.stat().size
    at, stop = start, size if stop is None else min(stop, size)
    if not isinstance(file, PosixFile) or not hasattr(os, "SEEK_DATA"):
        if at < stop:
            yield at, stop
        return
    while at < stop:
        try:
            begin = os.lseek(file.fd, at, os.SEEK_DATA)
            end = os.lseek(file.fd, begin, os.SEEK_HOLE)
        except OSError as exc:
            if exc.errno != errno.ENXIO:  # this file system does not tell; ENXIO: nothing but a hole from here on
                yield at, stop
            return
        if begin >= stop:
            return
        yield begin, min(end, stop)
        at = end


def data_end(file: ReadFile) -> int:
    """Return where the bytes of a file end that are no hole.

    >>> import tempfile
    >>> from penstock.disk import PosixDisk
    >>> with tempfile.NamedTemporaryFile() as made, PosixDisk().modify(made.name) as file:
    ...     file.write_at(0, b"x"); file.truncate(1 << 40)
    ...     data_end(file) <= 1 << 20
    True
    """
    return max((end for _, end in data_runs(file)), default=0)


def first_hole(file: ReadFile) -> int:
    """Return where the first hole of a file begins, or its size.

    >>> import tempfile
    >>> from penstock.disk import PosixDisk
    >>> with tempfile.NamedTemporaryFile() as made, PosixDisk().modify(made.name) as file:
    ...     file.write_at(0, b"x"); first_hole(file)
    1
    """
    begin, end = next(data_runs(file), (0, 0))
    return 0 if begin else end


def holes(file: ReadFile, most: int) -> tuple[int, int]:
    """Return how many bytes of a file are holes, and where the first begins; counting ends above ``most``.

    >>> import tempfile
    >>> from penstock.disk import PosixDisk
    >>> with tempfile.NamedTemporaryFile() as made, PosixDisk().modify(made.name) as file:
    ...     file.truncate(1 << 40); holes(file, 1 << 30)
    (1099511627776, 0)
    """
    size = file.stat().size
    at = missing = 0
    first = size
    for begin, end in data_runs(file):
        if begin > at:
            missing, first = missing + begin - at, min(first, at)
        at = end
        if missing > most:
            return missing, first
    return (missing + size - at, min(first, at)) if at < size else (missing, first)


def is_empty(file: ReadFile, start: int, stop: int) -> bool:
    """Whether there is nothing but zeros between two bytes.

    >>> import tempfile
    >>> from penstock.disk import PosixDisk
    >>> with tempfile.NamedTemporaryFile() as made, PosixDisk().modify(made.name) as file:
    ...     file.write_at(0, b"x"); file.truncate(1 << 40)
    ...     is_empty(file, 0, 1 << 40), is_empty(file, 1, 1 << 40)
    (False, True)
    """
    return not any(
        any(file.read_at(at, min(WINDOW_BYTES, last - at)))
        for first, last in data_runs(file, start, stop)
        for at in range(first, last, WINDOW_BYTES)
    )


def copy_data(source: ReadFile, start: int, stop: int, target: File) -> None:
    """Copy the bytes between two places to the beginning of another file, a window at a time; holes stay holes.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> with disk.create("from") as source, disk.create("to") as target:
    ...     source.write_at(0, b"abcdef")
    ...     copy_data(source, 2, 5, target)
    ...     target.read_at(0, 9)
    b'cde'
    """
    stop = min(stop, source.stat().size)
    for first, last in data_runs(source, start, stop):
        at = first
        while at < last and (data := source.read_at(at, min(WINDOW_BYTES, last - at))):
            target.write_at(at - start, data)
            at += len(data)
    if target.stat().size < stop - start:
        target.truncate(stop - start)
