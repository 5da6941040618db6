"""The configuration file of a channel server: the original's ``config.toml`` as it is, and what ours adds.

Durations are strings (``30s``, ``500ms``, ``2m``) or seconds.  A key that nobody knows is named in the log and changes
nothing.  ``PENSTOCK__C2S_SERVER__LIMITS__MAX_CONNECTIONS=5`` in the environment stands above the file: two underscores
between tables and keys, upper case, ``_`` for ``-``.
"""

from __future__ import annotations

import logging
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.channels.model import Limits
from penstock.channels.wire.options import ChannelServerOptions, ModulatorLink
from penstock.channels.wire.settings import WireSettings
from penstock.disk.plain import parse_toml, read_small
from penstock.errors import OptionsError

__all__ = ["load_config", "options_of", "from_environment", "modulator_class", "text_of"]

_log = logging.getLogger(__name__)

DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
DAY: Final = 86_400.0
UNITS: Final = {
    unit: seconds
    for names, seconds in (
        ("nanos nsec ns", 1e-9), ("micros usec us", 1e-6), ("millis msec ms", 1e-3), ("seconds second secs sec s", 1.0),
        ("minutes minute mins min m", 60.0), ("hours hour hrs hr h", 3600.0), ("days day d", DAY),
        ("weeks week wks wk w", 7 * DAY), ("months month M", 30.44 * DAY), ("years year yrs yr y", 365.25 * DAY),
    )
    for unit in names.split()
}  # fmt: skip
"""The words that the original takes for units."""
PREFIX: Final = "PENSTOCK__"
TAP: Final = "channels.tap."
METRICS_PORT: Final = 9090
OURS: Final = (PREFIX + "C2S_SERVER__", PREFIX + "MODULATOR__")
"""How variables begin that are meant for a channel server and for no other."""

WIRE: Final = {
    **{f"c2s-server.limits.{name}": name for name in (
        "max_connections", "max_message_size", "max_payload_size", "max_inflight_requests",
        "outbound_message_queue_size", "rate_limit")},
    **{f"c2s-server.{name}": name for name in (
        "connect_timeout", "authenticate_timeout", "keep_alive_interval", "min_keep_alive_interval", "request_timeout",
        "payload_read_timeout")},
}  # fmt: skip
KEPT: Final = {f"c2s-server.limits.{name}": name for name in Limits.__struct_fields__}
SERVER: Final = {
    "c2s-server.listener.domain": "domain",
    "c2s-server.listener.bind_address": "bind_address",
    "c2s-server.listener.port": "port",
    "c2s-server.listener.cert_file": "cert_file",
    "c2s-server.listener.key_file": "key_file",
    "c2s-server.listener.plain_port": "plain_port",
    "c2s-server.listener.socket_path": "socket_path",
    "c2s-server.storage.segment_bytes": "segment_bytes",
    "modulator.timeout": "modulator_timeout",
}
S2M: Final = {f"modulator.s2m-client.{name}": name for name in (
    "address", "socket_path", "shared_secret", "heartbeat_interval", "connect_timeout", "timeout",
    "backoff_initial_delay", "backoff_max_delay", "backoff_max_retries")}  # fmt: skip
M2S: Final = {
    "modulator.m2s-server.shared_secret": "m2s_secret",
    "modulator.m2s-server.listener.bind_address": "m2s_address",
    "modulator.m2s-server.listener.socket_path": "m2s_socket_path",
}
M2S_WIRE: Final = {
    **{f"modulator.m2s-server.limits.{name}": name for name in (
        "max_connections", "max_message_size", "max_payload_size", "max_inflight_requests", "rate_limit")},
    "modulator.m2s-server.limits.outgoing_message_queue_size": "outbound_message_queue_size",
    **{f"modulator.m2s-server.{name}": name for name in (
        "connect_timeout", "keep_alive_interval", "min_keep_alive_interval", "request_timeout",
        "payload_read_timeout")},
}  # fmt: skip
OTHERS: Final = frozenset({
    "c2s-server.storage.data_dir", "modulator.type", "modulator.class", "modulator.s2m-client.network",
    "modulator.m2s-server.listener.network", "modulator.s2m-client.max_idle_connections",
    "modulator.s2m-client.payload_read_timeout", "c2s-server.limits.payload_pool_memory_budget",
    "modulator.m2s-server.limits.payload_pool_memory_budget", "telemetry.logging.level", "telemetry.logging.format",
    "telemetry.metrics.enabled", "telemetry.metrics.bind_address", "telemetry.metrics.port",
})  # fmt: skip
"""Keys that are used elsewhere, or that only the original needs."""
TEXTS: Final = frozenset({
    "c2s-server.storage.data_dir", "modulator.type", "modulator.class", "modulator.s2m-client.network",
    "modulator.m2s-server.listener.network", "telemetry.logging.level", "telemetry.logging.format",
    "telemetry.metrics.bind_address",
    *(key for names, kind in ((SERVER, ChannelServerOptions), (S2M, ModulatorLink), (M2S, ModulatorLink))
      for key, name in names.items() if str(kind.__annotations__[name]).startswith("str")),
})  # fmt: skip
"""Keys whose value is text."""


