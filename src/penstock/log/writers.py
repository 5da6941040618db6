"""Which logs this process has open for writing: for whoever needs the one writer of a log and has only its path."""

from __future__ import annotations

import os
import weakref
from typing import Any, Final

from penstock.disk import Disk, PosixDisk

__all__ = ["note_writer", "writer_of"]

_writers: Final[weakref.WeakValueDictionary[str, Any]] = weakref.WeakValueDictionary()


def note_writer(disk: Disk, path: str, writer: Any) -> None:
    """Remember a writer that has just been opened, for as long as somebody has it."""
    if isinstance(disk, PosixDisk):
        _writers[os.path.realpath(path)] = writer


def writer_of(path: str) -> Any | None:
    """Return the writer of the log at a path, None where this process has none; it may be closed by now.

    >>> import tempfile
    >>> from penstock.log.messagelog import MessageLog
    >>> with tempfile.TemporaryDirectory() as folder, MessageLog.open(folder) as log:
    ...     writer_of(folder) is log, writer_of(folder + "/other") is None
    (True, True)
    """
    return _writers.get(os.path.realpath(path))
