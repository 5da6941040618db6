"""One PGSS file and its index, in the hands of its owner, or read by anyone.

The owner holds the lock, maps the file and lets the kernel index what it appends.  The file is never cut or
changed in place: what has to go goes by writing another file and renaming it over this one.  So whoever
reads or maps the old one keeps it whole.

Readers who own nothing read the file into a buffer of their own and change nothing.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import Disk, File, ReadDisk, save_atomically
from penstock.disk.posix import folder_of
from penstock.errors import CorruptionError, ReadOnlyError
from penstock.kernel import Fold, pgss
from penstock.log.sidecar import Sidecar
from penstock.store.options import Unfinished
from penstock.store.pgss import HEADER, Status, check_header, cursor_record, refusal

__all__ = ["LogFile", "Replayed", "read_log", "replay", "write_compacted", "sidecar_of"]

CHUNK_BYTES: Final = 1 << 20
PAGE: Final = 4096
FEW_UNSORTED: Final = 4096


def sidecar_of(disk: ReadDisk, path: str) -> Sidecar:
    """Return the sidecars of an append log."""
    return Sidecar(disk, path + ".penstock-")


class Replayed:
    """What a replay found: the index, where the good part ends, and whether all of the file was good."""

    def __init__(self, fold: Fold, end: int, *, clean: bool, damaged: bool) -> None:
        self.fold, self.end, self.clean, self.damaged = fold, end, clean, damaged


def replay(path: str, buffer: Any, size: int, unfinished: Unfinished = "keep", lost_at: int | None = None) -> Replayed:
    """Index a log, deciding what is a torn tail and what is damage; CorruptionError for damage.

    ``lost_at`` is how far the file had been synced before power was lost: behind it, damage counts as torn.
    """
    view = memoryview(buffer)[:size]
    check_header(path, bytes(view[: len(HEADER)]))
    fold = Fold()
    fold.attach(buffer, size)
    end, status, detail = fold.index(len(HEADER), True)
    error: CorruptionError | None = None
    if status in (Status.TRUNCATED, Status.TORN):
        # A length that was damaged looks like a torn record; then whole records follow it.
        found = pgss.find_record(view, end + 1, size)
        if found >= 0:
            error = CorruptionError(path, end, f"the record does not end, yet a whole one follows at byte {found}")
        elif found == -2:
            error = CorruptionError(path, end, "the record does not end, and what follows is too much to search")
    elif status != Status.CLEAN:
        error = refusal(path, end, status, detail)
    if error is not None and (lost_at is None or end < lost_at):
        raise error
    clean = status == Status.CLEAN
    if unfinished == "drop" and fold.cursors:
        last = pgss.last_cursor(view[:end], len(HEADER))
        if last < end:
            end, clean, fold = last, False, Fold()
            fold.attach(buffer, end)
            fold.index(len(HEADER), False)
    fold.attach(buffer, end)
    return Replayed(fold, end, clean=clean, damaged=error is not None)


def read_log(disk: ReadDisk, path: str, unfinished: Unfinished = "keep") -> tuple[Replayed, Any]:
    """Read a log that may have an owner, changing nothing; return what was found and the buffer."""
    with disk.open(path) as file:
        buffer = np.empty(file.stat().size, np.uint8)
        size = file.read_into(0, buffer.data) if len(buffer) else 0
    return replay(path, buffer, size, unfinished), buffer


def write_compacted(
    disk: Disk, path: str, view: memoryview, offsets: NDArray[np.int64], cursor: bytes, *, marked: bool = False
) -> tuple[File, NDArray[np.int64], int]:
    """Write the records at ``offsets`` and the cursor to a new file and sync it; a none cursor only if ``marked``.

    Return the file, still open, where each record now is, and the size.
    """
    with contextlib.suppress(FileNotFoundError):
        disk.remove(path)
    file = disk.create(path)
    try:
        lengths = np.zeros(len(offsets), np.int64)
        chunk = np.empty(CHUNK_BYTES, np.uint8)
        file.write_at(0, HEADER)
        size, number = len(HEADER), 0
        while number < len(offsets):
            number, used = pgss.copy_records(view, offsets, number, chunk, lengths)
            if not used:  # a record larger than the chunk: make room for the largest there is
                chunk = np.empty(17 << 20, np.uint8)
                continue
            file.write_at(size, chunk.data[:used])
            size += used
        if cursor or marked:
            record = cursor_record(cursor)
            file.write_at(size, record)
            size += len(record)
        file.sync()
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            disk.remove(path)
        raise
    return file, len(HEADER) + np.cumsum(lengths) - lengths, size


class LogFile:
    """A PGSS file with its one owner.

    ``lock`` guards the index and is held for moments; ``writing`` is held by whoever appends or switches files.
    """

    def __init__(self, disk: Disk, path: str, *, unfinished: Unfinished = "keep", tidy: bool = True) -> None:
        """Open or create; with ``tidy`` a file with anything out of date in it is rewritten as well."""
        self.disk, self.path = disk, path
        self.lock, self.writing = threading.Lock(), threading.RLock()
        self.failed: BaseException | None = None
        self._compaction = threading.Lock()
        # An unfinished apply is told by the cursor record before it, so with ``drop`` there always is one.
        self._marked = unfinished == "drop"
        self._sidecar = sidecar_of(disk, path)
        self._owned = self._sidecar.lock()
        try:
            self._open(unfinished, tidy=tidy)
        except BaseException:
            self._sidecar.close()
            self._owned.release()
            raise

    def _open(self, unfinished: Unfinished, *, tidy: bool) -> None:
        found = self.disk.stat(self.path)
        torn_header = False
        if found is not None and found.size < len(HEADER):
            with self.disk.open(self.path) as start:  # the first write was cut short: nothing else was in it
                torn_header = HEADER.startswith(start.read_at(0, len(HEADER)))
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(self.path + ".penstock-compact")  # of a rewrite that was cut short
        if found is None or torn_header:
            save_atomically(self.disk, self.path, HEADER, temporary=self.path + ".penstock-compact")
        self.file: File = self.disk.modify(self.path)
        self.size = self.file.stat().size
        self._map()
        state = replay(self.path, self.buffer, self.size, unfinished, self._sidecar.lost_power_at())
        self.fold = state.fold
        if state.damaged:
            save_atomically(self.disk, self.path + ".bad", bytes(memoryview(self.buffer)[state.end : self.size]))
        bare = len(HEADER) + len(cursor_record(b"")) * self._marked
        empty = not self.fold.count and not self.fold.cursor and self.size > bare
        dirty, self.size = not state.clean, state.end
        if dirty or (tidy and (self.fold.redundant or empty)):
            self.compact()
        else:
            if self._marked and not self.fold.cursors:
                self.append(bytearray(cursor_record(b"")))
            self.file.sync()
            self._sidecar.write_mark(self.size)

    # --- Reading, for whoever holds ``lock``

    @property
    def view(self) -> memoryview:
        """The bytes of the log."""
        return memoryview(self.buffer)[: self.size]

    @property
    def garbage(self) -> int:
        """How many bytes a rewrite would save, the current cursor record aside."""
        return self.size - len(HEADER) - self.fold.live_bytes

    def sort(self) -> None:
        """Bring the index in key order if much is unsorted; called without ``lock``."""
        while True:
            with self.lock:
                if self.fold.unsorted <= max(FEW_UNSORTED, self.fold.count // 8):
                    return
                generation, view = self.fold.generation, self.view
                slots, offsets, ordered = self.fold.live()
            pgss.sort_records(view, slots, offsets, ordered)
            with self.lock:
                if self.fold.generation == generation:
                    self.fold.adopt(slots)
                    return

    # --- Writing

    def append(self, records: bytearray) -> None:
        """Append whole records and index them.  After a failure nothing more is written."""
        with self.writing:
            self.check()
            try:
                self.file.write_at(self.size, memoryview(records))
            except BaseException as exc:
                self.failed = exc  # part of a record may be in the file; the next open takes it out
                raise
            with self.lock:
                start = self.size
                self.size += len(records)
                try:
                    if self.size > self._reach:
                        self._map()
                    self.fold.attach(self.buffer, self.size)
                    self.fold.index(start, False)
                except BaseException as exc:
                    self.failed = exc
                    raise

    def check(self) -> None:
        """Refuse to write after an earlier failure."""
        if self.failed is not None:
            raise ReadOnlyError(f"{self.path}: an earlier write failed: {self.failed}")

    def sync(self) -> int:
        """Sync what was appended; return how far."""
        with self.lock:
            file, size = self.file, self.size
        file.sync()
        return size

    def compact(self) -> None:
        """Write the file anew: live records in key order, then what was appended meanwhile, and switch to it."""
        with self._compaction:
            self._compact()

    def _compact(self) -> None:
        with self.lock:
            slots, old, ordered = self.fold.take()
            taken, cursor, view = self.size, self.fold.cursor, self.view
        temporary = self.path + ".penstock-compact"
        try:
            pgss.sort_records(view, slots, old, ordered)
            file, new, base = write_compacted(self.disk, temporary, view, old, cursor, marked=self._marked)
            copied = taken
            for _ in range(4):  # most of what comes meanwhile is carried over while appends go on
                size = self.size
                if size - copied < CHUNK_BYTES:
                    break
                copied = self._carry(file, base - taken, copied, size)
                file.sync()
        except BaseException:
            self._give_up(temporary)
            raise
        with self.writing:
            try:
                if copied < self.size:
                    copied = self._carry(file, base - taken, copied, self.size)
                    file.sync()
                self.disk.rename(temporary, self.path)
            except BaseException:
                self._give_up(temporary)
                raise
            self._switch(file, slots, old, new, taken, base)

    def _give_up(self, temporary: str) -> None:
        """Leave everything as it was before a rewrite that failed."""
        with self.lock:
            self.fold.let_go()
        with contextlib.suppress(OSError):
            self.disk.remove(temporary)

    def _carry(self, file: File, shift: int, start: int, stop: int) -> int:
        """Copy bytes of the old file to where they go in the new one."""
        view = memoryview(self.buffer)
        for at in range(start, stop, CHUNK_BYTES):
            file.write_at(at + shift, view[at : min(at + CHUNK_BYTES, stop)])
        return stop

    def _switch(
        self, file: File, slots: Any, old: NDArray[np.int64], new: NDArray[np.int64], taken: int, base: int
    ) -> None:
        with self.lock:
            self.file, self.size = file, self.size - taken + base
            try:
                self._map()
                self.fold.switch(slots, old, new, taken, base, self.buffer, self.size)
            except BaseException as exc:
                self.failed = exc
                raise
        try:
            self.disk.sync_folder(folder_of(self.path))
            self._sidecar.write_mark(self.size)
        except BaseException as exc:
            self.failed = exc  # the name may still be that of the old file after a power cut
            raise

    def _map(self) -> None:
        """Map the file with room to grow: a mapping reaches past the end, and nobody looks there."""
        reach = self.size if not kernel.native else max(CHUNK_BYTES, self.size * 2) // PAGE * PAGE
        self.buffer: Any = self.file.map(0, reach)
        self._reach = reach

    def close(self) -> None:
        """Let go of the file and of its lock."""
        self.file.close()
        self._sidecar.close()
        self._owned.release()

    def forget(self) -> None:
        """Let go in the child of a fork, leaving the lock to the parent."""
        self._owned.release()  # closes this process's descriptor; the parent's lock stays
        self.file.close()
