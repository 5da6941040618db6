"""The receiving side: receivers that see everything, each on its own, and receivers that acknowledge.

A receiver reads ahead a batch and hands it out one message or one slice at a time.  It never affects another one.
What it holds back from being collected is everything from its next message on (``Receiver``), or from its first
unacknowledged one (``AckReceiver``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

import numpy as np

from penstock.batch import Batch
from penstock.disk import Handle, Lock
from penstock.errors import ClosedError, CorruptionError, OptionsError, Timeout
from penstock.log import aio
from penstock.log.filechannel.segments import Folder, Walk
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Register
from penstock.types import Problem

__all__ = ["Receiver", "AckReceiver", "Start", "OnDamage"]

logger = logging.getLogger(__name__)

Start = Literal["first", "latest"]
OnDamage = Literal["raise", "skip"]
AHEAD_MESSAGES: Final = 4096
AHEAD_BYTES: Final = 256 << 10


class Source(Protocol):
    """What a receiver needs of its channel, be it the writer's or one looking on from another process."""

    path: str
    folder: Folder

    @property
    def visible(self) -> int | None:
        """The bound of what may be read, where it is known."""

    @property
    def closed(self) -> str:
        """Why nothing more will come, or nothing."""

    def wait(self, look: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait until ``look`` may find something at ``position``."""

    def end(self) -> int:
        """Where the channel ends now."""

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``."""

    def left(self, receiver: Any) -> None:
        """Note that a receiver was closed."""


class Receiver(Handle):
    """Receives every message of a channel from where it starts, independent of all other receivers.

    Messages count as read when they are handed out.  Safe to use from several threads; each message then goes to
    one of them.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> channel = FileChannel.open(folder.name)
    >>> positions = channel.append_many([b"one", b"two", b"three"])
    >>> rx = channel.rx()
    >>> rx.recv(), rx.peek(), rx.recv_many().to_payloads(), rx.try_recv()
    (b'one', b'two', [b'two', b'three'], None)
    >>> channel.close(); folder.cleanup()
    """

    def __init__(self, source: Source, position: int, on_damage: OnDamage = "raise") -> None:
        super().__init__()
        if on_damage not in ("raise", "skip"):
            raise OptionsError(f"on_damage={on_damage!r}: must be raise or skip")
        self._source, self._on_damage = source, on_damage
        self._walk = Walk(source.folder)
        self._lock = threading.RLock()
        self._dead = ""
        self.problems: list[Problem] = []
        """The damage that was stepped over, with ``on_damage="skip"``."""
        self._put(position)

    def _put(self, position: int) -> None:
        """Stand at a position with nothing read ahead."""
        self._next = self._hold = position
        self._batch: Batch | None = None
        self._payloads: list[bytes] = []
        self._at = self._count = 0

    # --- One message

    def recv(self, timeout: float | None = None) -> bytes:
        """Return the next message, waiting for it; Timeout when it takes longer than ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (payload := self.try_recv()) is None:
            if not self._wait(None if deadline is None else deadline - time.monotonic()):
                raise Timeout(f"{self._source.path}: no message within {timeout} s")
        return payload

    def try_recv(self) -> bytes | None:
        """Return the next message, or None when there is none yet."""
        with self._lock:
            at = self._at
            if at == self._count:
                if not self._fill(AHEAD_MESSAGES, AHEAD_BYTES):
                    return None
                at = 0
            self._at = at + 1
            return self._payloads[at]

    def peek(self) -> bytes | None:
        """Return the next message without receiving it, or None."""
        with self._lock:
            if self._at == self._count and not self._fill(AHEAD_MESSAGES, AHEAD_BYTES):
                return None
            return self._payloads[self._at]

    async def arecv(self, timeout: float | None = None) -> bytes:
        """Return the next message without blocking the event loop."""
        return await aio.poll(self.try_recv, timeout)

    def __iter__(self) -> Iterator[bytes]:
        """Yield messages and wait for more, until the channel is closed."""
        while True:
            payload = self.try_recv()
            if payload is not None:
                yield payload
            else:
                try:
                    self._wait(None)
                except ClosedError:
                    return

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield messages and wait for more without blocking the event loop."""
        while True:
            yield await self.arecv()

    # --- Many messages

    def recv_many(self, limit: int = DEFAULT_LIMIT, timeout: float | None = 0.0) -> Batch:
        """Return up to ``limit`` messages that are there over one buffer, waiting for the first; maybe none."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            batch = self._take(limit)
            if len(batch):
                return batch
            remaining = None if deadline is None else deadline - time.monotonic()
            if (remaining is not None and remaining <= 0) or not self._wait(remaining):
                return batch

    def batches(self, max: int = DEFAULT_LIMIT, timeout: float | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``max`` and wait for more; end when ``timeout`` seconds brought none."""
        while True:
            try:
                batch = self.recv_many(max, timeout)
            except ClosedError:
                if self._dead:
                    raise
                return
            if not len(batch):
                return
            yield batch

    async def abatches(self, max: int = DEFAULT_LIMIT) -> AsyncIterator[Batch]:
        """Yield batches and wait for more without blocking the event loop."""
        while True:
            yield await aio.poll(lambda: self._take(max) or None)

    def _take(self, limit: int) -> Batch:
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        with self._lock:
            if self._at == self._count:
                self._fill(limit, max(AHEAD_BYTES, 1 << 20), payloads=False)
            batch = self._batch
            if batch is None:
                self._check_open()
                return Batch.of([])
            start, self._at = self._at, min(self._count, self._at + limit)
            return batch if (start, self._at) == (0, self._count) else batch[start : self._at]

    # --- Where it stands

    @property
    def position(self) -> int:
        """The position of the message it receives next."""
        with self._lock:
            if self._batch is not None and self._at < self._count:
                return int(self._batch.positions[self._at])
            return self._next

    @property
    def held(self) -> int:
        """Everything from here on is kept for this receiver: what it read ahead counts as not yet received."""
        return self._hold  # no lock: collecting asks while other receivers are at work

    @property
    def lag_bytes(self) -> int:
        """How many frame bytes lie between what it holds and the end of the channel."""
        return max(0, self._source.end() - self._done())

    def _done(self) -> int:
        return self.position

    def depth(self, limit: int | None = None) -> int:
        """Count the messages it has yet to receive, at most ``limit``: this reads them."""
        walk, position, count = Walk(self._source.folder), self.position, 0
        try:
            while limit is None or count < limit:
                batch = walk.read(position, DEFAULT_LIMIT, self._source.visible)
                if not len(batch):
                    break
                count, position = count + len(batch), batch.next_position
        finally:
            walk.close()
        return count if limit is None else min(count, limit)

    def seek(self, position: Start | int) -> None:
        """Go to the first or the latest message, or to one by its position; a refused seek changes nothing."""
        target = resolve(self._source, position)
        with self._lock:
            self._check_open()
            self._put(target)
        self._source.moved(self.held)

    def skip_damage(self) -> Problem | None:
        """Step over a damaged place to the next message that is whole; return what was stepped over.

        Only after a CorruptionError.  None when it stands on nothing that is wrong.
        """
        with self._lock:
            found = self._walk.skip_damage(self.position, self._source.visible)
            if found is None:
                return None
            self._put(found[0])
            return found[1]

    # --- Open and closed

    def close(self) -> None:
        """Receive no more and hold nothing back; twice is fine."""
        with self._lock:
            if self._dead:
                return
            self._dead = "the receiver is closed"
            self._walk.close()
            self._next, self._batch = self.position, None
            self._at = self._count = 0
        self._source.left(self)

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._lock = threading.RLock()
        self._dead = "the receiver was opened before a fork: open its own channel in the child"
        self._batch, self._at, self._count = None, 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._source.path} {self._dead or f'at {self.position}'}>"

    # --- How it reads

    def _fill(self, limit: int, want: int, *, payloads: bool = True) -> bool:
        """Read ahead from ``_next``; False when nothing is there yet."""
        self._check_open()
        while True:
            try:
                batch = self._walk.read(self._next, limit, self._source.visible, want)
                break
            except CorruptionError:
                if self._on_damage == "raise":
                    raise
                problem = self.skip_damage()
                if problem is None:
                    raise
                logger.warning("%s; skipped", problem)
                self.problems.append(problem)
        self._hold, self._next = self._next, batch.next_position
        if not len(batch):
            self._batch, self._at, self._count = None, 0, 0
            self._source.moved(self.held)
            return False
        self._batch, self._at, self._count = batch, 0, len(batch)
        self._payloads = batch.to_payloads() if payloads else _Lazy(batch)
        self._filled(batch)
        self._source.moved(self.held)
        return True

    def _filled(self, batch: Batch) -> None:
        """For receivers that keep count."""

    def _wait(self, timeout: float | None) -> bool:
        self._check_open()
        if self._source.wait(self._look, self._next, timeout):
            return True
        if self._source.closed and not self._look():
            raise ClosedError(f"{self._source.path}: {self._source.closed}, and everything in it was received")
        return False

    def _look(self) -> bool:
        with self._lock:
            return self._at < self._count or self._fill(AHEAD_MESSAGES, AHEAD_BYTES)

    def _check_open(self) -> None:
        if self._dead:
            raise ClosedError(f"{self._source.path}: {self._dead}")


