"""What tests of MQTT share: a broker on this loop with every wire."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from penstock.mqtt.server import MqttServer, ServerOptions
from penstock.net import make_development_certificate


@contextlib.asynccontextmanager
async def broker(folder: Path, **options: Any) -> AsyncIterator[MqttServer]:
    """Serve on TCP, TLS, WebSocket, WebSocket over TLS and a unix socket."""
    files = make_development_certificate(str(folder))
    given: dict[str, Any] = dict.fromkeys(("port", "ws_port", "tls_port", "wss_port"), 0)
    given |= {"cert": files.certificate, "key": files.key, "unix": str(folder / "mqtt.sock")}
    server = MqttServer(ServerOptions(**{**given, **options}))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def trusted(folder: Path) -> ssl.SSLContext:
    """Return a context that believes the broker's certificate."""
    return ssl.create_default_context(cafile=str(folder / "development.pem"))


def address(server: MqttServer, wire: str) -> str:
    """Return where a wire is reached, as a client takes it."""
    place = server.addresses[wire]
    port = place.rpartition(":")[2]
    if wire == "unix":
        return place
    return f"{wire}://localhost:{port}" + ("/mqtt" if wire.startswith("ws") else "")
