"""What a channel server counts, under the names the original uses: exported as ``penstock_channels_…``."""

from __future__ import annotations

from typing import Final

from penstock.metrics import REGISTRY

__all__ = ["PAYLOAD_BYTES"]

PAYLOAD_BYTES: Final = tuple(float(64 * 2**k) for k in range(12))

AUTH = REGISTRY.counter("c2s_auth_attempts", "attempts to log in by token", labels=("result",))
IDENTIFY = REGISTRY.counter("c2s_identify_attempts", "attempts to log in by name", labels=("result",))
RECEIVED = REGISTRY.counter("c2s_messages_received", "messages from clients")
PAYLOADS = REGISTRY.histogram("c2s_broadcast_payload_bytes", "sizes of broadcast payloads", bounds=PAYLOAD_BYTES)
FORWARDED = REGISTRY.counter(
    "c2s_modulator_forward_payload", "payloads shown to the modulator, by its verdict", labels=("result",)
)
ACCEPTED = REGISTRY.counter("c2s_connections_accepted", "connections of clients that were let in")
CONNECTIONS = REGISTRY.gauge("c2s_connections_active", "connections of clients that are open")
REJECTED = REGISTRY.counter("c2s_connections_rejected", "connections over max_connections")
QUEUE_FULL = REGISTRY.counter("c2s_outbound_queue_full", "clients that ended because they did not read")

LATE = REGISTRY.counter("c2s_late_requests", "requests of clients that took longer than request_timeout")
HANDSHAKES = REGISTRY.counter("c2s_tls_handshakes", "TLS handshakes with clients", labels=("result",))

S2M_FAILURES = REGISTRY.counter("s2m_connect_failures", "servers that could not log in to a modulator")
S2M_AUTH = REGISTRY.counter("s2m_auth_attempts", "tokens that servers asked a modulator about", labels=("result",))
S2M_PAYLOADS = REGISTRY.counter(
    "s2m_forward_payload", "payloads that servers showed to a modulator, by its verdict", labels=("result",)
)
S2M_EVENTS = REGISTRY.counter("s2m_forward_event", "events that a modulator was told of")
S2M_DIRECT = REGISTRY.counter("s2m_mod_direct", "private payloads for a modulator", labels=("result",))

M2S_FAILURES = REGISTRY.counter("m2s_connect_failures", "modulators that could not log in")
M2S_DIRECT = REGISTRY.counter("m2s_mod_direct", "private payloads from modulators")
M2S_DROPPED = REGISTRY.counter("m2s_mod_direct_dropped", "private payloads for nobody who is connected")
M2S_ACCEPTED = REGISTRY.counter("m2s_connections_accepted", "connections of modulators that were let in")
M2S_CONNECTIONS = REGISTRY.gauge("m2s_connections_active", "connections of modulators that are open")
M2S_REJECTED = REGISTRY.counter("m2s_connections_rejected", "connections of modulators over the limit")
M2S_QUEUE_FULL = REGISTRY.counter("m2s_outbound_queue_full", "modulators that ended because they did not read")
