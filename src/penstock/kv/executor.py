"""The one bounded executor through which asyncio code reaches logs and stores, which are synchronous."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["in_disk_thread"]

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4


@functools.cache
def _executor(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="penstock-disk")


async def in_disk_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that may wait for the disk off the event loop and return its answer.

    >>> asyncio.run(in_disk_thread(max, 3, 4))
    4
    """
    loop = asyncio.get_running_loop()
    # A fork leaves the threads behind: a child makes its own.
    return await loop.run_in_executor(_executor(os.getpid()), functools.partial(call, *args, **kwargs))
