"""What ``penstock kv`` works with: which bucket is meant, and its updates as lines.

A folder is an embedded bucket, ``nats://`` and ``tls://`` are NATS.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from penstock.batch import UpdateBatch
from penstock.cli.output import emit_lines
from penstock.cli.records import readable
from penstock.disk import PosixDisk
from penstock.errors import OptionsError, UnsupportedError
from penstock.kv import Connection, EmbeddedConnection, KvStore, KvWriter, NatsConnection, NatsOptions, Watch
from penstock.types import VersionToken, WatchCursor

__all__ = [
    "bucket_folder",
    "connection_of",
    "is_nats",
    "on_bucket",
    "print_updates",
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
    if PosixDisk().stat(os.path.join(place, "bucket.json")) is None:
        return None
    folder, name = os.path.split(os.path.abspath(place))
    return folder, name


def connection_of(place: str, bucket: str, *, make: bool) -> Connection:
    """Return the connection to a place; without ``make`` an embedded bucket must be there already."""
    if is_nats(place):
        return NatsConnection(NatsOptions(url=place))
    if not make and bucket_folder(os.path.join(place, bucket)) is None:
        raise OptionsError(f"{place}: there is no bucket {bucket!r} in this folder")
    return EmbeddedConnection(place)


def on_bucket(place: str, bucket: str, work: Callable[[KvStore], Awaitable[T]], *, make: bool = False) -> T:
    """Connect, do the work on the bucket, and return what it returns."""

    async def connected() -> T:
        async with connection_of(place, bucket, make=make) as connection:
            return await work(await connection.store(bucket))

    return asyncio.run(connected())


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
        emit_lines(msgspec.json.encode(row) + b"\n" for row in rows)
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
