"""Commands that talk to a channel server: join, broadcast, listen, history, push, pop, members, config, acl."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.output import JsonOption, emit_json, emit_lines, stderr
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from penstock.channels import Client

__all__ = ["register_use"]

VARIABLE: Final = "PENSTOCK_TOKEN"
"""The variable that has the token of whoever gives neither a name nor a token."""
Channel = Annotated[str, typer.Argument(help="The channel: ops/east or !ops/east@domain.", metavar="CHANNEL")]
Server = Annotated[
    str,
    typer.Option(help="host:port (TLS), plain://host:port or unix:PATH.", envvar="PENSTOCK_CHANNELS", metavar="ADDR"),
]
User = Annotated[str | None, typer.Option(help="The name to go by, where the server takes names.")]
Token = Annotated[
    str | None,
    typer.Option(help=f"The token to log in with [env var: {VARIABLE}]; user:password is turned into one."),
]
Ca = Annotated[str | None, typer.Option(help="PEM of who signs for the server.", metavar="FILE")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Believe any certificate.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the channel; repeatable.", metavar="NAME=VALUE")
]
HERE = "127.0.0.1:22622"


def register_use(group: typer.Typer) -> None:
    """Add the commands to ``penstock channels``."""
    for command in (join, broadcast, listen, history, push, pop, members, config, acl):
        group.command(epilog=EPILOGS[command.__name__])(command)


EPILOGS = {
    "join": "Example: penstock channels join ops/east --set persist=true --token ann:s3cret",
    "broadcast": "Example: penstock channels broadcast ops/east 'pump 7 is on' --user ann --insecure",
    "listen": "Example: penstock channels listen ops/east --user bob --insecure --json",
    "history": "Example: penstock channels history ops/east --token ann:s3cret --limit 10 --json",
    "push": "Example: penstock channels push jobs 'mend pump 7' --token ann:s3cret",
    "pop": "Example: penstock channels pop jobs --token ann:s3cret",
    "members": "Example: penstock channels members ops/east --token ann:s3cret --json",
    "config": "Example: penstock channels config ops/east --set persist=true --token ann:s3cret",
    "acl": "Example: penstock channels acl ops/east read --add bob@localhost --token ann:s3cret",
}


def join(
    channel: Channel, set: Settings = None, server: Server = HERE, user: User = None, token: Token = None,
    ca: Ca = None, insecure: Insecure = False, json: JsonOption = False,
) -> None:  # fmt: skip
    """Become a member of a channel, or make one.

    A member stays one after the command where the server authenticates and the channel is kept: --set persist=true.
    """
    changes = dict(map(_setting, set or ()))

    async def work(client: Client) -> None:
        await client.join(channel)
        if changes:
            await client.configure(channel, **changes)
        _say(json, {"joined": channel, "nid": client.nid})

    _with_client(work, server, user, token, ca, insecure=insecure)


def broadcast(
    channel: Channel,
    payload: Annotated[
        str | None, typer.Argument(help="The message; without it one a line from stdin.", metavar="PAYLOAD")
    ] = None,
    server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None, insecure: Insecure = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Broadcast a message, or every line of stdin.

    Lines go as they come. The numbers are printed.
    """

    async def work(client: Client) -> None:
        from penstock.errors import Refused

        try:
            await client.join(channel)
        except Refused as exc:
            if exc.reason != "USER_IN_CHANNEL":
                raise
        most = client.server["max_inflight_requests"] or 1  # so many are answered together
        async for payloads in _given(payload):
            for start in range(0, len(payloads), most):  # what went well is told although what follows may not
                for seq in await client.broadcast_many(channel, payloads[start : start + most]):
                    _say(json, {"seq": seq})

    _with_client(work, server, user, token, ca, insecure=insecure)


