"""The small HTTP server of a node: health, metrics, and what there is to say, read only.

One request, one answer, GET and HEAD only.  It is for probes, scrapers and a console on the same machine; whatever
faces the world stands behind a proxy that was made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from penstock.lifecycle import Health, State
from penstock.node.options import HttpOptions

__all__ = ["HttpAnswer", "HttpServer", "Route"]

_log = logging.getLogger("penstock.node")

HEAD_BYTES: Final = 16 << 10
HEAD_SECONDS: Final = 10.0
MOST_CONNECTIONS: Final = 64


class HttpAnswer(msgspec.Struct, frozen=True):
    """What a route says.

    >>> HttpAnswer.json({"ok": True}).body
    b'{"ok":true}'
    """

    body: bytes
    type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def json(cls, value: Any, status: HTTPStatus = HTTPStatus.OK) -> HttpAnswer:
        """Return a value as JSON."""
        return cls(msgspec.json.encode(value), "application/json", status)


Route = Callable[[], Awaitable[HttpAnswer]]


class HttpServer:
    """Serves routes by their exact path; a part (penstock.lifecycle).

    >>> async def demo():
    ...     server = HttpServer(HttpOptions(port=0), {})
    ...     await server.start(); address = server.addresses["http"]; await server.stop()
    ...     return address.partition(":")[0]
    >>> asyncio.run(demo())
    '127.0.0.1'
    """

    name = "http"

    def __init__(self, options: HttpOptions, routes: Mapping[str, Route], ports: dict[str, int] | None = None) -> None:
        self._options, self._routes = options, dict(routes)
        self._ports = {} if ports is None else ports
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._stopped = asyncio.Event()
        self._state = State.NEW
        self.addresses: dict[str, str] = {}

    async def start(self) -> None:
        """Open the listener."""
        options = self._options
        self._state = State.STARTING
        port = options.port or self._ports.get("http", 0)
        self._server = await asyncio.start_server(self._serve, options.bind, port, limit=HEAD_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        self._ports["http"] = port
        self.addresses = {"http": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
        if host not in ("127.0.0.1", "::1"):
            _log.warning("http listens on %s: health, metrics and the API can be read from other machines", host)
        self._state = State.READY

    async def ready(self) -> None:
        """Return at once: ``start`` has opened everything."""

    async def drain(self, seconds: float) -> None:
        """Answer on: whoever asks for health while the node drains is told so."""

    async def stop(self) -> None:
        """Close the listener and what is open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._state = State.STOPPED
        self._stopped.set()

    async def wait(self) -> None:
        """Return when it has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is."""
        return Health(self._state)

    def describe(self) -> dict[str, Any]:
        """Return where it listens."""
        return {"listeners": self.addresses}

    # --- One connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > MOST_CONNECTIONS:
                writer.write(
                    _encode(HttpAnswer(b"too many connections\n", status=HTTPStatus.SERVICE_UNAVAILABLE), head=False)
                )
            else:
                async with asyncio.timeout(HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
            await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(
                _encode(HttpAnswer(b"too long\n", status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), head=False)
            )
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _encode(HttpAnswer(b"not HTTP\n", status=HTTPStatus.BAD_REQUEST), head=False)
        method, path = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _encode(HttpAnswer(b"only GET\n", status=HTTPStatus.METHOD_NOT_ALLOWED), head=False)
        route = self._routes.get(path)
        if route is None:
            return _encode(HttpAnswer(b"not found\n", status=HTTPStatus.NOT_FOUND), head=method == "HEAD")
        if path.startswith("/api") and not self._allowed(lines[1:]):
            return _encode(HttpAnswer(b"a token is needed\n", status=HTTPStatus.UNAUTHORIZED), head=method == "HEAD")
        try:
            answer = await route()
        except Exception as exc:  # noqa: BLE001 - whoever asks is told, and the node goes on
            _log.exception("http: %s failed", path)
            answer = HttpAnswer(f"{exc}\n".encode(), status=HTTPStatus.INTERNAL_SERVER_ERROR)
        return _encode(answer, head=method == "HEAD")

    def _allowed(self, headers: list[str]) -> bool:
        if not self._options.token:
            return True
        for line in headers:
            name, _, value = line.partition(":")
            if name.strip().lower() == "authorization":
                given = value.strip().removeprefix("Bearer ")
                return hmac.compare_digest(given.encode(), self._options.token.encode())
        return False


def _encode(answer: HttpAnswer, *, head: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if head else answer.body)
