"""Start a broker of ours where a script asks for mosquitto: as_mosquitto.py [-v] [-p PORT] [-c FILE]

What the configuration of mosquitto says is translated as far as there is such an option here; the rest is left out.
The test scripts take its defaults for granted: mosquitto.toml beside this file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUMBERS = {
    "max_keepalive": "max_keep_alive",
    "max_packet_size": "max_packet_bytes",
    "max_queued_messages": "max_queued_messages",
    "max_queued_bytes": "max_queued_bytes",
    "maximum_qos": "maximum_qos",
    "max_qos": "maximum_qos",
    "sys_interval": "sys_seconds",
}
FILES = {"password_file": "passwords", "acl_file": "acl", "certfile": "cert", "keyfile": "key", "cafile": "client_ca"}


def translate(text: str, port: int | None) -> tuple[dict[str, Any], str | None]:
    """Return the table of a configuration, and where state is to be kept."""
    table: dict[str, Any] = tomllib.loads((HERE / "mosquitto.toml").read_text())
    broker: dict[str, Any] = table.setdefault("broker", {})
    listeners: list[dict[str, str]] = []
    keeps, folder = False, "."
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        value = value.strip()
        last = listeners[-1] if listeners else None
        if name in ("listener", "port") and value:
            listeners.append({"port": value.split()[0]})
        elif name in ("certfile", "keyfile", "cafile", "protocol", "require_certificate", "enable_proxy_protocol"):
            if last is not None:
                last[name] = value
        elif name in FILES:
            table[FILES[name]] = value
        elif name in NUMBERS:
            broker[NUMBERS[name]] = int(value)
        elif name == "max_inflight_messages":
            broker["receive_maximum"] = broker["max_inflight"] = int(value) or 65535
        elif name == "max_connections":
            table["limits"] = {"max_connections": int(value)}
        elif name in ("allow_anonymous", "listener_allow_anonymous"):
            table["anonymous"] = value == "true"
        elif name == "retain_available":
            broker["retain_available"] = value == "true"
        elif name == "persistence":
            keeps = value == "true"
        elif name == "persistence_location":
            folder = value
    if listeners:  # who names a listener has to say that anonymous clients may come
        table.setdefault("anonymous", False)
    table["port"] = 0  # it cannot be left out
    for each in listeners or [{"port": str(port or 1883)}]:
        kind = ("wss_port" if "certfile" in each else "ws_port") if each.get("protocol") == "websockets" else (
            "tls_port" if "certfile" in each else "port"
        )  # fmt: skip
        table[kind] = int(each["port"])
        table.update({FILES[name]: each[name] for name in ("certfile", "keyfile", "cafile") if name in each})
        if each.get("require_certificate") == "true":
            table["require_client_certificate"] = True
        if "enable_proxy_protocol" in each:
            table["proxy"] = True
    return table, folder if keeps else None


def toml(table: dict[str, Any]) -> str:
    """Return a table of plain values and tables of them."""

    def value(each: Any) -> str:
        if isinstance(each, bool):
            return str(each).lower()
        return repr(each) if isinstance(each, int | float) else '"' + str(each).replace("\\", "\\\\") + '"'

    lines = [f"{name} = {value(each)}" for name, each in table.items() if not isinstance(each, dict)]
    for name, each in table.items():
        if isinstance(each, dict):
            lines += [f"[{name}]", *(f"{key} = {value(one)}" for key, one in each.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    words, port, config = sys.argv[1:], None, ""
    while words:
        word = words.pop(0)
        if word == "-p":
            port = int(words.pop(0))
        elif word == "-c":
            config = Path(words.pop(0)).read_text()
    table, folder = translate(config, port)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(toml(table))
    command = [sys.executable, "-m", "penstock.cli.main", "mqtt", "serve", "--config", file.name]
    if folder is not None:
        command += ["--data", os.path.join(folder, "penstock")]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
