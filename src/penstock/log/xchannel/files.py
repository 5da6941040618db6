"""The files of a channel: finding them, opening one, mapping it window by window, finding its end."""

from __future__ import annotations

import math
import os
import struct
import time
from typing import Final

from penstock import kernel
from penstock.disk import ReadDisk, ReadFile, view_of
from penstock.disk.listing import names_from
from penstock.disk.posix import folder_of
from penstock.disk.sparse import data_end
from penstock.errors import CorruptionError, NotFoundError, OptionsError, UnsupportedError
from penstock.kernel import Cursor, Mapping
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    MAX_SEQUENCE,
    RECORD,
    SLOT_BYTES,
    ChannelHeader,
    RecordKind,
    RecordStop,
    file_path,
    file_sequence,
    position_of,
)

__all__ = [
    "ChannelFile",
    "discover",
    "is_there",
    "page_size",
    "problem_at",
    "sidecar_prefix",
    "window_bytes",
    "written_behind",
]

WINDOW_BYTES: Final = 64 << 20
"""How much of a file is mapped at a time: what bounds the memory of a reader or writer."""

COUNTERS: Final = struct.Struct("<QQ")  # write_position, message_count
FEW_REGIONS: Final = 4
LOOKS: Final = 8  # at a folder whose files come and go
SECOND_LOOK_SECONDS: Final = 0.001

page_size: Final = os.sysconf("SC_PAGE_SIZE")


def sidecar_prefix(base: str) -> str:
    """Return the prefix of the channel's sidecars."""
    return base + ".penstock-"


def discover(disk: ReadDisk, base: str, *, making: bool = False) -> list[int]:
    """Return the numbers of the channel's files, ascending; folders and other names do not count.

    Numbers come from a listing, which shows their holes.  One of a moment ago (disk/listing.py) will do if all of its
    files are still there and none came before or behind them, or, for who is ``making`` the channel, if there was
    none and neither a first file nor an identity came since.
    """
    name = os.path.basename(base)
    if not name:
        raise OptionsError(f"{base!r}: a channel needs a file name")
    found: list[int] = []
    for look in range(LOOKS):
        found, vanished, sure = _look(disk, base, name, again=look > 0)
        if sure and (found or not vanished):
            break  # else retention took every file that was listed, so there are newer ones
        if not sure and not vanished and _is_whole(disk, base, found, making):
            break
    if found and found[-1] > MAX_SEQUENCE:
        raise UnsupportedError(
            f"{file_path(base, found[-1])}: a file number above {MAX_SEQUENCE} has no position; "
            "if the file is not part of the channel, move it away"
        )
    return found


def _look(disk: ReadDisk, base: str, name: str, *, again: bool) -> tuple[list[int], bool, bool]:
    """Return the numbers of the files that are there, whether a listed one was gone, and whether the listing is new."""
    try:
        names, sure = names_from(disk, folder_of(base), name, again=again)
    except FileNotFoundError:
        raise NotFoundError(f"{base}: the folder does not exist") from None
    found, vanished = [], False
    for entry in names:
        sequence = file_sequence(name, entry)
        if sequence is None:
            continue
        stat = disk.stat(os.path.join(os.path.dirname(base), entry))
        if stat is None:
            vanished = True
        elif not stat.is_folder:
            found.append(sequence)
    return sorted(found), vanished, sure


def _is_whole(disk: ReadDisk, base: str, found: list[int], making: bool) -> bool:
    """Whether nothing came to the files that were listed a moment ago."""
    if found:
        around = [file_path(base, sequence) for sequence in (found[0] - 1, found[-1] + 1) if sequence >= 0]
    elif making:
        around = [base, sidecar_prefix(base) + "id"]
    else:
        return False
    return all(disk.stat(path) is None for path in around)


def is_there(disk: ReadDisk, base: str, sequence: int) -> bool:
    """Whether a file of the channel is there, without a look at all the others."""
    found = disk.stat(file_path(base, sequence))
    return found is not None and not found.is_folder


