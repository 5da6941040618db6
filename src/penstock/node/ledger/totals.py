"""How many records a log ever had below a position: counted once, remembered, and never counted twice.

Positions of a message log are numbers of records; those of other formats are bytes, so records have to be walked, from
where the count was last remembered.
"""

from __future__ import annotations

import msgspec

from penstock.errors import ExpiredError, ReplacedError
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, check_fingerprint, last_fingerprint
from penstock.node.ingest.memory import count_from

__all__ = ["LogTotal", "begin_total", "same_log", "total_at", "with_seen"]


class LogTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Below ``position`` the log ``log_id`` ever had ``total`` records.

    >>> LogTotal(log_id="ab", position=11, total=10).uncounted
    0
    """

    log_id: str
    position: int
    total: int
    uncounted: int = 0
    """How often retention took records before they were counted, where positions do not tell how many."""
    seen: str = ""
    """The fingerprint of the last record below the position, where one was noted."""


def begin_total(log: LogReader, log_id: str) -> LogTotal:
    """Return the count at the beginning of a log that is seen for the first time."""
    first = log.first_position
    return LogTotal(log_id=log_id, position=first, total=first - 1 if log.format == "messagelog" else 0)


def same_log(log: LogReader, known: LogTotal) -> bool:
    """Whether what is known is of this log, and no backup was put in its place and written to since."""
    try:
        check_fingerprint(log, Fingerprint.parse(known.seen) if known.seen else None)
    except ReplacedError:
        return False
    return True


def with_seen(log: LogReader, before: LogTotal, now: LogTotal) -> LogTotal:
    """Return a count with the fingerprint of the last record that was counted since another one."""
    if now.position <= before.position:
        return now
    seen = last_fingerprint(log, max(before.position, log.first_position), now.position)
    return now if seen is None else msgspec.structs.replace(now, seen=str(seen))


def total_at(log: LogReader, known: LogTotal, position: int) -> LogTotal:
    """Return the count at another position, from one that is known.

    >>> import tempfile
    >>> from penstock.log import open_log
    >>> from penstock.log.messagelog import MessageLog
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MessageLog.open(folder.name + "/log") as writer:
    ...     numbers = writer.append_many([b"x"] * 9)
    >>> with open_log(folder.name + "/log") as log:
    ...     total_at(log, begin_total(log, "ab"), 10).total, total_at(log, LogTotal(
    ...         log_id="ab", position=10, total=9), 4).total
    (9, 3)
    >>> folder.cleanup()
    """
    if position == known.position:
        return known
    first = log.first_position
    if position > known.position:
        total, uncounted, start = known.total, known.uncounted, known.position
        if start < first:
            if log.format == "messagelog":
                total += first - start
            elif not log.keeps(start):
                uncounted += 1
            start = first
        total += count_from(log, start, position)
        return msgspec.structs.replace(known, position=position, total=total, uncounted=uncounted)
    if position < first:
        if log.format != "messagelog":
            raise ExpiredError(log.path, position, first)
        behind = (first - position) + count_from(log, first, known.position)
    else:
        behind = count_from(log, position, known.position)
    return msgspec.structs.replace(known, position=position, total=known.total - behind)
