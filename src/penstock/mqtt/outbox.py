"""A publisher that does not need its broker: messages go into a queue on disk, and from there when the broker is there.

    publish ──► queue (survives kill -9) ── cursor ──► PUBLISH ── PUBACK moves the cursor ──► broker

At least once: what was under way when the process or the link died is sent again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Self

import msgspec

from penstock.clock import SYSTEM_CLOCK, shown_ns
from penstock.errors import ClosedError, OptionsError
from penstock.lifecycle import Health, State
from penstock.log.detect import open_log
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.options import SyncMode
from penstock.mqtt.carried import encode_carried, headers_for
from penstock.mqtt.feed import Feed, FeedSpec, FeedTaker
from penstock.mqtt.packets import NONE, Properties
from penstock.mqtt.properties import encode_properties
from penstock.mqtt.remote import Remote, RemoteSpec, RemoteTaker
from penstock.mqtt.topics import is_topic
from penstock.net.loop import run

__all__ = ["Outbox"]

CURSOR: Final = "outbox"
SEGMENT_BYTES: Final = 4 << 20
GC_EVERY: Final = 16
POLL_SECONDS: Final = 0.005
LONGEST_HEADERS: Final = 2048
"""Longer ones are not remembered."""


class Outbox:
    """A queue on disk in front of a broker; a part (penstock.lifecycle), or a context manager with its own thread.

    ``publish`` returns when the message survives the death of this process; it may be called from any thread.  The
    first one opens the outbox; ``close``, or the end of ``with``, sends for a moment and leaves the rest for later.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Outbox(folder.name + "/outbox", "mqtt://127.0.0.1:1") as outbox:  # nobody listens there
    ...     for number in range(3):
    ...         _ = outbox.publish("plant/7", b"%d" % number)
    ...     outbox.flush(timeout=0.1)
    False
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str,
        to: str | RemoteSpec | FeedTaker,
        *,
        sync: SyncMode = "interval",
        max_bytes: int = 0,
        batch: int = 1000,
    ) -> None:
        if 0 < max_bytes < 2 * SEGMENT_BYTES:
            raise OptionsError(f"max_bytes={max_bytes}: at least {2 * SEGMENT_BYTES}; beyond it publish raises")
        self.path = path
        self.name = f"outbox:{path}"
        self._to, self._batch = to, batch
        self._options = ChannelOptions(
            content="envelope/1", sync=sync, segment_bytes=SEGMENT_BYTES, keep_bytes=max_bytes, compression="none"
        )
        self._queue: FileChannel | None = None
        self._feed: Feed | None = None
        self._state = State.NEW
        self._moves = 0
        self._end = 0  # where the queue ended when it was opened
        self._last = -1  # the last that was published since
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._headers: dict[tuple[int, bool, bytes, int], bytes] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._stopped = asyncio.Event()

    # --- What a program calls

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False, properties: Properties = NONE
    ) -> int:
        """Keep a message and return its position; Backpressure where the queue is full."""
        return self.publish_many(topic, (payload,), qos=qos, retain=retain, properties=properties)

    def publish_many(
        self,
        topic: str,
        payloads: Sequence[bytes],
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties = NONE,
    ) -> int:
        """Keep messages of one topic in one write; return the position of the last."""
        if not is_topic(topic):
            raise OptionsError(f"{topic[:80]!r} is no topic to publish to")
        if qos not in (0, 1, 2):
            raise OptionsError(f"qos={qos}: must be 0, 1 or 2")
        self._open_first()
        queue = self._queue
        if queue is None:
            raise ClosedError(f"{self.path}: the outbox is not open")
        headers = self._headers_of(qos, retain, properties)
        now = shown_ns(SYSTEM_CLOCK)
        records = [encode_carried(topic.encode(), bytes(memoryview(each)), headers, now) for each in payloads]
        if not records:
            return -1
        position = int(queue.append_many(records)[-1])
        with self._lock:
            self._last = max(self._last, position)
        return position

    def _headers_of(self, qos: int, retain: bool, properties: Properties) -> bytes:
        expiry = -1 if properties.message_expiry is None else properties.message_expiry
        forward = b""
        if properties is not NONE:
            kept = msgspec.structs.replace(properties, message_expiry=None, topic_alias=None)
            forward = encode_properties(kept, length=False)
        key = (qos, retain, forward, expiry)
        found = self._headers.get(key)
        if found is None:
            found = headers_for(qos, retain, "", forward, expiry)
            if len(found) <= LONGEST_HEADERS:
                if len(self._headers) > 1000:
                    self._headers.clear()
                self._headers[key] = found
        return found

    def delivered(self, position: int) -> bool:
        """Return whether the broker has the message at this position."""
        at = None if self._feed is None else self._feed.position
        return at is not None and at > position

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the broker has everything; return whether it has, also once it is closed.

        For programs without a loop.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._open_first()
        while not self._empty():
            if self._sends_no_more() or (deadline is not None and time.monotonic() >= deadline):
                return self._empty()
            time.sleep(POLL_SECONDS)
        return True

    def _empty(self) -> bool:
        feed = self._feed
        if feed is None:
            return self._queue is None
        return feed.position is not None and feed.position >= self._end and feed.position > self._last

    def _sends_no_more(self) -> bool:
        """Whether it was stopped, or its thread is that of the parent of a fork."""
        return self._state is State.STOPPED or (self._thread is not None and not self._thread.is_alive())

    # --- With a thread of its own

    def __enter__(self) -> Self:
        self.open()
        return self

    def _open_first(self) -> None:
        """Open an outbox that nobody has opened, started or closed yet: to publish is enough."""
        if self._state is State.NEW:
            with self._opening:
                if self._state is State.NEW:
                    self.open()

    def open(self) -> None:
        """Open the queue and have a thread send what is in it; the broker need not be there."""
        started: Any = threading.Event()
        problem: list[BaseException] = []

        async def life() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            try:
                await self.start()
            except BaseException as exc:  # noqa: BLE001  (raised where the outbox was opened)
                problem.append(exc)
                return
            finally:
                started.set()
            await self._ended.wait()
            await self.drain(1.0)
            await self.stop()

        self._thread = threading.Thread(target=_run, args=(life(),), name=self.name, daemon=True)
        self._thread.start()
        started.wait()
        if problem:
            self._thread.join()
            self._state = State.NEW
            raise problem[0]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; what the broker does not have is sent when the outbox is opened again."""
        loop, ended, thread = self._loop, self._ended, self._thread
        if loop is not None and ended is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(ended.set)
            thread.join()

    # --- As a part

    async def start(self) -> None:
        """Open the queue and begin to send; the broker need not be there."""
        self._state = State.STARTING
        self._queue = FileChannel.open(self.path, self._options)
        try:
            with open_log(self.path) as log:
                self._end = log.next_position
            spec = FeedSpec(log=self.path, name=self.path, cursor=CURSOR, batch=self._batch)
            self._feed = Feed(spec, taker=self._taker(), on_moved=self._moved)
            await self._feed.start()
        except BaseException:
            self._queue.close()
            self._queue = None
            raise
        self._state = State.READY

    def _taker(self) -> FeedTaker:
        to = self._to
        if isinstance(to, str):
            to = RemoteSpec(url=to)
        if isinstance(to, RemoteSpec):
            remote = Remote(to.client, pauses=to.reconnect_seconds, on_trouble=self._trouble)
            return RemoteTaker(remote, self.name)
        return to

    def _trouble(self, reason: str) -> None:
        if self._feed is not None:
            self._feed._trouble(reason)

    def _moved(self) -> None:
        self._moves += 1
        if self._moves % GC_EVERY == 0 and self._queue is not None:
            self._queue.gc()

    async def ready(self) -> None:
        """Return at once: what is published is kept from ``start`` on."""

    async def drain(self, seconds: float) -> None:
        """Send what there is within that time; the rest stays in the queue."""
        deadline = time.monotonic() + seconds
        while not self._empty() and time.monotonic() < deadline and self.health().state is State.READY:
            await asyncio.sleep(POLL_SECONDS)
        if self._state.serves:
            self._state = State.DRAINING
        if self._feed is not None:
            await self._feed.drain(max(0.0, deadline - time.monotonic()))

    async def stop(self) -> None:
        """End; what the broker does not have stays."""
        if self._feed is not None:
            await self._feed.stop()
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()
        self._state = State.STOPPED
        self._stopped.set()

    async def wait(self) -> None:
        """Return when it has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is: degraded while the broker is away."""
        if self._state is State.READY and self._feed is not None:
            feed = self._feed.health()
            return Health(State.READY) if feed.state is State.STARTING else feed
        return Health(self._state)

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        about = {} if self._feed is None else self._feed.describe()
        return {"path": self.path, "sent": about.get("published", 0), "empty": self._empty()}


def _run(life: Coroutine[Any, Any, None]) -> None:
    run(life)
