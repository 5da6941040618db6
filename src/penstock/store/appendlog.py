"""The store in one append log: the default, nothing to install, byte for byte slipstream's."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from penstock.batch import Spans, UpdateBatch
from penstock.disk import Disk, Handle, disk_for, read_disk_for
from penstock.disk.commit import GROUP, Committer
from penstock.disk.doors import in_a_folder, refuse_folder
from penstock.disk.posix import followed
from penstock.errors import ClosedError, CorruptionError, NotFoundError, OptionsError, PenstockError
from penstock.kernel import Fold, pgss
from penstock.options import options_from, shows_options
from penstock.store.digest import digest_text
from penstock.store.face import SCAN_LIMIT
from penstock.store.logfile import LogFile, check_mark, read_log, replay, sidecar_of, write_compacted
from penstock.store.options import AppendLogOptions
from penstock.store.pgss import cursor_record, encode_updates
from penstock.store.reader import SharedReader, entries_of
from penstock.store.records import token_json
from penstock.types import KvEntry, KvUpdate, Op, Problem, VersionToken, WatchCursor

__all__ = ["AppendLogStore"]


class AppendLogStore(Handle):
    """A fold in one PGSS file: every apply is appended, the index is in memory, the values stay in the file.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> with AppendLogStore.open("fold.snap", disk=disk) as store:
    ...     store.apply([KvUpdate.put("a", b"1", 1), KvUpdate.put("b", b"2", 2)], WatchCursor.of(2))
    ...     [entry.key for entry in store.range()], store.cursor().token.as_int()
    (['a', 'b'], 2)
    >>> with AppendLogStore.open("fold.snap", read_only=True, disk=disk) as store:
    ...     store.get("b").value
    b'2'
    """

    backend = "append-log"
    backend_version = "2"

    def __init__(self, path: str, options: AppendLogOptions, disk: Disk, *, read_only: bool) -> None:
        super().__init__()
        self.path, self.options = path, options
        self._disk = disk
        self._closed = False
        self._log: LogFile | None = None
        self._compacting: threading.Thread | None = None
        self._compact_error: BaseException | None = None
        self._compact_after = 0
        self._committer: Committer | None = None
        refuse_folder(disk, path, "an append log")
        if read_only:
            found = disk.stat(path)
            if found is None or not found.size:  # an empty file is an absent log
                if found is not None:
                    check_mark(path, 0, sidecar_of(disk, path))
                raise NotFoundError(f"{path}: there is no store here")
            state, self._buffer = read_log(disk, path, options.unfinished)
            self._loaded: Fold = state.fold
            self._lock = threading.Lock()
            return
        with in_a_folder(path):
            self._log = LogFile(disk, path, unfinished=options.unfinished)
        self._lock = self._log.lock
        if options.sync != "none":
            interval = options.sync_seconds if options.sync == "interval" else None
            self._committer = GROUP.committer(self._log.sync, interval=interval)

    @property
    def _fold(self) -> Fold:
        """The index, which a rewrite replaces."""
        return self._loaded if self._log is None else self._log.fold

    @classmethod
    @shows_options(AppendLogOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: AppendLogOptions | None = None,
        *,
        read_only: bool = False,
        disk: Disk | None = None,
        **given: Any,
    ) -> Self:
        """Open or create the store in this file; ``read_only`` takes no lock and changes nothing.

        Options as keywords or as one object; AppendLogOptions says what each means.
        """
        options = options_from(AppendLogOptions, options, given)
        # Who only reads needs a disk to read from: an object store will do.
        here = disk or (cast("Disk", read_disk_for(path)) if read_only else disk_for(path))
        name = followed(os.fspath(path)) if read_only else os.fspath(path)
        return cls(name, options, here, read_only=read_only)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[WatchCursor, Self]:
        """Open with the defaults and return where to resume, and the store."""
        store = cls.open(path)
        return store.cursor(), store

    # --- Writing

    def apply(self, updates: UpdateBatch | Iterable[KvUpdate], cursor: WatchCursor) -> None:
        """Append the updates and the cursor in one write."""
        log = self._writable()
        records = encode_updates(self.path, updates)
        records += cursor_record(cursor.token.raw)
        if self._committer is not None:
            self._committer.check()
        log.append(records)
        if self._committer is not None:
            if self.options.sync == "always":
                self._committer.wait()
            else:
                self._committer.touch()
        self._compact_if_due(log)

    def compact(self) -> None:
        """Rewrite the file now and return when it is done: live records in key order and the cursor."""
        log = self._writable()
        log.check()
        log.compact()

    def settle(self) -> None:
        """Wait for a rewrite that is under way, do one that is due, and sync."""
        log = self._writable()
        self._wait()
        if self._compact_error is not None:
            error, self._compact_error = self._compact_error, None
            raise error
        if self._due(log):
            log.compact()
        log.sync()

    def sync(self) -> None:
        """Have everything applied survive a power cut, whatever rewrite is due or under way."""
        self._writable().sync()

    def write_data(self, folder: str) -> WatchCursor:
        """Write data/fold.snap, compacted, while others go on applying."""
        log = self._writable()
        self._disk.make_folder(folder)
        self._disk.make_folder(folder + "/data")
        with log.lock:
            slots, offsets, ordered = self._fold.live()
            cursor, view = self._fold.cursor, log.view
        pgss.sort_records(view, slots, offsets, ordered)
        file, _, _ = write_compacted(self._disk, folder + "/data/fold.snap", view, offsets, cursor)
        file.close()
        self._disk.sync_folder(folder + "/data")
        return WatchCursor(VersionToken(cursor))

    def _due(self, log: LogFile) -> bool:
        """Whether more is out of date than the threshold, and than what is live."""
        garbage = log.garbage
        return garbage > self.options.compact_threshold_bytes and garbage > log.fold.live_bytes

    def _compact_if_due(self, log: LogFile) -> None:
        if not self._due(log) or log.size < self._compact_after:
            return
        with log.writing:
            if self._compacting is None and not self._closed:
                name = f"penstock-compact-{os.path.basename(self.path)}"
                self._compacting = threading.Thread(target=self._compact_aside, args=(log,), name=name, daemon=True)
                try:
                    self._compacting.start()  # with the lock: whoever finds it there can wait for it
                except (RuntimeError, MemoryError):
                    self._compacting = None  # no thread to be had: the next apply asks again

    def _compact_aside(self, log: LogFile) -> None:
        try:
            log.compact()
            self._compact_error, self._compact_after = None, 0
        except BaseException as exc:  # noqa: BLE001 - the old file serves on; settle() tells
            self._compact_error = exc
            self._compact_after = log.size + max(self.options.compact_threshold_bytes, log.fold.live_bytes)
        finally:
            self._compacting = None

    def _wait(self) -> None:
        assert self._log is not None
        with self._log.writing:
            thread = self._compacting
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # --- Reading

    def get(self, key: str) -> KvEntry | None:
        """Return the entry of a key, or None."""
        wanted = _key_bytes(key)
        with self._lock:
            self._check()
            at = -1 if wanted is None else self._fold.find(wanted)
            found = None if at < 0 else self._read(at)
            self._check_whole()
        return None if found is None else KvEntry(key, found[1], VersionToken(found[2]))

    def multi_get(self, keys: Sequence[str]) -> list[KvEntry | None]:
        """Return the entries of many keys, all at one moment."""
        wanted = [_key_bytes(key) for key in keys]
        with self._lock:
            self._check()
            places = [-1 if key is None else self._fold.find(key) for key in wanted]
            found = [None if at < 0 else self._read(at) for at in places]
            self._check_whole()
        return [
            None if entry is None else KvEntry(key, entry[1], VersionToken(entry[2]))
            for key, entry in zip(keys, found, strict=True)
        ]

    def range(self, prefix: str = "") -> list[KvEntry]:
        """Return every entry whose key begins with ``prefix``, in byte order of the key."""
        return [entry for batch in self.scan(prefix) for entry in entries_of(batch)]

    def scan(self, prefix: str = "", *, limit: int = SCAN_LIMIT) -> Iterator[UpdateBatch]:
        """Yield the same entries as puts over the mapped file: nothing is copied."""
        view, offsets = self._select(prefix)
        for start in range(0, len(offsets), limit):
            try:
                columns = pgss.columns(view, offsets[start : start + limit])
            except ValueError as exc:
                with self._lock:
                    self._check_whole()
                raise CorruptionError(self.path, 0, f"changed while the store was open: {exc}") from None
            with self._lock:
                self._check_whole()
            spans = [Spans(columns[row], columns[row + 1]) for row in (0, 2, 4)]
            yield UpdateBatch(view, np.full(columns.shape[1], Op.PUT, np.uint8), *spans)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys alone, in byte order."""
        for batch in self.scan(prefix):
            for key in batch.keys.to_list(batch.buffer):
                yield key.decode()

    def cursor(self) -> WatchCursor:
        """Return the cursor of the last apply."""
        with self._lock:
            self._check()
            return WatchCursor(VersionToken(self._fold.cursor))

    def count(self) -> int:
        """Return how many entries there are."""
        with self._lock:
            self._check()
            return self._fold.count

    @property
    def live_bytes(self) -> int:
        """How many bytes of the file are live records."""
        with self._lock:
            self._check()
            return int(self._fold.live_bytes)

    def digest(self) -> str:
        """Return the digest of all entries, as it was kept up to date."""
        with self._lock:
            self._check()
            return digest_text(self._fold.digest)

    def reader(self) -> SharedReader:
        """Return a handle that reads while this one applies."""
        self._check()
        return SharedReader(self)

    def verify(self) -> Iterator[Problem]:
        """Read the file again, from the first byte, and compare it with the index."""
        with self._lock:
            self._check()
            size, digest = self._fold.size, self._fold.digest
            view = self._view()[:size]
        try:
            state = replay(self.path, view, size)
        except CorruptionError as exc:
            yield Problem(exc.file, exc.byte, exc.reason)
            return
        except PenstockError as exc:
            yield Problem(self.path, 0, str(exc))
            return
        if not state.clean:
            yield Problem(self.path, state.end, "a torn record at the end; the next owner takes it out")
        elif state.fold.digest != digest:
            reason = f"the digest is {digest_text(digest)}, but the records make {digest_text(state.fold.digest)}"
            yield Problem(self.path, 0, reason)

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the store."""
        with self._lock:
            self._check()
            fold = self._fold
            return {
                "backend": self.backend,
                "path": self.path,
                "entries": fold.count,
                "cursor": token_json(fold.cursor),
                "digest": digest_text(fold.digest),
                "bytes": fold.size,
                "live_bytes": fold.live_bytes,
            }

    # --- The end

    def close(self) -> None:
        """Wait for a rewrite under way, sync unless the mode is ``none``, and let go of file and lock."""
        if self._closed:
            return
        self._closed = True
        if self._log is None:
            return
        self._wait()
        if self._committer is not None:
            try:
                self._committer.wait()
            finally:
                self._committer.close()
                self._log.close()
            return
        self._log.close()

    def forked(self) -> None:
        """Close in the child of a fork, leaving file and lock to the parent."""
        self._closed = True
        self._lock = threading.Lock()
        if self._log is not None:
            self._log.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the store is closed")

    def _writable(self) -> LogFile:
        self._check()
        if self._log is None:
            raise OptionsError(f"{self.path}: the store was opened for reading")
        return self._log

    def _view(self) -> memoryview:
        return memoryview(self._buffer) if self._log is None else memoryview(self._log.buffer)

    def _read(self, at: int) -> tuple[bytes, bytes, bytes]:
        """Return key, value and version of the record at an offset, if the file still has it."""
        try:
            return self._fold.read(at)
        except ValueError:
            self._check_whole()
            raise CorruptionError(self.path, at, "the record was changed while the store was open") from None

    def _check_whole(self) -> None:
        """Raise if the file was cut; called with the lock, so that its size and what is indexed are of one moment."""
        if self._log is not None:
            self._check()
            self._log.check_whole()

    def _select(self, prefix: str) -> tuple[memoryview, NDArray[np.int64]]:
        """Return the bytes and the records of a range, at one moment."""
        key = _key_bytes(prefix)
        if self._log is not None:
            self._check()
            self._log.sort()
        with self._lock:
            self._check()
            offsets = np.empty(0, np.int64) if key is None else self._fold.select(key)
            self._check_whole()
            return self._view()[: self._fold.size], offsets


def _key_bytes(key: str) -> bytes | None:
    """Return a key as it is stored, or None for text that no key can be."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        return None
