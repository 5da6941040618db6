"""Whether a log ends where it did when it was last known to be safe."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.errors import PenstockError
from penstock.log.face import LogReader
from penstock.types import Problem


@runtime_checkable
class KnowsItsMark(Protocol):
    """A log that can tell one that was emptied from one that was cut."""

    def mark_ahead(self) -> list[Problem]:
        """Return what its durable mark knows of and it has not."""


__all__ = ["lost_at_end"]


def lost_at_end(log: LogReader) -> Problem | None:
    """Return what is missing at the end of a log: records that its durable mark knows of; None if nothing is.

    >>> import tempfile
    >>> from penstock.log.detect import open_log, open_writer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_writer(folder + "/ticks").close()
    ...     with open_log(folder + "/ticks") as log:
    ...         lost_at_end(log)
    """
    try:
        mark = log.durable_position  # before the end, which its writer may move meanwhile
    except PenstockError as exc:
        return Problem(getattr(exc, "file", log.path), getattr(exc, "byte", 0), getattr(exc, "reason", str(exc)))
    try:
        end = log.next_position
    except PenstockError:
        return None  # whoever reads there says why
    if mark is None or mark <= end:
        return None
    if log.first_position == end and isinstance(log, KnowsItsMark):  # all of it was dropped, or cut: it can tell
        return next(iter(log.mark_ahead()), None)
    reason = f"records up to position {mark} were synced, but the log ends at {end}"
    return Problem(log.path, 0, f"{reason}: it was cut, or its files are older than its durable mark")
