"""Telling followers in other processes of messages that were stored without a system call.

A store to memory wakes nobody, and who follows a queue from another process waits for its folder to change.  So the
time of the segment's file is set: by the send that ends a silence, at once, and while sends go on by a thread that
looks at the end every few milliseconds.  When nothing came between two looks, the room is disarmed, so that the next
send ends a silence again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.kernel.tail import Tail as Room

__all__ = ["Teller"]

GATHER_SECONDS: Final = 0.005


class Teller:
    """The thread of one queue that tells of stores; it sleeps while nothing is sent."""

    def __init__(self) -> None:
        self._sent = threading.Event()
        self._reported: tuple[Room, str, int] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self) -> bool:
        """Start the thread, unless it runs; False where none is to be had."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="penstock-tell", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                return False
            self._thread = thread
        return True

    def stored(self, room: Room, path: str) -> None:
        """Take note that a message was stored into the segment at ``path``, before its room is armed."""
        if not self._sent.is_set():
            _touch(path)
        self._reported = (room, path, room.end)
        self._sent.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._sent.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            self._sent.wait()
            if self._closed:
                return
            time.sleep(GATHER_SECONDS)
            told = self._reported
            if told is None:
                continue
            room, path, end = told
            if room.end == end:
                self._sent.clear()
                room.armed = False  # the next send is told of at once
                if room.end == end and self._reported is told and not self._closed:
                    continue
                self._sent.set()  # one came just before
            _touch(path)
            if self._reported is told:  # else a send that took the lock said more
                self._reported = (room, path, room.end)


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):  # it was sealed and collected: then its folder changed
        os.utime(path, follow_symlinks=False)
