"""Opening a channel for writing after whatever happened to its last writer.

In the order it is done:

1. A power cut since the last durable mark: cut back to the mark.  A record has no checksum and its commit byte may
   have reached the disk before its payload, so nothing behind the mark can be trusted.  What is cut is set aside
   in ``<base>.penstock-cut-….bad``.
2. The end of the newest file is found by walking it, past records whose writer died before it stored write_position.
3. The file before it gets the Roll its writer did not live to commit.

Running it twice changes nothing.
"""

from __future__ import annotations

import logging
import struct
import time

from penstock import kernel
from penstock.disk import Disk, save_atomically
from penstock.disk.posix import folder_of
from penstock.errors import CorruptionError
from penstock.kernel import Cursor
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import ChannelFile, discover, page_size, problem_at
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    PRISTINE,
    SLOT_BYTES,
    Stop,
    file_path,
    split_position,
)

__all__ = ["cut_back", "complete_roll", "find_end"]

logger = logging.getLogger(__name__)


def find_end(file: ChannelFile) -> tuple[int, Stop, int]:
    """Return (offset of the end, why it is the end, message_count) of a file to be written to."""
    cursor = Cursor()
    offset = file.find_tail(cursor)
    stop = Stop(cursor.status)
    if stop not in (Stop.TAIL, Stop.ROLLED):
        raise problem_at(file, offset, stop)
    if file.size % file.region_bytes:
        raise problem_at(file, offset, Stop.LIMIT)
    counted = file.header.message_count
    at_rest = offset + SLOT_BYTES * (2 if stop is Stop.ROLLED else 1)
    if file.header.write_position != at_rest:
        counted = count_messages(file)
        logger.warning(
            "%s: its last writer died while writing; %d messages are there, up to byte %d",
            file.path, counted, offset,
        )  # fmt: skip
    return offset, stop, counted


def count_messages(file: ChannelFile) -> int:
    """Return what message_count should be: every record up to the end, except a Roll."""
    cursor = Cursor()
    file.attach(cursor, 0)
    return sum(file.walk(cursor))


def complete_roll(disk: Disk, base: str, sequence: int, region_bytes: int) -> None:
    """Commit the Roll that the file before ``sequence`` lacks, if it does.

    Refuses a file that readers coming from the one before could not enter.
    """
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
        if cursor.status == Stop.TAIL and file.size % file.region_bytes == 0:
            window, start = file.window(slot, writable=True)
            kernel.xchannelwrite.commit_roll(window, slot - start, time.time_ns())
            logger.warning("%s: completed its Roll to %s", file.path, file_path(base, sequence))
        elif cursor.status != Stop.ROLLED:
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


def _cut_file(disk: Disk, file: ChannelFile, offset: int, prefix: str) -> str | None:
    """Make ``offset`` the end of a file, keeping what was behind it in a file of its own."""
    cursor = Cursor()
    file.attach(cursor, 0)
    count = sum(file.walk(cursor, until=offset))
    end = cursor.position - file.position(0)
    if end != offset:
        raise CorruptionError(file.path, end, f"damaged before the durable mark at byte {offset}")
    region_end = (offset // file.region_bytes + 1) * file.region_bytes
    behind = file.file.read_at(offset, file.size - offset)
    aside = None
    if behind[:1] not in (b"\0", b""):
        aside = f"{prefix}cut-{file.sequence}-{offset}.bad"
        if disk.stat(aside) is None:
            save_atomically(disk, aside, behind)
    with disk.modify(file.path) as writable:
        writable.write_at(offset, PRISTINE.ljust(region_end - offset, b"\0"))
        writable.truncate(region_end)
        counters = struct.pack("<QQ", offset + SLOT_BYTES, count)
        writable.write_at(SLOT_BYTES, counters)
        writable.sync()
    return aside


def _set_aside(disk: Disk, base: str, sequence: int) -> str:
    aside = f"{base}.penstock-cut-{sequence}-{FIRST_SLOT}.bad"
    disk.rename(file_path(base, sequence), aside)
    return aside
