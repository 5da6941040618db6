"""Which disk a path is on: the one place that knows.

A plain path is on the disk of this machine.  A URL names an object store; its paths are whole URLs, so that what is
joined to them stays one.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from penstock.disk.face import Disk, ReadDisk
from penstock.disk.folderstore import FolderStore
from penstock.disk.objects import ObjectDisk
from penstock.disk.objectstore import ObjectOptions, ObjectStore, make_store, shared_store, split_url
from penstock.disk.posix import PosixDisk
from penstock.errors import OptionsError, UnsupportedError

__all__ = ["is_url", "disk_for", "read_disk_for", "object_store_for"]

_POSIX: Final = PosixDisk()


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a place by URL.

    >>> is_url("s3://bucket/ticks"), is_url("data/ticks")
    (True, False)
    """
    scheme, mark, _ = os.fspath(path).partition("://")
    return bool(mark) and scheme.isascii() and scheme[:1].isalpha() and scheme.replace("+", "").isalnum()


def _check(path: str | os.PathLike[str]) -> None:
    if "\0" in os.fspath(path):
        raise OptionsError(f"{os.fspath(path)!r}: no path has a zero byte in it")


def disk_for(path: str | os.PathLike[str]) -> Disk:
    """Return the disk on which ``path`` can be written; UnsupportedError for a URL.

    >>> disk_for("data/ticks").stat("/nowhere/at/all") is None
    True
    """
    _check(path)
    if is_url(path):
        raise UnsupportedError(f"{os.fspath(path)}: only files of this machine can be written; ship or export to a URL")
    return _POSIX


def read_disk_for(path: str | os.PathLike[str]) -> ReadDisk:
    """Return the disk from which ``path`` can be read.

    >>> read_disk_for("data/ticks") is disk_for("data/ticks")
    True
    """
    _check(path)
    return _object_disk(split_url(os.fspath(path))[0], os.getpid()) if is_url(path) else _POSIX


@cache
def _object_disk(root: str, _process: int) -> ReadDisk:
    if root == "file://":
        return ObjectDisk(FolderStore("/"), "file://")
    return ObjectDisk(shared_store(root, os.getpid()), root)


def object_store_for(place: str | os.PathLike[str], options: ObjectOptions | None = None) -> ObjectStore:
    """Return the objects below a URL or a local folder, with the settings of the environment unless others are given.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     object_store_for(folder).put("a", b"hello")
    ...     object_store_for("file://" + folder).get("a")[0]
    b'hello'
    """
    place = os.fspath(place)
    if not is_url(place):
        return FolderStore(place)
    root, prefix = split_url(place)
    if root == "file://":
        return FolderStore("/" + prefix)
    store = make_store(place, options) if options is not None else shared_store(root, os.getpid())
    return store.below(prefix) if prefix else store
