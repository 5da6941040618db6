"""A fast lane into a nats-py client: messages of watches go around its per-message machinery.

nats-py parses every message with two regular expressions and puts it on a queue as an object.  For a watch
that is most of the cost, so the lane stands in front of the client's parser: it cuts what the socket gave into
runs with the kernel, hands a run of a subscription that has an Inbox over as it is, and everything else to the
parser it stands in front of.  TLS, authentication, reconnects and requests stay with nats-py.

The lane needs one attribute of the client that is not documented (``_ps``).  Where a version has none, or while
a message was half read when the lane was put in, messages take the documented way and are put back into the
same bytes: slower, and nothing else changes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.errors import NotConnected, ProtocolError
from penstock.kernel import natswire
from penstock.kv.nats.wire import encode_message

__all__ = ["Inbox", "Lane", "lane_of", "open_inbox"]

CRLF = 2
CLOSED_LOOK_SECONDS = 1.0  # how often a waiting inbox looks whether the client was closed behind its back


class Inbox:
    """The messages of one subscription as raw bytes, until somebody takes them.

    >>> async def example():
    ...     inbox = Inbox(client=None, subject="_INBOX.1")
    ...     inbox.feed(bytearray(b"MSG a 1 0"))
    ...     return await inbox.take(1.0)
    >>> asyncio.run(example())
    b'MSG a 1 0'
    """

    def __init__(self, client: Any, subject: str) -> None:
        self.subject = subject
        self._client = client
        self._subscription: Any = None
        self._parts: list[bytes | bytearray] = []
        self._filled = asyncio.Event()
        self._closed = False

    def feed(self, part: bytes | bytearray) -> None:
        """Add a run of whole messages."""
        self._parts.append(part)
        self._filled.set()

    async def take(self, seconds: float) -> bytes:
        """Return everything that has come; b"" when nothing came in time.  NotConnected after the end."""
        if not self._parts and not self._closed:
            try:
                async with asyncio.timeout(seconds):
                    await self._filled.wait()
            except TimeoutError:
                pass
        parts, self._parts = self._parts, []
        self._filled.clear()
        if not parts and (self._closed or (self._client is not None and self._client.is_closed)):
            raise NotConnected(f"nats: the subscription to {self.subject} has ended")
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    async def on_message(self, message: Any) -> None:
        """Take a message that came the documented way."""
        self.feed(encode_message(message.subject, message.reply, message.headers, message.data or b""))

    async def close(self) -> None:
        """Unsubscribe; whoever waits in ``take`` is told."""
        if self._closed:
            return
        self._closed = True
        self._filled.set()
        lane = lane_of(self._client)
        if lane is not None and self._subscription is not None:
            lane.inboxes.pop(self._subscription._id, None)
        try:
            await self._subscription.unsubscribe()
        except Exception:  # noqa: BLE001, S110 - the connection is gone, and so is the subscription
            pass


class Lane:
    """Stands where a client's parser stood; see the head of this module.

    >>> lane_of(object()) is None
    True
    """

    def __init__(self, inner: Any, client: Any) -> None:
        self.inboxes: dict[int, Inbox] = {}
        self._inner = inner
        self._client = client
        self._rest = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reset(self) -> None:
        """Forget what is half read: the connection starts anew."""
        self._rest.clear()
        self._inner.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Sort what the socket gave; the client's read loop calls this."""
        inner, rest = self._inner, self._rest
        if getattr(inner, "needed", 0) and inner.state != 1:  # it was in the middle of a payload
            missing = inner.needed + CRLF - len(inner.buf)
            await inner.parse(data[:missing])
            data = data[missing:]
        elif inner.buf:
            rest += inner.buf
            inner.buf.clear()
        rest += data
        at = 0
        while at < len(rest):
            end, sid, count = natswire.cut_run(rest, at)
            if count < 0:
                raise _protocol_error()
            if end == at:
                break
            part, at = rest[at:end], end
            inbox = self.inboxes.get(sid)
            if inbox is None:
                await inner.parse(bytes(part))
            else:
                inbox.feed(part)
                self._client.stats["in_msgs"] += count
                self._client.stats["in_bytes"] += len(part)
        del rest[:at]


def lane_of(client: Any) -> Lane | None:
    """Return the lane of a client, put in on first use; None where the client has no place for it."""
    parser = getattr(client, "_ps", None)
    if isinstance(parser, Lane):
        return parser
    if not all(hasattr(parser, name) for name in ("parse", "reset", "buf", "state")):
        return None
    client._ps = Lane(parser, client)
    lane: Lane = client._ps
    return lane


async def open_inbox(client: Any) -> Inbox:
    """Subscribe to a new inbox.  Nothing is lost: the server knows it before anyone can send to it."""
    inbox = Inbox(client, client.new_inbox())
    lane = lane_of(client)
    # Limits of 0 mean none: a dropped message would be a hole, and flow control bounds what waits here.
    inbox._subscription = await client.subscribe(
        inbox.subject, cb=inbox.on_message, pending_msgs_limit=0, pending_bytes_limit=0
    )
    if lane is not None:
        lane.inboxes[inbox._subscription._id] = inbox
    return inbox


def _protocol_error() -> Exception:
    try:
        from nats.errors import ProtocolError as NatsProtocolError
    except ImportError:
        return ProtocolError("nats", "MSG", "the server's bytes are not the protocol")
    # nats-py's read loop knows this one: it drops the connection and dials again.
    return NatsProtocolError()
