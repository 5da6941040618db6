"""Who has written how much to a channel, remembered so that a kill between any two steps neither loses nor doubles.

    before an append   store: what the last one brought is settled; position P and what comes next is announced
    append             log: the records, in the announced order
    after a crash      records at and behind P are counted: the announced ones, in order, as far as they got

One apply of the store does both, so an append costs one small write more.  A record that the log has is counted for its
producer, and only such a record, whatever moment the process died at.

Beside that stands the fingerprint of a record below P, noted when all is settled and every second at work: a log that
has another record there is a backup which others have written to, and which of its records were acknowledged nobody
can know.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import os
import struct
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from penstock.disk import disk_for
from penstock.disk.plain import boot_id_of
from penstock.errors import CorruptionError, ExpiredError, PenstockError, ReplacedError
from penstock.log.detect import open_log
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, check_fingerprint, last_fingerprint
from penstock.log.options import SyncMode
from penstock.log.sidecar import identity_of
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor

__all__ = ["Announced", "IngestMemory", "IngestTotals", "count_from", "read_seen", "read_totals"]

ANNOUNCED: Final = "announced"
TOTALS: Final = "totals"
SEEN: Final = "seen"
SEEN_SECONDS: Final = 1.0
"""How often the fingerprint is noted while there is always something to append."""
WRITER: Final = "writer/"
MOST_PRODUCERS: Final = 100_000
FORGET_AT_ONCE: Final = 1000
POWER: Final = "power cut"
REPLACED: Final = "replaced"
"""Why a log lacks what it had: within one boot nothing visible is lost, so a backup was put in its place."""

_log = logging.getLogger(__name__)


class Announced(NamedTuple):
    """Records of one producer that are about to be appended."""

    writer: str
    first: int
    records: int


class IngestTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What came through ingest, exact at ``position`` of the log.

    >>> IngestTotals(position=81, came=3).lost
    {}
    """

    log_id: str = ""
    position: int = -1
    """Everything counted lies below; -1 before the log was ever looked at."""
    came: int = 0
    """Records that producers were, or are about to be, told the log has."""
    others: int = 0
    """Records of the log that did not come through ingest."""
    lost: dict[str, int] = {}
    """Records that were acknowledged and that the log has no more, by reason."""
    boot: str = ""
    """The boot of the machine in which this was counted."""


