"""Receivers that acknowledge: everything from the first unacknowledged message on is held, and delivered again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile

from penstock.batch import Batch
from penstock.disk import Lock
from penstock.errors import OptionsError
from penstock.log.filechannel.receiver import OnDamage, Receiver, Source, Start, resolve
from penstock.log.filechannel.segments import Walk
from penstock.log.sidecar import Register

__all__ = ["AckReceiver", "Bury"]

Bury = Callable[[list[bytes]], None]


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
        bury: Bury | None = None,
    ) -> None:
        self.name = name
        self._register, self._log_id, self._name_lock, self._durable = register, log_id, lock, durable
        self._max_tries, self._bury = max_tries, bury
        self._tries: dict[int, int] = {}
        self._acked = position
        # Messages are numbered as they are read ahead.  Below _done all are acknowledged; the chunks hold the others.
        self._done = 0
        self._chunks: deque[_Chunk] = deque()
        super().__init__(source, position, on_damage)

    @property
    def held(self) -> int:
        """The position of the first message that is not acknowledged."""
        return self._acked

    def _passed(self) -> int:
        return self._acked

    @property
    def unacked(self) -> int:
        """How many messages were received and not acknowledged."""
        with self._lock:
            if not self._chunks:
                return 0
            newest = self._chunks[-1]  # it is the batch at hand, unless that was handed out to its end
            return (newest.stop if self._batch is None else newest.start + self._at) - self._done

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
            done = self._done + count
            last = next(chunk for chunk in self._chunks if done <= chunk.stop)
            self._move(last.end_of(done - 1))
            self._done = done
            while self._chunks and self._chunks[0].stop <= done:
                self._chunks.popleft()

    async def aack(self, n: int | None = None) -> None:
        """Acknowledge from asyncio: on a thread where it waits for the disk, which is with ``sync="always"``."""
        if self._durable:
            await asyncio.to_thread(self.ack, n)
        else:
            self.ack(n)

    def nack(self, n: int = 1) -> int:
        """Say that the ``n`` oldest unacknowledged messages failed: they, and all behind them, come again.

        A message that failed ``max_tries`` times and is the oldest goes to the dead letters instead, and counts as
        acknowledged.  Returns how many went there.  Tries are counted by this receiver, not on disk.
        """
        with self._lock:
            self._check_open()
            if not 0 < n <= self.unacked:
                raise OptionsError(f"nack({n}): {self.unacked} messages wait to be acknowledged")
            failed = list(self._oldest(n))
            for position in failed:
                self._tries[position] = self._tries.get(position, 0) + 1
            dead = list(takewhile(lambda position: 0 < self._max_tries <= self._tries[position], failed))
            if dead:
                assert self._bury is not None
                self._bury(self._payloads_at(dead))
                self.ack(len(dead))
            self._restart(self._acked)
            return len(dead)

    def seek(self, position: Start | int) -> None:
        """Go to a position and hold from there: what was received before is no longer waiting for an ack."""
        with self._lock, self._source.still():
            self._check_open()
            target = resolve(self._source, position)
            self._move(target)
            self._restart(target)

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

    # --- Keeping count

    def _filled(self, batch: Batch) -> None:
        self._chunks.append(_Chunk(self._chunks[-1].stop if self._chunks else self._done, batch))

    def _restart(self, position: int) -> None:
        """Deliver from a position on, as if nothing behind it had been received."""
        self._put(position)
        self._chunks.clear()

    def _oldest(self, n: int) -> Iterator[int]:
        """Yield the positions of the oldest unacknowledged messages."""
        stop = self._done + n
        for chunk in self._chunks:
            yield from chunk.positions[max(0, self._done - chunk.start) : max(0, stop - chunk.start)].tolist()

    def _payloads_at(self, positions: list[int]) -> list[bytes]:
        walk = Walk(self._source.folder)
        try:
            return [walk.read(position, 1, self._source.visible).to_payloads()[0] for position in positions]
        finally:
            walk.close()

    def _move(self, position: int) -> None:
        """Acknowledge everything below ``position``; when its file cannot be written, nothing has changed."""
        if self._register is not None:
            self._register.write(self._log_id, position, sync=self._durable)
        self._acked = position
        if self._tries:
            self._tries = {at: tries for at, tries in self._tries.items() if at >= position}
        self._source.moved(position)


class _Chunk:
    """Messages that were read ahead together: their numbers, and where they are."""

    __slots__ = ("end", "positions", "start", "stop")

    def __init__(self, start: int, batch: Batch) -> None:
        self.start, self.stop = start, start + len(batch)
        self.positions, self.end = batch.positions, batch.next_position

    def end_of(self, number: int) -> int:
        """Return the position behind a message: within a batch that is where the next one begins."""
        return self.end if number == self.stop - 1 else int(self.positions[number + 1 - self.start])
