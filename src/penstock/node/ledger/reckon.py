"""The figures of each seam, from logs, cursors and stores alone, whether the node runs or not.

What went on is looked at before the end of the log, so that a seam that is at work does not seem to have made records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from penstock.disk import disk_for, is_url, object_store_for
from penstock.disk.plain import read_whole
from penstock.errors import CorruptionError, ExpiredError, NotFoundError, PenstockError
from penstock.log.face import LogReader
from penstock.log.fingerprint import check_fingerprint
from penstock.log.sidecar import identity_of, sidecar_of
from penstock.mqtt.deliveries import read_deliveries
from penstock.node.folding import STORES, open_source
from penstock.node.ingest.memory import count_from, read_seen, read_totals
from penstock.node.ledger.book import Book, Figures, Right, Wrong
from penstock.node.ledger.seams import (
    FOLDER,
    DeliverySeam,
    FeedSeam,
    FoldSeam,
    IngestSeam,
    LakeSeam,
    Seam,
    ShipSeam,
    TapSeam,
    path_in,
    read_seams,
)
from penstock.node.ledger.totals import LogTotal, begin_total, same_log, total_at, with_seen
from penstock.ship.fence import read_head
from penstock.ship.local import ship_cursor
from penstock.store import AppendLogStore

__all__ = ["LedgerReckoner", "SeamCount", "read_ledger", "note_lake"]

HOUR_NS: Final = 3600 * 10**9
RETENTION: Final = "retention"
STARTED_NS: Final = time.time_ns()
"""Tells the taps of this process from those of an earlier one."""


class SeamCount(msgspec.Struct, frozen=True):
    """One seam of the ledger.

    >>> SeamCount("ingest:readings", 10, 10, 0, {}, True).ok
    True
    """

    seam: str
    came: int
    went: int
    waiting: int
    lost: dict[str, int]
    ok: bool
    note: str = ""
    """What there is to know besides, as a store that could not be asked."""
    alarm: str = ""
    """Which span does not add up, and since when."""


class _Seen(msgspec.Struct):
    """What one look at a seam found."""

    figures: Figures
    position: int = 0
    note: str = ""


class TapBase(msgspec.Struct, frozen=True):
    """Where the count of a tap began: which run of it, and how many records its log had then.

    >>> TapBase().lost
    {}
    """

    run: int = 0
    total: int = 0
    earlier: dict[str, int] = {}
    """What earlier runs dropped, by reason."""
    lost: dict[str, int] = {}
    """That and what this one has dropped."""


class RunningTap(Protocol):
    """A tap that runs: what it has counted since it began."""

    records: int
    lost: dict[str, int]
    began_at: int | None
    """Where its log ended when it began."""

    @property
    def waiting(self) -> int:
        """Messages that wait for a log that cannot be written."""


class LedgerReckoner:
    """Counts seams against a book.  One thread at a time.

    ``running`` are the taps of this process by the name of their seam: what they counted is compared with their log.
    ``deliveries`` are the counts of the broker of this process, with what waits in its queues as it is.
    """

    def __init__(
        self,
        book: Book,
        *,
        now_ns: int | None = None,
        running: Mapping[str, RunningTap] | None = None,
        deliveries: Figures | None = None,
    ) -> None:
        self._book, self._now = book, time.time_ns() if now_ns is None else now_ns
        self._running, self._deliveries = running or {}, deliveries

    @property
    def hour(self) -> int:
        """The hour of this look, since 1970."""
        return self._now // HOUR_NS

    def count(self, seam: Seam, since_ns: int | None = None) -> SeamCount:
        """Return the figures of a seam, of all time or from the hour of ``since_ns`` on."""
        try:
            seen = self._look(seam)
        except NotFoundError as exc:
            right = self._book.get(f"right/{seam.name}", Right)
            if right is None or not right.came or isinstance(seam, LakeSeam):
                return SeamCount(seam.name, 0, 0, 0, {}, True, note=str(exc))
            alarm = f"{seam.name}: {right.came} records were counted here, and now: {exc}"
            return SeamCount(seam.name, right.came, 0, 0, {}, False, note=str(exc), alarm=alarm)
        except (PenstockError, OSError) as exc:
            return SeamCount(seam.name, 0, 0, 0, {}, False, note=str(exc), alarm=f"it cannot be counted: {exc}")
        figures = seen.figures
        alarm = self._judge(seam, figures, seen.position)
        shown = figures if since_ns is None else figures.since(self._hour(seam.name, since_ns))
        ok = not figures.difference
        return SeamCount(seam.name, shown.came, shown.went, shown.waiting, shown.lost, ok, seen.note, alarm)

    # --- What is remembered

    def _judge(self, seam: Seam, figures: Figures, position: int) -> str:
        """Remember whether a seam adds up; return the alarm if it does not."""
        name = seam.name
        hour = f"hour/{name}/{self._now // HOUR_NS:010d}"
        if self._book.get(hour, Figures) is None:
            # What ingest and broker have counted when they are seen for the first time came since the node began.
            began = isinstance(seam, IngestSeam | DeliverySeam) and self._book.get(f"right/{name}", Right) is None
            self._book.put(hour, Figures() if began else figures)
        if not figures.difference:
            self._book.put(f"right/{name}", Right(self._now, position, figures.came))
            self._book.forget(f"wrong/{name}")
            return ""
        wrong = self._book.get(f"wrong/{name}", Wrong)
        if wrong is None or wrong.difference != figures.difference:
            right = self._book.get(f"right/{name}", Right) or Right(0, 0, 0)
            after, first = (right.at_ns, right.position) if wrong is None else (wrong.after_ns, wrong.first)
            wrong = Wrong(after, first, self._now, position, figures.difference)
            self._book.put(f"wrong/{name}", wrong)
        return describe_alarm(name, wrong)

    def _hour(self, name: str, since_ns: int) -> Figures:
        """Return the figures at the beginning of an hour, or at the look that was nearest behind it."""
        wanted, last = f"hour/{name}/{since_ns // HOUR_NS:010d}", ""
        for key in self._book.keys(f"hour/{name}/"):
            last = key
            if key >= wanted:
                break
        return self._book.get(last or wanted, Figures) or Figures()

    def tidy(self, keep_hours: int) -> None:
        """Forget the figures of hours that are too old."""
        oldest = f"{self._now // HOUR_NS - keep_hours:010d}"
        for key in self._book.keys("hour/"):
            if key.rpartition("/")[2] < oldest:
                self._book.forget(key)

    # --- Logs

    @contextlib.contextmanager
    def _log(self, path: str) -> Iterator[tuple[LogReader, LogTotal, int]]:
        """Open a log; yield it with how many records it ever had and its end now."""
        key = f"log/{path_in(self._book.data, path)}"
        with open_source(path) as log:
            log_id = str(log.stat().get("log_id")) if is_url(path) else identity_of(disk_for(path), path)
            known = self._book.get(key, LogTotal)
            if known is None or known.log_id != log_id:
                known = begin_total(log, log_id)
            end = log.next_position
            here = not is_url(path)  # one that was shipped is looked at by whoever ships it
            if end < known.position or (here and not same_log(log, known)):
                known = begin_total(log, log_id)  # its end is lost, or a backup came back: what is left is counted
            before, known = known, total_at(log, known, end)
            if here:
                known = with_seen(log, before, known)
            self._book.put(key, known)
            yield log, known, end

    def _consumer(self, path: str, cursor: int | None) -> _Seen:
        """Return the figures of who reads a log up to a cursor."""
        with self._log(path) as (log, total, end):
            first = log.first_position
            at = first if cursor is None else min(cursor, end)
            lost, note = {}, ""
            if at < first:
                waiting = count_from(log, first, end)
                try:
                    gone = total.total - waiting - total_at(log, total, at).total
                except ExpiredError as exc:
                    gone, note = 0, str(exc)
                if gone:
                    lost[RETENTION] = gone
            else:
                waiting = count_from(log, at, end)
            went = total.total - waiting - sum(lost.values())
            return _Seen(Figures(total.total, went, waiting, lost), at, note)

    # --- Seams

    def _look(self, seam: Seam) -> _Seen:
        if isinstance(seam, IngestSeam):
            return self._ingest(seam)
        if isinstance(seam, FoldSeam):
            return self._fold(seam)
        if isinstance(seam, ShipSeam):
            return self._ship(seam)
        if isinstance(seam, TapSeam):
            return self._tap(seam)
        if isinstance(seam, DeliverySeam):
            return _Seen(self._deliveries or _kept_deliveries(seam.folder))
        if isinstance(seam, FeedSeam):
            return self._consumer(seam.log, sidecar_of(disk_for(seam.log), seam.log).read_cursor(seam.cursor))
        return _lake(seam)

    def _ingest(self, seam: IngestSeam) -> _Seen:
        """Compare what producers were counted for with what the log has, at the position that both know."""
        with AppendLogStore.open(seam.memory, read_only=True) as store:
            totals, known = read_totals(store), read_seen(store)
        with self._log(seam.log) as (log, total, end):
            lost = dict(totals.lost)
            if totals.position < 0:
                return _Seen(Figures())
            if known is not None and known.position < end and total.log_id == totals.log_id:
                check_fingerprint(log, known)
            there = total_at(log, total, totals.position).total - totals.others
            return _Seen(Figures(totals.came, there, 0, lost), totals.position)

    def _tap(self, seam: TapSeam) -> _Seen:
        """Compare what a running tap has counted since it began with what its log got since then."""
        running, key = self._running.get(seam.name), f"tap/{seam.name}"
        known, before = self._book.get(key, TapBase) or TapBase(), running.records if running is not None else 0
        with self._log(seam.log) as (log, total, end):
            there = total.total
            if running is None or running.began_at is None:
                return _Seen(Figures(there + sum(known.lost.values()), there, 0, known.lost), end)
            run = STARTED_NS ^ id(running)
            if known.run != run:
                began = total_at(log, total, max(running.began_at, log.first_position)).total
                known = TapBase(run, began, known.lost, known.lost)
        count = min(max(there - known.total, before), running.records)  # it goes on while the log is read
        lost = dict(known.earlier)
        for reason, number in running.lost.items():
            lost[reason] = lost.get(reason, 0) + number
        self._book.put(key, msgspec.structs.replace(known, lost=lost))
        came = known.total + count + running.waiting + sum(lost.values())
        return _Seen(Figures(came, there, running.waiting, lost), end)

    def _fold(self, seam: FoldSeam) -> _Seen:
        try:
            with STORES[seam.backend].open(seam.store, read_only=True) as store:
                cursor = store.cursor().token.as_int()
        except NotFoundError:
            cursor = None
        return self._consumer(seam.log, cursor)

    def _ship(self, seam: ShipSeam) -> _Seen:
        """Compare what the head of the shipped log says with what the log had below the head's end."""
        key, channel = f"base/{seam.name}", seam.channel
        try:
            found = read_head(object_store_for(seam.url), channel)
        except (PenstockError, OSError) as exc:
            sidecar = sidecar_of(disk_for(seam.log), seam.log)
            seen = self._consumer(seam.log, sidecar.read_cursor(ship_cursor(seam.url, channel)))
            return _Seen(seen.figures, seen.position, f"the object store was not asked: {exc}")
        if found is None:
            return self._consumer(seam.log, None)
        head = found[0]
        seen = self._consumer(seam.log, head.next)
        with self._log(seam.log) as (log, total, _):
            base = self._book.get(key, tuple[int, int])
            if base is None or base[0] != head.first:  # seen for the first time, or its oldest segments were pruned
                try:
                    base = head.first, total_at(log, total, head.first).total
                except ExpiredError:
                    base = head.first, seen.figures.went - head.records
                self._book.put(key, base)
        figures = seen.figures
        return _Seen(Figures(figures.came, base[1] + head.records, figures.waiting, figures.lost), head.next)


