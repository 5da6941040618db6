"""The reading side of a message log: the common face of logs, and entries with their numbers as they are.

Reading changes no file.  Sealed segments are mapped; the last one, which a recovery may cut, is read into a buffer of
the batch's own.  Behind a damaged place reading goes on at the next intact entry (resync.py); what is missing is
logged, counted and listed, or raised where that was asked for.  In the last segment, bytes behind the last intact
entry are not damage: they may be an entry that is being written.
"""

from __future__ import annotations

import operator
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.batch import Batch, Spans
from penstock.disk import ClosingHandle, Disk, FolderWait, LoopWait, ReadDisk, read_disk_for
from penstock.disk.doors import refuse_other
from penstock.errors import ClosedError, CorruptionError, OptionsError, PenstockError, UnsupportedError
from penstock.log.damage import check_on_damage
from penstock.log.face import OnDamage
from penstock.log.messagelog.cut import cut
from penstock.log.messagelog.folder import LogFolder
from penstock.log.messagelog.format import BAD, HEAD, MAX_POSITION, MAX_SEQ, LogEntry, segment_number
from penstock.log.messagelog.resync import mark_ahead
from penstock.log.messagelog.segment import FoundEntries, Segment
from penstock.log.messagelog.verify import verify_segments
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

if TYPE_CHECKING:
    from penstock.log.messagelog.writer import MessageLog

__all__ = ["MessageLogReader", "gaps", "open_reader", "open_writer", "recognise"]

NUMBER_AND_TIME: Final = struct.Struct("<QQ")


