"""Promise: the configuration of the original means here what it means there."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.channels.wire.config import from_environment, modulator_class, options_of, text_of
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
