"""One connection: an asyncio protocol below, a protocol core above, filters (TLS, WebSocket) between.

    socket ── PROXY header ── TlsFilter ── WebSocketFilter ── core

A read of the loop is one batch for the core; on uvloop that is up to 256 KiB.  What the core writes during a turn of
the loop is collected and leaves in one write at its end.  Output is bounded: above the high water mark the core is
told and decides, and past `max_buffered_bytes` the connection is dropped whatever the core does.

Everything here is called from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from penstock.errors import OptionsError, PenstockError
from penstock.kernel import turns as kernel
from penstock.net.turns import LoopTurns

__all__ = ["Connection", "ConnectionOptions", "Core", "ByteFilter", "Peer"]

_log = logging.getLogger(__name__)


class Peer(msgspec.Struct, frozen=True):
    """Who is at the other end.

    >>> Peer("192.0.2.7:50112", "mqtt", "tcp", True, "pump-7").identity
    'pump-7'
    """

    address: str
    """``192.0.2.7:50112``, ``[2001:db8::7]:50112`` or ``unix``; behind a PROXY header the one it names."""
    listener: str
    """The name of the endpoint it came in by."""
    transport: str
    """``tcp``, ``unix`` or ``ws``."""
    tls: bool = False
    identity: str | None = None
    """The name in its verified certificate."""

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0].strip("[]") or self.address


class Core(Protocol):
    """The protocol core of one connection.  The connection calls; the core answers through it."""

    def opened(self, connection: Connection) -> None:
        """Begin: the handshakes are done.  Called once, first, unless the connection ends before."""

    def received(self, data: bytes) -> None:
        """Take what one read of the socket brought, cut anywhere."""

    def congested(self) -> None:
        """Take note that the peer is slow: more waits for it than the high water mark."""

    def writable(self) -> None:
        """Go on: what waited has fallen below the low water mark."""

    def expired(self) -> None:
        """Act on the deadline: it has passed, and is not set any more."""

    def closed(self, reason: str) -> None:
        """Clean up: the connection is gone.  Called once, last, and only after ``opened``."""


class ByteFilter(Protocol):
    """Bytes to bytes between socket and core; sans-IO."""

    established: bool
    """Whether the handshake is done; until then nothing passes."""
    ended: bool
    """Whether the peer has said goodbye."""

    @property
    def identity(self) -> str | None: ...  # noqa: D102
    def receive(self, data: bytes) -> list[bytes]: ...  # noqa: D102
    def send(self, data: bytes) -> bytes: ...  # noqa: D102
    def answers(self) -> bytes: ...  # noqa: D102
    def goodbye(self) -> bytes: ...  # noqa: D102


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much a connection may hold and how long it may take.

    >>> ConnectionOptions(low_water_bytes=2 << 20)
    Traceback (most recent call last):
    penstock.errors.OptionsError: low_water_bytes=2097152: must be below high_water_bytes=1048576
    """

    high_water_bytes: int = 1 << 20
    """Above it the core hears ``congested``."""
    low_water_bytes: int = 256 << 10
    """At or below it the core hears ``writable`` again."""
    max_buffered_bytes: int = 256 << 20
    """The bound that no core can pass: beyond it the connection is dropped."""
    handshake_seconds: float = 10.0
    """From the accept to ``opened``, however busily the peer sends."""
    linger_seconds: float = 2.0
    """What a close waits for the peer to take the last bytes and to close as well."""

    def __post_init__(self) -> None:
        if self.low_water_bytes >= self.high_water_bytes:
            raise OptionsError(
                f"low_water_bytes={self.low_water_bytes}: must be below high_water_bytes={self.high_water_bytes}"
            )


