"""Buckets in a folder: the roles of penstock.kv.roles with nothing to install, for one machine and many processes.

    EmbeddedConnection(folder) ── store(name) ──► EmbeddedKvStore ── reader, watcher, writer
                                                          │
                                       Bucket (embedded_bucket.py): log + state, synchronous

Writes that are asked for at the same time share one turn: one lock, one append, one sync, in the executor.  A small one
that is alone and has to wait for nothing is done on the event loop, which takes less than changing threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from penstock.batch import UpdateBatch
from penstock.disk import Disk, PosixDisk
from penstock.disk.posix import folder_of
from penstock.errors import NotConnected, OptionsError, PenstockError
from penstock.kv.embedded_bucket import Bucket
from penstock.kv.embedded_format import MAX_VALUE_BYTES, check_change, check_prefixes
from penstock.kv.embedded_options import EmbeddedOptions
from penstock.kv.embedded_plan import Change
from penstock.kv.embedded_turns import CHANGES_A_TURN, Turns
from penstock.kv.embedded_watch import EmbeddedWatch, below
from penstock.kv.executor import in_disk_thread
from penstock.kv.nats_watch import EndedWatch
from penstock.kv.nats_wire import check_key
from penstock.kv.roles import (
    Connection,
    ConnectionCapabilities,
    KvReader,
    KvStore,
    KvWatcher,
    KvWriter,
    StoreConfig,
    Watch,
)
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.updates import envelope_updates
from penstock.types import KvEntry, KvUpdate, Op, VersionToken, WatchCursor

__all__ = [
    "EmbeddedConnection",
    "EmbeddedOptions",
    "EmbeddedKvStore",
    "EmbeddedKvReader",
    "EmbeddedKvWatcher",
    "EmbeddedKvWriter",
    "embedded_connect",
]

CAPABILITIES: Final = ConnectionCapabilities(
    streaming_watch=True, prefix_watch=True, ttl=True, purge=True, cas=True, max_value_bytes=MAX_VALUE_BYTES
)
PUT_MANY_BYTES: Final = 4 << 20


class EmbeddedKvReader(KvReader):
    """Reads of an embedded bucket: from this process's memory, after a look whether others have written.

    >>> issubclass(EmbeddedKvReader, KvReader)
    True
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def get(self, key: str) -> KvEntry | None:
        """Return the live entry, or None; a tombstone is None."""
        found = await self.entry(key)
        return found if found is not None and found.value else None

    async def entry(self, key: str) -> KvEntry | None:
        """Return the entry even if it is a tombstone; None after a delete, a purge or its time to live."""
        check_key(key)
        if not self._bucket.fresh():
            await in_disk_thread(self._bucket.catch_up)
        return self._bucket.entry(key)

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the live keys below a prefix, in order of revision."""
        found = await self.scan(prefix)
        return [key.decode() for key in found.keys.to_list(found.buffer)]

    async def scan(self, prefix: str = "") -> UpdateBatch:
        """Return the live entries below a prefix as one batch of puts, in order of revision."""
        check_prefixes([prefix])
        return await in_disk_thread(self._scan, prefix)

    async def history(self, key: str) -> list[KvUpdate]:
        """Return the changes of a key that are still kept, oldest first: at most ``history`` of its StoreConfig.

        A purge hides what came before it.  This walks over the log.
        """
        check_key(key)
        return await in_disk_thread(self._history, key)

    def _scan(self, prefix: str) -> UpdateBatch:
        self._bucket.catch_up()
        return self._bucket.scan(prefix)[0]

    def _history(self, key: str) -> list[KvUpdate]:
        bucket, found = self._bucket, list[KvUpdate]()
        position, raw = bucket.first_revision(), key.encode()
        while len(batch := bucket.reader.read(position, DEFAULT_LIMIT)):
            updates = below(envelope_updates(batch, bucket.reader.path), [raw])
            found += [updates[int(index)] for index in (updates.keys.lengths == len(raw)).nonzero()[0]]
            position = batch.next_position
        purges = [index for index, update in enumerate(found) if update.op is Op.PURGE]
        return found[purges[-1] if purges else 0 :][-bucket.config.history :]


class EmbeddedKvWatcher(KvWatcher):
    """Watches of an embedded bucket.  A cursor that is unknown, foreign or 0 means the beginning.

    >>> issubclass(EmbeddedKvWatcher, KvWatcher)
    True
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def watch_all(self) -> Watch:
        """Watch every key, beginning with the re-list."""
        return await self._watch([""], None)

    async def watch_prefix(self, prefix: str) -> Watch:
        """Watch the keys below one prefix, beginning with the re-list."""
        return await self._watch([prefix], None)

    async def watch_prefixes(self, prefixes: Sequence[str]) -> Watch:
        """Watch the keys below any of these prefixes."""
        return await self._watch(prefixes, None)

    async def watch_all_from(self, cursor: WatchCursor) -> Watch:
        """Watch every key from behind a cursor on."""
        return await self._watch([""], cursor)

    async def watch_prefix_from(self, prefix: str, cursor: WatchCursor) -> Watch:
        """Watch the keys below one prefix from behind a cursor on."""
        return await self._watch([prefix], cursor)

    async def watch_prefixes_from(self, prefixes: Sequence[str], cursor: WatchCursor) -> Watch:
        """Watch the keys below any of these prefixes from behind a cursor on."""
        return await self._watch(prefixes, cursor)

    async def _watch(self, prefixes: Sequence[str], cursor: WatchCursor | None) -> Watch:
        if not prefixes:
            return EndedWatch()
        revision = cursor.token.as_int() if cursor is not None else None
        watch = EmbeddedWatch(self._bucket, check_prefixes(list(prefixes)), revision or None)
        await in_disk_thread(watch.attach)
        return watch


