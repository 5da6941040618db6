"""The rows of a reader's batches: the arrays that a scan fills, and what becomes of room that was not needed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.batch import Batch, Spans
from penstock.kernel import Cursor
from penstock.log.options import DEFAULT_LIMIT

__all__ = ["Rows"]

LEAST_BYTES: Final = 16  # of a record
SPAN_BYTES: Final = 1 << 30  # a batch stays within what Arrow can address
COLUMNS: Final = (np.int64, np.uint64, np.int64, np.int64, np.uint16)  # the narrow one last: all stay aligned
ROW_BYTES: Final = sum(np.dtype(kind).itemsize for kind in COLUMNS)


def columns_for(limit: int) -> tuple[Any, ...]:
    """Return room for the columns of ``limit`` records, as one block.

    Five blocks of half a megabyte would each be mapped by malloc and unmapped again, batch after batch, and the
    kernel would zero their pages every time: that cost more than the scan.
    """
    block = np.empty(limit * ROW_BYTES, np.uint8)
    columns, start = [], 0
    for kind in COLUMNS:
        end = start + limit * np.dtype(kind).itemsize
        columns.append(block[start:end].view(kind))
        start = end
    positions, timestamps, offsets, lengths, kinds = columns
    return positions, timestamps, kinds, offsets, lengths


class Rows:
    """Makes the batches of one reader, which calls it under its lock."""

    def __init__(self) -> None:
        self._room: tuple[Any, ...] | None = None  # the columns of a batch that were not filled up

    def scan(self, cursor: Cursor, limit: int) -> Batch:
        """Return the records from the cursor on, at most ``limit``."""
        if limit > DEFAULT_LIMIT:  # as many as there can be
            limit = max(DEFAULT_LIMIT, min(limit, (cursor.stop - cursor.at) // LEAST_BYTES + 1))
        room = self._room if self._room is not None and len(self._room[0]) == limit else columns_for(limit)
        self._room = None
        window = cursor.window
        count = cursor.scan(limit, SPAN_BYTES, *room)
        if count == limit:
            return _batch(cursor, window, room)
        columns = columns_for(count)  # a batch that is mostly room would keep that room: the next one gets it
        for column, filled in zip(columns, room, strict=True):
            column[:] = filled[:count]
        self._room = room if limit <= DEFAULT_LIMIT else None
        return _batch(cursor, window, columns)

    @staticmethod
    def none(cursor: Cursor) -> Batch:
        """Return a batch without records that says where the cursor is."""
        return _batch(cursor, cursor.window, columns_for(0))


def _batch(cursor: Cursor, window: Any, columns: tuple[Any, ...]) -> Batch:
    positions, timestamps, kinds, offsets, lengths = columns
    return Batch(
        window,
        positions,
        Spans(offsets, lengths),
        timestamps=timestamps,
        kinds=kinds,
        next_position=cursor.position,
    )
