"""Logs from asyncio: a thin form of the same calls.

Looking whether a record has come costs a microsecond, so a reader is asked on the event loop itself and only the
waiting is asynchronous.  Reads that may touch the disk for long go through ``asyncio.to_thread``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from penstock.batch import Batch
from penstock.disk import Backoff
from penstock.errors import Timeout
from penstock.log.face import LogReader
from penstock.log.options import DEFAULT_LIMIT

__all__ = ["poll", "tail"]

T = TypeVar("T")


async def poll(look: Callable[[], T | None], timeout: float | None = None) -> T:
    """Return the first thing ``look`` returns that is not None; Timeout when the time is over.

    >>> asyncio.run(poll(iter([None, None, 7]).__next__))
    7
    """
    backoff = Backoff()
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    while (found := look()) is None:
        remaining = None if deadline is None else deadline - loop.time()
        if remaining is not None and remaining <= 0:
            raise Timeout(f"nothing came within {timeout} s")
        await asyncio.sleep(backoff.delay(remaining))
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
    at = await asyncio.to_thread(lambda: log.next_position) if position is None else position
    backoff = Backoff()
    while True:
        batch = await asyncio.to_thread(log.read, at, limit)
        at = batch.next_position
        if len(batch):
            backoff.reset()
            yield batch
        else:
            await asyncio.sleep(backoff.delay())
