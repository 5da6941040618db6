"""Which backend a path holds, and opening it."""

from __future__ import annotations

import os

from penstock.disk import PosixDisk, ReadDisk
from penstock.errors import OptionsError
from penstock.store.appendlog import AppendLogStore
from penstock.store.lightning import LmdbStore
from penstock.store.rocks import RocksStore

__all__ = ["detect_backend", "open_store"]


def detect_backend(path: str, disk: ReadDisk | None = None) -> str:
    """Return append-log, rocksdb or lmdb; OptionsError when nothing of the kind is there.

    >>> detect_backend("/nowhere")
    Traceback (most recent call last):
    penstock.errors.OptionsError: /nowhere: there is no store here
    """
    disk = disk or PosixDisk()
    found = disk.stat(path)
    if found is None:
        raise OptionsError(f"{path}: there is no store here")
    if not found.is_folder:
        return AppendLogStore.backend
    if disk.stat(path + "/data.mdb") is not None:
        return LmdbStore.backend
    if disk.stat(path + "/CURRENT") is not None:
        return RocksStore.backend
    raise OptionsError(f"{path}: a folder that is neither a RocksDB nor an LMDB store")


def open_store(path: str | os.PathLike[str], *, read_only: bool = True) -> AppendLogStore | RocksStore | LmdbStore:
    """Open an existing store, whatever its backend, for reading unless told otherwise.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> AppendLogStore.open(folder.name + "/fold.snap").close()
    >>> with open_store(folder.name + "/fold.snap") as store:
    ...     store.backend, store.count()
    ('append-log', 0)
    >>> folder.cleanup()
    """
    path = os.fspath(path)
    kinds = (AppendLogStore, RocksStore, LmdbStore)
    backend = detect_backend(path)
    kind = next(kind for kind in kinds if kind.backend == backend)
    return kind.open(path, read_only=read_only)
