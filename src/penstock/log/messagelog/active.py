"""The segment being written: its two files and what goes into its index."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.disk import File
from penstock.log.messagelog.format import INDEX_ENTRY, INDEX_EVERY
from penstock.log.messagelog.recover import SegmentState

__all__ = ["ActiveSegment"]

logger = logging.getLogger(__name__)

NO_INDEX: Final = np.empty(0, np.uint8)


class ActiveSegment:
    """The segment being written.  Used under the lock of its writer.

    ``used`` bytes of the index file are index entries, ``capacity`` is how many there may be; ``since`` bytes were
    appended since the last of them.
    """

    def __init__(self, state: SegmentState, log: File, index: File, used: int, since: int, capacity: int) -> None:
        self.state, self.log, self.index = state, log, index
        self.used, self.since, self.capacity = used, since, capacity
        self.identity = log.stat().identity
        """Which file it is, whatever has its name."""
        self.sealed = False

    @property
    def due(self) -> bool:
        """Whether the next entry goes into the index."""
        return self.state.size == 0 or self.since >= INDEX_EVERY

    def index_entry(self, seq: int) -> bytes:
        """Return the index entry of the next entry, empty if it is not its turn or the index is full."""
        if not self.due or self.used >= self.capacity:
            return b""
        relative = (seq - self.state.number) & 0xFFFFFFFF
        return relative.to_bytes(4, "little") + self.state.size.to_bytes(8, "little")

    def index_room(self, length: int) -> NDArray[np.uint8]:
        """Return room for the index entries that ``length`` more bytes can bring."""
        most = min(length // INDEX_EVERY + 2, (self.capacity - self.used) // INDEX_ENTRY.itemsize)
        return np.zeros(most * INDEX_ENTRY.itemsize, np.uint8) if most > 0 else NO_INDEX

    def account(self, length: int, indexed: bytes, last_seq: int, since: int) -> None:
        """Take note of entries that were written, and write their index entries."""
        if indexed:
            try:
                self.index.write_at(self.used, indexed)
                self.used += len(indexed)
            except OSError as exc:  # the entries are there: a shorter index only makes reads walk further
                logger.warning("%s: no more index entries: %s", self.index.path, exc)
                self.capacity = self.used
        self.state.size += length
        self.state.last_seq = last_seq
        self.since = since

    def seal(self) -> None:
        """Cut the index to what is used, make it durable, and let go of both files; the entries are synced before."""
        self.index.sync()
        self.index.truncate(self.used)
        self.index.sync()
        self.sealed = True
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self.log.close()
        self.index.close()
