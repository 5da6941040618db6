"""What a caller sends with; the work is done by the channel's spool."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.disk import ClosingHandle
from penstock.errors import ClosedError
from penstock.log.filechannel.spool import Spool

__all__ = ["Sender"]


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
        return self._spool.append(payload, timeout)

    def send_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Send a list of bytes, an Arrow array or a Batch, and return the positions.

        Within one segment all of them go or none.  If the disk fails while a batch goes on in a new segment, the
        messages of the segments before it stay; ``write_position`` tells how far it came.
        """
        if self._closed:
            raise ClosedError(f"{self._spool.path}: the sender is closed")
        return self._spool.append_many(payloads, timeout)

    async def asend(self, payload: Any) -> int:
        """Send from asyncio: the wait for other senders, the disk and a sync is on a thread."""
        import asyncio

        return await asyncio.to_thread(self.send, payload)

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
