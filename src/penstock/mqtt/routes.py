"""Who gets what is published: plans of delivery, and the cache that keeps them until a subscription changes them.

The cache forgets exactly what a change touches.  A filter without wildcards takes one topic out.  One with wildcards is
only noted; a topic that is asked for later is compared with what was noted since it was cached.  So a change costs
the same with ten topics and with a million.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.kernel.mqttrelay import CachedWay, Way, WayCache
from penstock.mqtt.topics import FilterTree, levels_match

if TYPE_CHECKING:
    from penstock.kernel.mqtt import Run
    from penstock.mqtt.session import Session
    from penstock.mqtt.shared import SharedGroup

__all__ = ["Copied", "Copies", "Subscription", "Recipient", "Plan", "Routes"]

NOTED: Final = 32
"""A topic is compared with this many changes at most; after more of them it is looked up again."""

MOST_IDENTIFIERS: Final = 65535
"""Bytes of subscription identifiers that go with one message."""

LONGEST: Final = 512
"""Bytes of a topic that is remembered; longer ones are looked up each time, so that the cache stays small."""


class Subscription:
    """One filter of one session, with the options it was asked for with."""

    __slots__ = (
        "filter",
        "group",
        "identifier",
        "no_local",
        "qos",
        "retain_as_published",
        "retain_handling",
        "session",
    )

    def __init__(
        self,
        session: Session,
        filter: str,
        group: str | None = None,
        qos: int = 0,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        identifier: int = 0,
    ) -> None:
        self.session, self.filter, self.group, self.qos, self.no_local = session, filter, group, qos, no_local
        self.retain_as_published, self.retain_handling, self.identifier = (
            retain_as_published,
            retain_handling,
            identifier,
        )

    @property
    def name(self) -> str:
        """The filter as the client wrote it."""
        return self.filter if self.group is None else f"$share/{self.group}/{self.filter}"

    @property
    def options(self) -> tuple[int, bool, bool, int, int]:
        """What was asked for with the filter."""
        return self.qos, self.no_local, self.retain_as_published, self.retain_handling, self.identifier


class Recipient:
    """One session that gets one copy: the highest QoS of its matching subscriptions, and all their identifiers."""

    __slots__ = ("for_publisher", "identifiers", "no_local", "plain", "qos", "retain_as_published", "session")

    def __init__(self, subscriptions: list[Subscription]) -> None:
        self.session = subscriptions[0].session
        self.qos = max(each.qos for each in subscriptions)
        self.identifiers = _identifiers(subscriptions)
        self.retain_as_published = any(each.retain_as_published for each in subscriptions)
        self.plain = not self.identifiers
        # MQTT-3.8.3-3: what a client publishes itself does not match its subscriptions with No Local.
        self.no_local = any(each.no_local for each in subscriptions)
        others = [each for each in subscriptions if not each.no_local] if self.no_local else []
        self.for_publisher = Recipient(others) if others else None


class Copied(Protocol):
    """What gets a copy of what is published: a tap, or a meeting with a channel."""

    name: str
    owner: Any
    """Who brings messages that are not copied here; None for nobody."""

    def take(self, runs: list[Run], session: Session | None, client: str, /, *, acknowledged: bool) -> None:
        """Take runs, several only where they are not acknowledged."""


class Copies:
    """Where a tap stands among the subscriptions."""

    __slots__ = ("tap",)

    def __init__(self, tap: Copied) -> None:
        self.tap = tap


class Plan(Way):
    """Where messages of a topic go: sessions, groups of which one member is chosen for each message, and taps."""

    __slots__ = ("groups", "plain", "taps", "targets")

    def __init__(self, targets: list[Recipient], groups: list[SharedGroup], taps: tuple[Copied, ...] = ()) -> None:
        self.targets, self.groups, self.taps = targets, groups, taps
        self.plain = not groups and all(target.plain and not target.no_local for target in targets)
        """Whether everyone gets QoS 0 as it came."""
        self.outlets = tuple(target.session for target in targets) if self.plain and not taps else None


NOBODY: Final = Plan([], [])


class Routes(WayCache):
    """Topic → Plan.  ``allowed`` says whether a session may receive a topic; None: all of them may."""

    def __init__(self, tree: FilterTree[Subscription | SharedGroup | Copies], size: int = 1 << 17) -> None:
        self.allowed: Callable[[Session, str], bool] | None = None
        self.hits = self.misses = 0
        self._tree, self._size = tree, size
        self._young: dict[bytes, CachedWay] = {}
        self._old: dict[bytes, CachedWay] = {}
        self._version = 0
        self._noted: list[list[str]] = []
        self._plans: dict[
            tuple[Subscription | SharedGroup | Copies, ...], Plan
        ] = {}  # topics with the same receivers share a plan

    def find(self, topic: bytes) -> Plan:
        """Return the plan of a topic."""
        cached = self._young.get(topic)
        if cached is not None and cached.version == self._version:
            plan: Plan = cached.plan
            return plan
        return self._refresh(topic, cached)

    def changed(self, filter: str) -> None:
        """Forget what a filter matches: a subscription with it came, went or changed."""
        self._plans.clear()
        if "+" not in filter and "#" not in filter:
            topic = filter.encode()
            self._young.pop(topic, None)
            self._old.pop(topic, None)
            return
        self._version += 1
        self._noted.append(filter.split("/"))
        if len(self._noted) > 4 * NOTED:
            del self._noted[: -2 * NOTED]

    def clear(self) -> None:
        """Forget everything: the rules of who may receive what have changed."""
        self._young, self._old = {}, {}

    def _refresh(self, topic: bytes, cached: CachedWay | None) -> Plan:
        if cached is None:
            cached = self._old.get(topic)
        if cached is not None and self._still_good(topic, cached):
            self.hits += 1
            cached.version = self._version
        else:
            self.misses += 1
            cached = CachedWay(self._plan(topic.decode()), self._version)
        plan: Plan = cached.plan
        if len(topic) > LONGEST:
            return plan
        if len(self._young) >= self._size:
            self._young, self._old = {}, self._young
        self._young[topic] = cached
        return plan

    def _still_good(self, topic: bytes, cached: CachedWay) -> bool:
        since = self._version - cached.version
        if since > NOTED or since > len(self._noted):
            return False
        levels = topic.decode().split("/")
        dollar = topic[:1] == b"$"
        for wanted in self._noted[len(self._noted) - since :]:
            if not (dollar and wanted[0] in ("+", "#")) and levels_match(wanted, levels):
                return False
        return True

    def _plan(self, topic: str) -> Plan:
        found = self._tree.match(topic)
        if not found:
            return NOBODY
        if self.allowed is not None:
            return self._make(found, topic)
        key = tuple(found)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= self._size:
                self._plans.clear()
            plan = self._plans[key] = self._make(found, topic)
        return plan

    def _make(self, found: list[Subscription | SharedGroup | Copies], topic: str) -> Plan:
        sessions: dict[Session, list[Subscription]] = {}
        groups: list[SharedGroup] = []
        taps: dict[Copied, None] = {}  # each once, whatever its filters
        for each in found:
            if isinstance(each, Copies):
                taps[each.tap] = None
            elif not isinstance(each, Subscription):
                groups.append(each)
            elif self.allowed is None or self.allowed(each.session, topic):
                sessions.setdefault(each.session, []).append(each)
        return Plan([Recipient(subscriptions) for subscriptions in sessions.values()], groups, tuple(taps))


def _identifiers(subscriptions: list[Subscription]) -> bytes:
    """Return the identifiers of all subscriptions, encoded; what the journal cannot hold of them is left out."""
    found, size = [], 0
    for each in subscriptions:
        if each.identifier:
            one = _encoded(each.identifier)
            size += len(one)
            if size > MOST_IDENTIFIERS:
                break
            found.append(one)
    return b"".join(found)


def _encoded(identifier: int) -> bytes:
    out = bytearray(b"\x0b")
    while identifier >= 128:
        out.append(identifier & 127 | 128)
        identifier >>= 7
    out.append(identifier)
    return bytes(out)
