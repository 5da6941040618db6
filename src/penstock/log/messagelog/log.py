"""The reading side of a message log: the common face of logs, and entries with their numbers as they are.

Reading changes no file.  Sealed segments are mapped; the last one, which a recovery may cut, is read into a buffer of
the batch's own.  A bad entry ends its segment, in the last one because it may not be written whole yet; in a sealed one
it is damage, which is logged, counted and listed by ``verify``, and reading goes on with the next segment.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from penstock.batch import Batch, Spans
from penstock.disk import Backoff, Disk, Handle, PosixDisk, ReadDisk
from penstock.errors import ClosedError, ExpiredError, OptionsError, PenstockError, ReplacedError, UnsupportedError
from penstock.log.messagelog.cut import cut
from penstock.log.messagelog.format import BAD, MAX_POSITION, Entry, Stop, segment_number
from penstock.log.messagelog.segment import Found, Segment
from penstock.log.messagelog.verify import verify_segments
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.metrics import REGISTRY
from penstock.types import Problem

if TYPE_CHECKING:
    from penstock.log.messagelog.writer import MessageLog

__all__ = ["MessageLogReader", "open_reader", "open_writer", "recognise"]

logger = logging.getLogger(__name__)

CRC_FAILURES: Final = REGISTRY.counter("message_log_crc_failures", "damaged entries met in sealed segments")
KEPT_SEGMENTS: Final = 64
"""How many segments a reader keeps open."""


class MessageLogReader(Handle):
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
    has_kinds = False

    def __init__(self, path: str | os.PathLike[str], disk: ReadDisk | None = None) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self._disk = disk or PosixDisk()
        self._sidecar = Sidecar(self._disk, os.path.join(self.path, "penstock-"))
        self._lock = threading.RLock()
        self._closed = False
        self._open: dict[int, Segment] = {}
        self._warned: set[tuple[str, int]] = set()
        self._numbers = self._list()
        self._log_id = self._identity()

    # --- Bounds

    @property
    def first_position(self) -> int:
        """The number in the name of the oldest segment; of an empty log, the number its first entry will get."""
        with self._lock:
            self._refresh()
            return self._first()

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
            while True:
                self._refresh()
                last = 0
                for number in reversed(self._numbers):  # a fresh segment is empty
                    segment, above = self._segment(number), last
                    last = max(last, segment.last_seq() if segment else 0)
                    if above:  # and the one before may not be below it, if somebody tampered with the log
                        break
                if last or not self._refresh():
                    return last

    @property
    def durable_position(self) -> int | None:
        """The durable mark, if its writer keeps one."""
        return self._sidecar.durable_position()

    @property
    def content(self) -> str:
        """``raw``, or ``envelope/1`` if its writer said so."""
        identity = self._sidecar.identity()
        return "raw" if identity is None else identity.content

    # --- Reading

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return entries from ``position`` on; the sender is the extra column ``from``, the number also ``seq``."""
        with self._lock:
            self._check_open()
            if position > MAX_POSITION:
                raise OptionsError(f"{self.path}: position {position}: must be below 2^63")
            if position < self._first():
                self._refresh()
                self._check_expired(position)
            found = self._find(position, limit, expires=True) if limit > 0 else None
        if found is None:
            return _nothing(position)
        return self._batch(found)

    def entries(self, from_seq: int = 1, limit: int = DEFAULT_LIMIT) -> Iterator[Entry]:
        """Yield up to ``limit`` entries with their numbers as they are on disk, also those above 2^63 - 1.

        Like the original it begins with the oldest entry there is when ``from_seq`` is below it.
        """
        left, want = limit, max(from_seq, 1)
        while left > 0:
            with self._lock:
                self._check_open()
                found = self._find(want, min(left, 4096))
            if found is None:
                return
            view = memoryview(found.data)
            for index in range(len(found.seqs)):
                start, length = int(found.spans[0, index]), int(found.spans[1, index])
                at, size = int(found.spans[2, index]), int(found.spans[3, index])
                ms = int.from_bytes(view[start - 14 : start - 6], "little")
                yield Entry(
                    int(found.seqs[index]), ms, bytes(view[start : start + length]), bytes(view[at : at + size])
                )
            left -= len(found.seqs)
            want = int(found.seqs[-1]) + 1
            if want >= 1 << 64:
                return

    def tail(
        self,
        position: int | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more."""
        at = self.next_position if position is None else position
        backoff = Backoff()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            batch = self.read(at, limit)
            at = batch.next_position
            if len(batch):
                yield batch
                backoff.reset()
                deadline = None if timeout is None else time.monotonic() + timeout
                continue
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            time.sleep(backoff.delay(remaining))

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``: small segments together, long ones cut where their index points."""
        with self._lock:
            self._refresh()
            return cut(self._numbers, self._segment, start, end, span_bytes)

    # --- About the log

    def verify(self) -> Iterator[Problem]:
        """Yield every problem: damaged entries and indexes, numbers that are missing, repeated or out of order."""
        with self._lock:
            self._check_open()
            self._refresh()
            numbers = list(self._numbers)
        yield from verify_segments(self._disk, self.path, numbers)

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the log, without reading all of it."""
        with self._lock:
            self._check_open()
            self._refresh()
            numbers = list(self._numbers)
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
            "set_aside": [name for name in names if name.endswith(BAD)],
            "cursors": self._sidecar.cursors(),
            "files": files,
        }

    # --- Open and closed

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._closed = True
            for segment in self._open.values():
                segment.close()
            self._open.clear()
            self._sidecar.close()

    def forked(self) -> None:
        """Forget the parent's files in the child of a fork; the next read opens its own."""
        self._lock = threading.RLock()
        self._open = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- Finding entries

    def _find(self, want: int, limit: int, *, expires: bool = False) -> Found | None:
        """Return the first entries from ``want`` on, of one segment, or None when there are none yet."""
        while True:
            for number in self._from(want):
                segment = self._segment(number)
                if segment is None or segment.replaced():
                    if self._refresh():  # retention was faster: what was asked for may be gone
                        break
                    continue
                found = segment.find(want, limit)
                if found.damage is not None:
                    self._warn(segment.path, found.damage)
                if len(found.seqs):
                    return found
            else:
                if not self._refresh():
                    return None
            if expires:
                self._check_expired(want)

    def _check_expired(self, position: int) -> None:
        first = self._first()
        if position < first:
            raise ExpiredError(self.path, position, first)

    def _from(self, want: int) -> list[int]:
        """Return the numbers of the segments that ``want`` or later entries can be in, in order."""
        index = max(bisect.bisect_right(self._numbers, want) - 1, 0)
        while index > 0:  # a segment may repeat what the one before has: that one is read first
            before = self._segment(self._numbers[index - 1])
            if before is None or before.last_seq(fresh=False) < want:
                break
            index -= 1
        return self._numbers[index:]

    def _segment(self, number: int) -> Segment | None:
        segment = self._open.pop(number, None)
        sealed = number != self._numbers[-1]
        if segment is not None and segment.sealed != sealed:
            segment.close()
            segment = None
        if segment is None:
            try:
                segment = Segment(self._disk, self.path, number, sealed=sealed)
            except FileNotFoundError:  # retention was faster, or it is about to be
                return None
            except OSError as exc:
                logger.warning("%s: passed over: %s", Segment.log_path(self.path, number), exc)
                return None
        self._open[number] = segment
        if len(self._open) > KEPT_SEGMENTS:
            self._open.pop(next(iter(self._open))).close()
        return segment

    def _batch(self, found: Found) -> Batch:
        count = len(found.seqs)
        if int(found.seqs[-1]) >= MAX_POSITION:
            count = int(np.searchsorted(found.seqs, np.uint64(MAX_POSITION)))
        if not count:
            raise UnsupportedError(
                f"{found.path} at byte {int(found.spans[0, 0]) + found.base - 22}: entry {int(found.seqs[0])} has a "
                "number that no position can express; entries() reads it"
            )
        positions = found.seqs[:count].view(np.int64)
        return Batch(
            found.data,
            positions,
            Spans(found.spans[2, :count], found.spans[3, :count]),
            timestamps=found.times[:count],
            extra={"seq": positions, "from": Spans(found.spans[0, :count], found.spans[1, :count])},
            next_position=int(positions[-1]) + 1,
        )

    def _warn(self, path: str, damage: tuple[int, Stop]) -> None:
        byte, stop = damage
        if (path, byte) in self._warned:
            return
        self._warned.add((path, byte))
        CRC_FAILURES.add()
        logger.warning("%s at byte %d: a sealed segment is damaged here (%s)", path, byte, stop.name)

    # --- Which segments there are

    def _list(self) -> list[int]:
        try:
            names = self._disk.list(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise OptionsError(f"{self.path}: there is no message log here") from None
        return sorted(number for number in map(segment_number, names) if number is not None)

    def _refresh(self) -> bool:
        """Look which segments there are now; return whether that changed."""
        self._check_open()
        try:
            numbers = self._list()
        except OptionsError:
            raise ReplacedError(self.path, "its folder is gone") from None
        changed = numbers != self._numbers
        identity = self._identity()
        if self._log_id is not None and identity is not None and identity != self._log_id:
            raise ReplacedError(self.path, "its log id changed")
        self._log_id = self._log_id or identity
        for number in [n for n in self._open if n not in numbers or self._open[n].replaced()]:
            self._open.pop(number).close()
            changed = True
        self._numbers = numbers
        return changed

    def _first(self) -> int:
        if self._numbers:
            return max(self._numbers[0], 1)
        return self._sidecar.durable_position() or 1

    def _identity(self) -> str | None:
        identity = self._sidecar.identity()
        return None if identity is None else identity.log_id

    def _try_next(self) -> int | None:
        try:
            return self.next_position
        except PenstockError:
            return None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the reader is closed")


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


def open_reader(disk: ReadDisk, path: str) -> MessageLogReader:
    """Open a message log with the common face."""
    return MessageLogReader(path, disk)


def open_writer(disk: Disk, path: str, content: str = "raw") -> MessageLog:
    """Open a message log for writing with default options, created if it is not there."""
    from penstock.log.messagelog.options import MessageLogOptions
    from penstock.log.messagelog.writer import MessageLog

    return MessageLog.open(path, MessageLogOptions(content=content), disk=disk)
