"""The raw pieces: a writer that appends update by update, and what a load finds.

For callers who keep their own state and want only the file.  Stores are built on the same LogFile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from penstock.batch import UpdateBatch
from penstock.disk import Disk, Handle, disk_for
from penstock.disk.doors import refuse_folder
from penstock.errors import ClosedError, LockedError, ReadOnlyError
from penstock.kernel import Fold
from penstock.store.logfile import LogFile, check_mark, read_log, sidecar_of
from penstock.store.pgss import HEADER, cursor_record, encode_updates
from penstock.types import KvEntry, KvUpdate, VersionToken, WatchCursor

__all__ = ["Snapshot", "SnapshotWriter", "load"]

BUFFER_BYTES: Final = 1 << 20


class Snapshot:
    """What a load found: entries by key, in byte order of the key, and the cursor they are exact at.

    >>> Snapshot({"a": KvEntry("a", b"1"), "b": KvEntry("b", b"2")}, WatchCursor.of(2)).stale_keys({"b"})
    {'a'}
    """

    def __init__(self, entries: dict[str, KvEntry], cursor: WatchCursor) -> None:
        self.entries, self.cursor = entries, cursor

    @classmethod
    def of(cls, fold: Fold) -> Self:
        """Return the snapshot an index holds."""
        entries = {}
        for at in fold.select(b"").tolist():
            key, value, version = fold.read(at)
            entries[key.decode()] = KvEntry(key.decode(), value, VersionToken(version))
        return cls(entries, WatchCursor(VersionToken(fold.cursor)))

    def stale_keys(self, current: Iterable[str]) -> set[str]:
        """Return the keys that are here and not in ``current``."""
        return self.entries.keys() - set(current)


def load(path: str | os.PathLike[str], *, disk: Disk | None = None) -> Snapshot | None:
    """Read a log; None when it is absent, empty, or holds neither entry nor cursor.

    Under the writer's lock a log with anything out of date or torn in it is rewritten, as the original does.
    Where someone else holds the lock it is only read.

    >>> from penstock.disk import MemoryDisk
    >>> load("fold.snap", disk=MemoryDisk()) is None
    True
    """
    disk, path = disk or disk_for(path), os.fspath(path)
    found = disk.stat(path)
    if found is None:
        return None
    if not found.size:
        check_mark(path, 0, sidecar_of(disk, path))
        return None
    state, _buffer = read_log(disk, path)  # refuses what cannot be read before anything is touched
    fold = state.fold
    empty = not fold.count and not fold.cursor
    if not state.clean or fold.redundant or (empty and found.size > len(HEADER)):
        try:
            LogFile(disk, path).close()
        except LockedError:
            pass
    return None if empty else Snapshot.of(fold)


class SnapshotWriter(Handle):
    """Appends updates and checkpoints to a log.

    Updates are buffered; ``checkpoint`` and ``flush`` hand them to the operating system, ``compact`` syncs.
    After a failed write the writer is poisoned: every later call is refused, and the next open mends the file.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> with SnapshotWriter.open("fold.snap", compact_threshold=40, disk=disk) as writer:
    ...     writer.write_update(KvUpdate.put("a", b"1", 1))
    ...     writer.checkpoint(WatchCursor.of(1)), writer.checkpoint(WatchCursor.of(2))
    (False, True)
    >>> load("fold.snap", disk=disk).entries["a"].value
    b'1'
    """

    def __init__(self, log: LogFile, compact_threshold: int) -> None:
        super().__init__()
        self._log: LogFile | None = log
        self.path, self.compact_threshold = log.path, compact_threshold
        self._buffer = bytearray()
        self._since_compact = log.size - len(HEADER)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], compact_threshold: int = 10_485_760, *, disk: Disk | None = None
    ) -> Self:
        """Open or create a log; a torn tail is taken out first, damage is refused."""
        here, name = disk or disk_for(path), os.fspath(path)
        refuse_folder(here, name, "an append log")
        return cls(LogFile(here, name, tidy=False), compact_threshold)

    def write_update(self, update: KvUpdate | UpdateBatch) -> None:
        """Buffer one update, or a batch of them; what no reader would take is refused and changes nothing."""
        log = self._usable()
        self._buffer += encode_updates(self.path, update if isinstance(update, UpdateBatch) else [update])
        if len(self._buffer) > BUFFER_BYTES:
            self._flush(log)

    def checkpoint(self, cursor: WatchCursor) -> bool:
        """Append the cursor and flush; return whether more than the threshold came since the last compaction."""
        log = self._usable()
        self._buffer += cursor_record(cursor.token.raw)
        self._flush(log)
        return self._since_compact > self.compact_threshold

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._flush(self._usable())

    def compact(self) -> None:
        """Rewrite the log: live entries in key order, and the cursor."""
        log = self._usable()
        self._flush(log)
        log.compact()
        self._since_compact = 0

    def close(self) -> None:
        """Flush, and let go of the file and its lock."""
        log, self._log = self._log, None
        if log is not None:
            try:
                if log.failed is None:
                    self._flush(log)
            finally:
                log.close()

    def forked(self) -> None:
        """Close in the child of a fork, leaving file and lock to the parent."""
        log, self._log = self._log, None
        if log is not None:
            log.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _usable(self) -> LogFile:
        if self._log is None:
            raise ClosedError(f"{self.path}: the snapshot writer is closed")
        if self._log.failed is not None:
            raise ReadOnlyError(f"{self.path}: the snapshot writer is poisoned: {self._log.failed}")
        return self._log

    def _flush(self, log: LogFile) -> None:
        if self._buffer:
            data, self._buffer = self._buffer, bytearray()
            log.append(data)
            self._since_compact += len(data)
