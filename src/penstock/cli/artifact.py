"""penstock artifact: export a store, import it elsewhere, and publish it on an object store."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import (
    PROBLEM,
    JsonOption,
    counted,
    emit_json,
    emit_text,
    fail,
    print_facts,
    progress_bar,
    say_plain,
)
from penstock.cli.sparkwork import Cores, Master, Memory
from penstock.errors import NotFoundError, OptionsError

if TYPE_CHECKING:
    from penstock.artifact import ExportManifest, Transport

__all__ = ["register"]

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="An append log's file, an engine's folder, or the URL of either.")
]
ArtifactArgument = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="The folder of an artifact, or where one is published.")
]
UrlArgument = Annotated[
    str,
    typer.Argument(metavar="URL", help="Where it is published: s3://bucket/prefix/name, or a folder."),
]
NonAtomicOption = Annotated[
    bool, typer.Option("--non-atomic", help="Publish on a store that cannot compare and swap: for one publisher only.")
]


def register(app: typer.Typer) -> None:
    """Add the group ``penstock artifact``."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Stores exported at one cursor: files, and published by URL.",
        epilog="Example: penstock artifact inspect s3://bucket/folds/routes --json",
    )
    group.command(name="export", epilog="Example: penstock artifact export routes.snap /var/tmp/routes")(export_)
    group.command(name="import", epilog="Example: penstock artifact import /var/tmp/routes copy.snap")(import_)
    group.command(epilog="Example: penstock artifact inspect /var/tmp/routes --json")(inspect)
    group.command(epilog="Example: penstock artifact verify /var/tmp/routes")(verify)
    group.command(epilog="Example: penstock artifact push routes.snap s3://bucket/folds/routes")(push)
    group.command(epilog="Example: penstock artifact pull s3://bucket/folds/routes routes.snap")(pull)
    group.command(epilog="Example: penstock artifact build s3://bucket/fleet/edge-1/routes s3://bucket/folds/routes")(
        build
    )
    group.command(epilog="Example: penstock artifact prune s3://bucket/folds/routes --grace 3600")(prune)
    app.add_typer(group, name="artifact")


def export_(
    store: StoreArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.")],
    json: JsonOption = False,
) -> None:
    """Write an artifact of a store."""
    from penstock.artifact import export_store, fold_here
    from penstock.store import open_store

    with progress_bar(f"exporting {store}") as bar:
        bar.add_task("", total=None)
        with fold_here(store) as path, open_store(path, read_only=False) as opened:
            manifest = export_store(opened, out)
    _show_manifest(manifest, out, json=json)


def import_(
    artifact: ArtifactArgument,
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store to make; nothing may be there.")],
    json: JsonOption = False,
) -> None:
    """Make a store of an artifact, every byte checked."""
    from penstock.artifact import artifact_here, import_artifact
    from penstock.disk.tree import check_vacant

    check_vacant(store)
    with progress_bar(f"importing {artifact}") as bar:
        bar.add_task("", total=None)
        with artifact_here(artifact) as folder:
            manifest = import_artifact(folder, store)
    _show_manifest(manifest, store, json=json)


def inspect(artifact: ArtifactArgument, json: JsonOption = False) -> None:
    """Say what an artifact holds, without reading its files."""
    from penstock.artifact import read_manifest, transport_for
    from penstock.artifact.here import split_artifact
    from penstock.disk import is_url, read_disk_for

    disk, folder = read_disk_for(artifact), artifact.rstrip("/")
    published = disk.stat(f"{folder}/MANIFEST.json") is None and (is_url(artifact) or disk.stat(folder) is None)
    if published:
        place, key = split_artifact(artifact)
        manifest = _published(transport_for(place), key, artifact)
    else:
        manifest = read_manifest(folder)
    _show_manifest(manifest, artifact, json=json)


