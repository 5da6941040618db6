"""A disk to read from that is an object store: whatever reads a log from a folder reads it by URL.

Paths are whole URLs.  A folder is what a listing by ``/`` shows; an object never changes under a reader, and one that
was replaced is another file with another identity.  Reads come in blocks that are kept, up to a bound; who reads on and
on gets several blocks at once, ahead of need.  There is nothing to map here: ``view_of`` reads instead.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from io import UnsupportedOperation
from types import TracebackType
from typing import Any, Final, Self

from penstock.disk.face import ReadFile, Stat
from penstock.disk.handle import Handle
from penstock.disk.objectstore import ObjectInfo, ObjectStore
from penstock.disk.threads import Threads
from penstock.errors import ReplacedError, RevisionMismatch
from penstock.kernel import Mapping

__all__ = ["ObjectDisk", "ObjectDiskOptions", "ObjectFile", "ShortRange", "view_of", "fetch_ranges"]

LISTING_SECONDS: Final = 1.0
"""How long what a listing said is believed: one look at a log asks for the same names many times."""
RANGE_BYTES: Final = 8 << 20
THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDiskOptions:
    """How much an ObjectDisk reads and keeps.

    >>> ObjectDiskOptions().cache_bytes
    67108864
    """

    block_bytes: int = 1 << 20
    """The least that is asked for at once."""

    ahead_blocks: int = 8
    """How many blocks are read ahead of who reads on; they are asked for side by side."""

    cache_bytes: int = 64 << 20
    """How much is kept of what was read."""


def view_of(file: ReadFile, offset: int, length: int) -> Any:
    """Return bytes of a file as memory: mapped where the disk can, otherwise read, and then none behind its end.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> file = disk.create("a"); file.write_at(0, b"hello")
    >>> bytes(view_of(file, 0, 5))
    b'hello'
    """
    try:
        return file.map(offset, length)
    except UnsupportedOperation:
        buffer = bytearray(max(0, min(length, file.stat().size - offset)))
        got = file.read_into(offset, memoryview(buffer))
        return memoryview(buffer)[:got].toreadonly() if got else b""


class ShortRange(OSError):
    """An object is shorter than it was said to be."""


def fetch_ranges(get: Callable[[int, int], Any], start: int, target: memoryview, pool: Executor) -> None:
    """Fill ``target`` with what is at ``start`` and behind, several ranges at once; ShortRange if one comes short."""

    def one(at: int) -> None:
        end = min(at + RANGE_BYTES, len(target))
        data = memoryview(get(start + at, start + end))
        if len(data) != end - at:
            raise ShortRange(errno.EIO, f"a range of {end - at} bytes came with {len(data)}")
        target[at:end] = data

    if 0 < len(target) <= RANGE_BYTES:
        one(0)  # nobody to wait for side by side
        return
    for done in [pool.submit(one, at) for at in range(0, len(target), RANGE_BYTES)]:
        done.result()


class ObjectFile:
    """One object, as it was when it was opened."""

    def __init__(self, disk: ObjectDisk, path: str, info: ObjectInfo) -> None:
        self.path = path
        self._disk, self._info = disk, info
        self._next, self._ahead = 0, 0

    def stat(self) -> Stat:
        """Return what is known of the object."""
        return _stat(self._info)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``."""
        length = max(0, min(length, self._info.size - offset))
        if not length:
            return b""
        size = self._disk.options.block_bytes
        first, last = offset // size, (offset + length - 1) // size
        # Only who goes on where it was reads ahead, each time further.
        self._ahead = min(self._ahead * 2 or 1, self._disk.options.ahead_blocks) if first == self._next else 0
        self._next = last + (1 if (offset + length) % size == 0 or offset + length == self._info.size else 0)
        blocks = self._disk.blocks(self._info, first, last, self._ahead)
        if first == last:
            at = offset - first * size
            return bytes(memoryview(blocks[0])[at : at + length])
        joined = b"".join(bytes(memoryview(block)) for block in blocks)
        return joined[offset - first * size :][:length]

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset``; a lot of it is asked for side by side and not kept."""
        length = max(0, min(len(target), self._info.size - offset))
        if length <= RANGE_BYTES:
            target[:length] = self.read_at(offset, length)
        else:
            get = self._disk.range_of(self._info)
            fetch_ranges(get, offset, target.cast("B")[:length], self._disk.pool)
        return length

    def map(self, offset: int, length: int, *, writable: bool = False) -> Mapping:  # noqa: ARG002
        """Refuse: there is nothing to map."""
        raise UnsupportedOperation(errno.ENOTSUP, "an object cannot be mapped", self.path)

    def close(self) -> None:
        """Do nothing: there is no descriptor."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class ObjectDisk(Handle):
    """A disk that reads objects below one URL.

    >>> from obstore.store import MemoryStore
    >>> from penstock.disk.objectstore import Obstore
    >>> store = Obstore(MemoryStore(), "memory://")
    >>> store.put("logs/ticks", b"hello")
    >>> disk = ObjectDisk(store, "memory://")
    >>> disk.list("memory:///logs"), disk.open("memory:///logs/ticks").read_at(1, 3)
    (['ticks'], b'ell')
    """

    def __init__(self, store: ObjectStore, root: str, options: ObjectDiskOptions | None = None) -> None:
        super().__init__()
        self.store, self.root = store, root.rstrip("/") if not root.endswith("://") else root
        self.options = options or ObjectDiskOptions()
        self._known: dict[str, tuple[ObjectInfo, float]] = {}
        self._blocks: OrderedDict[tuple[str, str | None, int], Any] = OrderedDict()
        self._kept_bytes = 0
        self._mutex = threading.Lock()
        self._pool: Executor | None = None

    @property
    def pool(self) -> Executor:
        """The threads that wait for ranges."""
        if self._pool is None:
            self._pool = Threads(THREADS, "penstock-objects")
        return self._pool

    def forked(self) -> None:
        """Leave the parent's threads behind."""
        self._pool, self._mutex = None, threading.Lock()

    # --- The face of a disk

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; FileNotFoundError when nothing is below it."""
        key = self._key(folder)
        folders, objects = self.store.folder(key)
        objects = [
            info for info in objects if info.key.strip("/") != key
        ]  # some tools leave an empty object for a folder
        if not folders and not objects and key:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        now = time.monotonic()
        with self._mutex:
            if len(self._known) > 100_000:
                self._known.clear()
            self._known.update({info.key: (info, now) for info in objects})
        return sorted({*folders, *(info.key.rpartition("/")[2] for info in objects)})

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None."""
        key = self._key(path)
        info = self._find(key) if key else None
        if info is not None:
            return _stat(info)
        try:
            self.list(path)
        except FileNotFoundError:
            return None
        return Stat(0, True, (zlib.crc32(key.encode()), 0), 0)

    def open(self, path: str) -> ObjectFile:
        """Open an object for reading."""
        key = self._key(path)
        info = self._find(key) if key else None
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return ObjectFile(self, path, info)

    # --- Bytes

    def range_of(self, info: ObjectInfo) -> Callable[[int, int], Any]:
        """Return what gets bytes of an object; ReplacedError once another one has its key."""

        def get(start: int, end: int) -> Any:
            try:
                return self.store.get_range(info.key, start, end, info.tag)
            except RevisionMismatch:
                raise ReplacedError(
                    f"{self.store.url}/{info.key}", "the object was replaced while it was read"
                ) from None

        return get

    def blocks(self, info: ObjectInfo, first: int, last: int, ahead: int) -> Sequence[Any]:
        """Return the blocks ``first`` to ``last`` of an object; up to ``ahead`` behind them are fetched with them."""
        size, end = self.options.block_bytes, (info.size - 1) // self.options.block_bytes
        wanted = range(first, min(last + ahead, end) + 1)
        found: dict[int, Any] = {}
        with self._mutex:
            for number in wanted:
                block = self._blocks.get((info.key, info.tag.e_tag, number))
                if block is not None:
                    self._blocks.move_to_end((info.key, info.tag.e_tag, number))
                    found[number] = block
        missing = [number for number in wanted if number not in found]
        if not any(number <= last for number in missing):
            return [found[number] for number in range(first, last + 1)]  # what is ahead can wait
        get = self.range_of(info)

        def fetch(number: int) -> Any:
            return get(number * size, min((number + 1) * size, info.size))

        fetched = map(fetch, missing) if len(missing) == 1 else self.pool.map(fetch, missing)
        for number, block in zip(missing, fetched, strict=True):
            found[number] = block
            self._keep((info.key, info.tag.e_tag, number), block)
        return [found[number] for number in range(first, last + 1)]

    def _keep(self, key: tuple[str, str | None, int], block: Any) -> None:
        with self._mutex:
            if key not in self._blocks:
                self._kept_bytes += len(memoryview(block))
            self._blocks[key] = block
            while self._kept_bytes > self.options.cache_bytes and len(self._blocks) > 1:
                _, old = self._blocks.popitem(last=False)
                self._kept_bytes -= len(memoryview(old))

    def _find(self, key: str) -> ObjectInfo | None:
        with self._mutex:
            known = self._known.get(key)
        if known is not None and time.monotonic() - known[1] < LISTING_SECONDS:
            return known[0]
        info = self.store.head(key)
        with self._mutex:
            if info is None:
                self._known.pop(key, None)
            else:
                self._known[key] = info, time.monotonic()
        return info

    def _key(self, path: str) -> str:
        if not path.startswith(self.root):
            raise FileNotFoundError(errno.ENOENT, f"not below {self.root}", path)
        parts = [part for part in path[len(self.root) :].split("/") if part not in ("", ".")]
        if ".." in parts:
            raise FileNotFoundError(errno.ENOENT, "a path of objects has no ..", path)
        return "/".join(parts)


def _stat(info: ObjectInfo) -> Stat:
    version = f"{info.tag.e_tag}/{info.tag.version}/{info.size}".encode()
    return Stat(info.size, False, (zlib.crc32(info.key.encode()), zlib.crc32(version)), info.modified_ns)
