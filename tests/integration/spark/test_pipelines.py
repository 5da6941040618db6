"""Pipelines, as functions and from the command line, on one real Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import pipeline
from penstock.errors import OptionsError, PenstockError
from penstock.log.detect import open_log
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.pipelines.run import Progress
from penstock.testing.log_conformance import contents

HOUR = 3600 * 10**9


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels")
    with Writer.open(folder / "readings") as writer:
        writer.append_many(
            [b'{"device": "d%d", "celsius": %d}' % (n % 3, n) for n in range(600)],
            kind=1,
            timestamp_ns=[n * HOUR // 100 for n in range(600)],
        )
        writer.append(b"not json", kind=2, timestamp_ns=0)
        writer.append(b'{"device": 7, "celsius": "warm"}', kind=2, timestamp_ns=2**63)
    return folder


@pytest.fixture(scope="module")
def table(spark: Any, channels: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("lake") / "raw")
    done = penstock("ingest", str(channels), path, "--json", "--max-records", "250")
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["batches"], summary["lost"]) == (602, 3, 0)
    return path


def penstock(*words: str, code: int = 0) -> Any:
    app = typer.Typer()
    pipeline.register(app)
    done = CliRunner().invoke(app, ["pipeline", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def rows(done: Any) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ingest_again_adds_nothing(channels: Path, table: str) -> None:
    assert json.loads(penstock("ingest", str(channels), table, "--json").stdout)["rows"] == 0


def test_audit_agrees_with_a_whole_table_and_finds_what_is_wrong(
    spark: Any, channels: Path, table: str, tmp_path: Path
) -> None:
    log, row = rows(penstock("audit", str(channels), table, "--json"))
    assert (log["check"], log["records"], log["gaps"], log["ok"]) == ("log", 602, 0, True)
    assert row == {
        "check": "table", "channel": "readings", "in_channel": 602, "in_table": 602, "missing": 0, "behind": 0,
        "repeated": 0, "changed": 0, "expired": 0, "unknown": 0, "ok": True,
    }  # fmt: skip
    whole = lake.read(spark, table).select("channel", "position")
    positions = sorted(row["position"] for row in whole.collect())
    broken = whole.where(f"position != {positions[5]} and position < {positions[500]}").union(whole.limit(2))
    broken = broken.union(spark.sql(f"select 'readings', {positions[3] + 1}L"))
    lake.append(broken, str(tmp_path / "broken"), app="test", batch=0)
    log, row = rows(penstock("audit", str(channels), str(tmp_path / "broken"), "--json", code=1))
    assert log["ok"]
    assert (row["missing"], row["behind"], row["repeated"], row["unknown"]) == (1, 102, 2, 1)
    assert row["ok"] is False


def test_decode_puts_every_record_into_one_of_two_tables(spark: Any, channels: Path, tmp_path: Path) -> None:
    typed, schema = str(tmp_path / "typed"), "device string, celsius double"
    for expected in (602, 0):
        done = penstock("decode", str(channels), typed, "--schema", schema, "--max-records", "400", "--json")
        assert json.loads(done.stdout)["rows"] == expected
    good = lake.read(spark, typed)
    assert good.count() == 600
    assert good.selectExpr("max(celsius)", "count(distinct device)").collect()[0][:] == (599.0, 3)
    bad = {bytes(row["payload"]): row["error"] for row in lake.read(spark, typed + "-errors").collect()}
    assert set(bad) == {b"not json", b'{"device": 7, "celsius": "warm"}'}
    with pytest.raises(OptionsError, match="--schema"):
        penstock("decode", str(channels), typed)


def test_aggregate_counts_the_same_from_channels_and_from_the_lake(
    spark: Any, channels: Path, table: str, tmp_path: Path
) -> None:
    found = rows(penstock("aggregate", str(channels), "--every", "1 hour", "--json"))
    assert found == rows(penstock("aggregate", table, "--every", "1 hour", "--json"))
    hours = [row for row in found if row["kind"] == 1]
    assert [row["records"] for row in hours] == [100] * 6
    assert hours[1]["window_start"].startswith("1970-01-01T01:00:00")
    assert [row["records"] for row in found if row["window_start"] is None] == [1]  # a time past 2262 has no window
    penstock("aggregate", table, str(tmp_path / "hourly"), "--every", "all", "--by", "channel")
    penstock("aggregate", table, str(tmp_path / "hourly"), "--every", "all", "--by", "channel")
    (total,) = lake.read(spark, str(tmp_path / "hourly")).collect()
    assert total["records"] == 602


def test_replay_puts_records_back_in_their_order_once(channels: Path, table: str, tmp_path: Path) -> None:
    for _ in range(2):
        penstock("replay", table, str(tmp_path / "again"), "--app", "again", "--where", "kind = 1")
    with open_log(str(tmp_path / "again")) as log, open_log(str(channels / "readings")) as original:
        assert contents(log) == contents(original)[:600]
        batch = log.read(log.first_position)
        assert batch.timestamps is not None
        assert int(batch.timestamps[5]) == 5 * HOUR // 100


def test_compact_leaves_the_same_rows_in_fewer_files(spark: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "numbers")
    for batch in range(4):
        lake.append(spark.range(batch * 10, batch * 10 + 10, 1, 1), table, app="test", batch=batch)
    (tmp_path / "numbers" / "part-left-behind.parquet").touch()
    offset = tmp_path / "numbers" / "_checkpoint" / "offsets" / "0"
    offset.parent.mkdir(parents=True)
    offset.touch()
    done = json.loads(penstock("compact", table, "--json", "--vacuum-hours", "0", "--vacuum-anyway").stdout)
    assert (done["files_before"], done["files_after"]) == (4, 1)
    assert done["removed"] >= 4
    assert sorted(row["id"] for row in lake.read(spark, table).collect()) == list(range(40))
    assert not (tmp_path / "numbers" / "part-left-behind.parquet").exists()
    assert offset.exists()  # the checkpoint of a query lies beside its table


def test_a_whole_export_is_one_batch(spark: Any, channels: Path, tmp_path: Path) -> None:
    table = str(tmp_path / "raw")
    assert lake.ingest_once(spark, str(channels), table, app="once", batch=0) == 602
    assert lake.ingest_once(spark, str(channels), table, app="once", batch=0) == 0
    assert lake.read(spark, table).count() == 602


def test_report_has_one_row_a_channel(channels: Path) -> None:
    (row,) = rows(penstock("report", str(channels), "--json"))
    assert (row["channel"], row["records"], row["kinds"]) == ("readings", 602, 2)
    assert row["first_time"].startswith("1970-01-01T00:00:00")


def test_a_failed_query_says_why_in_one_line(spark: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "in", region_bytes=4096, roll_bytes=8192, keep_files=2) as writer:
        writer.append_many([b"x" * 100] * 100)
        penstock("ingest", str(tmp_path / "in"), str(tmp_path / "t"))
        for _ in range(5):
            writer.append_many([b"x" * 100] * 100)
    with pytest.raises(PenstockError, match=r"ExpiredError: .* has expired, the log begins at"):
        penstock("ingest", str(tmp_path / "in"), str(tmp_path / "t"))
    done = json.loads(
        penstock("ingest", str(tmp_path / "in"), str(tmp_path / "t"), "--allow-data-loss", "--json").stdout
    )
    assert (done["lost"], done["lost_bytes"] > 0) == (0, True)


def test_progress_is_positions_done_of_positions_there_are() -> None:
    event = {
        "sources": [
            {
                "startOffset": {"channels": {"a": {"id": "", "at": 100}}},
                "endOffset": {"channels": {"a": {"id": "", "at": 150}, "b": {"id": "", "at": 90, "from": 80}}},
                "latestOffset": {"channels": {"a": {"id": "", "at": 300}, "b": {"id": "", "at": 90}}},
            }
        ]
    }
    assert Progress.of(event) == Progress(60, 210)
