"""Room behind the last message of the newest segment, so that a send is a store to memory and no system call.

While there is room the file is longer than its messages: behind them stands a mark that reads as a frame cut short, to
us and to the original, and then zeros.  Whoever seals or closes the segment cuts the file to its exact length first;
after a kill, recovery does (docs/decisions/035-a-send-is-a-store.md).
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Final

from penstock import kernel
from penstock.disk import File, PosixDisk, ReadFile
from penstock.disk.face import Disk
from penstock.disk.posix import PosixFile, folder_of
from penstock.disk.sparse import is_empty
from penstock.errors import CorruptionError, PenstockError, ReplacedError
from penstock.log.filechannel.format import HEADER_BYTES

if TYPE_CHECKING:
    from penstock.kernel.tail import Tail

__all__ = ["ROOM_BYTES", "ROOM_MARK", "can_have_room", "make_room", "is_room", "what_was_done"]

ROOM_MARK: Final = b"\xff\xff\xff\xff"
"""The length of a frame that no file holds, and what ends the messages of a segment that has room behind them."""
ROOM_BYTES: Final = 256 << 10
LONGEST: Final = 16 << 10
"""A longer message is written: copying it would hold up other threads."""
PAGE: Final = 4096


def can_have_room(disk: Disk, file: File) -> bool:
    """Whether stores to the file can never find the device full, on a disk and a system where files are mapped."""
    if (
        not kernel.native
        or sys.byteorder != "little"
        or not isinstance(disk, PosixDisk)
        or not isinstance(file, PosixFile)
    ):
        return False
    return kernel.tail.overwrites(file.fd)


def make_room(file: File, begin: int, end: int, full: int) -> Tail:
    """Return room behind ``end`` in the file of the segment that begins at ``begin``; at ``full`` nothing more is sent.

    OSError, and the file is as it was, when the device has none.
    """
    size = HEADER_BYTES + end - begin
    length = ROOM_BYTES + PAGE - (size + ROOM_BYTES) % PAGE  # to the end of a page
    try:
        file.write_at(size, ROOM_MARK.ljust(length, b"\0"))  # in order: the mark is there before what is behind it
        origin = size - size % PAGE
        window = file.map(origin, size + length - origin, writable=True)
        window.populate(0, len(window))
    except BaseException:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise
    return kernel.tail.Tail(window, size - origin, end, full, LONGEST)


def is_room(file: ReadFile, offset: int, size: int) -> bool:
    """Whether there is nothing but room from ``offset`` to the end of the file."""
    if file.read_at(offset, len(ROOM_MARK)) != ROOM_MARK:
        return False
    return is_empty(file, offset + len(ROOM_MARK), size)


def what_was_done(disk: Disk, file: File, name: str, had: int, *, named: bool) -> PenstockError | None:
    """Return what somebody did to the newest segment while its owner had it open: cut it or, ``named``, moved it."""
    found = file.stat()
    if found.size < had:
        return CorruptionError(name, found.size, f"it was cut while the channel was open: it had {had} bytes")
    there = disk.stat(name) if named else found
    if there is None or there.identity != found.identity:
        return ReplacedError(folder_of(name), "its newest segment was moved or removed while its owner had it open")
    return None
