"""Listeners: where a server can be reached, and the door of all its connections.

A listener accepts plainly; who is let in is decided before a handshake is begun, so that a flood of connects costs
little.  Loopback is the default, and what else was asked for is said when it starts.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import msgspec

from penstock.errors import LockedError, OptionsError
from penstock.metrics import Metric
from penstock.net.connection import ByteFilter, Connection, ConnectionOptions, Core, Peer
from penstock.net.hosts import check_address
from penstock.net.limits import Admission
from penstock.net.proxy import ProxyHeader
from penstock.net.tls import Tls, TlsFilter
from penstock.net.turns import LoopTurns
from penstock.net.unixpath import short_path
from penstock.net.websocket import WebSocketFilter, WebSocketOptions

__all__ = ["Endpoint", "Listeners", "listen"]

_log = logging.getLogger(__name__)

MakeCore = Callable[[], Core]

CERTIFICATE_SECONDS: Final = 10.0
"""Between two looks at whether the files of a certificate have changed."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One place to listen: a TCP port, or a unix socket where ``path`` is given.

    >>> Endpoint(name="mqtt", port=1883).host
    '127.0.0.1'
    >>> Endpoint(name="local", path="/tmp/x", tls=None, host="0.0.0.0")
    Traceback (most recent call last):
    penstock.errors.OptionsError: local: a unix socket has a path, not a host
    """

    name: str
    host: str = "127.0.0.1"
    """An address or a name; ``0.0.0.0`` and ``::`` are every address of the machine."""
    port: int = 0
    """0 picks a free one."""
    path: str | None = None
    """Of a unix socket."""
    mode: int = 0o660
    """Who may connect to the unix socket, as for a file."""
    tls: Tls | None = None
    websocket: WebSocketOptions | None = None
    proxy: bool = False
    """Every connection begins with a PROXY header; only for a port that nothing but the balancer can reach."""
    refusal: bytes = b""
    """What is sent, where there is no handshake, to a connection that is not let in."""
    backlog: int = 4096
    handshakes: Metric | None = None
    """A counter with the label ``result``: handshakes that came to an end (success), and connections lost before."""
    options: ConnectionOptions = ConnectionOptions()

    def __post_init__(self) -> None:
        if self.path is not None and (self.host != "127.0.0.1" or self.port):
            raise OptionsError(f"{self.name}: a unix socket has a path, not a host")
        try:
            check_address(self.host, self.port)
        except OptionsError as exc:
            raise OptionsError(f"{self.name}: {exc}") from None


class Listeners:
    """Open listeners and the connections that came in by them; what ``listen`` returns.

    >>> async def demo():
    ...     listeners = await listen([Endpoint(name="door")], lambda: None)
    ...     await listeners.close()
    ...     return listeners.addresses["door"].partition(":")[0], len(listeners.connections)
    >>> asyncio.run(demo())
    ('127.0.0.1', 0)
    """

    def __init__(self, make_core: MakeCore, admission: Admission, look_seconds: float = CERTIFICATE_SECONDS) -> None:
        self.addresses: dict[str, str] = {}
        """Where each endpoint is reached, by its name: ``127.0.0.1:41873``, ``unix:/run/penstock.sock``."""
        self.admission = admission
        self.connections: set[Connection] = set()
        self._make_core = make_core
        self._turns = LoopTurns(asyncio.get_running_loop())
        self._servers: list[asyncio.Server] = []
        self._paths: list[tuple[str, int]] = []
        self._tls: list[Tls] = []
        self._look_seconds = look_seconds
        self._look: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def flush(self) -> None:
        """Send what connections wrote in this turn so far, before something that takes a while."""
        self._turns.flush()

    def stop_accepting(self) -> None:
        """Let nobody in any more; open connections go on."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        for server in self._servers:
            server.close()
        self._servers = []
        for path, inode in self._paths:
            try:
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
            except OSError:
                pass
        self._paths = []

    async def close(self, reason: str = "the server stops", seconds: float = 5.0) -> None:
        """Stop accepting, close every connection after what was written, and drop those that take too long."""
        self.stop_accepting()
        for connection in list(self.connections):
            connection.close(reason)
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort(reason)
            await self._empty.wait()

    def reload_certificates(self) -> list[str]:
        """Load all certificates again for new connections; return what kept an old one in use."""
        return [problem for tls in self._tls if (problem := tls.reload()) is not None]

    def _look_at_certificates(self) -> None:
        for tls in self._tls:
            tls.reload_if_changed()
        self._look = asyncio.get_running_loop().call_later(self._look_seconds, self._look_at_certificates)

    async def _open(self, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        sockets = [_bind_unix(endpoint)] if endpoint.path is not None else await _bind_tcp(endpoint)
        address = f"unix:{endpoint.path}" if endpoint.path is not None else _address(sockets[0].getsockname())
        self.addresses[endpoint.name] = address
        if endpoint.path is not None:
            self._paths.append((endpoint.path, os.stat(endpoint.path).st_ino))
        if endpoint.tls is not None and endpoint.tls not in self._tls:
            self._tls.append(endpoint.tls)
            if self._look is None:
                self._look = loop.call_later(self._look_seconds, self._look_at_certificates)
        while sockets:
            bound = sockets[0]
            try:
                make = functools.partial(_Accepted, self, endpoint)
                open_server = loop.create_server if endpoint.path is None else loop.create_unix_server
                self._servers.append(await open_server(make, sock=bound, backlog=endpoint.backlog))
            except BaseException:
                for unused in sockets:
                    unused.close()
                raise
            sockets.pop(0)
        level, sentence = describe_exposure(endpoint, address)
        _log.log(level, "%s", sentence)

    def entered(self, connection: Connection) -> None:
        """Count a connection in; called by itself."""
        self.connections.add(connection)
        self._empty.clear()

    def left(self, connection: Connection) -> None:
        """Count a connection out; called by itself."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()


async def listen(
    endpoints: Sequence[Endpoint],
    make_core: MakeCore,
    *,
    admission: Admission | None = None,
    look_seconds: float = CERTIFICATE_SECONDS,
    ports: dict[str, int] | None = None,
) -> Listeners:
    """Open all endpoints or none; ``make_core`` is called for each connection whose handshakes are done.

    Certificates whose files change are loaded again for new connections; the files are looked at every
    ``look_seconds``.  ``ports`` remembers which port a named endpoint got: who is started again with it and any free
    port will do listens where it did.

    >>> class Echo:
    ...     def opened(self, connection): self.connection = connection
    ...     def received(self, data): self.connection.write(data.upper())
    ...     def congested(self): self.connection.pause_reading()
    ...     def writable(self): self.connection.resume_reading()
    ...     def expired(self): self.connection.abort("silent for too long")
    ...     def closed(self, reason): pass
    >>> async def demo():
    ...     async with await listen([Endpoint(name="echo")], Echo) as listeners:
    ...         host, _, port = listeners.addresses["echo"].rpartition(":")
    ...         reader, writer = await asyncio.open_connection(host, int(port))
    ...         writer.write(b"hello"); answer = await reader.readexactly(5)
    ...         writer.close(); await writer.wait_closed()
    ...         return answer
    >>> asyncio.run(demo())
    b'HELLO'
    """
    names = [endpoint.name for endpoint in endpoints]
    if len(set(names)) != len(names):
        raise OptionsError(f"two endpoints have one name: {', '.join(names)}")
    listeners = Listeners(make_core, admission or Admission(), look_seconds)
    ports = {} if ports is None else ports
    try:
        for endpoint in endpoints:
            if endpoint.path is None and not endpoint.port:
                endpoint = msgspec.structs.replace(endpoint, port=ports.get(endpoint.name, 0))
            await listeners._open(endpoint)
            if endpoint.path is None:
                ports[endpoint.name] = int(listeners.addresses[endpoint.name].rpartition(":")[2])
    except BaseException:
        await listeners.close()
        raise
    return listeners


class _Accepted(Connection):
    """A connection that came in by a listener."""

    __slots__ = ("_endpoint", "_host", "_listeners", "_proxy")

    def __init__(self, listeners: Listeners, endpoint: Endpoint) -> None:
        super().__init__(listeners._make_core, listeners._turns, endpoint.options)
        self._listeners, self._endpoint = listeners, endpoint
        self._host: str | None = None
        self._proxy: ProxyHeader | None = None

    def _first_peer(self, transport: Any) -> Peer:
        endpoint = self._endpoint
        kind = "ws" if endpoint.websocket is not None else "tcp" if endpoint.path is None else "unix"
        name = transport.get_extra_info("peername") if endpoint.path is None else None
        return Peer(_address(name) if name else "unix", endpoint.name, kind, endpoint.tls is not None)

    def _begin(self) -> None:
        self._listeners.entered(self)
        if self._endpoint.proxy:
            limits = self._listeners.admission.limits
            if len(self._listeners.connections) > limits.max_connections:  # who has not said yet who it is counts too
                self._refuse(f"{limits.max_connections} connections are open, the limit")
                return
            self._proxy = ProxyHeader(self.peer.address)
            self._receive = self._receive_proxy
        else:
            self._enter(self.peer.host)

    def _receive_proxy(self, data: bytes) -> None:
        assert self._proxy is not None
        rest = self._proxy.feed(data)
        if rest is None:
            return
        host = self._proxy.host
        if self._proxy.address is not None:
            self.peer = msgspec.structs.replace(self.peer, address=self._proxy.address)
        self._proxy = None
        self._enter(host or self.peer.host)
        if rest and not self._closing:
            self._receive(rest)

    def _enter(self, host: str) -> None:
        reason = self._listeners.admission.enter(host)
        if reason is not None:
            self._refuse(reason)
            return
        self._host = host
        endpoint = self._endpoint
        filters: list[ByteFilter] = []
        if endpoint.tls is not None:
            filters.append(TlsFilter(endpoint.tls.context, self.peer.address))
        if endpoint.websocket is not None:
            filters.append(WebSocketFilter(endpoint.websocket, self.peer.address))
        self._filters = tuple(filters)
        super()._begin()

    def _refuse(self, reason: str) -> None:
        if self._endpoint.refusal and self._endpoint.tls is None and self._endpoint.websocket is None:
            self._transport.write(self._endpoint.refusal)
            self.close(reason)
        else:
            self.abort(reason)

    def _open(self) -> None:
        if self._endpoint.handshakes is not None:
            self._endpoint.handshakes.add(result="success")
        super()._open()

    def _left(self, reason: str) -> None:
        if self._host is not None:
            self._listeners.admission.leave(self._host)
        self._listeners.left(self)
        if not self._opened:
            if self._endpoint.handshakes is not None:
                self._endpoint.handshakes.add(result="failure")
            _log.debug("%s at %s: %s", self.peer.address, self._endpoint.name, reason)


async def _bind_tcp(endpoint: Endpoint) -> list[socket.socket]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as exc:
        raise OptionsError(f"{endpoint.name}: {endpoint.host!r} is no address of this machine: {exc.strerror}") from exc
    bound: list[socket.socket] = []
    port = endpoint.port
    try:
        for family, kind, proto, _, place in dict.fromkeys(found):
            sock = socket.socket(family, kind, proto)
            bound.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((place[0], port, *place[2:]))
            port = sock.getsockname()[1]  # a name with two addresses has one port
    except OSError as exc:
        for sock in bound:
            sock.close()
        where = f"{endpoint.name}: cannot listen on {endpoint.host}:{port}"
        if exc.errno == errno.EADDRINUSE:
            raise LockedError(f"{where}: another process does") from exc
        raise OptionsError(f"{where}: {exc.strerror}") from exc
    return bound


def _bind_unix(endpoint: Endpoint) -> socket.socket:
    path = endpoint.path
    assert path is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(endpoint.name, path)
        sock.setblocking(False)
        umask = os.umask(0o777 & ~endpoint.mode)
        try:
            with short_path(path) as short:
                sock.bind(short)
        finally:
            os.umask(umask)
    except OSError as exc:
        sock.close()
        raise OptionsError(f"{endpoint.name}: cannot listen on {path}: {exc.strerror or exc}") from exc
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(name: str, path: str) -> None:
    """Remove a socket file whose server is gone; refuse one that answers, and whatever is no socket."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OptionsError(f"{name}: {path} is there and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            with short_path(path) as short:
                probe.connect(short)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass
    raise LockedError(f"{name}: cannot listen on {path}: another process does")


def _address(name: tuple[Any, ...]) -> str:
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def describe_exposure(endpoint: Endpoint, address: str) -> tuple[int, str]:
    """Return a log level and the sentence that says who can reach an endpoint.

    >>> describe_exposure(Endpoint(name="mqtt"), "127.0.0.1:1883")
    (20, 'mqtt listens on 127.0.0.1:1883: this machine only')
    >>> describe_exposure(Endpoint(name="mqtt", host="0.0.0.0"), "0.0.0.0:1883")[1]
    'mqtt listens on 0.0.0.0:1883: open to other machines, without TLS'
    """
    sentence = f"{endpoint.name} listens on {address}"
    host = address.rpartition(":")[0].strip("[]")
    if endpoint.path is not None or host.startswith("127.") or host == "::1":
        return logging.INFO, f"{sentence}: this machine only"
    if endpoint.tls is not None:
        return logging.INFO, f"{sentence}: open to other machines, with TLS"
    return logging.WARNING, f"{sentence}: open to other machines, without TLS"
