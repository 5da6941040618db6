"""Group commit: many callers wait for one fsync.

One thread per process does the syncs; callers get a future.  While a sync runs, the requests of
everyone who comes meanwhile gather behind it and are served together by the next one.  When several
logs want a sync at once, helpers of the same pool run them side by side, because a device takes many
flushes at a time.

Threads are a help and no condition.  Where none can be started (a limit of processes, little memory), whoever asks for
a sync does it itself, and whoever writes syncs at once: nobody else would when the interval has passed.  A background
sync that failed is tried again after the interval, and ``check`` tells the next caller, before it writes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from penstock.errors import ClosedError, ReadOnlyError

__all__ = ["GroupCommit", "Committer"]

RETRY_SECONDS: Final = 0.1
"""How long a background sync that failed waits at least before it is tried again."""


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
        self.untold = False
        """Whether nobody heard of it yet: it failed in the background, and nothing was written or asked for since."""

    def request(self) -> Future[int]:
        """Ask for a sync of everything written before this call; where no thread can serve it, it is done at once."""
        future: Future[int] = Future()
        if not self._group.enqueue(self, future):
            self._group.serve(self)
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
        """Say that something was written: it is synced within the interval.  It never fails: ``check`` tells."""
        if self._due is None and self.interval is not None:
            self._group.schedule(self, self.interval)
        if not self._group.threads:
            self._group.revive(self)

    def check(self) -> None:
        """Raise what the last sync failed with, unless one succeeds now; called before something is written.

        >>> outcomes = [OSError(28, "No space left on device"), None]
        >>> def sync() -> int:
        ...     if (outcome := outcomes.pop(0)) is not None:
        ...         raise outcome
        ...     return 7
        >>> committer = GroupCommit().committer(sync)
        >>> committer.request().exception()
        OSError(28, 'No space left on device')
        >>> committer.check()    # there is room again
        >>> committer.close()
        """
        if self.error is not None:
            self.wait()

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
        self.threads = self._sleeping = 0

    def committer(self, sync: Callable[[], int], *, interval: float | None = None) -> Committer:
        """Return a committer for one log."""
        return Committer(self, sync, interval)

    def enqueue(self, committer: Committer, future: Future[int]) -> bool:
        """Queue a request; False where nobody but the caller can serve it; used by Committer."""
        with self._mutex:
            if committer._closed:
                raise ClosedError("the log this commit belongs to is closed")
            committer._waiting.append(future)
            if not committer._running and committer not in self._ready:
                self._ready.append(committer)
            self._wake()
            return bool(self.threads)

    def serve(self, committer: Committer) -> None:
        """Do on the caller's thread what a thread of the group would do, if there is none; used by Committer."""
        while True:
            with self._mutex:
                if not self.threads:
                    self._hasten(committer)
                if committer not in self._ready or self.threads:
                    return  # whoever syncs it now takes the requests next, or a thread has come
                self._ready.remove(committer)
                futures, committer._waiting = committer._waiting, []
                committer._running = True
            try:
                self._sync(committer, futures)
            finally:
                with self._mutex:
                    self._done(committer)

    def revive(self, committer: Committer) -> None:
        """Have a thread for what is scheduled, or sync it here at once; used by Committer."""
        with self._mutex:
            if committer._due is not None:
                self._wake()
        self.serve(committer)

    def _hasten(self, committer: Committer) -> None:
        """Take what is scheduled for what is due; whoever syncs it now comes back here afterwards."""
        if committer._due is not None and not committer._running:
            self._timed.remove(committer)
            committer._due = None
            if committer not in self._ready:
                self._ready.append(committer)

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
            committer.error, committer.untold = exc, False
            raise
        else:
            committer.error, committer.untold = None, False
            return position
        finally:
            with self._mutex:
                self._done(committer)
                if committer._due is not None:  # its interval may have ended meanwhile
                    self._wake()
            if not self.threads:
                self.serve(committer)

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
        while True:
            with self._mutex:
                while committer._running or (committer._waiting and self.threads):
                    self._idle.wait()
                if not committer._waiting:
                    return
            self.serve(committer)  # nobody else will

    def _wake(self) -> None:
        if self._sleeping:
            self._work.notify()
        elif self.threads < self._limit:
            name = f"penstock-commit-{self.threads + 1}"
            try:
                threading.Thread(target=self._run, name=name, daemon=True).start()
            except (RuntimeError, MemoryError, OSError):
                return  # those that are there do it, or whoever asks
            self.threads += 1  # it waits for the mutex meanwhile

    def _run(self) -> None:
        try:
            while True:
                with self._mutex:
                    committer = self._take()
                    futures, committer._waiting = committer._waiting, []
                    committer._running = True
                try:
                    self._sync(committer, futures)
                finally:
                    with self._mutex:
                        self._done(committer)
                del committer, futures  # a thread that sleeps keeps no log that was closed meanwhile
        finally:
            with self._mutex:
                self.threads -= 1  # ended by what no sync raises: whoever asks next starts another

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
            nearest = self._collect(now)
            if self._ready:
                if len(self._ready) > 1:
                    self._wake()
                return self._ready.popleft()
            self._sleeping += 1
            try:
                self._work.wait(None if nearest is None else min(max(0.0, nearest - now), threading.TIMEOUT_MAX))
            finally:
                self._sleeping -= 1

    def _collect(self, now: float) -> float | None:
        """Make ready what is due, and return when the next one will be."""
        waiting = [c for c in self._timed if not c._running]  # the others come back here
        for committer in [c for c in waiting if c._due is not None and c._due <= now]:
            self._timed.remove(committer)
            committer._due = None
            if committer not in self._ready:
                self._ready.append(committer)
        return min((c._due for c in waiting if c._due is not None), default=None)

    def _sync(self, committer: Committer, futures: list[Future[int]]) -> None:
        try:
            position = committer._sync()
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits
            committer.error, committer.untold = exc, not futures
            for future in futures:
                future.set_exception(exc)
            if not futures and committer.interval is not None and self.threads and not isinstance(exc, ReadOnlyError):
                # Nobody heard of it, and it is not said to be final: try again by ourselves.  Where there is no thread,
                # whoever comes next does.
                self.schedule(committer, max(committer.interval, RETRY_SECONDS))
        else:
            committer.error, committer.untold = None, False
            for future in futures:
                future.set_result(position)


GROUP = GroupCommit()
"""The group commit of this process."""
