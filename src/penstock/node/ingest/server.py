"""The ingest sockets of a node: a part that takes batches from producers on this machine.

A unix socket in the data directory, and TCP on loopback where a port is given.  Producers are read no further while
more waits than may, so a slow disk slows them down and loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, Final

import msgspec

from penstock.disk import disk_for, in_disk_thread
from penstock.errors import Backpressure, LockedError, OptionsError, PenstockError, ProtocolError
from penstock.lifecycle import Health, State
from penstock.net.connection import Connection
from penstock.net.listen import Endpoint, Listeners, listen
from penstock.node.ingest import wire
from penstock.node.ingest.channel import IngestChannel
from penstock.node.ingest.wire import FrameCutter, Hello, IngestAck, IngestRefusal, Welcome
from penstock.node.options import CHANNEL_NAME, NodeChannelOptions, NodeConfig

__all__ = ["IngestPart", "SOCKET", "socket_path"]

_log = logging.getLogger(__name__)

SOCKET: Final = "ingest.sock"
HELLO_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 30.0
MOST_TOLD: Final = 100


def socket_path(data: str) -> str:
    """Return where the unix socket of a data directory is.

    >>> socket_path("penstock-data")
    'penstock-data/ingest.sock'
    """
    return os.path.join(data, SOCKET)


class IngestPart:
    """Takes records from producers and writes them; see penstock.lifecycle.Part.

    >>> IngestPart(NodeConfig(data="nowhere")).name
    'ingest'
    """

    name = "ingest"

    def __init__(self, config: NodeConfig, ports: dict[str, int] | None = None) -> None:
        self.config, self._ports = config, ports
        self.refusal = ""
        """Why nothing is taken now: the disk budget is used up."""
        self.channels: dict[str, IngestChannel] = {}
        self._opening: dict[str, asyncio.Task[IngestChannel]] = {}
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._shut: dict[str, str] = {}
        """Which channels could not be opened, and why, as it was said."""
        self._listeners: Listeners | None = None
        self._state = State.NEW
        self._stopped = asyncio.Event()

    # --- The life of a Part

    async def start(self) -> None:
        """Listen."""
        options, data = self.config.ingest, self.config.data
        self._state = State.STARTING
        await in_disk_thread(disk_for(data).make_folder, data)
        endpoints = [Endpoint(name="ingest", path=options.unix or socket_path(data), mode=0o600)]
        if options.port is not None:
            endpoints.append(Endpoint(name="ingest-tcp", host=options.bind, port=options.port))
        self._listeners = await listen(endpoints, lambda: ProducerLink(self), ports=self._ports)
        self._state = State.READY

    async def ready(self) -> None:
        """Return at once: ``start`` has opened everything."""

    async def drain(self, seconds: float) -> None:
        """Take nobody in; append and acknowledge what waits."""
        if self._listeners is None or not self._state.serves:
            return
        self._state = State.DRAINING
        self._listeners.stop_accepting()
        await self._close_channels(seconds)
        await self._listeners.close("the node stops", min(1.0, seconds))

    async def stop(self) -> None:
        """End everything."""
        await self._close_channels(5.0)
        if self._listeners is not None:
            await self._listeners.close("the node stops", 1.0)
            self._listeners = None
        self._state = State.STOPPED
        self._stopped.set()

    async def wait(self) -> None:
        """Return when it has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is."""
        if self._state is State.READY and self.refusal:
            return Health(State.DEGRADED, self.refusal)
        return Health(self._state)

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens."""
        return {} if self._listeners is None else dict(self._listeners.addresses)

    def describe(self) -> dict[str, Any]:
        """Return the channels that are open."""
        channels = {
            name: {"producers": len(one.producers), "records": one.records, "log": one.writer_path}
            for name, one in self.channels.items()
        }
        return {"listeners": self.addresses, "channels": channels, "refusal": self.refusal}

    # --- Channels

    async def channel(self, name: str, content: str = "") -> IngestChannel:
        """Return an open channel, opened if need be; OptionsError where its content is another."""
        channel = await self._channel(name, content)
        if content and content != channel.content:
            raise OptionsError(f"{name}: its content is {channel.content}, not {content}")
        return channel

    async def _channel(self, name: str, content: str) -> IngestChannel:
        found = self.channels.get(name)
        if found is not None and found.failure is None:
            return found
        options = self.config.channel_of(name) if CHANNEL_NAME.fullmatch(name) else None
        if options is None:
            raise OptionsError(f"{name!r}: there is no such channel, and none is made for it")
        if content == "envelope/1" and all(one.name != name for one in self.config.channel):
            options = msgspec.structs.replace(options, content=content)
        if not self._state.serves:
            raise Backpressure("the node stops")
        task = self._opening.get(name)
        if task is None:
            task = self._opening[name] = asyncio.create_task(self._open(options))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(task)

    def use(self, config: NodeConfig) -> None:
        """Take over another configuration; a channel that is kept differently is closed and opened again."""
        before, self.config = self.config, config
        for name, channel in list(self.channels.items()):
            if before.channel_of(name) != config.channel_of(name):
                del self.channels[name]
                self._let_close(channel)

    async def _open(self, options: NodeChannelOptions) -> IngestChannel:
        if self._closing:
            await asyncio.wait(set(self._closing))  # it may be the one that has the log
        channel = IngestChannel(options, self.config.data, self.config.ingest.queue_bytes)
        try:
            await channel.open()
        except Exception as exc:
            if self._shut.get(options.name) != str(exc):  # its producers ask again and again
                _log.error("ingest: channel %s cannot be opened, its producers wait: %s", options.name, exc)
            if len(self._shut) >= MOST_TOLD:
                self._shut.clear()
            self._shut[options.name] = str(exc)
            raise
        self._shut.pop(options.name, None)
        self.channels[options.name] = channel
        return channel

    def entered(self, channel: IngestChannel, link: ProducerLink) -> None:
        """Count a producer in; LockedError where another process has its name."""
        for other in list(channel.producers):
            if isinstance(other, ProducerLink) and other.writer == link.writer:
                if other.instance != link.instance:
                    raise LockedError(f"{channel.options.name}: another process writes as {link.writer}")
                other.replaced()
        channel.producers.add(link)
        handle = self._idle.pop(channel.options.name, None)
        if handle is not None:
            handle.cancel()

    def left(self, channel: IngestChannel, link: ProducerLink) -> None:
        """Count a producer out; a channel without any is closed after a while."""
        channel.producers.discard(link)
        name = channel.options.name
        if not channel.producers and self.channels.get(name) is channel and self._state.serves:
            if channel.failure is not None:
                del self.channels[name]
                return
            self._idle[name] = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._close_idle, channel)

    def _close_idle(self, channel: IngestChannel) -> None:
        self._idle.pop(channel.options.name, None)
        if not channel.producers and self.channels.get(channel.options.name) is channel:
            del self.channels[channel.options.name]
            self._let_close(channel)

    def _let_close(self, channel: IngestChannel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_channels(self, seconds: float) -> None:
        for handle in self._idle.values():
            handle.cancel()
        self._idle.clear()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        channels = list(self.channels.values())
        self.channels.clear()
        closing = [asyncio.ensure_future(channel.close()) for channel in channels] + list(self._closing)
        if closing:
            await asyncio.wait(closing, timeout=max(seconds, 5.0))


class ProducerLink:
    """One connection of a producer."""

    def __init__(self, part: IngestPart) -> None:
        self._part = part
        self.writer = self.instance = ""
        self._connection: Connection
        self._cutter: FrameCutter
        self._channel: IngestChannel | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._paused = self._over = self._welcomed = False

    # --- From the connection

    def opened(self, connection: Connection) -> None:
        """Wait for its hello."""
        self._connection, self._cutter = connection, FrameCutter(f"ingest {connection.peer.address}")
        connection.set_deadline(HELLO_SECONDS)

    def received(self, data: bytes) -> None:
        """Take frames."""
        if self._over:
            return
        try:
            for kind, body in self._cutter.feed(data):
                self._take(kind, body)
        except PenstockError as exc:
            self.refused(exc)

    def congested(self) -> None:
        """Read no further while acknowledgements wait."""
        self._pause()

    def writable(self) -> None:
        """Go on."""
        self.ease()

    def expired(self) -> None:
        """Let go of who says nothing."""
        self._connection.abort("no hello")

    def closed(self, reason: str) -> None:  # noqa: ARG002 - part of the seam
        """Count it out; what waits is appended."""
        self._over = True
        if self._channel is not None:
            self._part.left(self._channel, self)

    # --- From the channel

    def greeted(self, last: int) -> None:
        """Tell where to go on: everything that came from it before is in the log."""
        if not self._over and self._channel is not None:
            self._welcomed = True
            welcome = Welcome(last, wire.MAX_BATCH_BYTES, self._channel.has_times)
            self._connection.write(wire.frame(wire.WELCOME, msgspec.msgpack.encode(welcome)))

    def acked(self, ack: IngestAck) -> None:
        """Tell what the log has."""
        if not self._over:
            self._connection.write(wire.encode_ack(ack))

    def synced(self, number: int, position: int) -> None:
        """Tell that a sync is done."""
        if not self._over:
            self._connection.write(wire.frame(wire.SYNCED, wire.NUMBER_AT.pack(number, position)))

    def refused(self, error: Exception) -> None:
        """Tell why, and close."""
        if self._over:
            return
        self._over = True
        body = msgspec.msgpack.encode(IngestRefusal(type(error).__name__, str(error)))
        self._connection.write(wire.frame(wire.REFUSED, body))
        self._connection.close(str(error))

    def replaced(self) -> None:
        """Let go: its producer has come back by another connection."""
        self._over = True
        self._connection.abort("its producer has connected again")

    def ease(self) -> None:
        """Read on, unless the channel is full."""
        if self._paused and not self._over and (self._channel is None or not self._channel.is_full):
            self._paused = False
            self._connection.resume_reading()

    # --- Frames

    def _take(self, kind: int, body: bytes) -> None:
        peer = f"ingest {self._connection.peer.address}"
        if kind == wire.HELLO and self._greeting is None:
            hello = wire.decode_message(peer, body, Hello)
            if hello.version != wire.VERSION:
                raise ProtocolError(peer, "a frame", f"version {hello.version} of the protocol is not spoken here")
            if not CHANNEL_NAME.fullmatch(hello.writer):
                raise ProtocolError(peer, "a frame", f"{hello.writer!r} is no name of a producer")
            self.writer, self.instance = hello.writer, hello.instance
            self._connection.set_deadline(None)
            self._greeting = asyncio.get_running_loop().create_task(self._greet(hello))
        elif self._channel is None or not self._welcomed:
            raise ProtocolError(peer, "a frame", f"frame {kind} before the greeting was over")
        elif kind == wire.BATCH:
            if self._part.refusal:
                raise Backpressure(self._part.refusal)
            self._channel.put(self, wire.decode_batch(peer, body), len(body))
            if self._channel.is_full:
                self._pause()
        elif kind == wire.SYNC and len(body) == wire.NUMBER.size and any(body):
            self._channel.sync(self, wire.NUMBER.unpack(body)[0])
        else:
            raise ProtocolError(peer, "a frame", f"frame {kind} of {len(body)} bytes")

    async def _greet(self, hello: Hello) -> None:
        try:
            if self._part.refusal:
                raise Backpressure(self._part.refusal)
            channel = await self._part.channel(hello.channel, hello.content)
            if self._over:
                return
            self._part.entered(channel, self)
        except Exception as exc:  # noqa: BLE001 - whatever it is, its producer is told
            self.refused(exc)
            return
        self._channel = channel
        channel.greet(self)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._connection.pause_reading()
