"""JetStream's request-reply API over a nats-py client: every call has a timeout and one kind of error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.errors import (
    Backpressure,
    NotConnected,
    OptionsError,
    PenstockError,
    ReplacedError,
    RetryError,
    RevisionMismatch,
    Timeout,
)

__all__ = ["JetStream", "StreamInfo", "error_of"]

OPERATION_SECONDS = 30.0
"""Long enough for a slow leader election, short enough to notice a connection that died half-way."""

RECONNECTED_LOOK_SECONDS = 0.5  # how often a waiting request looks whether its connection is still the same

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_NOT_FOUND = 10059
NO_MESSAGE = 10037
NO_ROOM = (10077, 10047, 10023)  # bucket full, storage full, resources exhausted
TOO_LARGE = (10054, 10057)


class _State(msgspec.Struct):
    first_seq: int = 0
    last_seq: int = 0
    messages: int = 0
    bytes: int = 0
    consumer_count: int = 0


class StreamInfo(msgspec.Struct):
    """What a server says about a stream: when it was made, and the sequences it holds.

    >>> StreamInfo(created="2026-01-01T00:00:00Z", state=_State(3, 9), config={}).state.last_seq
    9
    """

    created: str
    state: _State
    config: dict[str, Any]


class JetStream:
    """The calls a bucket needs, each within ``seconds``.

    >>> JetStream(lambda: None, "KV_b").stream
    'KV_b'
    """

    def __init__(self, client: Callable[[], Any], stream: str, seconds: float = OPERATION_SECONDS) -> None:
        self.client = client
        self.stream = stream
        self.seconds = seconds

    async def request(self, subject: str, payload: bytes = b"", headers: Mapping[str, str] | None = None) -> Any:
        """Send a request and return the message that answers it."""
        from nats import errors

        client = self.client()
        # What is sent while the connection is down goes out after the next reconnect; what was under way when it
        # broke never gets an answer, and waiting the whole time for one helps nobody.
        survives = client.stats["reconnects"] + (not client.is_connected)
        asking = asyncio.ensure_future(
            client.request(subject, payload, timeout=self.seconds, headers=dict(headers) if headers else None)
        )
        try:
            async with asyncio.timeout(self.seconds):
                while not (await asyncio.wait((asking,), timeout=RECONNECTED_LOOK_SECONDS))[0]:
                    if client.stats["reconnects"] > survives:
                        raise NotConnected(f"nats: the connection broke before {subject} was answered")
                    if client.is_closed:
                        raise NotConnected(f"nats: the connection was shut down before {subject} was answered")
            return asking.result()
        except (TimeoutError, errors.TimeoutError):
            raise Timeout(f"nats: no answer to {subject} within {self.seconds:g} s") from None
        except errors.NoRespondersError:
            raise NotConnected(f"nats: nobody answers {subject}: is JetStream on, and the bucket there?") from None
        except errors.MaxPayloadError as exc:
            raise OptionsError(f"nats: the value for {subject} is longer than the server takes") from exc
        except (errors.Error, OSError) as exc:
            raise NotConnected(f"nats: {subject}: {exc or type(exc).__name__}") from exc
        finally:
            asking.cancel()

    async def call(self, subject: str, body: object = None) -> dict[str, Any]:
        """Call ``$JS.API.<subject>`` with JSON and return the JSON answer."""
        payload = b"" if body is None else msgspec.json.encode(body)
        answer = await self.request(f"$JS.API.{subject}", payload)
        return self._body(answer.data, subject)

    async def publish(self, subject: str, value: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Store a message and return its sequence."""
        answer = await self.request(subject, value, headers)
        body = self._body(answer.data, subject)
        sequence = body.get("seq")
        if not isinstance(sequence, int):
            raise RetryError(f"nats: {subject}: the answer is no acknowledgement: {answer.data!r:.200}")
        return sequence

    async def info(self) -> StreamInfo:
        """Return what the stream is at this moment."""
        body = await self.call(f"STREAM.INFO.{self.stream}")
        try:
            return msgspec.convert(body, StreamInfo)
        except msgspec.ValidationError as exc:
            raise RetryError(f"nats: {self.stream}: the stream info is not understood: {exc}") from None

    async def create_consumer(self, config: dict[str, Any]) -> tuple[str, int]:
        """Make an ephemeral consumer; return its name and how many messages wait for it."""
        body = await self.call(f"CONSUMER.CREATE.{self.stream}", {"stream_name": self.stream, "config": config})
        return str(body.get("name", "")), int(body.get("num_pending", 0))

    async def delete_consumer(self, name: str) -> None:
        """Remove a consumer, best effort: the server forgets an idle one by itself."""
        try:
            if not name or not self.client().is_connected:
                return
            async with asyncio.timeout(min(self.seconds, 5.0)):
                await self.call(f"CONSUMER.DELETE.{self.stream}.{name}")
        except (PenstockError, TimeoutError):
            pass

    def _body(self, data: bytes, what: str) -> dict[str, Any]:
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError as exc:
            raise RetryError(f"nats: {what}: the answer is not JSON: {exc}") from None
        if not isinstance(body, dict):
            raise RetryError(f"nats: {what}: the answer is not understood: {data!r:.200}")
        if error := body.get("error"):
            raise error_of(error, self.stream, what)
        return body


def error_of(error: Any, stream: str, what: str) -> PenstockError:
    """Return the error of the tree for one that JetStream reports.

    >>> error_of({"code": 400, "err_code": 10071, "description": "wrong last sequence: 4"}, "KV_b", "$KV.b.k")
    RevisionMismatch('$KV.b.k: wrong last sequence: 4')
    """
    if not isinstance(error, dict):
        return RetryError(f"nats: {what}: {error}")
    code, text = error.get("err_code", 0), str(error.get("description", "unknown error"))
    if code in WRONG_LAST_SEQUENCE:
        return RevisionMismatch(f"{what}: {text}")
    if code == STREAM_NOT_FOUND:
        return ReplacedError(stream, "the bucket does not exist")
    if code in NO_ROOM:
        return Backpressure(f"nats: {what}: {text}")
    if code in TOO_LARGE:
        return OptionsError(f"nats: {what}: {text}")
    if error.get("code") == 503:
        return NotConnected(f"nats: {what}: {text}")
    return RetryError(f"nats: {what}: {text} (code {error.get('code')}, {code})")
