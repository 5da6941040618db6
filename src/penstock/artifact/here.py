"""An artifact or a fold, wherever it is, as files of this machine for as long as they are looked at.

What is here is taken as it is.  What is published is downloaded and every byte of it hashed; a folder of objects that
someone copied up is copied down.  A fold that is an artifact is imported first, with all that is checked then.
"""

from __future__ import annotations

import contextlib
import enum
import os
import tempfile
from collections.abc import Iterator

from penstock.artifact.imports import import_artifact
from penstock.artifact.manifest import MANIFEST_FILE
from penstock.artifact.transport import Progress, transport_for
from penstock.disk import ObjectStore, disk_for, is_url, object_store_for, read_disk_for
from penstock.disk.plain import make_folders
from penstock.disk.tree import free_bytes
from penstock.errors import NotFoundError, OptionsError, UnsupportedError
from penstock.store import AppendLogStore, LmdbStore, RocksStore, detect_backend, open_store

__all__ = ["artifact_here", "fold_here", "open_fold", "split_artifact"]

Store = AppendLogStore | RocksStore | LmdbStore


def _no_progress(_size: int) -> None:
    pass


def split_artifact(url: str) -> tuple[str, str]:
    """Return the place below which an artifact is published, and its key.

    >>> split_artifact("s3://bucket/folds/routes"), split_artifact("routes")
    (('s3://bucket/folds', 'routes'), ('.', 'routes'))
    """
    place, slash, key = url.rstrip("/").rpartition("/")
    if not key or (slash and not place) or place.endswith(":/"):
        raise OptionsError(f"{url}: the last part of the URL is the name of the artifact, below a bucket or folder")
    return place or ".", key


class _Kind(enum.Enum):
    FILES = enum.auto()
    """A store, or whatever else is there under exactly this name."""
    FOLDER = enum.auto()
    """The folder of an artifact."""
    PUBLISHED = enum.auto()
    """A pointer of an artifact with this name."""
    NOTHING = enum.auto()


def _kind_of(place: str) -> _Kind:
    """Say what is at a place; what has exactly this name comes before what is published under it."""
    disk = read_disk_for(place)
    if disk.stat(f"{place}/{MANIFEST_FILE}") is not None:
        return _Kind.FOLDER
    if disk.stat(place) is not None:
        return _Kind.FILES
    try:
        above, key = split_artifact(place)
    except OptionsError:
        return _Kind.NOTHING
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        transport_for(above).manifest(key)
        return _Kind.PUBLISHED
    return _Kind.NOTHING


@contextlib.contextmanager
def artifact_here(place: str, progress: Progress = _no_progress) -> Iterator[str]:
    """Yield the folder of an artifact on this machine: its own, or a copy that is gone afterwards.

    >>> with artifact_here("/nowhere/routes") as folder:
    ...     pass
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/routes: no artifact is published here
    """
    place = place.rstrip("/")
    if not is_url(place) and os.path.lexists(place):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="penstock-artifact-") as folder:
        made = folder + "/artifact"
        above, key = split_artifact(place)
        if is_url(place) and read_disk_for(place).stat(f"{place}/{MANIFEST_FILE}") is not None:
            _fetch_tree(place, made, progress)
        else:
            try:
                transport_for(above).download(key, made, progress, sync=False)
            except FileNotFoundError:
                raise NotFoundError(f"{place}: no artifact is published here") from None
        yield made


@contextlib.contextmanager
def fold_here(place: str, progress: Progress = _no_progress) -> Iterator[str]:
    """Yield the path of a store on this machine: its own, or a copy that is gone afterwards.

    ``place`` is a store or an artifact, here or by URL.

    >>> with fold_here("routes.snap") as path:
    ...     path
    'routes.snap'
    """
    place = place.rstrip("/")
    kind = _kind_of(place)
    if not is_url(place) and kind in (_Kind.FILES, _Kind.NOTHING):
        yield place
        return
    if kind is _Kind.NOTHING:
        raise NotFoundError(f"{place}: there is no store here")
    with tempfile.TemporaryDirectory(prefix="penstock-fold-") as folder:
        store = f"{folder}/{place.rpartition('/')[2]}"
        if kind is _Kind.FILES:
            _fetch_tree(place, store, progress)
        else:
            with artifact_here(place, progress) as found:
                import_artifact(found, store)
        yield store


@contextlib.contextmanager
def open_fold(place: str, progress: Progress = _no_progress) -> Iterator[Store]:
    """Open a store or an artifact for reading, here or by URL; an append log is read where it is.

    >>> with open_fold("/nowhere/routes.snap") as store:
    ...     pass
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/routes.snap: there is no store here
    """
    if is_url(place) and _kind_of(place.rstrip("/")) is _Kind.FILES and detect_backend(place) == AppendLogStore.backend:
        with open_store(place) as store:
            yield store
        return
    with fold_here(place, progress) as path, open_store(path) as store:
        yield store


def _fetch_tree(place: str, target: str, progress: Progress) -> None:
    """Copy an object, or everything below a folder of objects."""
    above, _, name = place.rpartition("/")
    try:
        store = object_store_for(above)
        alone = store.head(name)
    except OptionsError:  # the root of a bucket
        raise NotFoundError(f"{place}: there is no store here") from None
    found = [alone] if alone is not None else list(store.objects(name))
    if not found:
        raise NotFoundError(f"{place}: there is no store here")
    size, folder = sum(info.size for info in found), os.path.dirname(target)
    if size > free_bytes(folder):
        raise OptionsError(f"{place}: {size} bytes, and only {free_bytes(folder)} are free in {folder}")
    for info in found:
        below = info.key.removeprefix(name).strip("/")
        parts = below.split("/") if below else []
        if any(part in ("", ".", "..") for part in parts):
            if info.size == 0:
                continue  # some tools leave an empty object for a folder
            raise UnsupportedError(f"{place}: the object {info.key!r} has a name that no file can have")
        _fetch_file(store, info.key, "/".join([target, *parts]), progress)


def _fetch_file(store: ObjectStore, key: str, path: str, progress: Progress) -> None:
    make_folders(os.path.dirname(path))
    with disk_for(path).create(path) as file:
        at = 0
        for piece in store.stream(key):
            data = memoryview(piece)
            file.write_at(at, data)
            at += len(data)
            progress(len(data))