class MessageLogReader(ClosingHandle):
    """A message log, read through the face that all logs have.  Positions are sequence numbers.

    >>> import tempfile
    >>> from penstock.log.messagelog import MessageLog
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = MessageLog.open(folder.name)
    >>> numbers = writer.append_many([b"one", b"two"], sender="ann@localhost")
    >>> log = MessageLogReader(folder.name)
    >>> log.first_position, log.next_position, log.read(2).to_payloads()
    (1, 3, [b'two'])
    >>> bytes(log.read(2)[0].extra["from"])
    b'ann@localhost'
    >>> list(log.verify())
    []
    >>> log.close(); writer.close(); folder.cleanup()
    """

    format = "messagelog"
    origin = 1
    has_kinds = False

    def __init__(
        self, path: str | os.PathLike[str], disk: ReadDisk | None = None, *, on_damage: OnDamage = "skip"
    ) -> None:
        super().__init__()
        check_on_damage(on_damage)
        self.path, self.on_damage = os.fspath(path), on_damage
        self._disk = disk or read_disk_for(path)
        self._sidecar = Sidecar(self._disk, os.path.join(self.path, "penstock-"))
        self._folder = LogFolder(self._disk, self.path, self._sidecar, raises=on_damage == "raise")
        if not self._folder.numbers:
            refuse_other(self._disk, self.path, "message log")
        self._lock = threading.RLock()
        self._closed = False

    # --- Bounds

    @property
    def first_position(self) -> int:
        """The number in the name of the oldest segment; of an empty log, the number its first entry will get."""
        with self._lock:
            self._check_open()
            self._folder.refresh()
            return self._folder.first()

    @property
    def next_position(self) -> int:
        """Behind the newest entry that is visible now."""
        last = self.last_seq
        if last > MAX_POSITION - 1:
            raise UnsupportedError(f"{self.path}: the newest entry has number {last}; positions end at 2^63 - 1")
        return max(last + 1, self.first_position)

    @property
    def last_seq(self) -> int:
        """The number of the newest entry, 0 when there is none."""
        with self._lock:
            self._check_open()
            return self._folder.last_seq()

    @property
    def durable_position(self) -> int | None:
        """The durable mark, if its writer keeps one."""
        return self._sidecar.durable_position()

    @property
    def content(self) -> str:
        """``raw``, or ``envelope/1`` if its writer said so."""
        identity = self._sidecar.identity()
        return "raw" if identity is None else identity.content

    @property
    def damage(self) -> list[Problem]:
        """What reading has stepped over so far."""
        with self._lock:
            return list(self._folder.damage.problems)

    @property
    def damage_count(self) -> int:
        """How many places reading has stepped over so far."""
        return self._folder.damage.count

    def keeps(self, position: int) -> bool:
        """Whether nothing at or behind ``position`` was removed."""
        return position >= self.first_position

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return at how many places numbers are missing in a batch and in front of it."""
        return gaps(expected, batch)

    # --- Reading

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return entries from ``position`` on; the sender is the extra column ``from``, the number also ``seq``."""
        with self._lock:
            self._check_open()
            position = self._checked(position)
            found = self._folder.near(position, limit)
            if found is None:
                if position < self._folder.first():
                    self._folder.refresh()
                    self._folder.check_expired(position)
                found = self._find(position, limit, expires=True) if limit > 0 else None
        return _nothing(position) if found is None else _batch(found)

    def skip_damage(self, position: int) -> tuple[int, Problem] | None:
        """Return where reading goes on behind what is missing at ``position``, and what it is; None if nothing is."""
        with self._lock:
            self._check_open()
            position = self._checked(position)
            if position < 0:
                self._folder.check_expired(position)
            _, problems, onwards = self._folder.find(position, 1, may_skip=True)
        return (onwards, problems[0]) if problems and onwards > position else None

    def _checked(self, position: int) -> int:
        if (position := operator.index(position)) > MAX_POSITION:
            raise OptionsError(f"{self.path}: position {position}: must be below 2^63")
        return position

    def _find(self, want: int, limit: int, *, expires: bool = False) -> FoundEntries | None:
        found, problems, _ = self._folder.find(want, limit, expires=expires)
        for problem in problems:
            if self.on_damage == "raise":
                raise CorruptionError(problem.file, problem.byte, problem.reason)
            self._folder.note(problem)
        return found

    def entries(self, from_seq: int = 1, limit: int = DEFAULT_LIMIT) -> Iterator[LogEntry]:
        """Yield up to ``limit`` entries with their numbers as they are on disk, also those above 2^63 - 1.

        Like the original it begins with the oldest entry there is when ``from_seq`` is below it.
        """
        left, want = limit, max(from_seq, 1)
        while left > 0 and want < 1 << 64:
            with self._lock:
                self._check_open()
                found = self._find(want, min(left, 4096))
            if found is None:
                return
            view = memoryview(found.data)
            for start, length, at, size in found.columns[2:].T.tolist():
                seq, ms = NUMBER_AND_TIME.unpack_from(view, start - HEAD.size)
                yield LogEntry(seq, ms, bytes(view[start : start + length]), bytes(view[at : at + size]))
            left -= found.count
            want = found.last_seq + 1

    def tail(
        self,
        position: int | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more."""
        at = self.next_position if position is None else position
        deadline = None if timeout is None else time.monotonic() + timeout
        with FolderWait(self._disk, self.path) as waiting:
            while True:
                batch = self.read(at, limit)
                at = batch.next_position
                if len(batch):
                    yield batch
                    waiting.reset()
                    deadline = None if timeout is None else time.monotonic() + timeout
                    continue
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return
                waiting.pause(remaining)

    def waiter(self) -> LoopWait:
        """Return what waits for more records on an event loop: the folder tells of them."""
        return LoopWait(self._disk, self.path)

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``: small segments together, long ones cut where their index points."""
        with self._lock:
            self._check_open()
            self._folder.refresh()
            return cut(self._folder.numbers, self._folder.segment, start, end, span_bytes)

    # --- About the log

    def verify(self) -> Iterator[Problem]:
        """Yield every problem: damaged entries and indexes, numbers that are missing, repeated or out of order."""
        with self._lock:
            self._check_open()
            self._folder.refresh()
            numbers = list(self._folder.numbers)
        yield from verify_segments(self._disk, self.path, numbers)
        yield from self.mark_ahead()

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the log, without reading all of it."""
        with self._lock:
            self._check_open()
            self._folder.refresh()
            numbers = list(self._folder.numbers)
        names = self._disk.list(self.path)
        files, total = [], 0
        for number in numbers:
            path = Segment.log_path(self.path, number)
            found = self._disk.stat(path)
            size = 0 if found is None else found.size
            total += size
            files.append({"file": path, "bytes": size, "first_seq": number})
        identity, last = self._sidecar.identity(), self.last_seq
        return {
            "format": self.format,
            "path": self.path,
            "log_id": None if identity is None else identity.log_id,
            "content": self.content,
            "first_position": self.first_position,
            "next_position": self._try_next(),
            "durable_position": self.durable_position,
            "first_seq": numbers[0] if numbers else 0,
            "last_seq": last,
            "bytes": total,
            "damage": [*self.damage, *self.mark_ahead()],
            "set_aside": [name for name in names if name.endswith(BAD)],
            "cursors": self._sidecar.cursors(),
            "files": files,
        }

    # --- Open and closed

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._closed = True
            self._folder.close()
            self._sidecar.close()

    def forked(self) -> None:
        """Forget the parent's files in the child of a fork; the next read opens its own."""
        self._lock = threading.RLock()
        self._folder.forget()

    # --- Small things

    def mark_ahead(self) -> list[Problem]:
        """Say whether entries are gone that the durable mark knows of."""
        with self._lock:
            mark, last = self._sidecar.durable_position() or 0, self._folder.last_seq()
            if not self._folder.numbers:
                return []
            last = max(last, self._folder.numbers[-1] - 1)  # an empty segment is left where all before it was dropped
            if mark - 1 <= last:
                return []
            return [mark_ahead(self._sidecar.mark.path, mark, last)]

    def _try_next(self) -> int | None:
        try:
            return self.next_position
        except PenstockError:
            return None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the reader is closed")


def _batch(found: FoundEntries) -> Batch:
    columns, last = found.columns, found.last_seq
    if last >= MAX_POSITION:
        count = int(np.searchsorted(columns[0].view(np.uint64), np.uint64(MAX_POSITION)))
        if not count:
            byte, number = found.base + int(columns[2, 0]) - HEAD.size, int(columns[0, 0]) & MAX_SEQ
            raise UnsupportedError(
                f"{found.path} at byte {byte}: entry {number} has a number that no position can express; "
                "entries() reads it"
            )
        columns, last = columns[:, :count], int(columns[0, count - 1])
    positions, times, sender_offsets, sender_lengths, offsets, lengths = columns
    return Batch(
        found.data,
        positions,
        Spans(offsets, lengths),
        timestamps=times.view(np.uint64),
        extra={"seq": positions, "from": Spans(sender_offsets, sender_lengths)},
        next_position=last + 1,
    )


def _nothing(position: int) -> Batch:
    none = np.empty(0, np.int64)
    return Batch(
        b"", none, Spans(none, none), timestamps=np.empty(0, np.uint64),
        extra={"seq": none, "from": Spans(none, none)}, next_position=position,
    )  # fmt: skip


def recognise(disk: ReadDisk, path: str) -> bool:
    """Whether ``path`` is a folder with at least one segment, or one that a writer has opened and not written to."""
    found = disk.stat(path)
    if found is None or not found.is_folder:
        return False
    names = disk.list(path)
    if any(segment_number(name) is not None for name in names):
        return True
    return "penstock-id" in names and all(name.startswith("penstock-") for name in names)


def open_reader(disk: ReadDisk, path: str, on_damage: OnDamage | None = None) -> MessageLogReader:
    """Open a message log with the common face."""
    return MessageLogReader(path, disk, on_damage=on_damage or "skip")


def gaps(expected: int | None, batch: Batch) -> int:
    """Return at how many places numbers are missing in a batch and in front of it."""
    if not len(batch):
        return 0
    numbers = batch.positions if expected is None else np.concatenate(([expected - 1], batch.positions))
    return int((np.diff(numbers) > 1).sum())


def open_writer(disk: Disk, path: str, content: str = "raw", largest_bytes: int | None = None) -> MessageLog:
    """Open a message log for writing with default options, created if it is not there."""
    from penstock.log.messagelog.options import MessageLogOptions
    from penstock.log.messagelog.writer import MessageLog

    options = MessageLogOptions(content=content)
    if largest_bytes is not None:
        options = replace(options, max_payload_bytes=max(largest_bytes, options.max_payload_bytes))
    return MessageLog.open(path, options, disk=disk)
