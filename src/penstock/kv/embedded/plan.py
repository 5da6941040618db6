"""What a turn writes: many changes decided one after another, without a disk, a clock or a lock.

A turn knows the state exactly, and the numbers its records will get, so that each change is decided as if those
before it had been written already.  That is what makes compare-and-set hold inside of one turn and between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from penstock.errors import AlreadyExists, Backpressure, PenstockError, RevisionMismatch
from penstock.types import KvEntry, KvUpdate, Op, VersionToken

__all__ = ["Change", "ChangePlan", "plan_changes"]

RECORD_OVERHEAD: Final = 24
"""Roughly what a live key costs in state.snap beside key and value."""


class Change(msgspec.Struct, frozen=True):
    """One change somebody asks for.  ``expire`` is a purge on behalf of a clock: it does nothing if it is late.

    >>> Change("put", "node.a", b"1").ttl_ns
    0
    """

    what: Literal["put", "create", "update", "delete", "purge", "expire"]
    key: str
    value: bytes = b""
    revision: int = 0
    ttl_ns: int = 0


class ChangePlan(msgspec.Struct):
    """The updates to append, how long they live, and for each change its revision or why it was refused."""

    updates: list[KvUpdate] = msgspec.field(default_factory=list)
    ttl_ns: list[int] = msgspec.field(default_factory=list)
    outcomes: list[int | PenstockError] = msgspec.field(default_factory=list)


def plan_changes(
    bucket: str,
    changes: Iterable[Change],
    entry: Callable[[str], KvEntry | None],
    next_revision: int,
    room_bytes: int | None = None,
    *,
    expired: Callable[[str], KvEntry | None] | None = None,
) -> ChangePlan:
    """Decide changes in order: ``entry`` tells the state, ``next_revision`` what the first of them gets.

    ``room_bytes`` is how much the live keys may still grow, None for no limit.  ``entry`` hides keys that have expired;
    ``expired`` does not, for the changes that purge them.

    >>> state = {}
    >>> plan = plan_changes("b", [Change("create", "a", b"1"), Change("create", "a", b"2")], state.get, 5)
    >>> plan.outcomes[0], type(plan.outcomes[1]).__name__, len(plan.updates)
    (5, 'AlreadyExists', 1)
    """
    plan = ChangePlan()
    seen: dict[str, KvEntry | None] = {}
    for change in changes:
        now = None
        if room_bytes is not None or change.what not in ("put", "delete", "purge"):  # these ask no questions
            look = expired if expired is not None and change.what == "expire" else entry
            now = seen[change.key] if change.key in seen else look(change.key)
        revision = 0 if now is None else now.version.as_int() or 0
        problem = _refused(bucket, change, now is not None, revision)
        if problem is None and change.what in ("put", "create", "update") and room_bytes is not None:
            grown = len(change.value) - (-len(change.key) - RECORD_OVERHEAD if now is None else len(now.value))
            if grown > max(room_bytes, 0):
                problem = Backpressure(f"{bucket}: full: key {change.key!r} needs {grown} bytes more than are left")
            else:
                room_bytes -= grown
        if problem is not None:
            plan.outcomes.append(problem)
            continue
        if change.what == "expire" and revision != change.revision:
            plan.outcomes.append(0)
            continue
        version = VersionToken.of(next_revision + len(plan.updates))
        plan.outcomes.append(next_revision + len(plan.updates))
        if change.what in ("delete", "purge", "expire"):
            if room_bytes is not None and now is not None:
                room_bytes += len(now.value) + len(change.key) + RECORD_OVERHEAD
            op = Op.DELETE if change.what == "delete" else Op.PURGE
            plan.updates.append(KvUpdate(op, change.key, b"", version))
            plan.ttl_ns.append(0)
            seen[change.key] = None
        else:
            plan.updates.append(KvUpdate(Op.PUT, change.key, change.value, version))
            plan.ttl_ns.append(change.ttl_ns)
            seen[change.key] = KvEntry(change.key, change.value, version)
    return plan


def _refused(bucket: str, change: Change, present: bool, revision: int) -> PenstockError | None:
    if change.what == "create" and present:
        return AlreadyExists(f"{bucket}: key {change.key!r} exists")
    if change.what == "update" and not (present and revision == change.revision):
        now = f"revision {revision}" if present else "not there"
        return RevisionMismatch(f"{bucket}: key {change.key!r} is {now}, not revision {change.revision}")
    return None
