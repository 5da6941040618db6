"""Promise: many callers wait for one sync, nobody's request is answered by a sync that began before it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from penstock.disk import GroupCommit
from penstock.errors import ClosedError, ReadOnlyError


def test_requests_during_a_sync_share_the_next_one() -> None:
    entered, release = threading.Event(), threading.Event()
    syncs = []

    def sync() -> int:
        syncs.append(len(syncs))
        entered.set()
        release.wait(60)
        return len(syncs)

    committer = GroupCommit().committer(sync)
    first = committer.request()
    entered.wait(60)
    later = [committer.request() for _ in range(50)]
    assert not first.done()
    release.set()
    assert first.result(60) == 1
    assert {future.result(60) for future in later} == {2}
    assert len(syncs) == 2
    committer.close()


def test_a_failure_belongs_to_those_who_waited() -> None:
    outcomes: list[int | OSError] = [OSError(5, "Input/output error"), 7]

    def sync() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    committer = GroupCommit().committer(sync)
    with pytest.raises(OSError, match="Input/output"):
        committer.request().result(60)
    assert committer.error is not None
    assert committer.request().result(60) == 7
    assert committer.error is None
    committer.close()


def test_logs_are_synced_side_by_side() -> None:
    barrier = threading.Barrier(3)
    group = GroupCommit(threads=4)
    committers = [group.committer(lambda: barrier.wait(60)) for _ in range(3)]
    futures = [committer.request() for committer in committers]
    assert sorted(future.result(60) for future in futures) == [0, 1, 2]  # one alone would never pass the barrier
    for committer in committers:
        committer.close()


def test_a_touch_is_synced_within_the_interval_once() -> None:
    begun, go = threading.Semaphore(0), threading.Semaphore(0)

    def sync() -> int:
        begun.release()
        go.acquire(timeout=60)
        return 0

    committer = GroupCommit().committer(sync, interval=0.01)
    committer.touch()
    assert begun.acquire(timeout=60)
    for _ in range(100):
        committer.touch()  # what is written while a sync runs, the next one takes
    go.release()
    assert begun.acquire(timeout=60)
    assert committer._due is None  # and no other
    go.release(1000)
    committer.close()
    assert not begun.acquire(timeout=0.05)


def test_a_closed_committer_takes_no_more() -> None:
    committer = GroupCommit().committer(lambda: 1)
    committer.request().result(60)
    committer.close()
    with pytest.raises(ClosedError):
        committer.request()
    committer.touch()  # nothing to do, nothing to say


def test_close_waits_for_what_was_asked() -> None:
    release = threading.Event()
    committer = GroupCommit().committer(lambda: int(release.wait(60)))
    future = committer.request()
    threading.Timer(0.02, release.set).start()
    committer.close()
    assert future.done()


def test_who_comes_alone_syncs_on_its_own_thread() -> None:
    committer = GroupCommit().committer(threading.get_ident)
    assert committer.wait() == threading.get_ident()
    assert committer.request().result(60) != threading.get_ident()
    committer.close()
    with pytest.raises(ClosedError):
        committer.wait()


def test_who_comes_while_another_syncs_shares_the_next_sync() -> None:
    entered, release = threading.Event(), threading.Event()
    running, syncs = [], []

    def sync() -> int:
        running.append(1)
        assert len(running) == 1, "two syncs at a time"
        syncs.append(1)
        entered.set()
        release.wait(60)
        running.pop()
        return len(syncs)

    committer = GroupCommit().committer(sync, interval=0.001)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(committer.wait())) for _ in range(9)]
    threads[0].start()
    assert entered.wait(60)
    committer.touch()
    for thread in threads[1:]:
        thread.start()
    while len(committer._waiting) < 8:
        threading.Event().wait(0.001)
    release.set()
    for thread in threads:
        thread.join(60)
    committer.close()
    assert found.count(1) == 1
    assert all(number >= 2 for number in found if number != 1)
    assert len(syncs) <= 3  # the lone one, one for the eight, and perhaps one for the touch


def test_a_touch_during_a_sync_of_the_caller_is_not_forgotten() -> None:
    syncs = []
    committer = GroupCommit().committer(lambda: syncs.append(1) or committer.touch() or 0, interval=0.01)
    committer.touch()
    committer.wait()
    deadline = time.monotonic() + 60
    while len(syncs) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(syncs) >= 3
    committer.close()


def test_a_failure_on_the_callers_thread_is_the_callers() -> None:
    def sync() -> int:
        raise OSError(5, "Input/output error")

    committer = GroupCommit().committer(sync)
    with pytest.raises(OSError, match="Input/output"):
        committer.wait()
    assert committer.error is not None
    committer.close()


class Shortage:
    """Lets no thread start while it is on; stands in the place of Thread.start."""

    def __init__(self) -> None:
        self.on, self._start = True, threading.Thread.start

    def __get__(self, thread: threading.Thread, kind: type) -> Callable[[], None]:
        if self.on:
            raise RuntimeError("can't start new thread")
        return lambda: self._start(thread)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    found = Shortage()
    monkeypatch.setattr(threading.Thread, "start", found)
    return found


def test_without_threads_whoever_asks_syncs(shortage: Shortage) -> None:
    committer = GroupCommit().committer(threading.get_ident)
    assert committer.request().result(0) == threading.get_ident()
    assert committer.wait() == threading.get_ident()
    committer.close()


def test_without_threads_a_write_is_synced_at_once(shortage: Shortage) -> None:
    synced: list[int] = []
    committer = GroupCommit().committer(lambda: synced.append(threading.get_ident()) or 0, interval=3600.0)
    committer.touch()
    committer.touch()
    assert synced == [threading.get_ident()] * 2  # nobody would when the interval has passed
    committer.close()


def test_a_write_beside_a_lone_sync_is_synced_without_threads(shortage: Shortage) -> None:
    begun, go, synced = threading.Event(), threading.Event(), []

    def sync() -> int:
        begun.set()
        assert go.wait(60)
        synced.append(threading.get_ident())
        return 0

    committer = GroupCommit().committer(sync, interval=3600.0)
    shortage.on = False
    other = threading.Thread(target=committer.wait)
    other.start()
    shortage.on = True
    assert begun.wait(60)
    committer.touch()  # which waits for nobody
    go.set()
    other.join(60)
    assert len(synced) == 2
    committer.close()


def test_without_threads_a_sync_that_failed_is_told_and_not_tried_for_ever(shortage: Shortage) -> None:
    outcomes: list[OSError | None] = [OSError(28, "full"), OSError(28, "full"), None]

    def sync() -> int:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return 3

    committer = GroupCommit().committer(sync, interval=0.001)
    committer.touch()
    assert len(outcomes) == 2
    with pytest.raises(OSError, match="full"):
        committer.check()
    committer.check()
    assert committer.error is None
    committer.close()


def test_a_committer_recovers_when_threads_can_be_had_again(shortage: Shortage) -> None:
    synced: list[str] = []
    more = threading.Event()
    committer = GroupCommit().committer(
        lambda: synced.append(threading.current_thread().name) or int(len(synced) > 1 and more.set() is None),
        interval=0.001,
    )
    committer.touch()
    shortage.on = False
    committer.touch()
    assert more.wait(60)
    assert synced[0] == threading.current_thread().name
    assert synced[1].startswith("penstock-commit-")
    committer.close()


def test_close_ends_without_threads_and_answers_who_waits(shortage: Shortage) -> None:
    group = GroupCommit()
    committer = group.committer(lambda: 5, interval=60.0)
    committer.touch()
    future: Future[int] = Future()
    assert group.enqueue(committer, future) is False  # its caller has not come to serve it yet
    committer.close()
    assert future.result(0) == 5


def test_who_waits_behind_a_lone_sync_is_served_without_threads(shortage: Shortage) -> None:
    entered, release = threading.Event(), threading.Event()

    def sync() -> int:
        entered.set()
        release.wait(60)
        return 1

    committer = GroupCommit().committer(sync)
    shortage.on = False
    waiting = threading.Thread(target=committer.wait)
    waiting.start()
    assert entered.wait(60)
    shortage.on = True
    future = committer.request()
    assert not future.done()
    release.set()
    waiting.join(60)
    assert future.result(60) == 1
    committer.close()


def test_a_background_sync_that_failed_is_tried_again_and_told_before_the_next_write() -> None:
    failing, tries = True, threading.Semaphore(0)

    def sync() -> int:
        tries.release()
        if failing:
            raise OSError(28, "No space left on device")
        return 1

    committer = GroupCommit().committer(sync, interval=0.001)
    committer.touch()
    assert tries.acquire(timeout=60)
    assert tries.acquire(timeout=60), "it was not tried again"
    with pytest.raises(OSError, match="No space"):
        committer.check()
    failing = False
    committer.check()
    assert committer.error is None
    committer.close()


def test_a_failure_that_is_final_is_not_tried_again() -> None:
    tries: list[int] = []
    told = threading.Event()

    def sync() -> int:
        tries.append(1)
        told.set()
        raise ReadOnlyError("an earlier sync failed")

    committer = GroupCommit().committer(sync, interval=0.001)
    committer.touch()
    assert told.wait(60)
    deadline = time.monotonic() + 60
    while committer.error is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(ReadOnlyError):
        committer.check()
    assert len(tries) == 2
    committer.close()


def test_a_thread_that_sleeps_keeps_no_log_that_was_closed() -> None:
    # seen as open files of disks in memory: each of eight sleeping threads kept the last logs that it had synced
    class Log:
        def sync(self) -> int:
            return 7

    group = GroupCommit(threads=1)
    gone = threading.Event()
    log = Log()
    weakref.finalize(log, gone.set)
    committer = group.committer(log.sync, interval=0.001)
    assert committer.request().result(10) == 7
    committer.touch()
    committer.close()
    del log, committer
    for _ in range(1000):  # the thread goes to sleep after it has answered
        gc.collect()
        if gone.wait(0.01):
            break
    assert gone.is_set()


def test_an_interval_that_never_ends_ends_no_thread() -> None:
    """Threads cannot wait for that long: they ended by it, and with them the syncs of all other logs."""
    group = GroupCommit()
    endless, other = group.committer(lambda: 1, interval=float("inf")), group.committer(lambda: 2)
    endless.touch()
    for _ in range(3):
        assert other.request().result(60) == 2
    assert endless.request().result(60) == 1
    assert group.threads > 0
    endless.close()
    other.close()
