"""Three nodes, one NATS, one S3 server, all real processes: exporters are killed between every pair of steps.

The pointer never goes back or dangles, and a node that joins replays the tail only.  The long form has 200 rounds.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact import transport_for
from penstock.disk import ObjectOptions
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.kv.nats.bucket import NatsKvStore
from penstock.testing.nats import NatsServer
from penstock.testing.s3 import S3Server

NODE = Path(__file__).parents[2] / "support" / "fleet_node.py"
KEYS = [f"k{number}" for number in range(12)]
EXPORTING = [
    "artifact.export.written", "artifact.export.staged", "artifact.export.named", "artifact.upload.before",
    "artifact.upload.payload", "artifact.pointer.seen", "artifact.upload.published", "artifact.round.completing",
    "artifact.round.acquiring", "artifact.round.exporting", "artifact.round.uploading",
]  # fmt: skip
BOOTSTRAPPING = [
    "artifact.download.pointer", "artifact.download.staged", "artifact.import.copied", "artifact.import.checked",
    "artifact.import.named", "artifact.bootstrap.imported", "artifact.bootstrap.aside", "artifact.bootstrap.named",
]  # fmt: skip
POINTS = [*EXPORTING, *BOOTSTRAPPING]


class Fleet:
    """The nodes of a folder, one process each for as long as it works, and what they have in common."""

    def __init__(self, folder: Path, nats: str, objects: str, environment: dict[str, str]) -> None:
        self.folder, self._common = folder, [nats, "routes", objects]
        self._environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.hits: Counter[str] = Counter()

    def run(self, name: str, *more: str, point: str = "") -> dict[str, Any] | None:
        """Let a node work once, and return what it says; None when it was killed at its point."""
        environment = self._environment | ({"PENSTOCK_FAIL_POINT": point} if point else {})
        command = [sys.executable, str(NODE), name, str(self.folder), *self._common, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode == -signal.SIGKILL:
            assert point
            self.hits[point] += 1
            return None
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def run_with_lease(self, name: str, point: str = "") -> dict[str, Any] | None:
        """Let a node work until it gets the lease: that of one which was killed has to run out first."""
        while (about := self.run(name, point=point)) is not None and about["outcome"] == "lost":
            pass
        return about

    def age(self, name: str, old: Path) -> None:
        """Put a store in place of a node's own, as a machine has that comes back after a long time."""
        for path in self.folder.glob(f"{name}.snap*"):
            path.unlink()
        shutil.copy(old, self.folder / f"{name}.snap")


async def values_of(bucket: NatsKvStore) -> dict[str, str]:
    return {entry.key: entry.value.decode() for entry in await bucket.reader.entries()}


async def check_newcomer(fleet: Fleet, bucket: NatsKvStore, name: str) -> None:
    """A node that joins is exactly where the bucket is, and only the tail behind the artifact was replayed."""
    assert fleet.run_with_lease("node0") is not None
    for number in range(7):
        await bucket.writer.put("tail", b"%d" % number)
    newcomer = fleet.run(name, "--only-follow")
    assert newcomer is not None
    assert newcomer["way"] == "artifact", newcomer["reason"]
    assert newcomer["entries"] == await values_of(bucket)
    info = await bucket._api.info()
    assert newcomer["cursor"] == info.state.last_seq
    # With a history of 1 what was overwritten behind the artifact is not delivered; never anything before it.
    assert 1 <= newcomer["delivered"] <= info.state.last_seq - newcomer["from"]


async def test_no_kill_of_an_exporter_loses_the_published_artifact(
    s3: S3Server, tmp_path: Path, long_run: bool
) -> None:
    rounds = 200 if long_run else 5
    chance = random.Random(18)
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    transport = transport_for(url, ObjectOptions(config=s3.options()))
    old = tmp_path / "old"
    with NatsServer(str(tmp_path)) as nats:
        fleet = Fleet(tmp_path, nats.url, url, s3.environment)
        async with NatsConnection(NatsOptions(url=nats.url)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name="routes", max_bytes=-1))
            rank = -1
            points = itertools.cycle(POINTS if long_run else EXPORTING[3:7])
            for number in range(rounds):
                for _ in range(chance.randrange(1, 20)):
                    key = chance.choice(KEYS)
                    if chance.random() < 0.2:
                        await bucket.writer.delete(key)
                    else:
                        await bucket.writer.put(key, b"%d" % number)
                node, point = f"node{number % 3}", next(points) if number % 2 else ""
                if point in BOOTSTRAPPING:  # only a node that has fallen behind what is kept takes an artifact
                    for key in (*KEYS, "tail"):
                        await bucket.writer.put(key, b"%d again" % number)
                    assert fleet.run_with_lease(f"node{(number + 1) % 3}") is not None
                    fleet.age(node, old)
                about = fleet.run_with_lease(node, point) if point else fleet.run(node)
                if about is not None:
                    assert about["entries"] == await values_of(bucket), number
                    if not old.exists():
                        shutil.copy(tmp_path / f"{node}.snap", old)
                try:
                    published = transport.manifest("fold")
                except FileNotFoundError:
                    assert rank == -1
                    continue
                assert published.rank >= rank, "the pointer went back"
                rank = published.rank
                target = tmp_path / f"check{number}"
                assert transport.download("fold", target).rank == rank  # it never dangles
                shutil.rmtree(target)
                if number % 10 == 9:
                    await check_newcomer(fleet, bucket, f"fourth{number}")
            assert set(fleet.hits) == set(POINTS if long_run else EXPORTING[3:5]), fleet.hits
            await check_newcomer(fleet, bucket, "fourth")


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
