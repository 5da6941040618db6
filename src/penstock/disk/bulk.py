"""Many small files looked at or read at once: side by side below Python on a real disk."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock import kernel
from penstock.disk.face import ReadDisk
from penstock.disk.posix import PosixDisk

__all__ = ["exist_many", "read_many"]


def exist_many(disk: ReadDisk, paths: Sequence[str]) -> list[bool]:
    """Return for each path whether something is there.

    False also stands where it could not be known, or where this disk looks at files one by one: look at that one by
    itself, which also says what is wrong with it.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     exist_many(PosixDisk(), [file.name, file.name + "-missing"]) in ([True, False], [False, False])
    True
    """
    if isinstance(disk, PosixDisk) and kernel.native:
        return kernel.saves.exist_many([os.fsencode(path) for path in paths])
    return [False] * len(paths)


def read_many(disk: ReadDisk, paths: Sequence[str], most: int) -> list[bytes | None]:
    """Return the bytes of files that have at most ``most``.

    None stands where a file was not read, because it is larger, could not be read, or this disk reads files one by one:
    read that one by itself, which also says what is wrong with it.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     done = file.write(b"hello"), file.flush()
    ...     read_many(PosixDisk(), [file.name, file.name + "-missing"], 100) in ([b"hello", None], [None, None])
    True
    """
    if isinstance(disk, PosixDisk) and kernel.native:
        return kernel.saves.read_many([os.fsencode(path) for path in paths], most)
    return [None] * len(paths)
