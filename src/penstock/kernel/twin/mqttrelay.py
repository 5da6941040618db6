"""The same as ``penstock.kernel.mqttrelay``, in plain Python."""

from __future__ import annotations

from typing import Any

from penstock.kernel.twin.mqtt import Run, cut

__all__ = ["CachedWay", "Outlet", "Sink", "Traffic", "Way", "WayCache", "relay"]


class Traffic:
    """What came and what went."""

    def __init__(self) -> None:
        self.bytes_received = self.messages_received = self.publish_received = self.publish_bytes_received = 0
        self.bytes_sent = self.messages_sent = self.publish_sent = self.publish_bytes_sent = 0


class Sink:
    """A connection as receivers see it."""

    def __init__(self) -> None:
        self.write: Any = None
        self.version5, self.plain_payload, self._limit = False, 0, 0
        self._counts: Any = None
        self._short: WayCache | None = None

    def received(self, data: bytes) -> None:
        """Take what one read brought."""
        if self._short is None or not relay(data, self.version5, self._limit, self._short, self._counts):
            self.received_any(data)

    def received_any(self, data: bytes) -> None:
        """Go the long way."""
        raise NotImplementedError


class Outlet:
    """A receiver."""

    def __init__(self) -> None:
        self.link: Sink | None = None
        self.ready, self.delivered = False, 0


class Way:
    """Where a topic's messages go."""

    def __init__(self) -> None:
        self.outlets: tuple[Outlet, ...] | None = None


class CachedWay:
    """A way and the version of the routes it was found at."""

    def __init__(self, plan: Way, version: int) -> None:
        self.plan, self.version = plan, version


class WayCache:
    """Topic → CachedWay."""

    def __init__(self) -> None:
        self._young: dict[bytes, CachedWay] = {}
        self._version = 0


def relay(data: bytes, version5: bool, limit: int, routes: WayCache, counts: Traffic) -> bool:
    """Pass ``data`` on if it is one such packet and everyone can take it; return whether that was so."""
    items, end, _, problem = cut(data, 0, version5, limit)
    if problem is not None or end != len(data) or len(items) != 1 or not isinstance(run := items[0], Run):
        return False
    if not run.plain or run.count != 1 or run.forward:
        return False
    cached = routes._young.get(run.topic)
    if cached is None or cached.version != routes._version or cached.plan.outlets is None:
        return False
    links = [outlet.link for outlet in cached.plan.outlets if outlet.ready and outlet.link is not None]
    if len(links) != len(cached.plan.outlets):
        return False
    if any(link.version5 != version5 or run.longest >= link.plain_payload for link in links):
        return False
    counts.bytes_received += len(data)
    counts.messages_received += 1
    counts.publish_received += 1
    counts.publish_bytes_received += run.payload_bytes
    for outlet in cached.plan.outlets:
        link = outlet.link
        if link is None:  # it went while another was written to
            continue
        link.write(data)
        outlet.delivered += 1
        counts.bytes_sent += len(data)
        counts.messages_sent += 1
        counts.publish_sent += 1
        counts.publish_bytes_sent += run.payload_bytes
    return True
