"""A disk that fails calls on demand and forgets what no sync protected.

It wraps another disk and remembers, file by file, the bytes of the last sync, and folder by folder the
names of the last ``sync_folder``.  ``cut_power`` then leaves what a real device might: names as of some
moment since their last sync, in the order they were made, and of every unsynced page either the old
bytes or the new ones, in any mixture.  Bytes written through a mapping count, because the wrapped file
is looked at when the power goes.  Handles opened before the cut fail from there on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from penstock.disk.face import Disk, File, Latch, Lock, Stat
from penstock.disk.memory import Relock
from penstock.disk.posix import folder_of
from penstock.kernel import Mapping

__all__ = ["FaultyDisk"]

PAGE = 4096
Names = dict[str, tuple[int, int]]


class FaultyFile:
    """A file of a FaultyDisk."""

    def __init__(self, disk: FaultyDisk, file: File) -> None:
        self._disk, self._file, self._boot = disk, file, disk.boots
        self.path = file.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def stat(self) -> Stat:
        """Return what is known of the open file."""
        return self._file.stat()

    def read_at(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``."""
        with self._disk.calling("read_at", self.path, self._boot):
            return self._file.read_at(offset, length)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset``."""
        with self._disk.calling("read_into", self.path, self._boot):
            return self._file.read_into(offset, target)

    def map(self, offset: int, length: int, *, writable: bool = False) -> Mapping:
        """Return those bytes as memory."""
        with self._disk.calling("map", self.path, self._boot):
            return self._file.map(offset, length, writable=writable)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``."""
        with self._disk.calling("write_at", self.path, self._boot):
            self._file.write_at(offset, data)

    def write_many_at(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        """Write all chunks one after another."""
        with self._disk.calling("write_many_at", self.path, self._boot):
            self._file.write_many_at(offset, chunks)

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        with self._disk.calling("truncate", self.path, self._boot):
            self._file.truncate(size)

    def allocate(self, offset: int, length: int) -> None:
        """Give those bytes room on the device."""
        with self._disk.calling("allocate", self.path, self._boot):
            self._file.allocate(offset, length)

    def sync(self) -> None:
        """Remember the bytes as they are now."""
        with self._disk.calling("sync", self.path, self._boot):
            self._file.sync()
            self._disk.remember(self._file)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class FaultyDisk:
    """A disk that fails on demand and forgets what no sync protected.

    >>> from penstock.disk import MemoryDisk
    >>> disk = FaultyDisk(MemoryDisk())
    >>> with disk.create("a") as file:
    ...     file.write_at(0, b"kept"); file.sync(); disk.sync_folder("."); file.write_at(0, b"lost")
    >>> disk.cut_power(keep=0)
    >>> disk.open("a").read_at(0, 9)
    b'kept'
    >>> disk.fail("sync", OSError(5, "Input/output error"))
    >>> disk.modify("a").sync()
    Traceback (most recent call last):
    OSError: [Errno 5] Input/output error
    """

    def __init__(self, inner: Disk) -> None:
        self._inner = inner
        self._mutex = threading.RLock()
        self._synced: dict[tuple[int, int], bytes] = {}
        self._held: dict[tuple[int, int], File] = {}  # keeps unlinked files readable till the cut
        self._names: dict[str, Names] = {}  # folder -> names at its last sync
        self._changes: dict[str, list[Names]] = {}  # folder -> names after each change since
        self._faults: list[tuple[str, str, int, BaseException]] = []
        self.boots = 0
        """How often the power was cut."""
        self.calls: list[tuple[str, str]] = []
        """Every call that reached the disk: (operation, path)."""
        self.on_call: Callable[[str, str], None] | None = None
        """Called before each operation; what it raises fails the call."""

    # --- Faults

    def fail(self, operation: str, error: BaseException, *, path: str = "", after: int = 0) -> None:
        """Let one call of ``operation`` fail, after that many have passed; ``path`` may be a part of it."""
        self._faults.append((operation, path, after, error))

    @contextlib.contextmanager
    def calling(self, operation: str, path: str, boot: int | None = None) -> Iterator[None]:
        """Note a call and keep the power on during it; fail it if that was asked for, or if its handle is gone."""
        with self._mutex:
            if boot is not None and boot != self.boots:
                raise OSError(errno.EIO, "opened before the power cut", path)
            self.calls.append((operation, path))
            if self.on_call is not None:
                self.on_call(operation, path)
            for index, (wanted, part, after, error) in enumerate(self._faults):
                if wanted == operation and part in path:
                    if after:
                        self._faults[index] = (wanted, part, after - 1, error)
                        continue
                    del self._faults[index]
                    raise error
            yield

    def remember(self, file: File) -> None:
        """Take the bytes of a file as safe."""
        with self._mutex:
            found = file.stat()
            self._synced[found.identity] = file.read_at(0, found.size)

    def cut_power(self, *, seed: int = 0, keep: float = 0.5) -> None:
        """Lose power: keep each unsynced page, and each later name, with the probability ``keep``.

        Handles opened before fail from here on.  Threads do not: whoever runs some stops them before.
        """
        rng = random.Random(seed)
        with self._mutex:
            self.boots += 1
            now = {folder: self._scan(folder) for folder in sorted(self._known())}
            contents = self._contents(rng, keep)
            for folder, names in now.items():
                survivors = self._surviving_names(folder, names, rng, keep)
                for name in names:
                    self._inner.remove(f"{folder}/{name}")
                for name, identity in survivors.items():
                    with self._inner.create(f"{folder}/{name}") as file:
                        file.write_at(0, contents.get(identity, b""))
            for file in self._held.values():
                file.close()
            self._held.clear()
            self._synced.clear()
            self._changes.clear()
            for folder in now:
                self._names[folder] = self._scan(folder)
                for name in self._names[folder]:
                    with self._inner.modify(f"{folder}/{name}") as file:
                        self.remember(file)

    # --- The disk

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        with self.calling("list", folder):
            return self._inner.list(folder)

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None."""
        return self._inner.stat(path)

    def open(self, path: str) -> FaultyFile:
        """Open an existing file for reading."""
        with self.calling("open", path):
            return FaultyFile(self, self._inner.modify(path))

    def create(self, path: str) -> FaultyFile:
        """Create a file that must not exist."""
        with self.calling("create", path):
            with self._changing(path):
                file = self._inner.create(path)
            self._hold(path)
            return FaultyFile(self, file)

    def modify(self, path: str) -> FaultyFile:
        """Open an existing file for writing."""
        with self.calling("modify", path):
            self._hold(path)
            return FaultyFile(self, self._inner.modify(path))

    def rename(self, path: str, target: str) -> None:
        """Give a file another name, replacing what has it."""
        with self.calling("rename", path), self._changing(path), self._changing(target):
            self._inner.rename(path, target)

    def exchange(self, path: str, other: str) -> None:
        """Let two files have each other's name."""
        with self.calling("exchange", path), self._changing(path):
            self._inner.exchange(path, other)

    def link(self, path: str, target: str) -> None:
        """Give a file a second name."""
        with self.calling("link", path), self._changing(target):
            self._inner.link(path, target)

    def remove(self, path: str) -> None:
        """Unlink a file."""
        with self.calling("remove", path):
            self._hold(path)
            with self._changing(path):
                self._inner.remove(path)

    def make_folder(self, path: str) -> None:
        """Create a folder; folders themselves always survive."""
        with self.calling("make_folder", path):
            self._inner.make_folder(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        with self.calling("remove_folder", path):
            self._inner.remove_folder(path)
            self._names.pop(_norm(path), None)
            self._changes.pop(_norm(path), None)

    def sync_folder(self, path: str) -> None:
        """Take the names of a folder as safe."""
        with self.calling("sync_folder", path):
            self._inner.sync_folder(path)
            self._names[_norm(path)] = self._scan(_norm(path))
            self._changes.pop(_norm(path), None)

    def lock(self, path: str, of: str | None = None) -> Lock:
        """Take the lock file at ``path``, and what it protects."""
        with self.calling("lock", path), self._changing(path):
            return self._inner.lock(path, of)

    def latch(self, path: str, of: str | None = None) -> Latch:
        """Return the same lock for who takes it often; each time counts as a call of ``lock``."""
        return Relock(self, path, of)

    def own(self, path: str) -> Lock:
        """Take a file or folder itself."""
        with self.calling("own", path):
            return self._inner.own(path)

    def boot_id(self) -> bytes:
        """Return an id that changes with every power cut."""
        return self._inner.boot_id()[:12] + self.boots.to_bytes(4, "big")

    # --- What survives

    def _known(self) -> set[str]:
        return {*self._names, *self._changes}

    def _scan(self, folder: str) -> Names:
        names: Names = {}
        if self._inner.stat(folder) is None:
            return names
        for name in self._inner.list(folder):
            found = self._inner.stat(f"{folder}/{name}")
            if found is not None and not found.is_folder:
                names[name] = found.identity
        return names

    def _hold(self, path: str) -> None:
        """Keep a file readable until the cut, and its bytes before the first change as synced."""
        with self._mutex:
            file = self._inner.modify(path)
            identity = file.stat().identity
            if identity in self._held:
                file.close()
                return
            self._held[identity] = file
            if identity not in self._synced:
                folder, name = _norm(folder_of(path)), os.path.basename(path)
                if self._names.get(folder, {}).get(name) == identity:
                    self.remember(file)  # it was there before this disk looked

    def _changing(self, path: str) -> _Change:
        return _Change(self, _norm(folder_of(path)))

    def _surviving_names(self, folder: str, now: Names, rng: random.Random, keep: float) -> Names:
        history = [self._names.get(folder, {}), *self._changes.get(folder, [])]
        last = 0
        while last + 1 < len(history) and rng.random() < keep:
            last += 1
        return history[last] if self._changes.get(folder) else now

    def _contents(self, rng: random.Random, keep: float) -> dict[tuple[int, int], bytes]:
        contents = dict(self._synced)
        for identity, file in self._held.items():
            new = file.read_at(0, file.stat().size)
            old = self._synced.get(identity, b"")
            size = len(new) if rng.random() < keep else len(old)
            mixed = bytearray(old[:size].ljust(size, b"\0"))
            for start in range(0, size, PAGE):
                if rng.random() < keep:
                    page = new[start : min(start + PAGE, size)]
                    mixed[start : start + len(page)] = page
            contents[identity] = bytes(mixed)
        return contents


class _Change:
    """Notes the names of a folder before the first and after every change."""

    def __init__(self, disk: FaultyDisk, folder: str) -> None:
        self._disk, self._folder = disk, folder

    def __enter__(self) -> None:
        self._disk._mutex.acquire()
        if self._folder not in self._disk._names:
            self._disk._names[self._folder] = self._disk._scan(self._folder)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            history = self._disk._changes.setdefault(self._folder, [])
            history.append(self._disk._scan(self._folder))
        self._disk._mutex.release()


def _norm(path: str) -> str:
    return os.path.normpath(path)
