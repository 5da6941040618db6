"""One listener of a member: what its channels say arrives here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.channels import commands as c
from penstock.channels.ids import Nid
from penstock.errors import Backpressure

if TYPE_CHECKING:
    from penstock.channels.manager import ChannelManager

__all__ = ["Session"]


class Session:
    """A member's connection: iterate over it, or give it a sink.

    One that reads too slowly ends with Backpressure instead of growing without end; what it had taken before is still
    handed out first.

    >>> import tempfile
    >>> from penstock.channels import ChannelManager
    >>> async def demo(folder):
    ...     async with await ChannelManager.open(folder) as manager:
    ...         session = manager.connect("ann@localhost")
    ...         await manager.channel("ops").join("ann@localhost")
    ...         return [event.kind for event in session.waiting()]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    ['MEMBER_JOINED']
    """

    def __init__(
        self,
        manager: ChannelManager,
        nid: Nid,
        sink: Callable[[c.Event | c.Message], None] | None,
        inbox_size: int,
    ) -> None:
        self.nid = nid
        self._manager, self._sink, self._room = manager, sink, inbox_size
        self._inbox: deque[c.Event | c.Message] = deque()
        self._news = asyncio.Event()
        self._ended = self._overflown = False

    def put(self, event: c.Event | c.Message) -> None:
        """Take an event; the manager calls this."""
        if self._sink is not None:
            self._sink(event)
            return
        if self._ended or self._overflown:
            return
        if len(self._inbox) >= self._room:
            self._overflown = True
        else:
            self._inbox.append(event)
        self._news.set()

    def waiting(self) -> list[c.Event | c.Message]:
        """Return what has arrived so far, without waiting."""
        events, self._inbox = list(self._inbox), deque()
        return events

    async def __aiter__(self) -> AsyncIterator[c.Event | c.Message]:
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self._overflown:
                raise Backpressure(f"{self.nid}: more than {self._room} events waited to be read")
            if self._ended:
                return
            self._news.clear()
            await self._news.wait()

    def end(self) -> None:
        """Let the iteration end; nothing is left on anyone's behalf."""
        self._ended = True
        self._news.set()

    async def close(self) -> None:
        """Disconnect: with the last session of a member its transient channels are left."""
        self.end()
        await self._manager.disconnected(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
