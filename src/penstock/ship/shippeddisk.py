"""The files of a shipped log as a disk: what the manifest names, fetched when it is read.

A file is fetched whole, in ranges side by side, into a file without a name, and its BLAKE3 is compared before a reader
gets a byte of it.  A few are kept, up to a bound.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

import msgspec

from penstock.disk import Handle, ObjectStore, Threads
from penstock.disk.face import Stat
from penstock.disk.objects import ShortRange, fetch_ranges
from penstock.disk.posix import PosixFile, folder_of
from penstock.errors import ClosedError, CorruptionError, ExpiredError
from penstock.log.messagelog.format import segment_name
from penstock.log.sidecar import Identity
from penstock.log.xchannel.format import ChannelHeader, file_path, split_position
from penstock.ship.manifest import Entry, Head

__all__ = ["AHEAD_SEGMENTS", "CACHE_BYTES", "ShippedDisk"]

CACHE_BYTES: Final = 512 << 20
FETCH_THREADS: Final = 8
LARGE_BYTES: Final = 128 << 20
"""From here on the size of an object is looked at before it is believed."""
AHEAD_SEGMENTS: Final = 8
"""So many segments are fetched ahead at most, however small they are."""


class _Kept(PosixFile):
    """A fetched file: mapped and read like any other, with the identity of its content."""

    def __init__(self, path: str, fd: int, stat: Stat) -> None:
        super().__init__(path, fd)
        self._stat = stat

    def stat(self) -> Stat:
        """Return what the manifest says of it."""
        return self._stat


class _Object(msgspec.Struct, frozen=True):
    """A file of the log: an object, or one that was made up: zeros behind the bytes it begins with."""

    size: int
    key: str = ""
    blake3: str = ""
    data: bytes | None = None
    span: tuple[int, int] = (0, 0)
    """Of an object: the positions of its segment, and behind them."""

    @property
    def stat(self) -> Stat:
        number = int(self.blake3[:15] or "0", 16)
        return Stat(self.size, False, (number, self.size), 0)


class ShippedDisk(Handle):
    """The files of one shipped log, as the manifest names them; nothing is fetched before it is read."""

    def __init__(self, store: ObjectStore, place: str, *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__()
        self._store, self._place, self._cache_bytes = store, place, cache_bytes
        self._files: dict[str, _Object] = {}
        self._kept: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by key: descriptor and size
        self._coming: dict[str, Future[None]] = {}  # by key: what a thread fetches now
        self._mutex = threading.RLock()
        self._pool: Threads | None = None
        self._ahead: Threads | None = None
        self._closed = False
        self.fetched_bytes = 0

    def show(self, head: Head, entries: tuple[Entry, ...]) -> None:
        """Have the disk show these entries."""
        folder = folder_of(self._place) if head.format == "xchannel" else self._place
        prefix = f"{self._place}.penstock-" if head.format == "xchannel" else f"{self._place}/penstock-"
        files = {}
        for entry in entries:
            span = (entry.first, entry.next)
            files[f"{folder}/{entry.name}"] = _Object(entry.bytes, entry.key, entry.blake3, span=span)
            for extra in entry.extra:
                files[f"{folder}/{extra.name}"] = _Object(extra.bytes, extra.key, extra.blake3, span=span)
        if head.format == "xchannel" and entries:
            # The last file ends with a Roll: what it leads to is not shipped yet, and stands here without a record.
            sequence, _ = split_position(entries[-1].next)
            data = ChannelHeader.fresh(sequence, head.region_bytes, 0).encode()
            files.setdefault(file_path(self._place, sequence), _Object(head.region_bytes, data=data))
        elif head.format == "messagelog" and entries:
            # The same here: only behind the last segment of a log bytes that are no entry may be one being written.
            files.setdefault(f"{folder}/{segment_name(entries[-1].next)}.log", _Object(0, data=b""))
        if head.log_id and not head.log_id.startswith("folder-"):
            data = msgspec.json.encode(Identity(head.log_id, head.content, 0)) + b"\n"
            files[f"{prefix}id"] = _Object(len(data), data=data)
        with self._mutex:
            self._files = files

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        start = folder.rstrip("/") + "/"
        names = {path[len(start) :].partition("/")[0] for path in self._files if path.startswith(start)}
        if not names and folder.rstrip("/") not in (self._place, folder_of(self._place)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return sorted(names)

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None."""
        found = self._files.get(path)
        if found is not None:
            return found.stat
        start = path.rstrip("/") + "/"
        if any(name.startswith(start) for name in self._files):
            return Stat(0, True, (0, 0), 0)
        return None

    def open(self, path: str) -> PosixFile:
        """Open a file, fetched and compared with its hash if it is not kept yet."""
        found = self._files.get(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        key = found.key or path
        while True:
            with self._mutex:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    return _Kept(path, os.dup(kept[0]), found.stat)
                coming = self._coming.get(key)
                mine: Future[None] | None = None
                if coming is None:
                    self._coming[key] = coming = mine = Future()
            if mine is not None:
                self._bring(key, found, mine)
            coming.result()

    def fetch_ahead(self, names: Iterable[str]) -> None:
        """Have threads fetch these files, if they are neither kept nor on their way; what goes wrong is told later."""
        for path in names:
            found = self._files.get(path)
            with self._mutex:
                if self._closed or found is None or found.data is not None:
                    continue
                if found.key in self._kept or found.key in self._coming:
                    continue
                mine: Future[None] = Future()
                self._coming[found.key] = mine
                if self._ahead is None:
                    self._ahead = Threads(AHEAD_SEGMENTS // 2, "penstock-ahead")
                self._ahead.submit(self._bring, found.key, found, mine)

    def _bring(self, key: str, wanted: _Object, coming: Future[None]) -> None:
        """Fetch a file and keep it; whoever waits for it is told how that ended."""
        try:
            fd = self._fetch(wanted)
        except BaseException as exc:  # noqa: BLE001 - it is raised where the file is opened
            with self._mutex:
                self._coming.pop(key, None)
            coming.set_exception(exc)
            return
        with self._mutex:
            self._coming.pop(key, None)
            if self._closed:
                os.close(fd)
                coming.set_exception(ClosedError(f"{self._place}: the reader is closed"))
                return
            self._kept[key] = (fd, wanted.size)
            while sum(size for _, size in self._kept.values()) > self._cache_bytes and len(self._kept) > 1:
                _, (old, _) = self._kept.popitem(last=False)
                os.close(old)
        coming.set_result(None)

    def _fetch(self, wanted: _Object) -> int:
        with tempfile.TemporaryFile() as scratch:
            fd = os.dup(scratch.fileno())
        try:
            if wanted.data is not None:
                os.ftruncate(fd, wanted.size)
                os.pwrite(fd, wanted.data, 0)
            elif wanted.size:
                self._fill(fd, wanted)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _fill(self, fd: int, wanted: _Object) -> None:
        from blake3 import blake3

        where = f"{self._store.url}/{wanted.key}"
        reason = f"the object has not the {wanted.size} bytes that the manifest says"
        if wanted.size > LARGE_BYTES and (there := self._store.head(wanted.key)) and there.size != wanted.size:
            raise CorruptionError(where, 0, reason)  # before room is made for it
        with PosixFile(tempfile.gettempdir(), os.dup(fd)) as scratch:
            scratch.allocate(0, wanted.size)  # where there is no room, writing to a mapping ends the process
        with mmap.mmap(fd, wanted.size) as mapped, memoryview(mapped) as view:
            try:
                fetch_ranges(lambda start, end: self._store.get_range(wanted.key, start, end), 0, view, self._threads())
            except FileNotFoundError:
                raise ExpiredError(where, *wanted.span) from None
            except ShortRange:
                raise CorruptionError(where, 0, reason) from None
            found = blake3(view).hexdigest()
        self.fetched_bytes += wanted.size
        if found != wanted.blake3:
            raise CorruptionError(where, 0, f"its BLAKE3 is {found}, the manifest says {wanted.blake3}")

    def _threads(self) -> Threads:
        with self._mutex:
            if self._pool is None:
                self._pool = Threads(FETCH_THREADS, "penstock-ship")
            return self._pool

    def forked(self) -> None:
        """Leave the parent's threads behind."""
        self._pool, self._ahead, self._mutex = None, None, threading.RLock()
        self._coming = {}

    def close(self) -> None:
        """Let go of what was fetched."""
        with self._mutex:
            self._closed = True
            for fd, _ in self._kept.values():
                os.close(fd)
            self._kept.clear()
        for pool in (self._ahead, self._pool):
            if pool is not None:
                pool.shutdown(wait=pool is self._ahead, cancel_futures=pool is self._ahead)
