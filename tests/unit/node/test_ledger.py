"""The ledger: what came is what went, waits, or is lost for a reason; a difference is an alarm with its span."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from penstock.disk import disk_for, object_store_for
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Writer
from penstock.node.ingest.memory import Announced, IngestMemory, IngestTotals
from penstock.node.ledger.book import Book, Figures, Right
from penstock.node.ledger.reckon import HOUR_NS, LedgerReckoner, SeamCount, note_lake, read_ledger
from penstock.node.ledger.seams import FeedSeam, FoldSeam, IngestSeam, Seam, ShipSeam, TapSeam, write_seams
from penstock.ship import Shipper, forget_before
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor


def look(data: Path, *seams: Seam, now_ns: int | None = None, since_ns: int | None = None) -> list[SeamCount]:
    write_seams(str(data), list(seams))
    with Book(str(data)) as book:
        reckoner = LedgerReckoner(book, now_ns=now_ns)
        found = [reckoner.count(seam, since_ns) for seam in seams]
        book.save()
    return found


def ingested(data: Path, log: MessageLog | Writer, count: int, first: int = 1) -> IngestSeam:
    """Append as ingest does."""
    seam = IngestSeam("readings", str(data / "log"), str(data / "memory.snap"))
    memory = IngestMemory(seam.memory, seam.log)
    memory.announce(log.next_position, [Announced("ann", first, count)])
    log.append_many([b"x" * 50] * count)
    memory.settle(log.next_position)
    memory.close()
    return seam


@pytest.mark.parametrize("format", ["messagelog", "xchannel"])
def test_what_producers_were_counted_for_is_in_the_log(tmp_path: Path, format: str) -> None:
    with (MessageLog if format == "messagelog" else Writer).open(tmp_path / "log") as log:  # type: ignore[attr-defined]
        log.append_many([b"of somebody else"] * 4)
        seam = ingested(tmp_path, log, 10)
        (found,) = look(tmp_path, seam)
        assert (found.came, found.went, found.waiting, found.lost, found.ok) == (10, 10, 0, {}, True)
        ingested(tmp_path, log, 5, first=11)
        (found,) = read_ledger(str(tmp_path))
        assert (found.came, found.went, found.ok) == (15, 15, True)


def test_a_difference_is_an_alarm_that_names_the_span(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        seam = ingested(tmp_path, log, 10)
        assert look(tmp_path, seam, now_ns=10**18)[0].ok
        ingested(tmp_path, log, 10, first=11)
    with AppendLogStore.open(seam.memory) as store:  # somebody claims what never came
        totals = msgspec.msgpack.decode(store.get("totals").value, type=IngestTotals)  # type: ignore[union-attr]
        wrong = msgspec.structs.replace(totals, came=totals.came + 3)
        store.apply([KvUpdate.put("totals", msgspec.msgpack.encode(wrong))], WatchCursor.of(21))
    for _ in range(2):
        (found,) = look(tmp_path, seam, now_ns=10**18 + 60 * 10**9)
        assert not found.ok
        assert found.alarm == (
            "ingest:readings: 3 records are accounted for nowhere, between positions 11 and 21, "
            "since 2001-09-09T01:46:40Z"
        )
    with AppendLogStore.open(seam.memory) as store:
        store.apply([KvUpdate.put("totals", msgspec.msgpack.encode(totals))], WatchCursor.of(21))
    assert look(tmp_path, seam)[0].alarm == ""


def test_a_damaged_record_is_missed(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        seam = ingested(tmp_path, log, 10)
    (segment,) = [name for name in os.listdir(tmp_path / "log") if name.endswith(".log")]
    data = bytearray((tmp_path / "log" / segment).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "log" / segment).write_bytes(data)
    (found,) = look(tmp_path, seam)
    assert (found.came, found.went, found.ok) == (10, 9, False)
    assert "1 records are accounted for nowhere, between positions 0 and 11" in found.alarm


def test_a_backup_that_others_have_written_to_is_an_alarm(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        ingested(tmp_path, log, 5)
        shutil.copytree(tmp_path / "log", tmp_path / "kept")
        seam = ingested(tmp_path, log, 5, first=6)
        assert look(tmp_path, seam)[0].ok
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "kept").rename(tmp_path / "log")
    with MessageLog.open(tmp_path / "log") as log:
        log.append_many([b"of somebody else"] * 20)
    (found,) = look(tmp_path, seam)
    assert not found.ok
    assert "the record at 10 is not the one" in found.alarm


@pytest.mark.parametrize("format", ["messagelog", "xchannel"])
def test_a_backup_that_others_have_written_to_is_counted_anew(tmp_path: Path, format: str) -> None:
    here, kept = tmp_path / "here", tmp_path / "kept"
    here.mkdir()
    seam = FoldSeam("latest", str(here / "log"), str(tmp_path / "latest.snap"), "append-log")
    kind = MessageLog if format == "messagelog" else Writer

    def append(payload: bytes, count: int) -> None:
        with kind.open(here / "log") as log:  # type: ignore[attr-defined]
            log.append_many([payload] * count)

    append(b"x" * 50, 10)
    shutil.copytree(here, kept)
    append(b"x" * 50, 10)
    assert look(tmp_path, seam)[0].waiting == 20
    shutil.rmtree(here)
    kept.rename(here)
    append(b"of somebody else", 100)
    for _ in range(2):
        (found,) = look(tmp_path, seam)
        assert (found.came, found.waiting, found.alarm) == (110, 110, "")


@pytest.mark.parametrize("format", ["messagelog", "xchannel"])
def test_a_fold_waits_and_loses_by_count(tmp_path: Path, format: str) -> None:
    path, store = tmp_path / "log", str(tmp_path / "latest.snap")
    seam = FoldSeam("latest", str(path), store, "append-log")
    kind = MessageLog if format == "messagelog" else Writer
    with kind.open(path, content=CONTENT) as log:  # type: ignore[attr-defined]
        positions = log.append_many([encode_envelope(Envelope(b"k%d" % n, b"v")) for n in range(10)])
        assert look(tmp_path, seam)[0].waiting == 10
        with AppendLogStore.open(store) as fold:
            fold.apply([], WatchCursor.of(int(positions[4])))
        (found,) = look(tmp_path, seam)
        assert (found.came, found.went, found.waiting, found.lost) == (10, 4, 6, {})
        if isinstance(log, MessageLog):
            log.roll()
            log.append_many([encode_envelope(Envelope(b"k", b"v"))] * 3)
            log.drop_before(11)
            (found,) = look(tmp_path, seam)
            assert (found.came, found.went, found.waiting, found.lost) == (13, 4, 3, {"retention": 6})
            assert found.ok


def test_what_a_head_says_was_shipped_is_compared_with_the_log(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/up"
    seam = ShipSeam(str(tmp_path / "log"), url)
    with MessageLog.open(tmp_path / "log", segment_bytes=500) as log:
        log.append_many([b"x" * 50] * 40)
        (found,) = look(tmp_path, seam)
        assert (found.came, found.went, found.waiting) == (40, 0, 40)
        with Shipper(tmp_path / "log", object_store_for(url)) as shipper:
            while shipper.step():
                pass
        log.append_many([b"x" * 50] * 2)
        (found,) = look(tmp_path, seam)
        assert (found.came, found.ok, found.note) == (42, True, "")
        assert found.went > 20
        assert found.went + found.waiting == 42
    head = next(tmp_path.glob("up/*.shipped.json"))
    head.write_bytes(head.read_bytes().replace(b'"records":%d' % found.went, b'"records":%d' % (found.went - 2), 1))
    (found,) = look(tmp_path, seam)
    assert not found.ok


def test_forgetting_what_was_shipped_is_no_alarm(tmp_path: Path) -> None:
    store = object_store_for(tmp_path / "up")
    seam = ShipSeam(str(tmp_path / "log"), str(tmp_path / "up"))
    with MessageLog.open(tmp_path / "log", segment_bytes=500) as log:
        log.append_many([b"x" * 50] * 40)
        with Shipper(tmp_path / "log", store) as shipper:
            while shipper.step():
                pass
        (before,) = look(tmp_path, seam)
        forget_before(store, "log", 20)
        (after,) = look(tmp_path, seam)
    assert before.went > 20
    assert (after.went, after.waiting, after.ok, after.alarm) == (before.went, before.waiting, True, "")


def test_hours_begin_with_what_waited(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        hour = 500_000 * HOUR_NS
        seam = ingested(tmp_path, log, 10)
        fold = FoldSeam("latest", seam.log, str(tmp_path / "latest.snap"), "append-log")
        with AppendLogStore.open(fold.store) as store:
            store.apply([], WatchCursor.of(5))
        first, _ = look(tmp_path, seam, fold, now_ns=hour - 1, since_ns=hour - HOUR_NS)
        assert (first.came, first.went) == (10, 10)  # seen for the first time: it came since the node began
        look(tmp_path, seam, fold, now_ns=hour + 1)
        ingested(tmp_path, log, 7, first=11)
        look(tmp_path, seam, fold, now_ns=hour + HOUR_NS // 2)
        with AppendLogStore.open(fold.store) as store:
            store.apply([], WatchCursor.of(9))
        found = look(tmp_path, seam, fold, now_ns=hour + 2 * HOUR_NS, since_ns=hour + HOUR_NS // 2)
    assert [(one.came, one.went, one.waiting) for one in found] == [(7, 7, 0), (13, 4, 9)]


def test_the_lake_is_accounted_for_by_its_last_audit(tmp_path: Path) -> None:
    row = {"channel": "readings", "in_channel": 90, "in_table": 95, "missing": 0, "behind": 5, "repeated": 0}
    row |= {"changed": 0, "expired": 10, "unknown": 0}
    note_lake(str(tmp_path), [row])
    (found,) = read_ledger(str(tmp_path))
    assert (found.seam, found.came, found.went, found.waiting, found.ok) == ("lake:readings", 100, 95, 5, True)
    note_lake(str(tmp_path), [{**row, "in_table": 93, "missing": 2}])
    assert not read_ledger(str(tmp_path))[0].ok


def test_a_log_that_is_not_there_yet_is_no_alarm(tmp_path: Path) -> None:
    (found,) = look(tmp_path, FoldSeam("latest", str(tmp_path / "none"), str(tmp_path / "s"), "append-log"))
    assert (found.ok, found.came, "there is nothing here" in found.note) == (True, 0, True)


def test_figures_of_a_span_add_up_when_both_ends_do() -> None:
    before, after = Figures(10, 6, 3, {"a": 1}), Figures(30, 20, 5, {"a": 1, "b": 4})
    assert before.difference == after.difference == after.since(before).difference == 0


class Tapping:
    """A tap as the ledger sees it."""

    def __init__(self, began_at: int) -> None:
        self.records, self.began_at, self.waiting = 0, began_at, 0
        self.lost: dict[str, int] = {}


def test_what_a_tap_counted_is_compared_with_its_log(tmp_path: Path) -> None:
    seam = TapSeam("plant", str(tmp_path / "log"))
    with Writer.open(tmp_path / "log") as log, Book(str(tmp_path)) as book:
        log.append_many([b"before"] * 5)
        tap = Tapping(log.next_position)

        def count() -> SeamCount:
            return LedgerReckoner(book, running={"tap:plant": tap}).count(seam)

        assert count().ok
        log.append_many([b"x"] * 7)
        tap.records, tap.lost, tap.waiting = 7, {"disk": 2}, 3
        found = count()
        assert (found.came, found.went, found.waiting, found.lost, found.ok) == (17, 12, 3, {"disk": 2}, True)
        tap.records += 4  # it says that it wrote, and the log does not have it
        assert "4 records are accounted for nowhere" in count().alarm
        tap = Tapping(log.next_position)
        found = count()
        assert (found.came, found.lost, found.ok) == (14, {"disk": 2}, True)


def test_a_feed_is_as_far_as_its_cursor(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        log.append_many([b"x"] * 9)
        sidecar_of(disk_for(tmp_path), str(tmp_path / "log")).write_cursor("mqtt-feed", 4)
        (found,) = look(tmp_path, FeedSeam("alerts", log.path, "mqtt-feed"))
    assert (found.came, found.went, found.waiting, found.ok) == (9, 3, 6, True)


def test_a_damaged_book_is_set_aside_and_everything_is_counted_again(tmp_path: Path) -> None:
    with Book(str(tmp_path)) as book:
        book.put("right/ingest:a", Right(1, 2, 3))
        book.save()
    path = tmp_path / "ledger" / "book.snap"
    path.write_bytes(b"no book" * 9)
    with Book(str(tmp_path), read_only=True) as book:
        assert book.get("right/ingest:a", Right) is None
    with Book(str(tmp_path)) as book:
        assert book.get("right/ingest:a", Right) is None
        book.put("right/ingest:a", Right(4, 5, 6))
        book.save()
    assert path.with_name("book.snap.bad").read_bytes() == b"no book" * 9
    with Book(str(tmp_path)) as book:
        assert book.get("right/ingest:a", Right) == Right(4, 5, 6)


def test_the_ledger_of_a_data_directory_goes_along_when_it_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = Path("d")
    (data / "logs").mkdir(parents=True)
    outside = tmp_path / "elsewhere" / "latest.snap"
    outside.parent.mkdir()
    with MessageLog.open(data / "logs" / "a", content=CONTENT) as log:
        log.append_many([encode_envelope(Envelope(b"k", b"v"))] * 7)
    with AppendLogStore.open(outside) as store:
        store.apply([KvUpdate.put("k", b"v")], WatchCursor.of(5))
    seams: list[Seam] = [FoldSeam("latest", "d/logs/a", str(outside), "append-log")]
    write_seams("d", seams)
    with Book("d") as book:
        assert LedgerReckoner(book).count(seams[0]).came == 7
        book.save()
    monkeypatch.chdir("/")
    (tmp_path / "d").rename(tmp_path / "moved")
    (count,) = read_ledger(str(tmp_path / "moved"))
    assert (count.came, count.went, count.waiting, count.ok) == (7, 4, 3, True)
    shutil.rmtree(tmp_path / "moved" / "logs")
    (count,) = read_ledger(str(tmp_path / "moved"))
    assert (count.ok, count.came) == (False, 7)
    assert "7 records were counted here" in count.alarm
