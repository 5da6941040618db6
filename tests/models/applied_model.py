"""Cursor authority: delivery, flush, failing store, crash and restart.

A hole is a revision that the store's cursor covers and the store never got.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.fold.guards import requeue, resume_cursor


class Applied(NamedTuple):
    head: int = 0
    delivered: int = 0
    stored: int = 0
    """The cursor in the store."""
    queued_from: int = 0
    """Updates after this revision wait to be stored."""
    applied: int = 0
    """The cursor in memory."""
    holes: bool = False


class AppliedModel:
    def __init__(self, revisions: int, *, drop_failed_batch: bool = False, resume_from_memory: bool = False) -> None:
        self.revisions = revisions
        self.drop_failed_batch = drop_failed_batch
        self.resume_from_memory = resume_from_memory

    def steps(self, state: Applied) -> Iterator[tuple[str, Applied]]:
        head, delivered, stored, queued_from, applied, holes = state
        if head < self.revisions:
            yield "churn", state._replace(head=head + 1)
        if delivered < head:
            yield "deliver", state._replace(delivered=delivered + 1)
        if delivered > queued_from:
            hole = holes or queued_from > stored
            yield "flush ok", Applied(head, delivered, delivered, delivered, delivered, hole)
            failed = range(queued_from + 1, delivered + 1)
            waiting = requeue([] if self.drop_failed_batch else failed, [])
            kept = waiting[0] - 1 if waiting else delivered
            yield "flush fails", state._replace(applied=delivered, queued_from=kept)
        resume = applied if self.resume_from_memory else resume_cursor(stored, applied)
        hole = holes or resume > stored
        yield "crash", Applied(head, resume, stored, max(resume, stored), resume, hole)