class _Lazy(list[bytes]):
    """The payloads of a batch that is taken whole, made only if someone asks for one after all."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._source = batch

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._source.payload(index))


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


def resolve(source: Source, position: Start | int) -> int:
    """Return the position a start means; it must be that of a message, or the end."""
    if position == "first":
        return source.folder.first_position()
    if position == "latest":
        return source.end()
    if not isinstance(position, int) or position < 0:
        raise OptionsError(f"{position!r}: must be 'first', 'latest' or a position")
    if position > source.end():
        raise OptionsError(f"{source.path}: position {position} is past the end of the channel, {source.end()}")
    if not aligned(source.folder, position, source.visible):
        raise OptionsError(f"{source.path}: no message begins at position {position}")
    return position


def aligned(folder: Folder, position: int, bound: int | None) -> bool:
    """Whether a message begins or ends at ``position``; ExpiredError when that is before the first."""
    from penstock.errors import ExpiredError

    indexes = list(folder.files())
    place = folder.locate(indexes, position)
    if place is None:
        raise ExpiredError(folder.path, position, folder.first_position())
    at = folder.begin(indexes[place]) or 0
    walk = Walk(folder)
    try:
        while at < position:
            batch = walk.read(at, DEFAULT_LIMIT, position if bound is None else min(bound, position))
            if not len(batch):
                return False
            at = batch.next_position
    except CorruptionError:
        return False
    finally:
        walk.close()
    return at == position
