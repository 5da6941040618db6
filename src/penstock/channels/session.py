"""One listener of a member: what its channels say arrives here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from penstock.channels import commands as c
from penstock.channels.counts import FAILURES
from penstock.channels.ids import Nid
from penstock.errors import Backpressure

if TYPE_CHECKING:
    from penstock.channels.manager import ChannelManager

__all__ = ["ChannelSession"]

_log = logging.getLogger(__name__)

Listener = Callable[[c.Delivery], None]
WhenFull = Literal["end", "drop"]


class ChannelSession:
    """A member's connection: iterate over it, or give it a sink.

    Messages arrive in runs and stay so up to here: ``runs()`` hands them out as they came, iterating one by one.
    One that reads too slowly ends with Backpressure instead of growing without end (or drops what does not fit and
    counts it in ``dropped``); what it had taken before is still handed out first.

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
        sink: Listener | None,
        inbox_size: int,
        when_full: WhenFull = "end",
    ) -> None:
        self.nid = nid
        self.dropped = 0
        """Events and messages that did not fit, with ``when_full="drop"``."""
        self.error: BaseException | None = None
        """What the sink raised: nothing more is given to it."""
        self._manager, self._sink, self._room, self._when_full = manager, sink, inbox_size, when_full
        self._inbox: deque[c.Delivery] = deque()
        self._size = 0
        self._begun: Iterator[c.Event | c.ChannelMessage] = iter(())
        self._news = asyncio.Event()
        self._ended = self._overflown = False

    def put(self, event: c.Delivery) -> None:
        """Take an event or a run; the manager calls this.  Never raises."""
        if self._ended or self._overflown:
            return
        if self._sink is not None:
            try:
                self._sink(event)
            except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001 - it is nobody else's
                FAILURES.add(who="sink")
                _log.warning("%s: its sink failed and hears no more: %r", self.nid, exc)
                self.error = exc
                self.end()
            return
        size = len(event) if isinstance(event, c.Messages) else 1
        if self._size + size > self._room:
            left = self._room - self._size
            if self._when_full == "drop":
                self.dropped += size - left
            else:
                self._overflown = True
            if isinstance(event, c.Messages) and left:
                event, size = event.first(left), left
            else:
                size = 0
        if size:
            self._inbox.append(event)
            self._size += size
        self._news.set()

    def waiting(self) -> list[c.Event | c.ChannelMessage]:
        """Return what has arrived so far, one by one, without waiting."""
        events = list(self._begun)
        while self._inbox:
            events.extend(_one_by_one(self._take()))
        return events

    async def runs(self) -> AsyncIterator[c.Delivery]:
        """Yield events and runs of messages as they came."""
        while True:
            left = [one for one in self._begun if isinstance(one, c.ChannelMessage)]
            if left:  # of a run whose iteration was left
                one, payloads = left[0], tuple(each.payload for each in left)
                yield c.Messages(one.channel, one.sender, one.seq, one.timestamp, payloads, one.recipients)
            elif await self._has_arrived():
                yield self._take()
            else:
                return

    async def __aiter__(self) -> AsyncIterator[c.Event | c.ChannelMessage]:
        while True:
            one = next(self._begun, None)  # of a run; the next iteration, or another one, goes on where one left
            if one is not None:
                yield one
            elif await self._has_arrived():
                self._begun = iter(_one_by_one(self._take()))
            else:
                return

    async def _has_arrived(self) -> bool:
        """Wait until there is something to take; False when nothing comes any more."""
        while not self._inbox:
            if self._overflown:
                raise Backpressure(f"{self.nid}: more than {self._room} events waited to be read")
            if self._ended:
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def _take(self) -> c.Delivery:
        event = self._inbox.popleft()
        self._size -= len(event) if isinstance(event, c.Messages) else 1
        return event

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


def _one_by_one(event: c.Delivery) -> list[c.Event | c.ChannelMessage]:
    return list(event) if isinstance(event, c.Messages) else [event]
