"""Opening a channel for writing after whatever happened to its last writer.

In the order it is done:

1. A power cut since the last durable mark: cut back to the mark.  A record has no checksum and its commit byte may
   have reached the disk before its payload, so nothing behind the mark can be trusted.  What is cut is set aside
   in ``<base>.penstock-cut-….bad``.
2. The end of the newest file is found by walking it, past records whose writer died before it stored write_position.
   Where write_position is ahead of that end, a commit byte was lost, to damage or to a power cut that no mark tells of:
   what lies behind it is set aside before it is written over.
3. The file before it gets the Roll its writer did not live to commit.

Running it twice changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from typing import Final

from penstock import kernel
from penstock.disk import Disk
from penstock.disk.aside import bad_path, keep_bytes
from penstock.disk.posix import folder_of
from penstock.disk.sparse import is_empty
from penstock.errors import CorruptionError, PenstockError
from penstock.kernel import Cursor
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import ChannelFile, discover, page_size, problem_at, sidecar_prefix, written_behind
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    PRISTINE,
    SLOT_BYTES,
    RecordKind,
    RecordStop,
    file_path,
    position_of,
    split_position,
)

__all__ = [
    "check_mark",
    "check_rolls",
    "cut_back",
    "complete_roll",
    "find_end",
    "is_older",
    "keep_hidden",
    "lost_roll",
    "mark_ahead",
]

logger = logging.getLogger(__name__)

ROLLED: Final = bytes((1, RecordKind.ROLL))  # how a Roll begins


def find_end(file: ChannelFile) -> tuple[int, RecordStop, int]:
    """Return (offset of the end, why it is the end, message_count) of a file to be written to."""
    cursor = Cursor()
    offset = file.find_tail(cursor)
    stop = RecordStop(cursor.status)
    if stop not in (RecordStop.TAIL, RecordStop.ROLLED):
        raise problem_at(file, offset, stop)
    if file.size % file.region_bytes:
        raise problem_at(file, offset, RecordStop.LIMIT)
    counted = file.header.message_count
    at_rest = offset + SLOT_BYTES * (2 if stop is RecordStop.ROLLED else 1)
    if file.header.write_position != at_rest:
        counted = count_messages(file)
        logger.warning(
            "%s: its last writer died while writing; %d messages are there, up to byte %d",
            file.path, counted, offset,
        )  # fmt: skip
    return offset, stop, counted


def keep_hidden(disk: Disk, file: ChannelFile, offset: int, stop: RecordStop) -> None:
    """Copy what lies behind the end of a file, if its header knows of records there, before a writer goes on at it."""
    if stop is not RecordStop.TAIL or file.header.write_position <= offset + SLOT_BYTES:
        return
    cursor = Cursor()
    file.attach(cursor, offset)
    cursor.ready()
    hidden = written_behind(file, cursor)
    if hidden is None or is_empty(file.file, offset + SLOT_BYTES, file.file.stat().size):
        return
    aside = keep_bytes(disk, f"{sidecar_prefix(file.base)}cut-{file.sequence}-{offset}", file.file, offset)
    logger.warning("%s; what lies behind it was set aside in %s", hidden, aside)


def count_messages(file: ChannelFile) -> int:
    """Return what message_count should be: every record up to the end, except a Roll."""
    cursor = Cursor()
    file.attach(cursor, 0)
    return sum(file.walk(cursor))


def check_mark(disk: Disk, base: str, sidecar: Sidecar) -> None:
    """Refuse a channel that ends before the durable mark of this boot: files that are older than their sidecars."""
    mark = sidecar.durable_position()
    sequences = discover(disk, base, making=True)
    if mark is None or not sequences or sidecar.lost_power_at() is not None:
        return
    file = ChannelFile.open(disk, base, sequences[-1])
    try:
        cursor = Cursor()
        offset = file.find_tail(cursor)
        end = file.position(offset)
        if cursor.status == RecordStop.ROLLED:  # the file it leads to is made anew
            end = position_of(file.sequence + 1, FIRST_SLOT)
        if cursor.status in (RecordStop.TAIL, RecordStop.ROLLED) and end < mark:
            raise mark_ahead(file, offset, mark, sidecar)
    finally:
        file.close()


def mark_ahead(file: ChannelFile, offset: int, mark: int, sidecar: Sidecar) -> CorruptionError:
    """Return what to say of a channel that ends before its durable mark."""
    sequence, byte = split_position(mark)
    return CorruptionError(
        file.path,
        offset,
        f"the channel ends here, but it had been synced up to byte {byte} of {file_path(file.base, sequence)}: its "
        f"files are from different times; if they were put here on purpose, remove {sidecar.mark.path}",
    )


def is_older(file: ChannelFile, offset: int, sidecar: Sidecar) -> bool:
    """Whether a file without a Roll at its end is older than the one behind it, and not just without its Roll.

    Our writer notes where it ends a file before it puts a record into the next one.
    """
    ended = sidecar.last_roll()
    return ended is not None and ended != file.position(offset)


def lost_roll(file: ChannelFile, offset: int) -> CorruptionError:
    """Return what to say of a file without a Roll that is followed by one with records."""
    following = file_path(file.base, file.sequence + 1)
    return CorruptionError(
        file.path, offset, f"no Roll, though the channel goes on in {following}: its files are from different times"
    )


def check_rolls(disk: Disk, base: str, sequences: list[int], sidecar: Sidecar) -> None:
    """Refuse a channel in which an older file lacks its Roll, though no power cut can have taken it.

    Two short reads a file; the last file but one is looked at by ``complete_roll``.
    """
    if sidecar.last_roll() is None:
        return
    for sequence in sequences[:-2]:
        try:
            file = ChannelFile.open(disk, base, sequence)
        except (OSError, PenstockError):
            continue  # whoever reads it says what is wrong with it
        try:
            slot = file.header.write_position - 2 * SLOT_BYTES
            if slot >= FIRST_SLOT and file.file.read_at(slot, 2) == ROLLED:
                continue
            cursor = Cursor()
            offset = file.find_tail(cursor)
            if cursor.status == RecordStop.TAIL and is_older(file, offset, sidecar):
                raise lost_roll(file, offset)
        finally:
            file.close()


def complete_roll(disk: Disk, base: str, newest: ChannelFile) -> None:
    """Commit the Roll that the file before the newest lacks, if it does.

    Refuses a file that readers coming from the one before could not enter, and one with records to which no Roll leads
    though no power cut can have taken it.
    """
    sequence, region_bytes = newest.sequence, newest.region_bytes
    try:
        file = ChannelFile(base, sequence - 1, disk.modify(file_path(base, sequence - 1)))
    except FileNotFoundError:
        return
    except CorruptionError as exc:
        logger.warning("%s; readers will stop there", exc)
        return
    try:
        if file.region_bytes != region_bytes:
            raise CorruptionError(
                file_path(base, sequence), 40, f"region_size is {region_bytes}, but {file.path} has {file.region_bytes}"
            )
        cursor = Cursor()
        slot = file.find_tail(cursor)
        if cursor.status == RecordStop.TAIL and file.size % file.region_bytes == 0:
            begun = newest.file.read_at(FIRST_SLOT, 1) == b"\1"
            if begun and is_older(file, slot, Sidecar(disk, sidecar_prefix(base))):
                raise lost_roll(file, slot)
            window, start = file.window(slot, writable=True)
            kernel.xchannelwrite.commit_roll(window, slot - start, max(0, time.time_ns()))
            logger.warning("%s: completed its Roll to %s", file.path, file_path(base, sequence))
        elif cursor.status != RecordStop.ROLLED:
            logger.warning("%s; readers will stop there", problem_at(file, slot, cursor.status))
            return
        at_rest = slot + 2 * SLOT_BYTES
        if file.header.write_position != at_rest:
            head = file.file.map(0, page_size, writable=True)
            kernel.xchannelwrite.store_counts(head, at_rest, kernel.load_counts(head)[1])
    finally:
        file.close()


def cut_back(disk: Disk, base: str, sidecar: Sidecar) -> list[str]:
    """Cut a channel back to the durable mark of an earlier boot; return the names of what was set aside."""
    mark = sidecar.lost_power_at()
    if mark is None:
        return []
    sequence, offset = split_position(mark)
    sequences = discover(disk, base)
    if sequence not in sequences:
        return []
    _move_cursors_back(sidecar, mark)  # first: a crash in between only delivers again
    aside = [_set_aside(disk, base, later) for later in sequences if later > sequence]
    file = ChannelFile(base, sequence, disk.modify(file_path(base, sequence)))
    try:
        tail = _cut_file(disk, file, offset, sidecar.prefix)
        if tail is not None:
            aside.append(tail)
    finally:
        file.close()
    disk.sync_folder(folder_of(base))
    sidecar.write_mark(mark)
    if aside:
        logger.warning("%s: power was lost; set aside what was not durable: %s", base, ", ".join(aside))
    return aside


def _move_cursors_back(sidecar: Sidecar, position: int) -> None:
    """Move every named cursor behind ``position`` there: what comes next at those places has not been read."""
    for name in sidecar.cursor_names():
        with contextlib.suppress(CorruptionError):  # its reader starts anew
            found = sidecar.read_cursor(name)
            if found is not None and found > position:
                sidecar.write_cursor(name, position)


def _cut_file(disk: Disk, file: ChannelFile, offset: int, prefix: str) -> str | None:
    """Make ``offset`` the end of a file, keeping what was behind it in a file of its own."""
    cursor = Cursor()
    file.attach(cursor, 0)
    count = sum(file.walk(cursor, until=offset))
    end = cursor.position - file.position(0)
    if end != offset:
        raise CorruptionError(file.path, end, f"damaged before the durable mark at byte {offset}")
    region_end = (offset // file.region_bytes + 1) * file.region_bytes
    aside = None
    if file.file.read_at(offset, 1) not in (b"\0", b""):
        aside = keep_bytes(disk, f"{prefix}cut-{file.sequence}-{offset}", file.file, offset)
    with disk.modify(file.path) as writable:
        writable.write_at(offset, PRISTINE.ljust(region_end - offset, b"\0"))
        writable.truncate(region_end)
        counters = struct.pack("<QQ", offset + SLOT_BYTES, count)
        writable.write_at(SLOT_BYTES, counters)
        writable.sync()
    return aside


def _set_aside(disk: Disk, base: str, sequence: int) -> str:
    aside = bad_path(disk, f"{base}.penstock-cut-{sequence}-{FIRST_SLOT}")
    disk.rename(file_path(base, sequence), aside)
    return aside
