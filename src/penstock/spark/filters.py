"""What a reader is told to leave out: channels, kinds, and positions.  Pure.

These come from options of the source and not from Spark's own conditions, because PySpark 4.3 mixes up the
conditions of several queries on one DataFrame: docs/decisions/123-filters.md.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from penstock.batch import Batch

__all__ = ["Filters"]

TOP: Final = (1 << 63) - 1


class Filters(msgspec.Struct, frozen=True):
    """Which records are read: all of them unless something is named.

    ``channels`` are names; one that ends with ``*`` stands for every name that begins so.  ``low`` and ``high`` are the
    lowest and the highest position.

    >>> Filters(channels=("site/*",)).channel_passes("lab/ticks")
    False
    """

    channels: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()
    low: int = 0
    high: int = TOP

    def channel_passes(self, name: str) -> bool:
        """Whether the channel of this name is read."""
        return not self.channels or any(
            name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted for wanted in self.channels
        )

    def apply(self, batch: Batch) -> Batch:
        """Return the records that are wanted.

        >>> batch = Batch.of([b"a", b"b", b"c"], kinds=[1, 2, 1])
        >>> Filters(kinds=(1,), low=1).apply(batch).to_payloads()
        [b'c']
        """
        keep = np.ones(len(batch), np.bool_)
        if self.low > 0 or self.high < TOP:
            keep &= (batch.positions >= self.low) & (batch.positions <= self.high)
        if self.kinds:  # a format without kinds has no record of any
            keep &= False if batch.kinds is None else np.isin(batch.kinds, np.array(self.kinds, np.int64))
        return batch if keep.all() else batch.filter(keep)