def load_config(path: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file and the environment say: dotted key → value.

    >>> load_config(None, {"PENSTOCK__C2S_SERVER__LIMITS__RATE_LIMIT": "0"})
    {'c2s-server.limits.rate_limit': 0}
    """
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = dict(_flat(parse_toml(read_small(path).decode(), path)))
        except OSError as exc:
            raise OptionsError(f"{path}: {exc.strerror}") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise OptionsError(f"{path}: {exc}") from exc
    return found | from_environment(environment)


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys that the environment sets; values as TOML has them where text is not wanted, or else text.

    >>> from_environment({"PENSTOCK__C2S_SERVER__LISTENER__DOMAIN": "x.io"})
    {'c2s-server.listener.domain': 'x.io'}
    """
    known = {key.upper().replace("-", "_").replace(".", "__"): key for key in _known()}
    found: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        inner = name.removeprefix(PREFIX)
        key = known.get(inner)
        if key is None and inner.startswith("CHANNELS__TAP__"):
            key = "channels.tap." + inner.removeprefix("CHANNELS__TAP__").lower()
        if key is None:
            if name.startswith(OURS):  # others are perhaps those of another server of this machine
                _log.warning("the environment has %s, which is not known here", name)
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        is_text = key in TEXTS or key.startswith(TAP)
        found[key] = text if is_text and not isinstance(value, str) else value  # a secret of digits is one
    return found


def options_of(config: Mapping[str, Any], **more: Any) -> ChannelServerOptions:
    """Return the options of a server; ``more`` stands above the configuration.

    >>> options_of({"c2s-server.connect_timeout": "500ms"}).wire.connect_timeout
    0.5
    """
    for key in config:
        if key not in _known() and not key.startswith(TAP):
            _log.warning("the configuration has %s, which is not known here", key)
    wire = _taken(config, WIRE, WireSettings)
    limits = _taken(config, KEPT, Limits)
    given = _taken(config, SERVER, ChannelServerOptions)
    given |= {"limits": Limits(**limits), "wire": WireSettings(**wire)}
    if config.get("modulator.type", "") not in ("", "s2m", "python"):
        raise OptionsError(f"modulator.type={config['modulator.type']!r}: none, s2m or python")
    if config.get("modulator.type") == "s2m":
        link = _taken(config, S2M, ModulatorLink) | _taken(config, M2S, ModulatorLink)
        for network, address, path in (
            ("modulator.s2m-client.network", "address", "socket_path"),
            ("modulator.m2s-server.listener.network", "m2s_address", "m2s_socket_path"),
        ):
            kind = config.get(network, "unix" if not link.get(address) else "tcp")
            if kind not in ("tcp", "unix"):
                raise OptionsError(f"{network}={kind!r}: tcp or unix")
            link.pop(path if kind == "tcp" else address, None)
        base = ModulatorLink().m2s
        link["m2s"] = WireSettings(**{
            **{name: getattr(base, name) for name in base.__struct_fields__}, **_taken(config, M2S_WIRE, WireSettings)
        })  # fmt: skip
        given["modulator"] = ModulatorLink(**link)
    taps = {
        key.removeprefix("channels.tap."): value for key, value in config.items() if key.startswith("channels.tap.")
    }
    if taps:
        given["tap"] = taps
    metrics = {key.rpartition(".")[2]: value for key, value in config.items() if key.startswith("telemetry.metrics.")}
    if metrics and _typed(config, "telemetry.metrics.enabled", bool, True):
        host = text_of(config, "telemetry.metrics.bind_address") or "127.0.0.1"
        given["metrics_address"] = f"{host}:{_typed(config, 'telemetry.metrics.port', int, METRICS_PORT)}"
    return ChannelServerOptions(**{**given, **more})


def modulator_class(config: Mapping[str, Any]) -> str | None:
    """Return the class that ``[modulator] type = "python"`` names, None where it names none.

    One that is named and would not be asked is refused: its server would let everybody in.

    >>> modulator_class({"modulator.type": "python"})
    Traceback (most recent call last):
    penstock.errors.OptionsError: modulator.type='python': give modulator.class as well, as module:Class
    """
    named, kind = text_of(config, "modulator.class"), config.get("modulator.type", "")
    if kind == "python" and not named:
        raise OptionsError("modulator.type='python': give modulator.class as well, as module:Class")
    if named and kind != "python":
        raise OptionsError(f"modulator.class={named!r}: give modulator.type='python' as well")
    return named


def text_of(config: Mapping[str, Any], key: str) -> str | None:
    """Return the text of a key, None where it is not set.

    >>> text_of({"c2s-server.storage.data_dir": "data"}, "c2s-server.storage.data_dir")
    'data'
    """
    found: str | None = _typed(config, key, str, None)
    return found


def _known() -> frozenset[str]:
    return OTHERS | WIRE.keys() | KEPT.keys() | SERVER.keys() | S2M.keys() | M2S.keys() | M2S_WIRE.keys()


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _taken(config: Mapping[str, Any], names: Mapping[str, str], kind: Any) -> dict[str, Any]:
    """Return the values of some keys by the names of a struct's fields, as its types want them."""
    found = {}
    for key, name in names.items():
        if key not in config:
            continue
        value, wanted = config[key], str(kind.__annotations__[name])
        if "float" in wanted:
            value = _seconds(key, value)
        elif "int" in wanted and (not isinstance(value, int) or isinstance(value, bool)):
            raise OptionsError(f"{key}={value!r}: a whole number is wanted")
        elif wanted.startswith("str") and not isinstance(value, str):
            shown = "" if "secret" in key else f"={value!r}"
            raise OptionsError(f"{key}{shown}: text is wanted")
        found[name] = value
    return found


def _typed(config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return the value of a key that is not a field of a struct."""
    value = config.get(key, default)
    if value is not default and type(value) is not kind:
        wanted = {str: "text", int: "a whole number", bool: "true or false"}[kind]
        raise OptionsError(f"{key}={value!r}: {wanted} is wanted")
    return value


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    total, at = 0.0, 0
    text = str(value).rstrip()
    while at < len(text) or not text:
        part = DURATION.match(text, at)
        if part is None or part[2] not in UNITS:
            raise OptionsError(f"{key}={value!r}: a duration such as 30s or 500ms is wanted")
        total += float(part[1]) * UNITS[part[2]]
        at = part.end()
    return total
