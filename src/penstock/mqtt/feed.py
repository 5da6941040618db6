"""Feeds: the way back.  The records of a log are published, through a named cursor that moves when they were taken.

    log ── read(cursor) ──► records ── one run for those of a topic in a row ──► broker has them ──► cursor moves

At least once: after a kill between the last two steps records come again.  A record that is no message (its key is no
topic, a delete that is not retained) is passed over and counted; a feed never stands still for one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from penstock.batch import Batch
from penstock.disk import LoopWait, disk_for, in_disk_thread
from penstock.errors import CorruptionError, ExpiredError, NotFoundError, OptionsError, PenstockError, ReplacedError
from penstock.lifecycle import Health, Life, State
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, check_fingerprint, fingerprint_of
from penstock.log.sidecar import Sidecar, sidecar_of
from penstock.metrics import REGISTRY
from penstock.mqtt.carried import Carried, open_headers, open_rows
from penstock.mqtt.inlet import Inlet
from penstock.mqtt.remote import Remote, RemoteSpec, RemoteTaker, TopicMessages
from penstock.types import Op

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["BrokerTaker", "Feed", "FeedSpec", "FeedTaker"]

_log = logging.getLogger(__name__)

_published = REGISTRY.counter("mqtt_feed_messages", "records that feeds published", labels=("feed",))
_passed = REGISTRY.counter("mqtt_feed_passed", "records that feeds passed over, by reason", labels=("feed", "reason"))

IDLE_SECONDS: Final = 0.02
ABSENT_SECONDS: Final = 0.25
RETRY_SECONDS: Final = (0.1, 5.0)
MOST_CARRIED: Final = 4096
LONGEST_CARRIED: Final = 2048
"""Headers that are remembered: how many, and how long."""
_FIELD: Final = re.compile(r"\{([^{}]*)\}")


class FeedSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One feed, as a table ``[[feeds]]`` of a configuration says it.

    >>> FeedSpec(log="data/alerts", topic="alerts/{key}", retain=True).cursor
    'mqtt-feed'
    >>> FeedSpec(log="data/alerts", topic="alerts/#")
    Traceback (most recent call last):
    penstock.errors.OptionsError: topic='alerts/#': no wildcards; there are the fields {key} and {client}
    """

    log: str
    topic: str = "{key}"
    """The topic of each message: text with ``{key}`` (of its envelope) and ``{client}``."""
    name: str = ""
    """The path of the log unless given."""
    cursor: str = "mqtt-feed"
    """The name of the cursor; two feeds of a log need two."""
    qos: int | None = None
    """For all; unless said what the record says, 1 where it says nothing."""
    retain: bool | None = None
    """For all; unless said what the record says.  With retain a deleted key clears its topic."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a feed begins that has no cursor yet."""
    batch: int = 1000
    """Records that are under way at once."""
    to: RemoteSpec | None = None
    """Another broker; unless said the one this feed is configured in."""

    def __post_init__(self) -> None:
        fields = set(_FIELD.findall(self.topic))
        if not fields <= {"key", "client"} or "+" in self.topic or "#" in self.topic or not self.topic:
            raise OptionsError(f"topic={self.topic!r}: no wildcards; there are the fields {{key}} and {{client}}")
        if self.qos not in (None, 0, 1, 2):
            raise OptionsError(f"qos={self.qos}: must be 0, 1 or 2")
        if self.batch < 1:
            raise OptionsError(f"batch={self.batch}: must be at least 1")
        if self.start not in ("earliest", "latest"):
            raise OptionsError(f"start={self.start!r}: must be earliest or latest")


class FeedTaker(Protocol):
    """Where a feed publishes."""

    async def take(self, messages: Sequence[TopicMessages]) -> dict[str, int]:
        """Return when all were taken; with how many never will be, by reason."""

    async def close(self) -> None:
        """Let go."""


class BrokerTaker:
    """Publishes into the broker of this process."""

    def __init__(self, broker: Broker, name: str, origin: Any = None) -> None:
        self._inlet = Inlet(broker, name, origin)

    async def take(self, messages: Sequence[TopicMessages]) -> dict[str, int]:
        """Return when the broker has kept them."""
        await self._inlet.publish([each.run() for each in messages])
        return {}

    async def close(self) -> None:
        """Leave."""


