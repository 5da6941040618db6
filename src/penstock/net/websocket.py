"""WebSocket as a filter, on the sans-IO core of `websockets` and a kernel for whole binary frames.

Frames have no meaning above: many packets may come in one and a packet in many, and what a turn of the loop produced
goes out as one.  Text is refused (MQTT 5, 6.0: a text frame closes the connection).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from websockets.client import ClientProtocol
from websockets.exceptions import NegotiationError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol
from websockets.uri import parse_uri

from penstock.errors import ProtocolError
from penstock.kernel import wsframes

__all__ = ["WebSocketOptions", "WebSocketFilter", "WebSocketClientFilter"]

cut_frames = wsframes.cut_frames

_EMPTY_LINE: Final = b"\r\n\r\n"
_GATHERED_BYTES: Final = 64 << 10
"""The beginning of a frame up to this long waits for its rest; of a longer one the library has what came."""

_silent = logging.getLogger("penstock.net.websocket.frames")
_silent.setLevel(logging.CRITICAL)  # what goes wrong is told once, by the connection


class WebSocketOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a listener speaks WebSocket.

    >>> WebSocketOptions().subprotocols
    ('mqtt', 'mqttv3.1')
    """

    path: str | None = None
    """The only path that is served; None serves every path."""
    subprotocols: tuple[str, ...] = ("mqtt", "mqttv3.1")
    """What may be spoken, best first; a client that offers others is refused, one that offers none is served."""
    origins: tuple[str, ...] | None = None
    """Web pages that may connect, by origin; None lets any page, and whatever is not a browser is never asked."""
    max_frame_bytes: int = 17 << 20
    """Bytes of one message of frames; a packet may be longer, in several."""


