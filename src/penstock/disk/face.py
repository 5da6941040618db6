"""What a disk is: two small protocols, one to read and one to write.

Whatever can list, stat and open for reading can hold logs for readers (a folder, memory, an object
store); writers need the rest.  Paths are strings with ``/``; a folder is named without a trailing slash.
Errors are OSError as the operating system words them, the path included.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from penstock.kernel import Mapping

__all__ = ["Stat", "ReadFile", "File", "ReadDisk", "Disk", "Lock", "Latch"]


class Stat(msgspec.Struct, frozen=True):
    """What a disk knows of a name without opening it.

    ``identity`` stays the same while the file is renamed or written to, and differs between two files
    that had the same name one after the other.

    >>> Stat(size=4096, is_folder=False, identity=(1, 77), modified_ns=0).size
    4096
    """

    size: int
    is_folder: bool
    identity: tuple[int, int]
    modified_ns: int


class ReadFile(Protocol):
    """A file open for reading.  Every method may be called from any thread."""

    path: str

    def stat(self) -> Stat:
        """Return what is known of the open file, also after it was renamed or unlinked."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``: fewer only at the end of the file."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset``; return how much there was."""

    def map(self, offset: int, length: int, *, writable: bool = False) -> Mapping:
        """Return those bytes as memory; it stays valid after the file is closed or unlinked.

        A disk need not be able to: io.UnsupportedOperation.  Who only reads asks ``disk.view_of``, which then reads.
        """

    def close(self) -> None:
        """Let go of the file.  Mappings stay."""

    def __enter__(self) -> Self:
        """Return the file."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""


class File(ReadFile, Protocol):
    """A file open for reading and writing."""

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``."""

    def write_many_at(self, offset: int, chunks: Sequence[bytes | memoryview]) -> None:
        """Write all chunks one after another, starting at ``offset``."""

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""

    def allocate(self, offset: int, length: int) -> None:
        """Give those bytes room on the device, extending the file with zeros, or fail and change nothing."""

    def sync(self) -> None:
        """Return when the bytes and the size survive a power cut, those written through a map included."""


class Lock(Protocol):
    """A lock that is held until it is released or its process ends."""

    def release(self) -> None:
        """Let someone else have it."""


class Latch(Protocol):
    """A lock file that stays open, to be taken and let go many times by one thread at a time."""

    def take(self) -> bool:
        """Take the lock; False if someone has it.  FileNotFoundError when its folder is gone."""

    def release(self) -> None:
        """Let someone else have it.  The file stays open."""

    def close(self) -> None:
        """Let go of the file, and with it of the lock; in the child of a fork, of the child's share in it."""


class ReadDisk(Protocol):
    """A disk to read from."""

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""

    def stat(self, path: str) -> Stat | None:
        """Return what is known of a name, or None when nothing is there."""

    def open(self, path: str) -> ReadFile:
        """Open an existing file for reading."""


class Disk(ReadDisk, Protocol):
    """A disk to read from and write to."""

    def create(self, path: str) -> File:
        """Create a file that must not exist, open for writing."""

    def modify(self, path: str) -> File:
        """Open an existing file for writing."""

    def rename(self, path: str, target: str) -> None:
        """Give a file another name, replacing what has it."""

    def exchange(self, path: str, other: str) -> None:
        """Let two files have each other's name, in one step; UnsupportedOperation where that cannot be done."""

    def link(self, path: str, target: str) -> None:
        """Give a file a second name; FileExistsError if something has it."""

    def remove(self, path: str) -> None:
        """Unlink a file."""

    def make_folder(self, path: str) -> None:
        """Create a folder; fine if it is there."""

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder survive a power cut."""

    def lock(self, path: str, of: str | None = None) -> Lock:
        """Take the lock file at ``path``, created if need be; LockedError if someone has it.

        ``of`` is the file or folder that it protects, if that is there: it is taken too, as ``own`` does.
        """

    def latch(self, path: str, of: str | None = None) -> Latch:
        """Return the same lock for who takes it often; nobody has it yet."""

    def own(self, path: str) -> Lock:
        """Take a file or folder itself, whatever name it is reached by; LockedError if someone has it."""

    def boot_id(self) -> bytes:
        """Return 16 bytes that change with every start of the machine."""
