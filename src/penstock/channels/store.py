"""Where channel metadata is kept: four operations, and three places that offer them.

    <root>/<sha256 of the handler, 64 lower-case hex digits>/
        metadata.bin        this store's
        metadata.bin.tmp    only while saving, or while a channel is being deleted
        penstock-spare      the metadata of before, where the next save writes (see docs/decisions/094)
        *.log *.idx …       the message log's, which shares the folder

A save writes the whole file anew: write tmp, fsync, rename, fsync the folder, in that order, so a crash leaves
the old metadata or the new, whole.

A delete begins by renaming ``metadata.bin`` back to ``metadata.bin.tmp`` and syncing the folder.  From then on the
channel is gone, whatever happens next: a folder without ``metadata.bin`` is no channel, and the next enumeration
sweeps it.  Then the log goes, then the metadata, then the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Protocol

from penstock import kernel
from penstock.channels.counts import DELETES, LOAD_SECONDS, LOADS, SAVE_SECONDS, SAVES, timed
from penstock.channels.model import ChannelType, PersistedChannel
from penstock.channels.postcard import MAX_METADATA_BYTES, decode, decode_any, encode
from penstock.disk import Disk, Replacement, disk_for, exist_many, read_many, save_many_atomically
from penstock.disk.plain import check_name, clear_folder, refuse_link
from penstock.disk.posix import PosixDisk, folder_of
from penstock.errors import CorruptionError
from penstock.metrics import Metric

__all__ = ["ChannelStore", "FileChannelStore", "MemoryChannelStore", "channel_hash"]

METADATA: Final = "metadata.bin"
METADATA_TMP: Final = "metadata.bin.tmp"
SPARE: Final = "penstock-spare"
CURSOR: Final = "cursor.bin"
NEW_QUEUE: Final = "penstock-new-queue"
"""Stands beside a cursor while a channel is becoming a queue: its metadata may still be that of a plain channel."""

READ_TOGETHER: Final = 512
"""How many files are read before they are decoded."""
LARGE_BYTES: Final = 64 << 10
"""What is larger is read by itself: the files that are read together fit into memory whatever they hold."""

HASH = re.compile(r"[0-9a-f]{64}")
OURS = re.compile(
    r"metadata\.bin\.tmp|cursor\.bin(\.tmp)?|[0-9]{20}\.(log|idx|tmp)|[0-9]{20}\.log\.[0-9.]+\.bad|penstock-[A-Za-z0-9._-]+"
)

_log = logging.getLogger(__name__)


@lru_cache(65_536)
def channel_hash(handler: str) -> str:
    """Return the name of a channel's folder: SHA-256 of the bare handler, in hex.

    >>> channel_hash("ops/east")
    'a2b8af6174488a84d9dd39d1b495570a2a77f6302924e673c212e2e60b29f97a'
    """
    return hashlib.sha256(handler.encode()).hexdigest()


class ChannelStore(Protocol):
    """Keeps metadata.  Every method may be called from any thread; a channel is worked on by one at a time."""

    def save(self, channel: PersistedChannel) -> str:
        """Replace the metadata of a channel and return its hash; durable when it returns.

        When it raises, the old metadata is what a restart finds, unless only the last fsync failed.
        """

    def delete(self, hash: str, first: Callable[[], None] | None = None) -> None:
        """Take a channel out for good, call ``first`` (which deletes its log), then remove what is left.

        A channel that is not there is deleted already.  When it raises before ``first`` was called the channel is
        still there; when later, it is gone and only its leftovers remain.
        """

    def hashes(self) -> list[str]:
        """Return the hashes of all channels, sorted, and sweep away the leftovers of deleted ones."""

    def load(self, hash: str) -> PersistedChannel:
        """Return the metadata of one channel; CorruptionError when it cannot be read."""


class FileChannelStore:
    """Metadata in folders below ``root``, shared with the message logs and readable by narwhal 0.7.0.

    >>> from penstock.disk import MemoryDisk
    >>> store = FileChannelStore("data", MemoryDisk())
    >>> hash = store.save(PersistedChannel("jobs"))
    >>> store.hashes() == [hash], store.load(hash).handler
    (True, 'jobs')
    >>> store.delete(hash); store.delete(hash)
    >>> store.hashes()
    []
    """

    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or disk_for(root)
        self._safe_spares: set[str] = set()  # of channels whose last save was ours and is durable

    def folder(self, hash: str) -> str:
        """Return the folder of a channel; OptionsError for what is no name of a folder in the data directory.

        >>> FileChannelStore("data").folder("../../outside")
        Traceback (most recent call last):
        penstock.errors.OptionsError: data: '../../outside' is no name of something in this folder
        """
        return check_name(self.root, hash)

    def save(self, channel: PersistedChannel) -> str:
        """Replace the metadata of a channel."""
        (result,) = self.save_many([channel], spares=False)
        if isinstance(result, Exception):
            raise result
        return result

    def save_many(self, channels: Sequence[PersistedChannel], *, spares: bool = True) -> list[str | Exception]:
        """Replace the metadata of different channels, step by step together; return a hash or an error for each.

        With ``spares`` the file a save replaces is kept beside it, to be written by the next save but one.
        """
        started = time.perf_counter()
        results: list[str | Exception] = []
        places: list[int] = []
        saves: list[Replacement] = []
        try:
            for channel in channels:
                try:
                    saves.append(self._replacement(channel, spares=spares))
                    places.append(len(results))
                    results.append(channel_hash(channel.handler))
                except Exception as exc:  # noqa: BLE001 - the others are saved all the same
                    results.append(exc)
            for place, error in zip(places, save_many_atomically(self._disk, saves), strict=True):
                if error is not None:
                    results[place] = error
                elif spares:
                    self._safe_spares.add(channel_hash(channels[place].handler))
        except BaseException:
            SAVES.add(len(channels), result="failure")
            raise
        _count(SAVES, SAVE_SECONDS, results, time.perf_counter() - started)
        return results

    def _replacement(self, channel: PersistedChannel, *, spares: bool) -> Replacement:
        digest, data = channel_hash(channel.handler), encode(channel)
        folder = self.folder(digest)
        refuse_link(self._disk, folder)
        if self._disk.stat(folder) is None:
            self._make(folder)
        reuse = spares and digest in self._safe_spares
        self._safe_spares.discard(digest)  # until this save is durable too
        spare = f"{folder}/{SPARE}" if spares else ""
        return Replacement(f"{folder}/{METADATA}", data, f"{folder}/{METADATA_TMP}", spare, reuse)

    def delete(self, hash: str, first: Callable[[], None] | None = None) -> None:
        """Take a channel out for good and remove its folder."""
        refuse_link(self._disk, self.folder(hash))
        self._safe_spares.discard(hash)

        def work() -> None:
            self._retire(hash)
            if first is not None:
                first()
            self._wipe(hash)

        timed(work, DELETES)

    def hashes(self) -> list[str]:
        """Return the hashes of all channels and sweep."""
        return timed(self._hashes, LOADS)

    def _hashes(self) -> list[str]:
        try:
            names = self._disk.list(self.root)
        except FileNotFoundError:
            return []
        found = []
        paths = [f"{self.root}/{name}/{METADATA}" for name in names]
        for name, path, there in zip(names, paths, exist_many(self._disk, paths), strict=True):
            if there or self._disk.stat(path) is not None or not self._sweep(name):
                found.append(name)
        return found

    def load(self, hash: str) -> PersistedChannel:
        """Return the metadata of one channel."""
        path = f"{self.folder(hash)}/{METADATA}"
        refuse_link(self._disk, self.folder(hash))
        return timed(lambda: self._decoded(hash, path, self._read(path)), LOADS, LOAD_SECONDS)

    def load_many(self, hashes: Sequence[str]) -> list[PersistedChannel | CorruptionError | OSError]:
        """Return the metadata of many channels, an error where one cannot be read; files are read side by side."""
        loaded: list[PersistedChannel | CorruptionError | OSError] = []
        for start in range(0, len(hashes), READ_TOGETHER):
            part, started = hashes[start : start + READ_TOGETHER], time.perf_counter()
            paths = [f"{self.root}/{digest}/{METADATA}" for digest in part]
            sure = (
                False if isinstance(self._disk, PosixDisk) and kernel.native else None
            )  # what is not there is not there
            cursors = exist_many(self._disk, [f"{self.root}/{digest}/{CURSOR}" for digest in part])
            for digest, path, data, has_cursor in zip(
                part, paths, read_many(self._disk, paths, LARGE_BYTES), cursors, strict=True
            ):
                try:
                    refuse_link(self._disk, f"{self.root}/{digest}")
                    data = self._read(path) if data is None else data
                    loaded.append(self._decoded(digest, path, data, has_cursor=has_cursor or sure))
                except (CorruptionError, OSError) as exc:
                    loaded.append(exc)
            _count(LOADS, LOAD_SECONDS, loaded[start:], (time.perf_counter() - started) / len(part))
        return loaded

    def _read(self, path: str) -> bytes:
        try:
            with self._disk.open(path) as file:
                # One byte more than is allowed: a file that grows meanwhile cannot slip through.
                return file.read_at(0, min(file.stat().size, MAX_METADATA_BYTES) + 1)
        except IsADirectoryError:
            raise CorruptionError(path, 0, "a folder stands where the metadata should be") from None

    def _decoded(self, hash: str, path: str, data: bytes, *, has_cursor: bool | None = None) -> PersistedChannel:
        if len(data) > MAX_METADATA_BYTES:
            raise CorruptionError(path, MAX_METADATA_BYTES, f"more than {MAX_METADATA_BYTES} bytes of metadata")
        channel, old = decode_any(data, path)
        # Metadata has no checksum.  Beside a queue's cursor a missing type (0.6 had no queues) or that of a plain
        # channel is damage: pub/sub would replay the queue.
        if has_cursor is None:
            has_cursor = self._disk.stat(f"{self.folder(hash)}/{CURSOR}") is not None
        if has_cursor and channel.channel_type is ChannelType.PUBSUB:
            if old:
                raise CorruptionError(path, len(data), "the channel type is missing beside a queue's cursor")
            if self._disk.stat(f"{self.folder(hash)}/{NEW_QUEUE}") is None:
                raise CorruptionError(path, len(data) - 1, "the channel type is pub/sub beside a queue's cursor")
        return channel

    def make_root(self) -> None:
        """Create the data directory, with what is missing above it, so that their names survive a power cut."""
        missing = [self.root]
        while missing[-1] not in ("", "/", ".") and self._disk.stat(missing[-1]) is None:
            missing.append(folder_of(missing[-1]))
        for path in reversed(missing[:-1]):
            self._disk.make_folder(path)
            self._disk.sync_folder(folder_of(path))

    def _make(self, folder: str) -> None:
        """Create the folder of a channel so that its name survives a power cut too."""
        self.make_root()
        self._disk.make_folder(folder)
        self._disk.sync_folder(self.root)

    def _retire(self, hash: str) -> None:
        """Delete in one rename, made durable: what follows is tidying."""
        folder = self.folder(hash)
        stat = self._disk.stat(f"{folder}/{METADATA}")
        if stat is None or stat.is_folder:
            return
        self._disk.rename(f"{folder}/{METADATA}", f"{folder}/{METADATA_TMP}")
        try:
            self._disk.sync_folder(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.rename(f"{folder}/{METADATA_TMP}", f"{folder}/{METADATA}")
            raise

    def _wipe(self, hash: str) -> None:
        """Remove the files of a channel, metadata last, and its folder."""
        folder = self.folder(hash)
        if self._disk.stat(folder) is None:
            return
        clear_folder(self._disk, folder, last=(METADATA, METADATA_TMP), remove=False)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove_folder(folder)
        self._disk.sync_folder(self.root)

    def _sweep(self, name: str) -> bool:
        """Remove what a crash or a failed delete left behind, if all of it is of our making.

        False for a folder that has messages and nothing that says it was deleted: its metadata was lost.
        """
        folder = self.folder(name)
        stat = self._disk.stat(folder)
        if not HASH.fullmatch(name) or stat is None or not stat.is_folder:
            return True
        try:
            refuse_link(self._disk, folder)
        except OSError as exc:
            _log.warning("%s: left alone", exc)
            return True
        names = self._disk.list(folder)
        for inside in names:
            stat = self._disk.stat(f"{folder}/{inside}")
            if not OURS.fullmatch(inside) or (stat is not None and stat.is_folder):
                _log.warning("%s has no %s but holds %s, which is not ours: left alone", folder, METADATA, inside)
                return True
        if METADATA_TMP not in names and any(self._has_messages(f"{folder}/{inside}") for inside in names):
            return False  # a delete removes what tells of it last
        _log.warning("removing the leftovers of a deleted channel: %s has no %s", folder, METADATA)
        try:
            self._wipe(name)
        except OSError as exc:
            _log.warning("%s could not be removed: %s", folder, exc)
        return True

    def _has_messages(self, path: str) -> bool:
        found = self._disk.stat(path) if path.endswith(".log") else None
        return found is not None and found.size > 0


def load_many(store: ChannelStore, hashes: Sequence[str]) -> list[PersistedChannel | CorruptionError | OSError]:
    """Load many channels, together where the store can; return a channel or an error for each.

    >>> store = MemoryChannelStore()
    >>> [found.handler for found in load_many(store, [store.save(PersistedChannel("a"))])]
    ['a']
    """
    if isinstance(store, FileChannelStore):
        return store.load_many(hashes)
    loaded: list[PersistedChannel | CorruptionError | OSError] = []
    for digest in hashes:
        try:
            loaded.append(store.load(digest))
        except (CorruptionError, OSError) as exc:
            loaded.append(exc)
    return loaded


class MemoryChannelStore:
    """Metadata in a dict, in its encoded form, for tests and for channels that need not survive.

    >>> store = MemoryChannelStore()
    >>> store.load(store.save(PersistedChannel("jobs"))).handler
    'jobs'
    """

    def __init__(self) -> None:
        self._saved: dict[str, bytes] = {}
        self._mutex = threading.Lock()

    def save(self, channel: PersistedChannel) -> str:
        """Replace the metadata of a channel."""
        digest, data = channel_hash(channel.handler), encode(channel)
        with self._mutex:
            self._saved[digest] = data
        return digest

    def delete(self, hash: str, first: Callable[[], None] | None = None) -> None:
        """Forget a channel."""
        with self._mutex:
            self._saved.pop(hash, None)
        if first is not None:
            first()

    def hashes(self) -> list[str]:
        """Return the hashes of all channels."""
        with self._mutex:
            return sorted(self._saved)

    def load(self, hash: str) -> PersistedChannel:
        """Return the metadata of one channel."""
        with self._mutex:
            data = self._saved.get(hash)
        if data is None:
            raise FileNotFoundError(hash)
        return decode(data, hash)


def _count(counter: Metric, histogram: Metric, results: Sequence[object], seconds: float) -> None:
    """Count how many of these went well and how many did not; each that did took ``seconds``."""
    failed = sum(isinstance(result, Exception) for result in results)
    if failed:
        counter.add(failed, result="failure")
    if failed < len(results):
        counter.add(len(results) - failed, result="success")
    for _ in range(len(results) - failed):
        histogram.observe(seconds)
