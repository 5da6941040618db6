"""Rolling by age, so that a quiet channel ships too: a segment that nobody fills is ended all the same.

Only a log's one writer can end its segment.  ``roll_quiet`` asks the writer that this process has open, as a node does
that taps, ingests and ships; where nobody has it open, it opens the log for the moment that takes; and it leaves a log
alone whose writer is another process, which has to call ``roll_by_age`` itself.  A foreign channel or message log is
left alone always: its writer takes no lock, so nobody knows whether it is there.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Disk, disk_for
from penstock.errors import ClosedError, LockedError, NotFoundError, OptionsError, RetryError
from penstock.log.detect import open_log
from penstock.log.face import LogReader
from penstock.log.sidecar import sidecar_of
from penstock.log.writers import writer_of
from penstock.ship.segments import log_files, oldest_time_ns, open_segment_start

__all__ = ["end_segment", "is_due", "roll_by_age", "roll_quiet"]


def roll_by_age(writer: Any, seconds: float, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None) -> bool:
    """End the segment of a writer if its oldest record is older than this; return whether it was.

    >>> import tempfile
    >>> from penstock.log.messagelog import MessageLog
    >>> with tempfile.TemporaryDirectory() as folder, MessageLog.open(folder) as log:
    ...     position = log.append(b"hello")
    ...     roll_by_age(log, 3600), roll_by_age(log, 0)
    (False, True)
    """
    disk = disk or disk_for(writer.path)
    with open_log(writer.path, disk=disk) as log:
        if not _is_due(disk, log, seconds, clock):
            return False
    return end_segment(writer)


def is_due(path: str, seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Whether the open segment of a log has records, the oldest of them older than that; False where no log is."""
    disk = disk_for(path)
    try:
        with open_log(path, disk=disk) as log:
            return _is_due(disk, log, seconds, clock)
    except NotFoundError:
        return False


def roll_quiet(path: str | os.PathLike[str], seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Do the same for a log by its path; False where another process has it open or may have, or where it is not time.

    >>> import tempfile
    >>> from penstock.log.messagelog import MessageLog
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MessageLog.open(folder) as log:
    ...         position = log.append(b"hello")
    ...         while_open = roll_quiet(folder, 3600), roll_quiet(folder, 0)
    ...     while_open, roll_quiet(folder, 0)
    ((False, True), False)
    """
    if seconds < 0:
        raise OptionsError(f"seconds={seconds}: must not be negative")
    path = os.fspath(path).rstrip("/")
    disk = disk_for(path)
    with open_log(path, disk=disk) as log:
        if not _is_due(disk, log, seconds, clock):
            return False
        kind = log.format
        if kind != "filechannel" and sidecar_of(disk, path).identity() is None:
            return False
    mine = writer_of(path)
    if mine is not None:
        with contextlib.suppress(ClosedError, RetryError):
            return end_segment(mine)
    try:
        writer = _open_writer(kind, path)
    except LockedError:
        return False
    with writer:
        return end_segment(writer)


def _is_due(disk: Disk, log: LogReader, seconds: float, clock: Clock) -> bool:
    """Whether the open segment has records, the oldest of them older than that."""
    begin = open_segment_start(disk, log)
    if begin is None or log.next_position <= begin:
        return False
    since = oldest_time_ns(log, begin)
    if since is None:  # the format keeps no time: the file was last written then
        times = [found.modified_ns for path, _ in log_files(disk, log) if (found := disk.stat(path)) is not None]
        since = max(times, default=0)
    # One from the future was written before the clock was set back: it may be a long time until that comes.
    return abs(clock.now_ns() - since) >= seconds * 1e9


def _open_writer(format: str, path: str) -> Any:
    """Open a log with options that do nothing to it beside the roll."""
    if format == "xchannel":
        from penstock.log.xchannel import Writer

        return Writer.open(path)
    if format == "messagelog":
        from penstock.log.messagelog import MessageLog

        return MessageLog.open(path)
    from penstock.log.filechannel import FileChannel

    return FileChannel.open(path, compression="none", collect=False)


def end_segment(writer: Any) -> bool:
    """End a segment; False while another thread fills in a record of it."""
    gently = getattr(writer, "roll_unless_reserved", None)
    if gently is not None:
        return bool(gently())
    end = getattr(writer, "roll", None) or writer.rotate
    end()
    return True
