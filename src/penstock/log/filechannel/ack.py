"""Receivers that acknowledge: everything from the first unacknowledged message on is held, and delivered again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.batch import Batch
from penstock.disk import Lock
from penstock.errors import OptionsError
from penstock.log.filechannel.receiver import OnDamage, Receiver, Source, Start, resolve
from penstock.log.filechannel.segments import Walk
from penstock.log.sidecar import Register
from penstock.types import Problem

__all__ = ["AckReceiver"]


class AckReceiver(Receiver):
    """Receives messages and says which of them are done with; the rest is kept, and delivered again.

    With a name its place survives the process: the next receiver of that name starts exactly at the first message
    that was not acknowledged.  Acknowledge after the work is done, never before.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> with FileChannel.open(folder.name) as channel:
    ...     positions = channel.append_many([b"one", b"two", b"three"])
    ...     rx = channel.ack_rx("billing")
    ...     for batch in rx.batches(max=2, timeout=0):
    ...         rx.ack()        # the work on the batch is done
    ...         break
    >>> with FileChannel.open(folder.name) as channel:
    ...     channel.ack_rx("billing").recv()
    b'three'
    >>> folder.cleanup()
    """

    def __init__(
        self,
        source: Source,
        position: int,
        on_damage: OnDamage = "raise",
        *,
        name: str | None = None,
        register: Register | None = None,
        log_id: bytes = bytes(16),
        lock: Lock | None = None,
        durable: bool = False,
        max_tries: int = 0,
        bury: Callable[[bytes], None] | None = None,
    ) -> None:
        self.name = name
        self._register, self._log_id, self._name_lock, self._durable = register, log_id, lock, durable
        self._max_tries, self._bury = max_tries, bury
        self._tries: dict[int, int] = {}
        self._acked = position
        # Chunks of messages handed out and not acknowledged: where each ends, and which part of the chunk it is.
        self._unacked: deque[list[Any]] = deque()
        super().__init__(source, position, on_damage)

    @property
    def held(self) -> int:
        """The position of the first message that is not acknowledged."""
        return self._acked

    def _done(self) -> int:
        return self._acked

    @property
    def unacked(self) -> int:
        """How many messages were received and not acknowledged."""
        with self._lock:
            self._settle()
            return sum(stop - start for _, start, stop in self._unacked)

    def ack(self, n: int | None = None) -> None:
        """Acknowledge the ``n`` oldest unacknowledged messages, or all that were received.

        More than there are is refused with OptionsError and changes nothing.
        """
        with self._lock:
            self._check_open()
            if n is not None and n < 0:
                raise OptionsError(f"ack({n}): must not be negative")
            waiting = self.unacked
            count = waiting if n is None else n
            if count > waiting:
                raise OptionsError(f"ack({count}): only {waiting} messages wait to be acknowledged")
            if not count:
                return
            position = self._acked
            for chunk in self._unacked:
                ends, start, stop = chunk
                step = min(count, stop - start)
                if step:
                    position = int(ends[start + step - 1])
                    chunk[1] = start + step
                    count -= step
                if not count:
                    break
            self._settle()
            self._move(position)

    def nack(self, n: int = 1) -> int:
        """Say that the ``n`` oldest unacknowledged messages failed: they, and all behind them, come again.

        A message that failed ``max_tries`` times and is the oldest goes to the dead letters instead, and counts as
        acknowledged.  Returns how many went there.  Tries are counted by this receiver, not on disk.
        """
        with self._lock:
            self._check_open()
            if not 0 < n <= self.unacked:
                raise OptionsError(f"nack({n}): {self.unacked} messages wait to be acknowledged")
            batch = Walk(self._source.folder).read(self._acked, n, self._source.visible)
            positions = batch.positions.tolist()
            for position in positions:
                self._tries[position] = self._tries.get(position, 0) + 1
            buried = 0
            while buried < len(positions) and 0 < self._max_tries <= self._tries[positions[buried]]:
                assert self._bury is not None
                self._bury(bytes(batch.payload(buried)))
                del self._tries[positions[buried]]
                buried += 1
            if buried:
                self.ack(buried)
            self._put(self._acked)
            return buried

    def seek(self, position: Start | int) -> None:
        """Go to a position and hold from there: what was received before is no longer waiting for an ack."""
        target = resolve(self._source, position)
        with self._lock:
            self._check_open()
            self._put(target)
            self._move(target)

    def close(self) -> None:
        """Receive no more.  A named receiver keeps its place, and what it has not acknowledged."""
        super().close()
        if self._register is not None:
            self._register.close()
        if self._name_lock is not None:
            self._name_lock.release()
            self._name_lock = None

    def forked(self) -> None:
        """Close in the child of a fork; the name stays the parent's."""
        super().forked()
        if self._name_lock is not None:
            self._name_lock.release()
            self._name_lock = None

    def skip_damage(self) -> Problem | None:
        """Step over a damaged place; what is in it counts as received, to be acknowledged with what follows."""
        with self._lock:
            self._settle()
            kept = self._unacked
            problem = super().skip_damage()
            self._unacked = kept
            return problem

    # --- Keeping count

    def _put(self, position: int) -> None:
        super()._put(position)
        self._unacked = deque()

    def _filled(self, batch: Batch) -> None:
        ends = np.empty(len(batch), np.int64)
        ends[:-1], ends[-1] = batch.positions[1:], batch.next_position
        if self._unacked:  # all of the batch before was handed out
            self._unacked[-1][2] = len(self._unacked[-1][0])
        self._unacked.append([ends, 0, 0])

    def _settle(self) -> None:
        """Bring the newest chunk, which is the batch at hand, up to what was handed out."""
        if self._unacked:
            last = self._unacked[-1]
            last[2] = len(last[0]) if self._batch is None else self._at
        while self._unacked and self._unacked[0][1] == len(self._unacked[0][0]):
            self._unacked.popleft()

    def _move(self, position: int) -> None:
        if self._register is not None:
            self._register.write(self._log_id, position, sync=self._durable)
        self._acked = position
        self._source.moved(position)