def window_bytes(region_bytes: int) -> int:
    """Return the size of a window over a file: whole regions, and whole pages to map."""
    unit = math.lcm(region_bytes, page_size)
    return max(1, WINDOW_BYTES // unit) * unit


class ChannelFile:
    """One open file of a channel."""

    def __init__(self, base: str, sequence: int, file: ReadFile) -> None:
        self.base, self.sequence, self.file = base, sequence, file
        self.path = file_path(base, sequence)
        try:
            self.header = ChannelHeader.decode(self.path, file.read_at(0, FIRST_SLOT))
        except BaseException:
            file.close()
            raise
        self.overstated = -1
        """A write_position that was found to be too high: no records are missing before it."""
        self.region_bytes = self.header.region_bytes
        self.window_bytes = window_bytes(self.region_bytes)

    @classmethod
    def open(cls, disk: ReadDisk, base: str, sequence: int) -> ChannelFile:
        """Open a file for reading and check its header."""
        return cls(base, sequence, disk.open(file_path(base, sequence)))

    @property
    def size(self) -> int:
        """The length of the file now."""
        return self.file.stat().size

    def position(self, offset: int) -> int:
        """Return the position of a byte of this file."""
        return position_of(self.sequence, offset)

    def window(self, offset: int, *, writable: bool = False) -> tuple[Mapping, int]:
        """Return the mapping that ``offset`` lies in and where that begins in the file."""
        start = offset // self.window_bytes * self.window_bytes
        length = self.window_bytes
        if not kernel.native:  # the twin maps only what is there
            length = min(length, max(self.size - start, 1))
        if writable:
            return self.file.map(start, length, writable=True), start
        return view_of(self.file, start, length), start

    def attach(self, cursor: Cursor, offset: int, bound: int | None = None) -> None:
        """Put a cursor on ``offset``, free to walk to the end of its window or of the file."""
        mapping, start = self.window(offset)
        stop = min(len(mapping), max(0, min(self.size, bound or self.size) - start))
        cursor.attach(mapping, offset - start, stop, self.region_bytes, self.position(start))

    def walk(self, cursor: Cursor, *, until: int = -1) -> tuple[int, int]:
        """Walk an attached cursor on, window by window; return (user, service) records passed."""
        users = services = 0
        while True:
            start = cursor.window_position - self.position(0)
            more = cursor.walk(-1 if until < 0 else max(until - start, 0))
            users, services = users + more[0], services + more[1]
            offset = start + cursor.at
            if cursor.status != RecordStop.END or offset >= self.size:
                return users, services
            if 0 <= until <= offset:
                return users, services
            self.attach(cursor, offset)

    def find_tail(self, cursor: Cursor) -> int:
        """Walk ``cursor`` to the end of what is committed and return that offset.

        Every region begins with a record, so the walk is one region long however large the file is.
        It does not rest on write_position, which a crash leaves behind.
        """
        region = (self.size - 1) // self.region_bytes
        if region > FEW_REGIONS:  # a writer has one ready at most: look no further back than where there is data
            region = min(region, max(data_end(self.file) - 1, 0) // self.region_bytes)
        while region > 0 and self.file.read_at(region * self.region_bytes, 1) in (b"\0", b""):
            region -= 1  # not begun: the end is here only if the region before ends with a Skip
        self.attach(cursor, max(region * self.region_bytes, 0))
        self.walk(cursor)
        return cursor.position - self.position(0)

    def is_sealed(self) -> bool:
        """Whether the file ends with a Roll: nobody writes to it any more."""
        cursor = Cursor()
        self.find_tail(cursor)
        return cursor.status == RecordStop.ROLLED

    def close(self) -> None:
        """Let go of the file; windows stay."""
        self.file.close()


def written_behind(file: ChannelFile, cursor: Cursor, slots: int = 1) -> CorruptionError | None:
    """Return what is wrong where ``cursor`` stands at the tail or a Roll, if the header knows of records behind it.

    Every writer stores message_count and then write_position after it has committed, so neither is ever ahead of the
    last record: where both are, a commit byte was lost, or a record became a Roll.  ``slots`` is what may lie behind a
    tail: with 2, a Roll that a power cut has taken, or the one that is there.
    """
    offset, stop = cursor.position - file.position(0), cursor.status
    for again in (True, False):
        wrote, messages = COUNTERS.unpack(file.file.read_at(SLOT_BYTES, COUNTERS.size))
        if wrote <= offset + SLOT_BYTES * slots or wrote == file.overstated:
            return None
        if cursor.ready() or cursor.status != stop or cursor.position != file.position(offset):
            return None
        if again:
            time.sleep(SECOND_LOOK_SECONDS)  # its writer may be between two stores
    walker = Cursor()
    file.attach(walker, 0)
    if messages <= sum(file.walk(walker, until=offset)) and walker.position == cursor.position:
        file.overstated = wrote
        return None  # it is write_position that is wrong
    what = "the record here is not committed" if stop == RecordStop.TAIL else "there is a Roll here"
    return CorruptionError(file.path, offset, f"{what}, though the channel was written up to byte {wrote - SLOT_BYTES}")


def problem_at(file: ChannelFile, offset: int, stop: int) -> CorruptionError:
    """Return what is wrong with the slot at ``offset``, in words."""
    size = file.size
    raw = file.file.read_at(offset, SLOT_BYTES)
    committed, kind, _, length, _ = RECORD.unpack(raw.ljust(SLOT_BYTES, b"\0"))
    left = file.region_bytes - offset % file.region_bytes
    where = offset
    match stop:
        case RecordStop.BAD_COMMIT:
            reason = f"commit byte is {committed}, neither 0 nor 1"
        case RecordStop.BAD_KIND:
            where, reason = offset + 1, f"record kind is {kind}, not one of 0 to 3"
        case RecordStop.STRAY_CHANNEL:
            where, reason = offset + 1, "a Channel record in the middle of a file: it was another one"
        case RecordStop.PAST_REGION:
            name = RecordKind(kind).name.capitalize()
            where, reason = offset + 4, (
                f"the {name} record has length {length}, but its region has {left - SLOT_BYTES} bytes left"
            )  # fmt: skip
        case RecordStop.SHORT_SKIP:
            where, reason = offset + 4, (
                f"the Skip has length {length}, but its region has {left - SLOT_BYTES} bytes left"
            )  # fmt: skip
        case RecordStop.NO_SLOT:
            reason = f"only {left} bytes are left in the region, too few for a record header"
        case RecordStop.TRUNCATED:
            where, reason = size, f"the file ends inside the record at byte {offset}"
        case RecordStop.END:
            where, reason = size, "the file ends where its next region should begin"
        case _:
            where, reason = size, f"the file is cut: {size} bytes are not a whole number of regions"
    return CorruptionError(file.path, where, reason)
