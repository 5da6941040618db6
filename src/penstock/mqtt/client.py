"""An asyncio client on the codec of the broker: MQTT 3.1.1 and 5.0, QoS 0 to 2, that connects again and goes on.

Sending waits where the server or the network is slow, so a producer cannot run away from its connection.  Receiving
stops reading where the consumer is slow, so the server keeps what is not consumed.  QoS 1 and 2 messages are
acknowledged when the consumer comes back for more: what it was working on when it died is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

import msgspec

from penstock.errors import ClosedError, NotConnected, OptionsError, PenstockError, ProtocolError, Refused
from penstock.kernel.mqtt import Run
from penstock.mqtt.client_core import Arrived, ClientCore
from penstock.mqtt.options import LONGEST_SECONDS
from penstock.mqtt.packets import NONE, Connack, Connect, Disconnect, Filter, Properties, Subscribe, Unsubscribe, Will
from penstock.mqtt.properties import decode_properties, encode_varint
from penstock.mqtt.reasons import Reason
from penstock.mqtt.session import NEVER
from penstock.net.connection import Connection, ConnectionOptions
from penstock.net.dial import Target, dial
from penstock.options import options_from, shows_options

__all__ = ["Client", "ClientOptions", "Message"]

_log = logging.getLogger(__name__)

_CONNACK_3 = {1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: 0x87}
_LATER = frozenset({Reason.SERVER_UNAVAILABLE, Reason.SERVER_BUSY, Reason.SERVER_SHUTTING_DOWN})


class Message(msgspec.Struct, frozen=True):
    """One message that came in.

    >>> Message("plant/7", b"12").topic
    'plant/7'
    """

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    properties: Properties = NONE
    packet_id: int = 0


def check_waits(keep_alive: int, connect_seconds: float, reconnect_seconds: tuple[float, float]) -> None:
    """Refuse times that no client can keep.

    >>> check_waits(70_000, 10.0, (0.1, 30.0))
    Traceback (most recent call last):
    penstock.errors.OptionsError: keep_alive=70000: must be between 0 and 65535
    """
    if not 0 <= keep_alive <= 65535:
        raise OptionsError(f"keep_alive={keep_alive}: must be between 0 and 65535")
    if not 0 < connect_seconds <= LONGEST_SECONDS:
        raise OptionsError(f"connect_seconds={connect_seconds}: must be above 0 and at most {LONGEST_SECONDS}")
    if not all(0 < each <= LONGEST_SECONDS for each in reconnect_seconds):
        raise OptionsError(f"reconnect_seconds={reconnect_seconds}: must be above 0 and at most {LONGEST_SECONDS}")


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a client connects and how much it holds.

    >>> ClientOptions(version=6)
    Traceback (most recent call last):
    penstock.errors.OptionsError: version=6: must be 3, 4 (MQTT 3.1.1) or 5
    """

    client_id: str = ""
    """Empty: the server picks one, or, in 3.1.1, forgets the client with its connection."""
    version: int = 5
    """5, or 4 for MQTT 3.1.1."""
    clean: bool = True
    """Begin a new session with the first connection; later ones go on with it while the server knows it."""
    session_expiry: int = 0
    """Seconds for which the server keeps the session of an absent client (MQTT 5)."""
    keep_alive: int = 60
    """Seconds after which a silent connection is checked by a ping; 0 never."""
    username: str | None = None
    """Who the client is; None: nobody in particular."""
    password: str | bytes | None = None
    """What proves it."""
    will: Will | None = None
    """What the server publishes when the connection is lost."""
    properties: Properties = NONE
    """Further properties of CONNECT."""
    tls: ssl.SSLContext | None = None
    """For mqtts:// and wss://; the machine's CAs unless given."""
    connect_seconds: float = 10.0
    """How long connecting may take, the server's answer included."""
    reconnect: bool = True
    """Connect again after a loss; what was not finished is sent again."""
    reconnect_seconds: tuple[float, float] = (0.1, 30.0)
    """The first pause and the longest; it doubles, with jitter."""
    max_queued_messages: int = 10_000
    """Messages that wait for the consumer; beyond it nothing is read."""
    receive_maximum: int = 1_000
    """QoS 1 and 2 messages that the server may send before any is acknowledged (MQTT 5)."""

    max_inflight: int | None = None
    """QoS 1 and 2 messages that are sent before any is acknowledged; the server's receive maximum bounds it too.
    None is no bound of our own in MQTT 5 and 20 before it: mosquitto 2.0 acknowledges further QoS 2 messages of a
    3.1.1 client and loses them."""

    bridge: bool = False
    """Before MQTT 5: ask for nothing back that was sent, as mosquitto's bridges do; other servers may refuse it."""

    def __post_init__(self) -> None:
        if self.version not in (3, 4, 5):
            raise OptionsError(f"version={self.version}: must be 3, 4 (MQTT 3.1.1) or 5")
        check_waits(self.keep_alive, self.connect_seconds, self.reconnect_seconds)
        for name, low, high in (("session_expiry", 0, NEVER), ("receive_maximum", 1, 65535)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise OptionsError(f"{name}={value}: must be between {low} and {high}")

    def connect_packet(self) -> Connect:
        """Return the first packet."""
        properties = NONE
        if self.version == 5:
            properties = msgspec.structs.replace(
                self.properties,
                session_expiry=self.session_expiry or None,
                receive_maximum=self.receive_maximum,
            )
        password = self.password.encode() if isinstance(self.password, str) else self.password
        return Connect(
            self.client_id,
            self.version,
            self.clean,
            self.keep_alive,
            self.username,
            password,
            self.will,
            properties,
            self.bridge and self.version < 5,
        )


class Client:
    """A connection to a broker that mends itself.

    >>> from penstock.mqtt.server import MqttServer, ServerOptions
    >>> async def demo():
    ...     server = MqttServer(ServerOptions(port=0)); await server.start()
    ...     async with Client(server.addresses["mqtt"]) as client:
    ...         await client.subscribe("plant/#", qos=1)
    ...         await client.publish_many("plant/7", [b"12", b"13"], qos=1)
    ...         found = []
    ...         async for message in client.messages():
    ...             found.append(message.payload)
    ...             if len(found) == 2: break
    ...     await server.stop()
    ...     return found
    >>> asyncio.run(demo())
    [b'12', b'13']
    """

    @shows_options(ClientOptions)
    def __init__(self, address: str | Target, options: ClientOptions | None = None, **given: Any) -> None:
        """Options as keywords or as one object; ClientOptions says what each means."""
        self.options = options_from(ClientOptions, options, given)
        if self.options.version == 3 and not self.options.client_id:  # MQTT 3.1 knows no empty client id
            self.options = msgspec.structs.replace(self.options, client_id=f"penstock-{uuid.uuid4().hex[:12]}")
        self.target = Target.parse(address) if isinstance(address, str) else address
        self.client_id = self.options.client_id
        self.server: Connack | None = None
        """What the server said when it let the client in."""
        self.reconnects = 0
        window = self.options.max_inflight or (65535 if self.options.version == 5 else 20)
        self._core = ClientCore(self.options.connect_packet(), window)
        self._connection: Connection | None = None
        self._opened = asyncio.Event()
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._arrived: deque[Arrived] = deque()
        self._arrived_count = 0
        self._taken: list[Arrived] = []
        self._handed = 0  # messages of these that the consumer has seen
        self._in_hand = 0  # the last of them, which it may be at work on
        self._begun: Iterator[Message] = iter(())
        self._more = asyncio.Event()
        self._answer: asyncio.Future[Connack] | None = None
        self._failure: Exception | None = None
        self._closing = False
        self._again: asyncio.Task[None] | None = None
        self._ping: asyncio.TimerHandle | None = None
        self._ping_seconds = 0.0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.give_back()
        await self.stop()

    @property
    def connected(self) -> bool:
        """Whether the server has let the client in and the connection stands."""
        return self._opened.is_set()

    # --- Life

    async def start(self) -> None:
        """Connect; raises what the server or the network says against it."""
        await self._connect()

    async def stop(self) -> None:
        """Acknowledge what the consumer has seen, say goodbye and close; what is not finished ends with ClosedError.

        A ``with`` block that raises acknowledges nothing of what was in hand; who stops otherwise says ``give_back``.
        """
        if self._closing:
            return
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        if self._connection is not None and self.connected:
            self._put_back()
            self._acknowledge(self._handed)
            self._core.leave()
            self._send()
            self._connection.close("the client leaves")
            await self._gone.wait()
        self._fail(ClosedError(f"{self.target}: the client is closed"))

    async def _connect(self) -> None:
        options = self.options
        self._core.begin()
        self._answer = asyncio.get_running_loop().create_future()
        link = _Link(self)
        limits = ConnectionOptions(handshake_seconds=options.connect_seconds)
        connection = await dial(self.target, link, tls=options.tls, options=limits)
        try:
            async with asyncio.timeout(options.connect_seconds):
                connack = await self._answer
        except BaseException as exc:
            connection.abort("no CONNACK")
            await self._gone.wait()
            if isinstance(exc, TimeoutError):
                raise NotConnected(f"{self.target}: no CONNACK within {options.connect_seconds:g} s") from exc
            raise
        if connack.reason:
            connection.abort("refused")
            await self._gone.wait()
            code = connack.reason if self._core.version5 else _CONNACK_3.get(connack.reason, Reason.UNSPECIFIED)
            detail = connack.properties.reason_string or f"{self.target} does not let {self.client_id!r} in"
            raise Refused(_name(code), detail)
        self.server = connack
        if connack.properties.assigned_client_id is not None:
            self.client_id = self._core.connect.client_id = connack.properties.assigned_client_id
        if self._core.version5 or not options.clean:
            self._core.connect.clean = False  # from now on a connection goes on with this session
        keep_alive = connack.properties.server_keep_alive
        self._ping_seconds = float(options.keep_alive if keep_alive is None else keep_alive)
        if self._ping_seconds:
            connection.set_deadline(self._ping_seconds * 1.5)
            self._ping = asyncio.get_running_loop().call_later(self._ping_seconds * 0.8, self._keep_alive)
        self._opened.set()

    def _keep_alive(self) -> None:
        self._core.ping()
        self._send()
        self._ping = asyncio.get_running_loop().call_later(self._ping_seconds * 0.8, self._keep_alive)

    async def _connect_again(self) -> None:
        pause, longest = self.options.reconnect_seconds
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, longest)
            try:
                await self._connect()
            except Refused as exc:
                if Reason[exc.reason] not in _LATER:
                    self._fail(exc)
                    return
                _log.info("%s", exc)
            except PenstockError as exc:
                _log.info("%s; next try in %.1f s at most", exc, pause)
            else:
                self.reconnects += 1
                return

    # --- What the connection tells

    def _link_opened(self, connection: Connection) -> None:
        self._connection = connection
        self._gone.clear()
        self._writable.set()
        self._send()

    def _link_received(self, data: bytes) -> None:
        for event in self._core.receive(data):
            if isinstance(event, Arrived):
                self._arrived.append(event)
                self._arrived_count += event.run.count
                self._more.set()
            elif isinstance(event, Connack):
                assert self._answer is not None
                if not self._answer.done():
                    self._answer.set_result(event)
            elif isinstance(event, Disconnect):
                raise ProtocolError(str(self.target), "DISCONNECT", _name(event.reason))
        if self._arrived_count > self.options.max_queued_messages and self._connection is not None:
            self._connection.pause_reading()
            self._connection.set_deadline(None)  # who does not read hears no PINGRESP
        self._send()

    def _link_closed(self, reason: str) -> None:
        self._connection = None
        self._gone.set()
        self._core.lost()
        was_open = self._opened.is_set()
        self._opened.clear()
        self._writable.set()
        if self._ping is not None:
            self._ping.cancel()
            self._ping = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NotConnected(f"{self.target}: {reason}"))
        elif was_open and not self._closing:
            _log.info("%s: %s", self.target, reason)
            if self.options.reconnect:
                self._again = asyncio.get_running_loop().create_task(self._connect_again())
            else:
                self._fail(NotConnected(f"{self.target}: {reason}"))

    def _fail(self, exc: Exception) -> None:
        """Give up: whoever waits is told."""
        self._failure = exc
        self._opened.set()
        self._writable.set()
        self._more.set()
        self._core.give_up()

    def _send(self) -> None:
        if self._connection is not None:
            data = self._core.data_to_send()
            if data:
                self._connection.write(data)

    # --- Sending

    async def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, properties: Properties = NONE
    ) -> None:
        """Send one message: QoS 0 returns when it is on its way, QoS 1 and 2 when the server has it."""
        await self.publish_many(topic, (payload,), qos=qos, retain=retain, properties=properties)

    async def publish_many(
        self,
        topic: str,
        payloads: Sequence[bytes],
        *,
        qos: int = 0,
        retain: bool = False,
        properties: Properties = NONE,
    ) -> None:
        """Send messages of one topic in order, as one run; raises Refused where the server takes one of them not."""
        if not payloads:
            return
        await self._until_open()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(worst: int, _: Sequence[int]) -> None:
            if not answer.done():
                answer.set_result(worst)

        self._core.publish(topic, payloads, qos, retain, properties, done)
        self._send()
        await self._until_writable()
        worst = await answer
        if worst >= 0x80:
            self._raise_failure()
            raise Refused(_name(worst), f"a message on {topic}")

    async def subscribe(
        self, *filters: str | Filter, qos: int = 0, identifier: int | None = None, properties: Properties = NONE
    ) -> tuple[int, ...]:
        """Ask for messages; return what is granted for each filter: a QoS, or a reason code from 0x80 on."""
        wanted = tuple(Filter(each, qos) if isinstance(each, str) else each for each in filters)
        if identifier is not None:
            properties = msgspec.structs.replace(properties, subscription_ids=(identifier,))
        return await self._ask(Subscribe(0, wanted, properties))

    async def unsubscribe(self, *filters: str, properties: Properties = NONE) -> tuple[int, ...]:
        """Ask for no more."""
        return await self._ask(Unsubscribe(0, filters, properties))

    async def _ask(self, request: Subscribe | Unsubscribe) -> tuple[int, ...]:
        await self._until_open()
        answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()

        def done(_: int, reasons: Sequence[int]) -> None:
            if not answer.done():
                answer.set_result(tuple(reasons))

        self._core.ask(request, done)
        self._send()
        found = await answer
        self._raise_failure()
        return found

    async def _until_open(self) -> None:
        if self._failure is None and self._connection is None and self._again is None:
            raise NotConnected(f"{self.target}: the client was not started")
        await self._opened.wait()
        self._raise_failure()

    async def _until_writable(self) -> None:
        await self._writable.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- Receiving

    async def messages(self) -> AsyncIterator[Message]:
        """Yield messages one by one; each is acknowledged, with others of its run, once it has been dealt with.

        Which is when the next one is asked for: where several iterations share a client, by any of them.
        """
        while True:
            while (message := next(self._begun, None)) is not None:  # a run; the next iteration goes on where one left
                self._handed, self._in_hand = self._handed + 1, 1
                yield message
            self._acknowledge(self._handed)
            await self._until_arrived()
            if not self._arrived:
                return
            arrived = self._arrived.popleft()
            self._took(arrived.run.count)
            self._taken, self._begun = [arrived], _messages_of(arrived.run)

    async def batches(self) -> AsyncIterator[list[Run]]:
        """Yield all that has come in, as runs of one topic; acknowledged when the next batch is asked for."""
        while True:
            self._put_back()
            self._acknowledge(self._handed)
            await self._until_arrived()
            if not self._arrived:
                return
            self._taken = list(self._arrived)
            self._arrived.clear()
            self._handed = self._in_hand = self._arrived_count
            self._took(self._arrived_count)
            yield [each.run for each in self._taken]

    def give_back(self) -> None:
        """Before ``stop``: do not acknowledge what was handed out last, a message or a batch; it comes again."""
        self._handed, self._in_hand = self._handed - self._in_hand, 0

    def _put_back(self) -> None:
        """Have what ``messages`` began and did not hand out come first again."""
        rest = sum(1 for _ in self._begun)
        if rest:
            (arrived,) = self._taken
            head, tail = arrived.run.split(arrived.run.count - rest)
            self._taken = [Arrived(head, arrived.session)]
            self._arrived.appendleft(Arrived(tail, arrived.session))
            self._arrived_count += rest

    async def _until_arrived(self) -> None:
        while not self._arrived:
            if isinstance(self._failure, ClosedError):
                return
            self._raise_failure()
            self._more.clear()
            await self._more.wait()

    def _took(self, count: int) -> None:
        """Read again where the consumer has caught up."""
        self._arrived_count -= count
        if self._arrived_count <= self.options.max_queued_messages // 2 and self._connection is not None:
            self._connection.resume_reading()
            if self._ping_seconds:
                self._connection.set_deadline(self._ping_seconds * 1.5)

    def _acknowledge(self, count: int) -> None:
        """Acknowledge the first messages of those that were handed out; the others come again."""
        for arrived in self._taken:
            if count <= 0:
                break
            if arrived.run.count > count:
                arrived = Arrived(arrived.run.split(count)[0], arrived.session)
            self._core.acknowledge(arrived)
            count -= arrived.run.count
        self._taken, self._handed, self._in_hand = [], 0, 0
        self._send()


