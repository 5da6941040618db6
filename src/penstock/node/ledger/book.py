"""What the ledger remembers, in one store: totals of logs, the figures of each hour, when each seam was last right.

    log/<path>            LogTotal
    base/<seam>           where a seam's own count begins, in records of its log
    hour/<seam>/<hour>    Figures at the first look of that hour (hours since 1970)
    right/<seam>          Right: the last look at which it added up
    wrong/<seam>          Wrong: the alarm, from the first look at which it did not

Everything here can be thrown away: the next look counts the logs again, and only what retention took meanwhile is not
known any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from typing import Any, Final, Self, TypeVar

import msgspec

from penstock.disk import disk_for
from penstock.errors import CorruptionError
from penstock.node.ledger.seams import FOLDER
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor

__all__ = ["Book", "Figures", "Right", "Wrong"]

_log = logging.getLogger("penstock.node")

FILE: Final = "book.snap"
T = TypeVar("T")


class Figures(msgspec.Struct, frozen=True):
    """The figures of a seam since its log began.

    >>> Figures(10, 7, 2, {"expired": 1}).difference
    0
    """

    came: int = 0
    went: int = 0
    waiting: int = 0
    lost: dict[str, int] = {}

    @property
    def difference(self) -> int:
        """What came and is accounted for nowhere; below zero: more went on than came."""
        return self.came - self.went - self.waiting - sum(self.lost.values())

    def since(self, before: Figures) -> Figures:
        """Return the figures of the time between: what waited at its beginning came into it.

        >>> Figures(10, 9, 1).since(Figures(4, 2, 2))
        Figures(came=8, went=7, waiting=1, lost={})
        """
        lost = {reason: count - before.lost.get(reason, 0) for reason, count in self.lost.items()}
        return Figures(
            self.came - before.came + before.waiting,
            self.went - before.went,
            self.waiting,
            {reason: count for reason, count in lost.items() if count},
        )


class Right(msgspec.Struct, frozen=True):
    """When a seam added up: the time, and where its log was.

    >>> Right(0, 80, 0).position
    80
    """

    at_ns: int
    position: int
    came: int


class Wrong(msgspec.Struct, frozen=True):
    """Since when a seam does not add up, and which span of its log is in question.

    >>> Wrong(0, 80, 1, 160, 3).difference
    3
    """

    after_ns: int
    """When it was right for the last time."""
    first: int
    seen_ns: int
    next: int
    difference: int


class Book:
    """The store of the ledger; opened for reading it changes nothing.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Book(folder.name) as book:
    ...     book.put("right/ingest:a", Right(1, 2, 3)); book.save()
    >>> with Book(folder.name, read_only=True) as book:
    ...     book.get("right/ingest:a", Right)
    Right(at_ns=1, position=2, came=3)
    >>> folder.cleanup()
    """

    def __init__(self, data: str, *, read_only: bool = False) -> None:
        self.data = data
        folder = os.path.join(data, FOLDER)
        path = os.path.join(folder, FILE)
        self._read_only, self._changes = read_only, dict[str, bytes | None]()
        self._store: AppendLogStore | None = None
        if read_only:
            with contextlib.suppress(FileNotFoundError, CorruptionError):  # everything is counted now
                self._store = AppendLogStore.open(path, read_only=True)
            return
        disk = disk_for(folder)
        disk.make_folder(folder)
        try:
            self._store = AppendLogStore.open(path)
        except CorruptionError as exc:
            _log.error("ledger: %s; it is kept as %s.bad, and everything is counted again", exc, path)
            disk.rename(path, f"{path}.bad")
            if disk.stat(f"{path}.penstock-mark") is not None:
                disk.remove(f"{path}.penstock-mark")
            self._store = AppendLogStore.open(path)

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return what is remembered under a key."""
        if key in self._changes:
            value: Any = self._changes[key]
        else:
            entry = None if self._store is None else self._store.get(key)
            value = None if entry is None else entry.value
        if value is None:
            return None
        try:
            return msgspec.msgpack.decode(value, type=kind)
        except msgspec.MsgspecError as exc:
            raise CorruptionError(self.path, 0, f"{key}: {exc}") from None

    def put(self, key: str, value: object) -> None:
        """Remember something; ``save`` keeps it."""
        self._changes[key] = msgspec.msgpack.encode(value)

    def forget(self, key: str) -> None:
        """Remember it no more."""
        if key in self._changes or self.get(key, msgspec.Raw) is not None:
            self._changes[key] = None

    def keys(self, prefix: str) -> Iterable[str]:
        """Return the keys that begin so, in order."""
        return [] if self._store is None else list(self._store.keys(prefix))

    def save(self) -> None:
        """Keep all changes, together."""
        if self._read_only or self._store is None or not self._changes:
            return
        updates = [
            KvUpdate.delete(key) if value is None else KvUpdate.put(key, value) for key, value in self._changes.items()
        ]
        self._store.apply(updates, WatchCursor.of(1))
        self._changes.clear()

    @property
    def path(self) -> str:
        """Where it is kept."""
        return "" if self._store is None else self._store.path

    def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
