"""Folds, channel metadata and keys from payloads in a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.channels.ids import Nid
from penstock.channels.model import Acl, Allow, PersistedChannel, StoredConfig
from penstock.channels.store import FileChannelStore
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.spark.decode import with_key
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, WatchCursor


def load(spark: Any, path: Path, **options: Any) -> Any:
    return spark.read.format("penstock").options(**options).load(str(path))


@pytest.mark.parametrize("backend", [AppendLogStore, RocksStore, LmdbStore])
def test_a_fold_is_a_dataframe(spark: Any, tmp_path: Path, backend: Any) -> None:
    with backend.open(tmp_path / "latest") as store:
        store.apply([KvUpdate.put(f"k{n}", b"%d" % n, n + 1) for n in range(1000)], WatchCursor.of(1000))
    frame = load(spark, tmp_path / "latest")
    assert frame.columns == ["fold", "key", "value", "version", "revision"]
    found = frame.selectExpr("count(*)", "sum(revision)", "sum(cast(cast(value as string) as long))", "min(key)")
    assert found.collect()[0] == (1000, 500_500, 499_500, "k0")


def test_channel_metadata_is_a_dataframe_that_joins_the_records(spark: Any, tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    ann = Nid.parse("ann@localhost")
    acl = Acl().replace("join", Allow().add([ann]))
    east = store.save(PersistedChannel("ops/east", ann, StoredConfig(max_clients=5, persist=True), acl, (ann,)))
    store.save(PersistedChannel("ops/west"))
    with MessageLog.open(tmp_path / east) as log:
        log.append_many([b"one", b"two"], sender="ann@localhost")
    channels = load(spark, tmp_path, table="channels")
    row = channels.where("handler = 'ops/east'").collect()[0]
    assert (row["owner"], row["config"]["max_clients"], row["config"]["persist"]) == ("ann@localhost", 5, True)
    assert row["acl"]["join"] == {"localhost": ["ann"]}
    assert row["members"] == ["ann@localhost"]
    assert channels.count() == 2
    joined = load(spark, tmp_path).join(channels, "channel").groupBy("handler").count()
    assert [tuple(found) for found in joined.collect()] == [("ops/east", 2)]


def test_a_key_comes_from_the_envelope_or_from_a_path_into_the_payload(spark: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "readings") as writer:
        writer.append_many([b'{"site": {"id": 7}}', b"not json", b'{"site": {}}', b"\xff", b'{"site": {"id": "x"}}'])
    with Writer.open(tmp_path / "state", content=CONTENT) as writer:
        writer.append(encode_envelope(Envelope(b"own", b'{"site": {"id": 9}}')))
    found = with_key(load(spark, tmp_path), "$.site.id").orderBy("channel", "position").select("key").collect()
    assert [None if row["key"] is None else bytes(row["key"]) for row in found] == [
        b"7",
        None,
        None,
        None,
        b"x",
        b"own",
    ]
    without = load(spark, tmp_path / "readings").select("payload")
    assert with_key(without, "$.site.id").where("key is not null").count() == 2
