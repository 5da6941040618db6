"""The newest change that a process has of a bucket, so that it notices a log which does not have that any more.

A backup that is put back beneath a process that has the bucket open has its id, and what is written to it afterwards
gets revisions that this process knows already.  So the change behind which it reads on has to be the one it knows.
"""

from __future__ import annotations

import zlib

from penstock.errors import ExpiredError, ReplacedError
from penstock.log.envelope import is_erased
from penstock.log.messagelog import MessageLogReader

__all__ = ["LastChange"]


class LastChange:
    """The checksum of the newest change that is known from the log.

    >>> last = LastChange()
    >>> last.note(7, b"one"); last.revision
    7
    """

    def __init__(self) -> None:
        self.revision, self._checksum = 0, 0

    def note(self, revision: int, record: bytes | memoryview) -> None:
        """Take note of the change of this revision, as it was written or read."""
        self.revision, self._checksum = revision, zlib.crc32(record)

    def check(self, reader: MessageLogReader, revision: int) -> None:
        """Raise ReplacedError if the change of this revision, the newest one known, is another one now or is gone.

        One that nobody has noted is taken as it is: state.snap says no more than its revision.
        """
        if not revision:
            return
        try:
            batch = reader.read(revision, 1)
        except ExpiredError:
            return  # history took it
        if not len(batch):
            if self.revision == revision:
                raise ReplacedError(
                    reader.path, f"it ends before revision {revision}: a backup was put back, or it was cut"
                )
            return
        if int(batch.positions[0]) != revision:
            return  # a hole: whoever reads on says so
        record = batch[0].payload
        if self.revision != revision:
            self.note(revision, record)
        elif zlib.crc32(record) != self._checksum and not is_erased(bytes(record)):
            raise ReplacedError(reader.path, f"the change of revision {revision} is another one: a backup was put back")
