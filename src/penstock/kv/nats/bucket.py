"""A NATS JetStream bucket in the roles of penstock.kv.roles.

A bucket ``b`` is the stream ``KV_b``; a revision is a sequence number of it.  Only requests and subscriptions of
nats-py are used, not its own key-value layer: that one cannot resume a watch, makes the consumer before it
subscribes, and takes a marker the server wrote for a value.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np

from penstock.batch import UpdateBatch
from penstock.disk import in_disk_thread
from penstock.errors import (
    AlreadyExists,
    NotConnected,
    OptionsError,
    RetryError,
    RevisionMismatch,
    Timeout,
    UnsupportedError,
)
from penstock.kv.keys import check_key, check_ttl
from penstock.kv.nats.api import NO_MESSAGE, JetStream
from penstock.kv.nats.lane import CLOSED_LOOK_SECONDS, Inbox, open_inbox
from penstock.kv.nats.watch import EndedWatch, NatsWatch
from penstock.kv.nats.wire import NS_PER_S, PUT, Decoded, decode_messages, filters_of, parse_headers
from penstock.kv.roles import KvReader, KvStore, KvWatcher, KvWriter, Traces, Watch
from penstock.types import KvEntry, KvUpdate, Op, VersionToken, WatchCursor

__all__ = ["NatsKvStore", "NatsKvReader", "NatsKvWatcher", "NatsKvWriter"]

SCAN_INACTIVE_SECONDS: Final = 300
EXPECTED_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
TTL: Final = "Nats-TTL"
REMOVALS: Final = ("DEL", "PURGE")
PUTS_IN_FLIGHT: Final = 256


class _Stored(msgspec.Struct):
    """The last message of a key: its revision, value, and whether it removes the key."""

    revision: int
    value: bytes
    removed: bool


Make = Callable[[], Awaitable[dict[str, Any]]]


class _Bucket:
    """What the three roles share: names, the API, the read of one key, and how it is made if it was not there."""

    def __init__(self, api: JetStream, name: str, config: dict[str, Any] | None, make: Make | None) -> None:
        self.api, self.name, self.config, self._make = api, name, config, make
        self.prefix = f"$KV.{name}."

    @property
    def direct(self) -> bool:
        """Whether any replica may be asked for a value."""
        return self.config is not None and bool(self.config.get("allow_direct"))

    @property
    def ttl(self) -> bool:
        """Whether single keys may have a time to live."""
        return self.config is not None and bool(self.config.get("allow_msg_ttl"))

    async def make(self) -> None:
        """Make the bucket if it was not there when somebody asked for it; one that was deleted since stays deleted."""
        if self.config is None and self._make is not None:
            self.config = await self._make()

    async def is_there(self) -> None:
        """Raise ReplacedError if the bucket was deleted: then nobody answers for its keys, so its name is asked for."""
        with contextlib.suppress(NotConnected):  # it was shut down: whoever asks knows of it
            if self.api.client().is_connected:
                await self.api.info()

    def subject(self, key: str) -> str:
        return self.prefix + check_key(key)

    async def last(self, key: str) -> _Stored | None:
        """Return the last message of a key, or None where there is none."""
        subject = self.subject(key)
        return await (self._direct(subject) if self.direct else self._by_request(subject))

    async def _direct(self, subject: str) -> _Stored | None:
        try:
            answer = await self.api.request(f"$JS.API.DIRECT.GET.{self.api.stream}.{subject}")
        except NotConnected:
            await self.is_there()
            raise
        headers = answer.headers or {}
        status = headers.get("Status")
        if status == "404":
            return None
        sequence = headers.get("Nats-Sequence", "")
        if status is not None or not sequence.isdigit():
            raise RetryError(f"nats: {subject}: {status or ''} {headers.get('Description', 'answer not understood')}")
        return _Stored(int(sequence), answer.data or b"", _removes(headers))

    async def change(self, revision: int) -> KvUpdate | None:
        """Return the message with this sequence as an update, or None where there is none."""
        found = await self._message({"seq": revision}, f"revision {revision} of {self.name}")
        if found is None or not found[0].startswith(self.prefix):
            return None
        subject, stored, headers = found
        op = Op.PUT if not stored.removed else Op.DELETE if headers.get("KV-Operation") == "DEL" else Op.PURGE
        value = stored.value if op is Op.PUT else b""
        return KvUpdate(op, subject[len(self.prefix) :], value, VersionToken.of(stored.revision))

    async def _by_request(self, subject: str) -> _Stored | None:
        found = await self._message({"last_by_subj": subject}, subject)
        return None if found is None else found[1]

    async def _message(self, which: dict[str, Any], what: str) -> tuple[str, _Stored, dict[str, str]] | None:
        """Return subject, content and headers of one message of the stream, or None."""
        answer = await self.api.request(f"$JS.API.STREAM.MSG.GET.{self.api.stream}", msgspec.json.encode(which))
        try:
            body = msgspec.json.decode(answer.data)
            if body.get("error", {}).get("err_code") == NO_MESSAGE:
                return None
            message = self.api._body(answer.data, what)["message"]
            headers = parse_headers(base64.b64decode(message.get("hdrs") or ""))
            stored = _Stored(int(message["seq"]), base64.b64decode(message.get("data") or ""), _removes(headers))
            return str(message["subject"]), stored, headers
        except (msgspec.DecodeError, KeyError, ValueError, AttributeError) as exc:
            raise RetryError(f"nats: {what}: the answer is not understood: {exc}") from None


class NatsKvReader(KvReader):
    """Reads of a NATS bucket.

    >>> issubclass(NatsKvReader, KvReader)
    True
    """

    def __init__(self, bucket: _Bucket) -> None:
        self._bucket = bucket

    async def get(self, key: str) -> KvEntry | None:
        """Return the live entry, or None; a tombstone is None."""
        found = await self.entry(key)
        return found if found is not None and found.value else None

    async def entry(self, key: str) -> KvEntry | None:
        """Return the entry even if it is a tombstone; None after a delete or a purge."""
        last = await self._bucket.last(key)
        return None if last is None or last.removed else KvEntry(key, last.value, VersionToken.of(last.revision))

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the live keys below a prefix; no value crosses the wire."""
        found = await self._collect(prefix, headers_only=True)
        return await in_disk_thread(_names_in, found)

    async def scan(self, prefix: str = "") -> UpdateBatch:
        """Return the live entries below a prefix as one batch of puts, in order of revision."""
        found = await self._collect(prefix, headers_only=False)
        return found.updates((found.ops == PUT) & (found.sizes > 0))

    async def traces(self) -> Traces:
        """Return what the server says about the stream: limits and administrators take keys without a message."""
        info = await self._bucket.api.info()
        return Traces(info.created, info.state.last_seq, info.state.last_seq - info.state.messages)

    async def revisions(self, prefix: str = "") -> UpdateBatch:
        """Return the keys below a prefix with their revisions, tombstones included; no value crosses the wire."""
        found = await self._collect(prefix, headers_only=True)
        return found.updates(found.ops == PUT)

    async def identity(self) -> str:
        """Return when the stream was made, to the nanosecond."""
        return (await self._bucket.api.info()).created

    async def change(self, revision: int) -> KvUpdate | None:
        """Return the change that has this revision, None when it was overwritten or dropped."""
        return await self._bucket.change(revision)

    async def _collect(self, prefix: str, *, headers_only: bool) -> Decoded:
        """Read the last message of every key through one ephemeral consumer.

        It needs no acknowledgements: with them the server would stop, without a word, after a thousand
        messages.  The inbox is subscribed first, so that no message is early.
        """
        bucket = self._bucket
        (subject,) = filters_of(bucket.name, [prefix])
        inbox = await open_inbox(bucket.api.client())
        consumer = ""
        try:
            consumer, expected = await bucket.api.create_consumer(
                {
                    "deliver_subject": inbox.subject,
                    "deliver_policy": "last_per_subject",
                    "filter_subject": subject,
                    "ack_policy": "none",
                    "replay_policy": "instant",
                    "headers_only": headers_only,
                    "inactive_threshold": SCAN_INACTIVE_SECONDS * NS_PER_S,
                    "mem_storage": True,
                    "num_replicas": 1,
                }
            )
            return await self._gather(inbox, consumer, expected)
        finally:
            await inbox.close()
            await bucket.api.delete_consumer(consumer)

    async def _gather(self, inbox: Inbox, consumer: str, expected: int) -> Decoded:
        api, prefix = self._bucket.api, self._bucket.prefix.encode()
        parts: list[bytes] = []
        count = silent_seconds = 0.0
        while count < expected:
            data = await inbox.take(CLOSED_LOOK_SECONDS)
            if not data:
                silent_seconds += CLOSED_LOOK_SECONDS
                if silent_seconds >= api.seconds:
                    raise Timeout(f"nats: {api.stream}: a scan stood still for {api.seconds:g} s")
                # Retention may have removed what was still to come: the server knows.
                waiting = await api.call(f"CONSUMER.INFO.{api.stream}.{consumer}")
                delivered = waiting.get("delivered") or {}
                if waiting.get("num_pending") == 0 and delivered.get("consumer_seq") == count:
                    break
                continue
            silent_seconds = 0.0
            parts.append(data)
            some = decode_messages(data, prefix)
            count += len(some)
            if len(some) and some.known[-1] and some.pending[-1] == 0:
                break
        found = await in_disk_thread(decode_messages, b"".join(parts), prefix)  # many: not on the event loop
        in_order = found.consumer_sequences == 1 + np.arange(len(found), dtype=np.uint64)
        if not (in_order | ~found.known).all():
            raise NotConnected(f"nats: {api.stream}: the connection broke during a scan: call again")
        return found


