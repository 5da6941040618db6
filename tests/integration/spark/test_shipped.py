"""A fleet on an object store, a lake on the object store, and Spark between them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from ship_use import fill, open_writer
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.disk import object_store_for
from penstock.errors import ConflictError, OptionsError, ReplacedError
from penstock.ship import Shipper
from penstock.spark import lake
from penstock.spark.lake import committed, compaction
from penstock.spark.objects import storage_options
from penstock.spark.pipelines.compact import compact
from penstock.spark.pipelines.loop import SpanCheck, audit_loop
from penstock.testing.s3 import S3Server

NODES = ("edge-1", "edge-2", "edge-3")


@pytest.fixture
def place(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/{tmp_path.name}"


def grow(folder: Path, place: str, start: int, count: int, nodes: tuple[str, ...] = NODES) -> None:
    for node in nodes:
        (folder / node).mkdir(exist_ok=True)
        with open_writer("xchannel", folder / node / "ticks") as writer:
            fill("xchannel", writer, start, count)
        with Shipper(folder / node / "ticks", object_store_for(f"{place}/fleet/{node}"), node=node) as shipper:
            while shipper.step():
                pass


def counted(frame: Any) -> Counter[tuple[str, bytes]]:
    rows = frame.select("node", "channel", "payload").collect()
    assert {row["channel"] for row in rows} <= {"ticks"}
    return Counter((row["node"], bytes(row["payload"])) for row in rows)


def once(count: int, nodes: tuple[str, ...] = NODES) -> Counter[tuple[str, bytes]]:
    return Counter((node, b"record %06d" % number) for node in nodes for number in range(count))


def test_a_fleet_goes_into_a_lake_on_the_object_store_without_a_checkpoint(
    spark: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, table = f"{place}/fleet/*/ticks", f"{place}/lake/raw"
    grow(tmp_path, place, 0, 50)
    frame = spark.read.format("penstock").load(fleet)
    assert counted(frame) == once(50)
    assert counted(frame.where("node = 'edge-2'")) == once(50, ("edge-2",))
    first = lake.ingest_committed(spark, fleet, table)
    assert (first.commits, first.records) == (1, 150)
    assert lake.ingest_committed(spark, fleet, table).commits == 0
    grow(tmp_path, place, 50, 50)
    # A driver dies before its commit, and another one is faster: neither loses nor repeats a record.
    monkeypatch.setattr(committed, "commit_files", _die)
    with pytest.raises(KeyboardInterrupt):
        lake.ingest_committed(spark, fleet, table)
    real, raced = lake.commit_files, []

    def late(*args: Any, **options: Any) -> bool:
        monkeypatch.setattr(committed, "commit_files", real)
        raced.append(lake.ingest_committed(spark, fleet, table).records)
        return real(*args, **options)

    monkeypatch.setattr(committed, "commit_files", late)
    assert lake.ingest_committed(spark, fleet, table).records == 0
    assert raced == [150]
    assert counted(lake.read(spark, table)) == once(100)
    assert counted(lake.read_added(spark, table, 0, 1)) == once(100) - once(50)
    # What else writes to a table works there too.
    lake.replace(lake.read(spark, table).groupBy("node").count(), f"{place}/lake/counts")
    rows = lake.read(spark, f"{place}/lake/counts").collect()
    assert {row["node"]: row["count"] for row in rows} == dict.fromkeys(NODES, 100)
    with pytest.raises(OptionsError, match="filled in another way"):
        lake.ingest_committed(spark, fleet, f"{place}/lake/counts")


def test_the_loop_from_edge_to_lake_is_audited_and_the_first_position_that_differs_is_named(
    spark: Any, place: str, tmp_path: Path
) -> None:
    fleet, table, nodes = f"{place}/fleet", f"{place}/lake/audited", NODES[:2]
    for start in (0, 20):
        grow(tmp_path, place, start, 20, nodes)
    done = CliRunner().invoke(app, ["pipeline", "ingest", fleet, table, "--json"])
    assert json.loads(done.stdout)["rows"] == 80, done.output
    grow(tmp_path, place, 40, 20, ("edge-1",))  # shipped, not in the table yet
    with open_writer("xchannel", tmp_path / "edge-1" / "ticks") as writer:
        writer.append_many([b"not shipped"] * 3)
    done = CliRunner().invoke(app, ["pipeline", "audit", fleet, table, "--edge", str(tmp_path / "edge-1"), "--json"])
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    checks = [SpanCheck(**{name: row[name] for name in SpanCheck.__struct_fields__}) for row in found if "stage" in row]
    assert len([row for row in found if row["check"] == "log"]) == 2
    logs = {(log.stage, log.node): log for log in checks}
    assert {key: (log.before, log.after, log.behind) for key, log in logs.items()} == {
        ("edge→shipped", "edge-1"): (63, 60, 3),
        ("shipped→lake", "edge-1"): (60, 40, 20),
        ("shipped→lake", "edge-2"): (40, 40, 0),
    }
    # One record of the lake goes, one comes twice, and one changes: each in a span of its own.
    rows = lake.read(spark, table).where("node = 'edge-2'").orderBy("position").collect()
    gone, twice, other = rows[7], rows[25], rows[33]
    opened = lake.open_table(table)
    assert opened is not None
    for row in (gone, other):
        opened.delete(f"node = 'edge-2' and position = {row['position']}")
    frame = lake.read(spark, table)
    more = spark.createDataFrame([twice, other], frame.schema).selectExpr(
        *(f"if(position = {other['position']}, binary('x'), {name}) {name}" if name == "payload" else name
          for name in frame.columns)
    )  # fmt: skip
    lake.append(more, table, app="fault", batch=0)
    first, second = (check for check in audit_loop(spark, fleet, table=table) if not check.ok)
    assert (first.node, first.missing, first.differs_at) == ("edge-2", 1, gone["position"])
    assert (second.changed, second.repeated, second.differs_at) == (1, 1, twice["position"])
    assert first.next == second.first  # segments of one log


def _die(*_: Any, **__: Any) -> bool:
    raise KeyboardInterrupt


def test_a_stream_follows_a_fleet_exactly_once_and_a_log_made_again_is_told(
    spark: Any, place: str, tmp_path: Path
) -> None:
    fleet, table, nodes = f"{place}/fleet", f"{place}/lake/streamed", NODES[:2]
    grow(tmp_path, place, 0, 20, nodes)
    for count in (20, 40):
        query = lake.ingest(spark, fleet, table, str(tmp_path / "checkpoint"))
        query.awaitTermination(120)
        assert query.exception() is None
        shown = str(query.recentProgress) + str(query.lastProgress)
        assert "edge-1/ticks" in shown
        assert "aws" not in shown.lower()
        assert counted(lake.read(spark, table)) == once(count, nodes)
        grow(tmp_path, place, count, 20, nodes)
    with pytest.raises(OptionsError, match="keeps its checkpoint on a file system"):
        lake.ingest(spark, fleet, table, f"{table}/_checkpoint")
    lake.ingest_committed(spark, fleet, f"{table}-2")
    store = object_store_for(f"{place}/fleet/edge-1")
    store.delete([info.key for info in store.objects()])
    for path in (tmp_path / "edge-1").iterdir():
        path.unlink()
    grow(tmp_path, place, 0, 5, ("edge-1",))
    with pytest.raises((ReplacedError, ConflictError)):
        lake.ingest_committed(spark, fleet, f"{table}-2")


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_table_on_an_object_store_is_compacted_once(
    place: str, monkeypatch: pytest.MonkeyPatch, overtaken: bool
) -> None:
    table = f"{place}/lake/small"
    told = storage_options(table)
    for number in range(6):
        write_deltalake(table, pa.table({"n": [number]}), mode="append", storage_options=told)
    join = compaction._join

    def meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(compaction, "_join", join)
        DeltaTable(table, storage_options=told).optimize.compact()
        return join(*given)

    if overtaken:
        monkeypatch.setattr(compaction, "_join", meanwhile)
    done = compact(table, vacuum_hours=0, vacuum_anyway=True)
    assert (done["files_before"], done["files_after"]) == (6, 1)
    assert done["removed"] >= 6
    found = DeltaTable(table, storage_options=told)
    assert sorted(found.to_pyarrow_table().column("n").to_pylist()) == list(range(6))
    below = object_store_for(table).objects()
    assert (
        len([info.key for info in below if info.key.endswith(".parquet")]) == 1
    )  # what was joined in vain is gone too
