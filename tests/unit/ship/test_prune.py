"""Letting shipped segments go: forgotten first, removed later, and nothing that anybody may still name or read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ship_use import fill, open_writer, read_all, shipped

from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore
from penstock.errors import ExpiredError
from penstock.ship import ShipOptions, Shipper, empty_trash, forget_before, remove_orphans
from penstock.ship.fence import read_head
from penstock.testing.clock import FakeClock


def test_old_segments_are_forgotten_first_and_removed_after_the_grace(store: Obstore, tmp_path: Path) -> None:
    clock = FakeClock()
    options = ShipOptions(page_entries=2, batch_bytes=1)
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 70, 10):
            fill("messagelog", writer, start, 10)
        with Shipper(tmp_path / "log", store, options=options, clock=clock) as shipper:
            while shipper.step():
                pass
        head = forget_before(store, "log", 45, clock=clock)
        assert head.first == 41
        with shipped(store) as remote:
            assert remote.first_position == 41
            with pytest.raises(ExpiredError, match="41"):
                remote.read(5)
            assert len(read_all(remote)) == 30
        assert empty_trash(store, "log", 3600, clock=clock) == []
        clock.pass_(3601)
        gone = empty_trash(store, "log", 3600, clock=clock)
        assert len(gone) == 2 + 4 * 2  # two pages, and what they name with its indexes
        found = read_head(store, "log")
        assert found is not None
        assert found[0].trash == ()
        with Shipper(tmp_path / "log", store, options=options, clock=clock) as shipper:
            fill("messagelog", writer, 70, 10)
            assert shipper.step() == 1
    with shipped(store) as remote:
        assert len(read_all(remote)) == 40
        assert list(remote.verify()) == []


def test_what_is_forgotten_is_not_counted_any_more(store: Obstore, tmp_path: Path) -> None:
    options = ShipOptions(page_entries=2, batch_bytes=1)
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 70, 10):
            fill("messagelog", writer, start, 10)
        with Shipper(tmp_path / "log", store, options=options) as shipper:
            while shipper.step():
                pass
            sizes = [entry.bytes for entry in shipped(store).entries(1, 71)]
            assert shipper.head.pages
            for position, kept in ((5, 70), (45, 30), (65, 10)):  # nothing; two pages; a page and a segment
                head = forget_before(store, "log", position)
                assert (head.records, head.bytes) == (kept, sum(sizes[-kept // 10 :]))
            fill("messagelog", writer, 70, 10)
            shipper.step()
    with shipped(store) as remote:
        assert remote.stat()["records"] == len(read_all(remote)) == 20


def test_a_page_that_is_gone_is_forgotten_all_the_same(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 50, 10):
            fill("messagelog", writer, start, 10)
        with Shipper(tmp_path / "log", store, options=ShipOptions(page_entries=3)) as shipper:
            shipper.step()
            store.delete([shipper.head.pages[0].key])
    head = forget_before(store, "log", 31)
    assert (head.first, head.pages) == (31, ())


def test_what_was_put_and_never_named_is_found(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 50, 10):
            fill("messagelog", writer, start, 10)
        with Shipper(tmp_path / "log", store, options=ShipOptions(page_entries=3)) as shipper:
            shipper.step()
            assert [entry.first for entry in shipper.head.segments] == [31, 41]
    left = ["log.segments/0000000000000015-ffffffffffffffff.log", "log.pages/0000000000000001-ffffffffffffffff.json"]
    stay = [
        "log.segments/0000000000000029-ffffffffffffffff.log",  # the newest entry may grow to what this is
        "log.pages/000000000000001f-ffffffffffffffff.json",  # the next page begins here
        "log.segments/00000000000000ff-ffffffffffffffff.log",
        "log.segments/zzzzzzzzzzzzzzzz-ffffffffffffffff.log",
    ]
    for key in (*left, *stay):
        store.put(key, b"left over")
    assert remove_orphans(store, "log", 3600) == []
    later = FakeClock(now_ns=time.time_ns() + 10**13)
    assert remove_orphans(store, "log", 3600, clock=later) == left
    assert all(store.head(key) is not None for key in stay)
    with shipped(store) as remote:
        assert list(remote.verify()) == []


@pytest.mark.parametrize("where", ["ship.put.after", "ship.page.after"])
def test_what_a_killed_shipper_left_is_not_removed_when_the_next_one_is_about_to_name_it(
    where: str, store: Obstore, tmp_path: Path
) -> None:
    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    later = FakeClock(now_ns=time.time_ns() + 10**13)
    options = ShipOptions(page_entries=2, batch_bytes=1)
    with open_writer("messagelog", tmp_path / "log") as writer:
        wanted = [p for start in range(0, 20, 10) for p in fill("messagelog", writer, start, 10)]
        with Shipper(tmp_path / "log", store, options=options) as shipper:
            while shipper.step():
                pass
    open_writer("messagelog", tmp_path / "log").close()
    with open_writer("messagelog", tmp_path / "log") as writer:  # it goes on in what was shipped last
        wanted += fill("messagelog", writer, 20, 5)
        wanted += fill("messagelog", writer, 25, 5)
        with Shipper(tmp_path / "log", store, options=options) as shipper:
            if where == "ship.page.after":
                shipper.step()
            with arm(where, crash), pytest.raises(Crash):
                shipper.step()
        with Shipper(tmp_path / "log", store, options=options) as shipper:
            # A page is put again whatever is there, so it is removed behind that.
            when = "ship.put.after" if where == "ship.put.after" else "ship.swap.before"
            with arm(when, lambda: remove_orphans(store, "log", 3600, clock=later)):
                while shipper.step():
                    pass
    with shipped(store) as remote:
        assert read_all(remote) == wanted
        assert list(remote.verify()) == []


def test_a_page_that_was_pruned_since_the_head_was_read_is_expired_and_no_damage(
    store: Obstore, tmp_path: Path
) -> None:
    clock = FakeClock()
    options = ShipOptions(page_entries=2, batch_bytes=1)
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 70, 10):
            fill("messagelog", writer, start, 10)
        with Shipper(tmp_path / "log", store, options=options, clock=clock) as shipper:
            while shipper.step():
                pass
    with shipped(store) as remote:
        forget_before(store, "log", 45, clock=clock)
        clock.pass_(2)
        assert empty_trash(store, "log", 1, clock=clock)
        with pytest.raises(ExpiredError, match="begins at 41"):
            remote.read(5)
        with pytest.raises(ExpiredError, match="begins at 41"):
            remote.entries(1, 71)


def test_a_page_that_went_before_a_crash_does_not_keep_orphans(store: Obstore, tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    clock = FakeClock(now_ns=time.time_ns())
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 70, 10):
            fill("messagelog", writer, start, 10)
        with Shipper(tmp_path / "log", store, options=ShipOptions(page_entries=2), clock=clock) as shipper:
            shipper.step()
    forget_before(store, "log", 45, clock=clock)
    clock.pass_(10)
    with arm("ship.prune.before", crash), pytest.raises(Crash):
        empty_trash(store, "log", 5, clock=clock)
    store.put("log.segments/0000000000000029-ffffffffffffffff.log", b"left over")
    clock.pass_(100)
    assert empty_trash(store, "log", 3600, clock=clock) == []
    assert remove_orphans(store, "log", 50, clock=clock) == ["log.segments/0000000000000029-ffffffffffffffff.log"]
    assert empty_trash(store, "log", 50, clock=clock)
