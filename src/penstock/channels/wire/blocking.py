"""The client for programs without an event loop: the same methods, each of which waits for its answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from penstock.channels.wire.client import Client
from penstock.channels.wire.news import Gap, Heard, News
from penstock.disk import ClosingHandle
from penstock.errors import ClosedError

__all__ = ["BlockingClient"]

_log = logging.getLogger(__name__)


class BlockingClient(ClosingHandle):
    """A Client on a loop of its own, in a thread of its own.

    Every method of Client is here, without ``await``; ``news()`` and ``messages()`` are plain iterators, and
    ``next_news(seconds)`` gives None when nothing came.  Threads may share it: each news goes to one of them.

    >>> import asyncio, tempfile
    >>> from penstock.channels.wire import ChannelServer
    >>> async def demo(folder):
    ...     async with ChannelServer(folder, port=None, plain_port=0) as server:
    ...         return await asyncio.to_thread(work, "plain://" + server.addresses["channels-plain"])
    >>> def work(address):
    ...     with BlockingClient(address, username="ann") as ann:
    ...         ann.join("ops")
    ...         return ann.members("ops")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    ['ann@localhost']
    """

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__()
        self._closed = False
        self._over: str | None = None
        self._asking, self._taking = threading.Lock(), threading.Lock()
        self._pending: Future[News | None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-channel-client", daemon=True)
        self._thread.start()
        try:
            self._client: Client = self._wait(Client.connect(address, **options))
            self._news = self._client.news()
        except BaseException:
            self._end()
            raise

    def __getattr__(self, name: str) -> Any:
        """Return a method of Client that waits."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        method: Callable[..., Any] = found
        return lambda *args, **options: self._wait(method(*args, **options))

    def next_news(self, seconds: float | None = None) -> News | None:
        """Return the next message, event or gap; None when the client is closed or nothing came in time."""
        until = None if seconds is None else time.monotonic() + seconds
        if not self._taking.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
            return None  # another thread waits for it
        try:
            if self._closed:
                return None
            if self._pending is None:
                self._pending = self._begin(self._next())
            try:
                found = self._pending.result(None if until is None else max(0.0, until - time.monotonic()))
            except TimeoutError:
                return None
            except CancelledError:
                found = None
            self._pending = None
            return found
        finally:
            self._taking.release()

    async def _next(self) -> News | None:
        return await anext(self._news, None)

    def news(self) -> Iterator[News]:
        """Yield messages, events and gaps until the client is closed."""
        while (found := self.next_news()) is not None:
            yield found

    def messages(self) -> Iterator[Heard]:
        """Yield messages alone; a Gap in them raises nothing, and is logged."""
        for found in self.news():
            if isinstance(found, Heard):
                yield found
            elif isinstance(found, Gap):
                _log.warning("%s: messages from %d on were missed for good", found.channel, found.first_seq)

    def close(self) -> None:
        """End the connection."""
        with self._asking:
            if self._closed or self._over is not None:
                return
            self._closed = True
        try:
            self._wait(self._client.close())
        finally:
            self._end()

    def forked(self) -> None:
        """Close in the child of a fork: its thread is the parent's, and so is the connection."""
        self._over = "the client was opened before a fork: open another one in the child"
        self._asking, self._taking = threading.Lock(), threading.Lock()
        self._pending = None  # nobody answers it here

    def _wait(self, work: Any) -> Any:
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError(self._over or "the client is closed") from None
        finally:
            future.cancel()  # who is interrupted asks no more

    def _begin(self, work: Any) -> Future[Any]:
        with self._asking:
            if self._over is None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ClosedError(self._over)

    def _end(self) -> None:
        async def settle() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with self._asking:  # what was begun before is settled, and nothing is begun any more
            self._over = "the client is closed"
            settling = asyncio.run_coroutine_threadsafe(settle(), self._loop)
        settling.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
