"""The floor guard: retention passes a live watch of everything.

One key exists at the start; it may be deleted once.  A watch that skips the evicted delete holds a key for ever that
the bucket has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.fold.guards import resume_window_ok


class LiveWatch(NamedTuple):
    head: int = 0
    floor: int = 0
    """Revisions up to here are evicted."""
    delete_rev: int | None = None
    frontier: int = 0
    """The last revision delivered."""
    has_key: bool = True
    tripped: bool = False


class LiveWatchModel:
    def __init__(self, revisions: int, *, guarded: bool = True, periodic_only: bool = False) -> None:
        self.revisions, self.guarded, self.periodic_only = revisions, guarded, periodic_only

    def steps(self, state: LiveWatch) -> Iterator[tuple[str, LiveWatch]]:
        head, floor, delete_rev, frontier, has_key, _ = state
        if head < self.revisions:
            yield "churn", state._replace(head=head + 1)
            if delete_rev is None:
                yield "delete key", state._replace(head=head + 1, delete_rev=head + 1)
        if floor < head:
            yield "compact", state._replace(floor=floor + 1)
        whole = resume_window_ok(frontier, floor + 1)
        if max(frontier, floor) < head and (not self.guarded or self.periodic_only or whole):
            after = max(frontier, floor) + 1
            yield "deliver", state._replace(frontier=after, has_key=has_key and after != delete_rev)
        if self.guarded and not whole:
            yield "guard repairs", state._replace(frontier=floor, has_key=delete_rev is None, tripped=True)


def converged(state: LiveWatch) -> bool:
    return state.has_key == (state.delete_rev is None)
