"""The logs that a stream keeps open between its batches: so each knows how far it looked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from penstock.log.face import LogReader
from penstock.spark.source.plan import SourceChannel

__all__ = ["OpenLogs"]

MOST_OPEN: Final = 200
"""How many logs stay open; a folder may hold thousands, and a process may not open as many files."""


class OpenLogs:
    """Logs by channel.  One that was made again has another identity, and so another place here.

    >>> logs = OpenLogs()
    >>> logs.keep([]); logs.close()
    """

    def __init__(self) -> None:
        self._logs: dict[SourceChannel, LogReader] = {}

    @contextlib.contextmanager
    def use(self, channel: SourceChannel) -> Iterator[LogReader]:
        """Lend the log of a channel; it stays open unless there are too many."""
        log = self._logs.get(channel)
        if log is None:
            log = channel.open()
            if len(self._logs) < MOST_OPEN and channel.node is None:
                self._logs[channel] = log
        try:
            yield log
        finally:
            if channel not in self._logs:
                log.close()

    def keep(self, channels: Iterable[SourceChannel]) -> None:
        """Let go of the logs of all other channels."""
        for gone in self._logs.keys() - set(channels):
            self._logs.pop(gone).close()

    def close(self) -> None:
        """Let go of all."""
        self.keep(())
