"""The end of a channel, where frames are appended: one spool per channel, which any number of senders share.

The order of a send is fixed, and each step leaves the channel whole if the process dies behind it:

    frames into one buffer → (a new segment, complete before it has its name) → write → visible → durable

A failed write is undone by truncating to where it began and then latches: nothing more is sent until the channel
is reopened.  What was sent before stays.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import Backoff, Disk, File
from penstock.disk.commit import GROUP, Committer
from penstock.errors import Backpressure, ClosedError, OptionsError, ReadOnlyError, Timeout
from penstock.log.filechannel.format import HEADER_BYTES, LAST_INDEX, LAST_POSITION, Header, segment_path
from penstock.log.filechannel.frames import Frames
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.recover import NEW, Tail
from penstock.log.sidecar import Sidecar

__all__ = ["Spool", "PatientSpool"]

T = TypeVar("T")
BUFFER_BYTES: Final = 64 << 10
AT_ONCE_BYTES: Final = 64 << 10
"""A larger message is not written on an event loop."""
ROOM_SECONDS: Final = 0.05
"""How often a send that waits for room looks again."""
CHUNK_BYTES: Final = 1 << 20
"""How much of a long batch is made into frames at a time: little enough to be still in the cache when it is written."""


class Spool:
    """The end of a channel.  Every method may be called from any thread.

    Invariants: ``begin`` ≤ ``visible`` ≤ ``end``; everything below ``visible`` has been handed to the operating
    system; ``end`` is above ``visible`` only with ``flush_seconds``.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        options: ChannelOptions,
        sidecar: Sidecar,
        tail: Tail,
        *,
        admit: Callable[[int], None] | None = None,
        rotated: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self.path, self._options, self._sidecar = disk, path, options, sidecar
        self._admit, self._rotated = admit, rotated
        self._segment_bytes = options.segment_bytes
        self._lock = threading.Lock()
        self.arrived = threading.Condition()
        self._waiting = 0
        self._listeners: list[Callable[[], None]] = []
        self.index, self.begin, self.end = tail.index, tail.begin, tail.end
        self.visible = tail.end
        self.error: str | None = None
        """Why nothing more is written, once an I/O error latched."""
        self.closed = ""
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._unsynced: list[int] = [tail.index]
        self._new_names = True
        self._synced: int | None = None
        self._file: File = self._open_segment() if tail.exists else self._make_segment(tail.index, tail.begin)
        self._committer: Committer | None = None
        if options.sync != "none":
            interval = options.sync_seconds if options.sync == "interval" else None
            self._committer = GROUP.committer(self._sync_now, interval=interval)
        self._flusher: _Flusher | None = None
        if options.flush_seconds:
            self._flusher = _Flusher(self.flush, options.flush_seconds)

    # --- Sending

    def append(self, payload: Any, timeout: float | None = None) -> int:
        """Append one message and return its position."""
        frame = kernel.encode_frame(payload)
        self._take(timeout)
        try:
            position = self.end
            if position - self.begin >= self._segment_bytes or self._admit is not None:
                self._prepare(len(frame))
            self._put(len(frame), (frame,))
        finally:
            self._lock.release()
        if self._committer is not None:
            self._written()
        return position

    def append_at_once(self, payload: Any) -> int | None:
        """Append one small message if that waits for nobody and makes no file; None, and nothing is sent, otherwise."""
        if self._options.sync == "always" or self._admit is not None or memoryview(payload).nbytes > AT_ONCE_BYTES:
            return None
        frame = kernel.encode_frame(payload)
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._check()
            position = self.end
            if position - self.begin >= self._segment_bytes:
                return None
            self._put(len(frame), (frame,))
        finally:
            self._lock.release()
        if self._committer is not None:
            self._committer.touch()
        return position

    def append_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Append many messages and return their positions: one lock, and one write a segment or a mebibyte."""
        frames = Frames(payloads, CHUNK_BYTES)
        ends = frames.ends
        self._take(timeout)
        try:
            if not len(ends):
                return ends
            first = self.end
            if self._admit is not None:
                self._admit(int(ends[-1]))
            self._put_frames(frames)
        finally:
            self._lock.release()
        if self._committer is not None:
            self._written()
        positions = np.empty(len(ends), np.int64)
        positions[0], positions[1:] = 0, ends[:-1]
        return positions + first

    def _put_frames(self, frames: Frames) -> None:
        """Write frames, going on in a new segment wherever the original would."""
        ends, start, done = frames.ends, 0, 0
        while start < len(ends):
            if self.end - self.begin >= self._segment_bytes:
                self._rotate()
            room = self._segment_bytes - (self.end - self.begin)
            # The frame that reaches the threshold still belongs to this segment.
            stop = min(int(np.searchsorted(ends, done + room)) + 1, len(ends))
            self._put(int(ends[stop - 1]) - done, frames.parts(start, stop))
            start, done = stop, int(ends[stop - 1])

    def _prepare(self, size: int) -> None:
        if self._admit is not None:
            self._admit(size)
        if self.end - self.begin >= self._segment_bytes:
            self._rotate()

    def _put(self, size: int, parts: Iterable[bytes | memoryview]) -> None:
        if self.end + size > LAST_POSITION:
            raise OptionsError(f"{self.path}: the positions of this channel are used up")
        if self._flusher is None:
            self._write(parts)
            self._publish()
            return
        self._pending += [bytes(part) for part in parts]  # all of them or, when one cannot be made, none
        self._pending_bytes += size
        self.end += size
        if self._pending_bytes >= BUFFER_BYTES:
            self._flush()
        else:
            self._flusher.wake()

    def _write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Write at ``end``; when it fails, the file is as it was and the channel is read-only."""
        start = offset = HEADER_BYTES + self.end - self.begin
        try:
            for part in parts:
                self._file.write_at(offset, part)
                offset += len(part)
        except BaseException as exc:
            self._undo(start, exc)
            raise
        self.end += offset - start

    def _undo(self, offset: int, exc: BaseException) -> None:
        with contextlib.suppress(OSError):
            self._file.truncate(offset)
        if isinstance(exc, OSError):
            raise self._latch(exc) from exc

    def _latch(self, exc: BaseException) -> ReadOnlyError:
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
        self._pending, self._pending_bytes = [], 0
        self.end -= size
        self._write((b"".join(parts),))
        self._publish()
        if self._committer is not None:
            self._committer.touch()

    def wait(self, gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait until something is visible at ``position``; False when the time is over, or nobody waits for it."""
        with self.arrived:
            self._waiting += 1
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
        with self._lock:
            self._check()
            if self.end > self.begin:
                self._rotate()

    def _rotate(self) -> None:
        self._flush()
        try:
            if self._options.sync != "none":  # or a power cut could leave the next segment and a hole before it
                self._file.sync()
            following = self._make_segment(self.index + 1, self.end)
        except OSError as exc:
            raise self._latch(exc) from exc
        self._file.close()
        self._file, self.index, self.begin = following, self.index + 1, self.end
        self._unsynced.append(self.index)
        self._new_names = True
        self._rotated()

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
            if self._options.sync != "none":
                file.sync()
            self._disk.rename(temporary, segment_path(self.path, index))
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        if self._options.sync != "none":
            self._disk.sync_folder(self.path)
        file.close()
        return self._disk.modify(segment_path(self.path, index))  # known by its own name from here on

    # --- Durable

    def sync(self) -> int:
        """Return when everything sent so far survives a power cut, with the position that bounds it."""
        self._check()
        if self._committer is not None:
            return self._committer.wait()
        return self._sync_now()

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
            self._flush()
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
        except OSError as exc:
            raise self._latch(exc) from exc
        with self._lock:
            self._unsynced = [index for index in self._unsynced if index not in unsynced or index == unsynced[-1]]
        self._synced = position
        return position

    def _sync_segment(self, index: int) -> None:
        with self._disk.modify(segment_path(self.path, index)) as file:
            file.sync()

    # --- Open and closed

    def close(self) -> None:
        """Flush, sync once more if that is promised, and let go of the file."""
        if self.closed:
            return
        if self._flusher is not None:
            self._flusher.close()
        try:
            if not self.error:
                self.flush()
                if self._committer is not None or self._synced is not None:
                    self.sync()
        finally:
            if self._committer is not None:
                self._committer.close()
            with self._lock:
                self.closed = "the channel is closed"
                self._file.close()
            self.wake_all()

    def forked(self) -> None:
        """Close in the child of a fork, where nothing belongs to it."""
        self._lock, self.arrived = threading.Lock(), threading.Condition()
        self._waiting, self._listeners = 0, []
        self.closed = "the channel was opened before a fork: open its own in the child"
        self._committer = self._flusher = None
        self._pending, self._pending_bytes = [], 0
        self._file.close()


class PatientSpool(Spool):
    """A spool whose sends wait for room at a bound instead of being refused."""

    def append(self, payload: Any, timeout: float | None = None) -> int:
        """Append one message when there is room; Timeout, and nothing is sent, when that takes too long."""
        return self._patiently(super().append, payload, timeout)

    def append_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Append many messages when there is room for all of them."""
        return self._patiently(super().append_many, payloads, timeout)

    def _patiently(self, send: Callable[[Any, float | None], T], what: Any, timeout: float | None) -> T:
        deadline, backoff = None if timeout is None else time.monotonic() + timeout, Backoff(last=ROOM_SECONDS)
        while True:
            remaining = None if deadline is None else deadline - time.monotonic()
            try:
                return send(what, remaining)
            except Backpressure as exc:
                if remaining is not None and remaining <= 0:
                    raise Timeout(f"{exc}; nothing was sent within {timeout} s") from None
            time.sleep(backoff.delay(remaining))


class _Flusher:
    """A thread that flushes a while after the first unflushed send, and sleeps when there is none."""

    def __init__(self, flush: Callable[[], None], seconds: float) -> None:
        self._flush, self._seconds = flush, seconds
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-flush", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that something waits."""
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        """Stop the thread; whoever closes flushes by hand."""
        self._closing.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closing.wait(self._seconds):
                return
            self._wanted.clear()
            with contextlib.suppress(ReadOnlyError, ClosedError):  # latched: the next send says it
                self._flush()
