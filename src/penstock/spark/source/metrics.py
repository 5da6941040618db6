"""How a stream stands, for the progress reports of its query.

Spark shows it as ``metrics`` in the ``latestOffset`` of the source.  What is behind is counted by reading on for a
moment, not to the end: ``lag_records`` of a stream that is far behind is a lower bound, and ``lag_exact`` says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.errors import PenstockError
from penstock.log.face import LogReader
from penstock.ship import ShippedLog
from penstock.spark.source import shipped
from penstock.spark.source.bounds import times_of
from penstock.spark.source.filters import TOP
from penstock.spark.source.loss import Extent, extent_of
from penstock.spark.source.offsets import Place
from penstock.spark.source.openlogs import OpenLogs
from penstock.spark.source.plan import Advance, SourceChannel, advance

__all__ = ["StreamProgress", "count_records"]

MOST_LOOKED_AT: Final = 32
MOST_RECORDS: Final = 65_536
MOST_BYTES: Final = 8 << 20


class StreamProgress:
    """What is counted while a stream plans.

    >>> StreamProgress().metrics({}, {}, OpenLogs())["channels"]
    0
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        """Bytes of the logs that tasks were given to read so far."""
        self.behind: dict[str, tuple[int, int, Extent]] = {}
        """What was not read yet of a channel when it was last looked at."""
        self._planned: dict[str, int] = {}
        self._lost = Extent()
        self._batch: Advance | None = None

    def counted(self, done: Advance) -> None:
        """Add what a walk through one channel counted to the batch that is being planned."""
        if self._batch is None:
            self._batch = Advance(0)
        self._batch.records += done.records
        self._batch.bytes += done.bytes

    def begin(self) -> None:
        """Forget the batch before."""
        self._batch = None

    def planned(self, places: Mapping[str, Place]) -> None:
        """Note where the next batch ends."""
        self._planned = {name: place["at"] for name, place in places.items()}
        self._lost = sum((Extent.lost_in(place) for place in places.values()), Extent())

    def metrics(
        self, channels: Mapping[str, SourceChannel], ends: Mapping[str, Place], logs: OpenLogs
    ) -> dict[str, Any]:
        """Return what is to be reported; ``ends`` is where the channels end now."""
        behind = [
            (channels[name], self._planned[name], place["at"])
            for name, place in ends.items()
            if self._planned.get(name, place["at"]) < place["at"]
        ]
        behind.sort(key=lambda item: item[1] - item[2])
        records, seconds, exact, size = 0, 0.0, len(behind) <= MOST_LOOKED_AT, 0
        for channel, at, end in behind[:MOST_LOOKED_AT]:
            try:
                with logs.use(channel) as log:
                    self.behind[channel.name] = at, end, extent_of(log, at, end)
                    size += self.behind[channel.name][2].bytes
                    if isinstance(log, ShippedLog):
                        records += count_records(log, at, end, TOP)
                        continue
                    oldest = log.read(at, 1)
                    done = advance(log, at, end, MOST_RECORDS, MOST_BYTES)
                    records, exact = records + done.records, exact and done.position >= end
                    if len(oldest) and (oldest.timestamps is not None or log.content != "raw"):
                        seconds = max(seconds, time.time() - float(np.float64(times_of(oldest, log)[0]) / 1e9))
            except (PenstockError, FileNotFoundError):
                exact = False  # whoever reads it says what is wrong
        counted = self._batch
        return {
            "channels": len(channels),
            "batch_records": None if counted is None else counted.records,
            "batch_bytes": None if counted is None else counted.bytes,
            "read_bytes": self.read_bytes,
            "lag_channels": len(behind),
            "lag_records": records,
            "lag_exact": exact,
            "lag_bytes": size,
            "lag_seconds": round(seconds, 3),
            "lost_records": self._lost.records,
            "lost_bytes": self._lost.bytes,
        }


def count_records(log: LogReader, start: int, end: int, most: int) -> int:
    """Return how many records lie between two positions, up to ``most``; of a shipped log as its manifest says."""
    if isinstance(log, ShippedLog):
        return shipped.advance(log, start, end, None, None)[1]
    return advance(log, start, end, most, None, over_damage=True).records
