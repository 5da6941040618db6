"""The life of a connection to NATS: dial once, know the health, make or find buckets."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock.errors import NotConnected, OptionsError, PenstockError, ReplacedError, RetryError, UnsupportedError
from penstock.kv.nats import NatsKvStore
from penstock.kv.nats_api import OPERATION_SECONDS, JetStream
from penstock.kv.nats_lane import lane_of
from penstock.kv.nats_wire import bucket_body, classify_create
from penstock.kv.roles import Connection, ConnectionCapabilities, StoreConfig

__all__ = ["NatsOptions", "NatsConnection", "nats_connect"]

_log = logging.getLogger("penstock.kv")

RECONNECT_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 2.0
"""How long a server has to answer when it is dialled again; the first time it has a share of ``operation_seconds``."""
UNANSWERED_PINGS: Final = 2
CAPABILITIES: Final = ConnectionCapabilities(streaming_watch=True, prefix_watch=True, purge=True, cas=True)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NatsOptions:
    """Where a NATS server is and how to get in.  The first credentials in this order are used:
    ``creds``, ``creds_file``, a user and password in the URL, none.

    Printing it shows which secrets are set and never what they are.

    >>> NatsOptions(url="nats://me:secret@localhost:4222", creds="AAAA")
    NatsOptions(url='nats://localhost:4222', creds=set, creds_file=None, url_password=set)
    """  # noqa: D205

    url: str = "nats://localhost:4222"
    """``nats://`` or ``tls://``; several servers of one cluster separated by commas."""

    creds: str | None = None
    """The text of a .creds file in base 64, for containers that mount no files."""

    creds_file: str | None = None
    """Path of a .creds file."""

    name: str = "penstock"
    """What the server's monitoring shows."""

    operation_seconds: float = OPERATION_SECONDS
    """How long one operation may take before it fails with Timeout."""

    ping_seconds: float = 10.0
    """How often the server is asked whether it is there.  After two questions without an answer the connection
    counts as dead and is dialled again: a link that swallows everything is noticed within three times this."""

    def __post_init__(self) -> None:
        for name in ("operation_seconds", "ping_seconds"):
            if getattr(self, name) <= 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must be positive")

    def __repr__(self) -> str:
        urls, user, _ = self.servers()
        shown = (("creds", self.creds), ("url_password", user))
        creds, password = ("set" if value else "None" for _, value in shown)
        return (
            f"NatsOptions(url={','.join(urls)!r}, creds={creds}, creds_file={self.creds_file!r}, "
            f"url_password={password})"
        )

    def servers(self) -> tuple[list[str], str | None, str | None]:
        """Return the addresses without credentials, and the user and password that were in them."""
        urls, user, password = [], None, None
        for url in self.url.split(","):
            try:
                parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
                host = parts.hostname
            except ValueError as exc:
                raise OptionsError(f"url: {exc}") from None
            if not host:
                raise OptionsError("url: a server address has no host")
            if parts.username and user is None:
                user, password = unquote(parts.username), unquote(parts.password or "")
            urls.append(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
        return urls, user, password

    def credentials(self) -> dict[str, Any]:
        """Return the arguments for nats-py that carry the credentials, by the stated priority."""
        _, user, password = self.servers()
        if self.creds:
            from nats.aio.client import RawCredentials

            try:
                text = base64.b64decode(self.creds, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise OptionsError("creds: must be the text of a .creds file in base 64") from None
            return {"user_credentials": RawCredentials(text)}
        if self.creds_file:
            return {"user_credentials": self.creds_file}
        return {"user": user, "password": password} if user else {}


class NatsConnection(Connection):
    """A connection to a NATS server; it reconnects by itself until ``shutdown``.

    >>> connection = NatsConnection(NatsOptions(url="nats://localhost:4222"))
    >>> connection.is_healthy
    False
    """

    def __init__(self, options: NatsOptions | None = None) -> None:
        self._options = options or NatsOptions()
        self._client: Any = None
        self._dial: asyncio.Task[Any] | None = None
        self._healthy = False
        self._given = False
        self._reasons: dict[str, None] = {}  # what went wrong while dialling, each once

    @classmethod
    def from_client(cls, client: Any, *, operation_seconds: float = OPERATION_SECONDS) -> NatsConnection:
        """Use a nats-py client that is connected already.  ``shutdown`` closes it; it cannot connect again."""
        connection = cls(NatsOptions(operation_seconds=operation_seconds))
        connection._client, connection._given = client, True
        lane_of(client)
        return connection

    @property
    def is_healthy(self) -> bool:
        """Whether the connection stands; one attribute is read, nothing is awaited."""
        return bool(self._client.is_connected) if self._given and self._client is not None else self._healthy

    @property
    def capabilities(self) -> ConnectionCapabilities:
        """What NATS can do."""
        return CAPABILITIES

    @property
    def client(self) -> Any:
        """The nats-py client; NotConnected before ``connect`` and after ``shutdown``."""
        if self._client is None:
            raise NotConnected("nats: not connected: call connect() first")
        return self._client

    async def connect(self) -> None:
        """Connect; of several calls at once one dials and all get its outcome."""
        if self._client is not None:
            return
        if self._given:
            raise NotConnected("nats: made by from_client and shut down: it has no address to dial again")
        if self._dial is None:
            self._dial = asyncio.create_task(self._dial_once())
            self._dial.add_done_callback(self._dialled)
        await asyncio.shield(self._dial)

    async def shutdown(self) -> None:
        """Disconnect.  A dial under way is given up; ``connect`` may be called again afterwards."""
        dial, self._dial = self._dial, None
        if dial is not None and not dial.done():
            dial.cancel()
            await asyncio.gather(dial, return_exceptions=True)
        client, self._client, self._healthy = self._client, None, False
        if client is not None and not client.is_closed:
            if not client.is_connected:  # what was to be sent has no way out; nats-py would try, and stop half-way
                client._pending, client._pending_data_size = [], 0
            with contextlib.suppress(OSError):  # it broke this very moment: it is closed all the same
                await client.close()

    async def store_with_config(self, config: StoreConfig) -> NatsKvStore:
        """Return a bucket, made with this configuration if it does not exist.

        A bucket that exists is taken as it is.  Some services answer a creation in ways that cannot be read, or
        late: so a creation that fails in any way is followed by a second, plainer one, and what counts is whether the
        bucket can be found afterwards.
        """
        api = JetStream(lambda: self.client, f"KV_{config.name}", self._options.operation_seconds)
        self.client  # noqa: B018 - not connected is told before anything is tried
        try:
            return NatsKvStore(api, config.name, (await api.info()).config)
        except (ReplacedError, RetryError) as exc:
            _log.debug("bucket %s not found yet: %s", config.name, exc)
        problem = await self._create(api, config)
        try:
            return NatsKvStore(api, config.name, (await api.info()).config)
        except PenstockError as exc:
            raise problem or exc from exc

    async def _create(self, api: JetStream, config: StoreConfig) -> PenstockError | None:
        """Try to make the bucket; return what went wrong, which counts only if it cannot be found."""
        if config.discard == "new":
            try:
                await api.call(f"STREAM.CREATE.{api.stream}", bucket_body(config, deny_delete=True))
                return None
            except RetryError as exc:
                _log.debug("bucket %s: creation failed, trying the plain form: %s", config.name, exc)
        try:
            answer = await api.request(f"$JS.API.STREAM.CREATE.{api.stream}", _json(config))
        except RetryError as exc:
            return exc
        outcome, code, description = classify_create(answer.data)
        if outcome == "failed":
            return RetryError(f"nats: bucket {config.name} could not be made: {description} (code {code})")
        if outcome == "limit":
            return UnsupportedError(f"nats: bucket {config.name} could not be made: {description}")
        return None

    async def _dial_once(self) -> None:
        try:
            from nats.aio.client import Client
        except ImportError as exc:
            raise UnsupportedError("NATS needs the package nats-py: pip install 'penstock[nats]'") from exc
        from nats import errors

        client = Client()
        lane_of(client)
        urls, _, _ = self._options.servers()
        self._reasons.clear()
        share = self._options.operation_seconds / (2 * len(urls))  # each is tried twice

        async def lost() -> None:
            self._on_state(client, False)

        async def back() -> None:
            self._on_state(client, True)

        try:
            async with asyncio.timeout(self._options.operation_seconds):
                await client.connect(
                    servers=urls,
                    name=self._options.name,
                    error_cb=self._on_error,
                    disconnected_cb=lost,
                    reconnected_cb=back,
                    closed_cb=lost,
                    connect_timeout=max(ANSWER_SECONDS, share),  # type: ignore[arg-type]  # seconds, as a float in fact
                    # 0 and -1 would try for ever before the first connection; afterwards for ever is right
                    max_reconnect_attempts=1,
                    reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # the same
                    ping_interval=self._options.ping_seconds,  # type: ignore[arg-type]  # the same
                    max_outstanding_pings=UNANSWERED_PINGS,
                    **self._options.credentials(),
                )
        except (errors.Error, OSError, TimeoutError, ValueError) as exc:
            await _give_up(client)
            reasons = "; ".join(self._reasons) or str(exc) or type(exc).__name__
            raise NotConnected(f"nats: {','.join(urls)}: {reasons}") from exc
        except BaseException:
            await _give_up(client)
            raise
        client.options.update(max_reconnect_attempts=-1, connect_timeout=ANSWER_SECONDS)
        self._client, self._healthy = client, True

    def _dialled(self, dial: asyncio.Task[Any]) -> None:
        if self._dial is dial:
            self._dial = None
        if not dial.cancelled():
            dial.exception()  # every waiter has its own copy

    async def _on_error(self, exc: Exception) -> None:
        reason = str(exc) or type(exc).__name__
        _log.debug("nats: %s", reason)
        if self._client is None:
            self._reasons[reason] = None

    def _on_state(self, client: Any, healthy: bool) -> None:
        if self._client is client:  # a client that was given up must not speak for its successor
            self._healthy = healthy


async def _give_up(client: Any) -> None:
    try:
        await client.close()
    except AssertionError:
        pass  # it had not even begun to connect


async def nats_connect(url: str, creds: str | None = None, creds_file: str | None = None) -> NatsConnection:
    """Return a connection that stands.

    >>> asyncio.run(nats_connect("nats://localhost:1"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.NotConnected: nats: nats://localhost:1: ...
    """
    connection = NatsConnection(NatsOptions(url=url, creds=creds, creds_file=creds_file))
    await connection.connect()
    return connection


def _json(config: StoreConfig) -> bytes:
    import msgspec

    return msgspec.json.encode(bucket_body(config, deny_delete=False))
