"""Buckets in a folder: the roles of penstock.kv.roles with nothing to install, for one machine and many processes.

    EmbeddedConnection(folder) ── store(name) ──► EmbeddedKvStore ── reader, watcher, writer
                                                          │
                                       Bucket (bucket.py): log + state, synchronous

Writes that are asked for at the same time share one turn: one lock, one append, one sync, in the executor.  A small one
that is alone and has to wait for nothing is done on the event loop, which takes less than changing threads.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Disk, disk_for, in_disk_thread
from penstock.disk.doors import in_a_folder, refuse_foreign
from penstock.disk.posix import folder_of
from penstock.errors import NotConnected, OptionsError, ReplacedError, UnsupportedError
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.format import MAX_VALUE_BYTES
from penstock.kv.embedded.options import EmbeddedOptions
from penstock.kv.embedded.store import (
    Door,
    EmbeddedKvReader,
    EmbeddedKvStore,
    EmbeddedKvWatcher,
    EmbeddedKvWriter,
)
from penstock.kv.roles import ConnectionCapabilities, KvConnection, StoreConfig
from penstock.options import options_from, shows_options

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


class EmbeddedConnection(KvConnection):
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

    @shows_options(EmbeddedOptions)
    def __init__(
        self,
        folder: str | os.PathLike[str],
        options: EmbeddedOptions | None = None,
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **given: Any,
    ) -> None:
        self.folder = os.fspath(folder)
        self._options, self._disk, self._clock = (
            options_from(EmbeddedOptions, options, given),
            disk or disk_for(folder),
            clock,
        )
        self._open_buckets: dict[str, Bucket] | None = None
        self._opening: dict[tuple[str, bool], asyncio.Task[Bucket]] = {}

    @property
    def is_healthy(self) -> bool:
        """Whether it is connected: there is no server to lose."""
        return self._open_buckets is not None

    @property
    def capabilities(self) -> ConnectionCapabilities:
        """What embedded buckets can do."""
        return CAPABILITIES

    async def connect(self) -> None:
        """Look that the folder can be one of buckets; it is made with the first of them."""
        if self._open_buckets is None:
            found = await in_disk_thread(self._disk.stat, self.folder)
            if found is not None and not found.is_folder:
                raise OptionsError(f"{self.folder}: this is a file, buckets are in a folder")
            self._open_buckets = self._open_buckets or {}

    async def shutdown(self) -> None:
        """Close every bucket; with a sync mode everything written is durable when this returns."""
        buckets, self._open_buckets = self._open_buckets, None
        for task in list(self._opening.values()):
            await asyncio.gather(task, return_exceptions=True)
        for bucket in (buckets or {}).values():
            await in_disk_thread(bucket.close)

    async def store_with_config(self, config: StoreConfig) -> EmbeddedKvStore:
        """Return a bucket, made with this configuration if it does not exist."""
        if config.storage != "file":
            raise UnsupportedError(f"bucket {config.name}: storage={config.storage!r}: an embedded bucket is files")
        if config.replicas != 1:
            raise UnsupportedError(f"bucket {config.name}: replicas={config.replicas}: an embedded bucket is one copy")
        return self._store(config, await self._open(config, True))

    async def store(self, name: str) -> EmbeddedKvStore:
        """Return a bucket; if it does not exist its first put or create makes it, and nothing else does."""
        config = StoreConfig(name=name)
        try:
            return self._store(config, await self._open(config, False))
        except ReplacedError:
            return self._store(config, None)

    async def find(self, name: str) -> EmbeddedKvStore | None:
        """Return a bucket that exists, or None; nothing is made."""
        config = StoreConfig(name=name)
        try:
            return self._store(config, await self._open(config, False))
        except ReplacedError:
            return None

    async def buckets(self) -> list[str]:
        """Return the names of the buckets there are, sorted."""
        self._connected()
        return await in_disk_thread(self._names)

    async def delete(self, name: str) -> bool:
        """Remove a bucket with all its keys; return whether it was there."""
        try:
            bucket = await self._open(StoreConfig(name=name), False)
        except ReplacedError:
            return False
        self._connected().pop(name, None)
        await in_disk_thread(bucket.delete)
        return True

    def _connected(self) -> dict[str, Bucket]:
        if self._open_buckets is None:
            raise NotConnected(f"{self.folder}: not connected: call connect() first")
        return self._open_buckets

    def _store(self, config: StoreConfig, bucket: Bucket | None) -> EmbeddedKvStore:
        return EmbeddedKvStore(config.name, Door(functools.partial(self._open, config), bucket))

    async def _open(self, config: StoreConfig, make: bool) -> Bucket:
        """Return the one open bucket of this name; of several who ask at once one opens it."""
        buckets = self._connected()
        found = buckets.get(config.name)
        if found is not None:
            if not found.replaced:
                return found
            del buckets[config.name]
            await in_disk_thread(found.close)
        which = config.name, make
        task = self._opening.get(which)
        if task is None:
            task = self._opening[which] = asyncio.create_task(self._open_once(config, make))
            task.add_done_callback(lambda _: self._opening.pop(which, None))
        return await asyncio.shield(task)

    async def _open_once(self, config: StoreConfig, make: bool) -> Bucket:
        if make:
            await in_disk_thread(self._make_folder)
        folder = f"{self.folder}/{config.name}"
        bucket = await in_disk_thread(
            Bucket.open, folder, config, self._options, disk=self._disk, make=make, clock=self._clock
        )
        if self._open_buckets is None:
            await in_disk_thread(bucket.close)
            raise NotConnected(f"{self.folder}: shut down while bucket {config.name} was being opened")
        other = self._open_buckets.get(config.name)
        if other is not None:  # who makes and who looks may open it at the same time
            await in_disk_thread(bucket.close)
            return other
        self._open_buckets[config.name] = bucket
        return bucket

    def _make_folder(self) -> None:
        refuse_foreign(self._disk, self.folder, "bucket", holds=True)
        if self._disk.stat(self.folder) is None:
            with in_a_folder(self.folder):
                self._disk.make_folder(self.folder)
            self._disk.sync_folder(folder_of(self.folder))

    def _names(self) -> list[str]:
        if self._disk.stat(self.folder) is None:
            return []
        names = self._disk.list(self.folder)
        return [name for name in names if self._disk.stat(f"{self.folder}/{name}/bucket.json") is not None]


@shows_options(EmbeddedOptions)
async def embedded_connect(
    folder: str | os.PathLike[str], options: EmbeddedOptions | None = None, **given: Any
) -> EmbeddedConnection:
    """Return a connection to the buckets in a folder; options as keywords or as one object.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(embedded_connect(folder)).is_healthy
    True
    """
    connection = EmbeddedConnection(folder, options, **given)
    await connection.connect()
    return connection
