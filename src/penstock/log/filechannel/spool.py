"""The end of a channel, where frames are appended: one spool per channel, which any number of senders share.

The order of a send is fixed, and each step leaves the channel whole if the process dies behind it:

    frames into one buffer → (a new segment, complete before it has its name) → write → visible → durable

A failed write is undone by truncating to where it began, and may be tried again, as may everything that fails before
a byte is written.  Three failures latch, and nothing more is sent until the channel is reopened: a write that cannot
be undone, a flush of messages, after which nobody knows what the device has, and a segment that somebody cut or moved.
What was sent before stays.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import Disk, File, Owned
from penstock.disk.commit import GROUP, Committer
from penstock.errors import Backpressure, ClosedError, OptionsError, ReadOnlyError, Timeout
from penstock.log.filechannel.flusher import Flusher
from penstock.log.filechannel.format import HEADER_BYTES, LAST_INDEX, LAST_POSITION, Header, segment_path
from penstock.log.filechannel.frames import Frames
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.recover import NEW, Tail
from penstock.log.filechannel.room import ROOM_BYTES, can_have_room, make_room, what_was_done
from penstock.log.filechannel.tell import Teller
from penstock.log.sidecar import Sidecar

if TYPE_CHECKING:
    from penstock.kernel.tail import Tail as Room

__all__ = ["Spool"]

BUFFER_BYTES: Final = 64 << 10
AT_ONCE_BYTES: Final = 64 << 10
"""A larger message is not written on an event loop."""
CHUNK_BYTES: Final = 1 << 20
"""How much of a long batch is made into frames at a time: little enough to be still in the cache when it is written."""


LEAST_SEGMENT_BYTES: Final = 4 << 20
"""Smaller segments get no room: it would be a large part of them."""
CUT_LOOK_SECONDS: Final = 0.01
"""How often a write looks whether the segment still has its length, unless each one is synced."""
SINGLES_BEFORE_ROOM: Final = 32
"""After so many single sends in a row the next ones get room to be stored in."""


class Spool:
    """The end of a channel.  Every method may be called from any thread.

    Invariants:

    1. ``begin`` ≤ ``visible`` ≤ ``end``; everything below ``visible`` survives the process; ``end`` is above
       ``visible`` only with ``flush_seconds``.
    2. While there is ``room``, it alone knows where the end is, and the file is longer than its messages.
    3. Room is armed, so that sends need no lock, only while nobody waits for a message and a sync is on its way where
       one is promised.  It is disarmed under the GIL by whoever begins to wait, to sync, or to change the file.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        options: ChannelOptions,
        sidecar: Sidecar,
        tail: Tail,
        owned: Owned | None = None,
        *,
        admit: Callable[[int], None] | None = None,
        rotated: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self.path, self._options, self._sidecar = disk, path, options, sidecar
        self._admit, self._rotated = admit, rotated
        self._segment_bytes = options.segment_bytes
        self._syncs_names = options.sync != "none"
        """Whether a segment is synced when it is sealed, and the next one when it is made."""
        self._lock = threading.Lock()
        self.arrived = threading.Condition()
        self._waiting = 0
        self._listeners: list[Callable[[], None]] = []
        self.room: Room | None = None
        """Where single messages are stored without a lock, once there were many of them."""
        self._room_bytes = 0
        """How long the file is while there is room."""
        self._looked = float("-inf")
        self._singles, self._teller = 0, Teller()
        self._must_rotate = False
        """Whether the next segment has its name already, and something failed behind that."""
        self.index, self.begin = tail.index, tail.begin
        self.end = self.visible = tail.end
        self.error: str | None = None
        """Why nothing more is written, once an I/O error latched."""
        self.closed = ""
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._unsynced: list[int] = [tail.index]
        self._new_names = True
        self._synced: int | None = None
        self._owned = owned  # None where many send in turns
        self._file: File = self._open_segment() if tail.exists else self._make_segment(tail.index, tail.begin)
        self._must_rotate = False
        self._may_have_room = self._wants_room()
        self._own(tail.index)
        self._committer: Committer | None = None
        if options.sync != "none":
            interval = options.sync_seconds if options.sync == "interval" else None
            self._committer = GROUP.committer(self._sync_now, interval=interval)
        self._flusher: Flusher | None = None
        if options.flush_seconds:
            self._flusher = Flusher(self.flush, options.flush_seconds)

    @property
    def end(self) -> int:
        """Behind the last message that was sent."""
        room = self.room
        return self._sent if room is None else room.end

    @end.setter
    def end(self, position: int) -> None:
        self._sent = position

    @property
    def visible(self) -> int:
        """Behind the last message that receivers see."""
        room = self.room
        return self._seen if room is None else room.end

    @visible.setter
    def visible(self, position: int) -> None:
        self._seen = position

    # --- Sending

    def append(self, payload: Any, timeout: float | None = None) -> int:
        """Append one message and return its position."""
        room = self.room
        if room is not None and (position := room.append(payload)) >= 0:
            return position
        frame = kernel.encode_frame(payload)
        self._tell_failures()
        self._take(timeout)
        try:
            position = self.end
            if position - self.begin >= self._segment_bytes or self._admit is not None or self._must_rotate:
                self._prepare(len(frame))
            self._put_single(frame)
        finally:
            self._give()
        if self._committer is not None:
            self._written()
        return position

    def append_at_once(self, payload: Any) -> int | None:
        """Append one small message if that waits for nobody and makes no file; None, and nothing is sent, otherwise."""
        room = self.room
        if room is not None and (stored := room.append(payload)) >= 0:
            return stored
        if self._options.sync == "always" or self._admit is not None or memoryview(payload).nbytes > AT_ONCE_BYTES:
            return None
        if self._must_rotate or (self._committer is not None and self._committer.error is not None):
            return None
        frame = kernel.encode_frame(payload)
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._check()
            position = self.end
            if position - self.begin >= self._segment_bytes:
                return None
            self._put_single(frame)
        finally:
            self._lock.release()
        if self._committer is not None:
            self._committer.touch()
        return position

    def append_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Append many messages and return their positions: one lock, and one write a segment or a mebibyte."""
        frames = Frames(payloads, CHUNK_BYTES)
        ends = frames.ends
        self._tell_failures()
        self._take(timeout)
        try:
            if not len(ends):
                return ends
            first = self.end
            if self._admit is not None:
                self._admit(int(ends[-1]))
            self._drop_room()
            self._singles = 0
            self._put_frames(frames)
        finally:
            self._give()
        if self._committer is not None:
            self._written()
        positions = np.empty(len(ends), np.int64)
        positions[0], positions[1:] = 0, ends[:-1]
        return positions + first

    def _put_frames(self, frames: Frames) -> None:
        """Write frames, going on in a new segment wherever the original would."""
        ends, start, done = frames.ends, 0, 0
        while start < len(ends):
            if self.end - self.begin >= self._segment_bytes or self._must_rotate:
                self._rotate()
            room = self._segment_bytes - (self.end - self.begin)
            # The frame that reaches the threshold still belongs to this segment.
            stop = min(int(np.searchsorted(ends, done + room)) + 1, len(ends))
            self._put(int(ends[stop - 1]) - done, frames.parts(start, stop))
            start, done = stop, int(ends[stop - 1])

    def _put_single(self, frame: bytes) -> None:
        """Append one frame: store it where there is room, make room where there were many before it, or write it."""
        if not self._may_have_room:
            self._put(len(frame), (frame,))
            return
        self._singles += 1
        if self.room is None and self._singles > SINGLES_BEFORE_ROOM:
            self._make_room()
        if self.room is None:
            self._put(len(frame), (frame,))
            return
        if self.end + len(frame) > LAST_POSITION:
            raise OptionsError(f"{self.path}: the positions of this channel are used up")
        if not self.room.put(frame):
            self._drop_room()
            self._put(len(frame), (frame,))  # the next one gets new room
            return
        if self._waiting:
            self.wake_all()
        self._teller.stored(self.room, segment_path(self.path, self.index))
        self._arm()

    def _arm(self) -> None:
        """Let sends go without a lock, unless somebody waits to be woken by one."""
        room = self.room
        if room is None or self.error or self.closed:
            return
        room.armed = True
        if self._waiting:  # it may have come just before
            room.armed = False
            self.wake_all()

    def _disarm(self) -> None:
        """Have the next send come by the lock."""
        room = self.room
        if room is not None:
            room.armed = False

    def _wants_room(self) -> bool:
        options = self._options
        if options.sync == "always" or options.flush_seconds or options.segment_bytes < LEAST_SEGMENT_BYTES:
            return False
        return can_have_room(self._disk, self._file)

    def _make_room(self) -> None:
        """Get room behind the end; where the device has none, the message is written, and that says so."""
        if not self._teller.begin():
            self._singles = 0
            return
        try:
            if self._admit is not None:
                self._admit(ROOM_BYTES)
            full = min(self.begin + self._segment_bytes, LAST_POSITION - ROOM_BYTES)
            self.check_whole()
            self.room = make_room(self._file, self.begin, self.end, full)
            self._room_bytes = self._file.stat().size
        except (OSError, Backpressure, OptionsError):
            self._singles = 0

    def _drop_room(self) -> None:
        """Cut the file to the length of its messages; called with the lock held."""
        room = self.room
        if room is None:
            return
        room.armed = False
        self.check_whole()
        self._sent = self._seen = room.end
        self.room = None
        try:
            self._file.truncate(HEADER_BYTES + self._sent - self.begin)
        except OSError as exc:
            raise self._latch(exc) from exc

    def _prepare(self, size: int) -> None:
        if self._admit is not None:
            self._admit(size)
        if self.end - self.begin >= self._segment_bytes or self._must_rotate:
            self._rotate()

    def _put(self, size: int, parts: Iterable[bytes | memoryview]) -> None:
        if self.end + size > LAST_POSITION:
            raise OptionsError(f"{self.path}: the positions of this channel are used up")
        if self._flusher is None:
            self._write(parts)
            self._publish()
            return
        before = len(self._pending)
        self._pending += [bytes(part) for part in parts]  # all of them or, when one cannot be made, none
        self._pending_bytes += size
        self.end += size
        if self._pending_bytes >= BUFFER_BYTES or self._flusher.error is not None or not self._flusher.wake():
            try:
                self._flush()
                self._flusher.error = None
            except BaseException:  # who is told that it failed must not find it sent later
                del self._pending[before:]
                self._pending_bytes -= size
                self.end -= size
                raise

    def _write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Write at ``end``; when it fails, the file is as it was, or else the channel is read-only."""
        if self._options.sync == "always" or time.monotonic() - self._looked > CUT_LOOK_SECONDS:
            self.check_whole()
        start = offset = HEADER_BYTES + self.end - self.begin
        try:
            for part in parts:
                self._file.write_at(offset, part)
                offset += len(part)
        except BaseException as exc:
            self._undo(start, exc)
            raise
        self.end += offset - start

    def check_whole(self, *, named: bool = False) -> None:
        """Refuse to go on in a segment that somebody cut: a hole of zeros would be before what is written next."""
        self._looked = time.monotonic()
        had = self._room_bytes if self.room is not None else HEADER_BYTES + self._seen - self.begin
        name = segment_path(self.path, self.index)
        exc = what_was_done(self._disk, self._file, name, had, named=named)
        if exc is not None:
            self._latch(exc)
            raise exc

    def _undo(self, offset: int, exc: BaseException) -> None:
        try:
            self._file.truncate(offset)
        except OSError:
            raise self._latch(exc) from exc

    def _latch(self, exc: BaseException) -> ReadOnlyError:
        self._disarm()
        self.error = self.error or f"{self.path}: read-only since a write failed: {exc}; mend the cause and reopen"
        return ReadOnlyError(self.error)

    def _publish(self) -> None:
        self.visible = self.end
        if self._waiting:
            self.wake_all()

    def wake_all(self) -> None:
        """Have everyone who waits look again."""
        with self.arrived:
            self.arrived.notify_all()
            listeners, self._listeners = self._listeners, []
            self._waiting -= len(listeners)
        for wake in listeners:
            wake()

    def _take(self, timeout: float | None) -> None:
        if timeout is None:
            self._lock.acquire()
        elif not self._lock.acquire(timeout=max(0.0, timeout)):
            raise Timeout(f"{self.path}: other senders held the channel for {timeout} s; nothing was sent")
        if self.error or self.closed:
            self._lock.release()
            self._check()

    def _give(self) -> None:
        """End what ``_take`` began."""
        self._lock.release()

    def _check(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path}: {self.closed}")
        if self.error:
            raise ReadOnlyError(self.error)

    # --- Visible

    def flush(self) -> None:
        """Make everything that was sent visible."""
        with self._lock:
            if not self.error and not self.closed:
                self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        parts, size = self._pending, self._pending_bytes
        self.end -= size
        try:
            self._write((b"".join(parts),))
        except BaseException:
            self.end += size  # they are still to be written
            raise
        self._pending, self._pending_bytes = [], 0
        self._publish()
        if self._committer is not None:
            self._committer.touch()

    def wait(self, gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait until something is visible at ``position``; False when the time is over, or nobody waits for it."""
        with self.arrived:
            self._waiting += 1
            self._disarm()
            try:
                self.arrived.wait_for(lambda: self.visible > position or bool(self.closed) or gone(), timeout)
            finally:
                self._waiting -= 1
        return self.visible > position

    def listen(self, wake: Callable[[], None], position: int) -> None:
        """Have ``wake`` called once, by whoever sends or closes, when something is visible at ``position``."""
        with self.arrived:
            self._waiting += 1
            self._listeners.append(wake)
            self._disarm()
        if self.visible > position or self.closed:
            self.wake_all()

    def unlisten(self, wake: Callable[[], None]) -> None:
        """Take back a ``listen``, if it was not called yet."""
        with self.arrived:
            if wake in self._listeners:
                self._listeners.remove(wake)
                self._waiting -= 1

    # --- Segments

    def rotate(self) -> None:
        """Seal the newest segment, if it has a message, and go on in a new one."""
        self._take(None)
        try:
            if self.end > self.begin:
                self._rotate()
        finally:
            self._give()

    def _rotate(self) -> None:
        self._flush()
        self._drop_room()
        if self._syncs_names:  # or a power cut could leave the next segment and a hole before it
            self._flush_to_disk(self._file)
        following = self._make_segment(self.index + 1, self.end)
        try:
            self._own(self.index + 1)
        except BaseException:
            following.close()
            raise
        self._file.close()
        self._file, self.index, self.begin, self._must_rotate = following, self.index + 1, self.end, False
        self._unsynced.append(self.index)
        self._new_names = True
        self._rotated()

    def _own(self, index: int) -> None:
        if self._owned is not None:
            self._owned.take(segment_path(self.path, index))

    def _open_segment(self) -> File:
        return self._disk.modify(segment_path(self.path, self.index))

    def _make_segment(self, index: int, begin: int) -> File:
        """Make a segment that has its header before it has its name."""
        if index > LAST_INDEX:
            raise OptionsError(f"{self.path}: the numbers for segments of this channel are used up")
        temporary = f"{self.path}/{NEW}"
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(temporary)
        file = self._disk.create(temporary)
        try:
            file.write_at(0, Header(index, begin).encode())
            if self._syncs_names:
                file.sync()
            self._disk.rename(temporary, segment_path(self.path, index))
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        self._must_rotate = True  # whoever reads may go there: nothing more comes before it
        file.close()
        if self._syncs_names:
            self._disk.sync_folder(self.path)
        return self._disk.modify(segment_path(self.path, index))  # known by its own name from here on

    # --- Durable

    def sync(self) -> int:
        """Return when everything sent so far survives a power cut, with the position that bounds it."""
        self._check()
        if self._committer is not None:
            return self._committer.wait()
        return self._sync_now()

    def _tell_failures(self) -> None:
        """Raise what the last sync failed with, unless one succeeds now: before anything more is sent."""
        if self._committer is not None and self._committer.error is not None:
            self._committer.check()

    def _written(self) -> None:
        assert self._committer is not None
        if self._options.sync == "always":
            self._committer.wait()
        else:
            self._committer.touch()

    def _sync_now(self) -> int:
        """Sync every segment since the last time, then move the mark; runs on a thread of the group."""
        with self._lock:
            self._check()
            self.check_whole(named=True)
            self._flush()
            self._disarm()  # what is sent from here on asks for the next sync
            position, unsynced, names = self.end, list(self._unsynced), self._new_names
            self._new_names = False
        if position == self._synced and not names:
            return position
        try:
            for index in unsynced:
                with contextlib.suppress(FileNotFoundError):  # compressed, and that is synced, or collected
                    self._sync_segment(index)
            if names:
                self._disk.sync_folder(self.path)
            self._sidecar.write_mark(position)
        except BaseException:
            self._new_names = self._new_names or names
            raise
        with self._lock:
            self._unsynced = [index for index in self._unsynced if index not in unsynced or index == unsynced[-1]]
        self._synced = position
        return position

    def _sync_segment(self, index: int) -> None:
        with self._disk.modify(segment_path(self.path, index)) as file:
            self._flush_to_disk(file)

    def _flush_to_disk(self, file: File) -> None:
        """Sync messages; when that fails nobody knows what the device has, and the next sync may succeed without it."""
        try:
            file.sync()
        except OSError as exc:
            raise self._latch(exc) from exc

    # --- Open and closed

    def close(self) -> None:
        """Flush, sync once more if that is promised, let go of the file, and tell of a failure nobody heard of."""
        if self.closed:
            return
        if self._flusher is not None:
            self._flusher.close()
        try:
            if not self.error:
                self.flush()
                if self._committer is not None or self._synced is not None:
                    self.sync()
            elif self._committer is not None and self._committer.untold:
                raise ReadOnlyError(self.error)
        finally:
            if self._committer is not None:
                self._committer.close()
            self._teller.close()
            with self._lock:
                if not self.error:
                    self._drop_room()
                self._disarm()
                self.closed = "the channel is closed"
                self._file.close()
            self.wake_all()

    def forked(self) -> None:
        """Close in the child of a fork, where nothing belongs to it."""
        self._lock, self.arrived = threading.Lock(), threading.Condition()
        self._waiting, self._listeners = 0, []
        self.closed = "the channel was opened before a fork: open its own in the child"
        self._committer = self._flusher = None
        self._teller = Teller()
        self._pending, self._pending_bytes = [], 0
        if self.room is not None:
            self.room.armed = False
            self._sent = self._seen = self.room.end
            self.room = None
        self._file.close()
