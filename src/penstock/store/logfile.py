"""One PGSS file and its index, in the hands of its owner, or read by anyone.

The owner holds the lock, maps the file and lets the kernel index what it appends.  The file is never cut or
changed in place: what has to go goes by writing another file and renaming it over this one.  So whoever
reads or maps the old one keeps it whole.

Readers who own nothing read the file into a buffer of their own and change nothing.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import Disk, File, Owned, ReadDisk, ReadFile, save_atomically
from penstock.disk.aside import keep_bytes
from penstock.disk.posix import folder_of
from penstock.disk.sparse import data_end, first_hole
from penstock.errors import ClosedError, CorruptionError, ReadOnlyError
from penstock.kernel import Fold, pgss
from penstock.log.sidecar import Sidecar
from penstock.store.options import Unfinished
from penstock.store.pgss import HEADER, Status, check_header, cursor_record, refusal

__all__ = ["LogFile", "Replayed", "read_log", "replay", "write_compacted", "sidecar_of"]

CHUNK_BYTES: Final = 1 << 20
PAGE: Final = 4096
FEW_UNSORTED: Final = 4096
LOOKS: Final = 8
UNFINISHED_SECONDS: Final = 0.001
"""How long an apply without its cursor is looked at: an owner that lives has written it by then."""
PIECE: Final = 1 << 16
"""How many keys a rewrite looks at before others get the index."""
ROUNDS: Final = 8
SMALL_BYTES: Final = 64 << 10
"""So little may be left to carry over while no apply runs."""


def sidecar_of(disk: ReadDisk, path: str) -> Sidecar:
    """Return the sidecars of an append log."""
    return Sidecar(disk, path + ".penstock-")


class Replayed:
    """What a replay found: the index, where the good part ends, and whether all of the file was good."""

    def __init__(self, fold: Fold, end: int, written: int, *, clean: bool, damaged: bool) -> None:
        self.fold, self.end, self.clean, self.damaged = fold, end, clean, damaged
        self.written = written
        """Where the whole records end, those of an unfinished apply included."""


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
    clean, written = status == Status.CLEAN, end
    if unfinished == "drop" and fold.cursors:
        last = pgss.last_cursor(view[:end], len(HEADER))
        if last < end:
            end, clean, fold = last, False, Fold()
            fold.attach(buffer, end)
            fold.index(len(HEADER), False)
    fold.attach(buffer, end)
    return Replayed(fold, end, written, clean=clean, damaged=error is not None)


def size_without_holes(path: str, file: ReadFile) -> int:
    """Return how much of a log to read: a hole at its end is a torn tail of any size, one before data is damage."""
    size, hole = file.stat().size, first_hole(file)
    if hole >= size:
        return size
    if data_end(file) > hole:
        raise CorruptionError(path, hole, "a hole, with more behind it")
    return min(size, hole + PAGE)


def check_mark(path: str, end: int, sidecar: Sidecar) -> None:
    """Refuse a log whose whole records end before its durable mark: it was cut, or is older than its mark."""
    _refuse_older(path, end, sidecar, sidecar.durable_position())


def _refuse_older(path: str, end: int, sidecar: Sidecar, mark: int | None) -> None:
    if mark is not None and end < mark:
        raise CorruptionError(
            path,
            end,
            f"it ends here, but {mark} bytes of it had been synced; if it was put here on purpose, "
            f"remove {sidecar.mark.path}",
        )


def _is_unfinished(state: Replayed, buffer: Any) -> bool:
    """Whether updates without their cursor are at the end: of an owner that writes them now, or died meanwhile."""
    if not state.fold.cursors:
        return False
    last = cursor_record(state.fold.cursor)
    return bytes(memoryview(buffer)[max(0, state.end - len(last)) : state.end]) != last or not state.clean


def read_log(disk: ReadDisk, path: str, unfinished: Unfinished = "keep") -> tuple[Replayed, Any]:
    """Read a log that may have an owner, changing nothing; return what was found and the buffer.

    An apply that is being written is waited for, so that what is read is what some apply left.
    """
    sidecar, before = sidecar_of(disk, path), -1
    for look in range(LOOKS):
        mark = sidecar.durable_position()  # before the end, which its owner may move meanwhile
        with disk.open(path) as file:
            wanted = size_without_holes(path, file)
            try:
                buffer = np.empty(wanted, np.uint8)
            except MemoryError:
                raise OSError(errno.ENOMEM, f"{wanted} bytes do not fit into memory", path) from None
            size = file.read_into(0, buffer.data) if len(buffer) else 0
        state = replay(path, buffer, size, unfinished)
        if size != before and look + 1 < LOOKS and _is_unfinished(state, buffer):
            before = size
            time.sleep(UNFINISHED_SECONDS)
            continue
        try:
            _refuse_older(path, state.written, sidecar, mark)
        except CorruptionError:
            if look + 1 == LOOKS or sidecar.durable_position() == mark:
                raise
            continue  # its owner has rewritten it between our two looks: the mark was lowered before that
        break
    return state, buffer


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

    buffer: Any

    def __init__(self, disk: Disk, path: str, *, unfinished: Unfinished = "keep", tidy: bool = True) -> None:
        """Open or create; with ``tidy`` a file with anything out of date in it is rewritten as well."""
        self.disk, self.path = disk, path
        self.lock, self.writing = threading.Lock(), threading.RLock()
        self.failed: BaseException | None = None
        self.closed = False
        self._compaction, self._marking, self._marks = threading.Lock(), threading.Lock(), True
        # An unfinished apply is told by the cursor record before it, so with ``drop`` there always is one.
        self._marked = unfinished == "drop"
        self._sidecar = sidecar_of(disk, path)
        self._data = Owned(disk, path)
        self._data.take(path if disk.stat(path) is not None else None)
        try:
            self._owned = self._sidecar.lock()
        except BaseException:
            self._data.release()
            raise
        try:
            self._open(unfinished, tidy=tidy)
        except BaseException:
            self._sidecar.close()
            self._data.release()
            self._owned.release()
            raise

    def _open(self, unfinished: Unfinished, *, tidy: bool) -> None:
        found = self.disk.stat(self.path)
        torn_header = False
        if found is not None and found.size < len(HEADER):
            with self.disk.open(self.path) as start:  # the first write was cut short: nothing else was in it
                torn_header = HEADER.startswith(start.read_at(0, len(HEADER)))
            check_mark(self.path, found.size, self._sidecar)
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(self.path + ".penstock-compact")  # of a rewrite that was cut short
        if found is None or torn_header:
            self._sidecar.remove_mark()  # of a log that was removed
            save_atomically(self.disk, self.path, HEADER, temporary=self.path + ".penstock-compact")
            self._data.release()
        self._data.take(self.path)
        self.file: File = self.disk.modify(self.path)
        self.size = size_without_holes(self.path, self.file)
        self._map(self.size)
        try:
            state = replay(self.path, self.buffer, self.size, unfinished, self._sidecar.lost_power_at())
            check_mark(self.path, state.written, self._sidecar)
        except BaseException:
            self.file.close()
            raise
        self.fold = state.fold
        if state.damaged:
            keep_bytes(self.disk, self.path, self.file, state.end, self.size)
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
                fold, generation, view = self.fold, self.fold.generation, self.view
                slots, offsets, ordered = fold.live()
            pgss.sort_records(view, slots, offsets, ordered)
            with self.lock:
                if self.fold is fold and fold.generation == generation:  # a rewrite may have replaced it
                    fold.adopt(slots)
                    return

    # --- Writing

    def append(self, records: bytearray) -> None:
        """Append whole records and index them.  A write that fails leaves the log as it was, and may be tried again."""
        with self.writing:
            self.check()
            self.check_whole()
            if kernel.native and self.size + len(records) > self._reach:
                with self.lock:
                    self._map(self.size + len(records))  # before anything is written, because it may fail
            try:
                self.file.write_at(self.size, memoryview(records))
            except BaseException as exc:
                self._take_back(exc)
                raise
            with self.lock:
                start = self.size
                self.size += len(records)
                try:
                    if self.size > self._reach:
                        self._map(self.size)
                    self.fold.attach(self.buffer, self.size)
                    self.fold.index(start, False)
                except BaseException as exc:
                    self.failed = exc
                    raise

    def check_whole(self) -> None:
        """Raise if the file no longer has what is indexed: someone cut it, and what was read there is zeros."""
        found = self.file.stat().size
        if found < self.size or self.buffer.torn:
            raise CorruptionError(self.path, found, f"the file was cut while it was open: it had {self.size} bytes")

    def _take_back(self, exc: BaseException) -> None:
        """Cut off what a failed write has left behind the log; if that fails too, nothing more is written."""
        try:
            self.file.truncate(self.size)
        except OSError:
            self.failed = exc  # part of a record may be in the file; the next open takes it out

    def check(self) -> None:
        """Refuse to write after a failure that left nobody sure of what is in the file, and once it is closed."""
        self._check_open()
        if self.failed is not None:
            raise ReadOnlyError(
                f"{self.path}: an earlier write or sync failed: {self.failed}; mend its cause and reopen"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path}: the store is closed")

    def sync(self) -> int:
        """Sync what was appended and move the mark; return how far.

        A sync that fails is final: the next one may succeed without the pages that this one lost.
        """
        self.check()
        with self.lock:
            file, size = self.file, self.size
        try:
            file.sync()
        except OSError as exc:
            if file is not self.file:
                return self.sync()  # a rewrite went on in another file, which is whole
            self._check_open()
            self.failed = exc
            raise
        with self._marking:
            if file is self.file and self._marks:  # else it is being rewritten, and gets its own mark
                self._sidecar.mark.write(self.disk.boot_id(), size, sync=False)
        return size

    def compact(self) -> None:
        """Write the file anew: live records in key order, then what was appended meanwhile, and switch to it."""
        with self._compaction:
            self._check_open()  # else it is of whoever has opened it since
            self._compact()

    def _compact(self) -> None:
        with self.lock:
            taken, cursor, view = self.size, self.fold.cursor, self.view
        old, ordered = self._live_below(taken)
        temporary = self.path + ".penstock-compact"
        file: File | None = None
        try:
            pgss.sort_records(view, np.arange(len(old), dtype=np.uint32), old, ordered)
            file, _, base = write_compacted(self.disk, temporary, view, old, cursor, marked=self._marked)
            fold, buffer = Fold(), self._mapped(file, base)
            fold.attach(buffer, base)
            fold.index(len(HEADER), False)
            fold.adopt(np.arange(fold.count, dtype=np.uint32))  # the slots of a compacted log are in key order
            copied = taken
            for _ in range(ROUNDS):  # most of what comes meanwhile is carried over while appends go on
                size = self.size
                if size - copied < SMALL_BYTES:
                    break
                buffer = self._carry(file, base - taken, copied, size, fold, buffer)
                copied = size
                file.sync()
            with self._marking:
                # The mark is ahead of neither file, whichever of them has the name after a crash.
                self._marks = False
                self._sidecar.write_mark(min(base, self._sidecar.durable_position() or 0))
        except BaseException:
            self._give_up(temporary, file)
            raise
        with self.writing:
            try:
                if copied < self.size:
                    buffer = self._carry(file, base - taken, copied, self.size, fold, buffer)
                    file.sync()
                if fold.digest != self.fold.digest:
                    raise CorruptionError(self.path, 0, "what was rewritten is not what is indexed: it was left alone")
                following = self.disk.own(temporary)
                self.disk.rename(temporary, self.path)
            except BaseException:
                self._give_up(temporary, file)
                raise
            self._data.become(self.path, following)
            self._switch(file, fold, buffer)

    def _live_below(self, taken: int) -> tuple[NDArray[np.int64], int]:
        """Return where the live records before ``taken`` are, and how many of them are in key order.

        A few at a time, so that nobody waits for all of them: what is put or deleted meanwhile lies behind ``taken``,
        and is carried over.
        """
        for look in range(LOOKS):
            step = PIECE if look + 1 < LOOKS else 1 << 62  # a reader may bring the index in order, again and again
            with self.lock:
                generation, counts = self.fold.generation, (self.fold.sorted, max(1, self.fold.unsorted))
            parts: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])
            for found, in_order, count in zip(parts, (True, False), counts, strict=True):
                for start in range(0, count, step):
                    with self.lock:
                        if self.fold.generation != generation:
                            break
                        found.append(self.fold.live_part(in_order, start, min(start + step, count), taken))
            with self.lock:
                if self.fold.generation == generation:
                    break
        return np.concatenate([*parts[0], *parts[1]]), sum(map(len, parts[0]))

    def _give_up(self, temporary: str, file: File | None) -> None:
        """Leave everything as it was before a rewrite that failed."""
        self._marks = True
        if file is not None:
            file.close()
        with contextlib.suppress(OSError):
            self.disk.remove(temporary)

    def _carry(self, file: File, shift: int, start: int, stop: int, fold: Fold, buffer: Any) -> Any:
        """Copy bytes of the old file to where they go in the new one, and index them; return the buffer of that."""
        view = memoryview(self.buffer)
        for at in range(start, stop, CHUNK_BYTES):
            file.write_at(at + shift, view[at : min(at + CHUNK_BYTES, stop)])
        if not kernel.native or stop + shift > len(buffer):
            buffer = self._mapped(file, stop + shift)
        fold.attach(buffer, stop + shift)
        fold.index(start + shift, False)
        return buffer

    def _switch(self, file: File, fold: Fold, buffer: Any) -> None:
        with self.lock:
            self.file, self.size, self.fold = file, fold.size, fold
            self.buffer, self._reach = buffer, len(buffer)
        try:
            self.disk.sync_folder(folder_of(self.path))
            with self._marking:
                self._sidecar.write_mark(self.size)
                self._marks = True
        except BaseException as exc:
            self.failed = exc  # the name may still be that of the old file after a power cut
            raise

    def _map(self, size: int) -> None:
        """Map the file with room to grow: a mapping reaches past the end, and nobody looks there."""
        self.buffer = self._mapped(self.file, size)
        self._reach = len(self.buffer)

    @staticmethod
    def _mapped(file: File, size: int) -> Any:
        return file.map(0, size if not kernel.native else max(CHUNK_BYTES, size * 2) // PAGE * PAGE)

    def close(self) -> None:
        """Let go of the file and of its lock, when nobody is writing, rewriting or looking at it."""
        with self._compaction, self.writing, self.lock:
            self.closed = True
            self.file.close()
            self._sidecar.close()
            self._data.release()
            self._owned.release()

    def forget(self) -> None:
        """Let go in the child of a fork, leaving the lock to the parent."""
        self._owned.release()  # closes this process's descriptor; the parent's lock stays
        self._data.release()
        self.file.close()
