"""Logs from asyncio: a thin form of the same calls.

Looking whether a record has come costs a microsecond, so a reader is asked on the event loop itself and only the
waiting is asynchronous: a back-off first, then the folder of the log or a thread wakes the loop (``LogReader.waiter``).
Reads that may touch the disk for long go through the one executor of the process (``disk/executor``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from penstock.batch import Batch
from penstock.disk import LoopWait, in_disk_thread
from penstock.errors import Timeout
from penstock.log.face import LogReader
from penstock.log.options import DEFAULT_LIMIT

__all__ = ["poll", "tail"]

T = TypeVar("T")


async def poll(look: Callable[[], T | None], timeout: float | None = None, *, waiting: LoopWait | None = None) -> T:
    """Return the first thing ``look`` returns that is not None; Timeout when the time is over.

    >>> asyncio.run(poll(iter([None, None, 7]).__next__))
    7
    """
    waiting = waiting or LoopWait()
    waiting.reset()
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    while (found := look()) is None:
        remaining = None if deadline is None else deadline - loop.time()
        if remaining is not None and remaining <= 0:
            raise Timeout(f"nothing came within {timeout} s")
        await waiting.pause(remaining)
    return found


async def tail(log: LogReader, position: int | None = None, *, limit: int = DEFAULT_LIMIT) -> AsyncIterator[Batch]:
    """Yield batches of a log from ``position`` (or from its end) on, for ever.

    >>> import tempfile
    >>> from penstock.log import open_log
    >>> from penstock.log.xchannel import Writer
    >>> async def first(path):
    ...     with open_log(path) as log:
    ...         async for batch in tail(log, log.first_position):
    ...             return batch.to_payloads()
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks") as writer:
    ...     asyncio.run(first(folder.name + "/ticks")) if writer.append(b"hello") else None
    [b'hello']
    >>> folder.cleanup()
    """
    at = await in_disk_thread(lambda: log.next_position) if position is None else position
    with contextlib.closing(log.waiter()) as waiting:
        while True:
            batch = await in_disk_thread(log.read, at, limit)
            at = batch.next_position
            if len(batch):
                waiting.reset()
                yield batch
            else:
                await waiting.pause()
