"""Which format a path holds, and the reader for it.

A format is one entry of FORMATS.  Its module has ``recognise(disk, path)``, which looks at names and headers
only, and ``open_reader(disk, path)``.  Modules are imported when first asked, so that a format's dependencies
are needed only by those who use it.
"""

from __future__ import annotations

import importlib
from typing import Final, Protocol, cast

from penstock.disk import PosixDisk, ReadDisk
from penstock.errors import OptionsError
from penstock.log.face import LogReader

__all__ = ["FORMATS", "detect", "open_log"]

FORMATS: Final = {
    "xchannel": "penstock.log.xchannel.log",
    "messagelog": "penstock.log.messagelog.log",
}


class Format(Protocol):
    """What the module of a format has."""

    def recognise(self, disk: ReadDisk, path: str) -> bool:
        """Whether ``path`` holds this format."""

    def open_reader(self, disk: ReadDisk, path: str) -> LogReader:
        """Open ``path`` for reading."""


def detect(path: str, disk: ReadDisk | None = None) -> str:
    """Return the name of the format ``path`` holds; OptionsError when it is none that is known.

    >>> detect("/nowhere/at/all")
    Traceback (most recent call last):
    penstock.errors.OptionsError: /nowhere/at/all: there is nothing here
    """
    disk = disk or PosixDisk()
    for name in FORMATS:
        if _format(name).recognise(disk, path):
            return name
    if disk.stat(path) is None:
        raise OptionsError(f"{path}: there is nothing here")
    raise OptionsError(f"{path}: not a log of a known format ({', '.join(FORMATS)})")


def open_log(path: str, *, format: str | None = None, disk: ReadDisk | None = None) -> LogReader:
    """Open any log for reading; the format is detected unless it is given.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks") as writer:
    ...     position = writer.append(b"hello")
    >>> with open_log(folder.name + "/ticks") as log:
    ...     log.format, bytes(log.read(log.first_position)[0].payload)
    ('xchannel', b'hello')
    >>> folder.cleanup()
    """
    disk = disk or PosixDisk()
    name = format or detect(path, disk)
    if name not in FORMATS:
        raise OptionsError(f"format {name!r}: must be one of {', '.join(FORMATS)}")
    return _format(name).open_reader(disk, path)


def _format(name: str) -> Format:
    return cast("Format", importlib.import_module(FORMATS[name]))
