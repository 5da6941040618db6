"""Promise: everything the original counts is counted here under the same name, as ``penstock_channels_…``."""

from __future__ import annotations

import penstock.channels.wire.remote
import penstock.channels.wire.server  # noqa: F401 - whoever counts is there
from penstock.channels.wire.metrics import PARTS, render
from penstock.metrics import REGISTRY, Registry

NAMES: list[str] = [
    "channels_active",
    "channel_joins",
    "channel_leaves",
    "channels_deleted",
    "store_saves",
    "store_save_duration_seconds",
    "store_deletes",
    "store_loads",
    "store_load_duration_seconds",
    "message_log_flushes",
    "message_log_flush_duration_seconds",
    "message_log_reads",
    "message_log_read_duration_seconds",
    "message_log_entries_returned",
    "message_log_deletes",
    "message_log_recovery_duration_seconds",
    "message_log_append_duration_seconds",
    "message_log_segments_rolled",
    "message_log_segments_evicted",
    "message_log_evicted_bytes",
    "message_log_crc_failures",
    "message_log_sealed_segment_truncations",
    "fifo_pushes",
    "fifo_pops",
    "fifo_clears",
    "fifo_cursor_fsync_seconds",
    "c2s_auth_attempts",
    "c2s_identify_attempts",
    "c2s_messages_received",
    "c2s_broadcast_payload_bytes",
    "c2s_modulator_forward_payload",
    "c2s_connections_accepted",
    "c2s_connections_active",
    "c2s_connections_rejected",
    "c2s_outbound_queue_full",
    "c2s_tls_handshakes",
    "m2s_connect_failures",
    "m2s_mod_direct",
    "m2s_mod_direct_dropped",
    "m2s_connections_accepted",
    "m2s_connections_active",
    "m2s_connections_rejected",
    "m2s_outbound_queue_full",
    "s2m_connect_failures",
    "s2m_auth_attempts",
    "s2m_forward_payload",
    "s2m_forward_event",
    "s2m_mod_direct",
]


def test_everything_the_original_counts_is_counted() -> None:
    known = {*REGISTRY._metrics}
    assert [name for name in NAMES if name not in known] == []
    assert all(name.startswith(PARTS) for name in NAMES)


def test_what_never_happened_is_told_as_zero() -> None:
    """A scraper that sees a counter for the first time at 1 takes it for no change."""
    registry = Registry()
    registry.counter("c2s_connections_rejected", "turned away")
    registry.histogram("store_save_duration_seconds", "saves", bounds=(1.0,))
    registry.counter("channel_joins", "joins", labels=("result",))
    registry.counter("mqtt_packets", "none of ours")
    assert render(registry.samples(untouched=True)).splitlines() == [
        "# HELP penstock_channels_c2s_connections_rejected turned away",
        "# TYPE penstock_channels_c2s_connections_rejected counter",
        "penstock_channels_c2s_connections_rejected_total 0",
        "# HELP penstock_channels_store_save_duration_seconds saves",
        "# TYPE penstock_channels_store_save_duration_seconds histogram",
        'penstock_channels_store_save_duration_seconds_bucket{le="1"} 0',
        'penstock_channels_store_save_duration_seconds_bucket{le="+Inf"} 0',
        "penstock_channels_store_save_duration_seconds_count 0",
        "penstock_channels_store_save_duration_seconds_sum 0",
        "# EOF",
    ]


def test_a_sum_is_told_to_its_last_digit() -> None:
    """Six digits of it stand still for minutes: what is made of its changes is nonsense."""
    registry = Registry()
    sizes = registry.histogram("c2s_broadcast_payload_bytes", "sizes", bounds=(64.0,))
    for size in (123_456_789, 1):
        sizes.observe(size)
    assert "penstock_channels_c2s_broadcast_payload_bytes_sum 123456790" in render(registry.samples()).splitlines()
