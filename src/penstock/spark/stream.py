"""``spark.readStream.format("penstock")``: channels as a stream whose offsets are positions.

An offset is JSON that holds, for each channel, its identity and the position up to which it was read:

    {"channels": {"site/ticks": {"id": "…", "at": 4096}}}

Two more fields appear when they are needed.  ``from`` is where the batch that ends with this offset begins when it
is not where the one before ended: the channel is new, or retention overtook the reader and data loss was allowed.
``lost`` counts the positions skipped so far: what was gone when a batch was planned.  What retention takes while a task
reads is logged by that task and not counted.  So everything a batch reads follows from the two offsets around it, and a
batch that Spark replays is the same batch.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

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

MOST_OPEN: Final = 200
"""How many logs stay open between batches; a folder may hold thousands, and a process may not open as many files."""

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
        self._turn = ""  # the channel that is served first, because a limit left it out before
        self._seen: dict[str, int] = {}  # where channels ended when they were last looked at
        self._missed: dict[str, tuple[int, int]] = {}  # at the end of a batch: what was lost up to there
        self._marked: dict[tuple[str, str], int] = {}  # where the named cursors are

    # --- What Spark asks on the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where a query without a checkpoint begins."""
        places: dict[str, Place] = {}
        start = self.options.start
        for channel in self._channels():
            first, end = self._bounds(channel)
            at = end if start == "latest" else first
            if isinstance(start, dict) and channel.name in start:
                at = start[channel.name]
                _check_start(channel, at, first, end)
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
        for name, (at, lost) in self._missed.items():
            if name in known and known[name]["at"] == at:
                places[name]["lost"] = max(lost, places[name].get("lost", 0))
        waiting: list[tuple[Channel, int, int]] = []
        channels = self._channels()
        for channel in channels:
            first, end = self._bounds(channel)
            place = known.get(channel.name)
            if self._ceiling is not None and channel.name not in self._ceiling:
                continue  # it appeared after this run was said to read what is available now
            if place is None:
                places[channel.name] = {"id": channel.identity, "at": first, "from": first}
                at = first
            else:
                at = self._resume(channel, place, places[channel.name], first, end)
            if self._ceiling is not None:
                end = min(end, self._ceiling[channel.name])
            if at < end:
                waiting.append((channel, at, end))
        for name in known.keys() - {channel.name for channel in channels}:
            self._let_go(name, places[name])
        self._share(waiting, places, *self._limits(limit))
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
            places[channel.name] = {"id": channel.identity, "at": self._bounds(channel)[1]}
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
                first = place["at"]
                self._gone(name, begin, first)
            else:
                _check_same(channel, place)
                first = self._available(channel, begin, self._bounds(channel)[0])
                bounds.append((channel, first, place["at"]))
            if first > begin:
                self._missed[name] = place["at"], place.get("lost", 0) + min(first, place["at"]) - begin
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
            marked = name, place["id"]
            if channel is None or channel.identity != place["id"] or self._marked.get(marked) == place["at"]:
                continue
            with contextlib.closing(sidecar_of(PosixDisk(), channel.path)) as sidecar:
                sidecar.write_cursor(self.options.cursor, place["at"])
            self._marked[marked] = place["at"]

    def stop(self) -> None:
        """Let go of the logs: the query has ended."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    # --- How

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: open logs stay here."""
        return {**self.__dict__, "_logs": {}}

    def _bounds(self, channel: Channel) -> tuple[int, int]:
        """Return the first and the next position of a channel.

        Its log stays open between batches, if there are not too many: so it knows how far it looked.  One that was made
        again has another identity, and so another place here.
        """
        log = self._logs.get(channel)
        if log is None:
            log = channel.open()
            if len(self._logs) < MOST_OPEN:
                self._logs[channel] = log
        try:
            bounds = log.first_position, log.next_position
        finally:
            if channel not in self._logs:
                log.close()
        self._seen[channel.name] = bounds[1]
        return bounds

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

    def _share(
        self,
        waiting: Sequence[tuple[Channel, int, int]],
        places: dict[str, Place],
        max_records: int | None,
        max_bytes: int | None,
    ) -> None:
        """Move the places of the waiting channels on, as far as the limits allow.

        Each gets an equal share of what the ones before it have left.  The first that gets nothing is the first of the
        next batch, so that none waits for ever.
        """
        if max_records is None and max_bytes is None:
            for channel, _, end in waiting:
                places[channel.name]["at"] = end
            return
        first = bisect.bisect_left(waiting, self._turn, key=lambda item: item[0].name)
        left_out, taken = "", 0
        for index, (channel, at, end) in enumerate([*waiting[first:], *waiting[:first]]):
            if max_records == 0 or max_bytes == 0:
                left_out = left_out or channel.name
                break
            left = len(waiting) - index
            try:
                with channel.open() as log:
                    position, records, size = advance(
                        log,
                        at,
                        end,
                        None if max_records is None else -(-max_records // left),
                        None if max_bytes is None else -(-max_bytes // left),
                        TOP if max_bytes is None or not taken else max_bytes,
                    )
            except ExpiredError as exc:  # retention was here since the bounds were asked for
                self._skip(channel, places[channel.name], at, exc.first)
                continue
            places[channel.name]["at"] = position
            taken += records
            max_records = None if max_records is None else max_records - records
            max_bytes = None if max_bytes is None else max(max_bytes - size, 0)
            if not records:
                left_out = left_out or channel.name
        self._turn = left_out

    def _resume(self, channel: Channel, before: Place, after: Place, first: int, end: int) -> int:
        """Return where a known channel goes on, noting in ``after`` what was lost."""
        _check_same(channel, before)
        at = int(before["at"])
        if at > end:
            raise ReplacedError(channel.path, f"it ends at {end}, but was read up to {at}")
        if at < first:
            self._skip(channel, after, at, first)
        return max(at, first)

    def _skip(self, channel: Channel, place: Place, at: int, first: int) -> None:
        """Go on at ``first``, counting what is lost; or say so, if nothing may be."""
        self._available(channel, at, first)
        place["from"] = place["at"] = first
        place["lost"] = int(place.get("lost", 0)) + first - at

    def _let_go(self, name: str, place: Place) -> None:
        """Deal with a channel that is gone: if there was more of it to read, that is lost."""
        at, end = place["at"], self._seen.pop(name, 0)
        if at >= end:
            return
        self._gone(name, at, end)
        place["from"] = place["at"] = end
        place["lost"] = int(place.get("lost", 0)) + end - at

    def _gone(self, name: str, at: int, end: int) -> None:
        if self.options.fail_on_data_loss:
            raise ReplacedError(name, f"the channel is gone, and was not read from {at} to {end}")
        logger.warning("%s is gone: positions %d to %d are lost", name, at, end)

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
        with contextlib.closing(sidecar_of(PosixDisk(), channel.path)) as sidecar:
            return sidecar.read_cursor(self.options.cursor)


def _kept(place: Place) -> Place:
    """Return what of a place is still true of the next offset."""
    return {name: value for name, value in place.items() if name != "from"}


def _check_start(channel: Channel, at: int, first: int, end: int) -> None:
    """Refuse a position of the option ``start`` at which no record begins or will."""
    if at < 0 or at > end:
        raise OptionsError(f"start={at} of {channel.name}: it begins at {first} and ends at {end}")
    if first <= at < end:
        with channel.open() as log:
            log.read(at, 1)


def _check_same(channel: Channel, place: Place) -> None:
    if place["id"] != channel.identity:
        raise ReplacedError(
            channel.path, f"its log id is {channel.identity or 'gone'}, but was {place['id'] or 'none'}"
        )
