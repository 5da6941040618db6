"""What a caller sends with; the work is done by the channel's spool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.disk import ClosingHandle, in_waiting_thread
from penstock.errors import ClosedError, Timeout
from penstock.log.filechannel.spool import Spool

__all__ = ["Sender"]

T = TypeVar("T")
TURN_SECONDS: Final = 0.05


class Sender(ClosingHandle):
    """Sends messages into a channel.  Any number of senders; each may be used from any thread.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> with FileChannel.open(folder.name) as channel, channel.tx() as tx:
    ...     tx.send(b"hello"), tx.send_many([b"one", b"two"]).tolist()
    (0, [13, 24])
    >>> folder.cleanup()
    """

    def __init__(self, spool: Spool) -> None:
        super().__init__()
        self._spool = spool
        self._closed = False

    def send(self, payload: Any, timeout: float | None = None) -> int:
        """Send one message, whole or not at all, and return its position.

        It is visible to every receiver when this returns (unless the channel has ``flush_seconds``) and durable
        according to its ``sync``.  ``timeout`` bounds the wait for other senders; once writing begins it is done.
        """
        if self._closed:
            raise ClosedError(f"{self._spool.path}: the sender is closed")
        room = self._spool.room  # asked here as well: a call less is a third of a send
        if room is not None and (position := room.append(payload)) >= 0:
            return position
        return self._spool.append(payload, timeout)

    def send_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Send a list of bytes, an Arrow array or a Batch, and return the positions.

        Within one segment all of them go or none.  If the disk fails while a batch goes on in a new segment, the
        messages of the segments before it stay; ``write_position`` tells how far it came.
        """
        if self._closed:
            raise ClosedError(f"{self._spool.path}: the sender is closed")
        return self._spool.append_many(payloads, timeout)

    async def asend(self, payload: Any, timeout: float | None = None) -> int:
        """Send from asyncio: what waits for other senders, for room or for the disk does so on a thread."""
        if not self._closed:
            position = self._spool.append_at_once(payload)
            if position is not None:
                return position
        return await self._aside(self.send, payload, timeout)

    async def asend_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Send many from asyncio, on a thread."""
        return await self._aside(self.send_many, payloads, timeout)

    async def _aside(self, send: Callable[[Any, float | None], T], what: Any, timeout: float | None) -> T:
        """Send on a thread, in turns: one that is cancelled does not wait on there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = TURN_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                return await in_waiting_thread(send, what, min(remaining, TURN_SECONDS))
            except Timeout:
                if remaining < TURN_SECONDS:
                    raise

    @property
    def write_position(self) -> int:
        """Behind the last message that was sent, by any sender."""
        return self._spool.end

    def close(self) -> None:
        """Send no more; twice is fine."""
        self._closed = True

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._closed = True
