"""Artifacts and Spark: read as a table, and built on the cluster to the bytes a node exports."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.artifact import (
    ExportLease,
    encode_manifest,
    export_store,
    import_artifact,
    read_manifest,
    transport_for,
)
from penstock.cli.main import app
from penstock.disk import object_store_for
from penstock.errors import ExpiredError, OptionsError
from penstock.fold import follow
from penstock.kv import EmbeddedConnection
from penstock.log.detect import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.xchannel import Writer
from penstock.ship import Shipper, forget_before
from penstock.spark.pipelines.artifact import build_artifact, publish_built
from penstock.store import AppendLogStore
from penstock.testing.clock import FakeClock
from penstock.testing.s3 import S3Server
from penstock.types import Op


@pytest.fixture
def place(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/{tmp_path.name}"


def churn(path: Path, rounds: int, seed: int) -> None:
    """Append puts and deletes of keys that are hard to sort, and seal them."""
    chance = random.Random(seed)
    keys = [f"key.{chance.randrange(10**6)}" for _ in range(300)] + ["", "é", "zz\U0001f600", "a b", "~"]
    with Writer.open(path, region_bytes=65536, content="envelope/1") as writer:
        for _ in range(rounds):
            key = chance.choice(keys).encode()
            op = Op.DELETE if chance.random() < 0.2 else Op.PUT
            writer.append(encode_envelope(Envelope(key, chance.randbytes(chance.randrange(200)), op)))
        writer.roll()


def node_export(folder: Path, log: Path, clock: FakeClock) -> Path:
    """Return what a node exports that follows the log to its end."""
    artifact = folder / f"by-node-{len(list(folder.glob('by-node-*')))}"
    with AppendLogStore.open(folder / "node.snap") as store, open_log(str(log)) as reader:
        asyncio.run(follow(reader, store, once=True))
        export_store(store, artifact, clock=clock)
    return artifact


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_artifact_built_on_the_cluster_is_what_a_node_exports_and_is_published_by_lease_and_pointer(
    spark: Any, place: str, tmp_path: Path
) -> None:
    log, url, clock = tmp_path / "routes", f"{place}/folds/routes", FakeClock()
    churn(log, 2000, 1)
    churn(log, 1000, 2)
    first = node_export(tmp_path, log, clock)
    with Shipper(log, object_store_for(f"{place}/edge-1"), node="edge-1") as shipper:
        while shipper.step():
            pass
    build_artifact(spark, f"{place}/edge-1/routes", tmp_path / "built", clock=clock, scratch=place)
    assert files(tmp_path / "built") == files(first)  # the manifest too: the clocks are one
    assert not [info.key for info in object_store_for(place).objects() if ".penstock-build" in info.key]

    async def publish(**options: Any) -> Any:
        async with EmbeddedConnection(str(tmp_path / "leases")) as connection:
            lease = ExportLease(await connection.store("leases"), "routes", "spark")
            return await publish_built(spark, f"{place}/edge-1/routes", url, lease, **options)

    report = asyncio.run(publish())
    assert (report.outcome.result, report.completed) == ("published", True)
    # More comes, the beginning is forgotten: the published artifact is the base of the next one.
    churn(log, 1000, 3)
    second = node_export(tmp_path, log, clock)
    with Shipper(log, object_store_for(f"{place}/edge-1"), node="edge-1") as shipper:
        while shipper.step():
            pass
        forget_before(object_store_for(f"{place}/edge-1"), "routes", shipper.head.segments[1].first)
    with pytest.raises(ExpiredError):
        build_artifact(spark, f"{place}/edge-1/routes", tmp_path / "late", scratch=place)
    assert not (tmp_path / "late").exists()
    done = CliRunner().invoke(app, ["artifact", "build", str(log), str(tmp_path / "next"), "--base", url, "--json"])
    assert done.exit_code == 0, done.output
    now = json.loads(done.stdout)["created_at_unix"]
    assert (
        encode_manifest(msgspec.structs.replace(read_manifest(second), created_at_unix=now))
        == (tmp_path / "next" / "MANIFEST.json").read_bytes()
    )
    assert (tmp_path / "next/data/fold.snap").read_bytes() == (second / "data/fold.snap").read_bytes()
    # What is published is a table, and the next node's store.
    rows = spark.read.format("penstock").option("table", "artifact").load(url).collect()
    transport_for(f"{place}/folds").download("routes", tmp_path / "fetched")
    import_artifact(tmp_path / "fetched", tmp_path / "other.snap")
    with AppendLogStore.open(tmp_path / "other.snap") as store:
        wanted = [(entry.key, entry.value) for entry in store.range()]
        assert store.cursor() == report.manifest.cursor
    assert [(row["key"], bytes(row["value"])) for row in rows] == wanted
    with pytest.raises(OptionsError, match="no artifact is published"):
        build_artifact(spark, str(log), tmp_path / "x", base=f"{place}/folds/other")
