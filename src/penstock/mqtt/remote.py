"""Another broker: where it is, how we come in, and a client that is made again when it gave up."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from penstock.errors import OptionsError, PenstockError, Refused
from penstock.kernel.mqtt import Run
from penstock.mqtt.client import Client, ClientOptions, check_waits
from penstock.mqtt.packets import NONE, Properties
from penstock.mqtt.session import NEVER
from penstock.net.dial import Target

__all__ = ["TopicMessages", "Remote", "RemoteSpec", "RemoteTaker"]

_log = logging.getLogger(__name__)

NEVER_TAKEN = frozenset({"NOT_AUTHORIZED", "TOPIC_NAME_INVALID", "PAYLOAD_FORMAT_INVALID", "PACKET_TOO_LARGE"})
"""What a server refuses with these it will refuse again."""


class RemoteSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a broker is and how to come in.

    >>> RemoteSpec(url="mqtts://hub.example", version="3.1.1").protocol
    4
    >>> RemoteSpec(url="mqtt://hub.example", version="6")
    Traceback (most recent call last):
    penstock.errors.OptionsError: version='6': must be 3.1.1 or 5
    """

    url: str
    """mqtt://, mqtts://, ws://, wss:// or unix:"""
    version: Literal["3.1.1", "5"] = "5"
    client_id: str = ""
    username: str | None = None
    password: str | None = None
    password_file: str | None = None
    """A file whose first line is the password: it is not seen in a list of processes or of settings."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    keep_alive: int = 30
    connect_seconds: float = 10.0
    reconnect_seconds: tuple[float, float] = (0.1, 30.0)

    def __post_init__(self) -> None:
        if self.version not in ("3.1.1", "5"):
            raise OptionsError(f"version={self.version!r}: must be 3.1.1 or 5")
        check_waits(self.keep_alive, self.connect_seconds, self.reconnect_seconds)
        Target.parse(self.url)

    @property
    def protocol(self) -> int:
        """The level of the protocol."""
        return 5 if self.version == "5" else 4

    def client(self, *, keep_session: bool = False, bridge: bool = False) -> Client:
        """Return a client that has not connected yet."""
        target = Target.parse(self.url)
        options = ClientOptions(
            client_id=self.client_id,
            version=self.protocol,
            clean=not keep_session,
            session_expiry=NEVER if keep_session and self.protocol == 5 else 0,
            keep_alive=self.keep_alive,
            username=self.username,
            password=self._password(),
            tls=self._context() if target.tls else None,
            connect_seconds=self.connect_seconds,
            reconnect_seconds=self.reconnect_seconds,
            bridge=bridge,
        )
        return Client(target, options)

    def _password(self) -> str | None:
        if self.password_file is None:
            return self.password
        try:
            with open(os.path.expanduser(self.password_file)) as file:
                return file.readline().rstrip("\r\n")
        except OSError as exc:
            raise OptionsError(f"{self.password_file}: {exc.strerror}") from None

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as exc:
            raise OptionsError(f"{self.ca or self.cert}: {exc.strerror or exc}") from exc
        return context


class Remote:
    """A client that is there when it is needed: made, connected with patience, and made again after it gave up."""

    def __init__(
        self,
        make: Callable[[], Client],
        *,
        pauses: tuple[float, float] = (0.1, 30.0),
        on_trouble: Callable[[str], None] | None = None,
        on_connected: Callable[[Client], Awaitable[None]] | None = None,
        on_refused: Callable[[Refused], None] | None = None,
    ) -> None:
        self._make, self._pauses = make, pauses
        self._on_trouble, self._on_connected, self._on_refused = on_trouble, on_connected, on_refused
        self._client: Client | None = None
        self._lock = asyncio.Lock()

    async def client(self) -> Client:
        """Return a client that was let in; it may have lost its connection since, and makes it again by itself."""
        async with self._lock:
            pause, longest = self._pauses
            while self._client is None:
                client: Client | None = None
                try:
                    client = self._make()
                    await client.start()
                    if self._on_connected is not None:
                        await self._on_connected(client)
                    self._client = client
                    self._tell("")
                except (PenstockError, OSError) as exc:
                    if client is not None:
                        await client.stop()
                    self._tell(str(exc))
                    if isinstance(exc, Refused) and self._on_refused is not None:
                        self._on_refused(exc)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, longest)
                except BaseException:
                    if client is not None:
                        await client.stop()
                    raise
            return self._client

    async def failed(self, client: Client, reason: str) -> None:
        """Give up a client that raised; the next one who asks gets another."""
        async with self._lock:
            if self._client is client:
                self._client = None
                self._tell(reason)
                await client.stop()
                await asyncio.sleep(self._pauses[0])

    async def close(self) -> None:
        """Say goodbye."""
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._client is not None and self._client.connected

    def _tell(self, reason: str) -> None:
        if self._on_trouble is not None:
            self._on_trouble(reason)


class TopicMessages(msgspec.Struct):
    """Messages of one topic that go out together, as a feed hands them on."""

    topic: str
    payloads: list[bytes]
    qos: int
    retain: bool
    properties: Properties = NONE

    def run(self) -> Run:
        """Return them as a run for our own broker."""
        from penstock.kernel.mqtt import make_run
        from penstock.mqtt.properties import encode_properties

        expiry = -1 if self.properties.message_expiry is None else self.properties.message_expiry
        kept: Any = msgspec.structs.replace(self.properties, message_expiry=None)
        forward = b"" if self.properties is NONE else encode_properties(kept, length=False)
        return make_run(self.topic.encode(), self.payloads, self.qos, self.retain, forward, expiry)


class RemoteTaker:
    """Sends what a feed reads to another broker; returns when it has acknowledged everything."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name = remote, name

    async def take(self, messages: Sequence[TopicMessages]) -> dict[str, int]:
        """Return how many messages the server will never take, by reason."""
        left, never = list(messages), dict[str, int]()
        while left:
            client = await self._remote.client()
            version5 = client.options.version == 5
            calls = [
                client.publish_many(
                    each.topic, each.payloads, qos=each.qos, retain=each.retain,
                    properties=each.properties if version5 else NONE,
                )
                for each in left
            ]  # fmt: skip
            answers = await asyncio.gather(*calls, return_exceptions=True)
            again: list[TopicMessages] = []
            broken = ""
            for each, answer in zip(left, answers, strict=True):
                if isinstance(answer, OptionsError) or (isinstance(answer, Refused) and answer.reason in NEVER_TAKEN):
                    if len(each.payloads) > 1:  # only some of them may be at fault
                        again += [msgspec.structs.replace(each, payloads=[payload]) for payload in each.payloads]
                        continue
                    reason = answer.reason if isinstance(answer, Refused) else "no message for that server"
                    never[reason] = never.get(reason, 0) + 1
                    _log.warning("%s: %s is never taken: %s", self._name, each.topic, answer)
                elif isinstance(answer, PenstockError | OSError):
                    again.append(each)
                    broken = str(answer)
                elif isinstance(answer, BaseException):
                    raise answer
            if broken:
                await self._remote.failed(client, broken)
            left = again
        return never

    async def close(self) -> None:
        """Say goodbye."""
        await self._remote.close()