def verify(artifact: ArtifactArgument, json: JsonOption = False) -> None:
    """Check an artifact by hashing and opening it.

    Exit code 1 if something is wrong.
    """
    from penstock.artifact import artifact_here, verify_artifact
    from penstock.errors import CorruptionError
    from penstock.types import Problem

    with progress_bar(f"verifying {artifact}") as bar:
        bar.add_task("", total=None)
        try:
            with artifact_here(artifact) as folder:
                problems = verify_artifact(folder)
        except CorruptionError as exc:  # what is published is hashed while it is fetched
            problems = [Problem(exc.file, exc.byte, exc.reason)]
    if json:
        emit_json({"path": artifact, "ok": not problems, "problems": problems})
    else:
        emit_text(map(str, problems))
        say_plain(f"{artifact}: {counted(len(problems), 'problem') if problems else 'no problem found'}")
    if problems:
        raise typer.Exit(PROBLEM)


def push(store: StoreArgument, url: UrlArgument, non_atomic: NonAtomicOption = False, json: JsonOption = False) -> None:
    """Export a store and publish it, unless a newer one is published."""
    import os

    from penstock.artifact import export_store, fold_here, transport_for
    from penstock.artifact.here import split_artifact
    from penstock.disk.tree import staged
    from penstock.store import open_store

    place, key = split_artifact(url)
    transport = transport_for(place, allow_non_atomic_pointer=non_atomic)
    # Beside the store, on its file system, so that engines may link files.
    with fold_here(store) as path, staged(os.path.abspath(path), "push") as folder:
        artifact = folder + "/artifact"
        with open_store(path, read_only=False) as opened:
            manifest = export_store(opened, artifact)
        with progress_bar(f"sending {store}", "bytes") as bar:
            task = bar.add_task("", total=manifest.total_bytes)
            outcome = transport.upload(artifact, key, lambda size: bar.advance(task, size))
    if outcome.result == "superseded":
        cursor = None if outcome.remote_cursor is None else outcome.remote_cursor.token.as_int()
        if json:
            emit_json({"result": "superseded", "cursor": manifest.rank, "published_cursor": cursor, "url": url})
        fail(f"{url}: a newer artifact is published, at {cursor}; this store is at {manifest.rank}")
    if json:
        emit_json({"result": "published", "cursor": manifest.rank, "bytes": manifest.total_bytes, "url": url})
    else:
        say_plain(f"{url}: published at {manifest.rank}, {manifest.total_bytes:,} bytes")


def pull(
    url: UrlArgument,
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store to make; nothing may be there.")],
    json: JsonOption = False,
) -> None:
    """Fetch what is published into a store.

    Every byte is checked.
    """
    from penstock.artifact import import_artifact, transport_for
    from penstock.artifact.here import split_artifact
    from penstock.disk.tree import check_vacant, staged

    place, key = split_artifact(url)
    transport = transport_for(place)
    check_vacant(store)
    total = _published(transport, key, url).total_bytes
    with staged(store, "pull") as folder, progress_bar(f"fetching {url}", "bytes") as bar:
        task = bar.add_task("", total=total)
        transport.download(key, folder + "/artifact", lambda size: bar.advance(task, size), sync=False)
        manifest = import_artifact(folder + "/artifact", store, take=True)
    _show_manifest(manifest, store, json=json)


