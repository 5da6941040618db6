"""The node from the shell: serve, init, check, config, health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import (
    PROBLEM,
    JsonOption,
    emit_json,
    emit_lines,
    emit_text,
    ignore_early_hangups,
    say_problem,
    stderr,
    stdout,
)
from penstock.errors import NotFoundError, OptionsError

if TYPE_CHECKING:
    from penstock.node.config import NodeConfig
    from penstock.node.node import Node

__all__ = ["register"]

ConfigOption = Annotated[str | None, typer.Option("--config", help="The configuration, TOML.", metavar="FILE")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example: penstock serve --data ./penstock-data")(serve)
    app.command(epilog="Example: penstock init && penstock check penstock.toml")(init)
    app.command(epilog="Example: penstock check penstock.toml --against /etc/penstock/penstock.toml")(check)
    app.command(epilog="Example: penstock config --effective --config penstock.toml")(config)
    app.command(epilog="Example: penstock health || systemctl restart penstock")(health)


def serve(
    config: ConfigOption = None,
    data: Annotated[str | None, typer.Option(help="Where everything is kept.", metavar="DIR")] = None,
    bind: Annotated[str | None, typer.Option(help="Address all listeners use; loopback unless said.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of MQTT; 0 picks a free one.  [default: 1883]")] = None,
    channels_port: Annotated[
        int | None, typer.Option(help="Port of the channel server; TLS.  [default: 22622]")
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP.  [default: 8780]")] = None,
    sync: Annotated[
        str | None, typer.Option(help="When what is acknowledged survives a power cut: none, interval or always.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a node until SIGTERM or SIGINT.

    It serves what a configuration names; without one MQTT, channels, ingest and HTTP on loopback.

    SIGHUP reads the configuration, passwords, rules and certificates again. /readyz says whether it can take work.
    """
    ignore_early_hangups()
    from penstock.cli.channels_serve import add_working_folder
    from penstock.net.loop import run
    from penstock.node.config import load_config
    from penstock.node.serve import serve as run_node, set_up_logging

    add_working_folder()

    given: dict[str, Any] = {
        "data": data, "mqtt.bind": bind, "channels.bind": bind, "http.bind": bind,
        "mqtt.port": port, "channels.port": channels_port, "http.port": http_port,
        "mqtt.persistence.sync": sync, "channels.sync": sync,
    }  # fmt: skip
    overrides = {key: value for key, value in given.items() if value is not None}
    loaded = _load(config, overrides)
    set_up_logging(loaded.log_format)

    def ready(node: Node) -> None:
        if json:
            emit_json({"event": "ready", "listeners": node.addresses, "failures": node.failures})
            return
        if loaded.log_format == "json":
            return  # its log says it, and has nothing but JSON in it
        for name, address in node.addresses.items():
            stderr.print(f"{name} on {address}")
        for name, reason in node.failures.items():
            say_problem(f"part {name} does not serve: {reason}")

    run(run_node(loaded, ready, lambda: load_config(config, overrides)))


def _load(path: str | None, overrides: dict[str, Any] | None = None) -> NodeConfig:
    """Return the configuration; each mistake of it is a line, and together they end the command."""
    from penstock.node.config import load_config

    try:
        return load_config(path, overrides)
    except NotFoundError:
        raise
    except OptionsError as exc:
        for line in str(exc).splitlines():
            say_problem(line)
        raise typer.Exit(2) from None


def init(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it.")] = "penstock.toml",
) -> None:
    """Write a configuration to begin with.

    It has every key, its default and what it is for.
    """
    from penstock.disk.plain import create_private
    from penstock.node.template import TEMPLATE

    try:
        with create_private(path) as file:
            file.write(TEMPLATE.encode())
    except FileExistsError:
        raise OptionsError(f"{path}: there is one already; it is left as it is") from None
    stderr.print(f"{path} written", soft_wrap=True)


def check(
    path: Annotated[str, typer.Argument(metavar="FILE", help="The configuration.")] = "penstock.toml",
    against: Annotated[
        str | None, typer.Option(help="The configuration of a running node: say what would change.", metavar="FILE")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain every mistake of a configuration.

    With its line; exit code 1 if there is one.  A file that it names and that cannot be read is one, too.
    """
    from penstock.disk.plain import read_small
    from penstock.node.config import changes, check_config, check_files

    try:
        text = read_small(path).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise OptionsError(f"{path}: {getattr(exc, 'strerror', None) or exc}") from None
    found, mistakes = check_config(text)
    if found is not None:
        mistakes = check_files(text, found)
    differences = [] if against is None or found is None else changes(_load(against), found)
    if json:
        emit_json({"path": path, "ok": not mistakes, "mistakes": mistakes, "changes": differences})
    else:
        emit_text(f"{path}: {mistake}" for mistake in mistakes)
        emit_text(differences)
        if not mistakes:
            stderr.print(f"{path}: no mistake found", soft_wrap=True)
    if mistakes:
        raise typer.Exit(PROBLEM)


def config(
    config: ConfigOption = None,
    effective: Annotated[bool, typer.Option("--effective", help="Every value in force, defaults too.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the configuration in force.

    What differs from the defaults, or with --effective everything; secrets are hidden.
    """
    from penstock.node.config import NodeConfig, differing, effective_config

    found = effective_config(_load(config))
    if not effective:
        found = differing(found, effective_config(NodeConfig()))
    if json:
        emit_json(found)
        return
    import tomli_w

    emit_lines(tomli_w.dumps(found).encode().splitlines(keepends=True))


def health(
    address: Annotated[
        str, typer.Option("--http", help="Where the node's HTTP listens.", metavar="HOST:PORT")
    ] = "127.0.0.1:8780",
    token: Annotated[str | None, typer.Option(envvar="PENSTOCK_TOKEN", help="For a node that asks for one.")] = None,
    json: JsonOption = False,
) -> None:
    """Ask a running node how it is.

    Exit code 0 if it is ready, 1 if not.
    """
    from penstock.cli.ledger import ask_node

    found = ask_node(address, "/api/health", token, "ready", "reason", "parts")
    if json:
        emit_json(found)
    else:
        wide = max(map(len, found["parts"]), default=0)
        for name, state in found["parts"].items():
            stdout.print(f"{name:{wide}}  {state}")
        stdout.print("ready" if found["ready"] else f"not ready: {found['reason']}")
    if not found["ready"]:
        raise typer.Exit(PROBLEM)
