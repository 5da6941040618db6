"""Folds and channel data directories as tables, without a JVM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import LongType, StringType, StructField, StructType
from typer.testing import CliRunner

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, PersistedChannel, StoredConfig
from penstock.channels.store import FileChannelStore
from penstock.cli.main import app
from penstock.errors import OptionsError
from penstock.log.detect import open_writer
from penstock.spark.source.columns import BASE
from penstock.spark.source.table import PenstockSource
from penstock.spark.source.tables import TABLES, schema_of
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

BACKENDS: dict[str, Any] = {"append-log": AppendLogStore, "rocksdb": RocksStore, "lmdb": LmdbStore}


def rows(path: Path | str | list[str], **options: str) -> list[dict[str, Any]]:
    where = {"paths": json.dumps(path)} if isinstance(path, list) else {"path": str(path)}
    source = PenstockSource({**where, **options})
    schema = source.schema()
    assert isinstance(schema, StructType)
    reader = cloudpickle.loads(cloudpickle.dumps(source.reader(schema)))
    parts = cloudpickle.loads(cloudpickle.dumps(reader.partitions()))
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def make(backend: str, path: Path, entries: int = 20_000) -> None:
    with BACKENDS[backend].open(path) as store:
        updates = [KvUpdate.put(f"device/{number:06}", b"%d" % number, number + 1) for number in range(entries)]
        store.apply(updates, WatchCursor.of(entries))
        store.apply(
            [
                KvUpdate.delete("device/000003", entries + 1),
                KvUpdate(Op.PUT, "ünïcode", b"\xff\x00", VersionToken(b"abc")),
                KvUpdate.put("no version", b""),
            ],
            WatchCursor.of(entries + 2),
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.mdb"  # LMDB's table of readers
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fold_of_any_backend_is_a_table(tmp_path: Path, backend: str) -> None:
    make(backend, tmp_path / "latest")
    before = contents(tmp_path)
    found = rows(tmp_path / "latest")
    assert contents(tmp_path) == before
    dumped = CliRunner().invoke(app, ["fold", "dump", str(tmp_path / "latest"), "--json"]).stdout.splitlines()
    assert len(found) == len(dumped) == 20_001
    assert [row["key"] for row in found] == [json.loads(line)["key"] for line in dumped]
    by_key = {row["key"]: row for row in found}
    assert by_key["device/000007"] == {
        "fold": "latest", "key": "device/000007", "value": b"7", "version": (8).to_bytes(8, "big"), "revision": 8,
    }  # fmt: skip
    assert by_key["ünïcode"]["revision"] is None
    assert by_key["ünïcode"]["version"] == b"abc"
    assert by_key["no version"]["version"] == b""
    assert "device/000003" not in by_key


def test_a_prefix_and_a_size_of_batches_are_kept(tmp_path: Path) -> None:
    make("append-log", tmp_path / "latest", 1000)
    assert len(rows(tmp_path / "latest", keyPrefix="device/0000")) == 99
    source = PenstockSource({"path": str(tmp_path / "latest"), "batchBytes": "100"})
    reader = source.reader(StructType([StructField("key", StringType())]))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert len(batches) > 20
    assert sum(map(len, batches)) == 1001
    assert batches[0].schema == pa.schema([("key", pa.string())])


def test_all_folds_below_a_folder_are_one_table_and_logs_are_not_in_it(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    make("append-log", tmp_path / "site" / "a.snap", 10)
    make("rocksdb", tmp_path / "site" / "b", 10)
    make("lmdb", tmp_path / "c", 10)
    open_writer(str(tmp_path / "ticks")).close()
    found = rows(tmp_path, table="fold")
    assert {row["fold"] for row in found} == {"c", "site/a.snap", "site/b"}
    assert len(found) == 3 * 11
    assert {row["fold"] for row in rows([str(tmp_path / "c"), str(tmp_path / "site" / "b")])} == {"b", "c"}


def test_a_fold_is_read_at_its_cursor_and_not_in_the_middle_of_an_apply(tmp_path: Path) -> None:
    path = tmp_path / "latest.snap"
    with AppendLogStore.open(path) as store:
        for number in (1, 2):
            store.apply([KvUpdate.put(key, b"%d" % number, number) for key in "abc"], WatchCursor.of(number))
            if number == 1:
                whole = path.stat().st_size
    written = path.read_bytes()
    for size in range(whole, len(written)):  # as a reader may find the file while the second apply is written
        path.write_bytes(written[:size])
        assert {row["value"] for row in rows(path)} == {b"1"}
    path.write_bytes(written)
    assert {row["value"] for row in rows(path)} == {b"2"}


def test_a_pipe_and_a_folder_that_only_looks_like_a_sidecar_do_not_hide_folds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "penstock-data").mkdir()
    make("append-log", tmp_path / "penstock-data" / "latest.snap", 5)
    assert {row["fold"] for row in rows(tmp_path, table="fold")} == {"penstock-data/latest.snap"}


def test_logs_and_folds_do_not_mix_and_folds_do_not_stream(tmp_path: Path) -> None:
    make("append-log", tmp_path / "a.snap", 10)
    open_writer(str(tmp_path / "ticks")).close()
    with pytest.raises(OptionsError, match=r"a.snap is a fold, the other paths are not"):
        PenstockSource({"paths": json.dumps([str(tmp_path / "ticks"), str(tmp_path / "a.snap")])}).schema()
    with pytest.raises(OptionsError, match="read in batch"):
        PenstockSource({"path": str(tmp_path / "a.snap")}).streamReader(schema_of("fold"))
    with pytest.raises(OptionsError, match="must be one of fold, channels"):
        PenstockSource({"path": str(tmp_path), "table": "topics"}).schema()
    with pytest.raises(OptionsError, match="there is nothing here"):
        PenstockSource({"path": str(tmp_path / "none"), "table": "fold"}).reader(schema_of("fold")).partitions()


def test_a_schema_of_other_columns_is_refused(tmp_path: Path) -> None:
    make("append-log", tmp_path / "a.snap", 10)
    for field in (StructField("key", LongType()), StructField("payload", StringType())):
        with pytest.raises(OptionsError, match="the columns here are fold string, key string"):
            PenstockSource({"path": str(tmp_path / "a.snap")}).reader(StructType([field]))


def test_the_metadata_of_channels_is_what_the_command_line_prints(tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    ann = Nid.parse("ann@localhost")
    acl = ChannelAcl().replace("join", Allow().add([ann, Nid.parse("bob@localhost")]))
    store.save(
        PersistedChannel(
            "ops/east", ann, StoredConfig(max_clients=5, persist=True), acl, (ann,), channel_type=ChannelType.FIFO
        )
    )
    store.save(PersistedChannel("plain"))
    found = rows(tmp_path, table="channels")
    printed = CliRunner().invoke(app, ["channels", "ls", str(tmp_path), "--json"]).stdout.splitlines()
    expected = [json.loads(line) for line in printed]
    assert len(found) == 2
    for row in found:
        assert row.pop("error") is None
        assert os.path.isdir(tmp_path / row.pop("channel"))
        for allowed in row["acl"]:
            row["acl"][allowed] = dict(row["acl"][allowed])
    assert sorted(found, key=lambda row: row["handler"]) == expected


def test_a_channel_that_cannot_be_read_is_a_row_with_an_error(tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    good = store.save(PersistedChannel("good"))
    bad = store.save(PersistedChannel("bad"))
    (tmp_path / bad / "metadata.bin").write_bytes(b"\xff" * 7)
    found = {row["channel"]: row for row in rows(tmp_path, table="channels")}
    assert found[good]["handler"] == "good"
    assert bad in found[bad]["error"]
    assert found[bad]["handler"] is None
    with pytest.raises(OptionsError, match="no such data directory"):
        rows(tmp_path / "none", table="channels")


def test_a_tree_of_mixed_formats_is_one_dataframe(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for kind in ("xchannel", "filechannel", "messagelog"):
        writer = open_writer(str(tmp_path / "a" / kind), format=kind)
        writer.append_many([b"%s %d" % (kind.encode(), number) for number in range(100)])
        writer.close()
    make("rocksdb", tmp_path / "state", 10)
    make("append-log", tmp_path / "a" / "state.snap", 10)
    (tmp_path / "notes.txt").write_text("notes " * 100)
    source = PenstockSource({"path": str(tmp_path)})
    assert source.schema() == ", ".join([*(column.ddl for column in BASE), "`seq` bigint", "`from` binary"])
    reader = source.reader(StructType([StructField("channel", StringType())]))
    names = [row["channel"] for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(set(names)) == ["a/filechannel", "a/messagelog", "a/xchannel"]
    assert len(names) == 300


def test_every_kind_of_table_has_what_a_table_needs() -> None:
    for name in TABLES:
        assert isinstance(schema_of(name), StructType)