def _kept_deliveries(folder: str) -> Figures:
    """Return what the journal of a broker says: what is neither acknowledged nor lost waits."""
    totals = read_deliveries(folder)
    return Figures(totals.came, totals.went, totals.owed, totals.lost)


class _Audit(msgspec.Struct):
    """What an audit of a table found of one channel."""

    in_channel: int
    expired: int
    in_table: int
    repeated: int
    unknown: int
    changed: int
    behind: int
    at: str


def _lake(seam: LakeSeam) -> _Seen:
    path = os.path.join(seam.log)
    disk = disk_for(path)
    if disk.stat(path) is None:
        raise NotFoundError(f"{path}: there was no audit yet")
    try:
        row = msgspec.json.decode(read_whole(disk, path), type=_Audit)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CorruptionError(path, 0, f"not what an audit found: {exc}") from None
    found = row.in_table - row.repeated - row.unknown - row.changed
    return _Seen(Figures(row.in_channel + row.expired, found, row.behind), 0, f"as of the audit at {row.at}")


def note_lake(data: str, rows: list[dict[str, Any]]) -> None:
    """Keep what an audit of a table found, for the ledger of a node."""
    from penstock.disk import save_atomically

    folder = os.path.join(data, FOLDER)
    disk = disk_for(folder)
    disk.make_folder(folder)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for row in rows:
        name = f"lake-{row['channel'].replace('/', '_')}.json"
        save_atomically(disk, os.path.join(folder, name), msgspec.json.encode({**row, "at": at}) + b"\n")


