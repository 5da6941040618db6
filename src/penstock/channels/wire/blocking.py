"""The client for programs without an event loop: the same methods, each of which waits for its answer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from penstock.channels.wire.client import Client
from penstock.channels.wire.news import Gap, Heard, News
from penstock.errors import ClosedError, Timeout

__all__ = ["BlockingClient"]

_log = logging.getLogger(__name__)


class BlockingClient:
    """A Client on a loop of its own, in a thread of its own.

    Every method of Client is here, without ``await``; ``news()`` and ``messages()`` are plain iterators, and
    ``next_news(seconds)`` gives None when nothing came.

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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-channel-client", daemon=True)
        self._thread.start()
        self._closed = False
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

        async def one() -> News | None:
            return await anext(self._news, None)

        if self._closed:
            return None
        if self._pending is None:
            self._pending = asyncio.run_coroutine_threadsafe(one(), self._loop)
        try:
            found: News | None = self._pending.result(seconds)
        except (TimeoutError, Timeout):
            return None
        self._pending = None
        return found

    _pending: Any = None

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
        if not self._closed:
            self._closed = True
            self._wait(self._client.close())
            if self._pending is not None:
                self._pending.cancel()
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Any) -> Any:
        if self._loop.is_closed():
            work.close()
            raise ClosedError("the client is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        async def settle() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._wait(settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
