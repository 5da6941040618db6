"""Artifacts on an object store: payloads that never change, and one pointer that only goes forward.

What must stay true:

1. A payload is up before the pointer names it, and is named after the manifest's bytes: two artifacts never share one.
2. The pointer moves by a conditional put, and never to an older artifact (``pointer_publish_allowed``).
3. What is pruned is strictly older than the pointer (``payload_prunable``), so nothing that can still be published
   goes, and the target of the pointer is always there.

A store that cannot compare and swap, or does not do so when it is asked to, is refused, unless the caller takes the
risk by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable
from typing import Final, Literal, cast

import msgspec

from penstock.artifact.imports import _manifest_bytes
from penstock.artifact.keys import ArtifactNames, rank_in_name
from penstock.artifact.manifest import (
    HEX,
    MANIFEST_MAX_BYTES,
    SCHEMA_VERSION,
    ExportManifest,
    decode_manifest,
    payload_name,
    rank_of,
)
from penstock.artifact.tar import pack, unpack
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import ObjectOptions, ObjectStore, is_url, object_store_for
from penstock.disk.failpoint import fail_point
from penstock.disk.objectstore import ObjectInfo, check_conditions, publish, split_url
from penstock.disk.tree import check_vacant, put_in_place, staged, sync_tree
from penstock.errors import ConflictError, CorruptionError, OptionsError, RetryError, UnsupportedError
from penstock.fold.guards import payload_prunable, pointer_publish_allowed
from penstock.types import VersionToken, WatchCursor

__all__ = ["Outcome", "Transport", "transport_for"]

_log = logging.getLogger("penstock.artifact")

SWAPS: Final = 8
"""How often the pointer is tried before giving up: others publish at the same time."""
NAME: Final = re.compile(r"[^/]+")
Progress = Callable[[int], None]


class Outcome(msgspec.Struct, frozen=True):
    """What became of an upload.  Of a superseded one the payload is up and nobody will ask for it.

    >>> Outcome("published").remote_cursor is None
    True
    """

    result: Literal["published", "superseded"]
    remote_cursor: WatchCursor | None = None
    """When superseded: where the newer artifact is."""


class Transport:
    """Artifacts below a prefix of an object store, by key.  Synchronous; any thread may call it.

    >>> import tempfile
    >>> from obstore.store import MemoryStore
    >>> from penstock.artifact import export_store, import_artifact
    >>> from penstock.disk.objectstore import Obstore
    >>> from penstock.store import AppendLogStore
    >>> from penstock.types import KvUpdate
    >>> folder = tempfile.TemporaryDirectory()
    >>> with AppendLogStore.open(folder.name + "/fold.snap") as store:
    ...     store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    ...     manifest = export_store(store, folder.name + "/artifact")
    >>> transport = Transport(Obstore(MemoryStore(), "memory://"), "folds")
    >>> transport.upload(folder.name + "/artifact", "routes").result
    'published'
    >>> transport.download("routes", folder.name + "/copy") == manifest
    True
    >>> folder.cleanup()
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        allow_non_atomic_pointer: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.store, self.prefix = store, prefix
        self._non_atomic, self._clock = allow_non_atomic_pointer, clock
        self._keeps_conditions = False

    # --- Up

    def upload(self, artifact: str | os.PathLike[str], key: str, progress: Progress = lambda _: None) -> Outcome:
        """Send an artifact up and publish it, unless a newer one is published already.

        RetryError when others kept on publishing at the same time; the payload is up then, and trying again is cheap.
        """
        artifact = os.fspath(artifact)
        data, path = _manifest_bytes(artifact)
        manifest = decode_manifest(data, path)
        place = self._place(key)
        name = place.payload(payload_name(data, manifest.rank))
        self._check_conditions(place)
        fail_point("artifact.upload.before")
        self.store.put(name, pack(artifact, manifest, data, progress))
        fail_point("artifact.upload.payload")
        outcome = self._publish(place, data, manifest)
        fail_point("artifact.upload.published")
        return outcome

    def _check_conditions(self, place: ArtifactNames) -> None:
        """Refuse a store that ignores conditions, before anything goes up to it."""
        if self._non_atomic or self._keeps_conditions:
            return
        try:
            check_conditions(self.store, f"{place.pointer}.probe-{uuid.uuid4().hex}")
        except UnsupportedError as exc:
            raise self._not_atomic(place, exc) from None
        self._keeps_conditions = True

    def _not_atomic(self, place: ArtifactNames, exc: UnsupportedError) -> UnsupportedError:
        return UnsupportedError(
            f"{self.store.url}: this store has no conditional put, so publishers of {place.key!r} could "
            f"undo each other; allow_non_atomic_pointer=True (--non-atomic) takes that risk: {exc}"
        )

    def _publish(self, place: ArtifactNames, data: bytes, manifest: ExportManifest) -> Outcome:
        problem: Exception | None = None
        for _ in range(SWAPS):
            found, info = b"", cast("ObjectInfo | None", None)
            with contextlib.suppress(FileNotFoundError):
                found, info = self._get_pointer(place)
            rank = None if info is None else _published_rank(found, f"{self.store.url}/{place.pointer}")
            if not pointer_publish_allowed(info is not None, None if rank is None else rank_of(rank), manifest.rank):
                return Outcome("superseded", rank)
            fail_point("artifact.pointer.seen")
            try:
                publish(self.store, place.pointer, data, None if info is None else info.tag)
                return Outcome("published")
            except (ConflictError, RetryError, FileNotFoundError) as exc:
                problem = exc  # someone was first, or nobody knows: look again
            except UnsupportedError as exc:
                if not self._non_atomic:
                    raise self._not_atomic(place, exc) from None
                _log.warning("%s: the pointer of %r is put without a condition", self.store.url, place.key)
                self.store.put(place.pointer, data)
                return Outcome("published")
        raise RetryError(f"{self.store.url}/{place.pointer}: tried {SWAPS} times to publish: {problem}")

    # --- Down

    def manifest(self, key: str) -> ExportManifest:
        """Return what is published now; FileNotFoundError where nothing is."""
        return self._pointer(self._place(key))[1]

    def download(
        self,
        key: str,
        destination: str | os.PathLike[str],
        progress: Progress = lambda _: None,
        *,
        sync: bool = True,
    ) -> ExportManifest:
        """Fetch the published artifact as the folder ``destination``, every byte hashed, and return its manifest.

        Without ``sync`` a power cut may take it back: for who imports it at once, which syncs what it makes.

        FileNotFoundError when nothing is published, or when its payload was pruned since the pointer was read: then a
        newer one is published, and trying again finds it.
        """
        destination = os.fspath(destination)
        place = self._place(key)
        check_vacant(destination)
        data, manifest = self._pointer(place)
        name = place.payload(payload_name(data, manifest.rank))
        fail_point("artifact.download.pointer")
        with staged(destination, "download") as stage:
            made = stage + "/artifact"
            os.mkdir(made, 0o700)
            os.mkdir(made + "/data", 0o700)

            def pieces() -> object:
                for piece in self.store.stream(name):
                    progress(len(memoryview(piece)))
                    yield piece

            unpack(pieces(), made, manifest, data, f"{self.store.url}/{name}")  # type: ignore[arg-type]
            if sync:
                sync_tree(made)
            fail_point("artifact.download.staged")
            put_in_place(made, destination)
        return manifest

    def _pointer(self, place: ArtifactNames) -> tuple[bytes, ExportManifest]:
        data, _ = self._get_pointer(place)
        return data, decode_manifest(data, f"{self.store.url}/{place.pointer}")

    def _get_pointer(self, place: ArtifactNames) -> tuple[bytes, ObjectInfo]:
        try:
            return self.store.get(place.pointer, most=MANIFEST_MAX_BYTES)
        except UnsupportedError as exc:
            where = f"{self.store.url}/{place.pointer}"
            raise CorruptionError(where, MANIFEST_MAX_BYTES, f"no manifest: {exc}") from None

    # --- Keeping it small

    def prune(self, key: str, grace_seconds: float) -> list[str]:
        """Remove payloads strictly older than the pointer that are older than ``grace_seconds``; return their names.

        Without a pointer that can be read nothing goes.  The grace is for whoever is still downloading.
        """
        if grace_seconds < 0:
            raise OptionsError(f"grace_seconds={grace_seconds}: must not be negative")
        place = self._place(key)
        try:
            data, manifest = self._pointer(place)
        except (FileNotFoundError, CorruptionError, UnsupportedError):
            return []
        target = place.payload(payload_name(data, manifest.rank))
        cutoff = max(0, self._clock.now_ns() - int(grace_seconds * 1e9))
        gone = [
            info.key
            for info in self.store.objects(place.payloads)
            if payload_prunable(
                rank_in_name(info.key),
                manifest.rank,
                is_target=info.key == target,
                aged_out=info.modified_ns <= cutoff,
            )
        ]
        self.store.delete(gone)
        return gone

    def _place(self, key: str) -> ArtifactNames:
        if not NAME.search(key):
            raise OptionsError(f"{key!r}: an artifact needs a key")
        return ArtifactNames(self.prefix, key)


