"""Promise: many callers wait for one sync, nobody's request is answered by a sync that began before it."""

from __future__ import annotations

import threading

import pytest

from penstock.disk import GroupCommit
from penstock.errors import ClosedError

pytestmark = pytest.mark.timeout(30)


def test_requests_during_a_sync_share_the_next_one() -> None:
    entered, release = threading.Event(), threading.Event()
    syncs = []

    def sync() -> int:
        syncs.append(len(syncs))
        entered.set()
        release.wait(10)
        return len(syncs)

    committer = GroupCommit().committer(sync)
    first = committer.request()
    entered.wait(10)
    later = [committer.request() for _ in range(50)]
    assert not first.done()
    release.set()
    assert first.result(10) == 1
    assert {future.result(10) for future in later} == {2}
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
        committer.request().result(10)
    assert committer.error is not None
    assert committer.request().result(10) == 7
    assert committer.error is None
    committer.close()


def test_logs_are_synced_side_by_side() -> None:
    barrier = threading.Barrier(3)
    group = GroupCommit(threads=4)
    committers = [group.committer(lambda: barrier.wait(10)) for _ in range(3)]
    futures = [committer.request() for committer in committers]
    assert sorted(future.result(10) for future in futures) == [0, 1, 2]  # one alone would never pass the barrier
    for committer in committers:
        committer.close()


def test_a_touch_is_synced_within_the_interval_once() -> None:
    done = threading.Event()
    count = []

    def sync() -> int:
        count.append(1)
        done.set()
        return 0

    committer = GroupCommit().committer(sync, interval=0.01)
    for _ in range(100):
        committer.touch()
    assert done.wait(10)
    committer.close()
    assert len(count) <= 2


def test_a_closed_committer_takes_no_more() -> None:
    committer = GroupCommit().committer(lambda: 1)
    committer.request().result(10)
    committer.close()
    with pytest.raises(ClosedError):
        committer.request()
    committer.touch()  # nothing to do, nothing to say


def test_close_waits_for_what_was_asked() -> None:
    release = threading.Event()
    committer = GroupCommit().committer(lambda: int(release.wait(10)))
    future = committer.request()
    threading.Timer(0.02, release.set).start()
    committer.close()
    assert future.done()
