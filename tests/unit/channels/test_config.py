"""Promise: the configuration of the original means here what it means there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.channels.model import Limits
from penstock.channels.wire import ChannelServerOptions, ModulatorLink, WireSettings
from penstock.channels.wire.config import from_environment, load_config, modulator_class, options_of, text_of
from penstock.errors import OptionsError

S2M = "modulator.s2m-client."


def link(**config: Any) -> tuple[str, str]:
    found = options_of({"modulator.type": "s2m", **{S2M + name: value for name, value in config.items()}}).modulator
    assert found is not None
    return found.address, found.socket_path


def test_the_network_of_a_modulator_says_which_place_counts() -> None:
    both = {"address": "127.0.0.1:5", "socket_path": "/run/mod"}
    assert link(**both, network="tcp") == ("127.0.0.1:5", "")
    assert link(**both, network="unix") == ("", "/run/mod")
    assert link(socket_path="/run/mod") == ("", "/run/mod")
    with pytest.raises(OptionsError, match="tcp or unix"):
        link(**both, network="pigeon")


def test_metrics_are_served_where_the_configuration_speaks_of_them() -> None:
    assert options_of({}).metrics_address == ""
    assert options_of({"telemetry.metrics.enabled": True}).metrics_address == "127.0.0.1:9090"
    assert options_of({"telemetry.metrics.bind_address": "0.0.0.0"}).metrics_address == "0.0.0.0:9090"
    assert options_of({"telemetry.metrics.enabled": False, "telemetry.metrics.port": 9}).metrics_address == ""


def test_every_key_can_be_set_in_the_environment() -> None:
    given = {
        "PENSTOCK__MODULATOR__TYPE": "s2m",
        "PENSTOCK__MODULATOR__S2M_CLIENT__SOCKET_PATH": "/run/mod",
        "PENSTOCK__C2S_SERVER__CONNECT_TIMEOUT": "500ms",
        "PENSTOCK__C2S_SERVER__LIMITS__MAX_CHANNELS": "7",
        "PENSTOCK__TELEMETRY__METRICS__PORT": "0",
    }
    found = options_of(from_environment(given))
    assert found.modulator is not None
    assert (found.modulator.socket_path, found.wire.connect_timeout, found.limits.max_channels) == ("/run/mod", 0.5, 7)
    assert found.metrics_address == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1500ms", 1.5), ("1m 30s", 90), ("1m30s", 90), ("1min", 60), ("2 minutes", 120), ("1hour 5sec", 3605),
        ("1day", 86_400), ("1w", 604_800), ("3000000us", 3), ("2000000000ns", 2), ("1 month", 2_630_016), (45, 45),
    ],
)  # fmt: skip
def test_durations_are_written_as_in_the_original(text: Any, seconds: float) -> None:
    assert options_of({"c2s-server.request_timeout": text}).wire.request_timeout == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "10 parsecs", "1s,2s", "-1s", True, "1 s 2", float("nan"), float("inf"), -1.0]
)
def test_what_is_no_duration_is_refused_by_name(text: Any) -> None:
    with pytest.raises(OptionsError, match="request_timeout"):
        options_of({"c2s-server.request_timeout": text})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("telemetry.metrics.enabled", "false"), ("telemetry.metrics.port", "x"), ("telemetry.metrics.port", True),
        ("telemetry.metrics.bind_address", 5), ("channels.tap.ops", 5), ("channels.tap.ops", ""),
        ("channels.tap.!ops@localhost", "logs/ops"), ("channels.tap.ops.east", "logs/ops"),
    ],
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(OptionsError, match=key.removeprefix("channels.tap.").replace(".", r"\.")):
        options_of({key: value})


def test_a_folder_that_is_no_text_is_refused() -> None:
    with pytest.raises(OptionsError, match="data_dir=5: text"):
        text_of({"c2s-server.storage.data_dir": 5}, "c2s-server.storage.data_dir")


@pytest.mark.parametrize(
    "config",
    [
        {"modulator.type": "python"}, {"modulator.class": "door:Door"},
        {"modulator.type": "python", "modulator.class": 5}, {"modulator.type": "python", "modulator.class": ""},
        {"modulator.type": "s2m", "modulator.class": "door:Door"},
    ],
)  # fmt: skip
def test_a_modulator_that_would_not_be_asked_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="modulator"):
        modulator_class(config)
    assert modulator_class({"modulator.type": "python", "modulator.class": "door:Door"}) == "door:Door"
    assert modulator_class({}) is None


EVERY_KEY = """
[telemetry.logging]
level = "debug"
format = "json"
[telemetry.metrics]
enabled = true
bind_address = "127.0.0.2"
port = 9191
[c2s-server]
connect_timeout = "31s"
authenticate_timeout = "32s"
keep_alive_interval = "61s"
min_keep_alive_interval = "11s"
request_timeout = "21s"
payload_read_timeout = "12s"
[c2s-server.listener]
domain = "example.com"
bind_address = "127.0.0.3"
port = 22699
cert_file = "cert.pem"
key_file = "key.pem"
[c2s-server.storage]
data_dir = "elsewhere"
[c2s-server.limits]
max_connections = 1001
max_channels = 1002
max_clients_per_channel = 1003
max_channels_per_client = 1004
max_message_size = 1005
max_payload_size = 1006
payload_pool_memory_budget = 1007
max_inflight_requests = 1008
outbound_message_queue_size = 1009
rate_limit = 1010
max_persist_messages = 1011
max_message_flush_interval = 1012
max_history_limit = 1013
[modulator]
type = "s2m"
[modulator.s2m-client]
network = "tcp"
address = "127.0.0.4:5"
socket_path = ""
shared_secret = "psst"
max_idle_connections = 17
heartbeat_interval = "62s"
connect_timeout = "6s"
timeout = "7s"
payload_read_timeout = "8s"
backoff_initial_delay = "101ms"
backoff_max_delay = "33s"
backoff_max_retries = 6
[modulator.m2s-server]
shared_secret = "hush"
connect_timeout = "9s"
keep_alive_interval = "34s"
min_keep_alive_interval = "13s"
request_timeout = "14s"
payload_read_timeout = "15s"
[modulator.m2s-server.listener]
network = "tcp"
bind_address = "127.0.0.5:6"
socket_path = ""
[modulator.m2s-server.limits]
max_connections = 2001
max_message_size = 2002
max_payload_size = 2003
payload_pool_memory_budget = 2004
max_inflight_requests = 2005
outgoing_message_queue_size = 2006
rate_limit = 2007
"""


def test_every_key_of_the_original_is_known_and_arrives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.toml").write_text(EVERY_KEY)
    config = load_config(str(tmp_path / "config.toml"), {})
    assert text_of(config, "c2s-server.storage.data_dir") == "elsewhere"
    assert options_of(config) == ChannelServerOptions(
        domain="example.com", bind_address="127.0.0.3", port=22_699, cert_file="cert.pem", key_file="key.pem",
        metrics_address="127.0.0.2:9191",
        limits=Limits(
            max_channels=1002, max_clients_per_channel=1003, max_channels_per_client=1004, max_payload_size=1006,
            max_persist_messages=1011, max_message_flush_interval=1012, max_history_limit=1013,
        ),
        wire=WireSettings(
            max_connections=1001, max_message_size=1005, max_payload_size=1006, max_inflight_requests=1008,
            outbound_message_queue_size=1009, rate_limit=1010, connect_timeout=31, authenticate_timeout=32,
            keep_alive_interval=61, min_keep_alive_interval=11, request_timeout=21, payload_read_timeout=12,
        ),
        modulator=ModulatorLink(
            address="127.0.0.4:5", shared_secret="psst", heartbeat_interval=62, connect_timeout=6, timeout=7,
            backoff_initial_delay=0.101, backoff_max_delay=33, backoff_max_retries=6,
            m2s_address="127.0.0.5:6", m2s_secret="hush",
            m2s=WireSettings(
                max_connections=2001, max_message_size=2002, max_payload_size=2003, max_inflight_requests=2005,
                outbound_message_queue_size=2006, rate_limit=2007, connect_timeout=9, keep_alive_interval=34,
                min_keep_alive_interval=13, request_timeout=14, payload_read_timeout=15,
            ),
        ),
    )  # fmt: skip
    assert not caplog.records


def test_what_the_file_leaves_out_is_as_in_the_original() -> None:
    """Listeners and metrics are those of docs/howto/channel-server.md instead."""
    link = options_of({"modulator.type": "s2m", "modulator.s2m-client.address": "127.0.0.1:5"}).modulator
    wire, limits = options_of({}).wire, options_of({}).limits
    assert link is not None
    times = (wire.connect_timeout, wire.authenticate_timeout, wire.keep_alive_interval, wire.min_keep_alive_interval)
    assert times == (30, 30, 60, 10)
    assert (wire.request_timeout, wire.payload_read_timeout, wire.max_connections) == (20, 10, 10_000)
    assert (wire.max_message_size, wire.max_payload_size, wire.max_inflight_requests) == (8192, 65_536, 100)
    assert (wire.outbound_message_queue_size, wire.rate_limit) == (2048, 262_144)
    assert (limits.max_channels, limits.max_clients_per_channel, limits.max_channels_per_client) == (5000, 100, 100)
    kept = (limits.max_payload_size, limits.max_persist_messages, limits.max_message_flush_interval)
    assert (*kept, limits.max_history_limit) == (65_536, 1000, 60_000, 100)
    assert (link.heartbeat_interval, link.connect_timeout, link.timeout) == (60, 5, 5)
    assert (link.backoff_initial_delay, link.backoff_max_delay, link.backoff_max_retries) == (0.1, 30, 5)
    m2s = link.m2s
    times = (m2s.connect_timeout, m2s.keep_alive_interval, m2s.min_keep_alive_interval, m2s.request_timeout)
    assert (*times, m2s.payload_read_timeout) == (5, 30, 10, 10, 5)
    assert (m2s.max_connections, m2s.max_message_size, m2s.max_payload_size) == (250, 8192, 262_144)
    assert (m2s.max_inflight_requests, m2s.outbound_message_queue_size, m2s.rate_limit) == (100, 2048, 524_288)


@pytest.mark.parametrize("text", ["12345", "true", "1979-05-27", "0x1F", "1e3", "[1]", "{}"])
def test_text_of_the_environment_stays_text(text: str) -> None:
    """A secret of digits is one."""
    found = from_environment({
        "PENSTOCK__MODULATOR__S2M_CLIENT__SHARED_SECRET": text,
        "PENSTOCK__C2S_SERVER__STORAGE__DATA_DIR": text,
        "PENSTOCK__CHANNELS__TAP__OPS": text,
        "PENSTOCK__C2S_SERVER__LISTENER__DOMAIN": f'"{text}"',
    })  # fmt: skip
    assert set(found.values()) == {text}


def test_a_secret_that_is_no_text_is_not_printed() -> None:
    with pytest.raises(OptionsError, match="shared_secret: text is wanted"):
        options_of({"modulator.type": "s2m", "modulator.s2m-client.shared_secret": 12345})


def test_a_variable_that_nobody_knows_is_named(caplog: pytest.LogCaptureFixture) -> None:
    given = {"PENSTOCK__C2S_SERVER__LIMITS__MAX_CONECTIONS": "5", "PENSTOCK__MQTT__PORT": "1884"}
    assert from_environment(given) == {}
    assert "PENSTOCK__C2S_SERVER__LIMITS__MAX_CONECTIONS" in caplog.text
    assert "MQTT" not in caplog.text
