"""``penstock channels serve``: the channel server as a command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import emit_json, ignore_early_hangups, stderr
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from penstock.channels.wire import ChannelServerOptions

__all__ = ["add_working_folder", "serve"]


def serve(
    data: Annotated[str | None, typer.Option(help="Where channels are kept; made if absent.", metavar="DIR")] = None,
    bind: Annotated[str | None, typer.Option(help="The address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[
        int | None, typer.Option(help="The TLS port; 0 picks a free one, -1 none [default: 22622].", metavar="N")
    ] = None,
    plain_port: Annotated[int | None, typer.Option(help="A port without TLS; 0 picks a free one.", metavar="N")] = None,
    socket: Annotated[str | None, typer.Option(help="A unix socket, without TLS.", metavar="PATH")] = None,
    config: Annotated[str | None, typer.Option(help="A TOML file, as the original has it.", metavar="FILE")] = None,
    sync: Annotated[str | None, typer.Option(help="none, interval or always [default: always].")] = None,
    modulator: Annotated[
        str | None, typer.Option(help="Who decides about logins and messages.", metavar="module:Class")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Say in one line of JSON when the server is ready.")] = False,
) -> None:
    """Serve channels to clients until SIGTERM or SIGINT.

    SIGHUP loads certificates and the modulator again.
    """
    ignore_early_hangups()
    from penstock.channels.wire.config import load_config, modulator_class, options_of, text_of

    found = load_config(config, os.environ)
    given = {"bind_address": bind, "plain_port": plain_port, "socket_path": socket, "sync": sync}
    more: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if sync not in (None, "none", "interval", "always"):
        raise OptionsError(f"--sync {sync}: none, interval or always")
    if port is not None:
        more["port"] = None if port < 0 else port
    _set_logging(found)
    options = options_of(found, **more)
    folder = data or text_of(found, "c2s-server.storage.data_dir") or "./data"
    named = modulator or modulator_class(found)
    from penstock.net import run

    run(_serve(folder, options, named, as_json=json))


async def _serve(folder: str, options: ChannelServerOptions, modulator: str | None, *, as_json: bool) -> None:
    import asyncio
    import resource
    import signal

    from penstock.channels.wire import ChannelServer

    add_working_folder()
    server = ChannelServer(folder, options, modulator=modulator)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def reload() -> None:
        for problem in server.reload():
            stderr.print(problem)

    loop.add_signal_handler(signal.SIGHUP, reload)
    most, files = options.wire.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < most:  # those above it are closed without a word, to them and to us
        stderr.print(f"max_connections={most}, but this process may open no more than {files} files (ulimit -n)")
    await server.start()
    if as_json:
        emit_json({"event": "ready", "listeners": server.addresses})
    else:
        for name, address in server.addresses.items():
            stderr.print(f"{name} on {address}")
    await stop.wait()
    await server.stop()


def add_working_folder() -> None:
    """Let modules be found in the folder where a server is started, behind all that is installed."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _set_logging(config: dict[str, Any]) -> None:
    """Log as ``[telemetry.logging]`` says."""
    import logging

    from penstock.node.serve import set_up_logging

    levels = {"trace": "DEBUG", "debug": "DEBUG", "info": "INFO", "warn": "WARNING", "warning": "WARNING",
              "error": "ERROR", "off": "CRITICAL"}  # fmt: skip
    level, form = config.get("telemetry.logging.level", "info"), config.get("telemetry.logging.format", "text")
    if str(level).lower() not in levels:
        raise OptionsError(f"telemetry.logging.level={level!r}: trace, debug, info, warn or error")
    if form not in ("text", "json"):
        raise OptionsError(f"telemetry.logging.format={form!r}: text or json")
    set_up_logging(form)
    logging.getLogger("penstock").setLevel(levels[level.lower()])
