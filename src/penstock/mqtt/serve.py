"""Run a broker until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from penstock.mqtt.server import MqttServer, ServerOptions

__all__ = ["serve"]

DRAIN_SECONDS = 5.0


async def serve(
    options: ServerOptions,
    data: str | None,
    ready: Callable[[MqttServer], None],
    complain: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads passwords, rules and certificates again."""
    server = MqttServer(options, data=data)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def reload() -> None:
        for problem in server.reload():
            complain(problem)

    await server.start()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        loop.add_signal_handler(signal.SIGHUP, reload)
        await server.ready()
        ready(server)
        await ended.wait()
        await server.drain(DRAIN_SECONDS)
    finally:
        await server.stop()