class NatsKvWatcher(KvWatcher):
    """Watches of a NATS bucket; one consumer each, however many prefixes.

    A cursor that is unknown, foreign or 0 means the beginning.

    >>> issubclass(NatsKvWatcher, KvWatcher)
    True
    """

    def __init__(self, bucket: _Bucket) -> None:
        self._bucket = bucket

    @property
    def closed(self) -> bool:
        """Whether the connection was shut down; one that is being dialled again was not."""
        try:
            return bool(self._bucket.api.client().is_closed)
        except NotConnected:
            return True

    async def watch_all(self) -> Watch:
        """Watch every key, beginning with the re-list."""
        return await self._watch([""], None, guarded=True)

    async def watch_prefix(self, prefix: str) -> Watch:
        """Watch the keys below one prefix, beginning with the re-list."""
        return await self._watch([prefix], None, guarded=not prefix)

    async def watch_prefixes(self, prefixes: Sequence[str]) -> Watch:
        """Watch the keys below any of these prefixes with one consumer."""
        return await self._watch(prefixes, None, guarded=False)

    async def watch_all_from(self, cursor: WatchCursor) -> Watch:
        """Watch every key from behind a cursor on."""
        return await self._watch([""], cursor, guarded=True)

    async def watch_prefix_from(self, prefix: str, cursor: WatchCursor) -> Watch:
        """Watch the keys below one prefix from behind a cursor on."""
        return await self._watch([prefix], cursor, guarded=not prefix)

    async def watch_prefixes_from(self, prefixes: Sequence[str], cursor: WatchCursor) -> Watch:
        """Watch the keys below any of these prefixes from behind a cursor on."""
        return await self._watch(prefixes, cursor, guarded=False)

    async def _watch(self, prefixes: Sequence[str], cursor: WatchCursor | None, *, guarded: bool) -> Watch:
        if not prefixes:
            return EndedWatch()  # never a consumer without a filter
        revision = cursor.token.as_int() if cursor is not None else None
        bucket = self._bucket
        watch = NatsWatch(
            bucket.api, bucket.prefix.encode(), filters_of(bucket.name, prefixes), revision or None, guarded=guarded
        )
        await watch.attach()
        return watch


