"""Logs of every format that roll on demand, for tests of shipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.disk.objectstore import Obstore
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.ship.remote import ShippedLog

FORMATS = ["xchannel", "messagelog", "filechannel"]


def open_writer(format: str, path: Path | str, **options: Any) -> Any:
    """Return a writer; small segments, no compression unless asked for."""
    if format == "xchannel":
        return Writer.open(str(path), region_bytes=8192, **options)
    if format == "messagelog":
        return MessageLog.open(str(path), MessageLogOptions(segment_bytes=100_000_000, **options))
    return FileChannel.open(str(path), ChannelOptions(**{"compression": "none", "collect": True, **options}))


def seal(format: str, writer: Any) -> None:
    """End the segment being written."""
    if format == "filechannel":
        writer.rotate()
    else:
        writer.roll()


def fill(format: str, writer: Any, start: int, count: int) -> list[bytes]:
    """Append numbered records and seal; return them."""
    payloads = [b"record %06d" % number for number in range(start, start + count)]
    writer.append_many(payloads)
    seal(format, writer)
    return payloads


def shipped(store: Obstore, channel: str = "log") -> ShippedLog:
    """Return what was shipped of a channel."""
    return ShippedLog(f"memory://m/{channel}", store)


class Since:
    """Every payload of a log that grows: each round reads what came since the last whole look, each tenth all of it."""

    def __init__(self) -> None:
        self._found: list[bytes] = []
        self._at: int | None = None

    def read(self, log: Any, turn: int) -> list[bytes]:
        """Return every payload."""
        whole = self._at is None or turn % 10 == 0
        found = read_all(log) if whole else [*self._found, *read_all(log, at=self._at)]
        if whole:
            self._found, self._at = found, log.next_position
        return found


def read_all(log: Any, limit: int = 500, at: int | None = None) -> list[bytes]:
    """Return every payload of a log, or those from a position on."""
    found: list[bytes] = []
    at = log.first_position if at is None else at
    while len(batch := log.read(at, limit)):
        found += [bytes(payload) for payload in batch.to_payloads()]
        at = batch.next_position
    return found
