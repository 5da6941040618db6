"""Promise: setting the clock of a machine back or ahead takes no history, no lease and no number from a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock.clock import Moment
from penstock.disk import MemoryDisk
from penstock.errors import AlreadyExists, ExpiredError, OptionsError
from penstock.kv import EmbeddedConnection, EmbeddedOptions, StoreConfig
from penstock.kv.embedded.ages import HistoryAges, advance
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.testing.clock import FakeClock
from penstock.types import WatchCursor

PLAIN = EmbeddedOptions(sync="none")
HOUR = 3600.0


def aged(disk: MemoryDisk, clock: FakeClock, seconds: float = 60.0) -> Bucket:
    return Bucket.open("b", StoreConfig(name="b", max_age_seconds=seconds), PLAIN, disk=disk, clock=clock)


def put(bucket: Bucket, count: int = 1) -> None:
    assert all(isinstance(done, int) for done in bucket.commit([Change("put", "k", b"1")] * count))


@pytest.mark.parametrize("jump", [-HOUR, 2 * HOUR, -60 * 365 * 24 * HOUR + 1, 0.0])
def test_history_goes_by_the_time_that_went_by(jump: float) -> None:
    disk, clock = MemoryDisk(), FakeClock()
    bucket = aged(disk, clock)
    put(bucket, 10)
    clock.pass_(40.0)
    if clock.now_ns() + jump * 1e9 > 0:
        clock.jump(jump)
    put(bucket, 10)
    assert bucket.first_revision() == 1  # 40 s old, whatever the calendar says
    clock.pass_(25.0)
    put(bucket)
    assert bucket.first_revision() == 11  # the first ten are 65 s old
    clock.pass_(61.0)
    put(bucket)
    assert bucket.first_revision() == 22
    bucket.close()


def test_one_write_dated_ahead_changes_nothing_for_the_others() -> None:
    disk, clock = MemoryDisk(), FakeClock()
    bucket = aged(disk, clock)
    put(bucket, 5)
    clock.jump(2 * HOUR)
    put(bucket)
    clock.jump(-2 * HOUR)
    clock.pass_(5.0)
    put(bucket, 5)
    assert bucket.first_revision() == 1  # history that is 5 s old is there
    clock.pass_(61.0)
    put(bucket)
    assert bucket.first_revision() == 12  # and what is old goes, the one dated ahead too
    bucket.close()


def test_ages_survive_a_restart_of_the_process_and_of_the_machine() -> None:
    disk, clock = MemoryDisk(), FakeClock()
    bucket = aged(disk, clock)
    put(bucket, 5)
    clock.pass_(30.0)
    put(bucket, 5)
    bucket.close()
    bucket = aged(disk, clock)
    clock.pass_(31.0)
    put(bucket)
    assert bucket.first_revision() == 6
    bucket.close()
    disk.boot_id = lambda: b"another boot...."  # type: ignore[method-assign]
    later = FakeClock(clock.now_ns())  # its monotonic clock begins at nought
    bucket = aged(disk, later)
    put(bucket)
    assert bucket.first_revision() == 6
    later.pass_(61.0)
    put(bucket)
    assert bucket.first_revision() == 13
    bucket.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-(10**9), 10**9), st.integers(0, 5)), max_size=40))
def test_no_history_goes_that_is_younger_than_the_age_and_none_stays_that_is_much_older(
    steps: list[tuple[int, int, int]],
) -> None:
    ages: HistoryAges | None = None
    monotonic, newest, forgotten = 0, 0, 1
    written: dict[int, int] = {}  # revision → when, by the time that went by
    for passed, jump, count in steps:
        monotonic += passed
        for _ in range(count):
            newest += 1
            written[newest] = monotonic
        ages, first = advance(ages, Moment(1, monotonic, monotonic + jump), 100, newest)
        assert all(monotonic - written[gone] >= 100 for gone in range(forgotten, first))
        forgotten = max(forgotten, first)
        assert all(monotonic - at < 104 for revision, at in written.items() if revision >= forgotten)
        assert len(ages.marks) <= 102


async def test_a_lease_lives_as_long_as_it_was_given_whatever_the_calendar_says(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        EmbeddedConnection(tmp_path, PLAIN, clock=clock) as one,
        EmbeddedConnection(tmp_path, PLAIN, clock=clock) as two,
    ):
        ours, theirs = await one.store("b"), await two.store("b")
        for jump in (2 * HOUR, -5 * HOUR):
            await ours.writer.put_with_ttl("lease", b"me", 10.0)
            clock.jump(jump)
            with pytest.raises(AlreadyExists):
                await theirs.writer.create("lease", b"you")
            clock.pass_(9.0)
            assert await theirs.reader.get("lease") is not None
            clock.pass_(1.0)
            assert await theirs.reader.get("lease") is None
            await theirs.writer.create("lease", b"you")
            await theirs.writer.delete("lease")


@pytest.mark.parametrize("checkpoint_bytes", [1, 1 << 20])
async def test_a_lease_over_a_restart_of_the_machine_ends_by_the_calendar_and_never_later_than_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_bytes: int
) -> None:
    clock, options = FakeClock(), EmbeddedOptions(sync="none", checkpoint_bytes=checkpoint_bytes)
    async with EmbeddedConnection(tmp_path, options, clock=clock) as connection:
        writer = (await connection.store("b")).writer
        await writer.put_with_ttl("lease", b"me", 10.0)
        await writer.put("other", b"1" * 100)
    monkeypatch.setattr("penstock.disk.posix.PosixDisk.boot_id", lambda _: b"another boot....")
    for ahead, lives in ((4.0, 6.0), (-HOUR, 10.0), (HOUR, 0.0)):
        later = FakeClock(clock.now_ns() + round(ahead * 1e9))
        async with EmbeddedConnection(tmp_path, options, clock=later) as connection:
            store = await connection.store("b")
            if lives:
                later.pass_(lives - 0.5)
                assert await store.reader.get("lease") is not None
                later.pass_(0.5)
            assert await store.reader.get("lease") is None
            assert await store.reader.keys() == ["other"]


@pytest.mark.parametrize("now_ns", [-1, -(10**18), 1 << 63, 1 << 64])
async def test_a_time_no_record_can_have_is_refused_by_name_and_no_number_is_spent(tmp_path: Path, now_ns: int) -> None:
    clock = FakeClock(now_ns)
    async with EmbeddedConnection(tmp_path, PLAIN, clock=clock) as connection:
        store = await connection.store("b")
        for _ in range(3):
            with pytest.raises(OptionsError, match="1970"):
                await store.writer.put("a", b"1")
            with pytest.raises(OptionsError, match="1970"):
                await store.writer.put_with_ttl("a", b"1", 5.0)
        clock.jump((1_700_000_000_000_000_000 - now_ns) / 1e9)
        assert (await store.writer.put("a", b"1")).as_int() == 1


async def test_a_cursor_that_is_young_never_expires_by_a_clock_set_ahead(tmp_path: Path) -> None:
    clock = FakeClock()
    async with EmbeddedConnection(tmp_path, PLAIN, clock=clock) as connection:
        store = await connection.store_with_config(StoreConfig(name="b", max_age_seconds=HOUR))
        first = await store.writer.put("a", b"1")
        clock.jump(10 * HOUR)
        clock.pass_(2.0)
        await store.writer.put("b", b"2")
        async with await store.watcher.watch_all_from(WatchCursor(first)) as watch:
            assert [update.key for update in await watch.next_batch()] == ["b"]
        clock.pass_(HOUR)
        await store.writer.put("c", b"3")
        with pytest.raises(ExpiredError):
            await store.watcher.watch_all_from(WatchCursor(first))


async def test_many_keys_that_expired_are_purged_a_few_at_a_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.kv.embedded.bucket.PURGES_A_TURN", 10)
    clock = FakeClock()
    async with EmbeddedConnection(tmp_path, PLAIN, clock=clock) as connection:
        store = await connection.store("b")
        for n in range(95):
            await store.writer.put_with_ttl(f"k{n}", b"1", 10.0)
        clock.pass_(11.0)
        assert await store.reader.keys() == []
        before = store.bucket.revision
        assert (await store.writer.put("a", b"1")).as_int() == before + 11  # ten purges and the put
        assert await store.writer.create("k94", b"again")  # hidden already, though its purge is to come
        async with await store.watcher.watch_all_from(WatchCursor.of(before)) as watch:
            found: list[Any] = []
            while len(found) < 94 + 2:
                found += list(await watch.next_batch())
        assert sorted(await store.reader.keys()) == ["a", "k94"]
        assert len({update.key for update in found}) == 96


async def test_keys_that_expired_make_room_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.kv.embedded.bucket.PURGES_A_TURN", 1)
    clock = FakeClock()
    async with EmbeddedConnection(tmp_path, PLAIN, clock=clock) as connection:
        store = await connection.store_with_config(StoreConfig(name="b", max_bytes=2000))
        for n in range(9):
            await store.writer.put_with_ttl(f"k{n}", b"x" * 150, 10.0)
        clock.pass_(11.0)
        await store.writer.put("a", b"x" * 1900)
        assert await store.reader.keys() == ["a"]
