"""The reading side of a channel: a cursor that late-joins, goes live or seeks, and follows the rolls.

A reader maps the files read-only and leaves no trace in them: it never slows the writer, and any number may attach.
It stands on a slot and waits for its commit byte; nothing else is shared with the writer.  Every error leaves it
where it is, so the next call meets the same thing, or goes on if it was mended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np

from penstock import kernel
from penstock.batch import Batch, Spans
from penstock.disk import Backoff, Handle, PosixDisk, ReadDisk
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    PenstockError,
    ReplacedError,
    Timeout,
    UnsupportedError,
)
from penstock.kernel import Cursor
from penstock.log import aio
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import ChannelFile, discover, problem_at, sidecar_prefix
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    Stop,
    file_path,
    position_of,
    split_position,
)
from penstock.types import Problem, Record

__all__ = ["Reader", "Start"]

Start = Literal["first", "live"]

SPAN_BYTES: Final = 1 << 30  # a batch stays within what Arrow can address
COLUMNS: Final = (np.int64, np.uint64, np.int64, np.int64, np.uint16)  # the narrow one last: all stay aligned
ROW_BYTES: Final = sum(np.dtype(kind).itemsize for kind in COLUMNS)
CHECK_SECONDS: Final = 0.005  # how often a waiting reader looks beyond its slot
SPIN_NANOSECONDS: Final = 20_000
SECOND_LOOK_SECONDS: Final = 0.001
TAIL: Final = int(Stop.TAIL)  # compared at every poll: a plain number is faster


def columns_for(limit: int) -> tuple[Any, ...]:
    """Return room for the columns of ``limit`` records, as one block.

    Five blocks of half a megabyte would each be mapped by malloc and unmapped again, batch after batch, and the
    kernel would zero their pages every time: that cost more than the scan.
    """
    block = np.empty(limit * ROW_BYTES, np.uint8)
    columns, start = [], 0
    for kind in COLUMNS:
        end = start + limit * np.dtype(kind).itemsize
        columns.append(block[start:end].view(kind))
        start = end
    positions, timestamps, offsets, lengths, kinds = columns
    return positions, timestamps, kinds, offsets, lengths


class Reader(Handle):
    """A reader of a channel, standing on one record.

    One record at a time (``try_read``, ``read``, iteration, ``async for``) or many (``read_batch``, ``batches``).
    Payloads are views into the mapped file.  Safe to use from several threads; each record is then handed
    to one of them.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = Writer.open(folder.name + "/ticks")
    >>> writer.append(b"one", kind=1), writer.append(b"two", kind=2)
    (80, 104)
    >>> reader = Reader.open(folder.name + "/ticks")
    >>> bytes(reader.try_read().payload), reader.read_batch().to_payloads(), reader.try_read()
    (b'one', [b'two'], None)
    >>> reader.close(); writer.close(); folder.cleanup()
    """

    def __init__(self, base: str, disk: ReadDisk) -> None:
        super().__init__()
        self.path = base
        self._disk = disk
        self._lock = threading.RLock()
        self._cursor = Cursor()
        self._file: ChannelFile | None = None
        self._sidecar = Sidecar(disk, sidecar_prefix(base))
        identity = self._sidecar.identity()
        self._log_id = None if identity is None else identity.log_id
        self._bound: int | None = None
        self._checked = 0.0
        self._room: tuple[Any, ...] | None = None  # the columns of a batch that were not filled up
        self._dead = ""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        start: Start | int = "first",
        *,
        disk: ReadDisk | None = None,
    ) -> Reader:
        """Open a channel at its oldest record, at its end (``live``), or at a position."""
        base = os.fspath(path)
        reader = cls(base, disk or PosixDisk())
        sequences = discover(reader._disk, base)
        if not sequences:
            raise OptionsError(f"{base}: there is no channel here")
        reader._bound = reader._trusted_bound()
        if start == "first":
            reader._go_first()
        elif start == "live":
            reader._go_live()
        elif isinstance(start, int):
            reader.seek(start)
        else:
            raise OptionsError(f"start={start!r}: must be 'first', 'live' or a position")
        return reader

    # --- Reading

    def try_read(self) -> Record | None:
        """Return the next record, or None when there is none yet."""
        record = self._cursor.next()
        while record is None and not self._resting() and self._resolve():
            record = self._cursor.next()
        return record

    def read(self, timeout: float | None = None) -> Record:
        """Return the next record, waiting for it; Timeout when it takes longer than ``timeout`` seconds."""
        while (record := self.try_read()) is None:
            if not self.wait(timeout):
                raise Timeout(f"{self.path}: no record within {timeout} s")
        return record

    def read_batch(self, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return the records that are there, at most ``limit``, over one buffer; maybe none."""
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        with self._lock:
            if self._ready():
                return self._scan(limit)
            return self._batch(self._cursor.window, columns_for(0))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when ``timeout`` seconds are over.

        It spins for a moment, then sleeps longer and longer up to 10 ms: an idle reader costs next to nothing.
        """
        if self._ready() or (timeout != 0 and self._cursor.spin(SPIN_NANOSECONDS)):
            return True
        return Backoff().wait(self._ready, timeout)

    def records(self, timeout: float | None = None) -> Iterator[Record]:
        """Yield records and wait for more; end when ``timeout`` seconds brought none."""
        while True:
            record = self.try_read()
            if record is not None:
                yield record
            elif not self.wait(timeout):
                return

    def batches(self, limit: int = DEFAULT_LIMIT, timeout: float | None = None) -> Iterator[Batch]:
        """Yield batches and wait for more; end when ``timeout`` seconds brought none."""
        while True:
            batch = self.read_batch(limit)
            if len(batch):
                yield batch
            elif not self.wait(timeout):
                return

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield records and wait for more without blocking the event loop."""
        while True:
            yield await aio.poll(self.try_read)

    # --- Where it stands

    @property
    def position(self) -> int:
        """The position of the record it reads next."""
        self._check_open()
        return self._cursor.position

    @property
    def file_sequence(self) -> int:
        """The number of the file it stands in."""
        return split_position(self.position)[0]

    @property
    def region_bytes(self) -> int:
        """The size of a region of this channel, as its writer chose it."""
        return self._require().region_bytes

    @property
    def max_message_bytes(self) -> int:
        """The limit that the writer of this file was opened with, its low 32 bits; 0 for none."""
        return self._require().header.max_message_bytes

    def seek(self, position: int) -> None:
        """Go to a record by its position; a refused seek changes nothing."""
        sequence, offset = split_position(position)
        offset = max(offset, FIRST_SLOT)
        with self._lock:
            sequences = discover(self._disk, self.path)
            if not sequences:
                raise ReplacedError(self.path, "its files are gone")
            if sequence < sequences[0]:
                raise ExpiredError(self.path, position, position_of(sequences[0], FIRST_SLOT))
            if sequence not in sequences:
                raise OptionsError(f"{self.path}: position {position} is past the end of the channel")
            try:
                file = ChannelFile.open(self._disk, self.path, sequence)
            except FileNotFoundError:  # retention took it since
                first = position_of(next(iter(discover(self._disk, self.path)), sequence + 1), FIRST_SLOT)
                raise ExpiredError(self.path, position, first) from None
            try:
                self._check_boundary(file, offset, position)
                self._enter(file, offset)
            except BaseException:
                file.close()
                raise

    def seek_live(self) -> None:
        """Go to the end: only records appended from now on are read."""
        with self._lock:
            self._go_live()

    def skip_damage(self) -> Problem | None:
        """Step over a damaged place to the next region or file; return what was stepped over.

        Only after a CorruptionError.  None when it stands on nothing that is wrong.
        """
        with self._lock:
            try:
                self._resolve()
            except CorruptionError as exc:
                file = self._require()
                offset = self._offset()
                following = (offset // file.region_bytes + 1) * file.region_bytes
                if following + FIRST_SLOT <= file.size:
                    self._enter(file, following)
                else:
                    self._enter(self._next_file(file), FIRST_SLOT)
                return Problem(exc.file, exc.byte, exc.reason)
            return None

    # --- Open and closed

    def close(self) -> None:
        """Let go of the files; records and batches read so far stay valid."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None
            self._cursor = Cursor()
            self._dead = self._dead or "the reader is closed"

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._dead = "the reader was opened before a fork: open it again in the child"
        self._lock = threading.RLock()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._dead or f"at {self._cursor.position}"
        return f"<Reader of {self.path} {where}>"

    # --- How it moves

    def _scan(self, limit: int) -> Batch:
        room = self._room if self._room is not None and len(self._room[0]) == limit else columns_for(limit)
        self._room = None
        window = self._cursor.window
        count = self._cursor.scan(limit, SPAN_BYTES, *room)
        if count == limit:
            return self._batch(window, room)
        columns = columns_for(count)  # a batch that is mostly room would keep that room: the next one gets it
        for column, filled in zip(columns, room, strict=True):
            column[:] = filled[:count]
        self._room = room if limit <= DEFAULT_LIMIT else None
        return self._batch(window, columns)

    def _batch(self, window: Any, columns: tuple[Any, ...]) -> Batch:
        positions, timestamps, kinds, offsets, lengths = columns
        return Batch(
            window,
            positions,
            Spans(offsets, lengths),
            timestamps=timestamps,
            kinds=kinds,
            next_position=self._cursor.position,
        )

    def _ready(self) -> bool:
        """Whether a read would return something."""
        while not self._cursor.ready():
            if self._resting() or not self._resolve():
                return False
        return True

    def _resting(self) -> bool:
        """Whether there is nothing to do but wait: at the tail, and having looked around a moment ago.

        What makes polling cheap: it asks for no lock and decides from what only this reader writes.
        """
        return self._cursor.status == TAIL and time.monotonic() - self._checked < CHECK_SECONDS

    def _resolve(self) -> bool:
        """Deal with what the walk stopped at: True to walk on, False when there is nothing more yet."""
        with self._lock:
            self._check_open()
            if self._cursor.ready():  # another thread was here, or the writer
                return True
            file, stop = self._require(), Stop(self._cursor.status)
            if self._bound is not None and self._cursor.position >= self._bound:
                return self._lift_bound()
            match stop:
                case Stop.TAIL:
                    return self._look_around(file)
                case Stop.END | Stop.TRUNCATED:
                    return self._grow(file, stop)
                case Stop.ROLLED:
                    self._enter(self._next_file(file), FIRST_SLOT)
                    return True
                case _:
                    return self._look_twice(file, stop)

    def _grow(self, file: ChannelFile, stop: Stop) -> bool:
        """Walk on into what the file has gained, or say that it ends too soon."""
        start = self._cursor.window_position - file.position(0)
        offset, size = start + self._cursor.at, file.size
        if stop is Stop.END and size > offset and offset - start >= len(self._cursor.window):
            self._enter(file, offset)
            return True
        reach = min(size - start, len(self._cursor.window))
        if reach > self._cursor.stop:
            self._cursor.extend(reach)
            return True
        raise problem_at(file, offset, stop)

    def _look_twice(self, file: ChannelFile, stop: Stop) -> bool:
        """Report damage, unless it was the moment between a commit and the header behind it.

        xchannel 2.0.0 lays that header after the commit: what a reader meets there meanwhile may be
        left over from a longer reservation.
        """
        time.sleep(SECOND_LOOK_SECONDS)
        if self._cursor.ready() or self._cursor.status != stop:
            return True
        raise problem_at(file, self._offset(), stop)

    def _look_around(self, file: ChannelFile) -> bool:
        """At the tail: now and then, see whether the file is still the one to wait at."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return False
        self._checked = now
        size = file.size
        if size % file.region_bytes:
            raise problem_at(file, self._offset(), Stop.LIMIT)
        if self._missed_roll(file):
            return True
        here = self._disk.stat(file.path)
        if here is not None and here.identity == file.file.stat().identity:
            return False
        if self._cursor.ready() or self._cursor.status != Stop.TAIL:
            return True  # it was rolled and then removed by retention
        raise ReplacedError(
            self.path,
            "its files are gone" if here is None else "another file has taken the place of its newest",
        )

    def _missed_roll(self, file: ChannelFile) -> bool:
        """Whether the writer died between using the next file and committing the Roll to it.

        A writer commits the Roll before the first record of the new file, so a record there that
        this file's slot does not account for means that the Roll was lost.  The sequence in the header
        tells a successor from a channel of its own that happens to have the name.
        """
        if self._disk.stat(file_path(self.path, file.sequence + 1)) is None:
            return False
        try:
            successor = ChannelFile.open(self._disk, self.path, file.sequence + 1)
        except (OSError, PenstockError):
            return False  # half made: whoever follows the Roll says so
        begun = (
            successor.header.sequence == successor.sequence
            and successor.region_bytes == file.region_bytes
            and successor.file.read_at(FIRST_SLOT, 1) == b"\1"
        )
        if not begun or self._cursor.ready() or self._cursor.status != Stop.TAIL:
            successor.close()
            return begun and self._cursor.status != Stop.TAIL
        self._enter(successor, FIRST_SLOT)
        return True

    def _next_file(self, file: ChannelFile) -> ChannelFile:
        """Open the file a Roll leads to."""
        identity = self._sidecar.identity()
        if self._log_id is not None and (identity is None or identity.log_id != self._log_id):
            raise ReplacedError(self.path, "its log id changed")
        following = file.sequence + 1
        try:
            successor = ChannelFile.open(self._disk, self.path, following)
        except FileNotFoundError:
            sequences = discover(self._disk, self.path)
            if not sequences:
                raise ReplacedError(self.path, "its files are gone") from None
            if sequences[0] > following:
                lost, first = (position_of(n, FIRST_SLOT) for n in (following, sequences[0]))
                raise ExpiredError(self.path, lost, first) from None
            raise CorruptionError(
                file_path(self.path, following),
                0,
                f"missing, though {file.path} ends with a Roll to it",
            ) from None
        if successor.region_bytes != file.region_bytes:
            successor.close()
            raise CorruptionError(
                successor.path,
                40,
                f"region_size is {successor.region_bytes}, but the channel's is {file.region_bytes}",
            )
        return successor

    def _go_first(self) -> None:
        """Stand on the first record of the oldest file, whichever that is by now."""
        while True:
            sequences = discover(self._disk, self.path)
            if not sequences:
                raise ReplacedError(self.path, "its files are gone")
            try:
                file = ChannelFile.open(self._disk, self.path, sequences[0])
            except FileNotFoundError:
                continue  # retention took it: there is a newer one
            self._enter(file, FIRST_SLOT)
            return

    def _go_live(self) -> None:
        """Stand on the tail of the newest file, wherever its writer has come meanwhile."""
        while True:
            sequences = discover(self._disk, self.path)
            if not sequences:
                raise ReplacedError(self.path, "its files are gone")
            newest = sequences[-1]
            bounded = self._bound is not None and split_position(self._bound)[0] < newest
            if bounded:
                newest = split_position(self._bound or 0)[0]
            try:
                file = ChannelFile.open(self._disk, self.path, newest)
            except FileNotFoundError:
                continue  # retention took it: there is a newer one
            cursor = Cursor()
            offset = file.find_tail(cursor)
            if cursor.status == Stop.ROLLED and not bounded:
                if self._disk.stat(file_path(self.path, newest + 1)) is not None:
                    file.close()
                    continue  # it has just been rolled
            elif cursor.status not in (Stop.TAIL, Stop.ROLLED):
                raise problem_at(file, offset, cursor.status)
            if self._bound is not None:
                offset = min(offset, split_position(self._bound)[1])
            self._enter(file, offset)
            return

    def _check_boundary(self, file: ChannelFile, offset: int, position: int) -> None:
        """Refuse a position where no record begins; every region begins with one."""
        region = offset // file.region_bytes * file.region_bytes
        if offset >= file.size:
            raise OptionsError(f"{self.path}: position {position} is past the end of the channel")
        cursor = Cursor()
        file.attach(cursor, region)
        file.walk(cursor, until=offset)
        end = cursor.position - file.position(0)
        if end < offset and cursor.status not in (Stop.LIMIT, Stop.TAIL, Stop.ROLLED):
            raise problem_at(file, end, cursor.status)
        if end < offset:
            raise OptionsError(f"{self.path}: position {position} is past the end of the channel")
        if end > offset:
            raise OptionsError(f"{self.path}: no record begins at position {position}")

    def _trusted_bound(self) -> int | None:
        """Return the durable mark of an earlier boot: what lies behind it will be cut by the writer."""
        found = self._sidecar.mark.read()
        if found is None:
            return None
        boot_id = getattr(self._disk, "boot_id", None)  # a disk for reading only has none
        return None if boot_id is None or found[0] == boot_id() else found[1]

    def _lift_bound(self) -> bool:
        """Go past the mark of an earlier boot once a writer has cleaned up behind it."""
        self._bound = self._trusted_bound()
        if self._bound is None:
            sequence, offset = split_position(self._cursor.position)
            self._enter(ChannelFile.open(self._disk, self.path, sequence), offset)
            return True
        return False

    def _enter(self, file: ChannelFile, offset: int) -> None:
        """Stand on ``offset`` of ``file``; nothing changes if that fails."""
        if not kernel.native and not file.is_sealed():
            raise UnsupportedError(
                f"{file.path} may still be written to, and reading it live needs memory order between "
                f"processes: {kernel.reason}. Install penstock with a C compiler at hand; files that "
                "have been rolled can be read without one"
            )
        bound = None
        if self._bound is not None and split_position(self._bound)[0] == file.sequence:
            bound = split_position(self._bound)[1]
        file.attach(self._cursor, offset, bound)
        if self._file is not None and self._file is not file:
            self._file.close()
        self._file = file
        self._checked = 0.0

    def _offset(self) -> int:
        """Return the byte of the file it stands on."""
        return split_position(self._cursor.position)[1]

    def _require(self) -> ChannelFile:
        self._check_open()
        assert self._file is not None
        return self._file

    def _check_open(self) -> None:
        if self._dead:
            raise ClosedError(f"{self.path}: {self._dead}")
