"""Whether a watch may go on from a revision: the two guards every resume goes through.

A server does not complain when a consumer asks for revisions that retention has removed: it starts at
the first one it still has, and deletes that were in between are never seen.  So the check is ours.
These functions are pure; watches call them and the models in tests/models prove them.
"""

from __future__ import annotations

from typing import Final

__all__ = ["resume_window_ok", "resume_start"]

REVISION_MAX: Final = (1 << 64) - 1


def resume_window_ok(revision: int, first_sequence: int) -> bool:
    """Whether everything after ``revision`` is still there, given the first revision that is.

    >>> resume_window_ok(7, 8), resume_window_ok(7, 9)
    (True, False)
    """
    return first_sequence <= min(revision + 1, REVISION_MAX)


def resume_start(revision: int) -> int | None:
    """Return the first revision to ask for, or None when there can be none after this one.

    >>> resume_start(7), resume_start(REVISION_MAX)
    (8, None)
    """
    return None if revision >= REVISION_MAX else revision + 1