def transport_for(
    url: str | os.PathLike[str], options: ObjectOptions | None = None, *, allow_non_atomic_pointer: bool = False
) -> Transport:
    """Return the transport below a URL or a local folder; what comes behind the bucket is the prefix.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     transport_for(folder).prune("routes", 0)
    []
    """
    text = os.fspath(url)
    if not is_url(text) or text.startswith("file://"):
        return Transport(object_store_for(text), "", allow_non_atomic_pointer=allow_non_atomic_pointer)
    root, prefix = split_url(text)
    store = object_store_for(root, options)
    return Transport(store, prefix, allow_non_atomic_pointer=allow_non_atomic_pointer)


def _published_rank(data: bytes, where: str) -> WatchCursor | None:
    """Return the cursor of what is published, None when it cannot be read and so may be replaced.

    A manifest of a later schema is not replaced by someone who does not understand it.
    """
    try:
        return decode_manifest(data, where).cursor
    except CorruptionError:
        pass
    try:  # what only this release finds wrong still must not be gone back behind
        found = json.loads(data)
        cursor = found["cursor_hex"] if isinstance(found, dict) else found[3]
        version = found["schema_version"] if isinstance(found, dict) else found[0]
        if version == SCHEMA_VERSION and HEX.fullmatch(cursor) and len(cursor) == 16:
            return WatchCursor(VersionToken(bytes.fromhex(cursor)))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        pass
    return None
