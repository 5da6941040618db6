"""How a broker behaves: one frozen struct.  Zero means "no bound" nowhere: a bound is a number."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.errors import OptionsError
from penstock.mqtt.session import NEVER

__all__ = ["BrokerOptions"]

LONGEST_SECONDS: Final = 1_000_000_000


class BrokerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Given to Broker(); it cannot change afterwards.

    >>> BrokerOptions(receive_maximum=20).receive_maximum
    20
    >>> BrokerOptions(maximum_qos=3)
    Traceback (most recent call last):
    penstock.errors.OptionsError: maximum_qos=3: must be between 0 and 2
    """

    # --- What clients may do

    maximum_qos: int = 2
    """Highest QoS of a publish; a subscription of any QoS is taken."""

    retain_available: bool = True
    """Whether messages are retained."""
    wildcard_subscriptions: bool = True
    """Whether filters may have ``+`` and ``#``."""
    subscription_identifiers: bool = True
    """Whether subscriptions may have identifiers."""
    shared_subscriptions: bool = True
    """Whether ``$share/`` filters are taken."""

    max_packet_bytes: int = 268_435_460
    """Largest packet that is accepted.  One connection may hold this much while it sends one."""

    receive_maximum: int = 65535
    """QoS 2 messages of one client that are unreleased at once, and QoS 1 that are unacknowledged."""

    topic_alias_maximum: int = 1024
    """Aliases one client may use, and of those we use towards a client that allows them.  Bytes of topics are kept."""

    max_keep_alive: int = 65535
    """Seconds; a client that asks for more, or for none while this is less than 65535, is told this."""

    max_session_expiry: int = NEVER
    """Seconds a session is kept at most; NEVER is no bound."""

    max_topic_levels: int = 128
    """A filter with more levels is refused, and so is a message with more that is to be retained."""

    max_subscriptions: int = 100_000
    """Of one client; further ones get 0x97."""

    refused_filters: tuple[str, ...] = ()
    """Filters that nobody may subscribe to, word for word; they get 0x80.  ``#`` here spares a large fleet."""

    max_client_id_bytes: int = 65535
    """A longer client id is refused."""

    connect_seconds: float = 10.0
    """Time for the first packet after a connection was made."""

    anonymous: bool = True
    """Whether clients are let in when there is no authenticator; names they give are taken as they are."""

    messages_per_second: float | None = None
    """What one client may publish; who sends more is read from more slowly, and nothing is lost.  None: no bound."""

    bytes_per_second: float | None = None
    """What one client may send, likewise."""

    # --- What a slow or absent client costs

    max_inflight: int = 65535
    """Unacknowledged QoS 1 and 2 messages to one client; its own receive maximum may be less."""

    max_queued_messages: int = 100_000
    """Messages that wait for one session; further ones are dropped for it and counted."""

    max_queued_bytes: int = 64 << 20
    """Bytes that wait for one session."""

    max_queued_seconds: int = NEVER
    """How long a message waits for a session; then it is dropped for it and counted.  NEVER is no bound."""

    max_total_queued_bytes: int = 1 << 30
    """Bytes that wait for all sessions together."""

    max_total_queued_messages: int = 100_000_000
    """Messages that wait for all sessions together."""

    max_unsent_bytes: int = 1 << 20
    """Bytes that wait for one connection's socket; beyond them QoS 0 is dropped for its session and counted."""

    # --- What the broker says about itself

    sys_seconds: float = 10.0
    """Between two publications of $SYS; 0 for none."""

    client_metrics: int = 0
    """Of how many clients there are metrics of their own: of those for which most waits, or was dropped."""

    reason_strings: bool = True
    """Whether clients of version 5 are told in words why they are disconnected."""

    response_information: str = ""
    """Given to clients that ask for it."""

    def __post_init__(self) -> None:
        bounds = {
            "maximum_qos": (0, 2),
            "max_packet_bytes": (64, 268_435_460),
            "receive_maximum": (1, 65535),
            "topic_alias_maximum": (0, 65535),
            "max_keep_alive": (1, 65535),
            "max_session_expiry": (0, NEVER),
            "max_topic_levels": (1, 65535),
            "max_inflight": (1, 65535),
            "max_queued_messages": (0, 1 << 40),
            "max_queued_bytes": (0, 1 << 50),
            "max_queued_seconds": (1, NEVER),
            "max_total_queued_bytes": (0, 1 << 60),
            "max_total_queued_messages": (0, 1 << 60),
            "max_client_id_bytes": (23, 65535),
            "client_metrics": (0, 10_000),
            "max_unsent_bytes": (64 << 10, 1 << 40),
            "max_subscriptions": (0, 1 << 40),
            "connect_seconds": (0.001, LONGEST_SECONDS),
            "sys_seconds": (0, LONGEST_SECONDS),
        }
        for name in ("messages_per_second", "bytes_per_second"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise OptionsError(f"{name}={rate}: must be above 0")
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise OptionsError(f"{name}={value}: must be between {low} and {high}")
