"""Meetings: a channel and MQTT topics that say the same, so that devices and people share a channel.

    device ── PUBLISH plant/7/chat ──► broker ──► meeting ── BROADCAST as mqtt@localhost ──► channel ──► members
    device ◄── PUBLISH plant/7/chat ── broker ◄── meeting ◄── MESSAGE (of anybody else) ──── channel ◄── member

There is no echo: what the meeting broadcast has its own name as the sender, and the broker does not hand what the
meeting published back to it.  An acknowledgement of QoS 1 or 2 leaves when the channel has the message, where the
broker holds answers back: that of a node does which was started with a meeting.  What does not fit the room of either
direction, or is refused by the rules of the channel, is counted under its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from penstock.channels import commands as c
from penstock.channels.channel import Channel
from penstock.channels.ids import Nid, is_handler
from penstock.channels.username import is_username
from penstock.errors import OptionsError, PenstockError, Refused, RetryError
from penstock.kernel.mqtt import Run, make_run
from penstock.lifecycle import Health, Life, State
from penstock.metrics import REGISTRY
from penstock.mqtt.gate import Ticket, TurnGate
from penstock.mqtt.inlet import Inlet
from penstock.mqtt.reasons import Reason
from penstock.mqtt.routes import Copies
from penstock.mqtt.topics import is_filter

if TYPE_CHECKING:
    from penstock.channels.manager import ChannelManager
    from penstock.channels.session import ChannelSession
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.session import Session

__all__ = ["Meeting", "MeetingSpec"]

_log = logging.getLogger(__name__)

_passed = REGISTRY.counter("node_meeting_messages", "messages carried by meetings", labels=("meeting", "to"))
_lost = REGISTRY.counter("node_meeting_lost", "messages a meeting did not carry", labels=("meeting", "to", "reason"))

RETRY_SECONDS: Final = (0.1, 5.0)
GONE: Final = ("CHANNEL_NOT_FOUND", "USER_NOT_IN_CHANNEL")


class MeetingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One meeting, as a table ``[[meeting]]`` of a configuration says it.

    >>> MeetingSpec(channel="ops/east", filter="plant/7/chat").topic_to
    'plant/7/chat'
    >>> MeetingSpec(channel="ops/east", filter="plant/+/chat")
    Traceback (most recent call last):
    penstock.errors.OptionsError: filter='plant/+/chat': has wildcards: say with topic where the channel is published
    """

    channel: str
    """The handler of the channel; made if it is not there."""
    filter: str
    """What is heard on the broker."""
    topic: str = ""
    """Where the channel is published; the filter itself unless given."""
    direction: Literal["both", "to_topic", "to_channel"] = "both"
    member: str = "mqtt"
    """The name under which devices speak on the channel; nobody else should have it."""
    persist: bool = False
    """Whether the channel is kept, where the meeting makes it and so owns it; needs a server with logins."""
    qos: int = 1
    retain: bool = False
    """Whether the newest message of the channel stays on its topic."""
    room: int = 65_536
    """Messages that wait in each direction."""

    def __post_init__(self) -> None:
        if not is_handler(self.channel):
            raise OptionsError(f"channel={self.channel!r}: not the handler of a channel")
        if not is_filter(self.filter) or self.filter.startswith("$"):
            raise OptionsError(f"filter={self.filter!r}: not a filter of topics")
        if self.direction not in ("both", "to_topic", "to_channel"):
            raise OptionsError(f"direction={self.direction!r}: must be both, to_topic or to_channel")
        if not is_username(self.member):
            raise OptionsError(f"member={self.member!r}: not a name")
        wild = "+" in self.topic_to or "#" in self.topic_to
        if wild and self.direction != "to_channel":
            if self.topic:
                raise OptionsError(f"topic={self.topic!r}: must have no wildcards")
            raise OptionsError(f"filter={self.filter!r}: has wildcards: say with topic where the channel is published")
        if self.qos not in (0, 1, 2):
            raise OptionsError(f"qos={self.qos}: must be 0, 1 or 2")
        if self.room < 1:
            raise OptionsError(f"room={self.room}: must be at least 1")

    @property
    def topic_to(self) -> str:
        """Where the channel is published."""
        return self.topic or self.filter


