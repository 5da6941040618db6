"""Receivers that acknowledge: everything from the first unacknowledged message on is held, and delivered again."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Final

from penstock.batch import Batch
from penstock.disk import Lock, in_disk_thread
from penstock.errors import OptionsError, PenstockError
from penstock.log.face import OnDamage
from penstock.log.filechannel.ends import QueueEnd
from penstock.log.filechannel.receiver import OnClose, Receiver, resolve
from penstock.log.filechannel.seen import fingerprint_at
from penstock.log.filechannel.segments import Walk
from penstock.log.fingerprint import Fingerprint
from penstock.log.options import Start
from penstock.log.sidecar import Register

__all__ = ["AckReceiver", "Bury"]

Bury = Callable[[list[bytes]], None]
SEEN_SECONDS: Final = 0.01


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
    ...     for batch in rx.batches(limit=2, timeout=0):
    ...         rx.ack()        # the work on the batch is done
    ...         break
    >>> with FileChannel.open(folder.name) as channel:
    ...     channel.ack_rx("billing").recv()
    b'three'
    >>> folder.cleanup()
    """

    def __init__(
        self,
        end: QueueEnd,
        position: int,
        on_damage: OnDamage = "raise",
        *,
        on_close: OnClose = lambda _: None,
        name: str | None = None,
        register: Register | None = None,
        seen: Fingerprint | None = None,
        log_id: bytes = bytes(16),
        lock: Lock | None = None,
        durable: bool = False,
        max_tries: int = 0,
        bury: Bury | None = None,
    ) -> None:
        self.name = name
        self._register, self._log_id, self._name_lock, self._durable = register, log_id, lock, durable
        self._slots = None if register is None or durable else register.map_slots(log_id)
        self._seen, self._seen_at, self._last = seen, float("-inf"), -1
        if self._slots is not None:
            if register is not None:
                register.close()  # the mapping is enough
            if seen is not None:
                self._slots.note(seen.pack())
        self._max_tries, self._bury = max_tries, bury
        self._tries: dict[int, int] = {}
        self._acked = position
        # Messages are numbered as they are read ahead.  Below _done all are acknowledged; the chunks hold the others.
        self._done = 0
        self._chunks: deque[_Chunk] = deque()
        super().__init__(end, position, on_damage, on_close=on_close)

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
            return self._received - self._done

    @property
    def _received(self) -> int:
        """The number behind the last message that was received."""
        if not self._chunks:
            return self._done
        newest = self._chunks[-1]  # it is the batch at hand, unless that was handed out to its end
        return newest.stop if self._batch is None else newest.start + self._at

    def ack(self, n: int | None = None) -> None:
        """Acknowledge the ``n`` oldest unacknowledged messages, or all that were received.

        More than there are is refused with OptionsError and changes nothing.
        """
        with self._lock:
            if self._dead:
                self._check_open()
            if n is None:
                if not self._chunks:
                    return
                last = self._chunks[-1]  # it is the batch at hand, unless that was handed out to its end
                done = last.stop if self._batch is None else last.start + self._at
                if done == self._done:
                    return
                slots = self._slots
                if slots is not None and done < last.stop and last is self._chunks[0] and not self._tries:
                    position = last.positions[done - last.start]  # one message after another: no call but the store
                    slots.write(position)
                    self._acked, self._done = position, done
                    if position >= self._end.first_end:
                        self._end.moved(position)
                    return
            else:
                done, last = self._find_oldest(n)
                if done == self._done:
                    return
            if self._register is not None:
                self._note(last.positions[done - 1 - last.start])
            self._move(last.end_before(done))
            self._done = done
            while self._chunks and self._chunks[0].stop <= done:
                self._chunks.popleft()

    async def aack(self, n: int | None = None) -> None:
        """Acknowledge from asyncio: on a thread where it waits for the disk, which is with ``sync="always"``."""
        if self._durable:
            await in_disk_thread(self.ack, n)
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
        with self._lock, self._end.pause_collection():
            self._check_open()
            target = resolve(self._end, position)
            self._set_seen(None)
            self._move(target)
            self._restart(target)

    def close(self) -> None:
        """Receive no more.  A named receiver keeps its place, and what it has not acknowledged."""
        with self._lock:
            if not self._dead and self._last >= 0 and (self._seen is None or self._seen.position < self._last):
                with contextlib.suppress(PenstockError, OSError):  # the older one will do
                    self._note(self._last, at_once=True)
                    self._write(self._acked)
        super().close()
        self._slots = None
        if self._register is not None:
            self._register.close()
        if self._name_lock is not None:
            self._name_lock.release()
            self._name_lock = None

    def forked(self) -> None:
        """Close in the child of a fork; the name stays the parent's."""
        super().forked()
        self._slots = None
        if self._name_lock is not None:
            self._name_lock.release()
            self._name_lock = None

    # --- Keeping count

    def _find_oldest(self, n: int) -> tuple[int, _Chunk]:
        """Return the number behind the ``n`` oldest unacknowledged messages, and the chunk the last of them is in."""
        if n < 0:
            raise OptionsError(f"ack({n}): must not be negative")
        if n > self.unacked:
            raise OptionsError(f"ack({n}): only {self.unacked} messages wait to be acknowledged")
        done = self._done + n
        return done, next((chunk for chunk in self._chunks if done <= chunk.stop), _NO_CHUNK)

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
            yield from chunk.positions[max(0, self._done - chunk.start) : max(0, stop - chunk.start)]

    def _payloads_at(self, positions: list[int]) -> list[bytes]:
        walk = Walk(self._end.folder)
        try:
            return [walk.read(position, 1, self._end.visible).to_payloads()[0] for position in positions]
        finally:
            walk.close()

    def _note(self, position: int, *, at_once: bool = False) -> None:
        """Keep the fingerprint of the message at ``position``, which is being acknowledged.

        A hundred times a second is enough: until then the one before it serves, which was acknowledged as well.
        """
        self._last = position
        now = time.monotonic()
        if not at_once and now - self._seen_at < SEEN_SECONDS:
            return
        self._seen_at = now
        found = fingerprint_at(self._end, position)
        if found is not None:
            self._set_seen(found)

    def _set_seen(self, seen: Fingerprint | None) -> None:
        self._seen = seen
        if seen is None:
            self._last = -1
        if self._slots is not None:
            self._slots.note(bytes(16) if seen is None else seen.pack())

    def _write(self, position: int) -> None:
        if self._slots is not None:
            self._slots.write(position)
        elif self._register is not None:
            self._register.write(self._log_id, position, sync=self._durable, seen=self._seen)

    def _move(self, position: int) -> None:
        """Acknowledge everything below ``position``; when its file cannot be written, nothing has changed."""
        self._write(position)
        self._acked = position
        if self._tries:
            self._tries = {at: tries for at, tries in self._tries.items() if at >= position}
        self._end.moved(position)


class _Chunk:
    """Messages that were read ahead together: their numbers, and where they are."""

    __slots__ = ("end", "positions", "start", "stop")

    def __init__(self, start: int, batch: Batch) -> None:
        self.start, self.stop = start, start + len(batch)
        self.positions: list[int] = batch.positions.tolist()
        self.end = batch.next_position

    def end_before(self, number: int) -> int:
        """Return the position behind the message before ``number``: where the next one of the batch begins."""
        return self.end if number == self.stop else self.positions[number - self.start]


_NO_CHUNK: Final = _Chunk(0, Batch.of([]))
