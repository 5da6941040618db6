"""The ledger and the live screen of a node from the shell."""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any

import typer

from penstock.cli.output import PROBLEM, JsonOption, emit_json, fail, stdout
from penstock.errors import NotConnected, OptionsError, ProtocolError, RetryError
from penstock.shown import UNSAFE

__all__ = ["register", "ask_node"]

HttpOption = Annotated[str, typer.Option("--http", help="Where the node's HTTP listens.", metavar="HOST:PORT")]
TokenOption = Annotated[str | None, typer.Option(envvar="PENSTOCK_TOKEN", help="For a node that asks for one.")]
MOST_BYTES = 64 << 20
MOST_SAID = 500
"""Characters that are shown of an answer that is an error: it may be the page of another server."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example: penstock ledger ./penstock-data --since 24h --json")(ledger)
    app.command(epilog="Example: penstock top --http 127.0.0.1:8780")(top)


def ledger(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data directory of a node.")] = "./penstock-data",
    since: Annotated[
        str | None, typer.Option(help="Only from that hour on: 24h, 7d, or a time as 2026-01-31T14.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Account for every record at every seam.

    What came is what went on, what waits, or what was lost for a stated reason. Exit code 1 if it does not add up.

    It reads logs, cursors and stores, whether the node runs or not, and changes nothing.
    """
    import time

    import msgspec

    from penstock.node.ledger import read_ledger
    from penstock.node.version import require_node

    begin = None if since is None else _since(since, time.time_ns())
    require_node(data)
    counts = read_ledger(data, begin)
    if json:
        for one in counts:
            emit_json(msgspec.structs.asdict(one))
    else:
        stdout.print(f"{'seam':28}{'came':>12}{'went':>12}{'waiting':>10}{'lost':>8}", highlight=False)
        for one in counts:
            lost = sum(one.lost.values())
            mark = "" if one.ok else "  does not add up"
            stdout.print(
                f"{one.seam:28}{one.came:12}{one.went:12}{one.waiting:10}{lost:8}{mark}",
                highlight=False,
                soft_wrap=True,
            )
            for text in (*(f"{count} lost: {reason}" for reason, count in one.lost.items()), one.note, one.alarm):
                if text:
                    stdout.print(f"    {text}", highlight=False, markup=False, soft_wrap=True)
    if not all(one.ok for one in counts):
        raise typer.Exit(PROBLEM)


def _since(text: str, now_ns: int) -> int:
    """Return a moment: so long ago, or a time in UTC.

    >>> _since("2h", 3 * 3600 * 10**9) == 3600 * 10**9
    True
    """
    import datetime as dt

    if found := re.fullmatch(r"([0-9]{1,15})([smhd])", text):
        return now_ns - int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]] * 10**9
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise OptionsError(f"--since {text}: give 24h, 7d, or a time as 2026-01-31T14") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return int(moment.timestamp() * 1e9)


def ask_node(address: str, path: str, token: str | None, *names: str) -> Any:
    """Return the answer of a node's API, an object with these ``names``; what is wrong ends the command."""
    import http.client

    import msgspec

    from penstock.net.hosts import check_address

    host, _, number = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,18}", number):
        raise OptionsError(f"--http {address}: must be HOST:PORT")
    host, port = host.strip("[]") or "127.0.0.1", int(number)
    check_address(host, port)
    if token is not None and UNSAFE.search(token):
        raise OptionsError("--token: it has characters that no header can")
    headers = {"Authorization": b"Bearer " + token.encode()} if token else {}
    try:
        connection = http.client.HTTPConnection(host, port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as exc:
        raise NotConnected(f"{address}: no node answers ({exc})") from None
    if answer.status != 200:
        said = body.decode(errors="replace").strip()[:MOST_SAID]
        fail(f"{address}: {said or answer.reason}", 2 if answer.status == 401 else PROBLEM)
    try:
        found = msgspec.json.decode(body)
        if not names or (isinstance(found, dict) and found.keys() >= set(names)):
            return found
    except (msgspec.MsgspecError, RecursionError):
        pass
    raise ProtocolError(address, path, "this is not what a node answers")


def top(
    address: HttpOption = "127.0.0.1:8780",
    token: TokenOption = None,
    seconds: Annotated[float, typer.Option(help="Time between two looks.", min=0.2)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    json: JsonOption = False,
) -> None:
    """Watch a node: its parts, its seams, its disk.

    With time to full, and time to loss for each consumer and absent session. Ctrl-C leaves.
    """
    import time

    def look() -> dict[str, Any]:
        return {
            "parts": ask_node(address, "/api/parts", token, "parts")["parts"],
            "disk": ask_node(address, "/api/disk", token),
            "ledger": ask_node(address, "/api/ledger", token),
        }

    if json:
        while True:
            emit_json(look())
            if once:
                return
            time.sleep(seconds)
    if once:
        stdout.print(_screen(look(), address))
        return
    from rich.live import Live

    first = _screen(look(), address)
    try:
        with Live(first, console=stdout, screen=stdout.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                try:
                    live.update(_screen(look(), address), refresh=True)
                except RetryError as exc:  # it is being started again, maybe
                    live.update(f"{exc}; looking again …", refresh=True)
    except KeyboardInterrupt:
        return


def _screen(found: dict[str, Any], address: str) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    disk = found["disk"]
    parts = Table("part", "state", "restarts", "", title=f"node on {address}", title_justify="left", box=None)
    for name, part in found["parts"].items():
        parts.add_row(name, part["state"], str(part["restarts"]), part["reason"])
    seams = Table("seam", "came", "went", "waiting", "lost", "", box=None)
    for seam in found["ledger"]:
        lost = sum(seam["lost"].values())
        ok = "" if seam["ok"] else "does not add up"
        numbers = [f"{number:,}" for number in (seam["came"], seam["went"], seam["waiting"], lost)]
        seams.add_row(seam["seam"], *numbers, ok)
    fills = Table("channel", "records", "of", "time to full", box=None)
    for one in disk.get("channels", []):
        fills.add_row(one["channel"], f"{one['records']:,}", f"{one['limit']:,}", span(one["seconds"]))
    losses = Table("consumer", "behind", "time to loss", box=None)
    for one in disk.get("consumers", []):
        losses.add_row(f"{one['channel']} {one['consumer']}", f"{one['behind']:,}", span(one["seconds"]))
    for one in disk.get("sessions", []):
        losses.add_row(f"session {one['session']}", f"{one['queued']:,}", span(one["seconds"]))
    used = Text("")
    if disk:
        used = Text(
            f"disk {disk['level']}: {disk['used_bytes'] / 1e6:,.1f} of {disk['budget_bytes'] / 1e6:,.1f} MB, "
            f"full {'in ' if disk['full_seconds'] is not None else ''}{span(disk['full_seconds'])}"
        )
    return Group(parts, used, seams, *([fills] if fills.row_count else []), losses)


def span(seconds: float | None) -> str:
    """Return a time for people.

    >>> span(None), span(42.0), span(7300)
    ('never', '42 s', '2.0 h')
    """
    if seconds is None:
        return "never"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
