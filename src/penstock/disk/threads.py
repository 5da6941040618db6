"""Threads to work on, for machines that may have none to give.

``concurrent.futures`` leaves work in its queue when a thread cannot be started, and tells the caller that it failed:
the work is then done later, behind the back of whoever was told it was not.  Here everything that was submitted is done
once: by a thread, or, where not one can be had, by the thread that submits it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

__all__ = ["NO_THREAD", "Threads", "interruptible", "start_thread"]

P = ParamSpec("P")
T = TypeVar("T")

NO_THREAD: Final = (RuntimeError, MemoryError, OSError)
"""What starting a thread raises where there is none to be had."""

Work = tuple["Future[Any]", Callable[[], Any]]


def start_thread(run: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a thread that ends with the process; None where there is none to be had.

    >>> done = threading.Event()
    >>> thread = start_thread(done.set, "penstock-example")
    >>> thread is None or (thread.join() or done.is_set())
    True
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except NO_THREAD:
        return None
    return thread


def interruptible(call: Callable[[], T]) -> T:
    """Make a call that waits in native code, where no Ctrl-C is heard: an interrupt ends the wait, not the call.

    Only the main thread is interrupted, so any other makes the call itself.

    >>> interruptible(lambda: 7)
    7
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future: Future[T] = Future()
    if start_thread(lambda: _do((future, call)), "penstock-request") is None:
        return call()
    return future.result()


class Threads(Executor):
    """At most ``limit`` threads, made as they are needed; without one, whoever submits does the work.

    >>> with Threads(2, "penstock-example") as threads:
    ...     threads.submit(max, 3, 4).result(), list(threads.map(abs, [-1, 2]))
    (4, [1, 2])
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name, self._process = limit, name, os.getpid()
        self._shared = _Shared()
        self._threads: list[threading.Thread] = []
        self._closed = False
        weakref.finalize(self, self._shared.work.put, None).atexit = False
        _EVERY.add(self)

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a call done and return its future."""
        future: Future[T] = Future()
        work: Work = future, lambda: call(*args, **kwargs)
        shared = self._shared
        with shared.mutex:
            if self._closed:
                raise RuntimeError(f"{self._name}: it was shut down")
            if shared.idle:
                shared.idle -= 1
                shared.work.put(work)
                return future
            shared.work.put(work)
            if len(self._threads) < self._limit:
                thread = start_thread(shared.serve, f"{self._name}-{len(self._threads) + 1}")
                if thread is not None:
                    self._threads.append(thread)
                    return future
            if self._threads:  # those that are there come to it
                shared.owed += 1
                return future
            shared.work.get_nowait()  # nobody else takes it
        _do(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; what was submitted is done, unless it is to be cancelled."""
        with self._shared.mutex:
            self._closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while (work := self._shared.work.get_nowait()) is not None:
                    if work[0].cancel():
                        work[0].set_running_or_notify_cancel()  # else ``wait`` goes on waiting for it
        self._shared.work.put(None)
        if cancel_futures and not wait:
            _EVERY.discard(self)  # nobody wants what it is still at: the end of the process waits for it neither
        if wait:
            for thread in self._threads:
                thread.join()


class _Shared:
    """What the threads know of their executor, so that they do not keep it alive."""

    def __init__(self) -> None:
        self.work: SimpleQueue[Work | None] = SimpleQueue()
        self.mutex = threading.Lock()
        self.idle = 0
        """How many threads have done what they were started or woken for."""
        self.owed = 0
        """How much work waits that no thread was started or woken for."""

    def serve(self) -> None:
        """Do what there is to do until there is no more to come."""
        while (work := self.work.get()) is not None:
            _do(work)
            del work
            with self.mutex:
                if self.owed:
                    self.owed -= 1
                else:
                    self.idle += 1
        self.work.put(None)  # for the next thread


def _do(work: Work) -> None:
    future, call = work
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits
        future.set_exception(exc)
    else:
        future.set_result(result)


_EVERY: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Let what was submitted be done before the process ends."""
    for threads in list(_EVERY):
        if threads._process == os.getpid():
            threads.shutdown()
