"""The writing side of a channel: one writer, publishing records that readers see at once.

The hot path is the kernel's Appender; this file moves it from region to region and from file to file, and holds what
can go wrong.  Order of publication and of rolling (docs/formats/xchannel.md):

    record   payload → next header → header → commit byte → message_count → write_position
    region   grow the file → header at the next region's start → Skip committed → counters
    file     new file complete under its name → Roll committed → write_position → old files removed

A crash between any two of these steps leaves a channel that readers read on and the next writer continues.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import Disk, File, Handle, PosixDisk
from penstock.disk.commit import GROUP, Committer
from penstock.disk.posix import folder_of
from penstock.errors import ClosedError, CorruptionError, OptionsError, ReadOnlyError, UnsupportedError
from penstock.kernel import Mapping
from penstock.log.columns import columns_of
from penstock.log.options import SYNC_SECONDS, SyncMode
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.ahead import Ahead
from penstock.log.xchannel.files import ChannelFile, discover, page_size, sidecar_prefix
from penstock.log.xchannel.format import MAX_FILE_BYTES, ChannelHeader, Stop, file_path, position_of
from penstock.log.xchannel.options import DEFAULT_REGION_BYTES, WriterOptions
from penstock.log.xchannel.recover import complete_roll, cut_back, find_end

__all__ = ["Writer", "Reservation", "cleanup"]

_Place = tuple[ChannelFile, int, Mapping, int, Mapping]  # file, offset, window, where that starts, channel header


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

    def __init__(self, base: str, disk: Disk, options: WriterOptions) -> None:
        super().__init__()
        self.path, self.options = base, options
        self._disk = disk
        self._mutex = threading.RLock()
        self._syncing = threading.Lock()
        self._sidecar = Sidecar(disk, sidecar_prefix(base))
        self._dead = ""
        self._committer: Committer | None = None
        self._head: tuple[ChannelFile, Mapping] | None = None  # the mapped channel header, and whose it is
        self._ahead = Ahead()
        self._unsynced = 0  # the oldest file that a sync has yet to reach
        self._marked = False
        self._unsafe: OSError | None = None
        self._held = self._sidecar.lock()
        try:
            self._open()
        except BaseException:
            self._sidecar.close()
            self._held.release()
            raise
        if options.sync == "interval":
            self._committer = GROUP.committer(self._sync_now, interval=options.sync_seconds)
        elif options.sync == "always":
            self._committer = GROUP.committer(self._sync_now)
        else:
            self.append = self._appender.append  # type: ignore[method-assign]  # nothing in between

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        region_bytes: int | None = None,
        roll_bytes: int = 0,
        max_message_bytes: int = 0,
        keep_files: int = 0,
        sync: SyncMode = "none",
        sync_seconds: float = SYNC_SECONDS,
        content: str = "raw",
        disk: Disk | None = None,
    ) -> Writer:
        """Open a channel for writing, created if it is not there; see WriterOptions for each argument."""
        options = WriterOptions(
            region_bytes=region_bytes,
            roll_bytes=roll_bytes,
            max_message_bytes=max_message_bytes,
            keep_files=keep_files,
            sync=sync,
            sync_seconds=sync_seconds,
            content=content,
        )
        return cls(os.fspath(path), disk or PosixDisk(), options)

    @classmethod
    def precreate(cls, path: str | os.PathLike[str], **options: Any) -> None:
        """Create a channel, or check that it can be opened, and leave it for its writer and readers."""
        cls.open(path, **options).close()

    # --- Writing

    def append(self, payload: Any, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Append one record and return its position.

        ``payload`` is anything that has bytes.  The time is now unless it is given.  The record is visible to
        every reader when this returns, and durable according to the channel's ``sync``.
        """
        position = self._appender.append(payload, kind, timestamp_ns)
        self._written()
        return position

    def append_many(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> NDArray[np.int64]:
        """Append a list of bytes, an Arrow array or a Batch, and return the positions.

        ``kind`` and ``timestamp_ns`` are one value for all or an array; a Batch brings its own unless they
        are given.  Readers may see the first records before the last are written.
        """
        if isinstance(payloads, list) and isinstance(kind, int) and isinstance(timestamp_ns, int | None):
            positions = self._append_list(payloads, kind, timestamp_ns)
        else:
            positions = self._append_columns(payloads, kind, timestamp_ns)
        self._written()
        return positions

    def reserve(self, length: int) -> memoryview:
        """Return ``length`` writable bytes where the next record's payload will be; ``commit`` publishes it.

        Nothing is visible before that.  Reserving again takes the same place.  The view is closed by
        ``commit``, by ``append`` and by a roll.
        """
        while (view := self._appender.reserve(length)) is None:
            self._make_room(length)
        return view

    def commit(self, length: int | None = None, *, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Publish the first ``length`` bytes of what was reserved (all of it unless given)."""
        reserved = self._appender.pending
        if reserved < 0:
            self._check_open()
            raise OptionsError(f"{self.path}: commit without a reservation")
        if length is not None and not 0 <= length <= reserved:
            raise OptionsError(f"{self.path}: cannot commit {length} of {reserved} reserved bytes")
        position = self._appender.commit(reserved if length is None else length, kind, timestamp_ns)
        self._written()
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
        with self._mutex:
            self._check_open()
            with self._parked():
                self._roll()

    def sync(self) -> int:
        """Return when everything appended so far survives a power cut; readers see the same mark."""
        if self._committer is not None:
            self._check_open()
            return self._committer.request().result()
        return self._sync_now()

    # --- What it knows

    @property
    def next_position(self) -> int:
        """The position the next record will have, unless it takes a new region or file."""
        self._check_open()
        return self._appender.position

    @property
    def durable_position(self) -> int | None:
        """The exclusive bound of what survives a power cut, None before the first sync."""
        return self._sidecar.durable_position()

    @property
    def region_bytes(self) -> int:
        """The size of a region of this channel."""
        return self._file.region_bytes

    @property
    def file_sequence(self) -> int:
        """The number of the file being written."""
        return self._file.sequence

    @property
    def largest_message(self) -> int:
        """The largest payload this writer takes."""
        return self._largest

    # --- Open and closed

    def close(self) -> None:
        """Let go of the channel and of its lock; with a sync mode, sync once more."""
        with self._mutex:
            if self._dead:
                return
        try:
            if self._committer is not None:
                self._committer.request().result()
                self._committer.close()
            elif self._marked:
                self._sync_now()
        finally:
            with self._mutex:
                self._dead = "the writer is closed"
                self._appender.detach()
                self._ahead.give_back(self._file)
                self._ahead.close()
                self._file.close()
                self._sidecar.close()
                self._held.release()

    def forked(self) -> None:
        """Close in the child of a fork; the channel and its lock stay the parent's."""
        self._mutex = threading.RLock()
        self._dead = "the writer was opened before a fork: open its own channel in the child"
        self._committer = None
        self._ahead.forked()
        self._appender.detach()
        self._file.close()
        self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Writer of {self.path} {self._dead or f'at {self._appender.position}'}>"

    # --- Opening

    def _open(self) -> None:
        if not kernel.native:
            raise UnsupportedError(
                f"{self.path}: writing a channel needs memory order between processes, and {kernel.reason}"
            )
        from penstock.kernel.xchannelwrite import Appender

        there = self._disk.stat(self.path)
        if there is not None and there.is_folder:
            raise OptionsError(f"{self.path}: this is a folder, a channel is a file")
        cut_back(self._disk, self.path, self._sidecar)
        if self.options.sync == "none":
            self._sidecar.remove_mark()  # from here on nothing is promised that it could tell
        sequences = discover(self._disk, self.path)
        if not sequences:
            self._sidecar.create_identity(self.options.content)
            self._create(0, self.options.region_bytes or DEFAULT_REGION_BYTES)
            sequences = [0]
        self._file, offset = self._continue(sequences[-1], self.options.region_bytes)
        if self._file.sequence > 0:
            try:
                complete_roll(self._disk, self.path, self._file.sequence, self._file.region_bytes)
            except BaseException:
                self._file.close()
                raise
        self._unsynced = self._file.sequence
        self._largest = self.options.largest_message(self._file.region_bytes)
        self._appender = Appender(self._make_room, self._largest)
        self._attach(self._place(self._file, offset))
        self._appender.resume()

    def _continue(self, sequence: int, region_bytes: int | None) -> tuple[ChannelFile, int]:
        """Open a file to write on at its end; return it and the offset of the end."""
        path = file_path(self.path, sequence)
        file = ChannelFile(self.path, sequence, self._disk.modify(path))
        if region_bytes is not None and file.region_bytes != region_bytes:
            file.close()
            raise OptionsError(
                f"{path}: its region size is {file.region_bytes}, not {region_bytes}; nothing was changed"
            )
        try:
            offset, stop, count = find_end(file)
            if stop is Stop.ROLLED:  # the file it leads to was lost before anything was in it
                file.close()
                self._create(sequence + 1, file.region_bytes)
                return self._continue(sequence + 1, region_bytes)
            region = offset // file.region_bytes * file.region_bytes
            self._writable(file).allocate(region, file.region_bytes)
            head = file.file.map(0, page_size, writable=True)
            window, start = file.window(offset, writable=True)
            kernel.xchannelwrite.install_header(window, offset - start)
            kernel.xchannelwrite.store_counts(head, offset + 16, count)
        except BaseException:
            file.close()
            raise
        return file, offset

    def _create(self, sequence: int, region_bytes: int) -> None:
        """Make a fresh file: complete before it has its name, and never over something that has it."""
        path, temporary = file_path(self.path, sequence), self._sidecar.prefix + "new"
        header = ChannelHeader.fresh(sequence, region_bytes, self.options.max_message_bytes)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(temporary)
        try:
            with self._disk.create(temporary) as file:
                file.allocate(0, region_bytes)
                file.write_at(0, header.encode())
                if self.options.sync != "none":
                    file.sync()
            self._name(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        if self.options.sync != "none":
            self._disk.sync_folder(folder_of(path))

    def _name(self, temporary: str, path: str) -> None:
        try:
            self._disk.link(temporary, path)
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if self._disk.stat(path) is not None:  # a file system without hard links
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            self._disk.rename(temporary, path)
        else:
            self._disk.remove(temporary)

    def _place(self, file: ChannelFile, offset: int, window: Mapping | None = None) -> _Place:
        """Map what writing at ``offset`` of a file takes: everything about a move that can fail."""
        start = offset // file.window_bytes * file.window_bytes
        if window is None:
            window, start = file.window(offset, writable=True)
        head = self._head[1] if self._head and self._head[0] is file else file.file.map(0, page_size, writable=True)
        return file, offset, window, start, head

    def _attach(self, place: _Place, mapped: int = 0) -> None:
        """Point the appender at a place, where a header lies already and pages are mapped up to ``mapped``."""
        file, offset, window, start, head = place
        self._window, self._window_start, self._head = window, start, (file, head)
        region_end = (offset // file.region_bytes + 1) * file.region_bytes
        roll_end = (self.options.roll_bytes or MAX_FILE_BYTES) - start
        self._appender.attach(
            window, head, offset - start, region_end - start, roll_end, max(offset, mapped) - start, start,
            position_of(file.sequence, start),
        )  # fmt: skip
        if region_end - start < roll_end:  # else the file is rolled before there is a record in that region
            self._ahead.ask(file, window, start, region_end)

    # --- Moving on

    def _make_room(self, length: int) -> None:
        """Move on until a record of that length fits, or say why it never will."""
        with self._mutex:
            self._check_open()
            self._check_length(length)
            with self._parked():
                while True:
                    if self._appender.due(length):
                        self._roll()
                    elif self._appender.crosses(length):
                        self._skip()
                    else:
                        return

    def _check_length(self, length: int) -> None:
        if length < 0:
            raise OptionsError(f"{self.path}: a record cannot have {length} bytes")
        if length <= self._largest:
            return
        if 0 < self.options.max_message_bytes < length:
            limit = f"max_message_bytes is {self.options.max_message_bytes}"
        else:
            limit = (
                f"regions of {self._file.region_bytes} bytes"
                + (f" in files of {self.options.roll_bytes}" if self.options.roll_bytes else "")
                + f" hold at most {self._largest}"
            )
        raise OptionsError(f"{self.path}: a message of {length} bytes is too large: {limit}")

    @contextlib.contextmanager
    def _parked(self) -> Iterator[None]:
        """Keep other threads out of the appender while it is moved."""
        self._appender.park()
        try:
            yield
        finally:
            self._appender.resume()

    def _skip(self) -> None:
        """Go on in the next region of the file."""
        file = self._file
        offset = (self._appender.offset // file.region_bytes + 1) * file.region_bytes
        mapped = self._ahead.take(file, offset)
        if mapped < 0:
            self._writable(file).allocate(offset, file.region_bytes)
        same = offset - self._window_start < len(self._window)
        window, start = (self._window, self._window_start) if same else file.window(offset, writable=True)
        kernel.xchannelwrite.install_header(window, offset - start)
        place = self._place(file, offset, window)
        self._appender.commit_skip()
        self._attach(place, mapped)

    def _roll(self) -> None:
        """Go on in the next file.  If that cannot be had, this one stays in use."""
        following = self._file.sequence + 1
        path = file_path(self.path, following)
        there = self._disk.stat(path)
        if there is not None and there.is_folder:
            raise OptionsError(f"{path}: a folder has the name of the channel's next file")
        if there is not None and there.size == 0:
            self._disk.remove(path)  # never initialised
            there = None
        if there is None:
            self._create(following, self._file.region_bytes)
        try:
            successor, offset = self._continue(following, self._file.region_bytes)
        except OptionsError as exc:
            raise CorruptionError(path, 40, str(exc)) from None
        try:
            place = self._place(successor, offset)
        except BaseException:
            successor.close()
            raise
        self._appender.commit_roll(time.time_ns())
        self._ahead.give_back(self._file)
        old, self._file = self._file, successor
        self._attach(place)
        if self._committer is not None:
            self._committer.touch()
        old.close()
        self._retain()

    def _retain(self) -> None:
        """Remove files beyond ``keep_files``; readers that map them go on undisturbed."""
        if not self.options.keep_files:
            return
        for sequence in discover(self._disk, self.path):
            if sequence > self._file.sequence - self.options.keep_files:
                break
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(file_path(self.path, sequence))

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
        with self._mutex:
            while index < len(positions):
                index = self._appender.append_spans(
                    columns.data, columns.offsets, columns.lengths, index, columns.kinds,
                    columns.timestamps, positions,
                )  # fmt: skip
                if index < len(positions):
                    self._make_room(int(columns.lengths[index]))
        return positions

    # --- Durability

    def _written(self) -> None:
        if self._committer is None:
            return
        if self.options.sync == "always":
            self._committer.request().result()
        else:
            self._committer.touch()

    def _sync_now(self) -> int:
        """Sync every file since the last time, then move the mark, which never moves back.

        After a sync that failed nobody knows which pages reached the device, and the next one may succeed
        without them: the mark never moves again, until the channel is opened anew.
        """
        with self._syncing:
            if self._unsafe is not None:
                raise ReadOnlyError(f"{self.path}: an earlier sync failed: {self._unsafe}; mend its cause and reopen")
            try:
                return self._sync_files()
            except OSError as exc:
                self._unsafe = exc
                raise

    def _sync_files(self) -> int:
        with self._mutex:
            self._check_open()
            position, sequence, first = self._appender.position, self._file.sequence, self._unsynced
            window, used = self._window, self._appender.offset - self._window_start
        for older in range(first, sequence):
            self._sync_file(older)
        window.sync(0, used)
        self._sync_file(sequence)
        if first < sequence or not self._marked:
            self._disk.sync_folder(folder_of(self.path))
        self._sidecar.write_mark(position)
        self._unsynced, self._marked = sequence, True
        return position

    def _sync_file(self, sequence: int) -> None:
        try:
            with self._disk.modify(file_path(self.path, sequence)) as file:
                file.sync()
        except FileNotFoundError:
            pass  # retention was faster

    @staticmethod
    def _writable(file: ChannelFile) -> File:
        return file.file  # type: ignore[return-value]  # opened by modify

    def _check_open(self) -> None:
        if self._dead:
            raise ClosedError(f"{self.path}: {self._dead}")


def cleanup(path: str | os.PathLike[str], *, disk: Disk | None = None) -> list[str]:
    """Remove a channel: its files, holes in their numbers or not, and its sidecars; return their names.

    LockedError while a writer has it open.  Readers that map the files go on and then learn that it is gone.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> Writer.precreate(folder.name + "/ticks")
    >>> len(cleanup(folder.name + "/ticks")), os.listdir(folder.name)
    (3, [])
    >>> folder.cleanup()
    """
    base, disk = os.fspath(path), disk or PosixDisk()
    sidecar = Sidecar(disk, sidecar_prefix(base))
    doomed = [file_path(base, sequence) for sequence in discover(disk, base)]
    start = os.path.basename(sidecar.prefix)
    sidecars = [
        os.path.join(os.path.dirname(base), name) for name in disk.list(folder_of(base)) if name.startswith(start)
    ]
    if not doomed and not sidecars:
        return []
    lock = sidecar.lock()
    lock_path = sidecar.prefix + "lock"
    try:
        for name in (*doomed, *(name for name in sidecars if name != lock_path), lock_path):
            with contextlib.suppress(FileNotFoundError):
                disk.remove(name)
    finally:
        lock.release()
    return [*doomed, *(name for name in sidecars if name != lock_path), lock_path]
