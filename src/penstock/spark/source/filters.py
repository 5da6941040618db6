"""What a reader is told to leave out: nodes, channels, kinds, positions and times.  Pure.

These come from options of the source and not from Spark's own conditions, because PySpark 4.3 mixes up the
conditions of several queries on one DataFrame: docs/decisions/123-filters.md.
"""

from __future__ import annotations

import re
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch

__all__ = ["Filters"]

TOP: Final = (1 << 63) - 1


class NamedChannel(Protocol):
    """What of a channel is asked: its name among those that are read, its name on its node, and its node."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def label(self) -> str:
        """What the column ``channel`` says."""

    @property
    def node(self) -> str | None:
        """What the column ``node`` says."""


class Filters(msgspec.Struct, frozen=True):
    """Which records are read: all of them unless something is named.

    ``channels`` and ``nodes`` are names; one that ends with ``*`` stands for every name that begins so.  ``pattern`` is
    a regular expression for the whole name.  ``low`` and ``high`` are the lowest and the highest position, ``since_ns``
    the first time and ``until_ns`` the one behind the last.

    >>> Filters(channels=("site/*",)).channel_passes("lab/ticks")
    False
    """

    channels: tuple[str, ...] = ()
    pattern: str = ""
    kinds: tuple[int, ...] = ()
    low: int = 0
    high: int = TOP
    nodes: tuple[str, ...] = ()
    since_ns: int | None = None
    until_ns: int | None = None

    def channel_passes(self, name: str) -> bool:
        """Whether the channel of this name is read."""
        if self.pattern and re.fullmatch(self.pattern, name) is None:
            return False
        return not self.channels or _named(name, self.channels)

    def takes(self, channel: NamedChannel) -> bool:
        """Whether a channel is read: by its own name, or by that of its node and its own.

        >>> from penstock.spark.source.plan import SourceChannel
        >>> Filters(nodes=("edge-1",)).takes(SourceChannel("edge-2/a", "s3://b/edge-2/a", "xchannel", "id", "edge-2"))
        False
        """
        if self.nodes and (channel.node is None or not _named(channel.node, self.nodes)):
            return False
        return self.channel_passes(channel.name) or self.channel_passes(channel.label)

    @property
    def by_time(self) -> bool:
        """Whether times are asked for."""
        return self.since_ns is not None or self.until_ns is not None

    def apply(self, batch: Batch) -> Batch:
        """Return the records that are wanted.

        >>> batch = Batch.of([b"a", b"b", b"c"], kinds=[1, 2, 1])
        >>> Filters(kinds=(1,), low=1).apply(batch).to_payloads()
        [b'c']
        """
        keep = np.ones(len(batch), np.bool_)
        if self.low > 0 or self.high < TOP:
            keep &= (batch.positions >= self.low) & (batch.positions <= self.high)
        if self.by_time:  # a format that keeps no time has no record of any
            keep &= False if batch.timestamps is None else self._in_time(batch.timestamps)
        if self.kinds:  # a format without kinds has no record of any
            keep &= False if batch.kinds is None else np.isin(batch.kinds, np.array(self.kinds, np.int64))
        return batch if keep.all() else batch.filter(keep)

    def _in_time(self, times: NDArray[Any]) -> NDArray[np.bool_]:
        since, until = self.since_ns or 0, self.until_ns
        keep: NDArray[np.bool_] = times >= np.uint64(max(since, 0))
        return keep if until is None else keep & (times < np.uint64(max(until, 0)))


def _named(name: str, wanted: tuple[str, ...]) -> bool:
    return any(name.startswith(item[:-1]) if item.endswith("*") else name == item for item in wanted)