def lake_seams(data: str) -> list[Seam]:
    """Return a seam for each channel that an audit was noted of."""
    folder = os.path.join(data, FOLDER)
    disk = disk_for(folder)
    if disk.stat(folder) is None:
        return []
    names = [name for name in disk.list(folder) if name.startswith("lake-") and name.endswith(".json")]
    return [LakeSeam(name[5:-5], os.path.join(folder, name)) for name in names]


def describe_alarm(name: str, wrong: Wrong) -> str:
    """Return an alarm as a sentence.

    >>> describe_alarm("ship:a", Wrong(0, 80, 10**9, 160, 3))
    'ship:a: 3 records are accounted for nowhere, between positions 80 and 160, since it was never right'
    """
    when = "it was never right"
    if wrong.after_ns:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wrong.after_ns / 1e9))
    what = (
        f"{wrong.difference} records are accounted for nowhere"
        if wrong.difference > 0
        else f"{-wrong.difference} records went on that never came"
    )
    return f"{name}: {what}, between positions {wrong.first} and {wrong.next}, since {when}"


def read_ledger(data: str, since_ns: int | None = None) -> list[SeamCount]:
    """Return every seam of the node that serves, or served, a data directory; nothing is changed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_ledger(folder)
    []
    """
    with Book(data, read_only=True) as book:
        reckoner = LedgerReckoner(book)
        return [reckoner.count(seam, since_ns) for seam in (*read_seams(data), *lake_seams(data))]
