"""``penstock mqtt``: the broker and questions to a running one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import mqtt_client, mqtt_feed
from penstock.cli.output import JsonOption, emit_json, ignore_early_hangups, print_facts, say_problem, stderr, stdout
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.mqtt.server import MqttServer, ServerOptions

__all__ = ["register", "app"]

app = typer.Typer(
    no_args_is_help=True,
    help="The MQTT broker, and questions to a running one.",
    epilog="Example: penstock mqtt sub -t 'plant/#' -v",
)
sessions = typer.Typer(
    no_args_is_help=True,
    help="Sessions of a running broker.",
    epilog="Example: penstock mqtt sessions ls --data broker --json",
)
app.add_typer(sessions, name="sessions")
mqtt_client.register(app)
mqtt_feed.register(app)

ClientArgument = Annotated[str, typer.Argument(help="The id of a client.", metavar="CLIENT")]
DataOption = Annotated[str, typer.Option("--data", help="The data directory of the broker.", metavar="DIR")]


def register(parent: typer.Typer) -> None:
    """Add the commands."""
    parent.add_typer(app, name="mqtt")


@app.command(epilog="Example: penstock mqtt serve --data state --tap 'plant/#=data/readings' --port 1883")
def serve(
    data: Annotated[str | None, typer.Option(help="Where the broker keeps its state.", metavar="DIR")] = None,
    bind: Annotated[str | None, typer.Option(help="Address to listen on; loopback unless said.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.  [default: 1883]")] = None,
    ws_port: Annotated[int | None, typer.Option(help="Port for WebSocket.")] = None,
    tls_port: Annotated[int | None, typer.Option(help="Port for TLS.")] = None,
    wss_port: Annotated[int | None, typer.Option(help="Port for WebSocket over TLS.")] = None,
    cert: Annotated[str | None, typer.Option(help="Certificate, PEM.", metavar="FILE")] = None,
    key: Annotated[str | None, typer.Option(help="Its key, PEM.", metavar="FILE")] = None,
    dev_cert: Annotated[
        bool, typer.Option("--dev-cert", help="TLS with a certificate made for this machine, kept in --data.")
    ] = False,
    passwords: Annotated[str | None, typer.Option(help="Password file.", metavar="FILE")] = None,
    acl: Annotated[str | None, typer.Option(help="ACL file.", metavar="FILE")] = None,
    sync: Annotated[
        str | None,
        typer.Option(help="When a change survives a power cut: none, interval or always.  [default: interval]"),
    ] = None,
    tap: Annotated[
        list[str] | None,
        typer.Option(help="Copy what a filter matches into a log; may be given many times.", metavar="FILTER=PATH"),
    ] = None,
    config: Annotated[str | None, typer.Option(help="Configuration, TOML.", metavar="FILE")] = None,
    json: JsonOption = False,
) -> None:
    """Serve MQTT 3.1, 3.1.1 and 5.0 until SIGTERM or SIGINT.

    With --data its state outlives it, also a kill -9.  SIGHUP reads passwords, rules and certificates again.
    """
    ignore_early_hangups()
    from penstock.mqtt.serve import serve as run_server
    from penstock.net.loop import run

    given: dict[str, Any] = {
        "bind": bind, "port": port, "ws_port": ws_port, "tls_port": tls_port, "wss_port": wss_port,
        "cert": cert, "key": key, "passwords": passwords, "acl": acl, "development_certificate": dev_cert or None,
    }  # fmt: skip
    options = _options(config, {name: value for name, value in given.items() if value is not None}, sync, tap or [])

    def ready(server: MqttServer) -> None:
        kept = server.kept
        if kept is None:
            stderr.print("state is in memory: sessions, queues and retained messages end with this process")
        else:
            for problem in kept.problems:
                say_problem(str(problem))
            facts = kept.facts
            stderr.print(
                f"{kept.folder}: {facts['sessions']} sessions, {facts['subscriptions']} subscriptions, "
                f"{facts['retained']} retained, {facts['queued']} queued, restored in {facts['seconds']:g} s; "
                f"sync {kept.options.sync}"
            )
        if json:
            emit_json({"event": "ready", "listeners": server.addresses})
        else:
            for name, address in server.addresses.items():
                stderr.print(f"{name} on {address}")

    run(run_server(options, data, ready, say_problem))


def _options(
    config: str | None, given: dict[str, Any], sync: str | None = None, taps: Sequence[str] = ()
) -> ServerOptions:
    import os
    import tomllib

    import msgspec

    from penstock.disk.plain import parse_toml, read_small
    from penstock.mqtt.server import ServerOptions
    from penstock.mqtt.tapspec import TapSpec

    table: dict[str, Any] = {}
    if config is not None:
        try:
            table = parse_toml(read_small(config).decode(), config)
        except OSError as exc:
            raise OptionsError(f"{config}: {exc.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise OptionsError(f"{config}: {exc}") from None
    persistence = table.get("persistence", {})
    if isinstance(persistence, dict):
        persistence = persistence | _from_environment(os.environ) | ({} if sync is None else {"sync": sync})
        if persistence:
            table["persistence"] = persistence
    try:
        options = msgspec.convert({**table, **given}, ServerOptions)
    except msgspec.ValidationError as exc:
        raise OptionsError(f"{config or 'options'}: {exc}") from None
    if taps:
        more = tuple(TapSpec.parse(text) for text in taps)
        options = msgspec.structs.replace(options, taps=(*options.taps, *more))
    return options


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what the environment says about persistence, under mqlite's names.

    >>> _from_environment({"MQLITE__PERSISTENCE__ENABLED": "true", "MQLITE__PERSISTENCE__PATH": "/var/lib/broker"})
    {'enabled': True, 'path': '/var/lib/broker'}
    """
    found: dict[str, Any] = {}
    for name, read in (("enabled", _truth), ("path", str), ("sync_interval_secs", float)):
        value = environment.get(f"MQLITE__PERSISTENCE__{name.upper()}")
        if value is None:
            continue
        try:
            found[name] = read(value)
        except ValueError:
            raise OptionsError(f"MQLITE__PERSISTENCE__{name.upper()}={value!r}: not what belongs there") from None
    return found


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")