class Meeting:
    """One meeting of one broker and one channel server of this process; a part (penstock.lifecycle).

    >>> from penstock.mqtt.broker import Broker
    >>> meeting = Meeting(MeetingSpec(channel="ops", filter="ops/chat"), Broker, lambda: None)
    >>> meeting.name, meeting.health().state.value
    ('meeting:ops', 'new')
    """

    def __init__(self, spec: MeetingSpec, broker: Callable[[], Broker], manager: Callable[[], ChannelManager]) -> None:
        self.spec = spec
        self.name = f"meeting:{spec.channel}"
        self.owner = self
        """What came from it is not handed to it: see Broker.copy."""
        self.carried = {"topic": 0, "channel": 0}
        self.lost: dict[str, int] = {}
        self._find_broker, self._find_manager = broker, manager
        self._broker: Broker
        self._channel: Channel
        self._member: Nid
        self._session: ChannelSession | None = None
        self._copies = Copies(self)
        self._up: deque[tuple[Run, Ticket | None]] = deque()
        self._down: deque[c.Messages] = deque()
        self._waiting = {"topic": 0, "channel": 0}
        self._news = {"topic": asyncio.Event(), "channel": asyncio.Event()}
        self._idle = {"topic": asyncio.Event(), "channel": asyncio.Event()}
        self._away = False
        self._life = Life(self.name)

    # --- Life

    async def start(self) -> None:
        """Join the channel and stand among the subscriptions of the broker."""
        self._life.state = State.STARTING
        self._broker, manager = self._find_broker(), self._find_manager()
        self._channel = manager.channel(self.spec.channel)
        self._member = Nid(self.spec.member, manager.options.domain)
        try:
            self._session = manager.connect(self._member, sink=self._hear)
            await self._join()
        except BaseException:
            self._life.state = State.FAILED
            if self._session is not None:
                await self._session.close()
            raise
        if self.spec.direction != "to_topic":
            self._broker.tap(self.spec.filter, self._copies)
        self._life.state = State.READY
        self._life.work(self._work("channel", self._broadcast))
        self._life.work(self._work("topic", self._publish))

    async def _join(self) -> None:
        try:
            await self._channel.join(self._member)
        except Refused as exc:
            if exc.reason != "USER_IN_CHANNEL":  # it was kept since the last time
                raise
            return
        finally:
            self._away = False
        if self.spec.persist:
            with contextlib.suppress(Refused):  # somebody else owns it
                await self._channel.configure(self._member, persist=True)

    async def ready(self) -> None:
        """Return at once: ``start`` has done everything."""

    async def drain(self, seconds: float) -> None:
        """Hear nothing more and carry what waits."""
        if not self._life.state.serves:
            return
        self._leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for side in ("channel", "topic"):
                    if self._waiting[side]:
                        await self._idle[side].wait()

    async def stop(self) -> None:
        """End; what still waits is counted, and refused where it waits for its acknowledgement."""
        if self._life.state.serves:
            self._leave()
        await self._life.cancel()
        up, self._up = self._up, deque()
        for _, ticket in up:  # the broker may go on: a publisher must not wait for what is no longer there
            if ticket is not None:
                ticket.refuse(Reason.QUOTA_EXCEEDED)
        for side, waiting in self._waiting.items():
            if waiting:
                self._lose(side, "stopped", waiting)
                self._waiting[side] = 0
        if self._session is not None:
            await self._session.close()
            self._session = None
        self._life.end()

    def _leave(self) -> None:
        if self.spec.direction != "to_topic":
            self._broker.untap(self.spec.filter, self._copies)
        self._life.state = State.DRAINING

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is: degraded while one side does not take what the other says."""
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        return {
            "channel": self.spec.channel,
            "filter": self.spec.filter,
            "topic": self.spec.topic_to,
            "to_channel": self.carried["channel"],
            "to_topic": self.carried["topic"],
            "waiting": dict(self._waiting),
            "lost": dict(self.lost),
        }

    # --- What both sides say

    def take(self, runs: list[Run], _session: Session | None, _client: str, *, acknowledged: bool) -> None:
        """Take what was published; the broker calls this for everything but what the meeting itself published."""
        gate = self._broker.gate
        for run in runs:
            ticket = gate.ticket() if acknowledged and isinstance(gate, TurnGate) else None
            if self._waiting["channel"] + run.count > self.spec.room:
                self._lose("channel", "no room", run.count)
                if ticket is not None:
                    ticket.refuse(Reason.QUOTA_EXCEEDED)
                continue
            self._up.append((run.detached(), ticket))
            self._add("channel", run.count)

    def _hear(self, delivery: c.Delivery) -> None:
        if isinstance(delivery, c.Event):
            gone = delivery.kind == "CHANNEL_DELETED" or (
                delivery.kind == "MEMBER_LEFT" and delivery.nid == self._member
            )
            if gone and delivery.channel == self._channel.id:
                self._away = True
                self._news["channel"].set()
            return
        if self.spec.direction == "to_channel" or delivery.channel != self._channel.id:
            return
        if delivery.sender == self._member:  # no echo
            return
        if self._waiting["topic"] + len(delivery) > self.spec.room:
            self._lose("topic", "no room", len(delivery))
            return
        self._down.append(delivery)
        self._add("topic", len(delivery))

    def _add(self, side: str, count: int) -> None:
        self._waiting[side] += count
        self._idle[side].clear()
        self._news[side].set()

    def _lose(self, side: str, reason: str, count: int) -> None:
        self.lost[f"to {side}: {reason}"] = self.lost.get(f"to {side}: {reason}", 0) + count
        _lost.add(count, meeting=self.name, to=side, reason=reason)

    # --- Carrying it

    async def _work(self, side: str, carry: Callable[[], Coroutine[Any, Any, int]]) -> None:
        news, pause = self._news[side], RETRY_SECONDS[0]
        while True:
            await news.wait()
            news.clear()
            try:
                while carried := await carry():
                    self.carried[side] += carried
                    _passed.add(carried, meeting=self.name, to=side)
                    self._life.reason, pause = "", RETRY_SECONDS[0]
            except (PenstockError, OSError) as exc:  # it stays first in line
                self._life.reason = f"to {side}: {exc}"
                _log.warning("%s: %s; tried again in %g s", self.name, self._life.reason, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                news.set()
                continue
            if not self._waiting[side]:
                self._idle[side].set()

    async def _broadcast(self) -> int:
        """Say on the channel what was published; runs that are there together go together."""
        if self._away:
            await self._join()
        taken = list(self._up)
        if not taken:
            return 0
        payloads = [payload for run, _ in taken for payload in run.payloads() if payload]
        carried = len(payloads)
        empty = sum(run.count for run, _ in taken) - carried
        try:
            if payloads:
                await self._say(payloads)
        except Refused as exc:
            if exc.reason in GONE:
                raise RetryError(f"{self.spec.channel}: {exc.reason}") from None
            carried = await self._say_one_by_one(payloads)
        for run, ticket in taken:
            self._up.popleft()
            self._waiting["channel"] -= run.count
            if ticket is not None:
                ticket.done()
        if empty:  # the protocol of channels has no empty message
            self._lose("channel", "empty", empty)
        return carried

    async def _say(self, payloads: list[bytes]) -> None:
        try:
            await self._channel.broadcast_many(self._member, payloads, source=self._session)
        except Refused as exc:
            if exc.reason not in GONE:
                raise
            await self._join()
            await self._channel.broadcast_many(self._member, payloads, source=self._session)

    async def _say_one_by_one(self, payloads: list[bytes]) -> int:
        """Say what the rules let through: one that is empty or too large refuses its whole run."""
        said = 0
        for payload in payloads:
            try:
                await self._say([payload])
                said += 1
            except Refused as exc:
                self._lose("channel", exc.reason, 1)
        return said

    async def _publish(self) -> int:
        """Publish what was said; returns when the broker has kept it."""
        taken = list(self._down)
        if not taken:
            return 0
        topic = self.spec.topic_to.encode()
        runs = [make_run(topic, each.payloads, self.spec.qos, self.spec.retain) for each in taken]
        await Inlet(self._broker, self.name, self).publish(runs)
        count = sum(map(len, taken))
        for _ in taken:
            self._down.popleft()
        self._waiting["topic"] -= count
        return count