class EmbeddedKvWriter(KvWriter):
    """Writes to an embedded bucket.

    >>> issubclass(EmbeddedKvWriter, KvWriter)
    True
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def put(self, key: str, value: bytes) -> VersionToken:
        """Set a key, whatever it was."""
        return await self._write("put", key, value)

    async def put_many(self, entries: Iterable[tuple[str, bytes]]) -> list[VersionToken]:
        """Set many keys in order, thousands in one turn."""
        tokens: list[VersionToken] = []
        rest = iter(entries)
        while part := _some(rest):
            for outcome in await self._turns.commit(part):
                if isinstance(outcome, PenstockError):
                    raise outcome
                tokens.append(VersionToken(outcome.to_bytes(8, "big")))
        return tokens

    async def put_with_ttl(self, key: str, value: bytes, ttl_seconds: float) -> VersionToken:
        """Set a key that vanishes after a time, with a purge in the log that watches see."""
        if not 0 < ttl_seconds < 1e9:
            raise OptionsError(f"ttl_seconds={ttl_seconds}: must be above 0 and below 1e9")
        return await self._write("put", key, value, expires_ns=time.time_ns() + int(ttl_seconds * 1e9))

    async def delete(self, key: str) -> bool:
        """Remove a key, whatever it was; always True."""
        await self._write("delete", key)
        return True

    async def purge(self, key: str) -> bool:
        """Remove a key and hide its history; always True.  Its bytes go with the segments they are in."""
        await self._write("purge", key)
        return True

    async def create(self, key: str, value: bytes) -> VersionToken:
        """Set a key that is absent or deleted; AlreadyExists if it is live or a tombstone."""
        return await self._write("create", key, value)

    async def update(self, key: str, value: bytes, version: VersionToken) -> VersionToken:
        """Set a key whose version is still this one; RevisionMismatch otherwise."""
        revision = version.as_int()
        if revision is None:
            raise OptionsError(f"key {key!r}: {version!r} is no revision of this bucket")
        return await self._write("update", key, value, revision)

    async def delete_with_version(self, key: str, version: VersionToken) -> bool:
        """Replace a key whose version is still this one by a tombstone; RevisionMismatch otherwise."""
        await self.update(key, b"", version)
        return True

    async def _write(
        self, what: str, key: str, value: bytes = b"", revision: int = 0, expires_ns: int = 0
    ) -> VersionToken:
        value = bytes(value)
        check_change(key, value)
        change = Change(what, key, value, revision, expires_ns)  # type: ignore[arg-type]
        (outcome,) = await self._turns.commit([change])
        if isinstance(outcome, PenstockError):
            raise outcome
        return VersionToken.of(outcome)


class EmbeddedKvStore(KvStore):
    """One embedded bucket.

    >>> issubclass(EmbeddedKvStore, KvStore)
    True
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        """The synchronous bucket behind the roles."""
        self._reader, self._watcher = EmbeddedKvReader(bucket), EmbeddedKvWatcher(bucket)
        self._writer = EmbeddedKvWriter(Turns(bucket))

    @property
    def name(self) -> str:
        """The name of the bucket."""
        return self.bucket.config.name

    @property
    def config(self) -> StoreConfig:
        """How the bucket was made."""
        return self.bucket.config

    @property
    def reader(self) -> EmbeddedKvReader:
        """The role that reads."""
        return self._reader

    @property
    def watcher(self) -> EmbeddedKvWatcher:
        """The role that watches."""
        return self._watcher

    @property
    def writer(self) -> EmbeddedKvWriter:
        """The role that writes."""
        return self._writer

    async def compact(self, revision: int) -> None:
        """Forget the history up to and including this revision; live keys stay, cursors before it expire."""
        await in_disk_thread(self.bucket.compact, revision)


