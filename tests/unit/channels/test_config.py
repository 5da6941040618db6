"""Promise: the configuration of the original means here what it means there."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.channels.wire.config import from_environment, options_of
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
