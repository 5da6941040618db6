"""A group on real files: leases, heartbeats, retries, dead letters, retention."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.errors import ClosedError, LeaseLost, OptionsError, ReplacedError, Timeout
from penstock.log.filechannel import ChannelOptions, FileChannel, Group
from penstock.log.filechannel.group.journal import REWRITE_BYTES
from penstock.testing.clock import FakeClock

QUIET = {"heartbeat": False}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FileChannel]:
    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="none", compression="none")) as channel:
        yield channel


def other(queue: FileChannel, name: str = "workers", clock: FakeClock | None = None, **options: object) -> Group:
    """Return the part of another process."""
    view = FileChannel.attach(queue.path)
    return view.group(name, **({} if clock is None else {"clock": clock}), **options)  # type: ignore[arg-type]


def payloads(group: Group, limit: int = 100) -> list[bytes]:
    return [job.payload for job in group.take_many(limit)]


def test_each_message_goes_to_one_of_the_workers(queue: FileChannel) -> None:
    queue.append_many([b"%d" % n for n in range(10)])
    one, two = queue.group("workers"), other(queue)
    first, second = one.take_many(4), two.take_many(100)
    assert [job.payload for job in [*first, *second]] == [b"%d" % n for n in range(10)]
    assert one.take_many(1) == []
    first.ack()
    second.ack()
    assert one.stats().waiting == one.stats().leased == 0


def test_groups_do_not_affect_each_other(queue: FileChannel) -> None:
    queue.append_many([b"a", b"b"])
    for job in queue.group("one").take_many():
        job.ack()
    assert payloads(queue.group("two")) == [b"a", b"b"]
    assert queue.groups() == ["one", "two"]


def test_a_with_block_acknowledges_or_fails(queue: FileChannel) -> None:
    queue.append_many([b"good", b"bad"])
    group = queue.group("workers", retry_seconds=0)
    with group.take() as job:
        assert job.payload == b"good"
    with pytest.raises(ZeroDivisionError), group.take() as job:
        1 / 0  # noqa: B018
    with group.take() as job:
        assert (job.payload, job.tries) == (b"bad", 2)
    assert group.stats().oldest_position is None


def test_a_with_block_over_a_batch_leaves_alone_what_was_settled_inside(queue: FileChannel) -> None:
    queue.append_many([b"a", b"b", b"c"])
    group = queue.group("workers", retry_seconds=0)
    jobs = group.take_many(3)
    jobs[0].ack()
    jobs[1].fail(delay=100)
    with pytest.raises(ZeroDivisionError), jobs:
        1 / 0  # noqa: B018
    assert payloads(group) == [b"c"]


def test_a_message_comes_again_when_its_lease_ends_and_the_late_worker_is_told(queue: FileChannel) -> None:
    clock = FakeClock()
    queue.append(b"work")
    slow, quick = queue.group("workers", clock=clock, **QUIET), other(queue, clock=clock, **QUIET)
    job = slow.take(timeout=0)
    clock.pass_(29.9)
    assert quick.take_many(1) == []
    clock.pass_(0.2)
    again = quick.take(timeout=0)
    assert (again.payload, again.tries) == (b"work", 2)
    with pytest.raises(LeaseLost, match="position 0"):
        job.ack()
    assert job.lost
    again.ack()
    assert quick.stats().oldest_position is None


@pytest.mark.parametrize("year", [1600, 1960, 2600, 9999])
def test_a_calendar_that_is_far_off_keeps_no_worker_from_its_work(queue: FileChannel, year: int) -> None:
    queue.append_many([b"one", b"two", b"three"])
    clock = FakeClock(now_ns=(year - 1970) * 31_556_952 * 10**9)
    group = queue.group("workers", clock=clock, max_tries=2, **QUIET)
    one, two = group.take_many(2)
    group.ack([one])
    group.fail([two], delay=10)
    clock.pass_(11)
    group.fail(group.take_many(1))
    assert [letter.payload for letter in group.dead()] == [b"two"]
    group.ack(group.take_many(9))
    assert (group.stats().waiting, group.stats().delayed, group.stats().leased) == (0, 0, 0)


def test_a_calendar_that_jumps_ends_no_lease(queue: FileChannel) -> None:
    clock = FakeClock()
    queue.append(b"work")
    one, two = queue.group("workers", clock=clock, **QUIET), other(queue, clock=clock, **QUIET)
    job = one.take(timeout=0)
    clock.jump(1e6)
    assert two.take_many(1) == []
    clock.jump(-2e6)
    clock.pass_(31)
    assert len(two.take_many(1)) == 1  # and keeps none either
    assert not job.settled


def test_renewing_keeps_a_message_for_as_long_as_it_takes(queue: FileChannel) -> None:
    clock = FakeClock()
    queue.append(b"long work")
    one, two = queue.group("workers", clock=clock, **QUIET), other(queue, clock=clock, **QUIET)
    job = one.take(timeout=0)
    for _ in range(5):
        clock.pass_(20)
        job.renew()
        assert two.take_many(1) == []
    job.ack()


def test_the_heartbeat_renews_what_is_in_work_and_lets_go_of_what_was_dropped(queue: FileChannel) -> None:
    clock = FakeClock()  # leases end by it, and the heartbeat beats by itself
    queue.append_many([b"held", b"dropped"])
    one, two = queue.group("workers", clock=clock, lease_seconds=0.3), other(queue, clock=clock, **QUIET)
    held = one.take()
    one.take()  # and nobody has it any more
    gc.collect()
    clock.pass_(0.2)
    core = one._state.core
    while core is not None and core.entries[held.position].until < 0.5:
        threading.Event().wait(0.01)
    clock.pass_(0.2)
    again = two.take(timeout=60)
    assert (again.payload, again.tries) == (b"dropped", 2)
    assert two.take_many(1) == []  # the first is still held
    held.ack()
    again.ack()


def test_the_heartbeat_gives_up_on_a_worker_that_hangs(queue: FileChannel) -> None:
    queue.append(b"endless")
    one = queue.group("workers", lease_seconds=0.2, work_seconds=0.3)
    two = other(queue, lease_seconds=0.2)
    hanging = one.take()
    assert two.take(timeout=60).payload == b"endless"
    assert not hanging.settled


def test_a_failed_message_waits_longer_each_time(queue: FileChannel) -> None:
    clock = FakeClock()
    queue.append(b"work")
    group = queue.group("workers", clock=clock, retry_seconds=2, retry_seconds_max=5, **QUIET)
    for delay in (2.0, 4.0, 5.0):
        group.take(timeout=0).fail(reason="not yet")
        clock.pass_(delay - 0.1)
        assert group.take_many(1) == []
        assert group.stats().delayed == 1
        clock.pass_(0.2)
    assert group.take(timeout=0).tries == 4


def test_what_was_settled_before_is_left_alone_when_its_batch_fails(queue: FileChannel) -> None:
    queue.append_many([b"a", b"b"])
    group = queue.group("workers", max_tries=1)
    jobs = group.take_many(2)
    jobs[0].fail(reason="first")
    group.fail(jobs, reason="second")
    assert [(letter.payload, letter.reason) for letter in group.dead()] == [(b"a", "first"), (b"b", "second")]


def test_a_message_that_fails_too_often_is_a_dead_letter_with_reason_time_and_tries(queue: FileChannel) -> None:
    clock = FakeClock(now_ns=77)
    queue.append_many([b"poison", b"good"])
    group = queue.group("workers", clock=clock, max_tries=3, **QUIET)
    for _ in range(3):
        job = group.take(timeout=0)
        assert job.payload == b"poison"
        job.fail(delay=0, reason="does not parse")
    group.take(timeout=0).ack()
    (letter,) = group.dead()
    assert (letter.payload, letter.tries, letter.reason, letter.time_ns) == (b"poison", 3, "does not parse", 77)
    assert (letter.position, letter.group) == (0, "workers")
    assert group.stats().dead == 1
    assert group.stats().oldest_position is None


def test_a_message_whose_workers_die_is_a_dead_letter_as_well(queue: FileChannel) -> None:
    clock = FakeClock()
    queue.append(b"kills its worker")
    group = queue.group("workers", clock=clock, max_tries=2, **QUIET)
    for _ in range(2):
        group.take(timeout=0)
        clock.pass_(31)
    assert group.take_many(1) == []
    assert [(letter.payload, letter.reason) for letter in group.dead()] == [(b"kills its worker", "its lease ended")]


def test_redrive_sends_dead_letters_to_their_queue_again(queue: FileChannel) -> None:
    queue.append_many([b"one", b"two"])
    group = queue.group("workers", max_tries=1)
    for job in group.take_many():
        job.fail(reason="the database was away")
    assert group.redrive(limit=1) == 1
    assert [letter.payload for letter in group.dead()] == [b"two"]
    assert group.redrive() == 1
    assert group.redrive() == 0
    assert group.dead() == []
    jobs = group.take_many()
    assert [(job.payload, job.tries) for job in jobs] == [(b"one", 1), (b"two", 1)]


def test_redrive_works_beside_other_senders(queue: FileChannel, tmp_path: Path) -> None:
    with FileChannel.share(tmp_path / "shared") as shared:
        shared.append(b"one")
        group = FileChannel.attach(tmp_path / "shared").group("workers", max_tries=1)
        group.take().fail(reason="no")
        assert group.redrive() == 1
        assert group.take().payload == b"one"


def test_messages_of_one_key_are_worked_on_one_at_a_time(queue: FileChannel) -> None:
    queue.append_many([b"a1", b"a2", b"b1", b"a3", b"b2"])
    key = lambda payload: payload[:1]  # noqa: E731
    one, two = queue.group("workers", key=key), other(queue, key=key)
    first = one.take_many(10)
    assert [job.payload for job in first] == [b"a1", b"b1"]
    assert two.take_many(10) == []
    first[0].ack()
    second = two.take_many(10)
    assert [job.payload for job in second] == [b"a2"]
    first[1].fail(delay=0)
    assert [job.payload for job in two.take_many(10)] == [b"b1"]


def test_all_workers_must_agree_on_the_order(queue: FileChannel) -> None:
    queue.group("workers")
    with pytest.raises(OptionsError, match="no order of keys"):
        other(queue, key=lambda payload: payload)


def test_a_group_holds_its_segments_until_it_has_finished_them(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", compression="none", segment_bytes=100)
    with FileChannel.open(tmp_path / "jobs", options) as queue:
        group = queue.group("workers")
        queue.append_many([b"x" * 42] * 10)  # two a segment
        jobs = group.take_many(10)
        for job in jobs[1:]:
            job.ack()
        assert queue.stats().first_position == 0
        assert queue.stats().receivers == {"group.workers": 0}
        jobs[0].ack()
        assert queue.stats().first_position == 400
        queue.forget_group("workers")
        assert queue.stats().receivers == {}


def test_a_group_goes_on_where_it_was_after_everyone_has_left(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs") as queue:
        queue.append_many([b"a", b"b", b"c"])
        jobs = queue.group("workers", max_tries=9).take_many(3)
        jobs[1].ack()
        jobs[0].fail(delay=0, reason="no")
    with FileChannel.open(tmp_path / "jobs") as queue:
        found = queue.group("workers").take_many(9)
        assert [(job.payload, job.tries) for job in found] == [(b"a", 2), (b"c", 2)]


def test_closing_gives_back_at_once_unless_told_otherwise(queue: FileChannel) -> None:
    queue.append(b"work")
    one, two = other(queue), other(queue)
    one.take()
    one.close()
    job = two.take(timeout=0)
    assert job.tries == 2
    two.close(give_back=False)
    assert other(queue).take_many(1) == []


def test_a_new_group_starts_at_the_first_or_the_latest_message(queue: FileChannel) -> None:
    queue.append(b"old")
    late = queue.group("late", start="latest")
    queue.append(b"new")
    assert payloads(late) == [b"new"]
    assert payloads(queue.group("early")) == [b"old", b"new"]


def test_a_wait_for_a_message_ends_with_one_with_time_or_with_the_queue(queue: FileChannel) -> None:
    group = other(queue)
    with pytest.raises(Timeout, match=r"within 0\.01 s"):
        group.take(timeout=0.01)
    queue.append(b"work")
    assert group.take(timeout=60).payload == b"work"
    mine = queue.group("workers")
    queue.close()
    with pytest.raises(ClosedError):
        mine.take()


def test_a_journal_is_rewritten_before_it_grows_long(queue: FileChannel) -> None:
    queue.append_many([b""] * 2000)
    group = queue.group("workers", worker="w" * 3000)
    journal = Path(queue.path) / "penstock-group-workers"
    view = other(queue)
    longest = 0
    for _ in range(2000):
        group.take().ack()
        longest = max(longest, journal.stat().st_size)
    assert REWRITE_BYTES < longest < REWRITE_BYTES + 20_000
    assert journal.stat().st_size < REWRITE_BYTES
    assert view.stats().waiting == 0


def test_a_torn_record_of_a_worker_that_died_is_cut_off(queue: FileChannel) -> None:
    queue.append_many([b"a", b"b"])
    group = queue.group("workers")
    group.take().ack()
    journal = Path(queue.path) / "penstock-group-workers"
    whole = journal.read_bytes()
    with open(journal, "ab") as file:
        file.write(b"\0\0\0\x30half a record")
    late = other(queue)
    assert late.take().payload == b"b"
    assert journal.read_bytes().startswith(whole)
    assert group.stats().leased == 1


def test_a_destroyed_journal_is_set_aside_and_nothing_is_lost(queue: FileChannel) -> None:
    queue.append_many([b"a", b"b", b"c"])
    group = queue.group("workers")
    jobs = group.take_many(3)
    jobs[0].ack()
    jobs[2].ack()
    journal = Path(queue.path) / "penstock-group-workers"
    journal.write_bytes(b"\xff" * 100)
    assert payloads(other(queue)) == [b"b", b"c"]  # from its first unfinished message on
    assert (Path(queue.path) / "penstock-penstock-group-workers.bad").exists()


def test_a_forgotten_group_is_noticed_by_its_workers(queue: FileChannel) -> None:
    queue.append(b"a")
    group = other(queue)
    group.take().ack()
    queue.forget_group("workers")
    with pytest.raises(ReplacedError, match="forgotten"):
        group.take_many(1)
    with pytest.raises(OptionsError, match="no group named"):
        queue.forget_group("workers")


def test_a_write_that_fails_hands_nothing_out(tmp_path: Path) -> None:
    from penstock.disk import PosixDisk
    from penstock.testing.faulty import FaultyDisk

    disk = FaultyDisk(PosixDisk())
    with FileChannel.open(str(tmp_path / "jobs"), ChannelOptions(sync="none"), disk=disk) as queue:
        queue.append(b"work")
        group = queue.group("workers")
        disk.fail("write_at", OSError(28, "No space left on device"), path="penstock-group-workers")
        with pytest.raises(OSError, match="No space left"):
            group.take_many(1)
        job = group.take(timeout=0)
        assert job.tries == 1


def test_damage_is_raised_or_skipped(tmp_path: Path) -> None:
    from penstock.errors import CorruptionError

    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="none", compression="none")) as queue:
        queue.append_many([b"good", b"spoilt", b"better"])
        with open(tmp_path / "jobs" / "segment.0", "r+b") as file:
            file.seek(64 + 12 + 8)
            file.write(b"SPOILT")
        assert payloads(queue.group("strict")) == [b"good"]
        with pytest.raises(CorruptionError):
            queue.group("strict").take_many(1)
        lenient = queue.group("lenient", on_damage="skip")
        assert [*payloads(lenient), *payloads(lenient)] == [b"good", b"better"]
        assert len(lenient.problems) == 1


def test_a_handful_of_unfinished_messages_bounds_what_is_taken(queue: FileChannel) -> None:
    queue.append_many([b"%d" % n for n in range(10)])
    group = queue.group("workers", max_unfinished=3)
    jobs = group.take_many(10)
    assert len(jobs) == 3
    assert group.take_many(10) == []
    jobs[1].ack()
    assert payloads(group) == [b"3"]


def test_the_same_part_is_returned_when_asked_for_again(queue: FileChannel) -> None:
    group = queue.group("workers", max_tries=3)
    assert queue.group("workers") is group
    with pytest.raises(OptionsError, match="other options"):
        queue.group("workers", max_tries=4)
    with pytest.raises(OptionsError, match="names that begin with"):
        queue.ack_rx("group.workers")
    with pytest.raises(OptionsError, match="group name 'no/name'"):
        queue.group("no/name")


def test_a_group_works_in_memory_as_well() -> None:
    disk = MemoryDisk()
    with FileChannel.open("jobs", ChannelOptions(sync="none"), disk=disk) as queue:
        queue.append(b"work")
        with queue.group("workers").take() as job:
            assert job.payload == b"work"


def test_asyncio_takes_acknowledges_and_fails(queue: FileChannel) -> None:
    async def work() -> list[bytes]:
        group, done = queue.group("workers", retry_seconds=0), []
        async with await group.atake() as job:
            done.append(job.payload)
        with contextlib.suppress(ZeroDivisionError):
            async with await group.atake() as job:
                1 / 0  # noqa: B018
        async for job in group:
            done.append(job.payload)
            await job.aack()
            if len(done) == 3:
                return done
        raise AssertionError

    queue.append_many([b"a", b"b", b"c"])
    assert asyncio.run(work()) == [b"a", b"b", b"c"]


def test_a_cancelled_take_gives_back_what_it_got(queue: FileChannel) -> None:
    async def cancel() -> None:
        group = queue.group("workers", lease_seconds=3600)
        taking = [asyncio.ensure_future(group.atake()) for _ in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        queue.append_many([b"work"] * 4)
        for task in taking:
            task.cancel()
        kept = [
            job for job in await asyncio.gather(*taking, return_exceptions=True) if not isinstance(job, BaseException)
        ]
        for job in kept:
            await job.aack()
        for _ in range(4 - len(kept)):
            await (await group.atake(timeout=60)).aack()

    asyncio.run(cancel())


def test_two_threads_never_have_the_same_message(queue: FileChannel) -> None:
    from concurrent.futures import ThreadPoolExecutor

    queue.append_many([b"%d" % n for n in range(300)])
    group = queue.group("workers")

    def work(_: int) -> list[int]:
        done = []
        while jobs := group.take_many(3):
            done += [int(job.payload) for job in jobs]
            jobs.ack()
        return done

    with ThreadPoolExecutor(4) as pool:
        found = [number for part in pool.map(work, range(4)) for number in part]
    assert sorted(found) == list(range(300))


def test_stats_tell_who_works_on_what(queue: FileChannel) -> None:
    clock = FakeClock()
    queue.append_many([b"x"] * 5)
    group = queue.group("workers", clock=clock, worker="ann", **QUIET)
    jobs = group.take_many(3)
    jobs[1].fail(delay=60)
    clock.pass_(5)
    stats = group.stats()
    assert (stats.waiting, stats.leased, stats.delayed, stats.dead) == (2, 2, 1, 0)
    assert (stats.oldest_position, stats.oldest_seconds, stats.workers) == (0, 5.0, {"ann": 2})


def test_waiting_costs_little_time(queue: FileChannel) -> None:
    group = other(queue)
    before = time.thread_time()
    group.take_many(1, timeout=0.3)
    assert time.thread_time() - before < 0.2
