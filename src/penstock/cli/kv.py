"""penstock kv: read, write and watch the keys of a bucket, embedded or on NATS."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import JsonOption, emit_bytes, emit_json, emit_lines, fail, json_line
from penstock.errors import OptionsError
from penstock.types import VersionToken

if TYPE_CHECKING:
    from penstock.kv import KvStore

__all__ = ["register"]

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL_OR_DIR",
        help="A folder of embedded buckets, or a server: nats://host:port, tls://host:port (with NATS_USER, "
        "NATS_PASSWORD or NATS_PASSWORD_FILE, NATS_CREDS, NATS_CA, NATS_CERT, NATS_KEY).",
    ),
]
BucketArgument = Annotated[str, typer.Argument(metavar="BUCKET", help="The name of the bucket.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Letters, digits and -/_=. are allowed.")]


def register(app: typer.Typer) -> None:
    """Add the group ``penstock kv``."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Read, write and watch the keys of a bucket.",
        epilog="Example: penstock kv get buckets routes node.a --json",
    )
    group.command(epilog="Example: penstock kv get buckets routes node.a --json")(get)
    group.command(epilog="Example: penstock kv put buckets routes node.a 10.0.0.1 --create")(put)
    group.command(epilog="Example: penstock kv delete buckets routes node.a node.b")(delete)
    group.command(epilog="Example: penstock kv ls buckets routes node. --json")(ls)
    group.command(epilog="Example: penstock kv watch buckets routes node. --from 120 --json")(watch)
    group.command(epilog="Example: penstock kv buckets nats://localhost:4222 --json")(buckets)
    group.command(epilog="Example: penstock kv make buckets routes --history 5 --max-bytes -1")(make)
    group.command(epilog="Example: penstock kv rm buckets routes")(rm)
    app.add_typer(group, name="kv")


def get(place: PlaceArgument, bucket: BucketArgument, key: KeyArgument, json: JsonOption = False) -> None:
    """Print the value of a key; exit code 1 if it is not there."""
    from penstock.cli.buckets import on_bucket, row_of

    found = on_bucket(place, bucket, lambda store: store.reader.get(key))
    if found is None:
        fail(f"{bucket}: no key {key}")
    if json:
        emit_json(row_of(found.key, found.value, found.version.raw))
    else:
        emit_bytes(found.value)


def put(
    place: PlaceArgument,
    bucket: BucketArgument,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value; - reads it from stdin.")],
    create: Annotated[bool, typer.Option("--create", help="Only if the key is not there.")] = False,
    revision: Annotated[int | None, typer.Option(min=1, help="Only if this is still its revision.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds after which the key vanishes.")] = None,
    json: JsonOption = False,
) -> None:
    """Set a key and print its revision; a missing bucket is made."""
    from penstock.cli.buckets import on_bucket, writer_of

    if create and revision is not None:
        raise OptionsError("--create and --revision exclude each other")
    data = sys.stdin.buffer.read() if value == "-" else value.encode("utf-8", "surrogateescape")

    async def work(store: KvStore) -> VersionToken:
        writer = writer_of(store)
        if create:
            return await writer.create(key, data, ttl_seconds=ttl)
        if revision is not None:
            return await writer.update(key, data, VersionToken.of(revision), ttl_seconds=ttl)
        if ttl is not None:
            return await writer.put_with_ttl(key, data, ttl)
        return await writer.put(key, data)

    version = on_bucket(place, bucket, work, make=True).as_int()
    if json:
        emit_json({"key": key, "revision": version})
    else:
        emit_lines([f"{version}\n".encode()])


def delete(
    place: PlaceArgument,
    bucket: BucketArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="What to remove.")],
    purge: Annotated[bool, typer.Option("--purge", help="Together with its history.")] = False,
) -> None:
    """Remove keys, whether they are there or not."""
    from penstock.cli.buckets import on_bucket, writer_of

    async def work(store: KvStore) -> None:
        writer = writer_of(store)
        for key in keys:
            await (writer.purge(key) if purge else writer.delete(key))

    on_bucket(place, bucket, work)


def ls(
    place: PlaceArgument,
    bucket: BucketArgument,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys below it; ends in a dot.")] = "",
    json: JsonOption = False,
) -> None:
    """List the live keys in order; with --json revision and size too."""
    from penstock.cli.buckets import on_bucket, revision_of

    batch = on_bucket(place, bucket, lambda store: store.reader.scan(prefix))
    rows = sorted(batch.to_pylist(), key=lambda row: str(row["key"]))
    if json:
        found = (
            {"key": row["key"], "revision": revision_of(row["version"]), "bytes": len(row["value"])} for row in rows
        )
        emit_lines(map(json_line, found))
    else:
        emit_lines(f"{row['key']}\n".encode() for row in rows)


def watch(
    place: PlaceArgument,
    bucket: BucketArgument,
    prefixes: Annotated[list[str] | None, typer.Argument(metavar="PREFIX", help="Only keys below these.")] = None,
    from_: Annotated[int | None, typer.Option("--from", min=1, help="Only what came after this revision.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when everything there is was printed.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the keys of a bucket, then its changes until interrupted."""
    from penstock.cli.buckets import on_bucket, print_updates, start_watch

    async def work(store: KvStore) -> None:
        async with await start_watch(store, prefixes or [""], from_) as running:
            while not (once and running.hydrated):
                print_updates(await running.next_batch(), json=json)

    on_bucket(place, bucket, work)


def buckets(place: PlaceArgument, json: JsonOption = False) -> None:
    """List the buckets of a folder or a server; nothing is made."""
    from penstock.cli.buckets import on_connection, require_place

    require_place(place)
    names = on_connection(place, lambda connection: connection.buckets())
    emit_lines(json_line({"bucket": name}) if json else f"{name}\n".encode() for name in names)


def make(
    place: PlaceArgument,
    bucket: BucketArgument,
    history: Annotated[int, typer.Option(help="Revisions kept for each key, 1 to 64.")] = 1,
    max_age: Annotated[float, typer.Option(help="Seconds a revision is kept; 0 for ever.")] = 0.0,
    max_bytes: Annotated[int, typer.Option(help="Size of the whole bucket; -1 without limit.")] = 10 << 20,
    discard: Annotated[str, typer.Option(help="What a full bucket does: refuse the new, or evict the old.")] = "new",
    storage: Annotated[str, typer.Option(help="On NATS: file or memory.")] = "file",
    replicas: Annotated[int, typer.Option(help="Copies in a NATS cluster.")] = 1,
) -> None:
    """Make a bucket; one that is there is left as it is."""
    from penstock.cli.buckets import on_connection
    from penstock.kv import StoreConfig

    config = StoreConfig(
        name=bucket,
        history=history,
        max_age_seconds=max_age,
        max_bytes=max_bytes,
        discard=discard,  # type: ignore[arg-type]  # it checks
        storage=storage,  # type: ignore[arg-type]
        replicas=replicas,
    )
    on_connection(place, lambda connection: connection.store_with_config(config))


def rm(place: PlaceArgument, bucket: BucketArgument) -> None:
    """Remove a bucket with its keys and its history.

    Exit code 1 if it is not there.
    """
    from penstock.cli.buckets import on_connection
    from penstock.kv.nats.options import without_secrets

    if not on_connection(place, lambda connection: connection.delete(bucket)):
        fail(f"{without_secrets(place)}: there is no bucket {bucket!r} here")
