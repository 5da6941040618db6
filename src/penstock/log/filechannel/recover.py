"""Finding the end of a channel after a crash, and setting aside what is no longer whole.

Opening looks at the newest segment only.  Its frames are walked; what follows the last whole one is trimmed, and
kept as ``penstock-cut-<segment>-<byte>.bad`` unless it is all zeros.  A newest file that is too short for a header, or
a newest ``.z`` whose header is no header, becomes ``penstock-segment.N.bad`` and the one before it is the newest.

Zeros read as empty messages.  Where the sidecar's mark is of an earlier start of the machine, power was lost since:
behind the mark an empty message may be a page that never reached the disk, and it is cut there.  Without a mark
nobody can know, and they are messages, as they are to the original (docs/decisions/022-zero-tail.md).
"""

from __future__ import annotations

import contextlib
import logging
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from penstock import kernel
from penstock.disk import Disk, ReadFile
from penstock.disk.aside import bad_path, keep_bytes
from penstock.disk.sparse import copy_data, is_empty
from penstock.errors import CorruptionError
from penstock.log.filechannel.compress import Unpacker
from penstock.log.filechannel.format import FRAME_HEAD, HEADER_BYTES, FrameStop, Header, segment_path
from penstock.log.filechannel.room import is_room
from penstock.log.filechannel.segments import Folder
from penstock.log.filechannel.sources import BELIEVED_BYTES, sums_up
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

__all__ = ["Tail", "find_tail", "settle_pair", "set_aside", "clamp_cursors", "readable_cursors"]

logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 4 << 20
NEW: Final = "penstock-new"
MARK_POSITION_BYTE: Final = 16
"""Where the register of the mark has its position."""


class Tail(msgspec.Struct):
    """Where a writer goes on: the segment, where it begins and ends; ``exists`` is False when it is to be made."""

    index: int
    begin: int
    end: int
    exists: bool


def find_tail(disk: Disk, folder: Folder, sidecar: Sidecar) -> tuple[Tail, list[Problem]]:
    """Return where to write on, having trimmed and set aside what is in the way; only under the lock."""
    mark = _mark(sidecar)[1]
    tail, problems = _find_tail(disk, folder, sidecar)
    lost = not folder.files()  # every segment is gone
    if mark and (mark > tail.end or lost):
        end = "no segment is left" if lost else f"the queue ends at {tail.end}"
        reason = f"everything below {mark} was synced, but {end}: it was cut, or its files are older than the mark"
        problem = Problem(sidecar.mark.path, MARK_POSITION_BYTE, reason)
        logger.warning("%s", problem)
        problems.append(problem)
    return tail, problems


def _find_tail(disk: Disk, folder: Folder, sidecar: Sidecar) -> tuple[Tail, list[Problem]]:
    problems: list[Problem] = []
    files = folder.files()
    indexes = list(files)
    gaps = [(index, later - index - 1) for index, later in pairwise(indexes) if later > index + 1]
    if gaps:
        path, count = segment_path(folder.path, gaps[0][0] + 1), sum(count for _, count in gaps)
        problems.append(Problem(path, 0, f"missing: {count} segment(s) between others; repair closes the gap"))
    for found in files.values():
        if found.plain and found.packed:
            found.packed = settle_pair(disk, folder, found.index, problems)
            found.plain = not found.packed
    highest, sealed = max(files, default=0), False
    for index in sorted(files, reverse=True):
        found = files[index]
        try:
            if found.packed:
                with disk.open(segment_path(folder.path, index, ".z")) as file:
                    header = Header.decode(file.path, file.read_at(0, HEADER_BYTES), packed=True)
                if header.index != index:
                    raise header.misplaced(file.path)
                assert header.end is not None
                clamp_cursors(sidecar, header.end)
                return Tail(index + 1, header.end, header.end, exists=False), problems
            if found.plain:
                tail = _mend_plain(disk, folder, index, sidecar, problems, sealed=sealed)
                return tail, problems
        except CorruptionError as exc:
            problems.append(_aside(disk, folder, exc))
        sealed = True
    # Nothing readable is left.  Positions go on behind everything that anyone remembers.
    remembered = [_mark(sidecar)[1], *readable_cursors(sidecar).values()]
    begin = max(remembered)
    return Tail(highest, begin, begin, exists=False), problems


