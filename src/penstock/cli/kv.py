"""penstock kv: read, write and watch the keys of a bucket, embedded or on NATS."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from penstock.batch import UpdateBatch, payload_text
from penstock.cli.buckets import connection_of
from penstock.cli.output import PROBLEM, emit_json, emit_lines, stderr
from penstock.errors import UnsupportedError
from penstock.kv import KvStore, KvWatcher, KvWriter
from penstock.types import VersionToken, WatchCursor

__all__ = ["register", "app"]

T = TypeVar("T")

app = typer.Typer(help="Read, write and watch the keys of a bucket.", no_args_is_help=True)

PlaceArgument = Annotated[
    str, typer.Argument(metavar="URL_OR_DIR", help="A folder of embedded buckets, or a server: nats://host:port.")
]
BucketArgument = Annotated[str, typer.Argument(metavar="BUCKET", help="The name of the bucket.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Letters, digits and -/_=. are allowed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


def register(main: typer.Typer) -> None:
    """Add ``penstock kv`` to the command line."""
    main.add_typer(app, name="kv")


@app.command(epilog="Example: penstock kv get data/buckets routes node.a --json")
def get(place: PlaceArgument, bucket: BucketArgument, key: KeyArgument, json: JsonOption = False) -> None:
    """Print the value of a key; exit code 1 if it is not there."""
    found = _run(place, bucket, lambda store: store.reader.get(key))
    if found is None:
        stderr.print(f"{bucket}: no key {key}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(PROBLEM)
    if json:
        emit_json(_row(found.key, found.value, found.version))
    else:
        emit_lines([found.value, b"\n"])


@app.command(epilog="Example: penstock kv put data/buckets routes node.a 10.0.0.1 --create")
def put(
    place: PlaceArgument,
    bucket: BucketArgument,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(help="The value; - reads it from stdin.")],
    create: Annotated[bool, typer.Option("--create", help="Only if the key is not there.")] = False,
    revision: Annotated[int | None, typer.Option(min=1, help="Only if this is still its revision.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds after which the key vanishes.")] = None,
    json: JsonOption = False,
) -> None:
    """Set a key and print its revision; the bucket is made if it is not there."""
    data = sys.stdin.buffer.read() if value == "-" else value.encode()
    if sum((create, revision is not None, ttl is not None)) > 1:
        raise typer.BadParameter("--create, --revision and --ttl exclude each other")

    async def work(store: KvStore) -> VersionToken:
        writer = _writer(store)
        if create:
            return await writer.create(key, data)
        if revision is not None:
            return await writer.update(key, data, VersionToken.of(revision))
        if ttl is not None:
            return await writer.put_with_ttl(key, data, ttl)
        return await writer.put(key, data)

    version = _run(place, bucket, work, make=True)
    emit_json({"key": key, "revision": version.as_int()}) if json else typer.echo(version.as_int())


@app.command(epilog="Example: penstock kv delete data/buckets routes node.a node.b")
def delete(
    place: PlaceArgument,
    bucket: BucketArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="What to remove.")],
    purge: Annotated[bool, typer.Option("--purge", help="Together with its history.")] = False,
) -> None:
    """Remove keys, whether they are there or not."""

    async def work(store: KvStore) -> None:
        writer = _writer(store)
        for key in keys:
            await (writer.purge(key) if purge else writer.delete(key))

    _run(place, bucket, work)


@app.command(epilog="Example: penstock kv ls data/buckets routes node. --json")
def ls(
    place: PlaceArgument,
    bucket: BucketArgument,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only keys below it; ends in a dot.")] = "",
    json: JsonOption = False,
) -> None:
    """List the live keys in key order; with --json also revision and size."""
    batch = _run(place, bucket, lambda store: store.reader.scan(prefix))
    rows = sorted(batch.to_pylist(), key=lambda row: str(row["key"]))
    if json:
        found = ({"key": row["key"], "revision": _int(row["version"]), "bytes": len(row["value"])} for row in rows)
        emit_lines(msgspec.json.encode(row) + b"\n" for row in found)
    else:
        emit_lines(f"{row['key']}\n".encode() for row in rows)


@app.command(epilog="Example: penstock kv watch data/buckets routes node. --from 120 --json")
def watch(
    place: PlaceArgument,
    bucket: BucketArgument,
    prefixes: Annotated[list[str] | None, typer.Argument(metavar="[PREFIX...]", help="Only keys below these.")] = None,
    from_: Annotated[int | None, typer.Option("--from", min=1, help="Only what came after this revision.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when everything there is was printed.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the current state of a bucket and then its changes, until interrupted."""
    wanted = prefixes or [""]

    async def work(store: KvStore) -> None:
        watcher = store.watcher
        if watcher is None:
            raise UnsupportedError(f"{bucket}: this backend cannot watch")
        async with await _start(watcher, wanted, from_) as running:
            while not (once and running.hydrated):
                _print(await running.next_batch(), json=json)

    _run(place, bucket, work)


async def _start(watcher: KvWatcher, prefixes: list[str], revision: int | None) -> Any:
    everything = prefixes == [""]
    if revision is None:
        return await (watcher.watch_all() if everything else watcher.watch_prefixes(prefixes))
    cursor = WatchCursor.of(revision)
    return await (watcher.watch_all_from(cursor) if everything else watcher.watch_prefixes_from(prefixes, cursor))


def _run(place: str, bucket: str, work: Callable[[KvStore], Awaitable[T]], *, make: bool = False) -> T:
    async def connected() -> T:
        async with connection_of(place, bucket, make=make) as connection:
            return await work(await connection.store(bucket))

    return asyncio.run(connected())


def _writer(store: KvStore) -> KvWriter:
    if store.writer is None:
        raise UnsupportedError(f"{store.name}: this backend cannot write")
    return store.writer


def _print(batch: UpdateBatch, *, json: bool) -> None:
    if json:
        rows = ({"op": row["op"], **_row(row["key"], row["value"], row["version"])} for row in batch.to_pylist())
        emit_lines(msgspec.json.encode(row) + b"\n" for row in rows)
        return
    lines = []
    for row in batch.to_pylist():
        _, text = payload_text(row["value"])
        lines.append(f"{_int(row['version']) or '-':>10}  {row['op']:<6}  {row['key']}  {text}\n".encode())
    emit_lines(lines)


def _row(key: str, value: bytes, version: VersionToken | bytes) -> dict[str, Any]:
    form, text = payload_text(value)
    raw = version if isinstance(version, bytes) else version.raw
    return {"key": key, form.replace("payload", "value"): text, "revision": _int(raw)}


def _int(raw: bytes) -> int | None:
    return VersionToken(raw).as_int()
