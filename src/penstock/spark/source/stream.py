"""``spark.readStream.format("penstock")``: channels as a stream whose offsets are positions.

What an offset holds is said in offsets.py.  Everything a batch reads follows from the two offsets around it, so a batch
that Spark replays is the same batch.  What retention takes while a task reads is logged by that task and not counted.

With ``failOnDataLoss=false`` the planner walks through what a batch will read: so damage is counted as well.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import time
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

from penstock.disk import disk_for
from penstock.errors import CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.fingerprint import Fingerprint, check_fingerprint, last_fingerprint
from penstock.log.sidecar import sidecar_of
from penstock.ship import ShippedLog
from penstock.spark.source import shipped
from penstock.spark.source.bounds import check_chosen, check_named, end_of, start_of
from penstock.spark.source.columns import Column
from penstock.spark.source.export import Exporter
from penstock.spark.source.filters import TOP
from penstock.spark.source.loss import Extent, extent_of, extent_of_gone
from penstock.spark.source.metrics import StreamProgress, count_records
from penstock.spark.source.offsets import Offset, Place, pack_offset, same_identity, unpack_offset
from penstock.spark.source.openlogs import OpenLogs
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.plan import Advance, SourceChannel, advance, bounds_of, find_channels
from penstock.spark.source.table import partitions_of, read_partition

__all__ = ["LogStreamReader"]

logger = logging.getLogger(__name__)

LOST: Final = ("lost", "lost_bytes")


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches by position.  It lives as long as the query; ``read`` runs elsewhere, from a copy."""

    def __init__(self, options: SourceOptions, columns: Sequence[Column], exporter: Exporter | None = None) -> None:
        self.options, self.columns, self.exporter = options, tuple(columns), exporter
        if options.cursor is not None and any(map(shipped.holds_shipped, options.paths)):
            raise OptionsError("cursor: shipped logs have none; a stream of them keeps its place in its checkpoint")
        if options.filters.low > 0 or options.filters.high < TOP:
            raise OptionsError("fromPosition and toPosition are for batches: a stream has start")
        self._ceiling: dict[str, int] | None = None
        self._logs = OpenLogs()
        self._progress = StreamProgress()
        self._looked: tuple[dict[str, Place], dict[str, SourceChannel]] | None = None  # where channels ended then
        self._batch_at = -math.inf  # when the last batch was planned
        self._turn = ""  # the channel that is served first, because a limit left it out before
        self._seen: dict[str, tuple[int, str]] = {}  # where channels ended when they were last looked at, and formats
        self._missed: dict[str, tuple[int, Place]] = {}  # at the end of a batch: what was lost up to there
        self._checked: set[str] = set()  # channels whose fingerprint was compared by this reader
        self._there: list[SourceChannel] | None = None  # what a run that ends found, until it was compared
        self._marked: dict[tuple[str, str], int] = {}  # where the named cursors are

    # --- What Spark asks on the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where a query without a checkpoint begins."""
        places: dict[str, Place] = {}
        channels = self._channels()
        check_named(self.options, (channel.name for channel in channels))
        for channel in channels:
            first, end = self._bounds(channel)
            cursor = self._cursor(channel)
            place: Place = {"id": channel.identity}
            if cursor is None:
                place["at"] = start_of(channel, self.options, first, end)
            else:
                place |= cursor
                if place["at"] > end:
                    raise ReplacedError(channel.path, f"it ends at {end}, but was read up to {place['at']}")
            places[channel.name] = place
        return pack_offset(places)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return where the next batch ends: as far as there are records and the limits allow."""
        known = unpack_offset(start)
        if self._there is not None:  # nothing that comes later is read: a name that is not there stands for nothing
            check_chosen(self.options, self._there, {part for name in known for part in (name, *name.partition("/"))})
            self._there = None
        places: dict[str, Place] = {name: _kept(place) for name, place in known.items()}
        for name, (at, lost) in self._missed.items():
            if name in known and known[name]["at"] == at:
                places[name].update(lost)
        waiting: list[tuple[SourceChannel, int, int]] = []
        channels = self._channels(fresh=self._ceiling is None)
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
            end = min(end_of(channel, self.options, first, end), self._last(channel.name))
            if at < end:
                waiting.append((channel, at, end))
            if at < end or channel.name not in self._checked:
                self._check_seen(channel, place)
        for name in known.keys() - {channel.name for channel in channels}:
            self._let_go(name, places[name])
        if self._is_too_early(waiting):
            return start
        ends = {channel.name: {"id": channel.identity, "at": self._seen[channel.name][0]} for channel in channels}
        self._looked = ends, {channel.name: channel for channel in channels}
        self._progress.begin()
        self._share(waiting, places, *self._limits(limit))
        self._progress.planned(places)
        for channel, at, _ in waiting:
            self._note_seen(channel, places[channel.name], at)
        return pack_offset(places)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the options; where both are given, ``latestOffset`` keeps to both."""
        if self.options.max_records is not None:
            return ReadMaxRows(self.options.max_records)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return where the channels end, and how the query stands, for Spark's progress reports.

        It is asked right behind ``latestOffset``, which has just looked.
        """
        places, channels = self._looked or self._ends()
        return {**pack_offset(places), "metrics": self._progress.metrics(channels, places, self._logs)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note where the channels end: this run reads up to there and stops."""
        self._there = find_channels(self.options.paths, self.options.format)
        self._ceiling = {name: place["at"] for name, place in self._ends()[0].items()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Plan the batch between two offsets: the same ones always give the same tasks."""
        channels = {channel.name: channel for channel in self._channels()}
        before, bounds = unpack_offset(start), []
        for name, place in sorted(unpack_offset(end).items()):
            begin: int = place["from"] if "from" in place else before.get(name, place)["at"]
            if begin >= place["at"]:
                continue
            channel = channels.get(name)
            if channel is None:
                lost = self._gone(name, begin, place["at"])
            else:
                _check_same(channel, place)
                self._check_seen(channel, before.get(name))
                self._check_seen(channel, place)
                with self._logs.use(channel) as log:
                    first = log.first_position
                lost = self._expired(channel, begin, first, place["at"])
                bounds.append((channel, max(begin, first), place["at"]))
            if lost:
                lost.add_to(place)
                self._missed[name] = place["at"], {key: place[key] for key in LOST if key in place}
        tasks = partitions_of(bounds, self.options)
        self._progress.read_bytes += sum(span.bytes for task in tasks for span in task.spans)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task."""
        return read_partition(partition, self.options, self.columns, self.exporter)

    def commit(self, end: Offset) -> None:
        """Move the named cursor: Spark has made everything up to ``end`` durable."""
        if self.options.cursor is None:
            return
        channels = {channel.name: channel for channel in self._channels()}
        for name, place in unpack_offset(end).items():
            channel = channels.get(name)
            if channel is None or not same_identity(place["id"], channel.identity):
                continue
            marked = name, channel.identity
            if self._marked.get(marked) == place["at"]:
                continue
            with contextlib.closing(sidecar_of(disk_for(channel.path), channel.path)) as sidecar:
                sidecar.write_cursor(self.options.cursor, place["at"], seen=_seen_of(place))
            self._marked[marked] = place["at"]

    def stop(self) -> None:
        """Let go of the logs: the query has ended."""
        self._logs.close()

    # --- How

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs: open logs and what is known of the channels stay here."""
        state = {**self.__dict__, "_logs": OpenLogs(), "_progress": StreamProgress()}
        return {
            **state,
            "_seen": {},
            "_missed": {},
            "_marked": {},
            "_ceiling": None,
            "_looked": None,
            "_checked": set(),
            "_there": None,
        }

    def _bounds(self, channel: SourceChannel) -> tuple[int, int]:
        """Return the first and the next position of a channel."""
        with self._logs.use(channel) as log:
            bounds = bounds_of(log, lenient=not self.options.fail_on_data_loss)
        self._seen[channel.name] = bounds[1], channel.format
        return bounds

    def _channels(self, *, fresh: bool = False) -> list[SourceChannel]:
        channels = find_channels(self.options.paths, self.options.format, fresh=fresh)
        channels = [channel for channel in channels if self.options.filters.takes(channel)]
        self._logs.keep(channels)
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
        waiting: Sequence[tuple[SourceChannel, int, int]],
        places: dict[str, Place],
        max_records: int | None,
        max_bytes: int | None,
    ) -> None:
        """Move the places of the waiting channels on, as far as the limits allow.

        Each gets an equal share of what the ones before it have left.  The first that gets nothing is the first of the
        next batch, so that none waits for ever.
        """
        lenient = not self.options.fail_on_data_loss
        if max_records is None and max_bytes is None and not lenient:
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
                share = (
                    None if max_records is None else -(-max_records // left),
                    None if max_bytes is None else -(-max_bytes // left),
                )
                with channel.open(on_damage=None if channel.node is not None else "raise") as log:
                    if isinstance(log, ShippedLog):  # by its manifest: what was shipped was whole
                        done = Advance(*shipped.advance(log, at, end, *share))
                    else:
                        first_bytes = TOP if max_bytes is None or not taken else max_bytes
                        done = advance(log, at, end, *share, first_bytes, over_damage=lenient)
            except ExpiredError as exc:  # retention was here since the bounds were asked for
                self._skip(channel, places[channel.name], at, exc.first)
                continue
            places[channel.name]["at"] = done.position
            if done.lost:
                logger.warning("%s: %s are damaged and passed over", channel.path, done.lost)
                done.lost.add_to(places[channel.name])
            self._progress.counted(done)
            taken += done.records
            max_records = None if max_records is None else max(max_records - done.records, 0)
            max_bytes = None if max_bytes is None else max(max_bytes - done.bytes, 0)
            if done.position == at:
                left_out = left_out or channel.name
        self._turn = left_out

    def _is_too_early(self, waiting: Sequence[tuple[SourceChannel, int, int]]) -> bool:
        """Whether fewer records wait than a batch should have, and not for too long."""
        wanted, now = self.options.min_records, time.monotonic()
        if wanted is None or self._ceiling is not None or now - self._batch_at >= self.options.max_delay_seconds:
            self._batch_at = now
            return False
        found = 0
        for channel, at, end in waiting:
            with self._logs.use(channel) as log, contextlib.suppress(ExpiredError):
                found += count_records(log, at, end, wanted - found)
            if found >= wanted:
                self._batch_at = now
                return False
        return True

    def _ends(self) -> tuple[dict[str, Place], dict[str, SourceChannel]]:
        """Return where the channels end now."""
        channels = {channel.name: channel for channel in self._channels()}
        places = {name: {"id": channel.identity, "at": self._bounds(channel)[1]} for name, channel in channels.items()}
        return places, channels

    def _resume(self, channel: SourceChannel, before: Place, after: Place, first: int, end: int) -> int:
        """Return where a known channel goes on, noting in ``after`` what was lost.

        What retention took behind a position at which reading ends was never to be read.
        """
        _check_same(channel, before)
        at = int(before["at"])
        if at > end:
            raise ReplacedError(channel.path, f"it ends at {end}, but was read up to {at}")
        last = self._last(channel.name)
        if at < min(first, last):
            self._skip(channel, after, at, first, last)
        return max(at, min(first, last))

    def _last(self, name: str) -> int:
        """Return the position at which reading a channel is told to end, far away where it is not."""
        told = self.options.end.get(name) if isinstance(self.options.end, dict) else None
        return 0 if told == "earliest" else told if isinstance(told, int) else TOP

    def _skip(self, channel: SourceChannel, place: Place, at: int, first: int, last: int = TOP) -> None:
        """Go on at ``first``, or stop at ``last``, counting what is lost; or say so, if nothing may be."""
        self._expired(channel, at, first, last).add_to(place)
        place["from"] = place["at"] = min(first, last)

    def _let_go(self, name: str, place: Place) -> None:
        """Deal with a channel that is gone: if there was more of it to read, that is lost."""
        at, end = place["at"], min(self._seen.get(name, (0, ""))[0], self._last(name))
        if at < end:
            self._gone(name, at, end).add_to(place)
            place["from"] = place["at"] = end
        self._seen.pop(name, None)

    def _gone(self, name: str, at: int, end: int) -> Extent:
        if self.options.fail_on_data_loss:
            raise ReplacedError(name, f"the channel is gone, and was not read from {at} to {end}")
        seen, upto, lost = self._progress.behind.get(name, (0, 0, Extent()))
        if (seen, upto) != (at, end):
            lost = extent_of_gone(self._seen.get(name, (0, ""))[1], at, end)
        logger.warning("%s is gone: %s at positions %d to %d are lost", name, lost, at, end)
        return lost

    def _expired(self, channel: SourceChannel, at: int, first: int, end: int = TOP) -> Extent:
        """Return what retention took between ``at`` and ``end``; or say so, if nothing may be lost."""
        if at >= first:
            return Extent()
        with self._logs.use(channel) as log:
            if log.keeps(at):
                return Extent()
            if self.options.fail_on_data_loss:
                raise ExpiredError(channel.path, at, first)
            lost = extent_of(log, at, min(first, end))
        logger.warning("%s: %s at positions %d to %d are lost", channel.path, lost, at, min(first, end))
        return lost

    def _cursor(self, channel: SourceChannel) -> Place | None:
        """Return what the named cursor says of a place; ReplacedError if what it saw last is another now."""
        if self.options.cursor is None:
            return None
        with contextlib.closing(sidecar_of(disk_for(channel.path), channel.path)) as sidecar:
            found = sidecar.read_cursor(self.options.cursor)
            seen = None if found is None else sidecar.cursor_seen(self.options.cursor)
        if found is None or seen is None:
            return None if found is None else {"at": found}
        with self._logs.use(channel) as log:
            check_fingerprint(log, seen)
        return {"at": found, "seen": str(seen)}

    def _note_seen(self, channel: SourceChannel, place: Place, at: int) -> None:
        """Note the last record of the batch that a place ends; one that ends where it began keeps the one before."""
        if place["at"] <= at:
            return
        with self._logs.use(channel) as log:
            if isinstance(log, ShippedLog):
                return  # its objects are named by their bytes
            try:
                seen = last_fingerprint(log, max(at, log.first_position), place["at"])
            except (ExpiredError, CorruptionError):
                seen = None  # the task that reads there says so
        if seen is not None:
            place["seen"] = str(seen)

    def _check_seen(self, channel: SourceChannel, place: Place | None) -> None:
        """Raise ReplacedError if the last record before a place is another one than it was."""
        seen = None if place is None else _seen_of(place)
        if seen is not None:
            with self._logs.use(channel) as log:
                check_fingerprint(log, seen)
        self._checked.add(channel.name)


def _seen_of(place: Place) -> Fingerprint | None:
    """Return the fingerprint of a place; offsets of the first releases have none."""
    return Fingerprint.parse(place["seen"]) if "seen" in place else None


def _kept(place: Place) -> Place:
    """Return what of a place is still true of the next offset."""
    return {name: value for name, value in place.items() if name != "from"}


def _check_same(channel: SourceChannel, place: Place) -> None:
    if not same_identity(place["id"], channel.identity):
        raise ReplacedError(
            channel.path, f"its log id is {channel.identity or 'gone'}, but was {place['id'] or 'none'}"
        )
