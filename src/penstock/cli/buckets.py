"""What ``penstock kv`` works with: which bucket is meant, and its updates as lines.

A folder is an embedded bucket, ``nats://`` and ``tls://`` are NATS, with credentials from the environment or from
the URL, which whoever lists processes can read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.batch import UpdateBatch
from penstock.cli.output import emit_lines, json_line
from penstock.cli.records import readable
from penstock.disk import read_disk_for
from penstock.errors import NotFoundError, UnsupportedError
from penstock.kv import EmbeddedConnection, KvConnection, KvStore, KvWriter, NatsConnection, NatsOptions, Watch
from penstock.kv.nats.options import without_secrets
from penstock.types import VersionToken, WatchCursor

__all__ = [
    "bucket_folder",
    "connection_of",
    "find_bucket",
    "is_nats",
    "on_bucket",
    "on_connection",
    "print_updates",
    "require_place",
    "revision_of",
    "row_of",
    "start_watch",
    "writer_of",
]

T = TypeVar("T")


def is_nats(place: str) -> bool:
    """Whether a place is a NATS server.

    >>> is_nats("nats://localhost:4222"), is_nats("data/buckets")
    (True, False)
    """
    return place.startswith(("nats://", "tls://"))


def bucket_folder(place: str) -> tuple[str, str] | None:
    """Return (folder, name) when ``place`` is the folder of one embedded bucket, else None.

    >>> bucket_folder("/nowhere/at/all") is None
    True
    """
    if read_disk_for(place).stat(os.path.join(place, "bucket.json")) is None:
        return None
    folder, name = os.path.split(os.path.abspath(place))
    return folder, name


def connection_of(place: str) -> KvConnection:
    """Return the connection to a place, not connected yet."""
    if is_nats(place):
        return NatsConnection(NatsOptions.from_environment(place, os.environ))
    return EmbeddedConnection(place)


def require_place(place: str) -> None:
    """Refuse a folder that is not there; whether a server is, connecting tells.

    >>> require_place("/nowhere/at/all")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/at/all: there is no such folder
    """
    if not is_nats(place) and read_disk_for(place).stat(place) is None:
        raise NotFoundError(f"{place}: there is no such folder")


def on_connection(place: str, work: Callable[[KvConnection], Awaitable[T]]) -> T:
    """Connect, do the work, and return what it returns."""

    async def connected() -> T:
        async with connection_of(place) as connection:
            return await work(connection)

    return asyncio.run(connected())


def on_bucket(place: str, bucket: str, work: Callable[[KvStore], Awaitable[T]], *, make: bool = False) -> T:
    """Connect, do the work on the bucket, and return what it returns; without ``make`` it has to be there."""

    async def found(connection: KvConnection) -> T:
        return await work(await connection.store(bucket) if make else await find_bucket(connection, place, bucket))

    return on_connection(place, found)


async def find_bucket(connection: KvConnection, place: str, bucket: str) -> KvStore:
    """Return a bucket that is there; NotFoundError otherwise, without a word about credentials."""
    found = await connection.find(bucket)
    if found is None:
        raise NotFoundError(f"{without_secrets(place)}: there is no bucket {bucket!r} here")
    return found


def writer_of(store: KvStore) -> KvWriter:
    """Return the writer of a bucket, or say that it has none."""
    if store.writer is None:
        raise UnsupportedError(f"{store.name}: this backend cannot write")
    return store.writer


async def start_watch(store: KvStore, prefixes: list[str], revision: int | None) -> Watch:
    """Watch all keys below some prefixes, from the current state on or behind a revision."""
    watcher = store.watcher
    if watcher is None:
        raise UnsupportedError(f"{store.name}: this backend cannot watch")
    everything = prefixes == [""]
    if revision is None:
        return await (watcher.watch_all() if everything else watcher.watch_prefixes(prefixes))
    cursor = WatchCursor.of(revision)
    return await (watcher.watch_all_from(cursor) if everything else watcher.watch_prefixes_from(prefixes, cursor))


def print_updates(batch: UpdateBatch, *, json: bool) -> None:
    """Print changes, a line each: revision, op, key and value."""
    if json:
        rows = ({"op": row["op"], **row_of(row["key"], row["value"], row["version"])} for row in batch.to_pylist())
        emit_lines(map(json_line, rows))
        return
    lines = []
    for row in batch.to_pylist():
        shown = readable("value", row["value"])
        text = shown["value"] if "value" in shown else f"base64:{shown['value_base64']}"
        lines.append(f"{revision_of(row['version']) or '-':>10}  {row['op']:<6}  {row['key']}  {text}\n".encode())
    emit_lines(lines)


def row_of(key: str, value: bytes, version: bytes) -> dict[str, Any]:
    """Return an entry ready for JSON.

    >>> row_of("a", b"on", VersionToken.of(7).raw)
    {'key': 'a', 'value': 'on', 'revision': 7}
    """
    return {"key": key, **readable("value", value), "revision": revision_of(version)}


def revision_of(version: bytes) -> int | None:
    """Return a version as the number it is, or None.

    >>> revision_of(VersionToken.of(7).raw), revision_of(b"")
    (7, None)
    """
    return VersionToken(version).as_int()
