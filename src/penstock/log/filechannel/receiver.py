"""The receiving side: receivers that see everything, each on its own.

A receiver reads ahead a batch and hands it out one message or one slice at a time.  It never affects another one.
What it holds back from being collected is everything from its next message on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, TypeVar

from penstock.batch import Batch
from penstock.disk import ClosingHandle, LoopWait
from penstock.errors import ClosedError, CorruptionError, OptionsError, Timeout
from penstock.log.damage import log_skipped
from penstock.log.face import OnDamage
from penstock.log.filechannel.ends import QueueEnd
from penstock.log.filechannel.segments import Folder, Walk
from penstock.log.options import DEFAULT_LIMIT, Start
from penstock.types import Problem

__all__ = ["Receiver", "OnClose", "resolve", "aligned", "begins_or_damaged"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

OnClose = Callable[["Receiver"], None]
AHEAD_MESSAGES: Final = 4096
AHEAD_BYTES: Final = 256 << 10
BATCH_BYTES: Final = 1 << 20


class Receiver(ClosingHandle):
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

    name: str | None = None
    """What a receiver that acknowledges is known by, if it has a name."""

    def __init__(
        self, end: QueueEnd, position: int, on_damage: OnDamage = "raise", *, on_close: OnClose = lambda _: None
    ) -> None:
        super().__init__()
        if on_damage not in ("raise", "skip"):
            raise OptionsError(f"on_damage={on_damage!r}: must be raise or skip")
        self._end, self._on_damage, self._on_close = end, on_damage, on_close
        self._walk = Walk(end.folder)
        self._lock = threading.RLock()
        self._dead = ""
        self._waiting: LoopWait | None = None  # made by the first who waits on an event loop
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
        with self._lock:
            at = self._at
            if at < self._count:  # read ahead already: the rest of this is for the others
                self._at = at + 1
                return self._payloads[at]
        deadline = None if timeout is None else time.monotonic() + timeout
        while (payload := self.try_recv()) is None:
            if not self._wait(None if deadline is None else deadline - time.monotonic()):
                raise Timeout(f"{self._end.path}: no message within {timeout} s")
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
        payload = self.try_recv()
        return await self._await(self.try_recv, timeout) if payload is None else payload

    def __iter__(self) -> Iterator[bytes]:
        """Yield messages and wait for more, until the channel is closed."""
        with self._until_closed():
            while True:
                yield self.recv()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield messages and wait for more without blocking the event loop, until the channel is closed."""
        with self._until_closed():
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

    def batches(
        self, limit: int = DEFAULT_LIMIT, timeout: float | None = None, *, max: int | None = None
    ) -> Iterator[Batch]:
        """Yield batches of up to ``limit`` and wait for more; end when ``timeout`` seconds brought none.

        ``max`` is the former name of ``limit``.
        """
        with self._until_closed():
            while len(batch := self.recv_many(limit if max is None else max, timeout)):
                yield batch

    async def abatches(self, limit: int = DEFAULT_LIMIT, *, max: int | None = None) -> AsyncIterator[Batch]:
        """Yield batches and wait for more without blocking the event loop, until the channel is closed."""
        with self._until_closed():
            while True:
                yield await self._await(lambda: self._take(limit if max is None else max) or None, None)

    def _take(self, limit: int) -> Batch:
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        with self._lock:
            if self._at == self._count:
                self._fill(max(limit, AHEAD_MESSAGES), BATCH_BYTES, payloads=False)
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
        return max(0, self._end.end() - self._passed())

    def _passed(self) -> int:
        return self.position

    def depth(self, limit: int | None = None) -> int:
        """Count the messages it has yet to receive, at most ``limit``: this reads them."""
        walk, position, count = Walk(self._end.folder), self.position, 0
        try:
            while limit is None or count < limit:
                batch = walk.read(position, DEFAULT_LIMIT, self._end.visible)
                if not len(batch):
                    break
                count, position = count + len(batch), batch.next_position
        finally:
            walk.close()
        return count if limit is None else min(count, limit)

    def seek(self, position: Start | int) -> None:
        """Go to the earliest or the latest message, or to one by its position; a refused seek changes nothing."""
        with self._lock, self._end.pause_collection():
            self._check_open()
            self._put(resolve(self._end, position))
        self._end.moved(self.held)

    def skip_damage(self) -> Problem | None:
        """Step over a damaged place to the next message that is whole; return what was stepped over.

        Only after a CorruptionError.  None when it stands on nothing that is wrong.  A receiver that acknowledges does
        so for the damaged place together with the first message behind it.
        """
        with self._lock:
            found = self._walk.skip_damage(self.position, self._end.visible)
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
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting.close()
            self._next, self._batch = self.position, None
            self._at = self._count = 0
        self._on_close(self)

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._lock = threading.RLock()
        self._dead = "the receiver was opened before a fork: open its own channel in the child"
        self._batch, self._at, self._count = None, 0, 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._end.path} {self._dead or f'at {self.position}'}>"

    # --- How it reads

    def _fill(self, limit: int, want: int, *, payloads: bool = True) -> bool:
        """Read ahead from ``_next``; False when nothing is there yet."""
        self._check_open()
        while True:
            try:
                batch = self._walk.read(self._next, limit, self._end.visible, want)
                break
            except CorruptionError:
                if self._on_damage == "raise":
                    raise
                problem = self.skip_damage()
                if problem is None:
                    raise
                log_skipped(problem)
                self.problems.append(problem)
        self._hold, self._next = self._next, batch.next_position
        if not len(batch):
            self._batch, self._at, self._count = None, 0, 0
            self._end.moved(self.held)
            return False
        self._batch, self._at, self._count = batch, 0, len(batch)
        self._payloads = batch.to_payloads() if payloads else _Lazy(batch)
        self._filled(batch)
        self._end.moved(self.held)
        return True

    def _filled(self, batch: Batch) -> None:
        """For receivers that keep count."""

    def _wait(self, timeout: float | None) -> bool:
        self._check_open()
        if self._end.wait(self._look, self._gone, self._next, timeout):
            return True
        self._check_open()
        if self._end.closed and not self._look():
            raise ClosedError(f"{self._end.path}: {self._end.closed}, and everything in it was received")
        return False

    async def _await(self, look: Callable[[], T | None], timeout: float | None) -> T:
        """Return what ``look`` finds, on the event loop: looking costs little, the waiting is asynchronous."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = self._waiting = self._waiting or self._end.waiter()
        waiting.reset()
        while True:
            closed = self._end.closed  # before the look: what was sent before it was closed is there
            if (found := look()) is not None:
                return found
            if closed:
                raise ClosedError(f"{self._end.path}: {closed}, and everything in it was received")
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise Timeout(f"{self._end.path}: no message within {timeout} s")
            await self._end.arrival(self._next, remaining, waiting)

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """End an iteration with its channel."""
        try:
            yield
        except ClosedError:
            if not self._end.closed:
                raise

    def _look(self) -> bool:
        with self._lock:
            return self._at < self._count or self._fill(AHEAD_MESSAGES, AHEAD_BYTES)

    def _gone(self) -> bool:
        return bool(self._dead)

    def _check_open(self) -> None:
        if self._dead:
            raise ClosedError(f"{self._end.path}: {self._dead}")


class _Lazy(list[bytes]):
    """The payloads of a batch that is taken whole, made only if someone asks for one after all."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._source = batch

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._source.payload(index))


