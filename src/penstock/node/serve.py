"""Run a node until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.node.config import NodeConfig
from penstock.node.node import Node
from penstock.shown import PlainFormatter, json_line

__all__ = ["serve", "set_up_logging"]

_log = logging.getLogger("penstock.node")

WATCHDOG: Final = "WATCHDOG_USEC"


async def serve(
    config: NodeConfig,
    ready: Callable[[Node], None],
    reread: Callable[[], NodeConfig] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP takes over what ``reread`` returns, all of it or nothing."""
    os.umask(0o077)  # what it makes is its user's
    node = Node(config)
    loop, started, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    async def reload() -> None:
        try:
            await started.wait()
            notify("RELOADING=1")
            problems = await node.reload(None if reread is None else reread())
        except Exception as exc:  # noqa: BLE001 - whatever it is, the node goes on as it was and people are told
            problems = [str(exc) if isinstance(exc, PenstockError | OSError) else f"{type(exc).__name__}: {exc}"]
        if problems:  # in one record: every reason is said, however many there are
            _log.error("nothing was changed: %s", "; ".join(line for one in problems for line in one.splitlines()))
        else:
            _log.info("configuration, passwords, rules and certificates were read again")
        notify("READY=1")

    reloads: set[asyncio.Task[None]] = set()

    def hang_up() -> None:
        task = loop.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    starting, leaving = asyncio.ensure_future(node.start()), asyncio.ensure_future(ended.wait())
    watchdog: asyncio.Task[None] | None = None
    try:
        await asyncio.wait([starting, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # told to end before everything had started
            return
        await starting
        ready(node)
        notify("READY=1")
        started.set()
        if WATCHDOG in os.environ:
            watchdog = asyncio.create_task(_feed_watchdog(int(os.environ[WATCHDOG]) / 1e6))
        await leaving
    finally:
        notify("STOPPING=1")
        for task in (starting, leaving, watchdog, *reloads):
            if task is not None:
                task.cancel()
        await asyncio.gather(starting, leaving, *reloads, return_exceptions=True)
        if starting.cancelled() or starting.exception() is None:  # else nothing was started
            await node.stop()


async def _feed_watchdog(seconds: float) -> None:
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / 3)


def notify(state: str) -> None:
    """Tell systemd, where it started us (``Type=notify``); elsewhere this does nothing.

    >>> notify("READY=1")
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as door:
        try:
            door.sendto(state.encode(), address)
        except OSError as exc:
            _log.warning("systemd was not told %s: %s", state, exc)


class JsonLines(logging.Formatter):
    """A log record as one JSON object a line.

    >>> record = logging.LogRecord("penstock.node", logging.INFO, "", 0, "part %s serves", ("mqtt",), None)
    >>> import msgspec
    >>> msgspec.json.decode(JsonLines().format(record))["message"]
    'part mqtt serves'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        fields: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_line(fields).decode().removesuffix("\n")


class RateLimit(logging.Filter):
    """Lets a message of one place through at most ten times a second, and says how many it held back.

    >>> RateLimit().filter(logging.LogRecord("a", logging.INFO, "f.py", 1, "hello", (), None))
    True
    """

    MOST = 10

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[int, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this one is written."""
        place, second = (record.pathname, record.lineno), int(record.created)
        when, count, held = self._seen.get(place, (second, 0, 0))
        if when != second:
            when, count = second, 0
        if count >= self.MOST:
            self._seen[place] = when, count, held + 1
            return False
        if held:
            record.msg, record.args = f"{record.getMessage()} ({held} more like it were held back)", ()
        self._seen[place] = when, count + 1, 0
        return True


def set_up_logging(format: str) -> None:
    """Send what the package logs to stderr, as text or as JSON; payloads are in none of it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if format == "json" else PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    handler.addFilter(RateLimit())
    logger = logging.getLogger("penstock")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
