"""Making buffered messages visible a while after they were sent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.disk import start_thread
from penstock.errors import ClosedError, ReadOnlyError

__all__ = ["Flusher"]


class Flusher:
    """A thread that flushes a while after the first unflushed send, and sleeps when there is none."""

    def __init__(self, flush: Callable[[], None], seconds: float) -> None:
        self._flush, self._seconds = flush, seconds
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None
        """What the last flush failed with: whoever sends next tries it, and is told."""

    def wake(self) -> bool:
        """Say that something waits; False where no thread can be had to flush it."""
        if self._thread is None:
            self._thread = start_thread(self._run, "penstock-flush")
        if not self._wanted.is_set():
            self._wanted.set()
        return self._thread is not None

    def close(self) -> None:
        """Stop the thread; whoever closes flushes by hand."""
        self._closing.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closing.wait(self._seconds):
                return
            self._wanted.clear()
            if self._closing.is_set():  # said just before that: nobody says it again
                return
            try:
                self._flush()
                self.error = None
            except (ReadOnlyError, ClosedError):
                pass  # latched: the next send says it
            except OSError as exc:  # what was not written is still there
                self.error = exc
                self._wanted.set()
