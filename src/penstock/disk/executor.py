"""The one executor through which asyncio code reaches logs and stores, which are synchronous.

At most THREADS calls run at once in a process, whatever asks for them (buckets, folds, channels, servers); the
others wait in order.  A call that waits for something other than the disk has threads of its own, so that it keeps
nobody from the disk.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from penstock.disk.threads import Threads

__all__ = ["THREADS", "disk_executor", "doze_in_thread", "in_disk_thread", "in_waiting_thread"]

P = ParamSpec("P")
T = TypeVar("T")

THREADS: Final = 32
"""Enough that slow fsyncs of several files overlap; a thread is only made when all others are busy."""


DOZERS: Final = 16
"""How many calls may wait for another process at once."""


def disk_executor() -> Threads:
    """Return the executor of this process: for who needs futures instead of coroutines.

    >>> disk_executor().submit(max, 3, 4).result()
    4
    """
    return _executor(os.getpid())  # a fork leaves the threads behind: a child makes its own


@functools.cache
def _executor(_process: int) -> Threads:
    return Threads(THREADS, "penstock-disk")


@functools.cache
def _waiting(_process: int) -> Threads:
    return Threads(THREADS, "penstock-wait")


async def in_disk_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that may wait for the disk off the event loop and return its answer.

    >>> asyncio.run(in_disk_thread(max, 3, 4))
    4
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(disk_executor(), functools.partial(call, *args, **kwargs))


async def doze_in_thread(call: Callable[[], object]) -> bool:
    """Run a call that waits for another process, for a fraction of a second, off the event loop.

    False, and nothing was run, when so many wait already that no thread is to be had: look again after a pause then.

    >>> asyncio.run(doze_in_thread(lambda: None))
    True
    """
    executor, free = _dozing(os.getpid())
    if not free.acquire(blocking=False):
        return False

    def run() -> None:
        try:
            call()
        finally:
            free.release()

    try:
        work = executor.submit(run)
    except RuntimeError:  # no thread, or the interpreter ends
        free.release()
        return False
    await asyncio.wrap_future(work)
    return True


@functools.cache
def _dozing(_process: int) -> tuple[Threads, threading.BoundedSemaphore]:
    executor = Threads(DOZERS, "penstock-doze")
    return executor, threading.BoundedSemaphore(DOZERS)


async def in_waiting_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that may wait for more than the disk (another sender, the network) off the event loop.

    >>> asyncio.run(in_waiting_thread(max, 3, 4))
    4
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_waiting(os.getpid()), functools.partial(call, *args, **kwargs))
