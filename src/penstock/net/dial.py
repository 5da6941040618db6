"""The other direction: connect to a server, with the same connections and filters.

mqtt://host:1883   mqtts://host:8883   ws://host:8083/mqtt   wss://host/mqtt   unix:/run/penstock.sock
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from penstock.errors import NotConnected, OptionsError, ProtocolError, Timeout
from penstock.net.connection import ByteFilter, Connection, ConnectionOptions, Core, Peer
from penstock.net.hosts import check_address
from penstock.net.tls import TlsFilter
from penstock.net.turns import LoopTurns
from penstock.net.unixpath import short_path
from penstock.net.websocket import WebSocketClientFilter

__all__ = ["Target", "dial"]

PORTS: Final[Mapping[str, int]] = {"ws": 80, "wss": 443}
_TLS: Final = frozenset({"mqtts", "wss", "tls", "ssl"})


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where to connect to.

    >>> Target.parse("mqtts://broker.example:8883")
    Target(host='broker.example', port=8883, path=None, tls=True, websocket=None)
    >>> Target.parse("unix:/run/x.sock").path, Target.parse("ws://h:8083/mqtt").websocket
    ('/run/x.sock', 'ws://h:8083/mqtt')
    """

    host: str = "127.0.0.1"
    port: int = 0
    path: str | None = None
    tls: bool = False
    websocket: str | None = None
    """The address of the upgrade request."""

    def __post_init__(self) -> None:
        if self.path is None:
            check_address(self.host, self.port)

    @classmethod
    def parse(cls, text: str, ports: Mapping[str, int] = {"mqtt": 1883, "mqtts": 8883}) -> Target:
        """Read an address; ``ports`` are those that go without saying for the schemes of a protocol."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:").removeprefix("//")
            if not path:
                raise OptionsError(f"{text}: give the path of a socket")
            return cls(path=path)
        try:
            parts = urlsplit(text if "://" in text else f"{next(iter(ports))}://{text}")
        except ValueError as exc:
            raise OptionsError(f"{text}: {exc}") from exc
        try:
            port = parts.port
        except ValueError as exc:
            raise OptionsError(f"{text}: the port is no number below 65536") from exc
        ports = {**PORTS, **ports}
        if parts.scheme not in ports or not parts.hostname:
            raise OptionsError(f"{text}: no address that can be connected to ({', '.join(ports)}, unix)")
        is_websocket = parts.scheme in PORTS
        return cls(
            host=parts.hostname,
            port=port if port is not None else ports[parts.scheme],
            tls=parts.scheme in _TLS,
            websocket=text if is_websocket else None,
        )

    def __str__(self) -> str:
        return self.websocket or (f"unix:{self.path}" if self.path else f"{self.host}:{self.port}")


async def dial(
    target: Target,
    core: Core,
    *,
    tls: ssl.SSLContext | None = None,
    options: ConnectionOptions | None = None,
    subprotocol: str = "mqtt",
    turns: LoopTurns | None = None,
) -> Connection:
    """Return a connection whose handshakes are done, so that ``core`` has heard ``opened``.

    TLS verifies the server by its name and the machine's CAs unless ``tls`` says otherwise.  Raises NotConnected where
    nobody answers, Timeout after ``handshake_seconds``, ProtocolError where the server is not who it should be.

    >>> from penstock.net.listen import Endpoint, listen
    >>> class Caller:
    ...     def __init__(self): self.answer = asyncio.Queue()
    ...     def opened(self, connection): connection.write(b"hello")
    ...     def received(self, data): self.answer.put_nowait(data)
    ...     def closed(self, reason): pass
    >>> class Greeter(Caller):
    ...     def opened(self, connection): connection.write(b"who is there?")
    >>> async def demo():
    ...     async with await listen([Endpoint(name="door")], Greeter) as listeners:
    ...         await dial(Target.parse(listeners.addresses["door"]), caller := Caller())
    ...         return await caller.answer.get()
    >>> asyncio.run(demo())
    b'who is there?'
    """
    loop = asyncio.get_running_loop()
    options = options or ConnectionOptions()
    filters: list[ByteFilter] = []
    if target.tls:
        filters.append(
            TlsFilter(tls or ssl.create_default_context(), str(target), server_side=False, server_hostname=target.host)
        )
    if target.websocket is not None:
        filters.append(WebSocketClientFilter(target.websocket, str(target), subprotocol))
    connection = _Dialled(core, turns or LoopTurns(loop), options, filters, target)
    try:
        async with asyncio.timeout(options.handshake_seconds):
            if target.path is not None:
                with short_path(target.path) as path:
                    await loop.create_unix_connection(lambda: connection, path)
            else:
                await loop.create_connection(lambda: connection, target.host, target.port)
            await connection.done
    except TimeoutError as exc:
        connection.abort("no handshake in time")
        raise Timeout(f"{target}: no connection within {options.handshake_seconds:g} s") from exc
    except OSError as exc:
        raise NotConnected(f"{target}: {exc.strerror or exc}") from exc
    except BaseException:
        connection.abort("given up")
        raise
    return connection


class _Dialled(Connection):
    """A connection that was begun here."""

    __slots__ = ("_target", "done")

    def __init__(
        self, core: Core, turns: LoopTurns, options: ConnectionOptions, filters: list[ByteFilter], target: Target
    ) -> None:
        super().__init__(lambda: core, turns, options, filters)
        self._target = target
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _first_peer(self, _: Any) -> Peer:
        target = self._target
        kind = "ws" if target.websocket is not None else "unix" if target.path is not None else "tcp"
        return Peer(str(target), "", kind, target.tls)

    def _begin(self) -> None:
        super()._begin()
        self._next_handshake(0)

    def _next_handshake(self, depth: int) -> None:
        """Speak first, as a client does: on each floor once the one below stands."""
        if depth < len(self._filters):
            layer: Any = self._filters[depth]
            layer.begin()
            self._answer(depth, layer)

    def _receive_filtered(self, data: bytes) -> None:
        before = sum(layer.established for layer in self._filters)
        super()._receive_filtered(data)
        after = sum(layer.established for layer in self._filters)
        if before < after < len(self._filters):
            self._next_handshake(after)

    def _open(self) -> None:
        super()._open()
        if not self.done.done():
            self.done.set_result(None)

    def _failed(self, exc: Exception) -> None:
        if not self.done.done() and isinstance(exc, ProtocolError):
            self.done.set_exception(exc)
        super()._failed(exc)

    def _left(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(NotConnected(f"{self._target}: {reason}"))
            self.done.exception()  # who has given up does not ask any more
