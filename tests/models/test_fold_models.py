"""The guards of a fold hold in every order of events within the bound, and each one is needed.

The numbers of states and transitions are those the reference's models have: they are the same models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from applied_model import Applied, AppliedModel
from checker import Report, explore
from live_watch_model import LiveWatch, LiveWatchModel, converged
from resync_order_model import Resync, ResyncModel


@pytest.fixture
def long_bounds(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long", default=False))


def bounds(long_bounds: bool) -> list[int]:
    return [5, 12, 25] if long_bounds else [5, 8]


# --- Cursor authority


def explore_applied(model: AppliedModel) -> Report[Applied]:
    return explore(
        Applied(),
        model.steps,
        always={
            "no holes": lambda state, _: not state.holes,
            "the queue begins where the store ends": lambda state, _: state.queued_from == state.stored,
            "at rest the store is at the head": lambda state, _: (
                not (state.head == state.delivered == model.revisions == state.queued_from)
                or state.stored == state.head
            ),
        },
        sometimes={
            "the store reaches the head": lambda state, _: state.stored == model.revisions,
            "memory is ahead of the store": lambda state, _: state.applied > state.stored,
        },
    )


def test_a_cursor_never_covers_what_the_store_did_not_get(long_bounds: bool) -> None:
    for revisions in bounds(long_bounds):
        report = explore_applied(AppliedModel(revisions))
        assert report.violations == {}
        assert set(report.witnesses) == {"the store reaches the head", "memory is ahead of the store"}
        if revisions == 5:
            assert (report.states, report.transitions) == (126, 476)


def test_dropping_a_failed_batch_leaves_a_hole() -> None:
    report = explore_applied(AppliedModel(5, drop_failed_batch=True))
    assert report.states == 161
    trace = report.violations["no holes"]
    assert len(trace) == 6
    assert [action for action in trace if "flush" in action] == ["flush fails", "flush ok"]


def test_resuming_from_memory_leaves_a_hole() -> None:
    report = explore_applied(AppliedModel(5, resume_from_memory=True))
    assert report.states == 287
    assert report.violations["no holes"] == ["churn", "deliver", "flush fails", "crash"]


# --- The floor guard


def explore_live(model: LiveWatchModel) -> Report[LiveWatch]:
    return explore(
        LiveWatch(),
        model.steps,
        always={
            "no key is removed that was not deleted": lambda state, _: state.has_key or state.delete_rev is not None,
            "at rest the fold is the bucket": lambda state, terminal: not terminal or converged(state),
        },
        sometimes={
            "a delete arrives": lambda state, _: not state.has_key and not state.tripped,
            "the guard repairs": lambda state, _: state.tripped and converged(state),
        },
    )


def test_a_guarded_watch_always_converges(long_bounds: bool) -> None:
    for revisions in bounds(long_bounds):
        report = explore_live(LiveWatchModel(revisions))
        assert report.violations == {}
        assert set(report.witnesses) == {"a delete arrives", "the guard repairs"}
        if revisions == 5:
            assert report.states == 806


def test_without_the_guard_a_deleted_key_stays_for_ever() -> None:
    report = explore_live(LiveWatchModel(5, guarded=False))
    assert report.states == 511
    assert list(report.violations) == ["at rest the fold is the bucket"]
    assert set(report.witnesses) == {"a delete arrives"}
    assert len(report.violations["at rest the fold is the bucket"]) == 10


def test_looking_now_and_then_is_not_enough() -> None:
    report = explore_live(LiveWatchModel(5, periodic_only=True))
    trace = report.violations["at rest the fold is the bucket"]
    assert "deliver" in trace[trace.index("compact") :]


# --- The barrier of a resync


def explore_resync(model: ResyncModel) -> Report[Resync]:
    return explore(
        Resync(),
        model.steps,
        always={
            "at rest the fold is the bucket": lambda state, terminal: not terminal or state.fold_has == state.bucket_has
        },
        sometimes={
            "k comes back after the listing": lambda state, _: state.bucket_has and not state.listed
            and state.phase != "expired",
            "k comes back before the listing": lambda state, _: state.listed,
            "reconciled": lambda state, _: state.deletes_folded and not state.fold_has,
        },
    )  # fmt: skip


def test_deletes_come_before_the_re_list() -> None:
    report = explore_resync(ResyncModel())
    assert report.violations == {}
    assert len(report.witnesses) == 3
    assert report.states == 13


def test_without_the_barrier_a_key_that_came_back_is_lost() -> None:
    report = explore_resync(ResyncModel(barrier=False))
    assert report.states == 19
    assert len(report.violations["at rest the fold is the bucket"]) == 5
    assert report.violations["at rest the fold is the bucket"][-1] == "fold deletes"


# --- The checker itself


def test_the_checker_finds_the_shortest_way() -> None:
    report = explore(
        0,
        lambda n: [("one", n + 1), ("two", n + 2)] if n < 7 else [],
        always={"never six": lambda n, _: n != 6},
        sometimes={"end": lambda n, terminal: terminal},
    )
    assert report.violations["never six"] == ["two", "two", "two"]
    assert (report.states, report.transitions) == (9, 14)
    assert len(report.witnesses["end"]) == 4
