"""What waits between a watch and a store, and when it is due.  No clock, no task, no store in here.

Invariants:

1. Updates leave in the order they came; what the store refused stays in front of what came later.
2. The high-water mark is the highest revision received, those of rejected updates included; an update of
   unknown revision never moves it.
3. Each update is handed to ``apply`` once; to the store as often as it takes.
"""

from __future__ import annotations

from penstock.batch import UpdateBatch
from penstock.fold.face import BatchConfig
from penstock.fold.guards import high_water, requeue, store_failure_is_fatal

__all__ = ["FoldQueue"]

RETRY_MAX_SECONDS = 1.0


class FoldQueue:
    """The waiting updates of one fold; ``now`` is any clock that does not go back.

    >>> from penstock.types import KvUpdate
    >>> queue = FoldQueue(BatchConfig(max_updates=2, window_seconds=1.0))
    >>> queue.add(UpdateBatch.of([KvUpdate.put("a", b"1", 7)]), now=0.0)
    >>> queue.due(0.5), queue.due(1.0), queue.reached
    (False, True, 7)
    """

    def __init__(self, config: BatchConfig, reached: int | None = None) -> None:
        self.config = config
        self.reached = reached
        """The highest revision received."""
        self.failures = 0
        """How often in a row the store has refused."""
        self._grave = 0  # those of them that were not for want of room
        self._fresh: list[UpdateBatch] = []  # not yet applied
        self._waiting: list[UpdateBatch] = []  # applied, not yet stored
        self._count = 0
        self.deadline: float | None = None

    def __len__(self) -> int:
        return self._count + sum(map(len, self._waiting))

    def add(self, batch: UpdateBatch, now: float, *, counts: bool = True) -> None:
        """Take a batch in; the first one of a flush starts the window.

        One that does not count repairs what was folded before: it says nothing about how far the fold has come.
        """
        if not len(batch):
            return
        self._fresh.append(batch)
        self._count += len(batch)
        revisions = batch.revisions()
        if counts and len(revisions):
            self.reached = high_water(self.reached, int(revisions.max()))
        window = now + self.config.window_seconds
        self.deadline = window if self.deadline is None else min(self.deadline, window)

    def due(self, now: float) -> bool:
        """Whether it is time to flush."""
        return self._count >= self.config.max_updates or (self.deadline is not None and now >= self.deadline)

    def take(self) -> UpdateBatch | None:
        """Return what is to be applied, or None; it now waits for the store."""
        self.deadline = None
        fresh, self._fresh, self._count = self._fresh, [], 0
        if not fresh:
            return None
        batch = UpdateBatch.concat(fresh)
        self._waiting = requeue(self._waiting, [batch])
        return batch

    def to_store(self) -> UpdateBatch | None:
        """Return everything the store does not have yet, or None."""
        if len(self._waiting) > 1:
            self._waiting = [UpdateBatch.concat(self._waiting)]
        return self._waiting[0] if self._waiting else None

    def stored(self) -> None:
        """Take note that the store has what ``to_store`` returned."""
        self._waiting, self.failures, self._grave = [], 0, 0

    def refused(self, now: float, *, waits: bool = False) -> bool:
        """Take note that the store failed; return whether it has failed too often.

        One that ``waits`` for room is tried again however often that is.
        """
        self.failures += 1
        self._grave += not waits
        pause = min(self.config.retry_seconds * 2 ** min(self.failures - 1, 30), RETRY_MAX_SECONDS)
        self.deadline = now + pause
        return store_failure_is_fatal(self._grave)
