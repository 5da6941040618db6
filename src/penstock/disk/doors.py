"""Which kind of thing a folder is, by the names in it: so that nobody opens it for what it is not.

Formats share a folder with nothing else.  What opens one for writing asks here first, before it makes a file; so does
what only reads, whose cursors would lie beside the data of something else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from penstock.disk.face import ReadDisk
from penstock.errors import NotFoundError, OptionsError

__all__ = ["FolderKind", "in_a_folder", "kinds_of", "refuse_folder", "refuse_foreign", "refuse_other"]

FolderKind = Literal[
    "queue",
    "message log",
    "RocksDB store",
    "LMDB store",
    "bucket",
    "data directory of channels",
    "data directory of a broker",
    "journal of a broker",
    "data directory of a node",
    "ledger",
    "artifact",
    "shipped log",
    "backup",
]

_NAMES: Final[dict[FolderKind, re.Pattern[str]]] = {
    "queue": re.compile(r"segment\.\d+(\.z|\.bad.*)?|lock", re.ASCII),
    "message log": re.compile(r"\d{20}\.(log|idx)", re.ASCII),
    "RocksDB store": re.compile(r"CURRENT|MANIFEST-\d+", re.ASCII),
    "LMDB store": re.compile(r"data\.mdb"),
    "bucket": re.compile(r"bucket\.json"),
    "data directory of channels": re.compile(r"[0-9a-f]{64}|penstock-channels-lock"),
    "data directory of a broker": re.compile(r"state\.snap|penstock-reserve"),
    "journal of a broker": re.compile(r"\d{20}\.turns", re.ASCII),
    "data directory of a node": re.compile(r"penstock-format\.json|penstock-node-lock"),
    "ledger": re.compile(r"book\.snap|seams\.json"),
    "artifact": re.compile(r"MANIFEST\.json"),
    "shipped log": re.compile(r".+\.shipped\.json|compacted\.json", re.DOTALL),
    "backup": re.compile(r"penstock-backup\.json|backup\.json"),
}
_UNWRITTEN: Final = {"penstock-id", "penstock-lock"}
"""What a message log has before its first entry."""


def kinds_of(names: Iterable[str]) -> set[FolderKind]:
    """Return what a folder with these names can be.

    >>> kinds_of(["lock", "penstock-id", "segment.0"]), kinds_of(["notes.txt"])
    ({'queue'}, set())
    """
    known = set(names)
    found: set[FolderKind] = {kind for kind, pattern in _NAMES.items() if any(map(pattern.fullmatch, known))}
    return found | {"message log"} if known >= _UNWRITTEN else found


def refuse_foreign(disk: ReadDisk, path: str, kind: FolderKind, *, holds: bool = False) -> None:
    """Raise OptionsError for a path that is no folder, or the folder of something else; fine if it is not there.

    With ``holds`` the folder is one that holds others: nothing may be kept in it itself.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk(); disk.make_folder("jobs"); disk.create("jobs/segment.0").close()
    >>> refuse_foreign(disk, "jobs", "message log")
    Traceback (most recent call last):
    penstock.errors.OptionsError: jobs: this is the folder of a queue, not of a message log
    """
    found = disk.stat(path)
    if found is None:
        return
    if not found.is_folder:
        raise OptionsError(f"{path}: this is a file, {_a(kind)} is a folder")
    others = kinds_of(disk.list(path)) - (set() if holds else {kind})
    if others:
        what = f"not one that holds {kind}s" if holds else f"not of {_a(kind)}"
        raise _is_of(path, others, what)


def refuse_other(disk: ReadDisk, path: str, kind: FolderKind) -> None:
    """Raise OptionsError for the folder of something else that is to be read as ``kind``.

    One that has files of both is read: what does not belong there was put beside it.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk(); disk.make_folder("chat"); disk.create("chat/00000000000000000001.log").close()
    >>> refuse_other(disk, "chat", "message log")
    >>> refuse_other(disk, "chat", "queue")
    Traceback (most recent call last):
    penstock.errors.OptionsError: chat: this is the folder of a message log, not of a queue
    """
    found = kinds_of(disk.list(path))
    if found and kind not in found:
        raise _is_of(path, found, f"not of {_a(kind)}")


def _is_of(path: str, kinds: set[FolderKind], what: str) -> OptionsError:
    return OptionsError(f"{path}: this is the folder of {_a(min(kinds))}, {what}")


def _a(kind: FolderKind) -> str:
    return f"{'an' if kind in ('LMDB store', 'artifact') else 'a'} {kind}"


def refuse_folder(disk: ReadDisk, path: str, kind: str) -> None:
    """Raise OptionsError for a folder in the place of something that is a file.

    >>> from penstock.disk import MemoryDisk
    >>> refuse_folder(MemoryDisk(), ".", "an append log")
    Traceback (most recent call last):
    penstock.errors.OptionsError: .: this is a folder, an append log is a file
    """
    found = disk.stat(path)
    if found is not None and found.is_folder:
        raise OptionsError(f"{path}: this is a folder, {kind} is a file")


@contextlib.contextmanager
def in_a_folder(path: str) -> Iterator[None]:
    """Let the first file or folder of something be made; NotFoundError where the folder for it is missing.

    >>> from penstock.disk import PosixDisk
    >>> with in_a_folder("/nowhere/at/all"):
    ...     PosixDisk().make_folder("/nowhere/at/all")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/at/all: the folder does not exist
    """
    try:
        yield
    except NotFoundError:
        raise
    except FileNotFoundError:
        raise NotFoundError(f"{path}: the folder does not exist") from None