def set_aside(disk: Disk, folder: str, name: str) -> str:
    """Rename a file of the channel so that nobody reads it; return its new name, never one that is taken."""
    target = bad_path(disk, f"{folder}/penstock-{name}")
    disk.rename(f"{folder}/{name}", target)
    disk.sync_folder(folder)
    return target


def clamp_cursors(sidecar: Sidecar, position: int, *, kept: bool | None = None) -> None:
    """Move back every cursor past ``position``: what comes there next has not been seen by anyone.

    It is done before a file is cut, so that a crash in between only delivers again.  Without a power cut the messages
    that were seen behind the end did not just vanish: then the cursor stays, and its receiver is told.  ``kept`` says
    whether that is so, instead of the mark.
    """
    kept = sidecar.kept_power() if kept is None else kept
    for name, cursor in readable_cursors(sidecar).items():
        if cursor > position:
            seen = sidecar.cursor_seen(name)
            if kept and seen is not None and seen.position >= position:
                continue
            logger.warning("%scursor-%s: moved back from %d to %d, where the messages end", sidecar.prefix, name,
                           cursor, position)  # fmt: skip
            sidecar.write_cursor(name, position)


def readable_cursors(sidecar: Sidecar) -> dict[str, int]:
    """Return the cursors that can be read; the others start again at the first message."""
    found = {}
    for name in sidecar.cursor_names():
        with contextlib.suppress(CorruptionError):
            position = sidecar.read_cursor(name)
            if position is not None:
                found[name] = position
    return found


def _mark(sidecar: Sidecar) -> tuple[int | None, int]:
    """Return the mark of an earlier boot, if it is one, and its position; a mark that is destroyed tells nothing."""
    try:
        return sidecar.lost_power_at(), sidecar.durable_position() or 0
    except CorruptionError as exc:
        logger.warning("%s; it is not used", exc)
        sidecar.remove_mark()
        return None, 0


def settle_pair(disk: Disk, folder: Folder, index: int, problems: list[Problem]) -> bool:
    """Decide between a plain file and the .z beside it: the .z stays if it is whole, as in the original; True then.

    The plain one is removed if it is the same, which is what a crash in the last step of a compression leaves.
    """
    plain, packed = (segment_path(folder.path, index, suffix) for suffix in ("", ".z"))
    try:
        with disk.open(packed) as file, disk.open(plain) as other:
            header = Header.decode(packed, file.read_at(0, HEADER_BYTES), packed=True)
            unpacker, at, same = Unpacker(file, header), HEADER_BYTES, True
            while piece := unpacker.read(WINDOW_BYTES):
                same = same and other.read_at(at, len(piece)) == piece
                at += len(piece)
            unpacker.finish()
            same = same and at == other.stat().size
    except CorruptionError as exc:
        problems.append(_aside(disk, folder, exc))
        return False
    if same:
        disk.remove(plain)
    else:
        reason = "it is not what the compressed file beside it holds"
        problems.append(_aside(disk, folder, CorruptionError(plain, 0, reason)))
    folder.forget(index)
    return True


def _aside(disk: Disk, folder: Folder, exc: CorruptionError) -> Problem:
    name = exc.file.removeprefix(folder.path + "/")
    target = set_aside(disk, folder.path, name)
    logger.warning("%s; set aside as %s", exc, target)
    return Problem(exc.file, exc.byte, f"{exc.reason}; set aside as {target}")


