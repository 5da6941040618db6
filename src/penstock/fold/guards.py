"""The decisions that keep a fold honest, as pure functions.

Production code calls them, and so do the models in tests/models, which try every order of events within a
bound: a change here is proved again by the next test run.  Nothing in this file reads a clock, a file or a socket.

    resume_window_ok, resume_start     may a watch go on from here (they live in penstock.kv.window)
    high_water                         how far the updates seen so far reach
    resume_cursor                      where a restart goes on
    requeue                            what happens to updates the store did not take
    store_failure_is_fatal             when retrying becomes hiding
    waits_for_room                     which failures are a shortage that ends by itself
    may_relist                         the barrier between synthetic deletes and the re-list
    pointer_publish_allowed            may this artifact become the published one
    payload_prunable                   may this payload be removed
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final, TypeVar

from penstock.errors import Backpressure
from penstock.kv.window import resume_start, resume_window_ok

__all__ = [
    "resume_window_ok",
    "resume_start",
    "high_water",
    "resume_cursor",
    "requeue",
    "store_failure_is_fatal",
    "waits_for_room",
    "may_relist",
    "pointer_publish_allowed",
    "payload_prunable",
    "MAX_STORE_FAILURES",
]

T = TypeVar("T")

MAX_STORE_FAILURES: Final = 16
"""Failed store writes in a row after which a fold stops: the updates waiting for it must not grow for ever."""


def high_water(reached: int | None, revision: int | None) -> int | None:
    """Return how far the updates reach after one more; an unknown revision changes nothing.

    The highest counts, not the last: a revision that comes twice must not move a cursor back.

    >>> high_water(None, None), high_water(7, None), high_water(7, 9), high_water(9, 7)
    (None, 7, 9, 9)
    """
    if revision is None or (reached is not None and reached >= revision):
        return reached
    return revision


def resume_cursor(stored: int, applied: int) -> int:
    """Return where a restart goes on: at the store's cursor, however far memory had come.

    What memory has and the store has not is gone with the process.

    >>> resume_cursor(stored=5, applied=9)
    5
    """
    return min(stored, applied)


def requeue(failed: Sequence[T], later: Sequence[T]) -> list[T]:
    """Return what waits for the store after it refused ``failed``: that first, then what came later.

    Dropping it, or storing something later first, would leave a hole below the cursor.

    >>> requeue([4, 5], [6])
    [4, 5, 6]
    """
    return [*failed, *later]


def store_failure_is_fatal(failures_in_a_row: int) -> bool:
    """Whether the store has failed too often.

    >>> store_failure_is_fatal(15), store_failure_is_fatal(16)
    (False, True)
    """
    return failures_in_a_row >= MAX_STORE_FAILURES


SHORTAGES: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS)
)


def waits_for_room(failure: BaseException) -> bool:
    """Whether a store failed for want of room, memory or descriptors: nothing is broken, and it may be there soon.

    Such a failure is retried for as long as it lasts, because giving up helps nobody; every other one counts.

    >>> waits_for_room(OSError(errno.ENOSPC, "No space left")), waits_for_room(OSError(errno.EIO, "I/O error"))
    (True, False)
    """
    return isinstance(failure, Backpressure | MemoryError) or (
        isinstance(failure, OSError) and failure.errno in SHORTAGES
    )


def may_relist(deletes_folded: bool) -> bool:
    """Whether the full watch may start: only when the deletes of vanished keys are in the fold.

    A key that was deleted and came back would otherwise be put by the re-list and then removed by a
    delete that is older.

    >>> may_relist(False), may_relist(True)
    (False, True)
    """
    return deletes_folded


def pointer_publish_allowed(present: bool, rank: int | None, candidate: int) -> bool:
    """Whether an artifact of rank ``candidate`` may replace what is published.

    Nothing there: yes.  Something unreadable there (``rank`` None): yes, it must not block for ever.
    Otherwise only if it is not older.

    >>> pointer_publish_allowed(True, 5, 4), pointer_publish_allowed(True, 5, 5)
    (False, True)
    >>> pointer_publish_allowed(False, None, 0), pointer_publish_allowed(True, None, 0)
    (True, True)
    """
    return not present or rank is None or candidate >= rank


def payload_prunable(rank: int | None, pointer_rank: int, *, is_target: bool, aged_out: bool) -> bool:
    """Whether a payload may be removed: never the target, never a young one, only strictly older ones.

    Strictly, because an artifact of equal rank may still be published; one that is older never will be.

    >>> payload_prunable(4, 5, is_target=False, aged_out=True)
    True
    >>> payload_prunable(5, 5, is_target=False, aged_out=True)
    False
    """
    return not is_target and aged_out and rank is not None and rank < pointer_rank