class _Frames:
    """What both sides share: frames once the handshake is done.

    Whole binary frames, which is nearly all there is, are cut by the kernel.  The library gets the handshake and every
    other frame, each from its first byte to its last, so that it is between two frames whenever the kernel goes on.
    """

    __slots__ = (
        "_fragmented", "_library_owed", "_masked", "_max_frame_bytes", "_peer", "_protocol", "_unread", "ended",
        "established",
    )  # fmt: skip

    def __init__(self, peer: str, protocol: ServerProtocol | ClientProtocol, max_frame_bytes: int) -> None:
        self._peer = peer
        self._protocol = protocol
        self._max_frame_bytes = max_frame_bytes
        self._masked = isinstance(protocol, ServerProtocol)
        self._unread = b""  # the end of the last read: of the handshake three bytes, of a frame what came of it
        self._library_owed = 0  # bytes that the library lacks of the frame it has begun with
        self._fragmented = False  # whether a message has begun whose last fragment has not come
        self.established = False
        self.ended = False

    identity: Final[str | None] = None

    def receive(self, data: bytes) -> list[bytes]:
        """Return the payloads that ``data`` completes; raises ProtocolError where it is no WebSocket."""
        if self.established:
            return self._receive_frames(data)
        # What follows the empty line are frames: they are not for the library, where the peer is let in.
        seen = self._unread + data
        at = seen.find(_EMPTY_LINE)
        if at < 0:
            self._unread = seen[-3:]
            return self._feed(data)
        at += len(_EMPTY_LINE) - len(self._unread)
        self._unread = b""
        found = self._feed(data[:at])
        return found + (self._receive_frames(data[at:]) if self.established else self._feed(data[at:]))

    def _receive_frames(self, data: bytes) -> list[bytes]:
        found: list[bytes] = []
        at = min(self._library_owed, len(data))
        if at:
            self._library_owed -= at
            found += self._feed(data[:at])
        if self._unread:
            data, self._unread = self._unread + data, b""
        end = len(data)
        while at < end and self._protocol.state is State.OPEN:
            payloads, at, size = cut_frames(data, at, self._masked, self._max_frame_bytes, not self._fragmented)
            if payloads:
                found.append(payloads)
            if at == end:
                break
            if size == 0 or end < at + size <= at + _GATHERED_BYTES:
                self._unread = data[at:]
                break
            stop = end if size < 0 else min(end, at + size)
            self._library_owed = max(0, at + size - end)
            found += self._feed(data[at:stop])
            at = stop
        return found

    def _feed(self, data: bytes) -> list[bytes]:
        """Have the library take bytes; return the payloads it found."""
        protocol = self._protocol
        try:
            protocol.receive_data(data)
        except EOFError:  # bytes behind the end: they are of no interest
            return []
        found: list[bytes] = []
        for event in protocol.events_received():
            if not isinstance(event, Frame):
                self._shake_hands(event)
            elif event.opcode is Opcode.BINARY or event.opcode is Opcode.CONT:
                self._fragmented = not event.fin
                found.append(bytes(event.data))
            elif event.opcode is Opcode.CLOSE:
                self.ended = True
            elif event.opcode is Opcode.TEXT:
                protocol.fail(1003, "binary frames only")
                raise ProtocolError(self._peer, "WebSocket frame", "a text frame")
        if protocol.handshake_exc is not None:
            raise ProtocolError(self._peer, "WebSocket handshake", str(protocol.handshake_exc))
        if protocol.parser_exc is not None:
            raise ProtocolError(self._peer, "WebSocket frame", str(protocol.parser_exc))
        return found

    def _shake_hands(self, event: Request | Response, /) -> None:
        raise NotImplementedError

    def send(self, data: bytes) -> bytes:
        """Return the frame that carries ``data``."""
        if self._protocol.state is not State.OPEN:
            return b""
        if self._masked:  # the peer masks, so this side does not: a head and the bytes as they are
            return _head(len(data)) + data
        self._protocol.send_binary(data)
        return self.answers()

    def answers(self) -> bytes:
        """Return what WebSocket itself has to say: the handshake, pongs, the end."""
        return b"".join(self._protocol.data_to_send())

    def goodbye(self) -> bytes:
        """Return the frame that ends the connection."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000)
        return self.answers()


def _head(size: int) -> bytes:
    """Return what stands before a binary message that is not masked."""
    if size < 126:
        return b"\x82" + size.to_bytes(1, "big")
    return b"\x82\x7e" + size.to_bytes(2, "big") if size < 1 << 16 else b"\x82\x7f" + size.to_bytes(8, "big")


class WebSocketFilter(_Frames):
    """The server's side."""

    __slots__ = ("_path",)
    _protocol: ServerProtocol

    def __init__(self, options: WebSocketOptions, peer: str) -> None:
        origins = None if options.origins is None else [*map(Origin, options.origins), None]
        super().__init__(
            peer,
            ServerProtocol(
                origins=origins,
                select_subprotocol=_selection(options.subprotocols),
                max_size=options.max_frame_bytes,
                logger=_silent,
            ),
            options.max_frame_bytes,
        )
        self._path = options.path

    def _shake_hands(self, event: Request | Response, /) -> None:
        assert isinstance(event, Request)
        protocol = self._protocol
        if self._path is not None and event.path.partition("?")[0] != self._path:
            response = protocol.reject(404, f"there is nothing at {event.path[:200]}\n")
            protocol.handshake_exc = NegotiationError(f"the path {event.path[:200]!r}")
        else:
            response = protocol.accept(event)
        protocol.send_response(response)
        self.established = protocol.state is State.OPEN


@functools.cache
def _selection(offered: tuple[str, ...]) -> Callable[[ServerProtocol, Sequence[Subprotocol]], Subprotocol | None]:
    def select(_: ServerProtocol, wanted: Sequence[Subprotocol]) -> Subprotocol | None:
        common = [name for name in offered if name in wanted]
        if wanted and offered and not common:
            raise NegotiationError(f"sub-protocol {', '.join(wanted)}; served are {', '.join(offered)}")
        return Subprotocol(common[0]) if common else None

    return select


class WebSocketClientFilter(_Frames):
    """The client's side.  What the server says beyond the handshake is passed on like on the other side."""

    __slots__ = ()
    _protocol: ClientProtocol

    def __init__(self, uri: str, peer: str, subprotocol: str = "mqtt", max_frame_bytes: int = 17 << 20) -> None:
        super().__init__(
            peer,
            ClientProtocol(
                parse_uri(uri), subprotocols=[Subprotocol(subprotocol)], max_size=max_frame_bytes, logger=_silent
            ),
            max_frame_bytes,
        )

    def begin(self) -> None:
        """Ask for the upgrade; `answers` has the request."""
        self._protocol.send_request(self._protocol.connect())

    def _shake_hands(self, _: Request | Response, /) -> None:
        self.established = self._protocol.state is State.OPEN
