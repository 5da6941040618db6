"""A network between a client and a server that can be cut, stalled and mended: real sockets on loopback.

    client ──► TcpProxy ──► server

``cut`` resets every connection (RST) and those that come, as a router that lost its power does.  ``stall`` lets
nothing through and closes nothing, as a dead link or a forgotten NAT entry does: neither side is told.  Both
may come after a number of bytes, so that a test breaks a transfer where it wants to.  ``heal`` mends it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Literal, Self

__all__ = ["TcpProxy"]

Mode = Literal["open", "cut", "stalled"]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpProxy:
    """One proxy in a thread of its own, so that it works for any client; every method may be called from any thread.

    >>> with socket.create_server(("127.0.0.1", 0)) as server, TcpProxy(server.getsockname()[1]) as proxy:
    ...     with socket.create_connection(("127.0.0.1", proxy.port), 5) as client, server.accept()[0] as peer:
    ...         peer.sendall(b"hello")
    ...         client.recv(5)
    ...         proxy.cut()
    ...         client.recv(5)
    Traceback (most recent call last):
    ConnectionResetError: ...
    """

    def __init__(self, server_port: int, server_host: str = "127.0.0.1") -> None:
        self.mode: Mode = "open"
        self.passed = 0
        """Bytes that have gone from the server to clients."""
        self.accepted = 0
        """Connections that were opened."""
        self._server = (server_host, server_port)
        self._sides: set[_Side] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._next: tuple[int, Mode] | None = None  # how many bytes may pass, and what comes then
        self._broken = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._thread.start()
        self._listener: asyncio.Server = self._run(self._listen())
        self.port: int = self._listener.sockets[0].getsockname()[1]

    # --- What a test does to the network

    def cut(self, after: int = 0) -> None:
        """Reset all connections, now or when ``after`` more bytes have come from the server; refuse new ones."""
        self._run(self._break("cut", after))

    def stall(self, after: int = 0) -> None:
        """Let nothing through, now or when ``after`` more bytes have come from the server; close nothing."""
        self._run(self._break("stalled", after))

    def heal(self, *, old: Literal["flow", "dead"] = "flow") -> None:
        """Let bytes and new connections through; with ``old="dead"`` those that were stalled stay so for ever."""
        self._run(self._heal(old))

    def broken(self, seconds: float = 60.0) -> bool:
        """Wait until the network is cut or stalled; return whether it is."""
        return self._broken.wait(seconds)

    def close(self) -> None:
        """End the proxy and everything that goes through it."""
        if not self._loop.is_closed():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- In the thread

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> asyncio.Server:
        return await self._loop.create_server(lambda: _Side(self, self._arrived), "127.0.0.1", 0)

    async def _break(self, mode: Mode, after: int) -> None:
        self._broken.clear()
        if after:
            self._next = (after, mode)
        else:
            self._become(mode)

    async def _heal(self, old: str) -> None:
        self.mode, self._next = "open", None
        self._broken.clear()
        for side in list(self._sides):
            side.go_on(dead=old == "dead")

    async def _close(self) -> None:
        self._listener.close()
        for task in self._dialling:
            task.cancel()
        for side in list(self._sides):
            side.reset()
        await asyncio.sleep(0)

    def _become(self, mode: Mode) -> None:
        self.mode, self._next = mode, None
        for side in list(self._sides):
            if mode == "cut":
                side.reset()
            else:
                side.hold()
        self._broken.set()

    def _arrived(self, client: _Side) -> None:
        self.accepted += 1
        if self.mode == "cut":
            client.reset()
            return
        task = self._loop.create_task(self._dial(client))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, client: _Side) -> None:
        while self.mode == "stalled":
            await asyncio.sleep(0.01)
        try:
            _, server = await self._loop.create_connection(lambda: _Side(self, None), *self._server)
        except OSError:
            client.reset()
            return
        client.peer, server.peer = server, client
        server.dead = client.dead  # left so while this was under way
        if client.gone:
            server.reset()
        else:
            self._adopt(client, server)

    def _adopt(self, client: _Side, server: _Side) -> None:
        """Let a new connection be as the network is now; held it is already."""
        if self.mode == "cut":
            server.reset()
        elif self.mode == "open":
            client.go_on(dead=False)
            server.go_on(dead=False)

    def _pass(self, side: _Side, data: bytes) -> None:
        """Hand bytes of the server on, breaking where it was asked for."""
        mode: Mode | None = None
        if side.from_server and self._next is not None:
            left, wanted = self._next
            if len(data) >= left:
                mode, rest, data = wanted, data[left:], data[:left]
                side.kept = rest
            else:
                self._next = (left - len(data), wanted)
        if side.from_server:
            self.passed += len(data)
        side.hand_on(data)
        if mode is not None:
            self._become(mode)


class _Side(asyncio.Protocol):
    """One of the two sockets of a connection."""

    def __init__(self, proxy: TcpProxy, arrived: Callable[[_Side], None] | None) -> None:
        self.proxy, self._arrived = proxy, arrived
        self.from_server = arrived is None
        self.peer: _Side | None = None
        self.kept = b""  # came behind the byte where the network was stalled
        self.gone = self.dead = False
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.proxy._sides.add(self)
        self.hold()  # until both are there
        if self._arrived is not None:
            self._arrived(self)

    def data_received(self, data: bytes) -> None:
        if self.proxy.mode == "stalled" or self.dead:
            self.kept += data  # it was on its way when reading was paused
        else:
            self.proxy._pass(self, data)

    def hand_on(self, data: bytes) -> None:
        if self.peer is not None and not self.peer.gone and data:
            self.peer.transport.write(data)

    def pause_writing(self) -> None:
        if self.peer is not None:
            self.peer.hold()

    def resume_writing(self) -> None:
        if self.peer is not None and self.proxy.mode == "open":
            self.peer.go_on(dead=False)

    def hold(self) -> None:
        if not self.gone:
            self.transport.pause_reading()

    def go_on(self, *, dead: bool) -> None:
        self.dead |= dead
        if self.gone or self.dead or self.peer is None:
            return
        kept, self.kept = self.kept, b""
        if kept:
            self.proxy._pass(self, kept)
        if self.proxy.mode == "open":
            self.transport.resume_reading()

    def reset(self) -> None:
        """Close with RST: what was under way is lost on both sides."""
        if not self.gone:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: ARG002
        self.gone = True
        self.proxy._sides.discard(self)
        if self.peer is not None and not self.peer.gone and not self.peer.dead:
            self.peer.transport.close()
