"""The writing side of a channel: one writer, publishing records that readers see at once.

The hot path is the kernel's Appender.  tip.py moves it from region to region and from file to file, durable.py says
what survives a power cut, and this file is what its user sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import Disk, Handle, Owned, disk_for
from penstock.errors import OptionsError, UnsupportedError
from penstock.log.columns import columns_of
from penstock.log.sidecar import Sidecar
from penstock.log.writers import note_writer
from penstock.log.xchannel.draft import remove_draft
from penstock.log.xchannel.durable import Durability
from penstock.log.xchannel.files import ChannelFile, discover, sidecar_prefix
from penstock.log.xchannel.options import WriterOptions
from penstock.log.xchannel.own import newest_file, own_newest
from penstock.log.xchannel.recover import check_mark, check_rolls, cut_back
from penstock.log.xchannel.tip import Tip
from penstock.options import options_from, shows_options

__all__ = ["Writer", "Reservation"]

RAW: Final = "raw"


class Reservation:
    """A record being filled in place; ``length`` may be set lower than what was reserved.

    >>> record = Reservation(memoryview(bytearray(8)))
    >>> record.buffer[:2] = b"hi"; record.length = 2
    >>> record.position is None  # until it is committed
    True
    """

    __slots__ = ("buffer", "length", "position")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.length = len(buffer)
        self.position: int | None = None
        """Where the record is, once it is committed."""


class Writer(Handle):
    """The one writer of a channel; a second one is refused.  Safe to use from several threads.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks", roll_bytes=64 << 20, keep_files=4) as writer:
    ...     position = writer.append(b"hello", kind=1)
    ...     positions = writer.append_many([b"one", b"two"])
    ...     with writer.reserving(100, kind=2) as record:
    ...         record.buffer[:5] = b"in place"[:5]
    ...         record.length = 5
    >>> position, positions.tolist(), record.position
    (80, [104, 128], 152)
    >>> folder.cleanup()
    """

    has_times = True

    def __init__(self, base: str, disk: Disk, options: WriterOptions) -> None:
        self.path, self.options = base, options
        self._check_name(disk)
        owned = own_newest(disk, base)
        try:
            self._sidecar = Sidecar(disk, sidecar_prefix(base))
            self._held = self._sidecar.lock()
        except BaseException:
            owned.release()
            raise
        try:
            self._tip = self._open(disk, owned)
        except BaseException:
            self._sidecar.close()
            owned.release()
            self._held.release()
            raise
        self._appender = self._tip.appender
        self._durability = Durability(disk, self._sidecar, options, self._tip)
        if options.sync == "none":
            self.append = self._appender.append  # type: ignore[method-assign]  # nothing in between
        super().__init__()
        note_writer(disk, base, self)

    @classmethod
    @shows_options(WriterOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: WriterOptions | None = None,
        *,
        disk: Disk | None = None,
        **given: Any,
    ) -> Writer:
        """Open a channel for writing, created if it is not there."""
        options = options_from(WriterOptions, options, given)
        return cls(os.fspath(path), disk or disk_for(path), options)

    @classmethod
    @shows_options(WriterOptions)
    def precreate(
        cls,
        path: str | os.PathLike[str],
        options: WriterOptions | None = None,
        *,
        disk: Disk | None = None,
        **given: Any,
    ) -> None:
        """Create a channel, or check that it can be opened, and leave it for its writer and readers."""
        cls.open(path, options, disk=disk, **given).close()

    # --- Writing

    def append(self, payload: Any, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Append one record and return its position.

        ``payload`` is anything that has bytes.  The time is now unless it is given.  The record is visible to
        every reader when this returns, and durable according to the channel's ``sync``.  A sync in the background that
        failed is told here, before anything is appended.
        """
        self._durability.check()
        position = self._appender.append(payload, kind, timestamp_ns)
        self._durability.written()
        return position

    def append_many(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> NDArray[np.int64]:
        """Append a list of bytes, an Arrow array or a Batch, and return the positions.

        ``kind`` and ``timestamp_ns`` are one value for all or an array; a Batch brings its own unless they
        are given.  Readers may see the first records before the last are written.
        """
        self._durability.check()
        if isinstance(payloads, list) and isinstance(kind, int) and isinstance(timestamp_ns, int | None):
            positions = self._append_list(payloads, kind, timestamp_ns)
        else:
            positions = self._append_columns(payloads, kind, timestamp_ns)
        self._durability.written()
        return positions

    def append_in_place(self, source: Any) -> None:
        """Let a source publish its records where they will lie: no copy of them is made before.

        ``source.fill(appender)`` is code of the kernel.  It publishes while there is room and returns the size of the
        record that found none, or -1 when there are no more.  Readers may see the first before the last are written.
        """
        self._durability.check()
        with self._tip.lock:
            while (length := source.fill(self._appender)) >= 0:
                self._tip.make_room(length)
        self._durability.written()

    def reserve(self, length: int) -> memoryview:
        """Return ``length`` writable bytes where the next record's payload will be; ``commit`` publishes it.

        Nothing is visible before that.  Reserving again takes the same place.  The view is closed by
        ``commit``, by ``append`` and by a roll.
        """
        while (view := self._appender.reserve(length)) is None:
            self._tip.make_room(length)
        return view

    def commit(self, length: int | None = None, *, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Publish the first ``length`` bytes of what was reserved (all of it unless given)."""
        reserved = self._appender.pending
        if reserved < 0:
            self._tip.check_open()
            raise OptionsError(f"{self.path}: commit without a reservation")
        if length is not None and not 0 <= length <= reserved:
            raise OptionsError(f"{self.path}: cannot commit {length} of {reserved} reserved bytes")
        self._durability.check()
        position = self._appender.commit(reserved if length is None else length, kind, timestamp_ns)
        self._durability.written()
        return position

    @contextlib.contextmanager
    def reserving(self, length: int, *, kind: int = 0, timestamp_ns: int | None = None) -> Iterator[Reservation]:
        """Reserve, fill in the block, commit at its end; an exception in the block commits nothing."""
        reservation = Reservation(self.reserve(length))
        try:
            yield reservation
        except BaseException:
            self._appender.drop()
            raise
        reservation.position = self.commit(reservation.length, kind=kind, timestamp_ns=timestamp_ns)

    def roll(self) -> None:
        """End this file and go on in the next one, which readers follow."""
        self._tip.roll()
        self._durability.rolled()

    def roll_unless_reserved(self) -> bool:
        """Do the same, unless a reservation is open, which would be lost; return whether it was done.

        For a thread that did not make the reservation.
        """
        done = self._tip.roll_unless_reserved()
        if done:
            self._durability.rolled()
        return done

    def sync(self) -> int:
        """Return when everything appended so far survives a power cut; readers see the same mark."""
        return self._durability.sync()

    # --- What it knows

    @property
    def next_position(self) -> int:
        """The position the next record will have, unless it takes a new region or file."""
        self._tip.check_open()
        return self._appender.position

    @property
    def durable_position(self) -> int | None:
        """The exclusive bound of what survives a power cut, None before the first sync."""
        return self._sidecar.durable_position()

    @property
    def region_bytes(self) -> int:
        """The size of a region of this channel."""
        return self._tip.file.region_bytes

    @property
    def file_sequence(self) -> int:
        """The number of the file being written."""
        return self._tip.file.sequence

    @property
    def largest_message(self) -> int:
        """The largest payload this writer takes."""
        return self._tip.largest

    # --- Open and closed

    def close(self) -> None:
        """Let go of the channel and of its lock; with a sync mode, sync once more."""
        if self._tip.dead:
            return
        try:
            self._durability.close()
            if not self._tip.is_cut:
                self._tip.check_whole()
        finally:
            self._tip.close()
            self._sidecar.close()
            self._held.release()

    def forked(self) -> None:
        """Close in the child of a fork; the channel and its lock stay the parent's."""
        self._durability.forked()
        self._tip.forked()
        self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Writer of {self.path} {self._tip.dead or f'at {self._appender.position}'}>"

    def _check_name(self, disk: Disk) -> None:
        """Refuse what cannot be a channel before there is so much as a lock beside it."""
        if not kernel.native:
            raise UnsupportedError(
                f"{self.path}: writing a channel needs memory order between processes, and {kernel.reason}"
            )
        there = disk.stat(self.path)
        if there is not None and there.is_folder:
            raise OptionsError(f"{self.path}: this is a folder, a channel is a file")
        sequences = discover(disk, self.path, making=True)
        if sequences and disk.stat(sidecar_prefix(self.path) + "lock") is None:  # never written by us
            with contextlib.suppress(OSError):  # a link, or no file: whoever owns it says so
                ChannelFile.open(disk, self.path, sequences[-1]).close()

    def _check_content(self, disk: Disk) -> None:
        """Refuse to put other records into a channel than those who read it were told of."""
        if self.options.content is None or not discover(disk, self.path, making=True):
            return
        identity = self._sidecar.identity()
        content = RAW if identity is None else identity.content
        if content != self.options.content:
            raise OptionsError(f"{self.path}: its content is {content}, not {self.options.content}")

    def _open(self, disk: Disk, owned: Owned) -> Tip:
        owned.take(newest_file(disk, self.path))  # which may have changed before we had the lock
        self._check_content(disk)
        check_mark(disk, self.path, self._sidecar)
        check_rolls(disk, self.path, discover(disk, self.path, making=True), self._sidecar)
        remove_draft(disk, self.path)
        cut_back(disk, self.path, self._sidecar)
        if self.options.sync == "none":
            self._sidecar.remove_mark()  # with sync="none" the mark means nothing
        sequences = discover(disk, self.path, making=True)
        if not sequences:
            self._sidecar.create_identity(self.options.content or RAW)
        return Tip(disk, self.path, self.options, sequences, owned, self._sidecar.note_roll)

    # --- Many at once

    def _append_list(self, payloads: list[Any], kind: int, timestamp_ns: int | None) -> NDArray[np.int64]:
        positions = np.empty(len(payloads), np.int64)
        index = 0
        while index < len(payloads):
            index = self._appender.append_list(payloads, index, kind, timestamp_ns, positions)
            if index < len(payloads):  # a new region, or a payload that is not exactly bytes
                positions[index] = self._appender.append(payloads[index], kind, timestamp_ns)
                index += 1
        return positions

    def _append_columns(self, payloads: Any, kind: Any, timestamp_ns: Any) -> NDArray[np.int64]:
        columns = columns_of(payloads, kind, timestamp_ns)
        positions = np.empty(len(columns.offsets), np.int64)
        index = 0
        with self._tip.lock:
            while index < len(positions):
                index = self._appender.append_spans(
                    columns.data, columns.offsets, columns.lengths, index, columns.kinds,
                    columns.timestamps, positions,
                )  # fmt: skip
                if index < len(positions):
                    self._tip.make_room(int(columns.lengths[index]))
        return positions
