"""The small HTTP server of a node: health, metrics, and what there is to say, read only.

One request, one answer, GET and HEAD only.  It is for probes, scrapers and a console on the same machine; whatever
faces the world stands behind a proxy that was made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from penstock.lifecycle import Health, State
from penstock.node.options import HttpOptions
from penstock.shown import json_line

__all__ = ["HttpAnswer", "HttpServer", "Route"]

_log = logging.getLogger("penstock.node")

HEAD_BYTES: Final = 16 << 10
HEAD_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
"""How long one may take to read its answer."""
LINGER_SECONDS: Final = 1.0
LINGER_BYTES: Final = 4 << 20
"""What is read and forgotten after an answer: a connection that is closed over unread bytes loses the answer."""
MOST_CONNECTIONS: Final = 64
"""With one more, the one that has said nothing for the longest time is closed."""
ABSOLUTE: Final = re.compile("^https?://[^/?]*", re.IGNORECASE)
VERSIONS: Final = ("HTTP/1.0", "HTTP/1.1")


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
        return cls(json_line(value).removesuffix(b"\n"), "application/json", status)


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
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._silent: dict[asyncio.StreamWriter, None] = {}  # no request yet, oldest first
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
        where = self.addresses["http"]
        if host in ("127.0.0.1", "::1"):
            _log.info("http listens on %s: this machine only", where)
        else:
            _log.warning("http listens on %s: health, metrics and the API can be read from other machines", where)
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
        for writer in self._connections.values():
            writer.transport.abort()
        if tasks := list(self._connections):
            await asyncio.wait(tasks, timeout=LINGER_SECONDS)
            for task in tasks:  # one whose answer takes that long
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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
        self._connections[task] = writer
        try:
            answer = await self._converse(reader, writer)
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.write(answer)
                writer.write_eof()
                await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await _read_away(reader)
            async with asyncio.timeout(ANSWER_SECONDS):
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()  # nothing of it stays, whether it was read or not

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Wait for a request and return its answer."""
        if len(self._connections) > MOST_CONNECTIONS:
            if not self._silent:
                return _refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        self._silent[writer] = None
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too long")
        finally:
            self._silent.pop(writer, None)
        return await self._answer(head)

    async def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or words[2] not in VERSIONS:
            return _refuse(HTTPStatus.BAD_REQUEST, "not HTTP")
        method, path = words[0], ABSOLUTE.sub("", words[1]).partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET", "Allow: GET, HEAD")
        head_only = method == "HEAD"
        route = self._routes.get(path)
        if route is None:
            return _refuse(HTTPStatus.NOT_FOUND, "not found", head=head_only)
        if path.startswith("/api") and not self._allowed(lines[1:]):
            return _refuse(HTTPStatus.UNAUTHORIZED, "a token is needed", "WWW-Authenticate: Bearer", head=head_only)
        try:
            answer = await route()
        except Exception as exc:  # noqa: BLE001 - whoever asks is told, and the node goes on
            _log.exception("http: %s failed", path)
            return _refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc), head=head_only)
        return _encode(answer, head=head_only)

    def _allowed(self, headers: list[str]) -> bool:
        if not self._options.token:
            return True
        for line in headers:
            name, _, value = line.partition(":")
            if name.strip().lower() == "authorization":
                scheme, _, given = value.strip().partition(" ")
                known = hmac.compare_digest(given.strip().encode("latin-1"), self._options.token.encode())
                return known and scheme.lower() == "bearer"
        return False


async def _read_away(reader: asyncio.StreamReader) -> None:
    seen = 0
    while (data := await reader.read(1 << 16)) and seen < LINGER_BYTES:
        seen += len(data)


def _refuse(status: HTTPStatus, reason: str, *headers: str, head: bool = False) -> bytes:
    return _encode(HttpAnswer(f"{reason}\n".encode(), status=status), *headers, head=head)


def _encode(answer: HttpAnswer, *headers: str, head: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.type}",
        f"Content-Length: {len(answer.body)}",
        *headers,
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if head else answer.body)
