"""The life of a connection to NATS: dial once, know the health, make or find buckets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Any, Final

from penstock.errors import NotConnected, OptionsError, PenstockError, ReplacedError, RetryError, UnsupportedError
from penstock.kv.nats.api import OPERATION_SECONDS, JetStream
from penstock.kv.nats.bucket import NatsKvStore
from penstock.kv.nats.lane import lane_of
from penstock.kv.nats.options import NatsOptions, new_client
from penstock.kv.nats.wire import bucket_body, classify_create
from penstock.kv.roles import ConnectionCapabilities, KvConnection, StoreConfig
from penstock.options import options_from, shows_options

__all__ = ["NatsOptions", "NatsConnection", "nats_connect"]

_log = logging.getLogger("penstock.kv")

RECONNECT_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 2.0
"""How long a server has to answer when it is dialled again; the first time it has a share of ``operation_seconds``."""
UNANSWERED_PINGS: Final = 2
STREAM: Final = "KV_"
TTL_SINCE: Final = (2, 11)
CAPABILITIES: Final = ConnectionCapabilities(streaming_watch=True, prefix_watch=True, purge=True, cas=True)


class NatsConnection(KvConnection):
    """A connection to a NATS server; it reconnects by itself until ``shutdown``.

    >>> connection = NatsConnection(NatsOptions(url="nats://localhost:4222"))
    >>> connection.is_healthy
    False
    """

    @shows_options(NatsOptions)
    def __init__(self, options: NatsOptions | None = None, **given: Any) -> None:
        self._options = options_from(NatsOptions, options, given)
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
        """What NATS can do; a time to live needs a server of 2.11 or later, which is known once connected."""
        if self._client is None:
            return CAPABILITIES
        version = self._client.connected_server_version
        return replace(CAPABILITIES, ttl=(version.major, version.minor) >= TTL_SINCE)

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
        api = self._api(config.name)
        return NatsKvStore(api, config.name, await self._make(api, config))

    async def store(self, name: str) -> NatsKvStore:
        """Return a bucket; if it does not exist its first put or create makes it, and nothing else does."""
        config = StoreConfig(name=name)
        found = await self.find(name)
        if found is not None:
            return found
        api = self._api(name)
        return NatsKvStore(api, name, None, lambda: self._make(api, config))

    async def find(self, name: str) -> NatsKvStore | None:
        """Return a bucket that exists, or None; nothing is made."""
        api = self._api(StoreConfig(name=name).name)
        try:
            return NatsKvStore(api, name, (await api.info()).config)
        except ReplacedError:
            return None

    async def buckets(self) -> list[str]:
        """Return the names of the buckets there are, sorted."""
        api, names = self._api("any"), list[str]()
        while True:
            body = await api.call("STREAM.NAMES", {"offset": len(names)})
            found = body.get("streams") or []
            names += found
            if not found or len(names) >= int(body.get("total", 0)):
                return sorted(name[len(STREAM) :] for name in names if name.startswith(STREAM))

    async def delete(self, name: str) -> bool:
        """Remove a bucket with all its keys; return whether it was there."""
        api = self._api(StoreConfig(name=name).name)
        try:
            await api.call(f"STREAM.DELETE.{api.stream}")
        except ReplacedError:
            return False
        return True

    def _api(self, name: str) -> JetStream:
        self.client  # noqa: B018 - not connected is told before anything is tried
        return JetStream(lambda: self.client, f"{STREAM}{name}", self._options.operation_seconds)

    async def _make(self, api: JetStream, config: StoreConfig) -> dict[str, Any]:
        """Return the configuration of a bucket that is there afterwards."""
        try:
            return (await api.info()).config
        except (ReplacedError, RetryError) as exc:
            _log.debug("bucket %s not found yet: %s", config.name, exc)
        problem = await self._create(api, config)
        try:
            return (await api.info()).config
        except PenstockError as exc:
            raise problem or exc from exc

    async def _create(self, api: JetStream, config: StoreConfig) -> PenstockError | None:
        """Try to make the bucket; return what went wrong, which counts only if it cannot be found."""
        try:
            body = bucket_body(config, deny_delete=config.discard == "new", ttl=True)
            await api.call(f"STREAM.CREATE.{api.stream}", body)
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
        urls, _, _ = self._options.servers()
        context = self._options.tls_context()
        try:
            client = new_client(context is not None)
        except ImportError as exc:
            raise UnsupportedError("NATS needs the package nats-py: pip install 'penstock[nats]'") from exc
        from nats import errors

        lane_of(client)
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
                    connect_timeout=max(ANSWER_SECONDS, share),
                    # 0 and -1 would try for ever before the first connection; afterwards for ever is right
                    max_reconnect_attempts=1,
                    reconnect_time_wait=RECONNECT_SECONDS,
                    ping_interval=self._options.ping_seconds,
                    max_outstanding_pings=UNANSWERED_PINGS,
                    tls=context,
                    **self._options.credentials(),
                )
        except OptionsError:
            await _give_up(client)
            raise
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


@shows_options(NatsOptions)
async def nats_connect(
    url: str, creds: str | None = None, creds_file: str | None = None, **given: Any
) -> NatsConnection:
    """Return a connection that stands; the options of NatsOptions are given as keywords.

    >>> asyncio.run(nats_connect("nats://localhost:1"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.NotConnected: nats: nats://localhost:1: ...
    """
    options = options_from(NatsOptions, None, {"url": url, "creds": creds, "creds_file": creds_file, **given})
    connection = NatsConnection(options)
    await connection.connect()
    return connection


def _json(config: StoreConfig) -> bytes:
    import msgspec

    return msgspec.json.encode(bucket_body(config, deny_delete=False))
