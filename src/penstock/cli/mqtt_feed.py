"""``penstock mqtt feed``: publish the records of a log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import PROBLEM, JsonOption, emit_json, stderr
from penstock.errors import OptionsError

if TYPE_CHECKING:
    from penstock.mqtt.feed import FeedSpec

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: penstock mqtt feed data/alerts --to mqtt://localhost --topic 'alerts/{key}' --retain")(
        feed
    )


def feed(
    log: Annotated[str, typer.Argument(help="The log; one that is not there yet is waited for.", metavar="LOG")],
    to: Annotated[str, typer.Option(help="The broker: mqtt://, mqtts://, ws://, wss:// or unix:.", metavar="URL")],
    topic: Annotated[str, typer.Option(help="Text with {key} and {client}; for a log without keys just text.")] = (
        "{key}"
    ),
    qos: Annotated[
        int | None, typer.Option("-q", "--qos", min=0, max=2, help="Unless said what a record says.")
    ] = None,
    retain: Annotated[
        bool | None, typer.Option("-r/-R", "--retain/--no-retain", help="Unless said what a record says.")
    ] = None,
    cursor: Annotated[str, typer.Option(help="The name of the cursor; it is kept beside the log.")] = "mqtt-feed",
    start: Annotated[
        str, typer.Option("--from", help="earliest or latest, where there is no cursor yet.")
    ] = "earliest",
    once: Annotated[bool, typer.Option("--once", help="End when everything that is there now was taken.")] = False,
    version: Annotated[str, typer.Option("-V", "--protocol-version", help="5 or 3.1.1.")] = "5",
    client_id: Annotated[str, typer.Option("-i", "--id", help="Client id; given by the broker unless said.")] = "",
    user: Annotated[str | None, typer.Option("-u", "--username", help="Who logs in.")] = None,
    password_file: Annotated[
        str | None, typer.Option("--pw-file", help="Its first line is the password.", metavar="FILE")
    ] = None,
    cafile: Annotated[str | None, typer.Option("--cafile", help="Believe this CA.", metavar="FILE")] = None,
    cert: Annotated[str | None, typer.Option("--cert", help="Our own certificate.", metavar="FILE")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Its key.", metavar="FILE")] = None,
    json: JsonOption = False,
) -> None:
    """Publish the records of a log, as they come, until an interrupt.

    A cursor beside the log moves when the broker has acknowledged what was read, so another start goes on from there.
    """
    import msgspec

    from penstock.mqtt.feed import FeedSpec
    from penstock.net.loop import run

    remote = {
        "url": to, "version": version, "client_id": client_id, "username": user, "password_file": password_file,
        "ca": cafile, "cert": cert, "key": key,
    }  # fmt: skip
    given = {"log": log, "topic": topic, "qos": qos, "retain": retain, "cursor": cursor, "start": start, "to": remote}
    try:
        spec = msgspec.convert(given, FeedSpec)
    except msgspec.ValidationError as exc:
        raise OptionsError(str(exc)) from None
    about = run(_feed(spec, once))
    if json:
        emit_json(about)
    else:
        stderr.print(f"{about['published']} published, the cursor is at {about['position']}")
    if about["passed"]:
        for reason, count in about["passed"].items():
            stderr.print(f"{count} passed over: {reason}")
        raise typer.Exit(PROBLEM)


async def _feed(spec: FeedSpec, once: bool) -> dict[str, Any]:
    import asyncio
    import signal

    from penstock.mqtt.feed import Feed

    feed = Feed(spec)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await feed.start()
    waits = [asyncio.create_task(ended.wait()), asyncio.create_task(feed.wait())]
    if once:
        waits.append(asyncio.create_task(feed.caught_up()))
    told = ""
    try:
        while True:
            done, _ = await asyncio.wait(waits, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            reason = feed.health().reason
            if reason and reason != told:
                stderr.print(f"penstock: {reason}; it is tried again")
            told = reason
        await feed.drain(5.0)
    finally:
        for wait in waits:
            wait.cancel()
        await feed.stop()
        failed = [wait.exception() for wait in done if not wait.cancelled()]
        for exc in failed:
            if exc is not None:
                raise exc
    return feed.describe()