def listen(
    channel: Channel,
    limit: Annotated[int | None, typer.Option(min=1, help="Leave after so many messages.", metavar="N")] = None,
    from_seq: Annotated[
        int | None, typer.Option("--from", min=1, help="Begin with this number, from the history.")
    ] = None,
    server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None, insecure: Insecure = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Print what a channel says, as it says it.

    It goes on over lost connections, and ends with exit code 1 when the channel does.
    """

    async def work(client: Client) -> None:
        from penstock.channels.wire import Gap, Heard, HeardEvent
        from penstock.errors import ClosedError, Refused

        name = client._name(channel)
        try:
            await client.join(channel)
        except Refused as exc:
            if exc.reason != "USER_IN_CHANNEL":
                raise
        told = 0
        async for item in client.news():
            if isinstance(item, Gap) and item.channel == name:
                stderr.print(f"{name}: messages from {item.first_seq} to {item.last_seq or '?'} were missed for good")
            if isinstance(item, Heard) and item.channel == name:
                _print_message(json, item.seq, item.timestamp, item.sender, item.payload)
                told += 1
                if told == limit:
                    return
            if isinstance(item, HeardEvent) and item.channel == name:
                if item.kind == "CHANNEL_DELETED":
                    raise ClosedError(f"{name} was deleted")
                if item.kind == "MEMBER_LEFT" and item.nid == client.nid:
                    raise ClosedError(f"{client.nid} is no member of {name} any more")
        raise ClosedError(f"{server}: {client.closed_reason}")

    seen = {channel: from_seq - 1} if from_seq else {}
    _with_client(work, server, user, token, ca, insecure=insecure, seen=seen)


def history(
    channel: Channel,
    from_seq: Annotated[int, typer.Option("--from", min=1, help="The first number.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="At the most so many.")] = 100,
    server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None, insecure: Insecure = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Print stored messages of a channel."""

    async def work(client: Client) -> None:
        left, begin = limit, from_seq
        while left > 0:
            found = await client.history(channel, begin, left)
            for item in found:
                _print_message(json, item.seq, item.timestamp, item.sender, item.payload)
            if not found:
                return
            left, begin = left - len(found), found[-1].seq + 1

    _with_client(work, server, user, token, ca, insecure=insecure)


def push(
    channel: Channel,
    payload: Annotated[
        str | None, typer.Argument(help="The element; without it one a line from stdin.", metavar="PAYLOAD")
    ] = None,
    server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None, insecure: Insecure = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Put elements at the end of a queue.

    Without one, every line of stdin is an element, as it comes.
    """

    async def work(client: Client) -> None:
        count = 0
        try:
            async for elements in _given(payload):
                for element in elements:
                    await client.push(channel, element)
                    count += 1
        finally:  # who is interrupted is told how far it came
            if count or payload is None:
                _say(json, {"pushed": count})

    _with_client(work, server, user, token, ca, insecure=insecure)


def pop(
    channel: Channel,
    limit: Annotated[int, typer.Option(min=1, help="At the most so many.")] = 1,
    server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None, insecure: Insecure = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Take elements from the head of a queue.

    Exit code 1 when it is empty.
    """

    async def work(client: Client) -> None:
        for _ in range(limit):
            payload = await client.pop(channel)
            if json:
                emit_json(_payload_fields(payload))
            else:
                emit_lines([payload + b"\n"])

    _with_client(work, server, user, token, ca, insecure=insecure)


def members(
    channel: Channel, server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None,
    insecure: Insecure = False, json: JsonOption = False,
) -> None:  # fmt: skip
    """List the members of a channel."""

    async def work(client: Client) -> None:
        found = await client.members(channel)
        if json:
            emit_json({"members": found})
        else:
            emit_lines([f"{nid}\n".encode() for nid in found])

    _with_client(work, server, user, token, ca, insecure=insecure)


def config(
    channel: Channel, set: Settings = None, server: Server = HERE, user: User = None, token: Token = None,
    ca: Ca = None, insecure: Insecure = False, json: JsonOption = False,
) -> None:  # fmt: skip
    """Show or change the settings of a channel.

    A channel that is not there is made when settings are given; with persist=true it stays.
    """
    changes = dict(map(_setting, set or ()))

    async def work(client: Client) -> None:
        from penstock.errors import Refused

        if changes:
            try:
                await client.configure(channel, **changes)
            except Refused as exc:
                if exc.reason != "CHANNEL_NOT_FOUND":
                    raise
                await client.join(channel)
                await client.configure(channel, **changes)
        _say(json, await client.config(channel))

    _with_client(work, server, user, token, ca, insecure=insecure)


def acl(
    channel: Channel,
    kind: Annotated[str, typer.Argument(help="join, publish or read.", metavar="KIND")],
    add: Annotated[
        list[str] | None, typer.Option(help="ann@localhost, or a whole domain; repeatable.", metavar="NID")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(help="ann@localhost, or a domain; repeatable.", metavar="NID")
    ] = None,
    server: Server = HERE, user: User = None, token: Token = None, ca: Ca = None, insecure: Insecure = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Show or change an allow-list of a channel.

    An empty one allows everybody.
    """
    if kind not in ("join", "publish", "read"):
        raise OptionsError(f"{kind}: join, publish or read")

    async def work(client: Client) -> None:
        if add:
            await client.allow(channel, kind, add)  # type: ignore[arg-type]
        if remove:
            await client.disallow(channel, kind, remove)  # type: ignore[arg-type]
        _say(json, {"type": kind, "nids": await client.allowed(channel, kind)})  # type: ignore[arg-type]

    _with_client(work, server, user, token, ca, insecure=insecure)


# --- What they have in common


def _with_client(
    work: Callable[[Client], Awaitable[None]],
    server: str,
    user: str | None,
    token: str | None,
    ca: str | None,
    *,
    insecure: bool,
    seen: dict[str, int] | None = None,
) -> None:
    from penstock.channels import Client
    from penstock.net import run

    if user is not None and token is not None:
        raise OptionsError("give --user or --token: a server takes one of them")
    if user is None:
        token = token or os.environ.get(VARIABLE) or None
    if user is None and token is None:
        raise OptionsError("give --user, or --token where the server authenticates")
    if token is not None and ":" in token:
        name, _, password = token.partition(":")
        token = base64.b64encode(f"\0{name}\0{password}".encode()).decode()

    async def main() -> None:
        client = Client(server, username=user, token=token, ca=ca, verify=not insecure)
        for channel, last in (seen or {}).items():
            client.seen[channel] = last
        await client.open()
        try:
            await work(client)
        finally:
            await client.close()

    run(main())


async def _given(payload: str | None) -> AsyncIterator[list[bytes]]:
    """Yield the message of the command line, or the lines of stdin as they come; empty lines are none."""
    if payload is not None:
        yield [os.fsencode(payload)]
        return
    from penstock.cli.lines import lines_of_stdin

    async for lines in lines_of_stdin():
        if filled := [line for line in lines if line]:
            yield filled


def _setting(text: str) -> tuple[str, Any]:
    """Return a setting and its value.

    >>> _setting("persist=true"), _setting("max_clients=7"), _setting("type=fifo")
    (('persist', True), ('max_clients', 7), ('type', 'fifo'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionsError(f"--set {text}: write it as NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    if value.isascii() and value.isdecimal() and len(value) < 20:
        return name, int(value)
    return name, value


def _payload_fields(payload: bytes) -> dict[str, str]:
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def _print_message(as_json: bool, seq: int, timestamp: int, sender: str, payload: bytes) -> None:
    if as_json:
        emit_json({"seq": seq, "timestamp_ns": timestamp * 1_000_000, "from": sender, **_payload_fields(payload)})
    else:
        emit_lines([f"{seq} {sender}: ".encode() + payload + b"\n"])


def _say(as_json: bool, facts: dict[str, Any]) -> None:
    if as_json:
        emit_json(facts)
    else:
        emit_lines([" ".join(f"{name}={_text(value)}" for name, value in facts.items()).encode() + b"\n"])


def _text(value: Any) -> str:
    """Return a value as it is given to a command.

    >>> _text(True), _text([]), _text(["ann@localhost", "example.com"])
    ('true', '-', 'ann@localhost,example.com')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(value) or "-"
    return str(value)
