"""Which format a path holds, and the reader for it.

A format is one entry of FORMATS.  Its module has ``recognise(disk, path)``, which looks at names and headers
only, and ``open_reader(disk, path)``; where a log can be written with default options also ``open_writer(disk, path,
content)``, and where logs are files ``logs_in(disk, folder)``, their names in a folder.  Modules are imported when
first asked, so that a format's dependencies are needed only by those who use it.
"""

from __future__ import annotations

import importlib
from typing import Final, Protocol, cast

from penstock.disk import Disk, PosixDisk, ReadDisk
from penstock.errors import OptionsError, UnsupportedError
from penstock.log.face import LogReader, LogWriter

__all__ = ["FORMATS", "detect", "open_log", "open_writer"]

FORMATS: Final = {
    "xchannel": "penstock.log.xchannel.log",
    "messagelog": "penstock.log.messagelog.log",
    "filechannel": "penstock.log.filechannel.log",
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


def open_writer(path: str, *, format: str = "xchannel", content: str = "raw", disk: Disk | None = None) -> LogWriter:
    """Open a log for writing with the format's default options, created if it is not there.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = open_writer(folder.name + "/ticks")
    >>> writer.append(b"hello"); writer.close()
    80
    >>> folder.cleanup()
    """
    if format not in FORMATS:
        raise OptionsError(f"format {format!r}: must be one of {', '.join(FORMATS)}")
    opener = getattr(_format(format), "open_writer", None)
    if opener is None:
        raise UnsupportedError(f"{path}: a log of format {format} cannot be written from here")
    return cast("LogWriter", opener(disk or PosixDisk(), path, content))


def _format(name: str) -> Format:
    return cast("Format", importlib.import_module(FORMATS[name]))
