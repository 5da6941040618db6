"""The twin of foldindex.pyx: a dict from key to the offset of its put record."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of
from penstock.kernel.twin.pgss import CLEAN, CURSOR, PUT, Rec, key_at, murmur, parse

Int64 = NDArray[np.int64]


class Fold:
    """The live keys of a PGSS log."""

    def __init__(self) -> None:
        self._view = memoryview(b"")
        self._keys: dict[bytes, int] = {}
        self.size = self.live_bytes = self.cursors = self.generation = self.digest = self.collisions = 0
        self.redundant = False
        self.cursor = b""

    @property
    def count(self) -> int:
        """How many keys live."""
        return len(self._keys)

    @property
    def sorted(self) -> int:
        """Nothing is kept in order here."""
        return 0

    @property
    def unsorted(self) -> int:
        """Nothing is kept in order here, so nothing waits for it."""
        return 0

    def attach(self, buffer: Any, size: int) -> None:
        """Take ``size`` bytes of ``buffer`` as the log."""
        view = view_of(buffer)
        if not 0 <= size <= len(view):
            raise ValueError(f"{size} bytes of a buffer of {len(view)}")
        self._view, self.size = view, size

    def index(self, start: int, check: bool) -> tuple[int, int, int]:
        """Replay from ``start`` to the end; return (where it stopped, status, detail)."""
        if not 0 <= start <= self.size:
            raise ValueError(f"cannot replay from {start} of {self.size} bytes")
        at = start
        while at < self.size:
            record = parse(self._view, self.size, at, check)
            if record.status != CLEAN:
                return at, record.status, record.detail
            self._replay(at, record)
            at += record.total
        return at, CLEAN, 0

    def _replay(self, at: int, record: Rec) -> None:
        if record.kind == CURSOR:
            self.cursors += 1
            self.redundant |= bool(self.cursor)
            self.cursor = bytes(self._view[record.version : record.version + record.version_len])
            return
        key = key_at(self._view, at)
        old = self._keys.pop(key, None) if record.kind != PUT else self._keys.get(key)
        self.redundant |= old is not None or record.kind != PUT
        if old is not None:
            self._account(old, -1)
        if record.kind == PUT:
            self._keys[key] = at
            self._account(at, 1)

    def _account(self, at: int, sign: int) -> None:
        total = parse(self._view, self.size, at, False).total
        self.live_bytes += sign * total
        self.digest = (self.digest + sign * murmur(bytes(self._view[at + 5 : at + total]))) % (1 << 128)

    def find(self, key: bytes) -> int:
        """Return the offset of the put record of a key, or -1."""
        return self._keys.get(key, -1)

    def read(self, at: int) -> tuple[bytes, bytes, bytes]:
        """Return (key, value, version) of the put record at an offset."""
        record = parse(self._view, self.size, at, False)
        if not 0 <= at < self.size or record.status != CLEAN or record.kind != PUT:
            raise ValueError(f"no put record at {at}")
        return (
            key_at(self._view, at),
            bytes(self._view[record.value : record.value + record.value_len]),
            bytes(self._view[record.version : record.version + record.version_len]),
        )

    def select(self, prefix: bytes) -> Int64:
        """Return the offsets of the live records whose key begins with ``prefix``, in key order."""
        return np.array([self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)], np.int64)

    def live(self) -> tuple[NDArray[np.uint32], Int64, int]:
        """Return (slots, offsets, how many of them are in key order) of all live records."""
        return np.arange(self.count, dtype=np.uint32), np.array(list(self._keys.values()), np.int64), 0

    def live_part(self, in_order: bool, start: int, stop: int, below: int) -> Int64:
        """Return the offsets below ``below`` of the live records from ``start`` to ``stop`` of one of the two lists."""
        if not 0 <= start <= stop:
            raise ValueError(f"no part from {start} to {stop}")
        found = [] if in_order or start else list(self._keys.values())  # there is one list, and one part of it
        return np.array([at for at in found if at < below], np.int64)

    def adopt(self, slots: NDArray[np.uint32]) -> None:  # noqa: ARG002 - there is no order to keep
        """Nothing to do: see unsorted."""
        self.generation += 1