class IngestMemory:
    """What is remembered of the producers of one channel.  One thread at a time.

    >>> import tempfile
    >>> from penstock.log import open_log
    >>> from penstock.log.messagelog import MessageLog
    >>> folder = tempfile.TemporaryDirectory()
    >>> log = MessageLog.open(folder.name + "/log")
    >>> memory = IngestMemory(folder.name + "/memory.snap", log.path)
    >>> memory.announce(log.next_position, [Announced("ann", 1, 2)])
    >>> numbers = log.append_many([b"one", b"two"])           # and here the process dies
    >>> memory.abandon()
    >>> memory = IngestMemory(folder.name + "/memory.snap", log.path)
    >>> memory.last("ann"), memory.totals.came
    (2, 2)
    >>> memory.close(); log.close(); folder.cleanup()
    """

    def __init__(self, path: str, log: str, *, sync: SyncMode = "interval") -> None:
        disk_for(path).make_folder(os.path.dirname(path) or ".")
        self._store = AppendLogStore.open(path, sync=sync)
        try:
            self._last: dict[str, tuple[int, int]] = {}  # its highest number, and a time that only tells the order
            for entry in self._store.range(WRITER):
                self._last[entry.key.removeprefix(WRITER)] = _decode(path, entry.value, tuple[int, int])
            self._heard_ns = max((when for _, when in self._last.values()), default=0)
            self.totals = read_totals(self._store)
            self._log_path, self._boot = log, (boot_id_of(disk_for(log)) or b"").hex()
            self._reason = REPLACED if self._boot and self.totals.boot == self._boot else POWER
            self._announced = self._read_announced()
            self._seen = self._kept_seen = read_seen(self._store)
            self._seen_at = -math.inf
            self._touched: set[str] = set()
            self._confirmed: dict[str, int] = {}
            self._recover(log)
        except BaseException:
            self._store.close()
            raise

    # --- What is known

    def last(self, writer: str) -> int:
        """Return the highest number of a producer that the log has."""
        return max(self._confirmed.get(writer, 0), self._last.get(writer, (0, 0))[0])

    # --- The order of an append

    def announce(self, position: int, batches: Sequence[Announced]) -> None:
        """Settle what was announced before as appended, and keep what comes next; ``position`` is the log's end."""
        self._note_seen(self.totals.position, position, at_once=not batches)
        self._count(position, sum(one.records for one in self._announced))
        self._announced, self._confirmed = list(batches), {}
        self._write()

    def confirm(self) -> None:
        """Note, here only, that what was announced was appended."""
        self._confirmed = {writer: first + count - 1 for writer, first, count in self._announced}

    def settle(self, position: int) -> None:
        """Settle what was announced: all of it was appended, and the log ends at ``position`` now."""
        if self._announced:
            self.announce(position, [])

    def missing(self, writer: str, first: int) -> None:
        """Note that a producer goes on behind a hole: what it was told the log had is gone."""
        hole = first - 1 - self.last(writer)
        self.totals = msgspec.structs.replace(self.totals, came=self.totals.came + hole, lost=self._lose(hole))
        self._last[writer] = (first - 1, self._heard())
        self._touched.add(writer)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def abandon(self) -> None:
        """Let go without settling: the next one looks at the log."""
        self._store.close()

    # --- After a crash

    def _recover(self, log: str) -> None:
        """Count what the log has at and behind the position up to which everything is settled."""
        with open_log(log) as reader:
            log_id, end = identity_of(disk_for(log), log), reader.next_position
            if self.totals.log_id != log_id:  # new here, or another log under this name: begin with what it has
                others = count_from(reader, reader.first_position, end)
                if reader.format == "messagelog":  # numbers tell how many retention has taken
                    others += reader.first_position - 1
                self.totals = IngestTotals(log_id=log_id, position=end, others=others)
                self._announced, self._seen = [], None
                self._write()
                return
            settled = self.totals.position
            if self._seen is not None and self._seen.position < end:
                self._check_seen(reader)
            if end < settled:  # only a power cut takes records back, or whoever puts a backup in place
                self._give_back(reader, end)
                return
            found = count_from(reader, settled, end)
        self._note_seen(settled, end, at_once=True)
        announced = sum(one.records for one in self._announced)
        self._count(end, min(found, announced), others=max(0, found - announced))
        self._announced = []
        self._write()

    def _give_back(self, reader: LogReader, end: int) -> None:
        """Note that the log ends before what was settled: its last records are lost, and their numbers with them."""
        counted = self.totals.came + self.totals.others - sum(self.totals.lost.values())
        gone = self.totals.position - end
        if reader.format != "messagelog":  # positions are bytes there: what is left has to be counted
            gone = max(0, counted - count_from(reader, reader.first_position, end))
        self.totals = msgspec.structs.replace(self.totals, position=end, lost=self._lose(gone))
        self._announced = []
        if self._seen is not None and self._seen.position >= end:
            self._seen = None
        self._write()

    # --- Whether the log is the one that was appended to

    def _check_seen(self, reader: LogReader) -> None:
        try:
            check_fingerprint(reader, self._seen)
        except ReplacedError as exc:
            reason = (
                f"{exc.reason}, and which of {self.totals.came} acknowledged records are gone is not known; "
                f"to count anew, remove {self._store.path}"
            )
            raise ReplacedError(self._log_path, reason) from None

    def _note_seen(self, start: int, end: int, *, at_once: bool) -> None:
        """Note the last record between two positions, now and then unless ``at_once``; one that cannot be read is not.

        An earlier one does as well: it only finds less.
        """
        now = time.monotonic()
        if start >= end or (not at_once and now - self._seen_at < SEEN_SECONDS):
            return
        self._seen_at = now
        with contextlib.suppress(PenstockError, OSError), open_log(self._log_path) as reader:
            self._seen = last_fingerprint(reader, max(start, reader.first_position), end) or self._seen

    # --- Small things

    def _lose(self, records: int) -> dict[str, int]:
        """Return the losses with these records, which were acknowledged and are gone; say so."""
        _log.error("%s: %d acknowledged records are gone: %s", self._log_path, records, self._reason)
        return self.totals.lost | {self._reason: self.totals.lost.get(self._reason, 0) + records}

    def _count(self, position: int, arrived: int, others: int = 0) -> None:
        now, left = self._heard(), arrived
        for writer, first, count in self._announced:
            taken = min(left, count)
            left -= taken
            if taken:
                self._last[writer] = (first + taken - 1, now)
                self._touched.add(writer)
        totals = self.totals
        self.totals = msgspec.structs.replace(
            totals, position=position, came=totals.came + arrived, others=totals.others + others
        )

    def _write(self) -> None:
        updates = [KvUpdate.delete(WRITER + name) for name in self._forgotten()]
        updates += [KvUpdate.put(WRITER + name, msgspec.msgpack.encode(self._last[name])) for name in self._touched]
        self.totals = msgspec.structs.replace(self.totals, boot=self._boot)
        updates.append(KvUpdate.put(TOTALS, msgspec.msgpack.encode(self.totals)))
        updates.append(KvUpdate.put(ANNOUNCED, msgspec.msgpack.encode(self._announced)))
        if self._seen != self._kept_seen:
            updates.append(KvUpdate.delete(SEEN) if self._seen is None else KvUpdate.put(SEEN, self._seen.pack()))
        self._store.apply(updates, WatchCursor.of(max(0, self.totals.position)))
        self._kept_seen = self._seen
        self._touched.clear()

    def _heard(self) -> int:
        """Return a time later than any that was noted, whatever the calendar was set to."""
        self._heard_ns = max(time.time_ns(), self._heard_ns + 1)
        return self._heard_ns

    def _forgotten(self) -> list[str]:
        """Return the producers that were not heard of for the longest, where there are too many."""
        if len(self._last) < MOST_PRODUCERS + FORGET_AT_ONCE:
            return []
        old = heapq.nsmallest(len(self._last) - MOST_PRODUCERS, self._last, key=lambda name: self._last[name][1])
        for name in old:
            del self._last[name]
            self._touched.discard(name)
        return old

    def _read_announced(self) -> list[Announced]:
        entry = self._store.get(ANNOUNCED)
        return [] if entry is None else _decode(self._store.path, entry.value, list[Announced])


