"""Saves of many channels at once: those that wait together are shared out among a few threads.

A save is four steps with two syncs, so its order costs twice what one sync costs.  What wins that back is that the
saves of different channels go side by side: each thread takes its share of all that wait and does it step by step
together, one change of threads for many saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

from penstock.channels.model import PersistedChannel
from penstock.channels.store import ChannelStore, FileChannelStore

__all__ = ["Saver", "save_many"]

MAX_SHARE: Final = 64
"""How many saves a thread takes at a time: they are all answered when the last of them is done."""


def save_many(store: ChannelStore, channels: Sequence[PersistedChannel]) -> list[str | Exception]:
    """Save different channels, together where the store can; return a hash or an error for each.

    >>> from penstock.channels.store import MemoryChannelStore
    >>> [len(hash) for hash in save_many(MemoryChannelStore(), [PersistedChannel("a"), PersistedChannel("b")])]
    [64, 64]
    """
    if isinstance(store, FileChannelStore):
        return store.save_many(channels)
    results: list[str | Exception] = []
    for channel in channels:
        try:
            results.append(store.save(channel))
        except Exception as exc:  # noqa: BLE001 - it belongs to whoever asked
            results.append(exc)
    return results


class Saver:
    """Takes saves on the event loop; a channel has at most one under way at any time.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from penstock.channels.store import MemoryChannelStore
    >>> async def demo(store):
    ...     with ThreadPoolExecutor(2) as threads:
    ...         saver = Saver(store, threads, 2)
    ...         await asyncio.gather(saver.save(PersistedChannel("a")), saver.save(PersistedChannel("b")))
    >>> store = MemoryChannelStore(); asyncio.run(demo(store)); len(store.hashes())
    2
    """

    def __init__(self, store: ChannelStore, executor: Executor, threads: int) -> None:
        self._store, self._executor, self._free = store, executor, threads
        self._waiting: list[tuple[PersistedChannel, asyncio.Future[None]]] = []
        self._due = False

    def save(self, channel: PersistedChannel) -> asyncio.Future[None]:
        """Return a future that is done when the metadata survives a power cut."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((channel, future))
        if not self._due and self._free:
            self._due = True
            loop.call_soon(self._share_out, loop)  # after whoever else is about to ask
        return future

    def _share_out(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = False
        while self._waiting and self._free:
            size = min(-(-len(self._waiting) // self._free), MAX_SHARE)
            share, self._waiting = self._waiting[:size], self._waiting[size:]
            self._free -= 1
            self._executor.submit(self._work, loop, share)

    def _work(
        self, loop: asyncio.AbstractEventLoop, share: list[tuple[PersistedChannel, asyncio.Future[None]]]
    ) -> None:
        results: Sequence[str | BaseException]
        try:
            results = save_many(self._store, [channel for channel, _ in share])
        except BaseException as exc:  # noqa: BLE001 - all of them may have failed: none is applied
            results = [exc] * len(share)
        loop.call_soon_threadsafe(self._done, loop, share, results)

    def _done(
        self,
        loop: asyncio.AbstractEventLoop,
        share: list[tuple[PersistedChannel, asyncio.Future[None]]],
        results: Sequence[str | BaseException],
    ) -> None:
        self._free += 1
        for (_, future), result in zip(share, results, strict=True):
            if future.done():  # only if the loop is being torn down
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(None)
        if self._waiting and not self._due:
            self._due = True
            loop.call_soon(self._share_out, loop)
