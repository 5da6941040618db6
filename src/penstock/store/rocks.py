"""The store on RocksDB, through rocksdict in raw mode: families ``data`` and ``meta``, one write batch an apply.

The tuning is slipstream's as far as the binding reaches: it has no ribbon filters (bloom stands in), no
memory-optimised filters, no hyper-clock cache and no wait for compactions.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, Self

from penstock.disk import Lock, disk_for
from penstock.disk.commit import GROUP, Committer
from penstock.disk.doors import in_a_folder, refuse_foreign
from penstock.disk.posix import check_plain
from penstock.disk.wait import Backoff
from penstock.errors import (
    ClosedError,
    CorruptionError,
    LockedError,
    NotFoundError,
    PenstockError,
    ReadOnlyError,
    UnsupportedError,
)
from penstock.options import options_from, shows_options
from penstock.store.engine import Changes, EngineStore, Rows, after_prefix
from penstock.store.options import RocksOptions
from penstock.store.rockslog import check_logs, hold_tables, let_go_of_tables
from penstock.store.rocksmark import check_closed, forget_closed, note_closed
from penstock.types import Problem, WatchCursor

__all__ = ["RocksStore"]

logger = logging.getLogger(__name__)

DATA: Final = "data"
META: Final = "meta"
BLOCK_BYTES: Final = 16 << 10
CLOSE_SECONDS: Final = 30.0
"""How long closing waits for the reads that are under way."""
IN_FILE: Final = re.compile(r" in (?P<path>\S+\.sst) offset (?P<byte>\d+)|(?P<named>/\S+\.sst)\b")
IN_USE: Final = re.compile(r"lock hold by|/LOCK: Resource temporarily unavailable")


class RocksStore(EngineStore):
    """A fold in a RocksDB folder, for more keys than memory holds.

    >>> import tempfile
    >>> from penstock.types import KvUpdate
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RocksStore.open(folder.name + "/fold", RocksOptions(cache_bytes=0)) as store:
    ...     store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    ...     store.get("a").value, store.count()
    (b'1', 1)
    >>> folder.cleanup()
    """

    backend = "rocksdb"
    backend_version = "0.50"

    def __init__(self, path: str, options: RocksOptions, *, read_only: bool) -> None:
        super().__init__(path, read_only=read_only, running_digest=options.running_digest)
        self._rocks = _import()
        self.options = options
        disk = disk_for(path)
        if not read_only:
            refuse_foreign(disk, path, "RocksDB store")
        self._lock = None if read_only else self._own()
        try:
            check_plain(path)
            check_closed(disk, path)
            self._noticed = check_logs(disk, path, mend=not read_only)
            if read_only and disk.stat(path + "/CURRENT") is None:
                raise NotFoundError(f"{path}: there is no store here")
            held = hold_tables(disk, path) if self._noticed and not read_only else []
        except BaseException:
            self._let_go()
            raise
        families = {DATA: self._data_options(), META: self._meta_options()}
        access = self._rocks.AccessType.read_only() if read_only else self._rocks.AccessType.read_write()
        try:
            self._db = self._rocks.Rdict(path, self._db_options(), column_families=families, access_type=access)
        except Exception as exc:  # noqa: BLE001 - the binding raises plain Exception
            self._let_go()
            raise _opening_error(path, exc, self._noticed) from None
        self._data, self._meta = self._db.get_column_family(DATA), self._db.get_column_family(META)
        self._data_handle = self._db.get_column_family_handle(DATA)
        self._meta_handle = self._db.get_column_family_handle(META)
        self._write_options = self._rocks.WriteOptions()
        self._write_options.sync = options.sync == "always"
        self._failed = ""
        self._committer: Committer | None = None
        if options.sync == "interval" and not read_only:
            self._committer = GROUP.committer(self._sync_log, interval=options.sync_seconds)
        try:
            if not read_only:
                forget_closed(disk, path)
                let_go_of_tables(disk, path, held)
            self._begin()
        except BaseException:
            self._release()
            raise

    @classmethod
    @shows_options(RocksOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: RocksOptions | None = None,
        *,
        read_only: bool = False,
        **given: Any,
    ) -> Self:
        """Open or create the store in this folder; ``read_only`` takes no lock and changes nothing.

        Options as keywords or as one object; RocksOptions says what each means.
        """
        return cls(os.fspath(path), options_from(RocksOptions, options, given), read_only=read_only)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[WatchCursor, Self]:
        """Open with the defaults and return where to resume, and the store."""
        store = cls.open(path)
        return store.cursor(), store

    def verify(self) -> Iterator[Problem]:
        """Yield what was noticed when it was opened, then read everything; see EngineStore."""
        yield from self._noticed
        yield from super().verify()

    def settle(self) -> None:
        """Flush the memtables, let compactions finish, and sync the write-ahead log."""
        with self._writing:
            self._check()
            with self._told():
                for family in (self._data, self._meta):
                    family.flush(True)
                self._data.compact_range(None, None)
                self._db.flush_wal(True)

    def write_data(self, folder: str) -> WatchCursor:
        """Write a native checkpoint as ``folder``/data."""
        with self._writing:
            self._check()
            disk_for(folder).make_folder(folder)
            with self._told():
                self._rocks.Checkpoint(self._db).create_checkpoint(folder + "/data")
            return WatchCursor(self._token)

    # --- The engine

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what the engine says of its files into an error of our tree: the binding raises plain Exception."""
        try:
            yield
        except (PenstockError, OSError, AttributeError, self._rocks.DbClosedError):
            raise
        except Exception as exc:
            if type(exc) is not Exception:
                raise
            raise _engine_error(self.path, exc) from None

    def _read_meta(self, key: bytes) -> bytes | None:
        with self._told():
            found: bytes | None = self._meta.get(key)
        return found

    def _read_many(self, keys: list[bytes]) -> list[bytes | None]:
        try:
            found: list[bytes | None] = self._data.get(keys)
        except (AttributeError, self._rocks.DbClosedError):
            raise ClosedError(f"{self.path}: the store is closed") from None
        except Exception as exc:
            if type(exc) is not Exception:
                raise
            raise _engine_error(self.path, exc) from None
        return found

    def _write(self, changes: Changes, meta: dict[bytes, bytes]) -> None:
        if self._failed:
            raise ReadOnlyError(f"{self.path}: {self._failed}; RocksDB takes nothing more until it is opened again")
        if self._committer is not None:
            self._committer.check()
        batch = self._rocks.WriteBatch(raw_mode=True)
        batch.set_default_column_family(self._data_handle)
        put, delete = batch.put, batch.delete
        for key, record in changes.items():
            if record is None:
                delete(key)
            else:
                put(key, record)
        for key, value in meta.items():
            put(key, value, self._meta_handle)
        try:
            with self._told():
                self._db.write(batch, self._write_options)
        except OSError as exc:  # its log has a torn end now, which only opening it mends
            self._failed = f"an earlier write failed: {exc}"
            raise
        if self._committer is not None:
            self._committer.touch()

    def _sync_log(self) -> int:
        """Let everything applied so far survive a power cut."""
        try:
            self._db.flush_wal(True)
        except Exception as exc:  # noqa: BLE001 - the binding raises plain Exception
            raise _opening_error(self.path, exc) from None
        return 0

    def _iterate(self, prefix: bytes, limit: int) -> Generator[Rows]:
        reading = self._rocks.ReadOptions()
        if not prefix:
            reading.fill_cache(False)  # a full scan would push out what is read often
        end = after_prefix(prefix)
        if end is not None:
            reading.set_iterate_upper_bound(end)
        try:
            rows = self._data.iter(reading)
        except (AttributeError, self._rocks.DbClosedError):
            raise ClosedError(f"{self.path}: the store is closed") from None
        with self._told():
            rows.seek(prefix)
        while True:
            keys: list[bytes] = []
            records: list[bytes] = []
            with self._told():
                while len(keys) < limit and rows.valid():
                    keys.append(rows.key())
                    records.append(rows.value())
                    rows.next()
                if len(keys) < limit:
                    rows.status()
            if keys:
                yield keys, records
            if len(keys) < limit:
                return

    def _bytes(self) -> int:
        disk = disk_for(self.path)
        sizes = [found.size for name in disk.list(self.path) if (found := disk.stat(f"{self.path}/{name}"))]
        return sum(sizes)

    def _own(self) -> Lock:
        """Take the folder itself: RocksDB's own lock goes by its name, and in one process by nothing else."""
        disk = disk_for(self.path)
        with in_a_folder(self.path):
            disk.make_folder(self.path)
        try:
            return disk.own(self.path)
        except LockedError:
            raise LockedError(f"{self.path}: another process or handle has this store open") from None

    def _let_go(self) -> None:
        held, self._lock = self._lock, None
        if held is not None:
            held.release()

    def forked(self) -> None:
        """Refuse to work in the child of a fork; the engine and its folder stay the parent's."""
        super().forked()
        self._let_go()

    def _release(self) -> None:
        try:
            if self._committer is not None:
                try:
                    self._committer.wait()
                finally:
                    self._committer.close()
        finally:
            self._close_engine()

    def _close_engine(self) -> None:
        data, meta, db = self._data, self._meta, self._db
        # every handle keeps the engine open, and with it its lock
        del self._data, self._meta, self._db, self._data_handle, self._meta_handle
        try:
            for handle in (data, meta, db):
                _close_when_free(handle)
        except Exception as exc:  # noqa: BLE001 - the binding raises plain Exception: its folder was moved, say
            raise _opening_error(self.path, exc) from None
        else:
            if not self.read_only and not self._failed:
                try:
                    note_closed(disk_for(self.path), self.path)
                except OSError as exc:
                    logger.warning("%s: its end could not be noted, and will not be checked: %s", self.path, exc)
        finally:
            self._let_go()

    # --- Tuning: reasons in docs/howto/stores.md

    def _db_options(self) -> Any:
        options = self._rocks.Options(raw_mode=True)
        options.create_if_missing(not self.read_only)
        options.create_missing_column_families(not self.read_only)
        options.set_compression_type(self._rocks.DBCompressionType.lz4())  # also of the family nobody uses
        cores = min(os.cpu_count() or 1, 16)
        options.increase_parallelism(cores)
        options.set_max_subcompactions(max(1, cores // 2))
        options.set_max_total_wal_size(1 << 30)
        options.set_bytes_per_sync(1 << 20)
        options.set_wal_bytes_per_sync(1 << 20)
        return options

    def _table(self) -> Any:
        table = self._rocks.BlockBasedOptions()
        if self.options.cache_bytes:
            table.set_block_cache(self._cache())
        table.set_block_size(BLOCK_BYTES)
        table.set_bloom_filter(10.0, False)
        table.set_index_type(self._rocks.BlockBasedIndexType.two_level_index_search())
        table.set_partition_filters(True)
        table.set_metadata_block_size(4096)
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        table.set_pin_top_level_index_and_filter(True)
        return table

    def _cache(self) -> Any:
        cache = getattr(self, "_shared_cache", None)
        if cache is None:
            cache = self._shared_cache = self._rocks.Cache(self.options.cache_bytes)
        return cache

    def _family(self, memtable_bytes: int, memtables: int) -> Any:
        # lz4 and zstd on every family: slipstream's build reads nothing else, Snappy least of all.
        options = self._rocks.Options(raw_mode=True)
        options.set_compression_type(self._rocks.DBCompressionType.lz4())
        options.set_write_buffer_size(memtable_bytes)
        options.set_max_write_buffer_number(memtables)
        options.set_block_based_table_factory(self._table())
        return options

    def _data_options(self) -> Any:
        options = self._family(256 << 20, 4)
        options.set_bottommost_compression_type(self._rocks.DBCompressionType.zstd())
        # A running digest asks for the entry each key replaces, and while a fold hydrates there is none: a small
        # filter over the memtable answers that without a walk through its list.
        options.set_memtable_prefix_bloom_ratio(0.02)
        options.set_memtable_whole_key_filtering(True)
        return options

    def _meta_options(self) -> Any:
        return self._family(8 << 20, 2)


def _import() -> Any:
    try:
        import rocksdict
    except ImportError:
        raise UnsupportedError("the rocksdb store needs rocksdict: pip install 'penstock[stores]'") from None
    return rocksdict


def _close_when_free(handle: Any) -> None:
    """Close a handle of the engine; the binding refuses while another thread is reading through it."""
    deadline, waiting = time.monotonic() + CLOSE_SECONDS, Backoff()
    while True:
        try:
            handle.close()
            return
        except RuntimeError as exc:
            if "borrowed" not in str(exc) or time.monotonic() > deadline:
                raise
        waiting.pause()


def _engine_error(path: str, exc: Exception) -> Exception:
    """Return the error of our tree for what the engine said of its files while it was open.

    >>> _engine_error("fold", Exception("Corruption: block checksum mismatch: in fold/000009.sst offset 42 size 390"))
    CorruptionError('fold/000009.sst', 42, 'block checksum mismatch: in fold/000009.sst offset 42 size 390')
    """
    text = str(exc)
    if "Corruption" in text:
        found = IN_FILE.search(text)
        file, byte = (found["path"] or found["named"], int(found["byte"] or 0)) if found else (path, 0)
        return CorruptionError(file, byte, text.removeprefix("Corruption: "))
    if os.strerror(errno.ENOSPC) in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return OSError(f"{path}: {text}")


def _opening_error(path: str, exc: Exception, noticed: Sequence[Problem] = ()) -> Exception:
    """Return the error of our tree for what the engine said when it was opened; ``noticed`` is what was seen before.

    >>> _opening_error("fold", Exception("Corruption: block checksum mismatch: in fold/000009.sst offset 42 size 390"))
    CorruptionError('fold/000009.sst', 42, 'block checksum mismatch: in fold/000009.sst offset 42 size 390')
    """
    text = str(exc)
    if "Corruption" in text:
        for problem in noticed:
            return CorruptionError(problem.file, problem.byte, f"{problem.reason}; RocksDB says: {text}")
        return _engine_error(path, exc)
    if IN_USE.search(text):
        return LockedError(f"{path}: another process or handle has this store open")
    if "format_version" in text or "Not implemented" in text:
        return UnsupportedError(f"{path}: this build of RocksDB does not read it: {text}")
    return _engine_error(path, exc)
