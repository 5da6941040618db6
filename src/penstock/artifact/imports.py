"""Importing an artifact: stage a copy beside the destination, hash every byte, open it, compare the cursor, name it.

Nothing is trusted that came with the artifact but its manifest, and that only together with what was found.  A bad
artifact never becomes a store.
"""

from __future__ import annotations

import os

from penstock.artifact.export import FOLD_FILE, check_backend, read_copy
from penstock.artifact.manifest import MANIFEST_FILE, MANIFEST_MAX_BYTES, ExportManifest, decode_manifest
from penstock.disk import Threads, disk_for, read_disk_for
from penstock.disk.failpoint import fail_point
from penstock.disk.plain import make_folders
from penstock.disk.tree import check_vacant, put_in_place, regular_files, remove_tree, staged, sync_tree
from penstock.errors import CorruptionError, PenstockError, UnsupportedError
from penstock.store import AppendLogStore
from penstock.store.records import token_json
from penstock.types import Problem

__all__ = ["import_artifact", "read_manifest", "verify_artifact"]

COPY_BYTES = 1 << 20
MARK = ".penstock-mark"
UNREAD = "unsupported format_version"
"""What RocksDB says of tables that are newer than it is."""


def read_manifest(artifact: str | os.PathLike[str]) -> ExportManifest:
    """Return the manifest of an artifact in a folder.

    >>> read_manifest("/nowhere")
    Traceback (most recent call last):
    penstock.errors.CorruptionError: /nowhere/MANIFEST.json at byte 0: there is no manifest, so this is no artifact
    """
    return decode_manifest(*_manifest_bytes(os.fspath(artifact)))