def _mend_plain(
    disk: Disk, folder: Folder, index: int, sidecar: Sidecar, problems: list[Problem], *, sealed: bool
) -> Tail:
    """Walk the newest plain segment to its end and trim what follows."""
    path = segment_path(folder.path, index)
    with disk.modify(path) as file:
        header = Header.decode(path, file.read_at(0, HEADER_BYTES), packed=False)
        if header.index != index:
            raise header.misplaced(path)
        size = file.stat().size
        end, reason = walk_to_end(file, header.begin, size, _mark(sidecar)[0])
        stop = HEADER_BYTES + end - header.begin
        clamp_cursors(sidecar, end)
        if stop == size:
            return Tail(index, header.begin, end, exists=True)
        if not sealed and is_room(file, stop, size):  # its writer was killed: nothing is missing
            file.truncate(stop)
            return Tail(index, header.begin, end, exists=True)
        reason = f"{reason}; {size - stop} bytes trimmed"
        aside = _keep(disk, folder, file, index, stop, size)
        if aside:
            reason += f", kept as {aside}"
        if sealed:  # readers elsewhere may have it mapped: leave them their file
            replacement = f"{folder.path}/{NEW}"
            with contextlib.suppress(FileNotFoundError):
                disk.remove(replacement)
            with disk.create(replacement) as copy:
                copy_data(file, 0, stop, copy)
                copy.sync()
            disk.rename(replacement, path)
            disk.sync_folder(folder.path)
        else:
            file.truncate(stop)
            file.sync()
    logger.warning("%s at byte %d: %s", path, stop, reason)
    problems.append(Problem(path, stop, reason))
    return Tail(index, header.begin, end, exists=True)


def walk_to_end(
    file: ReadFile, begin: int, size: int, doubt_from: int | None, start: int | None = None
) -> tuple[int, str]:
    """Return the position behind the last whole frame of a plain segment, and why it is the last.

    ``start`` is a message to begin at, where the ones before it were walked already.
    """
    position, end = begin if start is None else start, begin + size - HEADER_BYTES
    columns = tuple(np.empty(65_536, np.int64) for _ in range(3))
    want = WINDOW_BYTES
    while position < end:
        data = file.read_at(HEADER_BYTES + position - begin, min(want, end - position))
        count, at, status = kernel.scan_frames(data, 0, len(data), position, *columns)
        want = WINDOW_BYTES
        if count and doubt_from is not None and position + at > doubt_from:
            empty = np.flatnonzero((columns[2][:count] == 0) & (columns[0][:count] >= doubt_from))
            if len(empty):
                return int(columns[0][empty[0]]), "zeros behind the durable mark, after a loss of power"
        position += at
        if status == FrameStop.BAD_CRC:
            return position, f"the message at position {position} fails its checksum"
        if status == FrameStop.SHORT and not count:
            needed = FRAME_HEAD + int.from_bytes(data[:4], "big")
            if len(data) < FRAME_HEAD or needed > end - position:
                return position, f"the message at position {position} is torn"
            if needed <= BELIEVED_BYTES:
                want = needed
            elif sums_up(file, HEADER_BYTES + position - begin, needed):
                position += needed
            else:
                return position, f"the message at position {position} fails its checksum"
    return position, ""


def count_messages(file: ReadFile, size: int) -> tuple[int, int]:
    """Return how many whole messages a plain segment begins with, whatever its header says, and the bytes behind."""
    columns = tuple(np.empty(65_536, np.int64) for _ in range(3))
    at, count, want = 0, 0, WINDOW_BYTES
    while at < size:
        data = file.read_at(HEADER_BYTES + at, min(want, size - at))
        found, after, status = kernel.scan_frames(data, 0, len(data), 0, *columns)
        count, at, want = count + found, at + after, WINDOW_BYTES
        if status == FrameStop.BAD_CRC or len(data) < FRAME_HEAD:
            break
        if status == FrameStop.SHORT and not found:
            needed = FRAME_HEAD + int.from_bytes(data[:4], "big")
            if needed > size - at:
                break
            if needed <= BELIEVED_BYTES:
                want = needed
            elif sums_up(file, HEADER_BYTES + at, needed):
                count, at = count + 1, at + needed
            else:
                break
    return count, size - at


def _keep(disk: Disk, folder: Folder, file: ReadFile, index: int, stop: int, size: int) -> str | None:
    """Copy what is about to be trimmed, unless it is nothing but zeros."""
    if is_empty(file, stop, size):
        return None
    return keep_bytes(disk, f"{folder.path}/penstock-cut-{index}-{stop}", file, stop, size)