def read_totals(store: AppendLogStore) -> IngestTotals:
    """Return the totals of a channel from its store, also while the node writes it."""
    entry = store.get(TOTALS)
    return IngestTotals() if entry is None else _decode(store.path, entry.value, IngestTotals)


def read_seen(store: AppendLogStore) -> Fingerprint | None:
    """Return the fingerprint of a record that is settled, from the store of a channel; None where none was noted."""
    entry = store.get(SEEN)
    if entry is None:
        return None
    try:
        return Fingerprint.unpack(bytes(entry.value))
    except struct.error as exc:
        raise CorruptionError(store.path, 0, f"not what ingest remembers: {exc}") from None


def count_from(log: LogReader, start: int, end: int) -> int:
    """Return how many records a log has from ``start`` up to ``end``.

    >>> import tempfile
    >>> from penstock.log import open_log
    >>> from penstock.log.messagelog import MessageLog
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MessageLog.open(folder.name + "/log") as writer:
    ...     numbers = writer.append_many([b"x"] * 5)
    >>> with open_log(folder.name + "/log") as log:
    ...     count_from(log, 2, 5)
    3
    >>> folder.cleanup()
    """
    count, at = 0, max(start, log.first_position)
    while at < end:
        try:
            batch = log.read(at)
        except ExpiredError:  # retention was faster: what it took is not there to be counted
            at = max(log.first_position, at + 1)
            continue
        if not len(batch):
            break
        count += len(batch) if batch.next_position <= end else int((batch.positions < end).sum())
        at = batch.next_position
    return count


def _decode(path: str, value: bytes | memoryview, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except msgspec.MsgspecError as exc:
        raise CorruptionError(path, 0, f"not what ingest remembers: {exc}") from None
