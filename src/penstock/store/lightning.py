"""The store on LMDB: tables ``data`` and ``meta`` of one environment, one transaction an apply.

LMDB stands where the original has fjall, which Python cannot reach.  Its keys have 1 to 511 bytes; others are
refused by name.  The map is address space, not memory: it doubles by itself when it is full.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Generator, Iterator
from itertools import islice, takewhile
from typing import Any, Final, Self

from penstock.disk import Lock, disk_for
from penstock.disk.cut import CutWatch
from penstock.disk.doors import in_a_folder, refuse_foreign
from penstock.disk.posix import check_plain
from penstock.errors import Backpressure, CorruptionError, LockedError, NotFoundError, OptionsError, UnsupportedError
from penstock.options import options_from, shows_options
from penstock.store.engine import Changes, EngineStore, Rows
from penstock.store.lmdbpages import TRANSACTION_AT, check_pages, page_size
from penstock.store.options import LmdbOptions
from penstock.types import WatchCursor

__all__ = ["LmdbStore"]

KEY_MAX: Final = 511
GROW_SECONDS: Final = 5.0
LOOKS: Final = 1000
STAND_IN: Final = struct.pack("<QHHHH", 8 << 32, 0, 3, 20, 4096)  # page number, padding, flags, lower, upper
"""How a page begins that stands in for one that was cut away: a branch and a leaf at once, with two nodes.  Both are
its own first bytes: an empty key, without a value as a leaf, and in a branch with a page number that no store has.
LMDB ends the process by an assertion where a page is of neither kind, or a branch with fewer nodes; of this one it
makes an empty entry, or says that a page is missing, and the watch says why."""


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
        self._lock: Lock | None = None
        self._file: Lock | None = None
        self._watches: list[CutWatch] = []
        disk = disk_for(path)
        there = disk.stat(path + "/data.mdb")
        if read_only and there is None:
            raise NotFoundError(f"{path}: there is no store here")
        if not read_only:
            refuse_foreign(disk, path, "LMDB store")
            with in_a_folder(path):
                disk.make_folder(path)
            try:
                self._lock = disk.lock(path + "/penstock-lock", of=path)
                if there is not None:
                    self._file = disk.own(path + "/data.mdb")
            except LockedError:
                self._let_go()
                raise LockedError(f"{path}: another process or handle has this store open") from None
        try:
            self._open(max(options.map_bytes, 0 if there is None else there.size * 2))
            if not read_only and self._file is None:
                self._file = disk.own(path + "/data.mdb")
        except BaseException:
            self._let_go()
            raise

    def _open(self, map_bytes: int) -> None:
        check_plain(self.path)
        page_size(disk_for(self.path), self.path + "/data.mdb")
        try:
            self._env = self._lmdb.open(
                self.path,
                map_size=map_bytes,
                max_dbs=2,
                max_spare_txns=4,
                subdir=True,
                readonly=self.read_only,
                create=not self.read_only,
                mode=0o600,
                sync=self.options.sync == "always",
                metasync=self.options.sync == "always",
            )
        except self._lmdb.LockError as exc:
            raise LockedError(f"{self.path}: {exc}") from None
        except (self._lmdb.InvalidError, self._lmdb.CorruptedError, self._lmdb.VersionMismatchError) as exc:
            raise CorruptionError(self.path + "/data.mdb", 0, str(exc)) from None
        except self._lmdb.Error as exc:
            if "already open" in str(exc):
                raise LockedError(f"{self.path}: this process has it open under another name") from None
            raise self._named(exc) from None
        try:
            self._watches = [CutWatch(f"{self.path}/data.mdb", STAND_IN), CutWatch(f"{self.path}/lock.mdb")]
            self._check_pages()
            self._check_ours()
            self._data = self._env.open_db(b"data", create=not self.read_only)
            self._meta = self._env.open_db(b"meta", create=not self.read_only)
            self._begin()
        except self._lmdb.Error as exc:
            self._end()
            raise CorruptionError(self.path + "/data.mdb", 0, str(exc)) from None
        except BaseException:
            self._end()
            raise

    def _check_pages(self) -> None:
        """Look at every page before the engine follows one; a writer beside us may be faster with a meta page."""
        for _ in range(LOOKS):
            with self._env.begin() as txn:
                if check_pages(disk_for(self.path), self.path + "/data.mdb", txn.id()):
                    return
        reason = "its meta pages are not those of two transactions in a row, so the last one may be lost"
        raise CorruptionError(self.path + "/data.mdb", TRANSACTION_AT, reason)

    def _check_ours(self) -> None:
        """Refuse the environment of another program: what is in it is not ours to add to, or to call damaged."""
        with self._env.begin() as txn:
            if txn.stat()["entries"] and txn.get(b"data") is None and txn.get(b"meta") is None:
                raise OptionsError(f"{self.path}: an LMDB environment that is no store: it has no table 'data'")

    def _end(self) -> None:
        """Let go of the engine, which still looks at its files when it is closed."""
        self._env.close()
        for watch in self._watches:
            watch.close()
        self._watches = []

    def _check_cut(self) -> None:
        """Raise if a file was cut under the engine: what it read since may be zeros."""
        for watch in self._watches:
            watch.check()

    def _named(self, exc: Any) -> Exception:
        """Return the error of our tree for what the engine said: an error of the system, or damage."""
        code = getattr(exc, "code", 0) or next(
            (code for code in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ENOMEM, errno.EROFS, errno.EACCES)
             if os.strerror(code) in str(exc)), 0
        )  # fmt: skip
        if code > 0:
            return OSError(code, f"{os.strerror(code)} ({exc})", self.path)
        return CorruptionError(self.path + "/data.mdb", 0, str(exc))

    @classmethod
    @shows_options(LmdbOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: LmdbOptions | None = None,
        *,
        read_only: bool = False,
        **given: Any,
    ) -> Self:
        """Open or create the store in this folder; ``read_only`` takes no lock of ours and changes nothing.

        Options as keywords or as one object; LmdbOptions says what each means.
        """
        return cls(os.fspath(path), options_from(LmdbOptions, options, given), read_only=read_only)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[WatchCursor, Self]:
        """Open with the defaults and return where to resume, and the store."""
        store = cls.open(path)
        return store.cursor(), store

    def settle(self) -> None:
        """Sync."""
        with self._writing:
            self._check()
            self._check_cut()
            self._env.sync(True)

    def write_data(self, folder: str) -> WatchCursor:
        """Write a compacted copy of the environment as ``folder``/data."""
        disk = disk_for(folder)
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
        self._check_cut()
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
                    self._check_cut()  # or nothing of it is kept
                return
            except self._lmdb.MapFullError:
                self._grow()  # the transaction was taken back: begin again in a larger map
            except self._lmdb.Error as exc:
                self._check_cut()
                raise self._named(exc) from None

    def _grow(self) -> None:
        """Double the map, which LMDB allows only while nobody reads."""
        with self._idle:
            if not self._idle.wait_for(lambda: not self._reads, GROW_SECONDS):
                raise Backpressure(f"{self.path}: the map is full and cannot grow while a scan is open")
            self._env.set_mapsize(self._env.info()["map_size"] * 2)
            for watch in self._watches:
                watch.look()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._idle:
            self._check()
            self._check_cut()
            self._reads += 1
        try:
            yield
            self._check_cut()
        except self._lmdb.Error as exc:
            self._check_cut()
            raise self._named(exc) from None
        finally:
            with self._idle:
                self._reads -= 1
                self._idle.notify_all()

    def _iterate(self, prefix: bytes, limit: int) -> Generator[Rows]:
        with self._reading(), self._env.begin(self._data) as txn, txn.cursor() as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            rows = takewhile(lambda row: row[0].startswith(prefix), cursor.iternext())
            while part := list(islice(rows, limit)):
                self._check_cut()
                yield [key for key, _ in part], [record for _, record in part]

    def _bytes(self) -> int:
        found = disk_for(self.path).stat(self.path + "/data.mdb")
        return 0 if found is None else found.size

    def forked(self) -> None:
        """Refuse to work in the child of a fork; the engine and its folder stay the parent's."""
        super().forked()
        self._let_go()

    def _let_go(self) -> None:
        locks, self._lock, self._file = (self._lock, self._file), None, None
        for held in locks:
            if held is not None:
                held.release()

    def _release(self) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: not self._reads, GROW_SECONDS):
                self._closed = False
                raise Backpressure(f"{self.path}: a scan is still open")
        self._end()
        self._let_go()


def _import() -> Any:
    try:
        import lmdb
    except ImportError:
        raise UnsupportedError("the lmdb store needs lmdb: pip install 'penstock[stores]'") from None
    return lmdb
