"""Quotas of one client: who sends more than it may is read from more slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.link import Link
from penstock.net.limits import TokenBucket

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["MeteredLink"]

BURST_SECONDS: Final = 1.0
"""What may be sent at once, in seconds of the quota."""


class MeteredLink(Link):
    """A connection whose client may publish so many messages, or send so many bytes, a second.

    What came is taken, and reading rests until it is paid for: TCP holds the client back, and nothing is lost.
    """

    __slots__ = ("_bytes", "_messages", "_rests")

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        options, clock = broker.options, broker.clock
        self._messages = self._bytes = None
        if options.messages_per_second is not None:
            rate = options.messages_per_second
            self._messages = TokenBucket(rate, max(1.0, rate * BURST_SECONDS), clock)
        if options.bytes_per_second is not None:
            self._bytes = TokenBucket(options.bytes_per_second, options.bytes_per_second * BURST_SECONDS, clock)
        self._rests = False

    def received(self, data: bytes) -> None:
        """Take what one read brought, and read no more until it is paid for."""
        before = self._counts.publish_received
        super().received(data)
        seconds = 0.0
        if self._messages is not None:
            seconds = self._messages.take(self._counts.publish_received - before)
        if self._bytes is not None:
            seconds = max(seconds, self._bytes.take(len(data)))
        if seconds and not self._rests and self.session is not None:
            self._rests = True
            self.hold_reading()
            self.broker.at(self.broker.clock.monotonic() + seconds, self._rested)

    def _rested(self) -> None:
        self._rests = False
        self.go_on_reading()
