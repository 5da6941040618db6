"""What a node is told: one file, one struct.  Everything has a default, so an empty file is a node that serves."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.disk.plain import read_small
from penstock.errors import NotFoundError, OptionsError, without_secrets
from penstock.mqtt.server import ATTACHED, RELOADED_LIMITS
from penstock.node.mistakes import Mistake, check_table, read_table
from penstock.node.options import NodeConfig

__all__ = [
    "NodeConfig",
    "load_config",
    "check_config",
    "check_files",
    "effective_config",
    "hide_secrets",
    "changes",
    "needs_restart",
]

SECRETS: Final = ("token", "password")
SECRET_TABLES: Final = ("scram",)
"""Tables whose every value is one."""
HIDDEN: Final = "(hidden)"
RESTART: Final = "needs a restart"
NAMES: Final = ("name", "channel", "key", "fold")
"""What the tables of a list are told apart by: the first of these that one has."""


def check_config(text: str, environment: Mapping[str, str] | None = None) -> tuple[NodeConfig | None, list[Mistake]]:
    r"""Return the configuration, or every mistake in it.

    >>> [mistake.line for mistake in check_config("[mqtt]\nport = 70000\nprot = 1\n")[1]]
    [2, 3]
    """
    table, mistakes = read_table(text, os.environ if environment is None else environment)
    mistakes += check_table(table, NodeConfig)
    if mistakes:
        return None, sorted(mistakes)
    return msgspec.convert(table.values, NodeConfig), []


def check_files(text: str, config: NodeConfig) -> list[Mistake]:
    r"""Return the files that a configuration names and that cannot be read: the part that needs one would not start.

    >>> text = "[mqtt]\npasswords = '/not/there'\n"
    >>> [str(one) for one in check_files(text, check_config(text, {})[0])]
    ['line 2: mqtt.passwords: /not/there: No such file or directory']
    """
    table, _ = read_table(text, os.environ)
    named: list[tuple[tuple[str | int, ...], str | None]] = []
    mistakes = []
    if os.path.lexists(config.data) and not os.path.isdir(config.data):
        mistakes.append(table.mistake(("data",), f"{config.data}: Not a directory"))
    if config.mqtt.enabled:
        named += [
            (("mqtt", key), getattr(config.mqtt, key)) for key in ("cert", "key", "client_ca", "passwords", "acl")
        ]
        for number, bridge in enumerate(config.mqtt.bridges):
            keys = ("password_file", "ca", "cert", "key")
            named += [(("mqtt", "bridges", number, "remote", key), getattr(bridge.remote, key)) for key in keys]
    if config.channels.enabled:
        named += [(("channels", key), getattr(config.channels, key)) for key in ("cert", "key")]
    for path, file in named:
        if file:
            try:
                read_small(file)
            except OSError as exc:
                mistakes.append(table.mistake(path, f"{file}: {exc.strerror or exc}"))
    return sorted(mistakes)


def load_config(path: str | None, overrides: Mapping[str, Any] | None = None) -> NodeConfig:
    """Return the configuration of a file (of none: the defaults) and the environment; OptionsError names every mistake.

    ``overrides`` are dotted keys from a command line.

    >>> load_config(None, {"mqtt.port": 0}).mqtt.port
    0
    """
    text = ""
    if path is not None:
        try:
            text = read_small(path).decode()
        except FileNotFoundError:
            raise NotFoundError(f"{path}: there is no such configuration; penstock init writes one") from None
        except (OSError, UnicodeDecodeError) as exc:
            raise OptionsError(f"{path}: {getattr(exc, 'strerror', None) or exc}") from None
    table, mistakes = read_table(text, os.environ)
    for key, value in (overrides or {}).items():
        *names, last = key.split(".")
        values = table.values
        for name in names:
            values = values.setdefault(name, {})
            if not isinstance(values, dict):
                break  # a mistake, which is said below
        else:
            values[last] = value
    mistakes += check_table(table, NodeConfig)
    if mistakes:
        raise OptionsError("\n".join(f"{path or 'configuration'}: {mistake}" for mistake in sorted(mistakes)))
    return msgspec.convert(table.values, NodeConfig)


def effective_config(config: NodeConfig) -> dict[str, Any]:
    """Return every value in force, ready for TOML or JSON; secrets are not shown.

    >>> from penstock.node.options import HttpOptions
    >>> effective_config(NodeConfig(http=HttpOptions(token="x")))["http"]["token"]
    '(hidden)'
    """
    found: dict[str, Any] = hide_secrets(msgspec.to_builtins(config))
    return found


def hide_secrets(value: Any, name: str = "") -> Any:
    """Return what is ready for JSON without its secrets, by the names they go by, and without those of addresses.

    >>> hide_secrets({"password": "x", "urls": ["mqtt://me:x@hub"]})
    {'password': '(hidden)', 'urls': ['mqtt://hub']}
    """
    if isinstance(value, dict):
        return {
            key: HIDDEN if item and name in SECRET_TABLES else hide_secrets(item, key)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [hide_secrets(item, name) for item in value]
    if value and name in SECRETS:
        return HIDDEN
    return without_secrets(value) if isinstance(value, str) else value


def changes(running: NodeConfig, wanted: NodeConfig) -> list[str]:
    """Return, a line a key, what going from one configuration to the other does to a running node.

    What passwords, rules and certificates files contain is read again on SIGHUP and is no part of this.

    >>> changes(NodeConfig(), NodeConfig(data="elsewhere"))
    ['data: ./penstock-data → elsewhere  (needs a restart)']
    """
    before, after = _flat(effective_config(running)), _flat(effective_config(wanted))
    return [
        f"{key}: {before.get(key, '-')} → {after.get(key, '-')}  ({_effect(key)})" for key in _differ(running, wanted)
    ]


def needs_restart(running: NodeConfig, wanted: NodeConfig) -> list[str]:
    """Return the keys that differ and that a running node cannot take over.

    >>> needs_restart(NodeConfig(), NodeConfig(data="elsewhere", drain_seconds=3))
    ['data']
    """
    return [key for key in _differ(running, wanted) if _effect(key) == RESTART]


def _differ(running: NodeConfig, wanted: NodeConfig) -> list[str]:
    before, after = _flat(msgspec.to_builtins(running)), _flat(msgspec.to_builtins(wanted))
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def _effect(key: str) -> str:
    table, _, name = re.sub(r"\[.*", "", key).partition(".")
    limits = name.startswith("limits.") or name.removeprefix("broker.") in RELOADED_LIMITS
    if table in ("fold", "ship", "meeting", "channel", "export"):
        return "on SIGHUP: parts are started, stopped or started again"
    if table == "mqtt" and name in ATTACHED:
        return "on SIGHUP: what changed is ended, what is new begins"
    if key == "drain_seconds" or table in ("disk", "ledger") or (table == "mqtt" and limits):
        return "on SIGHUP"
    return RESTART


def differing(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return what of a configuration is no default.

    >>> differing({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 2}})
    {'b': {'d': 3}}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            inner = differing(value, defaults.get(name, {}))
            if inner:
                found[name] = inner
        elif value != defaults.get(name):
            found[name] = value
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and their values; a table of a list goes by its name, or by its number where it has none.

    >>> _flat({"a": {"b": 1}, "fold": [{"name": "x", "log": "l"}], "c": [1, 2]})
    {'a.b': 1, 'fold[x].name': 'x', 'fold[x].log': 'l', 'c': [1, 2]}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            names = [next((item[key] for key in NAMES if item.get(key)), "") for item in value]
            for number, item in enumerate(value):
                label = names[number] if names[number] and names.count(names[number]) == 1 else number
                found.update(_flat(item, f"{prefix}{name}[{label}]."))
        else:
            found[prefix + name] = value
    return found
