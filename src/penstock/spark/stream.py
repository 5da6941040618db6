"""``spark.readStream.format("penstock")``: channels as a stream whose offsets are positions.

An offset is JSON that holds, for each channel, its identity and the position up to which it was read:

    {"channels": {"site/ticks": {"id": "…", "at": 4096}}}

Two more fields appear when they are needed.  ``from`` is where the batch that ends with this offset begins when it
is not where the one before ended: the channel is new, or retention overtook the reader and data loss was allowed.
``lost`` counts the positions skipped so far.  So everything a batch reads follows from the two offsets around it,
and a batch that Spark replays is the same batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.disk import PosixDisk
from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.log.face import LogReader
from penstock.log.sidecar import sidecar_of
from penstock.spark.columns import Column
from penstock.spark.export import Exporter
from penstock.spark.filters import TOP
from penstock.spark.options import SourceOptions
from penstock.spark.plan import Channel, advance, find_channels
from penstock.spark.source import partitions_of, read_partition

__all__ = ["LogStreamReader"]

logger = logging.getLogger(__name__)

Place = dict[str, Any]
Offset = dict[str, dict[str, Place]]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches by position.  It lives as long as the query; ``read`` runs elsewhere, from a copy."""

    def __init__(self, options: SourceOptions, columns: Sequence[Column], exporter: Exporter | None = None) -> None:
        self.options, self.columns, self.exporter = options, tuple(columns), exporter
        if options.filters.low > 0 or options.filters.high < TOP:
            raise OptionsError("fromPosition and toPosition are for batches: a stream has start")
        self._ceiling: dict[str, int] | None = None
        self._logs: dict[Channel, LogReader] = {}

    # --- What Spark asks on the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where a query without a checkpoint begins."""
        places: dict[str, Place] = {}
        start = self.options.start
        for channel in self._channels():
            log = self._log(channel)
            at = log.next_position if start == "latest" else log.first_position
            if isinstance(start, dict) and channel.name in start:
                at = start[channel.name]
            cursor = self._cursor(channel)
            places[channel.name] = {"id": channel.identity, "at": at if cursor is None else cursor}
        unknown = set(start) - places.keys() if isinstance(start, dict) else set()
        if unknown:
            raise OptionsError(f"start names channels that are not there: {', '.join(sorted(unknown))}")
        return {"channels": places}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return where the next batch ends: as far as there are records and the limits allow."""
        known = start["channels"]
        places: dict[str, Place] = {name: _kept(place) for name, place in known.items()}
        waiting: list[tuple[Channel, int, int]] = []
        for channel in self._channels():
            first, end = self._log(channel).first_position, self._log(channel).next_position
            if self._ceiling is not None:
                if channel.name not in self._ceiling:
                    continue  # it appeared after this run was said to read what is available now
                end = min(end, self._ceiling[channel.name])
            place = known.get(channel.name)
            if place is None:
                places[channel.name] = {"id": channel.identity, "at": first, "from": first}
                at = first
            else:
                at = self._resume(channel, place, places[channel.name], first, end)
            if at < end:
                waiting.append((channel, at, end))
        max_records, max_bytes = self._limits(limit)
        for index, (channel, at, end) in enumerate(waiting):
            if max_records is None and max_bytes is None:
                places[channel.name]["at"] = end
                continue
            left = len(waiting) - index
            with channel.open() as log:
                position, records, size = advance(
                    log,
                    at,
                    end,
                    None if max_records is None else -(-max_records // left),
                    None if max_bytes is None else -(-max_bytes // left),
                )
            places[channel.name]["at"] = position
            max_records = None if max_records is None else max_records - records
            max_bytes = None if max_bytes is None else max(max_bytes - size, 0)
            if max_records == 0 or max_bytes == 0:
                break
        return {"channels": places}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the options; where both are given, ``latestOffset`` keeps to both."""
        if self.options.max_records is not None:
            return ReadMaxRows(self.options.max_records)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return where the channels end now, for Spark's progress reports."""
        places: dict[str, Place] = {}
        for channel in self._channels():
            places[channel.name] = {"id": channel.identity, "at": self._log(channel).next_position}
        return {"channels": places}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note where the channels end: this run reads up to there and stops."""
        self._ceiling = {name: place["at"] for name, place in self.reportLatestOffset()["channels"].items()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Plan the batch between two offsets: the same ones always give the same tasks."""
        channels = {channel.name: channel for channel in self._channels()}
        bounds = []
        for name, place in sorted(end["channels"].items()):
            begin: int = place["from"] if "from" in place else start["channels"].get(name, place)["at"]
            if begin >= place["at"]:
                continue
            channel = channels.get(name)
            if channel is None:
                raise ReplacedError(name, "the channel is gone, but was to be read")
            _check_same(channel, place)
            begin = self._available(channel, begin, self._log(channel).first_position)
            bounds.append((channel, begin, place["at"]))
        return partitions_of(bounds, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task."""
        return read_partition(partition, self.options, self.columns, self.exporter)

    def commit(self, end: Offset) -> None:
        """Move the named cursor: Spark has made everything up to ``end`` durable."""
        if self.options.cursor is None:
            return
        channels = {channel.name: channel for channel in self._channels()}
        for name, place in end["channels"].items():
            channel = channels.get(name)
            if channel is not None and channel.identity == place["id"]:
                sidecar = sidecar_of(PosixDisk(), channel.path)
                try:
                    sidecar.write_cursor(self.options.cursor, place["at"])
                finally:
                    sidecar.close()

    def stop(self) -> None:
        """Let go of the logs: the query has ended."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    # --- How

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: open logs stay here."""
        return {**self.__dict__, "_logs": {}}

    def _log(self, channel: Channel) -> LogReader:
        """Return the log of a channel to be asked for its bounds; open between batches, it knows how far it looked.

        A log that was made again has another identity, and so another place here.
        """
        log = self._logs.get(channel)
        if log is None:
            log = self._logs[channel] = channel.open()
        return log

    def _channels(self) -> list[Channel]:
        channels = find_channels(self.options.paths, self.options.format)
        channels = [channel for channel in channels if self.options.filters.channel_passes(channel.name)]
        for gone in self._logs.keys() - set(channels):
            self._logs.pop(gone).close()
        return channels

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        if isinstance(limit, ReadAllAvailable):
            return None, None
        records, size = self.options.max_records, self.options.max_bytes
        if isinstance(limit, ReadMaxRows):
            records = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        return records, size

    def _resume(self, channel: Channel, before: Place, after: Place, first: int, end: int) -> int:
        """Return where a known channel goes on, noting in ``after`` what was lost."""
        _check_same(channel, before)
        at = int(before["at"])
        if at > end and self._ceiling is None:
            raise ReplacedError(channel.path, f"it ends at {end}, but was read up to {at}")
        if at < first:
            self._available(channel, at, first)
            after["from"], after["at"] = first, first
            after["lost"] = int(before.get("lost", 0)) + first - at
            return first
        return at

    def _available(self, channel: Channel, at: int, first: int) -> int:
        if at >= first:
            return at
        if self.options.fail_on_data_loss:
            raise ExpiredError(channel.path, at, first)
        logger.warning("%s: positions %d to %d are lost", channel.path, at, first)
        return first

    def _cursor(self, channel: Channel) -> int | None:
        if self.options.cursor is None:
            return None
        sidecar = sidecar_of(PosixDisk(), channel.path)
        try:
            return sidecar.read_cursor(self.options.cursor)
        finally:
            sidecar.close()


def _kept(place: Place) -> Place:
    """Return what of a place is still true of the next offset."""
    return {name: value for name, value in place.items() if name != "from"}


def _check_same(channel: Channel, place: Place) -> None:
    if place["id"] != channel.identity:
        raise ReplacedError(
            channel.path, f"its log id is {channel.identity or 'gone'}, but was {place['id'] or 'none'}"
        )
