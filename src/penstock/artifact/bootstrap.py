"""Bringing a node's store to where it can go on: from what is here, from an artifact, or from nothing.

    a store is here, and its changes since are still kept      ──► delta       nothing is fetched
    it is not here, or its cursor has expired, and an
        artifact is published whose changes since are kept     ──► artifact    fetched, then the tail is replayed
    otherwise                                                  ──► relist      the fold lists everything and removes
                                                                               keys that are gone by itself

A store that has expired is only replaced by an artifact that was imported whole; until then it stays as it is.  What is
no store, and so may be something that nobody has anywhere else, is never replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import msgspec

from penstock.artifact.imports import MARK, import_artifact
from penstock.artifact.manifest import ExportManifest
from penstock.artifact.transport import Transport
from penstock.disk import disk_for, in_disk_thread
from penstock.disk.failpoint import fail_point
from penstock.disk.posix import folder_of
from penstock.disk.tree import remove_tree, staged
from penstock.errors import CorruptionError, ExpiredError, LockedError, OptionsError, PenstockError, ReplacedError
from penstock.fold.face import WatchScope
from penstock.kv.roles import KvWatcher
from penstock.log.face import LogReader
from penstock.store import open_store
from penstock.store.pgss import MAGIC
from penstock.types import WatchCursor

__all__ = ["BootstrapReport", "Way", "Window", "bootstrap", "bucket_window", "choose_way", "log_window"]

_log = logging.getLogger("penstock.artifact")

Way = Literal["delta", "artifact", "relist"]
Window = Callable[[WatchCursor], Awaitable[bool]]
"""Whether everything behind a cursor can still be read."""

ASIDE = ".penstock-expired"
DOWNLOADS = 3
"""How often a payload that was pruned between pointer and download is looked for again."""


class BootstrapReport(msgspec.Struct, frozen=True):
    """Which way a store came to where it is, and why.

    >>> BootstrapReport("delta", "it is current", WatchCursor.of(3)).way
    'delta'
    """

    way: Way
    reason: str
    cursor: WatchCursor
    """Where the fold goes on."""
    artifact: ExportManifest | None = None


def bucket_window(watcher: KvWatcher, scope: WatchScope | None = None) -> Window:
    """Return the window of a bucket: a watch from the cursor is begun and ended again.

    >>> async def example(bucket, cursor):
    ...     return await bucket_window(bucket.watcher)(cursor)
    """

    async def kept(cursor: WatchCursor) -> bool:
        if not cursor.token.as_int():
            return False
        try:
            watch = await (scope or WatchScope.all()).watch_from(watcher, cursor)
        except (ExpiredError, ReplacedError, OptionsError):
            return False
        await watch.aclose()
        return True

    return kept


def log_window(log: LogReader) -> Window:
    """Return the window of a log: what lies between its first position and its end.

    >>> async def example(log, cursor):
    ...     return await log_window(log)(cursor)
    """

    async def kept(cursor: WatchCursor) -> bool:
        position = cursor.token.as_int()
        return position is not None and await in_disk_thread(
            lambda: log.keeps(position) and position <= log.next_position
        )

    return kept


def choose_way(
    local: WatchCursor | None, local_kept: bool, published: WatchCursor | None, published_kept: bool
) -> tuple[Way, str]:
    """Decide how to go on, and say why; None stands for what is not there.

    >>> choose_way(WatchCursor.of(5), True, WatchCursor.of(9), True)[0]
    'delta'
    >>> choose_way(WatchCursor.of(5), False, WatchCursor.of(9), True)[0]
    'artifact'
    >>> choose_way(None, False, WatchCursor.of(3), False)
    ('relist', 'the artifact at 3 is older than what is kept: export more often than that; no store is here')
    """
    mine = "no store is here" if local is None else f"the store's cursor {_shown(local)} has expired"
    if local is not None and local_kept:
        return "delta", f"everything since {_shown(local)} is kept"
    if published is None:
        return "relist", f"no artifact is published; {mine}"
    if not published_kept:
        reason = f"the artifact at {_shown(published)} is older than what is kept: export more often than that"
        return "relist", f"{reason}; {mine}"
    return "artifact", f"{mine}; the artifact at {_shown(published)} is within what is kept"


def _shown(cursor: WatchCursor) -> str:
    number = cursor.token.as_int()
    return "none" if cursor.at_start else cursor.token.raw.hex() if number is None else str(number)


async def bootstrap(
    path: str | os.PathLike[str],
    window: Window,
    transport: Transport | None = None,
    key: str = "",
    *,
    backend: str | None = None,
) -> BootstrapReport:
    """Bring the store at ``path`` to where a fold can go on, and report the way taken and why.

    ``window`` tells whether a cursor has expired: ``bucket_window`` or ``log_window``.  Afterwards the store is opened
    as usual (``open_store(path, read_only=False)``, or created when the way was ``relist`` and there was none) and
    followed: ``watch_applied`` with a reader repairs what a re-list leaves behind.  An artifact that is bad or cannot
    be fetched, or is of another ``backend`` than the one that is asked for, is said in the reason, and the next way is
    taken.  OptionsError when something else is at ``path``, LockedError when someone has the store open that is to be
    replaced.

    >>> async def example(bucket, transport):
    ...     report = await bootstrap("routes.snap", bucket_window(bucket.watcher), transport, "routes")
    ...     return report.way, report.reason
    """
    path = os.fspath(path)
    await in_disk_thread(_put_back, path)
    local, trouble = await in_disk_thread(_local_cursor, path)
    if local is not None and await window(local):
        way, reason = choose_way(local, True, None, False)
        return BootstrapReport(way, reason, local)
    published: ExportManifest | None = None
    kept = False
    if transport is not None:
        try:
            published = await in_disk_thread(transport.manifest, key)
            kept = await window(published.cursor)
        except FileNotFoundError:
            pass
        except (PenstockError, OSError) as exc:
            published, trouble = None, f"{trouble}; the artifact cannot be read: {exc}".strip("; ")
    way, reason = choose_way(local, False, None if published is None else published.cursor, kept)
    if way == "artifact" and published is not None and backend not in (None, published.backend):
        way, reason = "relist", f"the artifact is of the backend {published.backend}, and {backend} is asked for"
    if way == "artifact":
        assert transport is not None
        try:
            manifest = await in_disk_thread(_fetch, transport, key, path)
            note = f"{reason}; {trouble}" if trouble else reason
            return BootstrapReport("artifact", note, manifest.cursor, manifest)
        except LockedError:
            raise
        except (PenstockError, OSError) as exc:
            _log.warning("%s: the artifact %r cannot be used: %s", path, key, exc)
            way, reason = "relist", f"the artifact cannot be used: {exc}"
    if trouble:
        reason = f"{reason}; {trouble}"
    return BootstrapReport(way, reason, local or WatchCursor(), published)


def _local_cursor(path: str) -> tuple[WatchCursor | None, str]:
    """Return the cursor of the store that is here; None, with what is wrong with it, when it is damaged."""
    disk = disk_for(path)
    found = disk.stat(path)
    if found is None or (found.is_folder and not disk.list(path)):
        return None, ""
    if not found.is_folder:
        with disk.open(path) as file:
            begin = file.read_at(0, len(MAGIC))
        if not MAGIC.startswith(begin):
            raise OptionsError(f"{path}: something is here that is no store; it is not replaced")
    try:
        with open_store(path) as store:
            cursor = store.cursor()
            return (None, "") if cursor.at_start and not store.count() else (cursor, "")
    except CorruptionError as exc:
        return None, f"the store here cannot be used: {exc}"


def _fetch(transport: Transport, key: str, path: str) -> ExportManifest:
    """Download, import beside the store, and let the two change places while nobody has the one that is here open."""
    with _owned(path), staged(path, "bootstrap") as folder:
        artifact, made = folder + "/artifact", folder + "/store"
        for attempt in range(DOWNLOADS):
            try:
                transport.download(key, artifact, sync=False)
                break
            except FileNotFoundError:
                if attempt == DOWNLOADS - 1:
                    raise
        manifest = import_artifact(artifact, made, take=True)
        remove_tree(artifact)
        fail_point("artifact.bootstrap.imported")
        disk, aside = disk_for(path), path + ASIDE
        remove_tree(aside)
        remove_tree(path + MARK)  # it says how far the old file was synced, also where that was removed
        if disk.stat(path) is not None:
            disk.rename(path, aside)
            fail_point("artifact.bootstrap.aside")
        disk.rename(made, path)
        disk.sync_folder(folder_of(path))
        fail_point("artifact.bootstrap.named")
        remove_tree(aside)
    return manifest


@contextlib.contextmanager
def _owned(path: str) -> Iterator[None]:
    """Hold the store that is here, if there is one: its owner would go on writing to what is replaced."""
    disk = disk_for(path)
    held = next((name for name in (path + "/data.mdb", path) if disk.stat(name) is not None), None)
    if held is None:
        yield
        return
    try:
        lock = disk.own(held)
    except LockedError:
        raise LockedError(f"{path}: another process or handle has this store open, so it is not replaced") from None
    try:
        yield
    finally:
        lock.release()


def _put_back(path: str) -> None:
    """Undo a change of places that a crash cut in half."""
    disk, aside = disk_for(path), path + ASIDE
    if disk.stat(aside) is None:
        return
    if disk.stat(path) is None:
        disk.rename(aside, path)
        disk.sync_folder(folder_of(path))
    else:
        remove_tree(aside)
