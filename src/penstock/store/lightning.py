"""The store on LMDB: tables ``data`` and ``meta`` of one environment, one transaction an apply.

LMDB stands where the original has fjall, which Python cannot reach.  Its keys have 1 to 511 bytes; others are
refused by name.  The map is address space, not memory: it doubles by itself when it is full.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any, Final, Self

from penstock.disk import PosixDisk
from penstock.errors import Backpressure, CorruptionError, LockedError, OptionsError, UnsupportedError
from penstock.store.engine import Changes, EngineStore
from penstock.store.options import LmdbOptions
from penstock.types import WatchCursor

__all__ = ["LmdbStore"]

KEY_MAX: Final = 511
GROW_SECONDS: Final = 5.0


class LmdbStore(EngineStore):
    """A fold in an LMDB folder: the fastest to read, shared by page cache.

    >>> import tempfile
    >>> from penstock.types import KvUpdate
    >>> folder = tempfile.TemporaryDirectory()
    >>> with LmdbStore.open(folder.name + "/fold") as store:
    ...     store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    ...     store.get("a").value, store.count()
    (b'1', 1)
    >>> folder.cleanup()
    """

    backend = "lmdb"
    backend_version = "1"

    def __init__(self, path: str, options: LmdbOptions, *, read_only: bool) -> None:
        super().__init__(path, read_only=read_only, running_digest=options.running_digest)
        self._lmdb = _import()
        self.options = options
        self._reads = 0
        self._idle = threading.Condition()
        self._lock: Any = None
        disk = PosixDisk()
        there = disk.stat(path + "/data.mdb")
        if read_only and there is None:
            raise OptionsError(f"{path}: there is no store here")
        if not read_only:
            disk.make_folder(path)
            try:
                self._lock = disk.lock(path + "/penstock-lock")
            except LockedError:
                raise LockedError(f"{path}: another process or handle has this store open") from None
        try:
            self._open(max(options.map_bytes, 0 if there is None else there.size * 2))
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    def _open(self, map_bytes: int) -> None:
        try:
            self._env = self._lmdb.open(
                self.path,
                map_size=map_bytes,
                max_dbs=2,
                max_spare_txns=4,
                subdir=True,
                readonly=self.read_only,
                create=not self.read_only,
                sync=self.options.sync,
                metasync=self.options.sync,
            )
        except self._lmdb.LockError as exc:
            raise LockedError(f"{self.path}: {exc}") from None
        except (self._lmdb.InvalidError, self._lmdb.CorruptedError, self._lmdb.VersionMismatchError) as exc:
            raise CorruptionError(self.path + "/data.mdb", 0, str(exc)) from None
        try:
            self._data = self._env.open_db(b"data", create=not self.read_only)
            self._meta = self._env.open_db(b"meta", create=not self.read_only)
            self._begin()
        except self._lmdb.Error as exc:
            self._env.close()
            raise CorruptionError(self.path + "/data.mdb", 0, str(exc)) from None
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], options: LmdbOptions | None = None, *, read_only: bool = False) -> Self:
        """Open or create the store in this folder; ``read_only`` takes no lock of ours and changes nothing."""
        return cls(os.fspath(path), options or LmdbOptions(), read_only=read_only)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[WatchCursor, Self]:
        """Open with the defaults and return where to resume, and the store."""
        store = cls.open(path)
        return store.cursor(), store

    def settle(self) -> None:
        """Sync."""
        with self._writing:
            self._check()
            self._env.sync(True)

    def write_data(self, folder: str) -> WatchCursor:
        """Write a compacted copy of the environment as ``folder``/data."""
        disk = PosixDisk()
        with self._writing:
            self._check()
            disk.make_folder(folder)
            disk.make_folder(folder + "/data")
            with self._reading():
                self._env.copy(folder + "/data", compact=True)
            return WatchCursor(self._token)

    # --- The engine

    def _check_keys(self, keys: list[bytes]) -> None:
        lengths = list(map(len, keys))
        if lengths and not 1 <= min(lengths) <= max(lengths) <= KEY_MAX:
            index = next(index for index, length in enumerate(lengths) if not 1 <= length <= KEY_MAX)
            raise OptionsError(
                f"{self.path}: update {index} has a key of {lengths[index]} bytes, where LMDB takes 1 to {KEY_MAX}"
            )

    def _read_meta(self, key: bytes) -> bytes | None:
        with self._reading(), self._env.begin(self._meta) as txn:
            found: bytes | None = txn.get(key)
            return found

    def _read_many(self, keys: list[bytes]) -> list[bytes | None]:
        with self._reading(), self._env.begin(self._data) as txn:
            get = txn.get
            return [get(key) if 0 < len(key) <= KEY_MAX else None for key in keys]

    def _write(self, changes: Changes, meta: dict[bytes, bytes]) -> None:
        puts = [(key, record) for key, record in changes.items() if record is not None]
        gone = [key for key, record in changes.items() if record is None] if len(puts) < len(changes) else []
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    with txn.cursor(self._data) as cursor:
                        cursor.putmulti(puts)
                    for key in gone:
                        txn.delete(key, db=self._data)
                    for key, value in meta.items():
                        txn.put(key, value, db=self._meta)
                return
            except self._lmdb.MapFullError:
                self._grow()  # the transaction was taken back: begin again in a larger map

    def _grow(self) -> None:
        """Double the map, which LMDB allows only while nobody reads."""
        with self._idle:
            if not self._idle.wait_for(lambda: not self._reads, GROW_SECONDS):
                raise Backpressure(f"{self.path}: the map is full and cannot grow while a scan is open")
            self._env.set_mapsize(self._env.info()["map_size"] * 2)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._idle:
            self._check()
            self._reads += 1
        try:
            yield
        finally:
            with self._idle:
                self._reads -= 1
                self._idle.notify_all()

    def _iterate(self, prefix: bytes, limit: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        with self._reading(), self._env.begin(self._data) as txn, txn.cursor() as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            rows = takewhile(lambda row: row[0].startswith(prefix), cursor.iternext())
            while part := list(islice(rows, limit)):
                yield [key for key, _ in part], [record for _, record in part]

    def _bytes(self) -> int:
        found = PosixDisk().stat(self.path + "/data.mdb")
        return 0 if found is None else found.size

    def _release(self) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: not self._reads, GROW_SECONDS):
                self._closed = False
                raise Backpressure(f"{self.path}: a scan is still open")
        self._env.close()
        if self._lock is not None:
            self._lock.release()


def _import() -> Any:
    try:
        import lmdb
    except ImportError:
        raise UnsupportedError("the lmdb store needs lmdb: pip install 'penstock[stores]'") from None
    return lmdb