class NatsKvWriter(KvWriter):
    """Writes to a NATS bucket.

    >>> issubclass(NatsKvWriter, KvWriter)
    True
    """

    def __init__(self, bucket: _Bucket) -> None:
        self._bucket = bucket

    async def put(self, key: str, value: bytes) -> VersionToken:
        """Set a key, whatever it was."""
        check_key(key)
        await self._bucket.make()
        return await self._publish(key, value)

    async def put_many(self, entries: Iterable[tuple[str, bytes]]) -> list[VersionToken]:
        """Set many keys in order, with many answers outstanding at once."""
        tokens: list[VersionToken] = []
        rest = iter(entries)
        await self._bucket.make()
        while chunk := list(islice(rest, PUTS_IN_FLIGHT)):
            tokens += await asyncio.gather(*(self._publish(key, value) for key, value in chunk))
        return tokens

    async def delete(self, key: str) -> bool:
        """Remove a key, whatever it was; always True."""
        await self._publish(key, b"", {"KV-Operation": "DEL"})
        return True

    async def purge(self, key: str) -> bool:
        """Remove a key together with its history, which frees their bytes; always True."""
        await self._publish(key, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"})
        return True

    async def put_with_ttl(self, key: str, value: bytes, ttl_seconds: float) -> VersionToken:
        """Set a key that vanishes after a time; the server counts whole seconds, so it is rounded up to one."""
        check_key(key)
        check_ttl(ttl_seconds)
        await self._bucket.make()
        return await self._publish(key, value, self._ttl(ttl_seconds))

    async def create(self, key: str, value: bytes, *, ttl_seconds: float | None = None) -> VersionToken:
        """Set a key that is absent or deleted; AlreadyExists if it is live or a tombstone."""
        check_key(key)
        await self._bucket.make()
        ttl = self._ttl(ttl_seconds)
        try:
            return await self._publish(key, value, {EXPECTED_SEQUENCE: "0", **ttl})
        except RevisionMismatch:
            pass
        last = await self._bucket.last(key)
        if last is not None and last.removed:
            try:
                return await self._publish(key, value, {EXPECTED_SEQUENCE: str(last.revision), **ttl})
            except RevisionMismatch:
                pass
        raise AlreadyExists(f"{self._bucket.name}: key {key!r} exists")

    async def update(
        self, key: str, value: bytes, version: VersionToken, *, ttl_seconds: float | None = None
    ) -> VersionToken:
        """Set a key whose version is still this one; RevisionMismatch otherwise."""
        revision = version.as_int()
        if revision is None:
            raise OptionsError(f"key {key!r}: {version!r} is no revision of this bucket")
        return await self._publish(key, value, {EXPECTED_SEQUENCE: str(revision), **self._ttl(ttl_seconds)})

    def _ttl(self, ttl_seconds: float | None) -> dict[str, str]:
        """Return the header of a time to live; UnsupportedError where the server would ignore or refuse it."""
        if ttl_seconds is None:
            return {}
        check_ttl(ttl_seconds)
        if not self._bucket.ttl:
            raise UnsupportedError(
                f"{self._bucket.name}: this bucket keeps no time to live: it was made without it, or the server is "
                "older than 2.11"
            )
        return {TTL: str(math.ceil(ttl_seconds))}

    async def delete_with_version(self, key: str, version: VersionToken) -> bool:
        """Replace a key whose version is still this one by a tombstone; RevisionMismatch otherwise."""
        if version.as_int() == 0:  # the server would read 0 as "must be absent" and create a tombstone
            raise RevisionMismatch(f"{self._bucket.name}: key {key!r} has no revision 0")
        await self.update(key, b"", version)
        return True

    async def _publish(self, key: str, value: bytes, headers: dict[str, str] | None = None) -> VersionToken:
        subject = self._bucket.subject(key)
        try:
            return VersionToken.of(await self._bucket.api.publish(subject, value, headers))
        except NotConnected:
            await self._bucket.is_there()
            raise


class NatsKvStore(KvStore):
    """One NATS bucket.

    >>> issubclass(NatsKvStore, KvStore)
    True
    """

    def __init__(self, api: JetStream, name: str, config: dict[str, Any] | None, make: Make | None = None) -> None:
        self._bucket = bucket = _Bucket(api, name, config, make)
        self._name, self._api = name, api
        self._reader, self._watcher, self._writer = NatsKvReader(bucket), NatsKvWatcher(bucket), NatsKvWriter(bucket)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the stream as the server has it; empty while there is none."""
        return self._bucket.config or {}

    @property
    def name(self) -> str:
        """The name of the bucket."""
        return self._name

    @property
    def reader(self) -> NatsKvReader:
        """The role that reads."""
        return self._reader

    @property
    def watcher(self) -> NatsKvWatcher:
        """The role that watches."""
        return self._watcher

    @property
    def writer(self) -> NatsKvWriter:
        """The role that writes."""
        return self._writer


def _names_in(found: Decoded) -> list[str]:
    live = found.updates((found.ops == PUT) & (found.sizes > 0))
    return [key.decode() for key in live.keys.to_list(live.buffer)]


def _removes(headers: dict[str, str]) -> bool:
    """Whether a message with these headers says that its key is gone; servers write markers of their own."""
    return headers.get("KV-Operation") in REMOVALS or "Nats-Marker-Reason" in headers
