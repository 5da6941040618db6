"""A small explicit-state checker: breadth first, every state within the bound, shortest traces.

A model says where it starts and what can happen next; a state is any hashable value.  ``always`` must hold in
every state, ``sometimes`` in at least one; both are called with (state, whether it is terminal).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=Hashable)
Steps = Callable[[State], Iterable[tuple[str, State]]]
Property = Callable[[State, bool], bool]


@dataclass
class Report(Generic[State]):
    """What an exploration found: sizes, and the shortest trace to each violation and each witness."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    violations: dict[str, list[str]] = field(default_factory=dict)
    witnesses: dict[str, list[str]] = field(default_factory=dict)


def explore(
    initial: State,
    steps: Steps[State],
    *,
    always: Mapping[str, Property[State]] | None = None,
    sometimes: Mapping[str, Property[State]] | None = None,
    until: Iterable[str] = (),
) -> Report[State]:
    """Visit every reachable state, or stop once everything named in ``until`` was found; return the report."""
    wanted = set(until)
    always, sometimes = dict(always or {}), dict(sometimes or {})
    report: Report[State] = Report()
    parents: dict[State, tuple[State, str] | None] = {initial: None}
    level = [initial]
    while level:
        report.depth += 1
        following: list[State] = []
        for state in level:
            report.states += 1
            terminal = True
            for action, after in steps(state):
                terminal = False
                report.transitions += 1
                if after not in parents:
                    parents[after] = (state, action)
                    following.append(after)
            for name, holds in always.items():
                if name not in report.violations and not holds(state, terminal):
                    report.violations[name] = _trace(parents, state)
            for name, holds in sometimes.items():
                if name not in report.witnesses and holds(state, terminal):
                    report.witnesses[name] = _trace(parents, state)
        level = following
        if wanted and wanted <= report.violations.keys() | report.witnesses.keys():
            break
    return report


def _trace(parents: Mapping[State, Any], state: State) -> list[str]:
    """Return the actions that lead to a state."""
    actions: list[str] = []
    while (step := parents[state]) is not None:
        state, action = step
        actions.append(action)
    return actions[::-1]
