"""A local folder as an object store: the same layout, with fsync and a lock that obstore's own lacks.

Conditions hold between all processes of one machine that use this class.  An object is written under a hidden name,
synced and renamed, so that whoever finds it finds it whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from penstock.disk.face import Disk, Stat
from penstock.disk.objectstore import ObjectInfo, Tag
from penstock.disk.posix import PosixDisk, folder_of
from penstock.disk.wait import Backoff
from penstock.errors import AlreadyExists, LockedError, OptionsError, RevisionMismatch, Timeout, UnsupportedError

__all__ = ["FolderStore"]

LOCK: Final = ".penstock-lock"
HIDDEN: Final = ".penstock-"
LEFT: Final = re.compile(r"\.penstock-[0-9a-f]{32}", re.ASCII)
"""The name of an object that is being written."""
LEFT_SECONDS: Final = 3600.0
"""One that nobody has written to for so long is of a process that was killed."""
TURN_SECONDS: Final = 30.0
CHUNK_BYTES: Final = 1 << 20


class FolderStore:
    """The objects in a folder; it is made when the first one is written.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = FolderStore(folder.name + "/objects")
    >>> tag = store.create("a/b", b"hello")
    >>> store.get("a/b")[0], [info.key for info in store.objects()]
    (b'hello', ['a/b'])
    >>> folder.cleanup()
    """

    puts_at_once = 2  # one is written while another is synced

    def __init__(self, folder: str, disk: Disk | None = None) -> None:
        self.root = folder.rstrip("/") or "/"
        self.url = self.root
        self._disk = disk or PosixDisk()
        self._turn = threading.Lock()
        self._tidied: set[str] = set()
        self._is_link: Callable[[str], bool] | None = getattr(self._disk, "is_link", None)

    def get(self, key: str, *, most: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Return an object whole."""
        with self._disk.open(self._path(key)) as file:
            found = file.stat()
            if most is not None and found.size > most:
                raise UnsupportedError(f"{self._path(key)}: {found.size} bytes, where {most} are the most")
            return file.read_at(0, found.size), _info(key, found)

    def get_range(self, key: str, start: int, end: int, tag: Tag | None = None) -> bytes:
        """Return some bytes."""
        with self._disk.open(self._path(key)) as file:
            if tag is not None and tag != _tag(file.stat()):
                raise RevisionMismatch(f"{self._path(key)} has changed")
            return file.read_at(start, end - start)

    def stream(self, key: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield an object piece by piece."""
        with self._disk.open(self._path(key)) as file:
            at = 0
            while data := file.read_at(at, chunk_bytes):
                yield data
                at += len(data)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object."""
        found = self._disk.stat(self._path(key))
        return None if found is None or found.is_folder else _info(key, found)

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below a prefix, by name."""
        folders, objects = self.folder(prefix)
        yield from objects
        for name in folders:
            yield from self.objects(f"{prefix.strip('/')}/{name}".strip("/"))

    def folder(self, prefix: str = "") -> tuple[list[str], list[ObjectInfo]]:
        """Return what is right below a prefix."""
        prefix = prefix.strip("/")
        path = self._path(prefix) if prefix else self.root
        folders: list[str] = []
        objects: list[ObjectInfo] = []
        try:
            names = self._disk.list(path)
        except (FileNotFoundError, NotADirectoryError):
            return folders, objects
        for name in names:
            if name.startswith(HIDDEN) or (self._is_link is not None and self._is_link(f"{path}/{name}")):
                continue
            found = self._disk.stat(f"{path}/{name}")
            if found is None:
                continue  # gone since it was listed
            if found.is_folder:
                folders.append(name)
            else:
                objects.append(_info(f"{prefix}/{name}".strip("/"), found))
        return folders, objects

    def put(self, key: str, data: bytes | Iterable[Any]) -> None:
        """Write an object."""
        path = self._path(key)
        self._make_folders(folder_of(path))
        self._remove_left(folder_of(path))
        temporary = f"{folder_of(path)}/{HIDDEN}{uuid.uuid4().hex}"
        try:
            with self._disk.create(temporary) as file:
                at = 0
                chunks: Iterable[Any] = [data] if isinstance(data, bytes) else data
                for chunk in chunks:
                    view = memoryview(chunk)
                    file.write_at(at, view)
                    at += view.nbytes
                file.sync()
            self._disk.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        self._disk.sync_folder(folder_of(path))

    def create(self, key: str, data: bytes) -> Tag:
        """Write an object that is not there."""
        with self._locked():
            if self.head(key) is not None:
                raise AlreadyExists(f"{self._path(key)} exists")
            return self._write(key, data)

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        """Write an object that is still this version."""
        with self._locked():
            found = self.head(key)
            if found is None or found.tag != tag:
                raise RevisionMismatch(f"{self._path(key)} has changed")
            return self._write(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self._path(key))

    def _write(self, key: str, data: bytes) -> Tag:
        self.put(key, data)
        written = self.head(key)
        assert written is not None
        return written.tag

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise OptionsError(f"{self.root}: {key!r} is no key of an object")
        if self._is_link is not None:
            path = self.root
            for part in parts[:-1]:
                path = f"{path}/{part}"
                if self._is_link(path):
                    raise OSError(errno.ELOOP, "a symbolic link, which is not followed here", path)
        return f"{self.root}/{key}"

    def _remove_left(self, folder: str) -> None:
        """Remove what killed processes left half written in a folder, when it is first written to."""
        if folder in self._tidied:
            return
        self._tidied.add(folder)
        for name in self._disk.list(folder):
            if LEFT.fullmatch(name):
                found = self._disk.stat(f"{folder}/{name}")
                if found is not None and time.time_ns() - found.modified_ns > LEFT_SECONDS * 1e9:
                    with contextlib.suppress(OSError):
                        self._disk.remove(f"{folder}/{name}")

    def _make_folders(self, path: str) -> None:
        if self._disk.stat(path) is not None:
            return
        above = folder_of(path)
        if above != path:
            self._make_folders(above)
        self._disk.make_folder(path)
        self._disk.sync_folder(above)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._make_folders(self.root)
        held: list[Any] = []

        def take() -> bool:
            try:
                held.append(self._disk.lock(f"{self.root}/{LOCK}"))
            except LockedError:
                return False
            return True

        with self._turn:
            if not Backoff().wait(take, TURN_SECONDS):
                raise Timeout(f"{self.root}: another process has had the lock for {TURN_SECONDS:g} s")
            try:
                yield
            finally:
                held[0].release()


def _tag(found: Stat) -> Tag:
    return Tag(f"{found.identity[0]:x}-{found.identity[1]:x}-{found.modified_ns:x}-{found.size:x}")


def _info(key: str, found: Stat) -> ObjectInfo:
    if found.is_folder:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
    return ObjectInfo(key, found.size, found.modified_ns, _tag(found))
