"""ingest without a checkpoint: the table itself says how far it has come, in the commit that brings the records.

A commit carries, for each log it moves on, application transactions of Delta's:

    <app>/<name>         the position behind the last record that is in the table
    <app>/<name>#log     a number made of the log's id, so that a log made again is told from the one that was there
    <app>/<name>#seen    the position of that last record, and
    <app>/<name>#digest  the digest of its fingerprint (log/fingerprint.py), so that a backup that was put back is told;
                         shipped logs have neither: whoever ships them looks at that

Who ingests reads them, exports from there to where the logs end, and commits files and positions at once.  Of two that
do so at the same time one fails by the other's transactions, and finds on its next look that nothing is left to do.
Nothing has to be kept anywhere else: any machine can go on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import ConflictError, CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, check_fingerprint, last_fingerprint
from penstock.ship import ShippedLog
from penstock.spark.lake.opening import open_table
from penstock.spark.lake.table import (
    DataFile,
    commit_files,
    data_files,
    export_options,
    table_columns,
)
from penstock.spark.source import shipped
from penstock.spark.source.bounds import check_chosen
from penstock.spark.source.columns import arrow_schema
from penstock.spark.source.export import CHOSEN
from penstock.spark.source.filters import TOP
from penstock.spark.source.loss import Extent, extent_of
from penstock.spark.source.names import check_use
from penstock.spark.source.options import SourceOptions, path_here, place_of
from penstock.spark.source.plan import Advance, SourceChannel, advance, bounds_of, find_channels

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

__all__ = ["Ingested", "ingest_committed", "reached"]

logger = logging.getLogger(__name__)

APP: Final = "penstock-ingest"
SIZES: Final = ("maxRecordsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger")
"""Options that say how much a commit brings."""
TRIES: Final = 8
"""How often it looks again because another one committed first."""


class Ingested(msgspec.Struct):
    """What was brought into a table.

    >>> Ingested(records=3).commits
    0
    """

    commits: int = 0
    records: int = 0
    lost: int = 0
    """Records that retention took before they were read: those that can be counted."""
    lost_bytes: int = 0
    """Bytes of logs, at most, in which records were lost that cannot be counted."""
    seconds: float = 0.0


def reached(table: DeltaTable | None, channel: SourceChannel, app: str = APP) -> int | None:
    """Return up to where a table has a channel, None when it has nothing of it; ReplacedError when it has another."""
    if table is None:
        return None
    at = table.transaction_version(f"{app}/{channel.name}")
    if at is None:
        return None
    if table.transaction_version(f"{app}/{channel.name}#log") != _number(channel.identity):
        raise ReplacedError(channel.path, "the table holds another log of this name: its records would be mixed")
    return int(at)


def _seen(table: DeltaTable | None, name: str, app: str) -> Fingerprint | None:
    """Return the fingerprint of the last record that a table has of a channel, None where it has none."""
    if table is None:
        return None
    position, digest = (table.transaction_version(f"{app}/{name}#{what}") for what in ("seen", "digest"))
    if position is None or digest is None:
        return None
    return Fingerprint(int(position), int(digest).to_bytes(8, "big", signed=True))


def ingest_committed(
    spark: SparkSession,
    channels: str,
    table: str,
    *,
    options: Mapping[str, Any] | None = None,
    app: str = APP,
    on_commit: Callable[[int, list[DataFile]], None] | None = None,
) -> Ingested:
    """Bring a table up to where channels end now, each record exactly once, without a checkpoint.

    ``channels`` and ``table`` may be URLs.  ``options`` are the source's; with ``maxRecordsPerTrigger`` or
    ``maxBytesPerTrigger`` there are several commits.  Filters leave records out for good: give another ``app``, and
    another table, for another choice.
    """
    begin, done = time.monotonic(), Ingested()
    channels, table = path_here(spark, channels), path_here(spark, place_of(table))
    given = {key: str(value) for key, value in (options or {}).items()}
    check_use(given, "a batch of logs", (*CHOSEN, *SIZES))
    told = SourceOptions.of({**given, "path": channels}, also=CHOSEN)
    bounded = told.filters.low > 0 or told.filters.high < TOP
    if bounded or (told.start, told.end, told.start_ns, told.end_ns) != ("earliest", "latest", None, None):
        raise OptionsError(
            "positions, offsets and times to begin or end at mean nothing here: the table says where to go on, and it "
            "goes on to the end"
        )
    ends: dict[str, int] = {}
    tries = 0
    while True:
        there = find_channels(told.paths, told.format)
        check_chosen(told, there)
        found = {channel.name: channel for channel in there if told.filters.takes(channel)}
        steps = _steps(found, open_table(table), told, app, ends)
        if not steps:
            break
        if _move(spark, channels, table, found, steps, given, app, done, on_commit):
            tries = 0
            continue
        tries += 1
        if tries >= TRIES:
            raise ConflictError(f"{table}: others kept on committing what was to be committed here")
    done.seconds = time.monotonic() - begin
    return done


class _Step(msgspec.Struct, frozen=True):
    """What of a channel comes next."""

    held: int | None
    """Up to where the table has it."""
    begin: int
    """Where reading begins: further on where retention was faster."""
    end: int
    lost: Extent = Extent()


def _steps(
    channels: Mapping[str, SourceChannel],
    table: DeltaTable | None,
    options: SourceOptions,
    app: str,
    ends: dict[str, int],
) -> dict[str, _Step]:
    """Return what of each channel comes next; ``ends`` remembers where they ended when this began."""
    steps: dict[str, _Step] = {}
    records, size = options.max_records, options.max_bytes
    lenient = not options.fail_on_data_loss
    for name, channel in channels.items():
        held = reached(table, channel, app)
        with channel.open(on_damage=None if channel.node is not None else "raise") as log:
            first, next_position = bounds_of(log, lenient=lenient)
            end = ends.setdefault(name, next_position)
            begin, lost = first if held is None else held, Extent()
            try:
                _check_seen(log, next_position, begin, _seen(table, name, app))
            except CorruptionError:  # and nobody can know
                if not lenient:
                    raise
            if begin < first:
                if not lenient:
                    raise ExpiredError(channel.path, begin, first)
                begin, lost = first, extent_of(log, begin, first)
            if begin >= end or 0 in (records, size):
                continue
            limited = records is not None or size is not None
            if limited and isinstance(log, ShippedLog):
                walked = Advance(*shipped.advance(log, begin, end, records, size))
            elif limited or (lenient and not isinstance(log, ShippedLog)):  # so damage is counted as well
                walked = advance(log, begin, end, records, size, over_damage=lenient)
            else:
                walked = Advance(end)
            records = None if records is None else max(0, records - walked.records)
            size = None if size is None else max(0, size - walked.bytes)
            steps[name] = _Step(held, begin, walked.position if limited else end, lost + walked.lost)
    return steps


def _check_seen(log: LogReader, end: int, at: int, seen: Fingerprint | None) -> None:
    """Raise ReplacedError if the log ends before what the table has of it, or its last record there is another now."""
    if at > end and isinstance(log, ShippedLog):  # others may have brought what came since it was looked at
        with ShippedLog(log.path) as fresh:
            end = fresh.next_position
    if at > end:
        raise ReplacedError(log.path, f"it ends at {end}, but the table has it up to {at}")
    check_fingerprint(log, seen)


def _last_seen(channel: SourceChannel, begin: int, end: int) -> Fingerprint | None:
    """Return the fingerprint of the last record between two positions."""
    with channel.open() as log:
        if isinstance(log, ShippedLog):
            return None
        try:
            return last_fingerprint(log, begin, end)
        except (ExpiredError, CorruptionError):  # the task that reads there says so
            return None


def _move(
    spark: SparkSession,
    channels: str,
    table: str,
    known: Mapping[str, SourceChannel],
    steps: Mapping[str, _Step],
    options: Mapping[str, str],
    app: str,
    done: Ingested,
    on_commit: Callable[[int, list[DataFile]], None] | None,
) -> bool:
    """Export these steps and commit them; False when another one was first."""
    chosen = {name: value for name, value in options.items() if not name.lower().startswith("max")}
    columns = table_columns(channels, table, chosen)
    told = export_options(table, columns, chosen, app, whole=True)
    told["bounds"] = msgspec.json.encode({name: (step.begin, step.end) for name, step in steps.items()}).decode()
    last = {name: _last_seen(known[name], step.begin, step.end) for name, step in steps.items()}
    files = data_files(spark.read.format("penstock-export").options(**told).load(channels).collect())
    ends: dict[str, int] = {}
    for name, step in steps.items():
        ends[f"{app}/{name}"] = step.end
        ends[f"{app}/{name}#log"] = _number(known[name].identity)
        if (seen := last[name]) is not None:
            ends[f"{app}/{name}#seen"] = seen.position
            ends[f"{app}/{name}#digest"] = int.from_bytes(seen.digest, "big", signed=True)
    held = open_table(table)
    if any(reached(held, known[name], app) != step.held for name, step in steps.items()):
        return False
    turn = held.transaction_version(app) if held is not None else None
    if held is not None and turn is None and held.count():
        raise OptionsError(f"{table}: it was filled in another way: go on in that, or give another table")
    batch = 0 if turn is None else int(turn) + 1
    if not commit_files(table, app, batch, files, arrow_schema(columns), more=ends):
        return False
    done.commits += 1
    done.records += sum(item.records for item in files)
    for name, step in steps.items():
        if step.lost:
            logger.warning("%s: %s up to position %d are lost", known[name].path, step.lost, step.end)
            done.lost, done.lost_bytes = done.lost + step.lost.records, done.lost_bytes + step.lost.bytes
    if on_commit is not None:
        on_commit(batch, files)
    return True


def _number(identity: str) -> int:
    """Return a number for a log's id that Delta can hold."""
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "big")
