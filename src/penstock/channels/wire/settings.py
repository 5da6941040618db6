"""How a channel server behaves on the wire: limits and times, under the names the original has for them."""

from __future__ import annotations

import math

import msgspec

from penstock.channels.model import Limits
from penstock.errors import OptionsError

__all__ = ["WireSettings"]


class WireSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection may do and how long it may take.  Sizes in bytes, times in seconds.

    >>> WireSettings(min_keep_alive_interval=90)
    Traceback (most recent call last):
    penstock.errors.OptionsError: min_keep_alive_interval=90: must not exceed keep_alive_interval=60.0
    """

    # --- What a client meets

    max_connections: int = 10_000
    """Clients at once; further ones are turned away."""
    max_message_size: int = 8192
    """The longest header line, its LF included."""
    max_payload_size: int = 65_536
    """The largest payload of a message."""
    max_inflight_requests: int = 100
    """Requests a client may have under way; one more is tolerated, the next ends the connection."""
    outbound_message_queue_size: int = 2048
    """Messages that may wait for a client that does not read; one more ends its connection."""
    rate_limit: int = 262_144
    """Bytes a client may send within two seconds; 0: no limit."""

    # --- How long things may take

    connect_timeout: float = 30.0
    """For the first message of a connection."""
    authenticate_timeout: float = 30.0
    """For the whole of a client's authentication."""
    keep_alive_interval: float = 60.0
    """The longest heartbeat interval a client gets, whatever it asks for."""
    min_keep_alive_interval: float = 10.0
    """The shortest one."""
    request_timeout: float = 20.0
    """For the answer to one request."""
    payload_read_timeout: float = 10.0
    """For a payload to arrive behind its header."""

    def __post_init__(self) -> None:
        for field in ("max_connections", "max_message_size", "max_payload_size", "outbound_message_queue_size"):
            if getattr(self, field) < 1:
                raise OptionsError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.rate_limit < 0 or self.max_inflight_requests < 0:
            raise OptionsError("rate_limit and max_inflight_requests must not be negative")
        for field in self.__struct_fields__:
            if isinstance(getattr(self, field), float) and not 0 < getattr(self, field) < math.inf:
                raise OptionsError(f"{field}={getattr(self, field)}: must be positive")
        if self.min_keep_alive_interval > self.keep_alive_interval:
            interval = self.min_keep_alive_interval
            raise OptionsError(
                f"min_keep_alive_interval={interval}: must not exceed keep_alive_interval={self.keep_alive_interval}"
            )

    def heartbeat_ms(self, asked: int) -> int:
        """Return the interval a client gets that asks for one, in milliseconds.

        >>> [WireSettings().heartbeat_ms(asked) for asked in (0, 1, 15_000, 999_999)]
        [60000, 10000, 15000, 60000]
        """
        most, least = round(self.keep_alive_interval * 1000), round(self.min_keep_alive_interval * 1000)
        return most if not asked else min(max(asked, least), most)


def connect_ack(
    settings: WireSettings, limits: Limits, *, auth: bool, asked_ms: int, protocol: str | None
) -> dict[str, object]:
    """Return what a server says of itself.

    >>> connect_ack(WireSettings(), Limits(), auth=False, asked_ms=0, protocol=None)["max_subscriptions"]
    100
    """
    return {
        "application_protocol": protocol,
        "auth_required": auth,
        "heartbeat_interval": settings.heartbeat_ms(asked_ms),
        "max_inflight_requests": settings.max_inflight_requests,
        "max_message_size": settings.max_message_size,
        "max_payload_size": settings.max_payload_size,
        "max_persist_messages": limits.max_persist_messages or None,
        "max_subscriptions": limits.max_channels_per_client,
    }
