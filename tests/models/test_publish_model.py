"""The published artifact never goes back, its payload can always be fetched, and a bootstrap never diverges unseen.

The default run explores two nodes and two revisions; ``--long`` the bound whose counts are known of the reference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checker import Report, explore
from publish_model import Fleet, PublishModel


@pytest.fixture
def long_bounds(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long", default=False))


def stale(state: Fleet) -> bool:
    return state.importer[0] == "resumed" and state.importer[2] == "stale"


def synced(state: Fleet) -> bool:
    return state.importer[0] == "resumed" and state.importer[2] == "synced"


def installed_is_exact(state: Fleet) -> bool:
    """An installed fold is one exporter's state at its cursor: never a mixture."""
    if state.importer[0] not in ("imported", "resumed"):
        return True
    _, cursor, has_key = state.importer[1]
    return bool(has_key == (not state.deleted or cursor < state.deleted))


def in_second_round(state: Fleet) -> bool:
    pointer = state.pointer
    return pointer is not None and any(
        phase[0] in ("exported", "uploaded") and phase[1][0] == pointer[0] and phase[1][1] > pointer[1]
        for phase in state.nodes
    )


ALWAYS: dict[str, Any] = {
    "never goes back": lambda state, _: not state.regressed,
    "no torn pair": lambda state, _: state.importer[0] != "cross check failed",
    "the target is there": lambda state, _: state.pointer is None or state.pointer in state.uploaded,
    "an import is exact": lambda state, _: installed_is_exact(state),
    "an import is not ahead": lambda state, _: (
        state.importer[0] not in ("pointer", "imported", "resumed")
        or (state.pointer is not None and state.importer[1][1] <= state.pointer[1])
    ),
    "never stale": lambda state, _: not stale(state),
    "at rest it is synced": lambda state, terminal: not terminal or synced(state),
}
SOMETIMES: dict[str, Any] = {
    "refused": lambda state, _: state.refused,
    "missed": lambda state, _: state.importer[0] == "missed",
    "synced": lambda state, _: synced(state),
    "a second round": lambda state, _: in_second_round(state),
}


def run(*until: str, **settings: Any) -> Report[Fleet]:
    model = PublishModel(2, settings.pop("revisions", 2), **settings)
    return explore(model.initial(), model.steps, always=ALWAYS, sometimes=SOMETIMES, until=until)


def test_publishing_by_swap_never_regresses_dangles_or_diverges(long_bounds: bool) -> None:
    report = run(revisions=3 if long_bounds else 2)
    assert report.violations == {}
    assert report.witnesses.keys() == SOMETIMES.keys()
    assert len(report.witnesses["synced"]) == 8
    assert len(report.witnesses["refused"]) == 11
    assert len(report.witnesses["missed"]) == 14
    assert len(report.witnesses["a second round"]) == 9
    if long_bounds:
        assert (report.states, report.transitions) == (827_924, 4_205_444)


def test_two_registers_regress_and_tear() -> None:
    model = PublishModel(2, 2, legacy=True)
    unseen: dict[str, Any] = {"it went back and nobody knows": lambda state, _: state.regressed and synced(state)}
    report = explore(model.initial(), model.steps, always=ALWAYS, sometimes=unseen)
    assert len(report.violations["never goes back"]) == 11
    assert len(report.violations["no torn pair"]) == 10
    assert report.witnesses.keys() == unseen.keys()
    assert "an import is exact" not in report.violations  # what is installed is one node's state all the same


def test_last_write_wins_regresses() -> None:
    report = run("never goes back", "the target is there", mutation="last write wins")
    assert len(report.violations["never goes back"]) == 11
    assert len(report.violations["the target is there"]) == 12


def test_pruning_by_age_leaves_the_pointer_dangling() -> None:
    report = run("the target is there", mutation="prune by age")
    assert "never goes back" not in report.violations
    assert len(report.violations["the target is there"]) == 16


@pytest.mark.parametrize("settings", [{"mutation": "silent clamp"}, {"resync": "none"}, {"resync": "degrade"}])
def test_resuming_without_the_window_or_the_resync_keeps_a_stale_key(settings: dict[str, Any]) -> None:
    report = run("never stale", **settings)
    assert len(report.violations["never stale"]) == 11


@pytest.mark.parametrize(
    ("settings", "states", "transitions"),
    [
        ({"resync": "none"}, 857_162, 4_321_234),
        ({"legacy": True}, 389_801, 1_879_754),
        ({"legacy": True, "resync": "degrade"}, 403_847, 1_970_818),
        ({"legacy": True, "resync": "none"}, 403_847, 1_931_242),
        ({"mutation": "last write wins"}, 959_400, 4_655_876),
        ({"mutation": "prune by age"}, 1_055_462, 5_206_948),
        ({"mutation": "silent clamp"}, 857_162, 4_321_234),
    ],
)
def test_the_model_is_the_one_of_the_reference(
    settings: dict[str, Any], states: int, transitions: int, long_bounds: bool
) -> None:
    if not long_bounds:
        pytest.skip("the full bound runs with --long")
    report = run(revisions=3, **settings)
    assert (report.states, report.transitions) == (states, transitions)
