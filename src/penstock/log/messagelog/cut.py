"""Cutting a message log into spans that are read in parallel, looking at names, sizes and indexes only.

A span may begin at any number, whether an entry has it or not.  So an index that lies makes spans uneven, and leaves
no entry out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.log.messagelog.format import MAX_POSITION
from penstock.log.messagelog.segment import Segment

__all__ = ["cut"]

FINEST_BYTES: Final = 64 << 10
"""A piece of a segment is not worth cutting below this."""


def cut(
    numbers: Sequence[int], segment_of: Callable[[int], Segment | None], start: int, end: int, span_bytes: int
) -> list[tuple[int, int]]:
    """Return where spans of about ``span_bytes`` between two numbers begin, and how long each is."""
    spans: list[tuple[int, int]] = []
    begin, held, finest = start, 0, max(span_bytes, FINEST_BYTES)
    for index, number in enumerate(numbers):
        low, high = max(number, start), min(numbers[index + 1] if index + 1 < len(numbers) else end, end)
        segment = segment_of(number) if low < high else None
        if segment is None:
            continue
        seqs, offsets, size = segment.points()
        at, bound = _known(seqs, offsets, low)[0], size
        if high == end:
            bound = min(size, _known(seqs, offsets, high - 1)[1])
        if low > begin and held + bound - at > span_bytes * 5 // 4:  # small segments are grouped
            spans.append((begin, held))
            begin, held = low, 0
        while begin >= low and bound - at > finest * 3 // 2:
            place = int(offsets.searchsorted(np.uint64(at + finest)))
            if place == len(offsets) or int(seqs[place]) >= high:
                break
            spans.append((begin, int(offsets[place]) - at))
            begin, at = int(seqs[place]), int(offsets[place])
        held += max(bound - at, 0)
    return [*spans, (begin, held)] if begin < end else spans


def _known(seqs: NDArray[np.uint64], offsets: NDArray[np.uint64], number: int) -> tuple[int, int]:
    """Return the offsets of the indexed entries around ``number``: not above it, and behind it."""
    place = int(seqs.searchsorted(np.uint64(number), "right"))
    behind = int(offsets[place]) if place < len(offsets) else MAX_POSITION
    return (int(offsets[place - 1]) if place else 0), behind
