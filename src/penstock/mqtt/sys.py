"""What the broker says about itself: $SYS topics under mosquitto's names, and metrics ``penstock_mqtt_*``.

Counters are plain integers of the broker; here they become topics and metrics, once every few seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.metrics import REGISTRY, Registry

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["SysTopics"]

LOADS: Final = {
    "messages/received": "messages_received",
    "messages/sent": "messages_sent",
    "publish/received": "publish_received",
    "publish/sent": "publish_sent",
    "publish/dropped": "all_dropped",
    "bytes/received": "bytes_received",
    "bytes/sent": "bytes_sent",
    "sockets": "connections",
    "connections": "connections",
}
WINDOWS: Final = {"1min": 60.0, "5min": 300.0, "15min": 900.0}

CLIENT_GAUGES: Final = {
    "delivered": "messages a client was sent",
    "all_dropped": "messages a client did not get",
    "queued_messages": "messages that wait for a client",
    "queued_bytes": "bytes that wait for a client",
}


class SysTopics:
    """Publishes what has changed, retained, whenever ``publish`` is called."""

    def __init__(
        self,
        broker: Broker,
        version: str,
        registry: Registry = REGISTRY,
        *,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """``memory`` returns the bytes that the process has now, and had at the most."""
        self._broker, self._version, self._registry, self._memory = broker, version, registry, memory
        self._began = self._last = broker.clock.monotonic()
        self._said: dict[str, str] = {}
        self._totals = dict.fromkeys(LOADS, 0)
        self._loads: dict[tuple[str, str], float] = {}
        self._most = 0
        self._counted: dict[tuple[str, str], float] = {}

    def publish(self) -> None:
        """Say what has changed since the last time."""
        for name, value in self.values().items():
            if self._said.get(name) != value:
                self._said[name] = value
                self._broker.publish_message(f"$SYS/broker/{name}", value.encode(), retain=True)
        self.meter()

    def values(self) -> dict[str, str]:
        """Return all topics below ``$SYS/broker/`` with their values."""
        broker, counts = self._broker, self._broker.counts
        now = broker.clock.monotonic()
        connected = broker.connected
        self._most = max(self._most, connected)
        budget = broker.budget
        found: dict[str, str | int] = {
            "version": f"penstock version {self._version}",
            "uptime": f"{int(now - self._began)} seconds",
            "clients/connected": connected,
            "clients/active": connected,
            "clients/disconnected": len(broker.sessions) - connected,
            "clients/inactive": len(broker.sessions) - connected,
            "clients/total": len(broker.sessions),
            "clients/maximum": self._most,
            "clients/expired": counts.sessions_expired,
            "messages/received": counts.messages_received,
            "messages/sent": counts.messages_sent,
            "messages/stored": len(broker.retained) + budget.queued_messages,
            "store/messages/count": len(broker.retained) + budget.queued_messages,
            "store/messages/bytes": broker.retained.payload_bytes + budget.queued_bytes,
            "publish/messages/received": counts.publish_received,
            "publish/messages/sent": counts.publish_sent,
            "publish/messages/dropped": counts.all_dropped,
            "publish/bytes/received": counts.publish_bytes_received,
            "publish/bytes/sent": counts.publish_bytes_sent,
            "bytes/received": counts.bytes_received,
            "bytes/sent": counts.bytes_sent,
            "subscriptions/count": broker.subscription_count,
            "shared_subscriptions/count": len(broker.groups),
            "retained messages/count": len(broker.retained),
        }
        if self._memory is not None:
            found["heap/current"], found["heap/maximum"] = self._memory()
        if broker.journal.keeps:
            found["persistence/state"] = f"trouble: {broker.journal.full}" if broker.journal.full else "ok"
        found.update(self._load(now))
        return {name: str(value) for name, value in found.items()}

    def _load(self, now: float) -> dict[str, str]:
        """Return averages per minute that fade with each window, as mosquitto has them."""
        passed, self._last = now - self._last, now
        found = {}
        for name, attribute in LOADS.items():
            total = getattr(self._broker.counts, attribute)
            new, self._totals[name] = total - self._totals[name], total
            for window, seconds in WINDOWS.items():
                if passed > 0:
                    fade = math.exp(-passed / seconds)
                    rate = new * 60.0 / passed
                    self._loads[name, window] = rate + fade * (self._loads.get((name, window), 0.0) - rate)
                found[f"load/{name}/{window}"] = f"{self._loads.get((name, window), 0.0):.2f}"
        return found

    def meter(self) -> None:
        """Bring the metrics up to date."""
        broker, counts, registry = self._broker, self._broker.counts, self._registry
        totals = (
            ("messages_received", "packets received", counts.messages_received),
            ("messages_sent", "packets sent", counts.messages_sent),
            ("publish_received", "messages received", counts.publish_received),
            ("publish_sent", "messages sent", counts.publish_sent),
            ("bytes_received", "bytes received", counts.bytes_received),
            ("bytes_sent", "bytes sent", counts.bytes_sent),
            ("connections", "connections accepted", counts.connections),
            ("sessions_expired", "sessions that expired", counts.sessions_expired),
            ("route_misses", "topics whose receivers had to be looked up", broker.routes.misses),
        )
        for name, text, value in totals:
            self._add(name, text, value)
        for reason, value in counts.dropped.items():
            self._add("dropped", "messages a session did not get", value, reason)
        for reason, value in counts.refused.items():
            self._add("refused", "connections refused or ended for a reason", value, reason)
        gauges = (
            ("sessions", "sessions", len(broker.sessions)),
            ("clients", "clients connected", broker.connected),
            ("subscriptions", "subscriptions", broker.subscription_count),
            ("retained", "retained messages", len(broker.retained)),
            ("queued_messages", "messages that wait", broker.budget.queued_messages),
            ("queued_bytes", "bytes that wait", broker.budget.queued_bytes),
            ("disk_trouble", "whether the disk takes no messages at the moment", int(bool(broker.journal.full))),
        )
        for name, text, value in gauges:
            registry.gauge(f"penstock_mqtt_{name}", text).set(value)
        if broker.options.client_metrics:
            self._meter_clients(broker.options.client_metrics)

    def _meter_clients(self, count: int) -> None:
        """Set the series of single clients, at most ``count`` of each: they are as many as somebody asked for."""
        sessions = self._broker.sessions.values()
        worst = heapq.nlargest(count, sessions, key=lambda each: (each.queued_messages, each.all_dropped))
        for name, text in CLIENT_GAUGES.items():
            values: dict[tuple[str, ...], float] = {(each.client_id,): getattr(each, name) for each in worst}
            self._registry.gauge(f"penstock_mqtt_client_{name.removeprefix('all_')}", text, ("client",)).replace(values)

    def _add(self, name: str, help: str, total: float, reason: str = "") -> None:
        key = (name, reason)
        new, self._counted[key] = total - self._counted.get(key, 0.0), total
        if not new:
            return
        if reason:
            self._registry.counter(f"penstock_mqtt_{name}", help, ("reason",)).add(new, reason=reason)
        else:
            self._registry.counter(f"penstock_mqtt_{name}", help).add(new)
