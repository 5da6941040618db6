"""One channel that ingest writes: batches wait in line and are appended together, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.disk import disk_for, in_disk_thread
from penstock.disk.failpoint import fail_point
from penstock.errors import ClosedError, OptionsError, RetryError
from penstock.log.detect import open_log
from penstock.log.face import LogWriter
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.log.xchannel.options import WriterOptions
from penstock.metrics import REGISTRY
from penstock.node.ingest.memory import Announced, IngestMemory
from penstock.node.ingest.wire import IngestAck, IngestBatch
from penstock.node.options import NodeChannelOptions

__all__ = ["IngestChannel", "Producer", "open_channel_writer", "memory_path"]

_log = logging.getLogger(__name__)

_records = REGISTRY.counter("ingest_records", "records appended for producers", labels=("channel",))
_bytes = REGISTRY.counter("ingest_bytes", "bytes of records appended for producers", labels=("channel",))
_repeated = REGISTRY.counter(
    "ingest_repeated_records", "records that came again and were in the log already", labels=("channel",)
)
_waiting = REGISTRY.gauge("ingest_waiting_bytes", "bytes that wait to be appended", labels=("channel",))

TURN_BYTES: Final = 16 << 20
MAX_KIND: Final = (1 << 16) - 1
SETTLE_SECONDS: Final = 0.2


class Producer(Protocol):
    """A connection, as a channel sees it."""

    writer: str

    def greeted(self, last: int) -> None:
        """Tell it where to go on: ``last`` of its records are in the log, and none of them waits."""

    def acked(self, ack: IngestAck) -> None:
        """Tell it what the log has."""

    def synced(self, number: int, position: int) -> None:
        """Tell it that a sync it asked for is done."""

    def refused(self, error: Exception) -> None:
        """Tell it that this goes no further, and let it go."""

    def ease(self) -> None:
        """Let it send again: there is room."""


class _Waiting(msgspec.Struct, frozen=True):
    producer: Producer
    batch: IngestBatch | None = None
    size: int = 0
    sync: int = 0
    """The number of a sync that was asked for; without a batch and with 0 it is a greeting."""


def memory_path(data: str, channel: str) -> str:
    """Return where the numbers of a channel's producers are kept.

    >>> memory_path("data", "readings")
    'data/ingest/readings.snap'
    """
    return os.path.join(data, "ingest", f"{channel}.snap")


def open_channel_writer(options: NodeChannelOptions, data: str) -> MessageLog | Writer:
    """Open the log of a channel for writing, made if it is not there."""
    path = options.path(data)
    disk_for(path).make_folder(os.path.dirname(path) or ".")
    made = options.log_options()
    return Writer.open(path, made) if isinstance(made, WriterOptions) else MessageLog.open(path, made)


class IngestChannel:
    """The one writer of a log, for any number of producers."""

    def __init__(self, options: NodeChannelOptions, data: str, queue_bytes: int) -> None:
        self.options, self._data, self._queue_bytes = options, data, queue_bytes
        self.producers: set[Producer] = set()
        self.writer: MessageLog | Writer
        self._memory: IngestMemory
        self._line: deque[_Waiting] = deque()
        self._size = 0
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.failure: Exception | None = None
        self.content: str = options.content
        self.records = 0

    async def open(self) -> None:
        """Open log and memory, and settle what a crash left open."""
        await in_disk_thread(self._open)
        self._task = asyncio.create_task(self._run(), name=f"ingest {self.options.name}")

    def _open(self) -> None:
        path = self.writer_path
        if disk_for(path).stat(path) is not None:  # what is there says itself what it is
            with open_log(path) as log:
                self.content = log.content
            self.options = msgspec.structs.replace(self.options, content=log.content)
        self.writer = open_channel_writer(self.options, self._data)
        try:
            self._memory = IngestMemory(
                memory_path(self._data, self.options.name), self.writer_path, sync=self.options.sync
            )
        except BaseException:
            self.writer.close()
            raise

    @property
    def writer_path(self) -> str:
        """Where the log is."""
        return self.options.path(self._data)

    @property
    def is_full(self) -> bool:
        """Whether producers should be read no further."""
        return self._size > self._queue_bytes

    @property
    def has_times(self) -> bool:
        """Whether records keep a time."""
        writer: LogWriter = self.writer
        return writer.has_times

    def put(self, producer: Producer, batch: IngestBatch, size: int) -> None:
        """Let a batch wait for its turn."""
        self._check(batch)
        self._line.append(_Waiting(producer, batch, size))
        self._size += size
        _waiting.set(self._size, channel=self.options.name)
        self._more.set()

    def _check(self, batch: IngestBatch) -> None:
        """Refuse what the log would refuse: its producer is told at once, and nobody shares a turn with it."""
        name, most = self.options.name, min(self.options.max_payload_bytes, self.writer.largest_message)
        longest = max(map(len, batch.payloads))
        if longest > most:
            raise OptionsError(f"{name}: a record of {longest} bytes; at most {most} are taken")
        if batch.kinds is not None:
            if isinstance(self.writer, MessageLog) and batch.kinds.any():
                raise OptionsError(f"{name}: a message log keeps no kinds")
            _check_column(name, "kind", batch.kinds, MAX_KIND)
        if batch.times is not None:
            _check_column(name, "timestamp_ns", batch.times, np.iinfo(np.int64).max)

    def greet(self, producer: Producer) -> None:
        """Greet a producer when everything in front of it is appended."""
        self._line.append(_Waiting(producer))
        self._more.set()

    def sync(self, producer: Producer, number: int) -> None:
        """Sync when everything in front of it is appended, and tell the producer."""
        self._line.append(_Waiting(producer, sync=number))
        self._more.set()

    async def close(self) -> None:
        """Append what waits, settle, and let go of the log."""
        self._closing = True
        self._more.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    # --- Turns

    async def _run(self) -> None:
        try:
            while not (self._closing and not self._line):
                try:
                    async with asyncio.timeout(SETTLE_SECONDS):
                        await self._more.wait()
                except TimeoutError:
                    await in_disk_thread(self._settle)
                    await self._more.wait()
                self._more.clear()
                while self._line:
                    await self._turn()
            await in_disk_thread(self._settle)
        except Exception as exc:  # noqa: BLE001 - its producers are told, and the next one opens the log again
            self.failure = exc
            _log.error("ingest: channel %s was closed, it is opened again when a producer comes back: %s",
                       self.options.name, exc)  # fmt: skip
        finally:
            await in_disk_thread(self._let_go)
            error = RetryError(f"{self.options.name}: {self.failure or 'the node stops'}")
            for producer in list(self.producers):
                producer.refused(error)
            _waiting.set(0, channel=self.options.name)

    async def _turn(self) -> None:
        taken: list[_Waiting] = []
        size = 0
        while self._line and (not taken or size + self._line[0].size <= TURN_BYTES):
            taken.append(self._line.popleft())
            size += taken[-1].size
        tell = await in_disk_thread(self._append, taken)
        self._size -= size
        _waiting.set(self._size, channel=self.options.name)
        for one in tell:
            one()
        if not self.is_full:
            for producer in self.producers:
                producer.ease()

    def _append(self, taken: list[_Waiting]) -> list[Callable[[], None]]:
        """Announce, append, and say what to tell whom; a failure leaves the rest to whoever opens the log again."""
        fresh: list[tuple[_Waiting, IngestBatch, int]] = []
        expected: dict[str, int] = {}
        announced = []
        for one in taken:
            if one.batch is None:
                continue
            writer, batch = one.producer.writer, one.batch
            last = expected.get(writer, self._memory.last(writer))
            if batch.first > last + 1:
                self._memory.settle(self.writer.next_position)
                self._memory.missing(writer, batch.first)
                last = batch.first - 1
            skip = min(max(0, last - batch.first + 1), len(batch.payloads))
            rest = batch.without(skip)
            fresh.append((one, rest, skip))
            if rest.payloads:
                announced.append(Announced(writer, rest.first, len(rest.payloads)))
                expected[writer] = rest.last
        tell: list[Callable[[], None]] = []
        if announced:
            self._memory.announce(self.writer.next_position, announced)
            fail_point("ingest.announced")
            positions = self._append_all([rest for _, rest, _ in fresh if rest.payloads])
            fail_point("ingest.appended")
            if self.options.sync == "always":
                self.writer.sync()
            self._memory.confirm()
            self._note(fresh)
        else:
            positions = []
        following = iter(positions)
        for one, rest, skip in fresh:
            found = next(following) if rest.payloads else np.empty(0, np.int64)
            assert one.batch is not None
            ack = IngestAck(one.batch.last, np.concatenate([np.full(skip, -1, np.int64), found]))
            tell.append(_call(one.producer.acked, ack))
        wishes = [one for one in taken if one.sync]
        if wishes:
            position = self.writer.sync()
            tell += [_call(one.producer.synced, one.sync, position) for one in wishes]
        greetings = [one.producer for one in taken if one.batch is None and not one.sync]
        tell += [_call(producer.greeted, self._memory.last(producer.writer)) for producer in greetings]
        return tell

    def _append_all(self, batches: list[IngestBatch]) -> list[Any]:
        """Append batches with as few calls as possible; return the positions of each."""
        if len(batches) > 1 and all(one.times is None and one.kinds is None for one in batches):
            together = self.writer.append_many([payload for one in batches for payload in one.payloads])
            ends = np.cumsum([len(one.payloads) for one in batches])[:-1]
            return list(np.split(together, ends))
        return [
            self.writer.append_many(
                one.payloads, kind=0 if one.kinds is None else one.kinds, timestamp_ns=one.times
            )
            for one in batches
        ]  # fmt: skip

    def _note(self, fresh: list[tuple[_Waiting, IngestBatch, int]]) -> None:
        name = self.options.name
        count = sum(len(rest.payloads) for _, rest, _ in fresh)
        self.records += count
        _records.add(count, channel=name)
        _bytes.add(sum(map(len, (payload for _, rest, _ in fresh for payload in rest.payloads))), channel=name)
        repeated = sum(skip for _, _, skip in fresh)
        if repeated:
            _repeated.add(repeated, channel=name)

    def _settle(self) -> None:
        self._memory.settle(self.writer.next_position)

    def _let_go(self) -> None:
        try:
            self._memory.close()
        finally:
            try:
                self.writer.close()
            except (ClosedError, OSError) as exc:
                _log.warning("ingest: %s did not close: %s", self.options.name, exc)


def _check_column(channel: str, name: str, column: NDArray[np.int64], most: int) -> None:
    for found in (int(column.min()), int(column.max())):
        if not 0 <= found <= most:
            raise OptionsError(f"{channel}: {name}={found}: must be between 0 and {most}")


def _call(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: function(*args)