class EmbeddedConnection(Connection):
    """A folder of buckets, shared by any number of processes of one machine.

    >>> import tempfile
    >>> async def example(folder):
    ...     async with EmbeddedConnection(folder) as connection:
    ...         store = await connection.store("routes")
    ...         version = await store.writer.create("node.a", b"10.0.0.1")
    ...         await store.writer.update("node.a", b"10.0.0.2", version)
    ...         return (await store.reader.get("node.a")).value
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(example(folder))
    b'10.0.0.2'
    """

    def __init__(
        self, folder: str | os.PathLike[str], options: EmbeddedOptions | None = None, *, disk: Disk | None = None
    ) -> None:
        self.folder = os.fspath(folder)
        self._options, self._disk = options or EmbeddedOptions(), disk or PosixDisk()
        self._stores: dict[str, EmbeddedKvStore] | None = None
        self._opening: dict[str, asyncio.Task[EmbeddedKvStore]] = {}

    @property
    def is_healthy(self) -> bool:
        """Whether it is connected: there is no server to lose."""
        return self._stores is not None

    @property
    def capabilities(self) -> ConnectionCapabilities:
        """What embedded buckets can do."""
        return CAPABILITIES

    async def connect(self) -> None:
        """Make the folder if it is not there."""
        if self._stores is None:
            await in_disk_thread(self._make_folder)
            self._stores = self._stores or {}

    async def shutdown(self) -> None:
        """Close every bucket; with a sync mode everything written is durable when this returns."""
        stores, self._stores = self._stores, None
        for task in list(self._opening.values()):
            await asyncio.gather(task, return_exceptions=True)
        for store in (stores or {}).values():
            await in_disk_thread(store.bucket.close)

    async def store_with_config(self, config: StoreConfig) -> EmbeddedKvStore:
        """Return a bucket, made with this configuration if it does not exist."""
        if self._stores is None:
            raise NotConnected(f"{self.folder}: not connected: call connect() first")
        if config.name not in self._stores:
            task = self._opening.get(config.name)
            if task is None:
                task = self._opening[config.name] = asyncio.create_task(self._open(config))
                task.add_done_callback(lambda _: self._opening.pop(config.name, None))
            return await asyncio.shield(task)
        return self._stores[config.name]

    async def _open(self, config: StoreConfig) -> EmbeddedKvStore:
        bucket = await in_disk_thread(
            Bucket.open, f"{self.folder}/{config.name}", config, self._options, disk=self._disk
        )
        if self._stores is None:
            await in_disk_thread(bucket.close)
            raise NotConnected(f"{self.folder}: shut down while bucket {config.name} was being opened")
        store = self._stores[config.name] = EmbeddedKvStore(bucket)
        return store

    def _make_folder(self) -> None:
        found = self._disk.stat(self.folder)
        if found is None:
            self._disk.make_folder(self.folder)
            self._disk.sync_folder(folder_of(self.folder))
        elif not found.is_folder:
            raise OptionsError(f"{self.folder}: this is a file, buckets are in a folder")


async def embedded_connect(
    folder: str | os.PathLike[str], options: EmbeddedOptions | None = None
) -> EmbeddedConnection:
    """Return a connection to the buckets in a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(embedded_connect(folder)).is_healthy
    True
    """
    connection = EmbeddedConnection(folder, options)
    await connection.connect()
    return connection


def _some(entries: Iterable[tuple[str, bytes]]) -> list[Change]:
    """Take the next changes of a put_many: thousands of them, or a few megabytes."""
    taken: list[Change] = []
    size = 0
    for key, value in islice(entries, CHANGES_A_TURN):
        taken.append(Change("put", check_change(key, value), bytes(value)))
        size += len(value)
        if size >= PUT_MANY_BYTES:
            break
    return taken
