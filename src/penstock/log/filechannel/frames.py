"""Many payloads on their way to being frames, made a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.errors import OptionsError
from penstock.log.columns import columns_of
from penstock.log.filechannel.format import FRAME_HEAD, LARGEST

__all__ = ["Frames"]


class Frames:
    """The frames of a list of bytes, an Arrow array or a Batch.

    ``ends`` says where each frame ends in the run of all.  What is not longer than ``chunk`` is made here, before the
    caller takes a lock; a longer run is made while it is written, so that it never lies in memory as a whole.

    >>> frames = Frames([b"one", b"two"], 1 << 20)
    >>> frames.ends.tolist(), [len(part) for part in frames.parts(0, 2)]
    ([11, 22], [22])
    """

    def __init__(self, payloads: Any, chunk: int) -> None:
        self._chunk = chunk
        self._run: memoryview | None = None
        self._make: Callable[[int, int, NDArray[np.int64]], bytes]
        if isinstance(payloads, list):
            ends = np.empty(len(payloads), np.int64)
            total = kernel.frame_ends(payloads, ends)
            if total < 0:  # other things than bytes: as bytes from here on
                payloads = [bytes(memoryview(item)) for item in payloads]
                total = kernel.frame_ends(payloads, ends)
            elif total > chunk:
                payloads = list(payloads)  # whatever others do to theirs meanwhile
            self._make = lambda start, stop, room: kernel.encode_list(payloads[start:stop], room)
        else:
            columns = columns_of(payloads)
            data, offsets, lengths = columns.data, columns.offsets, columns.lengths
            kernel.total_bytes(len(data), offsets, lengths)  # refuses what lies outside
            if len(lengths) and lengths.max() > LARGEST:  # refused before the first of them is written
                raise OptionsError(f"a message of {lengths.max()} bytes is too large: a frame holds at most {LARGEST}")
            ends = np.cumsum(lengths + FRAME_HEAD)
            total = int(ends[-1]) if len(ends) else 0
            self._make = lambda start, stop, room: kernel.encode_spans(
                data, offsets[start:stop], lengths[start:stop], room
            )
        if 0 < total <= chunk:
            self._run = memoryview(self._make(0, len(ends), ends))
        self.ends: NDArray[np.int64] = ends

    def parts(self, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Yield the frames from number ``start`` to ``stop`` in runs of about a chunk."""
        ends = self.ends
        done = int(ends[start - 1]) if start else 0
        if self._run is not None:
            yield self._run[done : int(ends[stop - 1])]
            return
        while start < stop:
            until = min(max(int(np.searchsorted(ends, done + self._chunk, "right")), start + 1), stop)
            yield self._make(start, until, np.empty(until - start, np.int64))
            start, done = until, int(ends[until - 1])
