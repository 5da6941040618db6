"""Three nodes, one NATS, one S3 server, all real processes: exporters are killed between every pair of steps.

The pointer never goes back or dangles, and a node that joins replays the tail only.  The long form has 200 rounds.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact import transport_for
from penstock.disk import ObjectOptions
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.testing.nats import NatsServer
from penstock.testing.s3 import S3Server

NODE = Path(__file__).parents[2] / "support" / "fleet_node.py"
POINTS = [
    "artifact.export.written", "artifact.export.staged", "artifact.export.named", "artifact.upload.before",
    "artifact.upload.payload", "artifact.pointer.seen", "artifact.upload.published", "artifact.round.completing",
    "artifact.bootstrap.imported", "artifact.bootstrap.aside", "artifact.bootstrap.named",
]  # fmt: skip


async def test_no_kill_of_an_exporter_loses_the_published_artifact(
    s3: S3Server, tmp_path: Path, long_run: bool
) -> None:
    rounds = 200 if long_run else 5
    chance = random.Random(18)
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    transport = transport_for(url, ObjectOptions(config=s3.options()))
    with NatsServer(str(tmp_path)) as nats:
        async with NatsConnection(NatsOptions(url=nats.url)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name="routes", max_bytes=-1))
            revision, rank, killed = 0, -1, 0
            points = itertools.cycle(POINTS if long_run else POINTS[3:7])

            def run(name: str, *more: str, point: str = "") -> dict[str, Any] | None:
                environment = {**os.environ, **s3.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
                if point:
                    environment["PENSTOCK_FAIL_POINT"] = point
                command = [sys.executable, str(NODE), name, str(tmp_path), nats.url, "routes", url, *more]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=240, check=False
                )
                if done.returncode == -signal.SIGKILL:
                    return None
                assert done.returncode == 0, done.stderr
                return json.loads(done.stdout)  # type: ignore[no-any-return]

            for number in range(rounds):
                for _ in range(chance.randrange(1, 20)):
                    key = f"k{chance.randrange(12)}"
                    if chance.random() < 0.2:
                        await bucket.writer.delete(key)
                        revision += 1
                    else:
                        revision = (await bucket.writer.put(key, b"%d" % revision)).as_int() or 0
                point = next(points) if number % 2 else ""
                about = run(f"node{number % 3}", point=point)
                while point and about is not None and about["outcome"] == "lost":
                    about = run(f"node{number % 3}", point=point)  # the lease of the one before has not run out yet
                killed += about is None
                try:
                    published = transport.manifest("fold")
                except FileNotFoundError:
                    assert rank == -1
                    continue
                assert published.rank >= rank, "the pointer went back"
                rank = published.rank
                target = tmp_path / f"check{number}"
                assert transport.download("fold", target).rank == rank  # it never dangles
            assert killed >= (1 if long_run else rounds // 2)
            while (about := run("node0")) is not None and about["outcome"] == "lost":
                pass  # the lease of one that was killed has not run out yet
            for number in range(7):
                await bucket.writer.put("tail", b"%d" % number)
            newcomer = run("fourth", "--only-follow")
            assert newcomer is not None
            assert newcomer["way"] == "artifact", newcomer["reason"]
            entries = {entry.key: entry.value.decode() for entry in await bucket.reader.entries()}
            assert newcomer["entries"] == entries
            info = await bucket._api.info()
            assert newcomer["cursor"] == info.state.last_seq
            # With a history of 1 what was overwritten behind the artifact is not delivered; never anything before it.
            assert 1 <= newcomer["delivered"] <= info.state.last_seq - newcomer["from"]


async def test_an_artifact_older_than_the_bucket_keeps_is_said(s3: S3Server, tmp_path: Path) -> None:
    from penstock.artifact import bootstrap, bucket_window, export_store
    from penstock.store import AppendLogStore
    from penstock.types import KvUpdate, WatchCursor

    transport = transport_for(f"s3://{s3.bucket}/{uuid.uuid4().hex}", ObjectOptions(config=s3.options()))
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
        export_store(store, tmp_path / "artifact")
    transport.upload(tmp_path / "artifact", "fold")
    with NatsServer(str(tmp_path)) as nats:
        async with NatsConnection(NatsOptions(url=nats.url)) as connection:
            bucket = await connection.store("routes")
            for number in range(10):
                await bucket.writer.put("a", b"%d" % number)
            await bucket._api.call(f"STREAM.PURGE.{bucket._api.stream}", {"seq": 8})
            report = await bootstrap(tmp_path / "new.snap", bucket_window(bucket.watcher), transport, "fold")
    assert report.way == "relist"
    assert "older than what is kept" in report.reason


@pytest.mark.parametrize("size", [1, 9 << 20])
def test_an_artifact_goes_over_a_real_store_in_one_piece_or_in_parts(size: int, s3: S3Server, tmp_path: Path) -> None:
    from penstock.artifact import export_store, import_artifact
    from penstock.store import AppendLogStore
    from penstock.types import KvUpdate, WatchCursor

    transport = transport_for(f"s3://{s3.bucket}/{uuid.uuid4().hex}", ObjectOptions(config=s3.options()))
    values = [os.urandom(min(size, 1 << 20)) for _ in range(max(1, size >> 20))]
    for revision in (3, 7):
        with AppendLogStore.open(tmp_path / f"fold{revision}.snap") as store:
            updates = [KvUpdate.put(f"k{n}", value, n + 1) for n, value in enumerate(values)]
            store.apply(updates, WatchCursor.of(revision))
            export_store(store, tmp_path / f"artifact{revision}")
    assert transport.upload(tmp_path / "artifact7", "fold").result == "published"
    assert transport.upload(tmp_path / "artifact3", "fold").result == "superseded"
    assert transport.download("fold", tmp_path / "copy").rank == 7
    import_artifact(tmp_path / "copy", tmp_path / "copy.snap")
    assert len(transport.prune("fold", 0)) == 1