class Connection(kernel.Wire, asyncio.Protocol):
    """One connection of a server or a client; made by ``listen`` and ``dial``.

    >>> class Greeter:
    ...     def opened(self, connection): connection.write(b"hello"); connection.close()
    ...     def received(self, data): pass
    ...     def closed(self, reason): print(reason)
    >>> from penstock.net.listen import Endpoint, listen
    >>> async def demo():
    ...     async with await listen([Endpoint(name="door")], Greeter) as listeners:
    ...         reader, writer = await asyncio.open_connection(*listeners.addresses["door"].split(":"))
    ...         print(await reader.read()); writer.close()
    >>> asyncio.run(demo())
    b'hello'
    closed here

    Invariants:

    1. The core hears ``opened`` first and ``closed`` last, each once; after ``close`` or ``abort`` only ``closed``.
    2. A core that raises loses its own connection, with the reason in the log, and no other.
    """

    __slots__ = (
        "_core", "_counts_from", "_deadline", "_make_core", "_opened", "_options", "_reading", "_reason", "peer",
    )  # fmt: skip

    def __init__(
        self,
        make_core: Callable[[], Core],
        turns: LoopTurns,
        options: ConnectionOptions,
        filters: Sequence[ByteFilter] = (),
    ) -> None:
        super().__init__(turns, options.high_water_bytes)
        self.peer = Peer("", "", "")
        self._make_core = make_core
        self._core: Core  # made when the handshakes are done: who is not let in costs none
        self._options = options
        self._filters: tuple[ByteFilter, ...] = tuple(filters)
        self._receive: Callable[[bytes], None] = self._ignore
        self._opened = False
        self._reading = True
        self._reason: str | None = None
        self._deadline: float | None = None
        self._counts_from: float | None = None

    # --- What a core calls

    @property
    def buffered(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return self._pending + (0 if self._lost or self._transport is None else self._transport.get_write_buffer_size())

    @property
    def is_closing(self) -> bool:
        """Whether the core will hear nothing more but ``closed``."""
        return self._closing

    def pause_reading(self) -> None:
        """Read nothing more for now: the peer is held back by its own operating system."""
        if self._reading and not self._closing:
            self._reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if not self._reading and not self._closing:
            self._reading = True
            self._transport.resume_reading()

    def set_deadline(self, seconds: float | None, *, absolute: bool = False) -> None:
        """Tell the core ``expired`` when nothing was read for ``seconds``; None never.

        An absolute deadline counts from now instead and no read moves it: for a peer that sends byte by byte.
        """
        if self._closing:
            return
        self._set_deadline(seconds, absolute)

    def close(self, reason: str = "closed here") -> None:
        """Send what was written, then close; what the peer still sends is dropped.

        The peer gets an end of stream and a moment to close as well: a close with unread input would make the
        operating system throw away the last bytes written.
        """
        if self._closing:
            return
        try:
            self.flush()
            if self.is_closing:  # the flush failed
                return
            self._closing = True
            self._say_goodbye()
        except PenstockError as exc:
            self.abort(f"{reason}; {exc}")
            return
        self._reason = reason
        self._receive = self._ignore
        self._set_deadline(self._options.linger_seconds, True)
        if not self._reading:
            self._transport.resume_reading()
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
        except OSError:  # the peer was faster: asyncio's own transport says so here
            self._transport.abort()

    def abort(self, reason: str) -> None:
        """Close at once; what was not sent yet is lost."""
        if self._reason is None:
            self._reason = reason
        self._closing = True
        self._receive = self._ignore
        self._out, self._pending = [], 0
        if self._transport is not None and not self._lost:
            self._transport.abort()

    # --- What Turns calls

    @property
    def due(self) -> float | None:
        """When the deadline passes if nothing is read until then."""
        if self._deadline is None:
            return None
        return self._deadline + (self._last_read if self._counts_from is None else self._counts_from)

    def late(self) -> None:
        """Act on the deadline, which has passed."""
        self._deadline = None
        if self._closing:
            self.abort("the peer did not close")
        elif not self._opened:
            self.abort(f"no handshake within {self._options.handshake_seconds:g} s")
        else:
            self._guard(self._core.expired)

    # --- What asyncio calls

    def connection_made(self, transport: Any) -> None:
        """Begin the handshakes."""
        self._transport = transport
        transport.set_write_buffer_limits(self._options.high_water_bytes, self._options.low_water_bytes)
        self._last_read = self._turns.time()
        self.peer = self._first_peer(transport)
        self._set_deadline(self._options.handshake_seconds, True)
        self._guard(self._begin)

    def _first_peer(self, transport: Any) -> Peer:
        raise NotImplementedError

    def _begin(self) -> None:
        """Take bytes through the filters, or open the core at once where there are none."""
        if self._filters:
            self._receive = self._receive_filtered
        else:
            self._open()

    def eof_received(self) -> bool:
        """Close as well: the peer sends nothing more."""
        self.flush()
        if self._reason is None:
            self._reason = "the peer closed the connection"
        self._closing = True
        self._receive = self._ignore
        self._set_deadline(self._options.linger_seconds, True)
        return False

    def pause_writing(self) -> None:
        """Tell the core that its peer is slow."""
        self._slow = True
        self._check_bound()
        if self._opened and not self._closing:
            self._guard(self._core.congested)

    def resume_writing(self) -> None:
        """Tell the core that its peer has caught up."""
        self._slow = False
        if self._opened and not self._closing:
            self._guard(self._core.writable)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the core, last."""
        self._lost = self._closing = True
        self._turns.forget(self)
        self._out, self._pending = [], 0
        self._receive = self._ignore
        reason = self._reason or (str(exc) if exc is not None else "the peer closed the connection")
        if self._opened:
            self._guard(self._core.closed, reason)
        self._left(reason)

    def _left(self, reason: str) -> None:
        """Give back what the connection took; for those who make connections."""

    # --- Between

    def _check_bound(self) -> None:
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._options.max_buffered_bytes:
            self.abort(f"the peer does not read: {waiting} bytes wait for it")

    def _ignore(self, data: bytes) -> None:
        pass

    def _set_deadline(self, seconds: float | None, absolute: bool) -> None:
        self._deadline = seconds
        self._counts_from = self._turns.time() if absolute else None
        due = self.due
        if due is not None:
            self._turns.look_at(self, due)

    def _receive_filtered(self, data: bytes) -> None:
        pieces = [data]
        for depth, layer in enumerate(self._filters):
            found: list[bytes] = []
            try:
                for piece in pieces:
                    found += layer.receive(piece)
            except PenstockError:
                self._answer(depth, layer)  # why the peer is refused, in its own words
                raise
            self._answer(depth, layer)
            pieces = found
            if not layer.established:
                return
        if not self._opened:
            self._open()
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if data and not self._closing:
            self._core.received(data)
        if not self._closing and any(layer.ended for layer in self._filters):
            self.close("the peer closed the connection")

    def _answer(self, depth: int, layer: ByteFilter) -> None:
        answer = layer.answers()
        if answer:
            for below in reversed(self._filters[:depth]):
                answer = below.send(answer)
            self._transport.write(answer)

    def _open(self) -> None:
        self._set_deadline(None, False)
        identity = next((layer.identity for layer in self._filters if layer.identity is not None), None)
        if identity is not None:
            self.peer = msgspec.structs.replace(self.peer, identity=identity)
        self._core = self._make_core()
        if not self._filters:
            self._receive = self._core.received
        self._opened = True
        self._core.opened(self)

    def _send_filtered(self, out: list[bytes | memoryview]) -> None:
        try:
            data = b"".join(out)
            for layer in reversed(self._filters):
                data = layer.send(data)
            self._transport.write(data)
        except PenstockError as exc:
            self.abort(str(exc))

    def _say_goodbye(self) -> None:
        for depth in reversed(range(len(self._filters))):
            layer = self._filters[depth]
            if layer.established:
                farewell = layer.goodbye()
                for below in reversed(self._filters[:depth]):
                    farewell = below.send(farewell)
                if farewell:
                    self._transport.write(farewell)

    def _guard(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception as exc:  # noqa: BLE001
            self._failed(exc)

    def _failed(self, exc: Exception) -> None:
        if isinstance(exc, PenstockError):
            self.abort(str(exc))
        else:
            _log.error("%s: the connection is dropped after a fault", self.peer.address, exc_info=exc)
            self.abort(f"a fault: {type(exc).__name__}: {exc}")
