"""WebSocket as a filter, on the sans-IO core of `websockets`: binary frames in, binary frames out.

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

__all__ = ["WebSocketOptions", "WebSocketFilter", "WebSocketClientFilter"]

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
    """What both sides share: frames once the handshake is done."""

    __slots__ = ("_peer", "_protocol", "ended", "established")

    def __init__(self, peer: str, protocol: ServerProtocol | ClientProtocol) -> None:
        self._peer = peer
        self._protocol = protocol
        self.established = False
        self.ended = False

    identity: Final[str | None] = None

    def receive(self, data: bytes) -> list[bytes]:
        """Return the payloads that ``data`` completes; raises ProtocolError where it is no WebSocket."""
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
        )

    def begin(self) -> None:
        """Ask for the upgrade; `answers` has the request."""
        self._protocol.send_request(self._protocol.connect())

    def _shake_hands(self, _: Request | Response, /) -> None:
        self.established = self._protocol.state is State.OPEN
