"""A NATS JetStream bucket in the roles of penstock.kv.roles.

A bucket ``b`` is the stream ``KV_b``; a revision is a sequence number of it.  Only requests and subscriptions of
nats-py are used, not its own key-value layer: that one cannot resume a watch, makes the consumer before it
subscribes, and takes a marker the server wrote for a value.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np

from penstock.batch import UpdateBatch
from penstock.errors import (
    AlreadyExists,
    NotConnected,
    OptionsError,
    RetryError,
    RevisionMismatch,
    Timeout,
)
from penstock.kv.nats_api import NO_MESSAGE, JetStream
from penstock.kv.nats_lane import LOOK_SECONDS, Inbox, open_inbox
from penstock.kv.nats_watch import EndedWatch, NatsWatch
from penstock.kv.nats_wire import NS_PER_S, PUT, Decoded, check_key, decode_messages, filters_of, parse_headers
from penstock.kv.roles import KvReader, KvStore, KvWatcher, KvWriter, Watch
from penstock.types import KvEntry, VersionToken, WatchCursor

__all__ = ["NatsKvStore", "NatsKvReader", "NatsKvWatcher", "NatsKvWriter"]

SCAN_INACTIVE_SECONDS: Final = 300
EXPECTED_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
REMOVALS: Final = ("DEL", "PURGE")
PUTS_IN_FLIGHT: Final = 256


class _Stored(msgspec.Struct):
    """The last message of a key: its revision, value, and whether it removes the key."""

    revision: int
    value: bytes
    removed: bool


class _Bucket:
    """What the three roles share: names, the API, and the read of one key."""

    def __init__(self, api: JetStream, name: str, direct: bool) -> None:
        self.api, self.name, self.direct = api, name, direct
        self.prefix = f"$KV.{name}."

    def subject(self, key: str) -> str:
        return self.prefix + check_key(key)

    async def last(self, key: str) -> _Stored | None:
        """Return the last message of a key, or None where there is none."""
        subject = self.subject(key)
        return await (self._direct(subject) if self.direct else self._by_request(subject))

    async def _direct(self, subject: str) -> _Stored | None:
        answer = await self.api.request(f"$JS.API.DIRECT.GET.{self.api.stream}.{subject}")
        headers = answer.headers or {}
        status = headers.get("Status")
        if status == "404":
            return None
        sequence = headers.get("Nats-Sequence", "")
        if status is not None or not sequence.isdigit():
            raise RetryError(f"nats: {subject}: {status or ''} {headers.get('Description', 'answer not understood')}")
        return _Stored(int(sequence), answer.data or b"", _removes(headers))

    async def _by_request(self, subject: str) -> _Stored | None:
        answer = await self.api.request(
            f"$JS.API.STREAM.MSG.GET.{self.api.stream}", msgspec.json.encode({"last_by_subj": subject})
        )
        try:
            body = msgspec.json.decode(answer.data)
            if body.get("error", {}).get("err_code") == NO_MESSAGE:
                return None
            message = self.api._body(answer.data, subject)["message"]
            headers = parse_headers(base64.b64decode(message.get("hdrs") or ""))
            return _Stored(int(message["seq"]), base64.b64decode(message.get("data") or ""), _removes(headers))
        except (msgspec.DecodeError, KeyError, ValueError, AttributeError) as exc:
            raise RetryError(f"nats: {subject}: the answer is not understood: {exc}") from None


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
        live = found.updates((found.ops == PUT) & (found.sizes > 0))
        return [key.decode() for key in live.keys.to_list(live.buffer)]

    async def scan(self, prefix: str = "") -> UpdateBatch:
        """Return the live entries below a prefix as one batch of puts, in order of revision."""
        found = await self._collect(prefix, headers_only=False)
        return found.updates((found.ops == PUT) & (found.sizes > 0))

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
            data = await inbox.take(LOOK_SECONDS)
            if not data:
                silent_seconds += LOOK_SECONDS
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
        found = decode_messages(b"".join(parts), prefix)
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
        return await self._publish(key, value)

    async def put_many(self, entries: Iterable[tuple[str, bytes]]) -> list[VersionToken]:
        """Set many keys in order, with many answers outstanding at once."""
        tokens: list[VersionToken] = []
        rest = iter(entries)
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

    async def create(self, key: str, value: bytes) -> VersionToken:
        """Set a key that is absent or deleted; AlreadyExists if it is live or a tombstone."""
        try:
            return await self._publish(key, value, {EXPECTED_SEQUENCE: "0"})
        except RevisionMismatch:
            pass
        last = await self._bucket.last(key)
        if last is not None and last.removed:
            try:
                return await self._publish(key, value, {EXPECTED_SEQUENCE: str(last.revision)})
            except RevisionMismatch:
                pass
        raise AlreadyExists(f"{self._bucket.name}: key {key!r} exists")

    async def update(self, key: str, value: bytes, version: VersionToken) -> VersionToken:
        """Set a key whose version is still this one; RevisionMismatch otherwise."""
        revision = version.as_int()
        if revision is None:
            raise OptionsError(f"key {key!r}: {version!r} is no revision of this bucket")
        return await self._publish(key, value, {EXPECTED_SEQUENCE: str(revision)})

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
            # Nobody answers for a bucket that was deleted: ask for it by name, which raises ReplacedError.
            if self._bucket.api.client().is_connected:
                await self._bucket.api.info()
            raise


class NatsKvStore(KvStore):
    """One NATS bucket.

    >>> issubclass(NatsKvStore, KvStore)
    True
    """

    def __init__(self, api: JetStream, name: str, config: dict[str, Any]) -> None:
        bucket = _Bucket(api, name, bool(config.get("allow_direct")))
        self._name, self._api = name, api
        self._reader, self._watcher, self._writer = NatsKvReader(bucket), NatsKvWatcher(bucket), NatsKvWriter(bucket)
        self.config = config
        """The configuration of the stream as the server has it."""

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


def _removes(headers: dict[str, str]) -> bool:
    """Whether a message with these headers says that its key is gone; servers write markers of their own."""
    return headers.get("KV-Operation") in REMOVALS or "Nats-Marker-Reason" in headers
