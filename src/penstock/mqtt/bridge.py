"""Bridges: topics of this broker at another one, and the other way round.

    here ── tap ──► log ── cursor ──► PUBLISH ── PUBACK of the other broker moves the cursor ──► there
    there ── persistent session ──► publish here ── kept ──► PUBACK to the other broker

So nothing is lost while the link, this broker or the other one is away, and what was under way comes again: at least
once.  Loops are cut three times: what a bridge brought it does not take back; the other broker is asked not to return
what the bridge sent (No Local in MQTT 5, mosquitto's bridge bit before); and in MQTT 5 each bridge adds the name of
its broker, so that a ring of brokers ends where it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.disk import PosixDisk, in_disk_thread
from penstock.disk.plain import create_private, make_folders, read_small, refuse_link
from penstock.errors import OptionsError, PenstockError, Refused, RetryError
from penstock.kernel.mqtt import Run, make_run
from penstock.lifecycle import Health, Life, State
from penstock.log.filechannel import FileChannel
from penstock.metrics import REGISTRY
from penstock.mqtt.carried import Carried
from penstock.mqtt.client import Client
from penstock.mqtt.feed import Feed, FeedSpec
from penstock.mqtt.inlet import Inlet
from penstock.mqtt.packets import Filter, Properties
from penstock.mqtt.properties import decode_properties, encode_properties, encode_varint
from penstock.mqtt.remote import Remote, RemoteSpec, RemoteTaker, TopicMessages
from penstock.mqtt.tap import Tap
from penstock.mqtt.tapspec import TapSpec
from penstock.mqtt.topics import is_filter, matches

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["Bridge", "BridgeRule", "BridgeSpec", "overlap"]

_log = logging.getLogger(__name__)

_received = REGISTRY.counter("mqtt_bridge_received", "messages that bridges brought here", labels=("bridge",))
_cut = REGISTRY.counter("mqtt_bridge_cut", "messages that bridges did not pass on in a loop", labels=("bridge",))

VIA: Final = "penstock-via"
"""The user property that names the brokers a message has passed."""
ORIGIN: Final = "origin"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RETRY_SECONDS: Final = (0.1, 5.0)
GC_EVERY: Final = 16
SEGMENT_BYTES: Final = 16 << 20


class BridgeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which topics, and what they are called on either side.

    >>> rule = BridgeRule(filter="plant/#", remote_prefix="site-7/")
    >>> rule.local, rule.remote, rule.there("plant/1"), rule.here("site-7/plant/1")
    ('plant/#', 'site-7/plant/#', 'site-7/plant/1', 'plant/1')
    """

    filter: str
    local_prefix: str = ""
    remote_prefix: str = ""
    qos: int = 1

    def __post_init__(self) -> None:
        if not is_filter(self.local) or not is_filter(self.remote) or "+" in self.local_prefix + self.remote_prefix:
            raise OptionsError(f"{self.filter!r} with its prefixes is no topic filter")
        if self.qos not in (1, 2):
            raise OptionsError(f"qos={self.qos}: a bridge sends and asks with QoS 1 or 2")

    @property
    def local(self) -> str:
        """The filter on this side."""
        return self.local_prefix + self.filter

    @property
    def remote(self) -> str:
        """The filter on the other side."""
        return self.remote_prefix + self.filter

    def there(self, topic: str) -> str:
        """Return what a topic of this side is called there."""
        return self.remote_prefix + topic[len(self.local_prefix) :]

    def here(self, topic: str) -> str:
        """Return what a topic of the other side is called here."""
        return self.local_prefix + topic[len(self.remote_prefix) :]


class BridgeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bridge, as a table ``[[bridges]]`` of a configuration says it.

    >>> hub = RemoteSpec(url="mqtt://hub.example")
    >>> BridgeSpec(name="hub", remote=hub, send=(BridgeRule(filter="plant/#"),)).name
    'hub'
    >>> BridgeSpec(name="hub", remote=hub)
    Traceback (most recent call last):
    penstock.errors.OptionsError: bridge hub: neither send nor receive says a topic
    """

    name: str
    remote: RemoteSpec
    send: tuple[BridgeRule, ...] = ()
    receive: tuple[BridgeRule, ...] = ()
    max_bytes: int = 0
    """What may wait for the other broker; 0 is no bound.  Beyond it publishers are held back."""
    batch: int = 1000

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or self.name == ORIGIN:
            raise OptionsError(f"a bridge named {self.name!r}: letters, digits, dot, dash and underscore")
        if not self.send and not self.receive:
            raise OptionsError(f"bridge {self.name}: neither send nor receive says a topic")
        if self.max_bytes and self.max_bytes < 2 * SEGMENT_BYTES:
            raise OptionsError(f"max_bytes={self.max_bytes}: at least {2 * SEGMENT_BYTES}")


def overlap(one: str, other: str) -> bool:
    """Whether a topic can match both filters.

    >>> overlap("a/#", "+/b"), overlap("a/+", "a/b/c"), overlap("a/#", "b/#")
    (True, False, False)
    """
    mine, theirs = one.split("/"), other.split("/")
    for a, b in zip(mine, theirs, strict=False):
        if "#" in (a, b):
            return True
        if a != b and "+" not in (a, b):
            return False
    if len(mine) == len(theirs):
        return True
    longer, length = (mine, len(theirs)) if len(mine) > len(theirs) else (theirs, len(mine))
    return longer[length] == "#" and len(longer) == length + 1


class Bridge:
    """One bridge of one broker; a part (penstock.lifecycle).  ``data`` is the folder all bridges of the broker share.

    >>> from penstock.mqtt.broker import Broker
    >>> rule = BridgeRule(filter="plant/#")
    >>> bridge = Bridge(BridgeSpec(name="hub", remote=RemoteSpec(url="mqtt://hub"), send=(rule,)), Broker(), "data")
    >>> bridge.name, bridge.health().state.value
    ('bridge:hub', 'new')
    """

    def __init__(self, spec: BridgeSpec, broker: Broker, data: str) -> None:
        self.spec, self.broker = spec, broker
        self.name = f"bridge:{spec.name}"
        self.received = self.cut = 0
        self._data = data
        self._life = Life(self.name)
        self._origin = ""
        self._plain = False  # the other side takes no bridge connections of MQTT 3.1.1
        self._remote = Remote(
            self._client,
            pauses=spec.remote.reconnect_seconds,
            on_trouble=self._trouble,
            on_connected=self._subscribe,
            on_refused=self._refused,
        )
        self._inlet = Inlet(broker, self.name, self)
        self._tap: Tap | None = None
        self._feed: Feed | None = None
        self._moves = 0
        self._began = self._calendar()

    # --- Life

    async def start(self) -> None:
        """Begin; the other broker need not be there."""
        self._life.state = State.STARTING
        try:
            self._origin = await in_disk_thread(self._own_name)
            if self.spec.send:
                await self._start_sending()
        except BaseException:
            self._life.state = State.FAILED
            await self._end()
            raise
        self._life.state = State.READY
        if self._feed is not None:
            self._life.work(self._feed.wait())
        if self.spec.receive:
            self._life.work(self._receive())
        else:
            self._life.work(self._connect(), forever=False)

    async def _start_sending(self) -> None:
        spec, path = self.spec, os.path.join(self._data, self.spec.name)
        options: dict[str, Any] = {"collect": True, "segment_bytes": SEGMENT_BYTES, "keep_bytes": spec.max_bytes}
        tap = TapSpec(
            filter=tuple(dict.fromkeys(rule.local for rule in spec.send)), path=path, name=self.name,
            format="filechannel", options=options,
        )  # fmt: skip
        self._tap = Tap(tap, self.broker, owner=self)
        await self._tap.start()
        feed = FeedSpec(log=path, name=self.name, cursor="bridge", batch=spec.batch)
        taker = RemoteTaker(self._remote, self.name)
        self._feed = Feed(feed, taker=taker, rename=self._there, on_moved=self._moved)
        self._feed.adjust = self._adjust
        await self._feed.start()

    async def ready(self) -> None:
        """Return when what is published here is taken; the other broker may be away."""
        if self._feed is not None:
            await self._feed.ready()

    async def drain(self, seconds: float) -> None:
        """Take nothing more from either side; finish what is under way within that time."""
        if not self._life.state.serves:
            return
        self._life.state = State.DRAINING
        await self._life.cancel()
        if self._tap is not None:
            await self._tap.drain(seconds)
        if self._feed is not None:
            await self._feed.drain(seconds)

    async def stop(self) -> None:
        """End; what was not sent is sent after the next start."""
        await self._end()
        self._life.end()

    async def _end(self) -> None:
        await self._life.cancel()
        if self._feed is not None:
            await self._feed.stop()
        if self._tap is not None:
            await self._tap.stop()
        await self._remote.close()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    async def caught_up(self) -> None:
        """Return when the other broker has everything that was published here before."""
        if self._feed is not None:
            await self._feed.caught_up()

    def health(self) -> Health:
        """Return how it is: degraded while the other broker is away."""
        if self._life.state is State.READY and not self._remote.connected:
            return Health(State.DEGRADED, self._life.reason or f"{self.spec.remote.url}: not connected")
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        return {
            "remote": self.spec.remote.url,
            "connected": self._remote.connected,
            "sent": 0 if self._feed is None else self._feed.published,
            "passed": {} if self._feed is None else dict(self._feed.passed),
            "received": self.received,
            "cut": self.cut,
        }

    def _trouble(self, reason: str) -> None:
        if reason and reason != self._life.reason:
            _log.warning("%s: %s", self.name, reason)
        self._life.reason = reason

    def _own_name(self) -> str:
        """Return what tells this broker from others: a random name, made once."""
        make_folders(self._data)
        path = os.path.join(self._data, ORIGIN)
        with contextlib.suppress(FileExistsError), create_private(path) as file:
            file.write(secrets.token_hex(8).encode())
        refuse_link(PosixDisk(), path)
        found = read_small(path).decode("ascii", "replace").strip()
        if not re.fullmatch(r"[0-9a-f]{16}", found):
            raise OptionsError(f"{path}: no name of a broker; remove it, and another is made")
        return found

    # --- The connection

    def _client(self) -> Client:
        spec = self.spec.remote
        if not spec.client_id:
            spec = msgspec.structs.replace(spec, client_id=f"{self.spec.name}-{self._origin}")
        return spec.client(keep_session=bool(self.spec.receive), bridge=spec.protocol < 5 and not self._plain)

    def _refused(self, exc: Refused) -> None:
        if exc.reason == "UNSUPPORTED_PROTOCOL_VERSION" and self.spec.remote.protocol < 5:
            self._plain = True

    async def _subscribe(self, client: Client) -> None:
        rules = self.spec.receive
        if client.options.version < 5 and self._plain:
            sent = [rule.remote for rule in self.spec.send]
            risky = [rule.remote for rule in rules if any(overlap(rule.remote, each) for each in sent)]
            rules = tuple(rule for rule in rules if rule.remote not in risky)
            if risky:
                self._trouble(f"{', '.join(risky)} is left out: what is sent would come back; use MQTT 5, or prefixes")
        if not rules:
            return
        version5 = client.options.version == 5
        filters = [
            Filter(rule.remote, rule.qos, no_local=version5, retain_as_published=version5, retain_handling=version5)
            for rule in rules
        ]
        codes = await client.subscribe(*filters)
        refused = [each.filter for each, code in zip(filters, codes, strict=True) if code >= 0x80]
        if refused:
            raise RetryError(f"{self.spec.remote.url}: not subscribed to {', '.join(refused)}")

    # --- There

    def _there(self, topic: str, carried: Carried) -> str | None:
        if any(pair == (VIA, self._origin) for pair in carried.properties.user):
            self._count_cut(1)
            return None
        for rule in self.spec.send:
            if matches(rule.local, topic):
                return rule.there(topic)
        return None  # a rule that is no longer there

    def _calendar(self) -> int:
        """Return the calendar's time when the monotonic clock began: it changes where the calendar is set."""
        clock = self.broker.clock
        return clock.now_ns() - round(clock.monotonic() * 1e9)

    def _adjust(self, message: TopicMessages, when_ns: int) -> bool:
        """Make a message what the other broker is to get; return whether it has not expired in the queue.

        When it came stands in its record, by the calendar; by as much as that was set forward since this bridge began
        a message may be younger than it seems.
        """
        expiry = message.properties.message_expiry
        if expiry is not None:
            jumped = max(0, self._calendar() - self._began)
            waited = max(0, self.broker.clock.now_ns() - when_ns - jumped) // 1_000_000_000
            if waited and waited >= expiry:
                return False
            expiry -= waited  # MQTT-3.3.2-6
        rule = next((rule for rule in self.spec.send if matches(rule.remote, message.topic)), None)
        message.qos = 1 if rule is None else rule.qos
        message.properties = msgspec.structs.replace(
            message.properties, message_expiry=expiry, user=(*message.properties.user, (VIA, self._origin))
        )
        return True

    def _moved(self) -> None:
        """Give room back once in a while."""
        self._moves += 1
        if self._moves % GC_EVERY == 0 and self._tap is not None:
            writer = self._tap.writer
            if isinstance(writer, FileChannel):
                writer.gc()

    # --- Here

    async def _connect(self) -> None:
        """Connect before there is anything to send: whoever looks sees whether the other broker is there."""
        await self._remote.client()

    async def _receive(self) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            client = await self._remote.client()
            try:
                async for runs in client.batches():
                    pause = RETRY_SECONDS[0]
                    try:
                        await self._publish([made for run in runs if (made := self._here(run)) is not None])
                    except BaseException:  # also where this bridge is stopped, and the client with it
                        client.give_back()
                        raise
                reason = "the connection was closed"
            except Refused as exc:
                reason = str(exc)
            except (PenstockError, OSError) as exc:
                reason = str(exc)
            await self._remote.failed(client, reason)
            await asyncio.sleep(pause)
            pause = min(pause * 2, RETRY_SECONDS[1])

    def _here(self, run: Run) -> Run | None:
        topic = run.topic.decode()
        forward = run.forward
        if forward and VIA.encode() in forward:
            found = _properties(forward)
            if any(pair == (VIA, self._origin) for pair in found.user):
                self._count_cut(run.count)
                return None
        if forward and b"\x0b" in forward:  # maybe a subscription identifier, which is ours and travels no further
            forward = encode_properties(
                msgspec.structs.replace(_properties(forward), subscription_ids=()), length=False
            )
        for rule in self.spec.receive:
            if matches(rule.remote, topic):
                return make_run(rule.here(topic).encode(), run.payloads(), run.qos, run.retain, forward, run.expiry)
        return None

    async def _publish(self, runs: list[Run]) -> None:
        """Publish until the broker has it: only then the other one is told."""
        pause, longest = RETRY_SECONDS
        while runs:
            try:
                await self._inlet.publish(runs)
                break
            except RetryError as exc:
                _log.warning("%s: %s", self.name, exc)
                await asyncio.sleep(pause)
                pause = min(pause * 2, longest)
        count = sum(run.count for run in runs)
        self.received += count
        _received.add(count, bridge=self.name)

    def _count_cut(self, count: int) -> None:
        self.cut += count
        _cut.add(count, bridge=self.name)


def _properties(forward: bytes) -> Properties:
    return decode_properties(encode_varint(len(forward)) + forward, 0, len(forward) + 4, 3)[0]