def build(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log of envelopes, here or shipped: s3://bucket/….")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make, or the URL to publish at.")],
    to: Annotated[int | None, typer.Option(help="Fold up to this position. [default: the end]")] = None,
    base: Annotated[
        str | None, typer.Option(help="An artifact to begin from: its folder, or where it is published.")
    ] = None,
    lease: Annotated[
        str | None, typer.Option(help="Take the export lease first: BUCKET/KEY, in --lease-at.", metavar="BUCKET/KEY")
    ] = None,
    lease_at: Annotated[str, typer.Option(help="Where that bucket is: nats://host:port or a folder.")] = "buckets",
    ttl: Annotated[float, typer.Option(min=1, help="Seconds the lease lasts; the work must be done by then.")] = 3600.0,
    master: Master = None,
    cores: Cores = None,
    memory: Memory = "2g",
    json: JsonOption = False,
) -> None:
    """Fold a log on Spark into an artifact.

    It has the bytes that a node exports at that cursor, and goes into a folder, or up under lease and pointer.
    """
    from penstock.cli.sparkwork import on_spark
    from penstock.disk import is_url
    from penstock.spark.pipelines.artifact import build_artifact

    if not is_url(out):
        if lease is not None:
            raise OptionsError("--lease is for what is published: give a URL, or leave it out")
        with on_spark("building", master, cores, memory, reads=[log]) as (spark, _):
            manifest = build_artifact(spark, log, out, to=to, base=base)
        _show_manifest(manifest, out, json=json)
        return
    with on_spark("building", master, cores, memory, reads=[log]) as (spark, _):
        result, manifest = _publish(spark, log, out, to, base, lease, lease_at, ttl)
    if result == "published":
        _show_manifest(manifest, out, json=json)
        return
    if json:
        emit_json({"result": result, "url": out})
    fail(f"{out}: nothing is published: " + ("another node has the lease" if result == "lost" else "a newer one is"))


def _publish(
    spark: Any, log: str, url: str, to: int | None, base: str | None, lease: str | None, lease_at: str, ttl: float
) -> tuple[str, Any]:
    import tempfile

    from penstock.artifact import ExportLease, transport_for
    from penstock.artifact.here import split_artifact
    from penstock.cli.buckets import on_bucket
    from penstock.spark.pipelines.artifact import build_artifact, publish_built

    place, key = split_artifact(url)
    if lease is None:
        with tempfile.TemporaryDirectory(prefix="penstock-build-") as folder:
            manifest = build_artifact(spark, log, folder + "/artifact", to=to, base=base, scratch=place)
            return transport_for(place).upload(folder + "/artifact", key).result, manifest
    bucket, _, name = lease.partition("/")
    if not bucket or not name:
        raise OptionsError(f"--lease {lease}: give a bucket and a key, as leases/routes")

    async def work(store: Any) -> Any:
        held = ExportLease(store, name, f"spark-{uuid.uuid4().hex[:8]}")
        return await publish_built(spark, log, url, held, ttl_seconds=ttl, to=to, base=base)

    report = on_bucket(lease_at, bucket, work, make=True)
    return (report.outcome.result if report.won else "lost"), report.manifest


def prune(
    url: UrlArgument,
    grace: Annotated[float, typer.Option(min=0, help="Seconds a payload stays for who is downloading it.")] = 86400.0,
    json: JsonOption = False,
) -> None:
    """Remove payloads strictly older than what is published."""
    from penstock.artifact import transport_for
    from penstock.artifact.here import split_artifact

    place, key = split_artifact(url)
    transport = transport_for(place)
    _published(transport, key, url)
    gone = transport.prune(key, grace)
    if json:
        emit_json({"url": url, "removed": gone})
    else:
        say_plain(f"{url}: {counted(len(gone), 'payload')} removed")


def _published(transport: Transport, key: str, url: str) -> ExportManifest:
    try:
        return transport.manifest(key)
    except FileNotFoundError:
        raise NotFoundError(f"{url}: no artifact is published here") from None


def _show_manifest(manifest: object, where: str, *, json: bool) -> None:
    from penstock.artifact import ExportManifest
    from penstock.store.records import token_json

    assert isinstance(manifest, ExportManifest)
    facts = {
        "path": where,
        "schema_version": manifest.schema_version,
        "backend": manifest.backend,
        "backend_version": manifest.backend_version,
        "cursor": token_json(manifest.cursor.token.raw),
        "created_at_unix": manifest.created_at_unix,
        "bytes": manifest.total_bytes,
        "files": [{"path": file.path, "size": file.size, "blake3": file.blake3} for file in manifest.files],
    }
    if json:
        emit_json(facts)
        return
    files = [f"{file.path}  {file.size:,}" for file in manifest.files] or ["-"]
    print_facts({**{name: str(value) for name, value in facts.items()}, "files": files})
