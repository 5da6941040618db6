"""Exporting a store: stage beside the destination, verify by opening the copy, hash, name it.

What must stay true:

1. An artifact that has its name is whole: its manifest is written last, and the name comes in one rename.
2. The manifest's cursor is exactly what the files hold: the copy is opened and asked.
3. Whatever goes wrong leaves nothing behind but, after a crash, a hidden folder.
"""

from __future__ import annotations

import errno
import os
from typing import Final

import numpy as np

from penstock.artifact.manifest import MANIFEST_FILE, ArtifactFile, ExportManifest, encode_manifest
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Threads, disk_for, save_atomically
from penstock.disk.failpoint import fail_point
from penstock.disk.tree import check_vacant, put_in_place, regular_files, staged, sync_tree
from penstock.errors import CorruptionError, NotFoundError, OptionsError, UnsupportedError
from penstock.store import AppendLogStore, LmdbOptions, LmdbStore, RocksOptions, RocksStore, SnapshotStore, StoreReader
from penstock.store.logfile import replay
from penstock.types import VersionToken, WatchCursor

__all__ = ["export_store", "hash_file", "open_copy", "read_copy", "FOLD_FILE"]

FOLD_FILE: Final = "data/fold.snap"


def export_store(
    store: SnapshotStore, destination: str | os.PathLike[str], *, clock: Clock = SYSTEM_CLOCK
) -> ExportManifest:
    """Write an artifact of a store as the folder ``destination`` and return its manifest.

    The store may go on applying meanwhile: the artifact is exact at the cursor it names.  OptionsError when something
    is at the destination.

    >>> import tempfile
    >>> from penstock.types import KvUpdate, WatchCursor
    >>> folder = tempfile.TemporaryDirectory()
    >>> with AppendLogStore.open(folder.name + "/fold.snap") as store:
    ...     store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    ...     manifest = export_store(store, folder.name + "/artifact")
    >>> manifest.rank, [file.path for file in manifest.files]
    (1, ['data/fold.snap'])
    >>> folder.cleanup()
    """
    destination = os.fspath(destination)
    disk = disk_for(destination)
    check_vacant(destination)
    with staged(destination, "artifact") as stage:
        made = stage + "/artifact"
        count = store.count()
        try:
            cursor = store.write_data(made)
        except OSError as exc:  # an engine names the store, which may be on a device with room
            raise OSError(exc.errno or errno.EIO, exc.strerror or str(exc), destination) from exc
        fail_point("artifact.export.written")
        found, entries, files = _checked(store.backend, made)
        if found != cursor:
            raise CorruptionError(destination, 0, f"the copy is at {found.token!r}, the store at {cursor.token!r}")
        if store.cursor() == cursor and entries != count and store.count() == count:
            raise CorruptionError(destination, 0, f"the copy has {entries} entries, the store {count}")
        created = max(0, clock.now_ns() // 1_000_000_000)
        manifest = ExportManifest(store.backend, store.backend_version, cursor, created, files)
        sync_tree(made)
        save_atomically(disk, f"{made}/{MANIFEST_FILE}", encode_manifest(manifest))
        fail_point("artifact.export.staged")
        put_in_place(made, destination)
        fail_point("artifact.export.named")
    return manifest


def open_copy(backend: str, artifact: str) -> StoreReader:
    """Open the files of an artifact for reading, changing nothing that is declared."""
    if backend == AppendLogStore.backend:
        return AppendLogStore.open(f"{artifact}/{FOLD_FILE}", read_only=True)
    if backend == RocksStore.backend:
        return RocksStore.open(f"{artifact}/data", RocksOptions(cache_bytes=0), read_only=True)
    if backend == LmdbStore.backend:
        return LmdbStore.open(f"{artifact}/data", LmdbOptions(), read_only=True)
    raise UnsupportedError(f"{artifact}: a store of the backend {backend!r} is not read by this release")


def read_copy(backend: str, artifact: str) -> tuple[WatchCursor, int]:
    """Open the files of an artifact that is being made and belongs to nobody else; return its cursor and its count.

    An append log is indexed where it lies in the page cache: memory of its own would cost more than the rest of it.
    """
    if backend != AppendLogStore.backend:
        with open_copy(backend, artifact) as copy:
            return copy.cursor(), copy.count()
    path = f"{artifact}/{FOLD_FILE}"
    if not os.path.exists(path) or not os.path.getsize(path):
        raise NotFoundError(f"{path}: there is no store here")
    mapped = np.memmap(path, np.uint8, "r")  # it goes with the last who looks at it, also when that is an error
    state = replay(path, mapped, len(mapped))
    return WatchCursor(VersionToken(state.fold.cursor)), state.fold.count


def _checked(backend: str, made: str) -> tuple[WatchCursor, int, tuple[ArtifactFile, ...]]:
    """Open a copy, and hash its files: of an append log meanwhile, an engine may change its own when it opens them."""
    if backend != AppendLogStore.backend:
        cursor, entries = read_copy(backend, made)
        names = regular_files(made + "/data")
        return (
            cursor,
            entries,
            tuple(ArtifactFile(f"data/{name}", size, hash_file(f"{made}/data/{name}")) for name, size in names),
        )
    with Threads(1, "penstock-hash") as pool:
        found = regular_files(made + "/data")
        digests = [pool.submit(hash_file, f"{made}/data/{name}") for name, _ in found]
        cursor, entries = read_copy(backend, made)
        files = tuple(
            ArtifactFile(f"data/{name}", size, digest.result())
            for (name, size), digest in zip(found, digests, strict=True)
        )
    return cursor, entries, files


def hash_file(path: str) -> str:
    """Return the BLAKE3 of a file."""
    from blake3 import blake3

    return blake3().update_mmap(path).hexdigest()


def check_backend(manifest: ExportManifest, name: str) -> None:
    """Refuse an artifact of a backend or generation that is not read, by its name."""
    known = {kind.backend: kind.backend_version for kind in (AppendLogStore, RocksStore, LmdbStore)}
    if manifest.backend not in known:
        raise UnsupportedError(
            f"{name}: an artifact of the backend {manifest.backend!r}, where this release reads {', '.join(known)}"
        )
    # RocksDB says by itself which files it reads.
    if manifest.backend != RocksStore.backend and manifest.backend_version != known[manifest.backend]:
        raise UnsupportedError(
            f"{name}: {manifest.backend} of generation {manifest.backend_version!r}, where this release reads "
            f"{known[manifest.backend]!r}"
        )
    if manifest.backend == AppendLogStore.backend and [file.path for file in manifest.files] != [FOLD_FILE]:
        raise OptionsError(f"{name}: an append log is exported as {FOLD_FILE} and nothing else")