class Feed:
    """One feed; a part (penstock.lifecycle).

    >>> from penstock.mqtt.broker import Broker
    >>> feed = Feed(FeedSpec(log="data/alerts", topic="alerts/{key}", retain=True), broker=Broker())
    >>> feed.name, feed.health().state.value
    ('feed:data/alerts', 'new')
    """

    def __init__(
        self,
        spec: FeedSpec,
        *,
        broker: Broker | None = None,
        taker: FeedTaker | None = None,
        rename: Callable[[str, Carried], str | None] | None = None,
        on_moved: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.name = f"feed:{spec.name or spec.log}"
        self.published = 0
        self.passed: dict[str, int] = {}
        self.position: int | None = None
        if taker is None and spec.to is not None:
            remote = Remote(spec.to.client, pauses=spec.to.reconnect_seconds, on_trouble=self._trouble)
            taker = RemoteTaker(remote, self.name)
        elif taker is None:
            if broker is None:
                raise OptionsError(f"{self.name}: neither a broker nor the address of one")
            taker = BrokerTaker(broker, self.name)
        self._taker = taker
        self._rename, self._on_moved = rename or self._topic_of, on_moved
        self.adjust: Callable[[TopicMessages, int], bool] | None = None
        """Called with each message before it is sent, which it may change, and the time of its record.  False: it has
        expired."""
        self._life = Life(self.name)
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._reader: LogReader | None = None
        self._sidecar: Sidecar | None = None
        self._seen: Fingerprint | None = None
        self._envelopes = False
        self._carried: dict[bytes, Carried] = {}

    # --- Life

    async def start(self) -> None:
        """Begin; a log or a broker that is not there yet is waited for."""
        self._life.state = State.STARTING
        self._life.work(self._run())

    async def ready(self) -> None:
        """Return when it reads the log, or waits for what is not there."""
        await self._ready.wait()
        if self._life.error is not None:
            raise self._life.error

    async def drain(self, seconds: float) -> None:
        """Begin no further batch; finish the one under way within that time."""
        await self._life.finish(seconds)

    async def stop(self) -> None:
        """End; what was not acknowledged comes again with the next start."""
        await self._life.cancel()
        await self._taker.close()
        if self._reader is not None:
            self._reader.close()
        if self._sidecar is not None:
            self._sidecar.close()
        self._life.end()
        self._ready.set()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    async def caught_up(self) -> None:
        """Return when everything that was in the log at this call has been taken."""
        while True:
            self._idle.clear()
            await self._idle.wait()
            reader, position = self._reader, self.position
            if reader is not None and position is not None:
                end = await in_disk_thread(getattr, reader, "next_position")
                if position >= end:
                    return

    def health(self) -> Health:
        """Return how it is: degraded while the log or the broker is away."""
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        return {
            "log": self.spec.log,
            "cursor": self.spec.cursor,
            "position": self.position,
            "published": self.published,
            "passed": dict(self.passed),
            "to": "this broker" if self.spec.to is None else self.spec.to.url,
        }

    def _trouble(self, reason: str) -> None:
        if reason and reason != self._life.reason:
            _log.warning("%s: %s", self.name, reason)
        self._life.reason = reason
        self._serving()

    def _serving(self) -> None:
        if self._life.state is State.STARTING:
            self._life.state = State.READY
        self._ready.set()

    # --- The work

    async def _run(self) -> None:
        waiting: LoopWait | None = None
        waits_for: LogReader | None = None
        life = self._life
        stopped = asyncio.create_task(life.stopping.wait())
        stopped.add_done_callback(lambda _: waiting.wake() if waiting is not None else None)
        pause, longest = RETRY_SECONDS
        try:
            while not life.stopping.is_set():
                try:
                    count = await self.step()
                    pause = RETRY_SECONDS[0]
                except NotFoundError as exc:
                    self._trouble(str(exc))
                    await life.pause(ABSENT_SECONDS)
                    continue
                except (PenstockError, OSError) as exc:
                    self._trouble(str(exc))
                    await life.pause(pause)
                    pause = min(pause * 2, longest)
                    continue
                self._serving()
                if waiting is None or waits_for is not self._reader:
                    if waiting is not None:
                        waiting.close()
                    waits_for = self._reader
                    waiting = LoopWait(last=IDLE_SECONDS) if waits_for is None else waits_for.waiter()
                if count:
                    waiting.reset()
                else:
                    self._idle.set()
                    if not life.stopping.is_set():
                        await waiting.pause()
        finally:
            stopped.cancel()
            if waiting is not None:
                waiting.close()
            self._ready.set()

    async def step(self) -> int:
        """Publish one batch and move the cursor; return how many records it had, 0 at the end of the log."""
        if self._reader is None:
            await in_disk_thread(self._open)
            self._life.reason = ""
        reader, position = self._reader, self.position
        assert reader is not None
        assert position is not None
        try:
            batch = await in_disk_thread(reader.read, position, self.spec.batch)
        except ExpiredError:
            first = await in_disk_thread(lambda: reader.first_position)
            self._pass("expired")
            _log.warning("%s: records from %d to %d are gone", self.name, position, first)
            self.position = first
            return 1
        except ReplacedError as exc:
            _log.warning("%s: %s; it begins again", self.name, exc)
            await in_disk_thread(reader.close)
            self._reader = None
            return 1
        if not len(batch):
            return 0
        messages = self.messages(batch)
        never = await self._taker.take(messages) if messages else {}
        for reason, count in never.items():
            self._pass(reason, count)
        await in_disk_thread(self._move, batch)
        count = sum(len(each.payloads) for each in messages) - sum(never.values())
        self.published += count
        _published.add(count, feed=self.name)
        if self._life.reason:
            self._trouble("")
        if self._on_moved is not None:
            self._on_moved()
        return len(batch)

    def _open(self) -> None:
        spec = self.spec
        disk = disk_for(spec.log)
        reader = open_log(spec.log, disk=disk, on_damage="skip")
        try:
            sidecar = sidecar_of(disk, spec.log)
            position = sidecar.read_cursor(spec.cursor)
            seen = sidecar.cursor_seen(spec.cursor)
            if position is not None and seen is not None:
                try:
                    check_fingerprint(reader, seen)
                except ExpiredError:
                    pass
                except ReplacedError as exc:
                    anew = f"to begin anew, remove {sidecar.prefix}cursor-{spec.cursor}"
                    raise ReplacedError(spec.log, f"{exc.reason}; {anew}") from None
            self._seen = None if position is None else seen
            if position is None:
                position = reader.first_position if spec.start == "earliest" else reader.next_position
                sidecar.write_cursor(spec.cursor, position)
        except BaseException:
            reader.close()
            raise
        self._envelopes = reader.content == CONTENT
        if not self._envelopes and "{" in spec.topic and self._rename == self._topic_of:
            reader.close()
            raise OptionsError(f"{spec.log}: its records have no keys, so topic={spec.topic!r} names none")
        self._reader, self._sidecar, self.position = reader, sidecar, position

    def _move(self, batch: Batch) -> None:
        """Move the cursor behind a batch, with the last record of it as a witness that no power cut takes back."""
        assert self._sidecar is not None
        assert self._reader is not None
        durable = self._reader.durable_position
        kept = len(batch) if durable is None else int(batch.positions.searchsorted(durable))
        if kept:
            self._seen = fingerprint_of(batch, kept - 1)
        self._sidecar.write_cursor(self.spec.cursor, batch.next_position, sync=False, seen=self._seen)
        self.position = batch.next_position

    def messages(self, batch: Batch) -> list[TopicMessages]:
        """Return the messages of records, those of a topic in a row together."""
        found: list[TopicMessages] = []
        last: tuple[Any, ...] | None = None
        for _, key, headers, op, when_ns, payload in self._rows(batch):
            row = (key, headers, op)
            if row == last:
                found[-1].payloads.append(payload)
                continue
            last = None
            try:
                carried = self._carried_of(headers)
            except CorruptionError:
                self._pass("malformed headers")
                continue
            try:
                topic = self._rename(key.decode(), carried)
            except UnicodeDecodeError:
                topic = ""
            if topic is None:  # not for this feed
                continue
            if not _is_topic(topic):
                self._pass("no topic")
                continue
            retain = carried.retain if self.spec.retain is None else self.spec.retain
            if op != Op.PUT:
                if not retain:
                    self._pass("a delete that is not retained")
                    continue
                payload = b""
            qos = self.spec.qos
            if qos is None:
                qos = carried.qos if headers else 1
            message = TopicMessages(topic, [payload], qos, retain, carried.properties)
            if self.adjust is not None and not self.adjust(message, when_ns):
                self._pass("expired on the way")
                continue
            found.append(message)
            alone = self.adjust is not None and carried.properties.message_expiry is not None
            last = row if op == Op.PUT and not alone else None
        return found

    def _rows(self, batch: Batch) -> Iterator[tuple[int, bytes, bytes, int, int, bytes]]:
        if not self._envelopes:
            return ((0, b"", b"", Op.PUT, 0, payload) for payload in batch.to_payloads())
        return open_rows(batch, self.spec.log, self._pass_bad)

    def _pass_bad(self, exc: CorruptionError) -> None:
        _log.warning("%s: %s", self.name, exc)
        self._pass("no envelope")

    def _carried_of(self, headers: bytes) -> Carried:
        found = self._carried.get(headers)
        if found is None:
            found = open_headers(headers)
            if len(headers) <= LONGEST_CARRIED:
                if len(self._carried) >= MOST_CARRIED:
                    self._carried.clear()
                self._carried[headers] = found
        return found

    def _topic_of(self, key: str, carried: Carried) -> str | None:
        if self.spec.topic == "{key}":
            return key
        return self.spec.topic.replace("{client}", carried.client).replace("{key}", key)

    def _pass(self, reason: str, count: int = 1) -> None:
        self.passed[reason] = self.passed.get(reason, 0) + count
        _passed.add(count, feed=self.name, reason=reason)


def _is_topic(topic: str) -> bool:
    return (
        bool(topic)
        and "+" not in topic
        and "#" not in topic
        and "\0" not in topic
        and topic[:1] != "$"
        and len(topic.encode()) <= 65535
    )
