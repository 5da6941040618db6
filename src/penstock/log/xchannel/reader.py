"""The reading side of a channel: a cursor that late-joins, goes live or seeks, and follows the rolls.

A reader maps the files read-only and leaves no trace in them: it never slows the writer, and any number may attach.
It stands on a slot (place.py) and waits for its commit byte; nothing else is shared with the writer.  What it does when
the walk stops is in follow.py.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self

from penstock.batch import Batch
from penstock.disk import Backoff, Handle, PosixDisk, ReadDisk
from penstock.errors import OptionsError, Timeout
from penstock.kernel import Taker
from penstock.log import aio
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.xchannel.files import discover
from penstock.log.xchannel.follow import move_on, skip_damage
from penstock.log.xchannel.format import split_position
from penstock.log.xchannel.place import Place
from penstock.log.xchannel.rows import Rows
from penstock.types import Problem, Record

__all__ = ["Reader", "Start"]

Start = Literal["first", "live"]

SPIN_NANOSECONDS: Final = 20_000


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
        self.path = base
        self._place = Place(base, disk)
        self._cursor = self._place.cursor
        self._rows = Rows()
        self._taker = Taker(self._cursor, partial(move_on, self._place))
        self.try_read = self._taker.take  # type: ignore[method-assign]  # nothing in between
        super().__init__()

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
        place = reader._place
        if not discover(place.disk, base):
            raise OptionsError(f"{base}: there is no channel here")
        place.trust()
        if start == "first":
            place.go_first()
        elif start == "live":
            place.go_live()
        elif isinstance(start, int):
            place.go_to(start)
        else:
            raise OptionsError(f"start={start!r}: must be 'first', 'live' or a position")
        return reader

    # --- Reading

    def try_read(self) -> Record | None:
        """Return the next record, or None when there is none yet."""
        return self._taker.take()

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
        with self._place.lock:
            if self._ready():
                return self._rows.scan(self._cursor, limit)
            return self._rows.none(self._cursor)

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
        self._place.check_open()
        return self._cursor.position

    @property
    def file_sequence(self) -> int:
        """The number of the file it stands in."""
        return split_position(self.position)[0]

    @property
    def region_bytes(self) -> int:
        """The size of a region of this channel, as its writer chose it."""
        return self._place.file.region_bytes

    @property
    def max_message_bytes(self) -> int:
        """The limit that the writer of this file was opened with, its low 32 bits; 0 for none."""
        return self._place.file.header.max_message_bytes

    def seek(self, position: int) -> None:
        """Go to a record by its position; a refused seek changes nothing."""
        with self._place.lock:
            self._place.go_to(position)

    def seek_live(self) -> None:
        """Go to the end: only records appended from now on are read."""
        with self._place.lock:
            self._place.go_live()

    def skip_damage(self) -> Problem | None:
        """Step over a damaged place to the next region or file; return what was stepped over.

        Only after a CorruptionError.  None when it stands on nothing that is wrong.
        """
        return skip_damage(self._place)

    # --- Open and closed

    def close(self) -> None:
        """Let go of the files; records and batches read so far stay valid."""
        with self._place.lock:
            self._place.close("the reader is closed")

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._place.forked("the reader was opened before a fork: open it again in the child")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Reader of {self.path} {self._place.dead or f'at {self._cursor.position}'}>"

    def _ready(self) -> bool:
        """Whether a read would return something."""
        while not self._cursor.ready():
            if self._cursor.resting() or not move_on(self._place):
                return False
        return True
