"""The file of a group: appended to in turns, read by every process that takes part, rewritten when it has grown long.

Only whoever has the turn writes.  A record that is torn was being written by a process that died: the next turn cuts it
off.  A rewritten journal is another file, by which the others notice.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec
import numpy as np

from penstock import kernel
from penstock.disk import Disk, File, ReadDisk, Stat, save_atomically
from penstock.disk.plain import read_whole
from penstock.errors import CorruptionError, UnsupportedError
from penstock.log.filechannel.format import FRAME_HEAD, FrameStop
from penstock.log.filechannel.group.core import GroupCore
from penstock.log.filechannel.group.format import VERSION, Event, GroupSnapshot, decode_event, encode_event

JOURNAL_BYTES: Final = 256 << 20
"""No journal of a group is as long as that: it begins again with a snapshot long before."""

__all__ = ["GroupJournal", "read_journal", "snapshot_of", "split"]

REWRITE_BYTES: Final = 1 << 20
"""A journal is rewritten when it has this much more than four times its last snapshot."""
SCAN_RECORDS: Final = 4096


class GroupJournal:
    """One process's hold on the journal of a group.  Every method is called during a turn, but ``changed``."""

    def __init__(self, disk: Disk, path: str, *, sync: bool) -> None:
        self._disk, self.path, self._sync = disk, path, sync
        self._file: File | None = None
        self._identity = (0, 0)
        self._end = self._snapshot_bytes = 0

    def changed(self) -> bool:
        """Whether another process has written since the last turn; may be asked at any time."""
        found = self._disk.stat(self.path)
        return found is None or found.identity != self._identity or found.size != self._end

    def read_new(self) -> list[Event] | None:
        """Return what others have noted since the last time: everything, snapshot first, if it is another file by now.

        None when there is no journal.  CorruptionError when its snapshot cannot be read.
        """
        found = self._disk.stat(self.path)
        if found is None:
            self.forget()
            return None
        if found.identity == self._identity and found.size == self._end:
            return []
        if self._file is None or found.identity != self._identity or found.size < self._end:
            self._open()
            found = self._file_stat()
        assert self._file is not None
        first = self._end == 0
        if found.size > JOURNAL_BYTES:
            raise CorruptionError(self.path, JOURNAL_BYTES, f"a journal of {found.size} bytes, which none ever has")
        messages, good = split(self._file.read_at(self._end, found.size - self._end))
        events = _decode(self.path, messages, first=first)
        if first:
            self._snapshot_bytes = len(messages[0])
        if self._end + good < found.size:
            self._file.truncate(self._end + good)
        self._end += good
        return events

    def append(self, events: list[Event]) -> None:
        """Note what was decided; when that fails the journal is as it was, and must be read again."""
        data = b"".join(kernel.encode_frame(encode_event(event)) for event in events)
        assert self._file is not None
        try:
            self._file.write_at(self._end, data)
            if self._sync:
                self._file.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            self.forget()
            raise
        self._end += len(data)

    @property
    def is_long(self) -> bool:
        """Whether rewriting it would make it much shorter."""
        return self._end > REWRITE_BYTES + 4 * self._snapshot_bytes

    def rewrite(self, snapshot: GroupSnapshot) -> None:
        """Replace it by a new one that begins with ``snapshot``."""
        message = encode_event(snapshot)
        try:
            save_atomically(self._disk, self.path, kernel.encode_frame(message), temporary=self.path + "~")
            self._open()
        except BaseException:
            self.forget()
            raise
        self._end, self._snapshot_bytes = self._file_stat().size, len(message)

    def forget(self) -> None:
        """Let go of the file, and of what is known of it."""
        if self._file is not None:
            self._file.close()
        self._file, self._identity, self._end = None, (0, 0), 0

    def _open(self) -> None:
        self.forget()
        self._file = self._disk.modify(self.path)
        self._identity = self._file_stat().identity

    def _file_stat(self) -> Stat:
        assert self._file is not None
        return self._file.stat()


def split(data: bytes) -> tuple[list[bytes], int]:
    """Return the messages of the whole records, and where these end.

    A record without a message is none: that is what zeros look like, which a power cut may leave.

    >>> split(kernel.encode_frame(b"one") + bytes(8))
    ([b'one'], 11)
    """
    messages: list[bytes] = []
    columns = tuple(np.empty(SCAN_RECORDS, np.int64) for _ in range(3))
    at, status = 0, int(FrameStop.LIMIT)
    while status == FrameStop.LIMIT:
        count, after, status = kernel.scan_frames(data, at, len(data), 0, *columns)
        for offset, length in zip(columns[1][:count].tolist(), columns[2][:count].tolist(), strict=True):
            if not length:
                return messages, offset - FRAME_HEAD
            messages.append(data[offset : offset + length])
        at = after
    return messages, at


def _decode(path: str, messages: list[bytes], *, first: bool) -> list[Event]:
    try:
        events: list[Event] = [decode_event(message) for message in messages]
    except msgspec.DecodeError as exc:
        raise CorruptionError(path, 0, f"a record of the journal is not understood: {exc}") from None
    if not first:
        return events
    if not events or not isinstance(events[0], GroupSnapshot):
        raise CorruptionError(path, 0, "the journal of the group does not begin with a snapshot")
    if events[0].version > VERSION:
        raise UnsupportedError(f"{path}: version {events[0].version} of a group's journal is not read by this release")
    return events


def snapshot_of(path: str, messages: list[bytes]) -> GroupSnapshot:
    """Return the snapshot that a journal begins with."""
    snapshot = _decode(path, messages[:1], first=True)[0]
    assert isinstance(snapshot, GroupSnapshot)
    return snapshot


def read_journal(disk: ReadDisk, path: str) -> tuple[GroupCore, GroupSnapshot] | None:
    """Return the state of a group without taking part in it, and the snapshot it began with; None if there is none."""
    try:
        messages, _ = split(read_whole(disk, path, JOURNAL_BYTES))
    except FileNotFoundError:
        return None
    snapshot = snapshot_of(path, messages)
    core = GroupCore.restore(snapshot)
    for event in _decode(path, messages[1:], first=False):
        core.apply(event)
    return core, snapshot
