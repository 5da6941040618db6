"""What is wrong with a channel, and mending it.

``verify`` reads everything and names each problem.  ``repair`` makes a channel of what is whole: it reads without an
error here and in the original.  Files that held damage are kept beside it as ``.bad``.  Where messages are gone the
positions behind them move down, because the format has no way to write a gap: the log gets a new id, so that
whoever remembers positions notices, and named receivers go back to the place of the damage.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from penstock.disk import Disk, File, disk_for
from penstock.errors import CorruptionError, NotFoundError
from penstock.log.filechannel.compress import Unpacker
from penstock.log.filechannel.format import FRAME_HEAD, HEADER_BYTES, Header, segment_path
from penstock.log.filechannel.recover import (
    NEW,
    clamp_cursors,
    count_messages,
    readable_cursors,
    set_aside,
    settle_pair,
)
from penstock.log.filechannel.room import is_room
from penstock.log.filechannel.segments import Files, Folder, Walk
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

__all__ = ["verify", "repair", "Repaired"]

ZERO_PAGE_MESSAGES: Final = 512  # a page of zeros reads as this many empty messages


class SegmentFinding(msgspec.Struct):
    """One segment as it was found: the runs of whole frames in it, and what is wrong."""

    files: Files
    header: Header | None = None
    runs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    zeros: int = 0
    """How many empty messages it ends with."""
    count: int = 0
    """How many whole messages it has."""

    @property
    def size(self) -> int:
        """How many bytes of whole frames there are."""
        return sum(stop - start for start, stop in self.runs)


def verify(folder: Folder) -> Iterator[Problem]:
    """Yield every problem of a channel, segment by segment."""
    indexes = list(folder.files().values())
    expected: int | None = None
    for place, files in enumerate(indexes):
        following = indexes[place + 1] if place + 1 < len(indexes) else None
        finding = examine(folder, files, None if following is None else following.index)
        path = segment_path(folder.path, files.index, "" if files.plain else ".z")
        if place and files.index != indexes[place - 1].index + 1:
            missing = segment_path(folder.path, indexes[place - 1].index + 1)
            yield Problem(missing, 0, f"missing, though {path} is there; the original does not open such a channel")
            expected = None
        if finding.header is not None and expected not in (None, finding.header.begin):
            reason = f"the segment begins at {finding.header.begin}, but the one before it ends at {expected}"
            yield Problem(path, 4, reason)
        yield from finding.problems
        empty = finding.header is not None and not finding.size and not finding.problems
        if empty and place and following is not None:
            yield Problem(path, HEADER_BYTES, "a sealed segment without a message: the original stops here")
        if following is None and finding.zeros >= ZERO_PAGE_MESSAGES:
            reason = f"the channel ends with {finding.zeros} empty messages: sent as such, or zeros left by a power cut"
            yield Problem(path, HEADER_BYTES, reason)
        expected = None if finding.header is None or (not finding.runs and finding.problems) else _end_of(finding)


def _end_of(finding: SegmentFinding) -> int | None:
    if finding.header is None:
        return None
    if finding.header.end is not None:
        return finding.header.end
    return finding.runs[-1][1] if finding.runs else finding.header.begin


def examine(folder: Folder, files: Files, following: int | None) -> SegmentFinding:
    """Read one segment through and say what is whole in it."""
    finding = SegmentFinding(files)
    path = segment_path(folder.path, files.index, "" if files.plain else ".z")
    if files.plain and files.packed:
        finding.problems += _examine_pair(folder, files.index)
    try:
        file, finding.header = folder.open(files.index)
    except CorruptionError as exc:
        finding.problems.append(Problem(exc.file, exc.byte, exc.reason))
        return finding
    if files.plain and finding.header.method is not None:
        if folder.disk.stat(path) is not None:  # else it was compressed just now
            reason = "it is not what the compressed file beside it holds, and that one counts"
            finding.problems.append(Problem(path, 0, reason))
        path = segment_path(folder.path, files.index, ".z")
    with file:
        size = file.stat().size
        if finding.header.method is not None:
            try:
                Unpacker(file, finding.header).finish()
            except CorruptionError as exc:
                finding.problems.append(Problem(exc.file, exc.byte, exc.reason))
    begin = finding.header.begin
    end = finding.header.end if finding.header.end is not None else begin + size - HEADER_BYTES
    successor = None if following is None else folder.begin(following)
    if successor is not None and following == files.index + 1 and begin < successor != end:
        reason = f"it holds positions up to {end}, but the next segment begins at {successor}"
        finding.problems.append(Problem(path, HEADER_BYTES + min(end, successor) - begin, reason))
        end = min(end, successor)
    _runs(folder, finding, begin, end, newest=following is None)
    return finding


def _examine_pair(folder: Folder, index: int) -> list[Problem]:
    path = segment_path(folder.path, index, ".z")
    try:
        with folder.disk.open(path) as file:
            Unpacker(file, Header.decode(path, file.read_at(0, HEADER_BYTES), packed=True)).finish()
    except CorruptionError as exc:
        return [Problem(exc.file, exc.byte, exc.reason + "; its plain file is there and counts")]
    return []


def _is_room(folder: Folder, exc: CorruptionError) -> bool:
    with folder.disk.open(exc.file) as file:
        return is_room(file, exc.byte, file.stat().size)


def _runs(folder: Folder, finding: SegmentFinding, begin: int, end: int, *, newest: bool) -> None:
    """Walk the frames of one segment alone."""
    walk = Walk(_One(folder, finding.files))
    position = begin
    try:
        while position < end:
            try:
                batch = walk.read(position, 65_536, end)
            except CorruptionError as exc:
                if newest and _is_room(folder, exc):
                    break  # its writer is at work, or was killed: nothing is missing
                if not any(p.file == exc.file and p.reason == exc.reason for p in finding.problems):
                    finding.problems.append(Problem(exc.file, exc.byte, exc.reason))
                skipped = walk.skip_damage(position, end)
                position = end if skipped is None else skipped[0]
                continue
            if not len(batch):
                break
            if finding.runs and finding.runs[-1][1] == position:
                finding.runs[-1] = (finding.runs[-1][0], batch.next_position)
            else:
                finding.runs.append((position, batch.next_position))
            lengths = batch.payloads.lengths
            finding.count += len(lengths)
            filled = lengths.nonzero()[0]
            finding.zeros = finding.zeros + len(lengths) if not len(filled) else len(lengths) - 1 - int(filled[-1])
            position = batch.next_position
    finally:
        walk.close()


class _One(Folder):
    """A folder in which only one segment can be seen."""

    def __init__(self, folder: Folder, files: Files) -> None:
        super().__init__(folder.disk, folder.path)
        self._only, self._files = files.index, files

    def files(self) -> dict[int, Files]:
        """Return the one, without a look at the others."""
        return {self._only: self._files}

    def begin(self, index: int) -> int | None:
        """Return where the one begins."""
        return super().begin(index) if index == self._only else None


class Repaired(list[Problem]):
    """What ``repair`` found wrong, and what became of the messages."""

    kept = 0
    """How many messages the channel has now."""
    aside = 0
    """How many whole messages lie only in files that were set aside: in segments whose header is no header."""
    aside_bytes = 0
    """How many bytes lie only in such files: damaged messages, and what could not be told to be one."""


def repair(path: str | os.PathLike[str], disk: Disk | None = None) -> Repaired:
    """Make a sound channel of what is whole in a damaged one; return what was wrong, and how much was kept.

    LockedError while a writer has it open.  A sound channel is left as it is.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> FileChannel.open(folder.name).close()
    >>> repair(folder.name)
    []
    >>> folder.cleanup()
    """
    root, disk = os.fspath(path), disk or disk_for(path)
    if disk.stat(root) is None:
        raise NotFoundError(f"{root}: there is no channel here")
    lock = disk.lock(root + "/lock", of=root)
    try:
        return _repair(disk, root)
    finally:
        lock.release()


def _repair(disk: Disk, root: str) -> Repaired:
    folder, sidecar = Folder(disk, root), Sidecar(disk, root + "/penstock-")
    problems = Repaired(verify(folder))
    for files in folder.files().values():
        if files.plain and files.packed:
            settle_pair(disk, folder, files.index, [])
    indexes = list(folder.files().values())
    findings: list[SegmentFinding] = []
    for place, files in enumerate(indexes):
        following = indexes[place + 1].index if place + 1 < len(indexes) else None
        if findings and files.plain and following is not None:
            _mend_begin(disk, folder, files.index, _end_of(findings[-1]))
        findings.append(examine(folder, files, following))
    number = next((f.files.index for f in findings if f.runs), indexes[0].index if indexes else 0)
    begins = [f.header.begin for f in findings if f.header is not None and f.runs]
    at = begins[0] if begins else 0
    plan: list[tuple[SegmentFinding, int, int]] = []  # finding, its number and begin from now on
    moved: int | None = None
    for place, finding in enumerate(findings):
        last = place == len(findings) - 1
        if finding.header is None or (not finding.runs and not (last and not finding.problems)):
            plan.append((finding, -1, at))
            continue
        if moved is None and finding.header.begin != at:
            moved = at
        if moved is None and finding.runs:
            start, stop = finding.runs[0]
            if start != at:
                moved = at
            elif len(finding.runs) > 1:
                moved = stop
        plan.append((finding, number, at))
        number, at = number + 1, at + finding.size
    if moved is not None:
        _move_positions(sidecar, moved)
    clamp_cursors(sidecar, at)
    for finding, index, _ in plan:
        _account(disk, folder, problems, finding, kept=index >= 0)
    for finding, index, begin in plan:
        _apply(disk, folder, finding, index, begin)
    sidecar.close()
    return problems


def _account(disk: Disk, folder: Folder, problems: Repaired, finding: SegmentFinding, *, kept: bool) -> None:
    """Count the messages of a segment: those that stay in the channel, and what will lie in a file beside it."""
    if kept:
        problems.kept += finding.count
    suffix = "" if finding.files.plain else ".z"
    path = segment_path(folder.path, finding.files.index, suffix)
    found = disk.stat(path)
    size = 0 if found is None else max(0, found.size - HEADER_BYTES)
    if kept and suffix == "" and finding.problems:
        problems.aside_bytes += max(0, size - finding.size)
    if not kept and suffix == "" and size:
        with disk.open(path) as file:
            whole, rest = count_messages(file, size)
        problems.aside, problems.aside_bytes = problems.aside + whole, problems.aside_bytes + rest
    elif not kept:
        problems.aside_bytes += size


def _mend_begin(disk: Disk, folder: Folder, index: int, expected: int | None) -> None:
    """Put right a begin offset that contradicts both neighbours of its segment."""
    path = segment_path(folder.path, index)
    begin, following, found = folder.begin(index), folder.begin(index + 1), disk.stat(path)
    if None in (begin, following, expected, found) or begin == expected or found is None or expected is None:
        return
    if expected + found.size - HEADER_BYTES == following:
        with disk.modify(path) as file:
            file.write_at(0, Header(index, expected).encode(file.read_at(0, HEADER_BYTES)[12:]))
            file.sync()
        folder.forget(index)


def _move_positions(sidecar: Sidecar, moved: int) -> None:
    """From ``moved`` on positions mean something else: a new id, and cursors no further than that."""
    cursors = readable_cursors(sidecar)
    for name, position in cursors.items():
        sidecar.write_cursor(name, min(position, moved))
    content = sidecar.identity()
    sidecar.create_identity("raw" if content is None else content.content)
    for name, position in cursors.items():
        sidecar.write_cursor(name, min(position, moved))
    sidecar.remove_mark()


def _apply(disk: Disk, folder: Folder, finding: SegmentFinding, index: int, begin: int) -> None:
    old, root = finding.files, folder.path
    if index < 0:
        if old.plain:
            set_aside(disk, root, f"segment.{old.index}")
        if old.packed:
            set_aside(disk, root, f"segment.{old.index}.z")
        return
    assert finding.header is not None
    suffix = "" if old.plain else ".z"
    if finding.problems:
        replacement = f"{root}/{NEW}"
        with contextlib.suppress(FileNotFoundError):
            disk.remove(replacement)
        with disk.create(replacement) as file:
            file.write_at(0, Header(index, begin).encode())
            _copy_runs(folder, finding, file)
            file.sync()
        set_aside(disk, root, f"segment.{old.index}{suffix}")
        disk.rename(replacement, segment_path(root, index))
        disk.sync_folder(root)
        return
    header = finding.header
    if (header.begin, old.index) == (begin, index):
        return
    end = None if header.end is None else begin + finding.size
    path = segment_path(root, old.index, suffix)
    with disk.modify(path) as file:
        rest = file.read_at(0, HEADER_BYTES)[12 if end is None else 21 :]
        file.write_at(0, Header(index, begin, end, header.method).encode(rest))
        file.sync()
    if index != old.index:
        disk.rename(path, segment_path(root, index, suffix))
        disk.sync_folder(root)


def _copy_runs(folder: Folder, finding: SegmentFinding, target: File) -> None:
    walk, at = Walk(_One(folder, finding.files)), HEADER_BYTES
    try:
        for start, stop in finding.runs:
            position = start
            while position < stop:
                batch = walk.read(position, 65_536, stop)
                first = int(batch.payloads.offsets[0]) - FRAME_HEAD
                size = batch.next_position - position
                target.write_at(at, bytes(batch.view[first : first + size]))
                at, position = at + size, batch.next_position
    finally:
        walk.close()
