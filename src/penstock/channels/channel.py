"""A channel as Python users see it: one method for each thing that can be asked of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.model import AclKind, ChannelType, Config

if TYPE_CHECKING:
    from penstock.channels.manager import ChannelManager
    from penstock.channels.session import ChannelSession

__all__ = ["Channel"]

Who = str | Nid


class Channel:
    """One channel of a manager.  The first argument says who asks; Refused says why not.

    A method that changes a persistent channel returns when the change survives a power cut.  A broadcast or a push
    does so with ``message_flush_interval`` 0; otherwise it survives the death of the process at once and a power cut
    after that many milliseconds.

    >>> import asyncio, tempfile
    >>> from penstock.channels import ChannelManager
    >>> async def demo(folder):
    ...     async with await ChannelManager.open(folder) as manager:
    ...         ops = manager.channel("ops")
    ...         await ops.join("bob@localhost")
    ...         await ops.join("ann@localhost")
    ...         return [str(nid) for nid in await ops.members("ann@localhost")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    ['ann@localhost', 'bob@localhost']
    """

    def __init__(self, manager: ChannelManager, name: ChannelId) -> None:
        self.id = name
        self._manager = manager

    def __repr__(self) -> str:
        return f"<Channel {self.id}>"

    # --- Members

    async def join(self, nid: Who, *, on_behalf: Who | None = None, source: ChannelSession | None = None) -> None:
        """Become a member; who comes first creates the channel and owns it."""
        other = None if on_behalf is None else _nid(on_behalf)
        await self._manager.submit(c.Join(self.id, _nid(nid), other), source)

    async def leave(self, nid: Who, *, on_behalf: Who | None = None, source: ChannelSession | None = None) -> None:
        """Stop being a member.  When the owner goes the first member in NID order owns the channel; when the last
        one goes, or the owner of a queue, the channel ends.
        """  # noqa: D205
        other = None if on_behalf is None else _nid(on_behalf)
        await self._manager.submit(c.Leave(self.id, _nid(nid), other), source)

    async def members(self, nid: Who) -> list[Nid]:
        """Return all members in NID order."""
        found: list[Nid] = []
        while True:
            page: c.Page = await self._manager.submit(c.Members(self.id, _nid(nid), len(found) // 100 + 1, 100))
            found.extend(page.items)  # type: ignore[arg-type]
            if page.total is None or len(found) >= page.total or not page.items:
                return found

    async def delete(self, nid: Who, *, source: ChannelSession | None = None) -> None:
        """End the channel with everything it holds; the owner may."""
        await self._manager.submit(c.Delete(self.id, _nid(nid)), source)

    # --- Rules

    async def configure(
        self,
        nid: Who,
        *,
        max_clients: int | None = None,
        max_payload_size: int | None = None,
        max_persist_messages: int | None = None,
        persist: bool | None = None,
        message_flush_interval: int | None = None,
        type: Literal["pubsub", "fifo"] | None = None,
        source: ChannelSession | None = None,
    ) -> None:
        """Change settings; what is not given stays.  The owner may."""
        command = c.SetConfig(
            self.id, _nid(nid), max_clients, max_payload_size, max_persist_messages, persist, message_flush_interval,
            type,
        )  # fmt: skip
        await self._manager.submit(command, source)

    async def config(self, nid: Who) -> tuple[Config, ChannelType]:
        """Return the settings and the type."""
        found: tuple[Config, ChannelType] = await self._manager.submit(c.GetConfig(self.id, _nid(nid)))
        return found

    async def allow(self, nid: Who, kind: AclKind, who: Iterable[Who]) -> None:
        """Put names or whole domains on an allow-list.  The owner may; an empty list allows everyone."""
        await self._manager.submit(c.SetAcl(self.id, _nid(nid), kind, "add", tuple(map(_nid, who))))

    async def disallow(self, nid: Who, kind: AclKind, who: Iterable[Who]) -> None:
        """Take names or whole domains off an allow-list.  The owner may."""
        await self._manager.submit(c.SetAcl(self.id, _nid(nid), kind, "remove", tuple(map(_nid, who))))

    async def allowed(self, nid: Who, kind: AclKind) -> list[Nid]:
        """Return an allow-list in NID order; a whole domain is the bare domain."""
        page: c.Page = await self._manager.submit(c.GetAcl(self.id, _nid(nid), kind))
        return list(page.items)  # type: ignore[arg-type]

    # --- Messages

    async def broadcast(self, nid: Who, payload: bytes, *, source: ChannelSession | None = None) -> int:
        """Give a message to all members that may read and return its number.

        Many at once (``asyncio.gather``) go to disk together.
        """
        seq: int = await self._manager.submit(c.Broadcast(self.id, _nid(nid), _bytes(payload), _now_ms()), source)
        return seq

    async def broadcast_many(
        self, nid: Who, payloads: Iterable[bytes], *, source: ChannelSession | None = None
    ) -> range:
        """Give many messages in one go, which is by far the fastest way, and return their numbers.

        They are numbered in a row and acknowledged together.  One that is too large refuses all of them.
        """
        command = c.BroadcastMany(self.id, _nid(nid), tuple(map(_bytes, payloads)), _now_ms())
        numbers: range = await self._manager.submit(command, source)
        return numbers

    async def history(self, nid: Who, from_seq: int = 1, limit: int = 100) -> list[c.StoredMessage]:
        """Return stored messages from a number on, oldest first."""
        entries: list[c.StoredMessage] = await self._manager.submit(c.History(self.id, _nid(nid), from_seq, limit))
        return entries

    async def range(self, nid: Who) -> tuple[int, int]:
        """Return the first and the last stored number; (0, 0) when nothing is stored."""
        found: tuple[int, int] = await self._manager.submit(c.Range(self.id, _nid(nid)))
        return found

    # --- Queues

    async def push(self, nid: Who, payload: bytes) -> None:
        """Put an element at the end of a queue; the owner may."""
        await self._manager.submit(c.Push(self.id, _nid(nid), _bytes(payload), _now_ms()))

    async def pop(self, nid: Who) -> c.StoredMessage:
        """Take the element at the head of a queue: handed out once and never again, crash or not."""
        entry: c.StoredMessage = await self._manager.submit(c.Pop(self.id, _nid(nid)))
        return entry

    async def length(self, nid: Who) -> int:
        """Return how many elements wait; the owner may know."""
        waiting: int = await self._manager.submit(c.Length(self.id, _nid(nid)))
        return waiting

    async def clear(self, nid: Who) -> None:
        """Forget all elements; the owner may.  Also mends a queue whose cursor is unusable."""
        await self._manager.submit(c.Clear(self.id, _nid(nid)))


def _nid(who: Who) -> Nid:
    return Nid.parse(who) if isinstance(who, str) else who


def _bytes(payload: bytes) -> bytes:
    """Return what a caller gave as bytes that nobody changes: any buffer will do."""
    return payload if type(payload) is bytes else bytes(memoryview(payload))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
