"""The reading side of a channel: a cursor that late-joins, goes live or seeks, and follows the rolls.

A reader maps the files read-only and leaves no trace in them: it never slows the writer, and any number may attach.
It stands on a slot (place.py) and waits for its commit byte; nothing else is shared with the writer.  What it does when
the walk stops is in follow.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from types import TracebackType
from typing import Final, Self

from penstock.batch import Batch
from penstock.disk import Backoff, Handle, ReadDisk, disk_for, read_disk_for, when_there
from penstock.disk.posix import followed
from penstock.errors import NotFoundError, OptionsError, Timeout
from penstock.kernel import Taker
from penstock.log import aio
from penstock.log.fingerprint import Fingerprint, fingerprint_of, fingerprint_of_record
from penstock.log.options import DEFAULT_LIMIT, Start
from penstock.log.xchannel.arrival import ChannelWait
from penstock.log.xchannel.files import discover
from penstock.log.xchannel.follow import move_on, skip_damage
from penstock.log.xchannel.format import RecordStop, split_position
from penstock.log.xchannel.named import NamedCursor
from penstock.log.xchannel.place import Place
from penstock.log.xchannel.rows import Rows
from penstock.types import Problem, Record

__all__ = ["Reader"]


SPIN_NANOSECONDS: Final = 20_000
END_LOOK_SECONDS: Final = (0.1, 0.5)
"""How often a waiting reader looks whether it stands in the right file: at first, and after a while of silence."""
FIRST_NANOSECONDS: Final = int(Backoff.FIRST * 1e9)
LAST_NANOSECONDS: Final = int(Backoff.LAST * 1e9)


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
    >>> reader.close()
    >>> with Reader.open(folder.name + "/ticks", name="billing") as reader:
    ...     record = reader.read()
    ...     reader.ack()            # the work on what was read is done
    >>> with Reader.open(folder.name + "/ticks", name="billing") as reader:
    ...     bytes(reader.read().payload)
    b'two'
    >>> writer.close(); folder.cleanup()
    """

    def __init__(self, base: str, disk: ReadDisk) -> None:
        self.path = base
        self._place = Place(base, disk)
        self._cursor = self._place.cursor
        self._rows = Rows()
        self._named: NamedCursor | None = None
        self._last: Record | Batch | None = None
        self._taker = Taker(self._cursor, partial(move_on, self._place))
        self.try_read = self._taker.take  # type: ignore[method-assign]  # nothing in between
        super().__init__()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        start: Start | int = "earliest",
        *,
        name: str | None = None,
        timeout: float | None = 0.0,
        disk: ReadDisk | None = None,
    ) -> Reader:
        """Open a channel at its oldest record, at its end (``latest``), or at a position.

        For a writer that has not made it yet it waits up to ``timeout`` seconds, None for ever; then NotFoundError.

        With a ``name`` it goes on where the last reader of that name had acknowledged (``ack``), and ``start`` counts
        only the first time.  One reader a name: LockedError while another has it.
        """
        return when_there(lambda: cls._open(os.fspath(path), start, name, disk), timeout)

    @classmethod
    def _open(cls, path: str, start: Start | int, name: str | None, disk: ReadDisk | None) -> Reader:
        base = followed(path)
        reader = cls(base, disk or read_disk_for(base))
        place = reader._place
        if not discover(place.disk, base):
            raise NotFoundError(f"{base}: there is no channel here")
        place.load_power_loss_bound()
        if name is not None:
            reader._named = NamedCursor(disk_for(base) if disk is None else disk, base, name)  # type: ignore[arg-type]
            reader.try_read = reader._take_noted  # type: ignore[method-assign]
            try:
                if reader._named.go_on(place):
                    return reader
            except BaseException:
                reader.close()
                raise
        if start == "earliest":
            place.go_first()
        elif start == "latest":
            place.go_live()
        elif isinstance(start, int):
            place.go_to(start)
        else:
            raise OptionsError(f"start={start!r}: must be 'earliest', 'latest' or a position")
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
                batch = self._rows.scan(self._cursor, limit)
                self._place.check_whole()
                if self._named is not None and len(batch):
                    self._last = batch
                return batch
            return self._rows.none(self._cursor)

    def wait(self, timeout: float | None = None, *, patient: bool = False) -> bool:
        """Wait until there is something to read; False when ``timeout`` seconds are over.

        It spins for a moment, then sleeps longer and longer up to 10 ms, below Python: an idle reader costs next to
        nothing.  Whoever has waited for a while already is ``patient``: it begins with the longest sleeps.
        """
        if self._ready() or (timeout != 0 and not patient and self._cursor.spin(SPIN_NANOSECONDS)):
            return True
        deadline, backoff = None if timeout is None else time.monotonic() + timeout, Backoff()
        nap, look = (LAST_NANOSECONDS if patient else FIRST_NANOSECONDS), END_LOOK_SECONDS[patient]
        while not self._ready():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            if self._cursor.status == RecordStop.TAIL:
                longest = look if remaining is None else min(remaining, look)
                self._cursor.doze(int(longest * 1e9), nap, LAST_NANOSECONDS)
                nap, look = LAST_NANOSECONDS, min(2 * look, END_LOOK_SECONDS[1])  # a look around is no news
            else:
                backoff.pause(remaining)
        return True

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
        with contextlib.closing(ChannelWait(self._beside)) as waiting:
            while True:
                yield await aio.poll(self.try_read, waiting=waiting)

    def _beside(self) -> Reader:
        """Return another reader of the channel, at its end."""
        self._place.check_open()
        return Reader.open(self.path, "latest", disk=self._place.disk)

    def ack(self, position: int | None = None, *, sync: bool = False) -> None:
        """Note under its name that everything it has read is done, or everything below ``position``.

        Call it after the work, never before.  With ``sync`` that survives a power cut when this returns; without, a few
        records may come again then.  Files are not kept for a name: a channel's retention takes them as it does.
        """
        if self._named is None:
            raise OptionsError(f"{self.path}: ack needs a reader with a name: Reader.open(path, name=...)")
        position = self.position if position is None else position
        self._named.write(position, sync=sync, seen=self._last_before(position))

    def _take_noted(self) -> Record | None:
        """Take a record and remember it: its fingerprint goes with the position that is acknowledged."""
        record = self._taker.take()
        if record is not None:
            self._last = record
        return record

    def _last_before(self, position: int) -> Fingerprint | None:
        """Return the fingerprint of the last record before a position, of those that were read last."""
        last = self._last
        if isinstance(last, Batch):
            index = int(last.positions.searchsorted(position)) - 1
            return fingerprint_of(last, index) if index >= 0 else None
        return fingerprint_of_record(last) if last is not None and last.position < position else None

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
        if self._named is not None:
            self._named.close()

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._place.forked("the reader was opened before a fork: open it again in the child")
        if self._named is not None:
            self._named.close()

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
