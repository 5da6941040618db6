"""Taps: what channels say is copied into logs of its own, in the runs it was said in.

A log that is there is written in its format; a new one is a message log unless the path begins with the name of another
(``xchannel:logs/ops``).  Its numbers are its own; time and sender are those of the message, where the format has room
for them: a message log for both, an xchannel for the time, a queue for neither.  Writing happens in
a thread; what waits for a slow disk is bounded, and what did not fit is counted and logged, never in silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from penstock.channels import commands as c
from penstock.disk import in_disk_thread
from penstock.errors import NotFoundError, OptionsError
from penstock.log.detect import FORMATS, detect, open_writer
from penstock.log.face import LogWriter
from penstock.log.filechannel import FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.metrics import REGISTRY

__all__ = ["ChannelTap"]

_log = logging.getLogger(__name__)

ROOM = 65_536
"""Messages that wait for the disk at the most; a run of more is taken where nothing waits."""
ROOM_BYTES = 256 << 20
"""Bytes of their payloads: a disk that stands still must not take the memory of the server."""
COPIED = REGISTRY.counter("channels_tap_messages", "messages copied by taps")
LOST = REGISTRY.counter("channels_tap_lost", "messages that a tap could not copy")


class ChannelTap:
    """Copies one channel, or all of them (``*``), into one log.  Called by the manager on its loop.

    >>> ChannelTap("ops/east", "copies/ops").handler
    'ops/east'
    """

    def __init__(self, handler: str, path: str, max_payload_bytes: int = 65_536) -> None:
        """``max_payload_bytes``: what the server takes, and a message log of the tap's as well."""
        self.handler, self.path, self._max_payload_bytes = handler, path, max_payload_bytes
        self._waiting: deque[c.Messages] = deque()
        self._size = self._bytes = self._missed = 0
        self._writing: LogWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the log; made if it is not there."""
        self._writing = await in_disk_thread(_open, self.path, self._max_payload_bytes)

    def __call__(self, event: c.Delivery) -> None:
        """Take what a channel says."""
        if not isinstance(event, c.Messages) or (self.handler != "*" and event.channel.handler != self.handler):
            return
        length = sum(map(len, event.payloads))
        if self._waiting and (self._size + len(event) > ROOM or self._bytes + length > ROOM_BYTES):
            LOST.add(len(event))
            if not self._missed:
                _log.warning("tap %s: the disk is too slow, what does not fit is not copied", self.path)
            self._missed += len(event)
            return
        self._waiting.append(event)
        self._size += len(event)
        self._bytes += length
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._waiting:
                runs, self._waiting, self._size, self._bytes = list(self._waiting), deque(), 0, 0
                if self._missed:
                    _log.warning("tap %s: %d messages did not fit", self.path, self._missed)
                    self._missed = 0
                await in_disk_thread(self._append, runs)
        finally:
            self._task = None

    def _append(self, runs: list[c.Messages]) -> None:
        """Write what has come; a run that cannot be written stops neither the channel nor the runs behind it."""
        lost, why = 0, None
        for run in runs:
            try:
                self._append_run(run)
            except Exception as exc:  # noqa: BLE001
                lost, why = lost + len(run), exc
            else:
                COPIED.add(len(run))
        if lost:
            LOST.add(lost)
            _log.warning("tap %s: %d messages were not copied: %s", self.path, lost, why)

    def _append_run(self, run: c.Messages) -> None:
        log = self._writing
        assert log is not None
        payloads, time_ns = list(run.payloads), run.timestamp * 1_000_000
        if isinstance(log, MessageLog):
            log.append_many(payloads, sender=str(run.sender), timestamp_ns=time_ns)
        elif isinstance(log, FileChannel):
            log.append_many(payloads)
        else:
            log.append_many(payloads, timestamp_ns=time_ns)

    async def close(self) -> None:
        """Write what waits and let go of the log."""
        while self._task is not None:
            await asyncio.wait([self._task])
        if self._writing is not None:
            await in_disk_thread(self._writing.close)
            self._writing = None


def _open(given: str, max_payload_bytes: int) -> LogWriter:
    """Open the log that a tap names, whatever its format; made if it is not there."""
    wanted, colon, path = given.partition(":")
    if not colon or wanted not in FORMATS:
        wanted, path = "", given
    try:
        found = detect(path)
    except NotFoundError:
        found = wanted or "messagelog"
    if wanted and found != wanted:
        raise OptionsError(f"tap {given}: what is there is a log of format {found}")
    if found == "messagelog":
        return MessageLog.open(path, MessageLogOptions(max_payload_bytes=max_payload_bytes))
    return open_writer(path, format=found)
