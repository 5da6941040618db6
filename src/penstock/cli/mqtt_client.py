"""``penstock mqtt pub``, ``sub``, ``passwd`` and ``scram``, with the habits of mosquitto's commands."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import PROBLEM, JsonOption, emit_json, emit_lines, stderr
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from penstock.cli.mqtt_work import Where

__all__ = ["register"]

Host = Annotated[str, typer.Option("-h", "--host", help="Where the broker is, or a whole address such as wss://….")]
Port = Annotated[int | None, typer.Option("-p", "--port", help="Its port.  [default: 1883, with TLS 8883]")]
Unix = Annotated[str | None, typer.Option("--unix", help="Connect to a unix socket.", metavar="PATH")]
Name = Annotated[str, typer.Option("-i", "--id", help="Client id; given by the broker unless said.")]
Version = Annotated[str, typer.Option("-V", "--protocol-version", help="mqttv5, mqttv311 or mqttv31; 5, 4 or 3.")]
KeepAlive = Annotated[int, typer.Option("-k", "--keepalive", help="Seconds.", min=0, max=65535)]
User = Annotated[str | None, typer.Option("-u", "--username", help="Who logs in.")]
Password = Annotated[str | None, typer.Option("-P", "--pw", help="Seen by whoever lists processes: -P - asks.")]
CaFile = Annotated[str | None, typer.Option("--cafile", help="Believe this CA; makes it TLS.", metavar="FILE")]
Cert = Annotated[str | None, typer.Option("--cert", help="Our own certificate.", metavar="FILE")]
Key = Annotated[str | None, typer.Option("--key", help="Its key.", metavar="FILE")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do not look at the name in the broker's certificate.")]
Qos = Annotated[int, typer.Option("-q", "--qos", help="At most once, at least once, exactly once.", min=0, max=2)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Examples: penstock mqtt pub -t plant/7 -m 12 -q 1;  seq 9 | penstock mqtt pub -t plant/7 -l")(
        pub
    )
    app.command(epilog="Examples: penstock mqtt sub -t 'plant/#' -v;  penstock mqtt sub -t '#' -C 10 --json")(sub)
    app.command(epilog="Examples: penstock mqtt passwd users ann;  penstock mqtt passwd users pump-7 --token")(passwd)
    app.command(epilog="Example: penstock mqtt scram ann >> broker.toml   (below [scram])")(scram)


def pub(
    topic: Annotated[str, typer.Option("-t", "--topic", help="The topic.")],
    message: Annotated[str | None, typer.Option("-m", "--message", help="The message.")] = None,
    lines: Annotated[bool, typer.Option("-l", "--stdin-line", help="A message for each line of stdin.")] = False,
    file: Annotated[str | None, typer.Option("-f", "--file", help="A file is the message.", metavar="FILE")] = None,
    whole: Annotated[bool, typer.Option("-s", "--stdin-file", help="All of stdin is the message.")] = False,
    null: Annotated[bool, typer.Option("-n", "--null-message", help="An empty message.")] = False,
    qos: Qos = 0,
    retain: Annotated[bool, typer.Option("-r", "--retain", help="The broker keeps it for later subscribers.")] = False,
    repeat: Annotated[int, typer.Option("--repeat", help="Send it so often.", min=1)] = 1,
    host: Host = "localhost",
    port: Port = None,
    unix: Unix = None,
    client_id: Name = "",
    version: Version = "mqttv5",
    keep_alive: KeepAlive = 60,
    user: User = None,
    password: Password = None,
    cafile: CaFile = None,
    cert: Cert = None,
    key: Key = None,
    insecure: Insecure = False,
    json: JsonOption = False,
) -> None:
    """Publish messages.

    It returns when the broker has them (QoS 1 and 2).
    """
    from penstock.cli.mqtt_work import publish
    from penstock.net.loop import run

    given = [message is not None, lines, file is not None, whole, null]
    if sum(given) != 1:
        raise OptionsError("what is to be published: one of -m, -l, -f, -s and -n")
    where = _where(host, port, unix, client_id, version, keep_alive, user, password, cafile, cert, key, insecure)
    if file is not None:
        with open(file, "rb") as opened:
            payload = opened.read()
    elif whole:
        payload = sys.stdin.buffer.read()
    else:
        payload = (message or "").encode("utf-8", "surrogateescape")
    count = run(publish(where, topic, None if lines else [payload] * repeat, qos, retain))
    if json:
        emit_json({"published": count})


def sub(
    topics: Annotated[list[str], typer.Option("-t", "--topic", help="A filter; may be given many times.")],
    count: Annotated[int | None, typer.Option("-C", "--count", help="Leave after so many messages.", min=1)] = None,
    seconds: Annotated[
        float | None, typer.Option("-W", "--timeout", help="Leave after so many seconds.", min=0)
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print the topic before each message.")] = False,
    format: Annotated[
        str | None,
        typer.Option("-F", "--format", help="%t topic, %p payload, %q QoS, %r retain, %l length, %x hex, %j JSON, …"),
    ] = None,
    no_newline: Annotated[bool, typer.Option("-N", "--no-eol", help="No line break after a message.")] = False,
    live: Annotated[bool, typer.Option("-R", "--no-retained", help="Leave out what was retained before.")] = False,
    qos: Qos = 0,
    keep_session: Annotated[
        bool, typer.Option("-c", "--disable-clean-session", help="Go on with the session of this --id.")
    ] = False,
    expiry: Annotated[int, typer.Option("-x", "--session-expiry", help="Seconds the session is kept.", min=0)] = 0,
    host: Host = "localhost",
    port: Port = None,
    unix: Unix = None,
    client_id: Name = "",
    version: Version = "mqttv5",
    keep_alive: KeepAlive = 60,
    user: User = None,
    password: Password = None,
    cafile: CaFile = None,
    cert: Cert = None,
    key: Key = None,
    insecure: Insecure = False,
    json: JsonOption = False,
) -> None:
    """Print messages as they come, until -C, -W or an interrupt."""
    from penstock.cli.mqtt_work import Printer, subscribe
    from penstock.net.loop import run

    if keep_session and not client_id:
        raise OptionsError("-c needs --id: there is nothing else to know the session by")
    where = _where(host, port, unix, client_id, version, keep_alive, user, password, cafile, cert, key, insecure)
    where.keep_session, where.session_expiry = keep_session, expiry or (0xFFFFFFFF if keep_session else 0)
    printer = Printer(json=json, verbose=verbose, format=format, newline=not no_newline, live=live)
    problem = run(subscribe(where, topics, qos, count, seconds, printer))
    if problem:
        stderr.print(problem)
        raise typer.Exit(PROBLEM)


def passwd(
    file: Annotated[str, typer.Argument(help="The password file; made if it is not there.", metavar="FILE")],
    user: Annotated[str, typer.Argument(help="The name that logs in.", metavar="USER")],
    password: Annotated[str | None, typer.Argument(help="With -b.", metavar="PASSWORD")] = None,
    batch: Annotated[bool, typer.Option("-b", help="The password is the third word; others can see it.")] = False,
    create: Annotated[bool, typer.Option("-c", help="Begin with an empty file, whatever is there.")] = False,
    delete: Annotated[bool, typer.Option("-D", help="Take the user out.")] = False,
    token: Annotated[bool, typer.Option("--token", help="Make a long random password, print it once.")] = False,
    json: JsonOption = False,
) -> None:
    """Set or delete the password of a user.

    The file is made if it is not there, and holds argon2 hashes only.

    A password file of mosquitto may be given; other lines stay as they are.
    """
    import os

    from penstock.net.credentials import change_credentials, hash_password, hash_token, new_token

    if create and delete:
        raise OptionsError("-c and -D exclude each other")
    if batch != (password is not None) or sum((batch, delete, token)) > 1:
        raise OptionsError("a password is given with -b and only then; -b, -D and --token exclude each other")
    if delete and not os.path.exists(file):
        raise OptionsError(f"{file}: No such file or directory")
    made = new_token() if token else None
    if delete:
        stored = None
    elif made is not None:
        stored = hash_token(made)
    else:
        secret = password if password is not None else typer.prompt("Password", hide_input=True, err=True)
        if password is None and typer.prompt("Again", hide_input=True, err=True) != secret:
            raise OptionsError("the two passwords differ")
        stored = hash_password(secret)
    was_there = change_credentials(file, user, stored, fresh=create)
    if delete and not was_there:
        raise OptionsError(f"{file}: there is no user {user}")
    if json:
        emit_json({"user": user, "replaced": was_there, **({"token": made} if made else {})})
    elif made is not None:
        emit_lines([f"{made}\n".encode()])


def scram(
    user: Annotated[str, typer.Argument(help="The name that logs in.", metavar="USER")],
    password: Annotated[str | None, typer.Argument(help="With -b.", metavar="PASSWORD")] = None,
    batch: Annotated[bool, typer.Option("-b", help="The password is the second word; others can see it.")] = False,
    iterations: Annotated[
        int, typer.Option("--iterations", help="How dear a guess is.", min=4096, max=2**31 - 1)
    ] = 4096,
    json: JsonOption = False,
) -> None:
    """Print what [scram] of a configuration holds for a user.

    The password cannot be got back from it; clients log in with SCRAM-SHA-256.
    """
    from penstock.mqtt.scram import make_verifier

    if batch != (password is not None):
        raise OptionsError("a password is given with -b and only then")
    secret = password if password is not None else typer.prompt("Password", hide_input=True, err=True)
    if password is None and typer.prompt("Again", hide_input=True, err=True) != secret:
        raise OptionsError("the two passwords differ")
    verifier = str(make_verifier(secret, iterations=iterations))
    if json:
        emit_json({"user": user, "verifier": verifier})
    else:
        emit_lines([f'{_toml_key(user)} = "{verifier}"\n'.encode()])


def _toml_key(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    if not name.isprintable():
        raise OptionsError(f"{name!r}: a user name is printable")
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


_VERSIONS = {"mqttv5": 5, "mqttv311": 4, "mqttv31": 3, "5": 5, "4": 4, "311": 4, "3": 3, "31": 3}


def _where(
    host: str,
    port: int | None,
    unix: str | None,
    client_id: str,
    version: str,
    keep_alive: int,
    user: str | None,
    password: str | None,
    cafile: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
) -> Where:
    from penstock.cli.mqtt_work import Where

    if version not in _VERSIONS:
        raise OptionsError(f"-V {version}: must be one of {', '.join(_VERSIONS)}")
    if password == "-":  # noqa: S105
        password = typer.prompt("Password", hide_input=True, err=True)
    return Where(
        host=host,
        port=port,
        unix=unix,
        client_id=client_id,
        version=_VERSIONS[version],
        keep_alive=keep_alive,
        user=user,
        password=password,
        cafile=cafile,
        cert=cert,
        key=key,
        insecure=insecure,
    )