class _Link:
    """The core of one connection of a client; what a former connection still says is not heard."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection: Connection | None = None

    def opened(self, connection: Connection) -> None:
        self._connection = connection
        self._client._link_opened(connection)

    def received(self, data: bytes) -> None:
        self._client._link_received(data)

    def congested(self) -> None:
        self._client._writable.clear()

    def writable(self) -> None:
        self._client._writable.set()

    def expired(self) -> None:
        assert self._connection is not None
        self._connection.abort("the server is silent")

    def closed(self, reason: str) -> None:
        if self._client._connection is self._connection:
            self._client._link_closed(reason)


def _messages_of(run: Run) -> Iterator[Message]:
    topic, properties = run.topic.decode(), _properties_of(run)
    for index, payload in enumerate(run.payloads()):
        packet_id = run.first_id + index if run.qos else 0
        yield Message(topic, payload, run.qos, run.retain, run.dup, properties, packet_id)


def _name(code: int) -> str:
    try:
        return Reason(code).name
    except ValueError:
        return f"reason {code:#04x}"


def _properties_of(run: Any) -> Properties:
    if not run.forward and run.expiry < 0:
        return NONE
    raw = run.forward
    found, _ = decode_properties(encode_varint(len(raw)) + raw, 0, len(raw) + len(encode_varint(len(raw))), 3)
    return msgspec.structs.replace(found, message_expiry=run.expiry) if run.expiry >= 0 else found