@app.command(epilog="Example: penstock mqtt explain plant/7 --data broker --client pump-7")
def explain(
    topic: Annotated[str, typer.Argument(help="The topic of a message.", metavar="TOPIC")],
    data: DataOption,
    client: Annotated[str | None, typer.Option(help="Only this client.", metavar="ID")] = None,
    json: JsonOption = False,
) -> None:
    """Say who gets a message of a topic, who does not, and why."""
    found = _ask(data, do="explain", topic=topic, client=client)
    if json:
        emit_json(found)
        return
    if not found["sessions"]:
        stdout.print(f"no session matches {topic}" if client is None else f"there is no session {client}")
    for each in found["sessions"]:
        stdout.print(f"{each['client']}: {each['now']}: {each['why']}")
        for name in each["filters"]:
            stdout.print(f"    by {name}")
        if client is not None:
            stdout.print(f"    its own publishes there: {each['publish']}")
        for drop in each["dropped"]:
            stdout.print(f"    {drop['count']} dropped {drop['seconds_ago']:g} s ago: {drop['reason']}")


@sessions.command("ls", epilog="Example: penstock mqtt sessions ls --data broker --json")
def list_sessions(data: DataOption, json: JsonOption = False) -> None:
    """List all sessions."""
    from rich.table import Table

    found = _ask(data, do="sessions")
    if json:
        for each in found:
            emit_json(each)
        return
    table = Table("client", "connected", "user", "subscriptions", "queued", "inflight", "dropped", box=None)
    for each in found:
        names = ("connected", "user", "subscriptions", "queued", "inflight", "dropped")
        table.add_row(each["client"], *("-" if each[name] is None else str(each[name]) for name in names))
    stdout.print(table)


@sessions.command("show", epilog="Example: penstock mqtt sessions show pump-7 --data broker --json")
def show_session(client: ClientArgument, data: DataOption, json: JsonOption = False) -> None:
    """Show one session: subscriptions, what waits, what was dropped and why."""
    found = _ask(data, do="session", client=client)
    if json:
        emit_json(found)
    else:
        print_facts({name: "-" if value in (None, [], {}) else str(value) for name, value in found.items()})


@sessions.command("kick", epilog="Example: penstock mqtt sessions kick pump-7 --data broker --end")
def kick_session(
    client: ClientArgument,
    data: DataOption,
    end: Annotated[bool, typer.Option("--end", help="Forget the session as well.")] = False,
) -> None:
    """Disconnect a client."""
    _ask(data, do="kick", client=client, end=end)


def _ask(data: str, **question: Any) -> Any:
    import os

    from penstock.mqtt.control import SOCKET, Question, ask

    return ask(os.path.join(data, SOCKET), Question(**question))


@app.command(epilog="Example: penstock mqtt backup --data broker backups/monday")
def backup(
    out: Annotated[str, typer.Argument(help="A folder that is empty or not there.", metavar="OUT")],
    data: DataOption,
    json: JsonOption = False,
) -> None:
    """Copy what a running broker keeps, while it goes on.

    The copy is of one turn; it is read as a start would read it, and compared with what the broker held then.
    """
    import os

    from penstock.mqtt.control import SOCKET, Question, ask
    from penstock.mqtt.state_backup import verify

    question = Question(do="backup", path=os.path.abspath(out))
    found = ask(os.path.join(data, SOCKET), question, seconds=3600)
    verify(out)
    _tell_backup(found, json, f"{out}: ")


@app.command(epilog="Example: penstock mqtt restore backups/monday --data broker")
def restore(
    source: Annotated[str, typer.Argument(help="What penstock mqtt backup made.", metavar="BACKUP")],
    data: DataOption,
    json: JsonOption = False,
) -> None:
    """Put a backup into a data directory.

    It is opened and compared before this ends.
    """
    import msgspec

    from penstock.mqtt.state_backup import put_back

    _tell_backup(msgspec.to_builtins(put_back(source, data)), json, f"{data}: ")


def _tell_backup(found: dict[str, Any], json: bool, where: str) -> None:
    if json:
        emit_json(found)
        return
    names = ("sessions", "subscriptions", "retained", "queued")
    stdout.print(where + ", ".join(f"{found[name]} {name}" for name in names) + f"; digest {found['digest'][:16]}")