def resolve(end: QueueEnd, position: Start | int) -> int:
    """Return the position a start means; it must be that of a message, or the end."""
    if position == "earliest":
        return end.folder.first_position()
    if position == "latest":
        return end.end()
    if not isinstance(position, int) or position < 0:
        raise OptionsError(f"{position!r}: must be 'earliest', 'latest' or a position")
    if position > end.end():
        raise OptionsError(f"{end.path}: position {position} is past the end of the channel, {end.end()}")
    if not aligned(end.folder, position, end.visible):
        raise OptionsError(f"{end.path}: no message begins at position {position}")
    return position


def aligned(folder: Folder, position: int, bound: int | None) -> bool:
    """Whether a message begins or ends at ``position``; ExpiredError when that is before the first."""
    try:
        return _walks_to(folder, position, bound)
    except CorruptionError:
        return False


def begins_or_damaged(folder: Folder, position: int, bound: int | None) -> bool:
    """Whether a message begins or ends at ``position``, or damage before it hides that."""
    try:
        return _walks_to(folder, position, bound)
    except CorruptionError:
        return True


def _walks_to(folder: Folder, position: int, bound: int | None) -> bool:
    from penstock.errors import ExpiredError

    index = folder.holding(position)
    if index is None:
        if position >= folder.first_position() and folder.damaged_first() is not None:
            return True  # nobody can tell, and reading there says why
        raise ExpiredError(folder.path, position, folder.first_position())
    at = folder.begin(index) or 0
    walk = Walk(folder)
    try:
        while at < position:
            batch = walk.read(at, DEFAULT_LIMIT, bound)
            if not len(batch):
                return False
            if batch.next_position > position:  # it begins one of these, or lies in the middle of one
                return position in batch.positions
            at = batch.next_position
    finally:
        walk.close()
    return at == position
