"""Which backend a path holds, and opening it."""

from __future__ import annotations

import os

from penstock.disk import ReadDisk, is_url, read_disk_for
from penstock.errors import NotFoundError, OptionsError, UnsupportedError
from penstock.store.appendlog import AppendLogStore
from penstock.store.lightning import LmdbStore
from penstock.store.rocks import RocksStore

__all__ = ["detect_backend", "open_store"]


def detect_backend(path: str, disk: ReadDisk | None = None) -> str:
    """Return append-log, rocksdb or lmdb; OptionsError when nothing of the kind is there.

    >>> detect_backend("/nowhere")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere: there is no store here
    """
    disk = disk or read_disk_for(path)
    found = disk.stat(path)
    if found is None:
        raise NotFoundError(f"{path}: there is no store here")
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
    if is_url(path) and backend != AppendLogStore.backend:
        raise UnsupportedError(f"{path}: a {backend} store is not read by URL; publish it as an artifact and pull that")
    kind = next(kind for kind in kinds if kind.backend == backend)
    return kind.open(path, read_only=read_only)
