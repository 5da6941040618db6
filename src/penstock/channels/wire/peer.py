"""The serving side of links between servers and modulators: S2M (a server asks a modulator) and M2S (the other way).

One CONNECT goes straight to ready; after that every request is a message with an id, answered by whoever serves.  Time,
limits and keep-alive are those of a client's link.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from penstock.channels.ids import Nid
from penstock.channels.model import Limits
from penstock.channels.wire.cutter import Item
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.channels.wire.link import OVERLOADED, ClientLink, LinkState
from penstock.channels.wire.settings import WireSettings
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Refused
from penstock.metrics import Metric
from penstock.net import Connection

__all__ = ["PeerLink", "PeerShell", "Service", "Serve"]

_log = logging.getLogger(__name__)


class Service(msgspec.Struct, kw_only=True):
    """What is served on such a link."""

    connect: str
    """The name of the first message: S2M_CONNECT or M2S_CONNECT."""
    ack: dict[str, Any]
    """What its acknowledgement says beyond the limits."""
    takes: frozenset[str]
    """The messages that may follow."""
    answer: Callable[[Frame], Awaitable[bytes]]
    settings: WireSettings
    secret: str = ""
    failures: Metric | None = None
    rejected: Metric | None = None
    accepted: Metric | None = None
    active: Metric | None = None
    queue_full: Metric | None = None
    peers: set[Any] = msgspec.field(default_factory=set)


class Serve(msgspec.Struct, frozen=True):
    """Answer one message."""

    frame: Frame


class PeerLink(ClientLink):
    """One server or modulator at the other end."""

    def __init__(self, service: Service, *, now: float, new_ping_id: Callable[[], int] = lambda: 1) -> None:
        super().__init__(service.settings, Limits(), now=now, new_ping_id=new_ping_id)
        self._service = service

    def _request(
        self,
        item: Item,
        now: float,
        now_ms: int,  # noqa: ARG002
        is_connected: Callable[[Nid], bool],  # noqa: ARG002
    ) -> Serve | None:
        service = self._service
        if isinstance(item, Frame) and self.state is LinkState.READY:
            if item.name == "PONG":
                self._ponged(item.fields["id"], now)
                return None
            if item.name in service.takes:
                if self.in_flight > self._settings.max_inflight_requests:
                    self.silent_close = True
                    self.end("more requests under way than allowed")
                    return None
                self._active = True
                return Serve(item)
        elif isinstance(item, Frame) and self.state is LinkState.CONNECTING and item.name == service.connect:
            self._greet(item, now)
            return None
        self.fail("UNEXPECTED_MESSAGE")
        return None

    def _greet(self, frame: Frame, now: float) -> None:
        service, settings = self._service, self._settings
        why = None
        if frame.fields["version"] != 1:
            why = "UNSUPPORTED_PROTOCOL_VERSION"
        elif service.secret and not _same(frame.fields["secret"] or "", service.secret):
            why = "UNAUTHORIZED"
        if why is not None:
            if service.failures is not None:
                service.failures.add()
            self.fail(why)
            return
        interval = settings.heartbeat_ms(frame.fields["heartbeat_interval"])
        self._heartbeat = interval / 1000
        self.state = LinkState.READY
        self._state_deadline = now + self._heartbeat
        self.send(
            encode_frame(
                f"{service.connect}_ACK",
                {
                    "heartbeat_interval": interval,
                    "max_inflight_requests": settings.max_inflight_requests,
                    "max_message_size": settings.max_message_size,
                    "max_payload_size": settings.max_payload_size,
                    **service.ack,
                },
            )
        )


class PeerShell:
    """The core of one such connection, as ``net`` sees it."""

    def __init__(self, service: Service, clock: Clock = SYSTEM_CLOCK) -> None:
        self._service, self._now = service, clock.monotonic
        self.link = PeerLink(service, now=self._now(), new_ping_id=lambda: random.randrange(1, 1 << 32))
        self._connection: Connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: float | None = None
        self._slow = False

    def opened(self, connection: Connection) -> None:
        """Let the peer in, or turn it away."""
        self._connection = connection
        service = self._service
        if len(service.peers) >= service.settings.max_connections:
            if service.rejected is not None:
                service.rejected.add()
            connection.write(OVERLOADED)
            connection.close("max connections reached")
            return
        service.peers.add(self)
        if service.accepted is not None:
            service.accepted.add()
        if service.active is not None:
            service.active.add()
        self._flush()

    def received(self, data: bytes) -> None:
        """Take what the peer sent."""
        now = self._now()
        self.link.feed(data, now)
        while (request := self.link.next_request(now, 0, bool)) is not None:
            assert isinstance(request, Serve)
            self.link.in_flight += 1
            task = asyncio.get_running_loop().create_task(self._serve(request.frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._flush()

    async def _serve(self, frame: Frame) -> None:
        try:
            self.link.send(await self._service.answer(frame))
        except Refused as exc:
            self.link.refused(exc, None if exc.reason == "UNEXPECTED_MESSAGE" else frame.id)
        except Exception as exc:  # noqa: BLE001 - it is an answer
            _log.warning("%s: %s failed: %r", self._connection.peer.address, frame.name, exc)
            self.link.send(encode_frame("ERROR", {"id": frame.id, "reason": "INTERNAL_SERVER_ERROR"}))
        finally:
            self.link.in_flight -= 1
        self._flush()

    def congested(self) -> None:
        """Stop reading from a peer that does not read."""
        self._slow = True
        self._connection.pause_reading()

    def writable(self) -> None:
        """Go on."""
        self._slow = False
        self._connection.resume_reading()
        self._flush()

    def expired(self) -> None:
        """Act on a deadline."""
        self._due = None
        self.link.tick(self._now())
        self._flush()

    def closed(self, reason: str) -> None:
        """Forget the peer."""
        self.link.end(reason)
        if self in self._service.peers:
            self._service.peers.discard(self)
            if self._service.active is not None:
                self._service.active.add(-1)
        for task in self._tasks:
            task.cancel()

    def shut_down(self) -> None:
        """Tell the peer that the server stops."""
        self.link.fail("SERVER_SHUTTING_DOWN")
        self._flush()

    def _flush(self) -> None:
        link = self.link
        if self._slow and link.ended is None:
            if link.waiting <= self._service.settings.outbound_message_queue_size:
                return
            if self._service.queue_full is not None:
                self._service.queue_full.add()
            link.overflow()
        if link.has_output:
            self._connection.write_many(link.take_output())
        if link.ended is not None:
            if link.silent_close:
                self._connection.abort(link.ended)
            else:
                self._connection.close(link.ended)
        elif link.deadline != self._due:
            self._due = link.deadline
            self._connection.set_deadline(
                None if self._due is None else max(0.0, self._due - self._now()), absolute=True
            )


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())
