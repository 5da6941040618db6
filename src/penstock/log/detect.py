"""Which format a path holds, and the reader for it.

A format is one entry of FORMATS.  Its module has ``recognise(disk, path)``, which looks at names and headers only,
``open_reader(disk, path, on_damage)``, and ``gaps(expected, batch)``, which says where records are missing; where a
log can be written with default options also ``open_writer(disk, path, content, largest_bytes)``, and where logs are
files ``logs_in(disk, folder)``, their names in a folder.  Modules are imported when first asked, so that a format's
dependencies are needed only by those who use it.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Final, Protocol, cast

from penstock.batch import Batch
from penstock.disk import Disk, ReadDisk, disk_for, read_disk_for, when_there
from penstock.errors import NotFoundError, OptionsError, UnsupportedError
from penstock.log.face import LogReader, LogWriter, OnDamage

__all__ = ["FORMATS", "detect", "gaps_in", "open_log", "open_writer"]

FORMATS: Final = {
    "xchannel": "penstock.log.xchannel.log",
    "messagelog": "penstock.log.messagelog.log",
    "filechannel": "penstock.log.filechannel.log",
}


MAKING_SECONDS: Final = 5.0
"""How long who waits for a log looks at a path that is none yet: its writer may be making it."""


class Format(Protocol):
    """What the module of a format has."""

    def recognise(self, disk: ReadDisk, path: str) -> bool:
        """Whether ``path`` holds this format."""

    def open_reader(self, disk: ReadDisk, path: str, on_damage: OnDamage | None = None) -> LogReader:
        """Open ``path`` for reading."""

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return at how many places records are missing, as LogReader.gaps does."""


def detect(path: str, disk: ReadDisk | None = None) -> str:
    """Return the name of the format ``path`` holds; OptionsError when it is none that is known.

    >>> detect("/nowhere/at/all")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/at/all: there is nothing here
    """
    disk = disk or read_disk_for(path)
    for name in FORMATS:
        if _format(name).recognise(disk, path):
            return name
    found = disk.stat(path)
    if found is None:
        raise NotFoundError(f"{path}: there is nothing here")
    empty = found.is_folder and all(name.startswith("penstock-") for name in disk.list(path))  # or not made wholly yet
    error = NotFoundError if empty else OptionsError
    raise error(f"{path}: not a log of a known format ({', '.join(FORMATS)})")


def open_log(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    disk: ReadDisk | None = None,
    on_damage: OnDamage | None = None,
    timeout: float | None = 0.0,
) -> LogReader:
    """Open any log for reading; the format is detected unless it is given.

    For one that nobody has made yet it waits up to ``timeout`` seconds, None for ever; then NotFoundError.

    ``on_damage`` says what reading does at a damaged place.  Unless it is given, a message log goes on behind it and
    counts it, because its entries carry numbers that show what is missing; the other formats raise.

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
    here, known = os.fspath(path), disk or read_disk_for(path)
    unknown_since: float | None = None

    def open_now() -> LogReader:
        nonlocal unknown_since
        try:
            name = format or detect(here, known)
        except NotFoundError:
            raise
        except OptionsError as exc:  # its writer may be making it at this moment
            unknown_since = unknown_since or time.monotonic()
            if timeout == 0 or time.monotonic() - unknown_since > MAKING_SECONDS:
                raise
            raise NotFoundError(str(exc)) from None
        if name not in FORMATS:
            raise OptionsError(f"format {name!r}: must be one of {', '.join(FORMATS)}")
        return _format(name).open_reader(known, here, on_damage)

    return when_there(open_now, timeout)


def open_writer(
    path: str,
    *,
    format: str = "xchannel",
    content: str = "raw",
    largest_bytes: int | None = None,
    disk: Disk | None = None,
) -> LogWriter:
    """Open a log for writing with the format's default options, created if it is not there.

    ``largest_bytes`` is the largest record it is to take, where that is more than the format's defaults do.

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
    return cast("LogWriter", opener(disk or disk_for(path), path, content, largest_bytes))


def gaps_in(format: str, expected: int | None, batch: Batch) -> int:
    """Return at how many places records are missing in a batch and in front of it, by the rules of its format.

    >>> gaps_in("messagelog", 5, Batch.of([b"a", b"b"], positions=[5, 7]))
    1
    >>> gaps_in("filechannel", 100, Batch.of([b"a", b"b"], positions=[120, 140]))
    1
    >>> gaps_in("xchannel", 80, Batch.of([b"a", b"b"], positions=[80, (2 << 40) + 80]))
    1
    """
    if format not in FORMATS:
        raise OptionsError(f"format {format!r}: must be one of {', '.join(FORMATS)}")
    return _format(format).gaps(expected, batch)


def _format(name: str) -> Format:
    return cast("Format", importlib.import_module(FORMATS[name]))