def _manifest_bytes(artifact: str) -> tuple[bytes, str]:
    path = f"{artifact}/{MANIFEST_FILE}"
    try:
        with read_disk_for(artifact).open(path) as file:
            data = file.read_at(0, MANIFEST_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptionError(path, 0, "there is no manifest, so this is no artifact") from None
    if len(data) > MANIFEST_MAX_BYTES:
        raise CorruptionError(path, MANIFEST_MAX_BYTES, "longer than a manifest may be")
    return data, path


def import_artifact(
    artifact: str | os.PathLike[str], destination: str | os.PathLike[str], *, take: bool = False
) -> ExportManifest:
    """Make a store of an artifact: a file for an append log, a folder for an engine; return the manifest.

    With ``take`` the files of the artifact become the store instead of being copied, and the artifact is used up: for
    one that was just downloaded, beside the destination, by this process.  They are hashed all the same.

    Open it afterwards as any store: its cursor is the manifest's.  CorruptionError for an artifact that is not what its
    manifest says, UnsupportedError for one this release does not read, OptionsError when something is at the
    destination; then nothing is there afterwards that was not before.

    >>> import tempfile
    >>> from penstock.artifact import export_store
    >>> from penstock.types import KvUpdate, WatchCursor
    >>> folder = tempfile.TemporaryDirectory()
    >>> with AppendLogStore.open(folder.name + "/fold.snap") as store:
    ...     store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    ...     manifest = export_store(store, folder.name + "/artifact")
    >>> import_artifact(folder.name + "/artifact", folder.name + "/other.snap") == manifest
    True
    >>> with AppendLogStore.open(folder.name + "/other.snap") as store:
    ...     store.get("a").value, store.cursor().token.as_int()
    (b'1', 1)
    >>> folder.cleanup()
    """
    artifact, destination = os.fspath(artifact), os.fspath(destination)
    manifest = read_manifest(artifact)
    check_backend(manifest, artifact)
    check_vacant(destination)
    _check_names(artifact, manifest)
    with staged(destination, "import") as stage:
        if take and manifest.backend == AppendLogStore.backend:
            _check_taken(artifact, manifest)
            os.rename(f"{artifact}/data", f"{stage}/data")
            fail_point("artifact.import.copied")
        else:
            for file in manifest.files:
                _copy(artifact, None if take else stage, file.path, file.size, file.blake3)
            if take:
                os.rename(f"{artifact}/data", f"{stage}/data")
            fail_point("artifact.import.copied")
            _check_cursor(stage, manifest, artifact)
        sync_tree(stage)
        made = f"{stage}/{FOLD_FILE}" if manifest.backend == AppendLogStore.backend else f"{stage}/data"
        fail_point("artifact.import.checked")
        remove_tree(destination + MARK)  # of a store that was removed: it says how far that one was synced
        put_in_place(made, destination)
        fail_point("artifact.import.named")
    return manifest


def verify_artifact(artifact: str | os.PathLike[str]) -> list[Problem]:
    """Return every problem of an artifact; importing it would be refused for any of them.

    >>> [problem.reason for problem in verify_artifact("/nowhere")]
    ['there is no manifest, so this is no artifact']
    """
    artifact = os.fspath(artifact)
    try:
        manifest = read_manifest(artifact)
        check_backend(manifest, artifact)
    except PenstockError as exc:
        return [_problem(artifact, exc)]
    problems: list[Problem] = []
    try:
        _check_names(artifact, manifest)
    except PenstockError as exc:
        problems.append(_problem(artifact, exc))
    for file in manifest.files:
        try:
            _copy(artifact, None, file.path, file.size, file.blake3)
        except (PenstockError, OSError) as exc:
            problems.append(_problem(artifact, exc))
    if not problems:
        with staged(artifact, "verify") as stage:  # an engine may write beside what it opens
            try:
                for file in manifest.files:
                    _copy(artifact, stage, file.path, file.size, file.blake3)
                _check_cursor(stage, manifest, artifact)
            except PenstockError as exc:
                problems.append(_problem(artifact, exc))
    return problems


def _problem(artifact: str, exc: Exception) -> Problem:
    if isinstance(exc, CorruptionError):
        return Problem(exc.file, exc.byte, exc.reason)
    return Problem(f"{artifact}/{MANIFEST_FILE}", 0, str(exc))


def _check_names(artifact: str, manifest: ExportManifest) -> None:
    declared = {file.path for file in manifest.files}
    if not os.path.isdir(f"{artifact}/data"):
        raise CorruptionError(f"{artifact}/data", 0, "there is no payload")
    for name, _ in regular_files(f"{artifact}/data"):
        if f"data/{name}" not in declared:
            raise CorruptionError(f"{artifact}/data/{name}", 0, "not declared in the manifest")


def _copy(artifact: str, stage: str | None, path: str, size: int, wanted: str) -> None:
    """Copy one file while hashing it; it must be what the manifest says."""
    from blake3 import blake3

    disk, source, hasher = disk_for(artifact), f"{artifact}/{path}", blake3()
    try:
        file = disk.open(source)
    except FileNotFoundError:
        raise CorruptionError(source, 0, "missing, though the manifest declares it") from None
    target = None
    try:
        found = file.stat().size
        if found != size:
            raise CorruptionError(source, min(found, size), f"{found} bytes, where the manifest says {size}")
        if stage is not None:
            make_folders(os.path.dirname(f"{stage}/{path}"))
            target = disk.create(f"{stage}/{path}")
        at = 0
        while data := file.read_at(at, COPY_BYTES):
            hasher.update(data)
            if target is not None:
                target.write_at(at, data)
            at += len(data)
        if at != size or hasher.hexdigest() != wanted:
            raise CorruptionError(source, 0, f"its BLAKE3 is {hasher.hexdigest()}, where the manifest says {wanted}")
    finally:
        file.close()
        if target is not None:
            target.close()


def _check_taken(artifact: str, manifest: ExportManifest) -> None:
    """Hash an append log where it lies and open it meanwhile: reading it changes nothing, as an engine might."""
    with Threads(1, "penstock-import") as pool:
        opened = pool.submit(_check_cursor, artifact, manifest, artifact)
        for file in manifest.files:
            _copy(artifact, None, file.path, file.size, file.blake3)
        opened.result()


def _check_cursor(stage: str, manifest: ExportManifest, artifact: str) -> None:
    try:
        found, _ = read_copy(manifest.backend, stage)
    except CorruptionError as exc:  # of the copy, which is gone when this is read
        file, reason = exc.file.replace(stage, artifact), exc.reason.replace(stage, artifact)
        if UNREAD in reason:  # and not damaged: every byte of it was hashed
            raise UnsupportedError(f"{file}: this build of RocksDB does not read it: {reason}") from None
        raise CorruptionError(file, exc.byte, reason) from None
    if found != manifest.cursor:
        at, said = (token_json(cursor.token.raw) for cursor in (found, manifest.cursor))
        raise CorruptionError(f"{artifact}/{MANIFEST_FILE}", 0, f"the files are at {at}, the manifest says {said}")
