"""Group commit: many callers wait for one fsync.

One thread per process does the syncs; callers get a future.  While a sync runs, the requests of
everyone who comes meanwhile gather behind it and are served together by the next one.  When several
logs want a sync at once, helpers of the same pool run them side by side, because a device takes many
flushes at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from penstock.errors import ClosedError

__all__ = ["GroupCommit", "Committer"]


class Committer:
    """One log's side of the group commit: asks for syncs of one ``sync`` function.

    ``sync`` runs on a thread of the group or of who waits, never twice at the same time, and returns what the waiting
    futures get: by convention the position up to which everything is durable.

    >>> committer = GroupCommit().committer(lambda: 42)
    >>> committer.request().result()
    42
    >>> committer.close()
    """

    def __init__(self, group: GroupCommit, sync: Callable[[], int], interval: float | None) -> None:
        self._group, self._sync, self.interval = group, sync, interval
        self._waiting: list[Future[int]] = []
        self._running = False
        self._due: float | None = None
        self._closed = False
        self.error: BaseException | None = None
        """The last failure of a sync, until one succeeds."""

    def request(self) -> Future[int]:
        """Ask for a sync of everything written before this call."""
        future: Future[int] = Future()
        self._group.enqueue(self, future)
        return future

    def wait(self) -> int:
        """Return when everything written before this call is synced, with what ``sync`` returns.

        Who comes alone syncs on its own thread, which saves two changes of threads; who comes while a sync runs
        waits for the next one together with the others.
        """
        if self._group.begin(self):
            return self._group.finish(self)
        return self.request().result()

    def touch(self) -> None:
        """Say that something was written: it is synced within the interval."""
        if self._due is None and self.interval is not None:
            self._group.schedule(self, self.interval)

    def close(self) -> None:
        """Wait for a sync that is under way and take part no longer."""
        self._group.leave(self)


class GroupCommit:
    """The syncing thread of a process, and its helpers.

    >>> group = GroupCommit(threads=2)
    >>> committer = group.committer(lambda: 7, interval=0.01)
    >>> committer.touch()          # synced within 10 ms
    >>> committer.request().result()   # synced now
    7
    >>> committer.close()
    """

    def __init__(self, threads: int = 8) -> None:
        self._limit = threads
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._work = threading.Condition(self._mutex)
        self._idle = threading.Condition(self._mutex)
        self._ready: deque[Committer] = deque()
        self._timed: list[Committer] = []
        self._threads = self._sleeping = 0

    def committer(self, sync: Callable[[], int], *, interval: float | None = None) -> Committer:
        """Return a committer for one log."""
        return Committer(self, sync, interval)

    def enqueue(self, committer: Committer, future: Future[int]) -> None:
        """Queue a request; used by Committer."""
        with self._mutex:
            if committer._closed:
                raise ClosedError("the log this commit belongs to is closed")
            committer._waiting.append(future)
            if not committer._running and committer not in self._ready:
                self._ready.append(committer)
            self._wake()

    def begin(self, committer: Committer) -> bool:
        """Whether the caller may sync itself, because nobody does; used by Committer."""
        with self._mutex:
            if committer._closed:
                raise ClosedError("the log this commit belongs to is closed")
            if committer._running or committer in self._ready:
                return False
            committer._running = True
            return True

    def finish(self, committer: Committer) -> int:
        """Sync on the caller's thread after ``begin``; used by Committer."""
        try:
            position = committer._sync()
        except BaseException as exc:
            committer.error = exc
            raise
        else:
            committer.error = None
            return position
        finally:
            with self._mutex:
                self._done(committer)
                if committer._due is not None:  # its interval may have ended meanwhile
                    self._wake()

    def schedule(self, committer: Committer, delay: float) -> None:
        """Have a committer synced after a delay; used by Committer."""
        with self._mutex:
            if committer._due is not None or committer._closed:
                return
            committer._due = time.monotonic() + delay
            self._timed.append(committer)
            self._wake()

    def leave(self, committer: Committer) -> None:
        """Drop a committer; used by Committer."""
        with self._mutex:
            committer._closed = True
            committer._due = None
            if committer in self._timed:
                self._timed.remove(committer)
            while committer._running or committer._waiting:
                self._idle.wait()

    def _wake(self) -> None:
        if self._sleeping:
            self._work.notify()
        elif self._threads < self._limit:
            self._threads += 1
            name = f"penstock-commit-{self._threads}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._mutex:
                committer = self._take()
                futures, committer._waiting = committer._waiting, []
                committer._running = True
            self._sync(committer, futures)
            with self._mutex:
                self._done(committer)

    def _done(self, committer: Committer) -> None:
        """End a sync: those who came meanwhile get the next one."""
        committer._running = False
        if committer._waiting:
            self._ready.append(committer)
            self._wake()
        self._idle.notify_all()

    def _take(self) -> Committer:
        """Return the next committer to sync; called with the mutex held, which it gives up to sleep."""
        while True:
            now = time.monotonic()
            waiting = [c for c in self._timed if not c._running]  # the others come back here
            for committer in [c for c in waiting if c._due is not None and c._due <= now]:
                self._timed.remove(committer)
                committer._due = None
                if committer not in self._ready:
                    self._ready.append(committer)
            if self._ready:
                if len(self._ready) > 1:
                    self._wake()
                return self._ready.popleft()
            nearest = min((c._due for c in waiting if c._due is not None), default=None)
            self._sleeping += 1
            self._work.wait(None if nearest is None else max(0.0, nearest - now))
            self._sleeping -= 1

    @staticmethod
    def _sync(committer: Committer, futures: list[Future[int]]) -> None:
        try:
            position = committer._sync()
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits
            committer.error = exc
            for future in futures:
                future.set_exception(exc)
        else:
            committer.error = None
            for future in futures:
                future.set_result(position)


GROUP = GroupCommit()
"""The group commit of this process."""
