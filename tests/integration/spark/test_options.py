"""What a data engineer expects of a source: bounds, patterns, progress, drift, and one clear line where it is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import pipeline, pipeline_run
from penstock.errors import OptionsError, PenstockError
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.pipelines.run import follow, load

SECOND = 10**9


def penstock(*words: object) -> list[dict[str, Any]]:
    """Run a command in this process; return the objects it printed."""
    app = typer.Typer()
    pipeline.register(app)
    pipeline_run.register(app)
    done = CliRunner().invoke(app, ["pipeline", *map(str, words), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("options")
    for name in ("lab/a", "site/a", "site/b"):
        (place / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        with Writer.open(place / "in" / name) as writer:
            times = [(n + 1) * SECOND for n in range(10)]
            more = b', "hum": 4, "where": {"x": 1}'
            texts = [b'{"n": %d%b}' % (n, more if n % 5 == 0 else b"") for n in range(10)]
            writer.append_many(texts, timestamp_ns=times)
    return place


def test_pipelines_take_the_options_of_the_source(spark: Any, folder: Path, tmp_path: Path) -> None:
    source = folder / "in"
    (done,) = penstock(
        "ingest", source, tmp_path / "raw", "--channels", "site/*", "--start", "1970-01-01T00:00:05Z",
        "--cursor", "lake", "--option", "maxBytesPerTrigger=40", "--partition-by", "channel", "--compact-every", "2",
    )  # fmt: skip
    assert (done["rows"], done["lost"], done["lost_bytes"]) == (12, 0, 0)
    assert done["batches"] > 2
    rows = lake.read(spark, str(tmp_path / "raw"))
    assert {(row[0], row[1]) for row in rows.groupBy("channel").count().collect()} == {("site/a", 6), ("site/b", 6)}
    with sidecar_of_path(source / "site" / "a") as sidecar:
        assert sidecar.read_cursor("lake") is not None
    (done,) = penstock(
        "decode", source, tmp_path / "typed", "--schema", "n int", "--rescue", "_more", "--start", "latest"
    )
    assert done["rows"] == 0
    (done,) = penstock(
        "decode", source, tmp_path / "typed2", "--schema", "n int", "--rescue", "_more", "--channels", "lab/a"
    )
    assert (done["rows"], done["drift"]) == (10, {"hum": 2, "where": 2})
    typed = lake.read(spark, str(tmp_path / "typed2")).where("_more is not null").select("n", "_more").orderBy("n")
    assert [(row[0], json.loads(row[1])) for row in typed.collect()] == [
        (n, {"hum": "4", "where": '{"x":1}'}) for n in (0, 5)
    ]


def test_pipelines_take_paths_and_bounds_as_the_caller_means_them(
    spark: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "in"
    penstock("ingest", source, tmp_path / "raw", "--channels", "site/*", "--partition-by", "channel")
    starts = json.dumps({"site/a": "latest", "site/b": "latest"})
    rows = penstock("aggregate", source, "--every", "all", "--by", "channel", "--start", starts)
    assert [(row["channel"], row["records"]) for row in rows] == [("lab/a", 10)]
    rows = penstock("run", "aggregate", source, "--channels", "lab/*", "--set", "every=1 minute")
    assert sum(row["records"] for row in rows) == 10
    monkeypatch.chdir(source)  # a path of the caller's
    assert {row["channel"] for row in penstock("report", ".")} == {"lab/a", "site/a", "site/b"}
    assert {row["channel"] for row in penstock("report", "*/a")} == {"lab/a", "site/a"}
    for wrong, reason in (
        (("--option", "maxRecordPerTrigger=5"), "is it maxRecordsPerTrigger"),
        (("--option", "cursor=x", "--cursor", "y"), "say the same"),
        (("--start", "soon"), "must be earliest, latest"),
        (("--channels", "site/c"), "channels names what is not there: site/c; there is lab/a, site/a, site/b"),
    ):
        with pytest.raises(OptionsError, match=reason):
            penstock("ingest", ".", tmp_path / "wrong", *wrong)
    (done,) = penstock("replay", tmp_path / "raw", tmp_path / "again", "--app", "x", "--where", "channel = 'site/b'")
    assert done["appended"] == 10
    assert penstock("replay", tmp_path / "raw", tmp_path / "again", "--app", "x")[0]["appended"] == 0
    where = "timestamp >= '1970-01-01T00:00:05Z' and channel >= 'site/b'"  # a text that Spark takes for a time
    (done,) = penstock("replay", tmp_path / "raw", tmp_path / "later", "--app", "x", "--where", where)
    assert done["appended"] == 6
    few = load(spark, str(tmp_path / "raw"), where="channel = 'site/b' and kind = 0")
    assert len(few.inputFiles()) < len(load(spark, str(tmp_path / "raw")).inputFiles())
    assert load(spark, str(tmp_path / "raw"), {"version": 0}).count() == 20


def sidecar_of_path(path: Path) -> Any:
    import contextlib

    from penstock.disk import PosixDisk

    return contextlib.closing(sidecar_of(PosixDisk(), str(path)))


def test_the_progress_of_a_query_says_what_was_lost_and_how_far_behind_it_is(spark: Any, tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", MessageLogOptions(segment_bytes=2000)) as log:
        for number in range(300):
            log.append(b"%06d" % number)
    damaged = sorted((tmp_path / "log").glob("*.log"))[1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    options = {"failOnDataLoss": "false", "maxRecordsPerTrigger": "120"}
    stream = spark.readStream.format("penstock").options(**options).load(str(tmp_path / "log"))
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    summary = follow(query)
    assert (summary.rows + summary.lost, summary.lost_bytes) == (300, 0)
    assert summary.lost > 0
    metrics = [json.loads(event.sources[0].latestOffset)["metrics"] for event in query.recentProgress if event.sources]
    assert metrics[0]["lag_records"] > 0
    assert metrics[0]["batch_records"] == 120
    assert (metrics[-1]["lag_records"], metrics[-1]["lost_records"], metrics[-1]["channels"]) == (0, summary.lost, 1)


def test_what_is_no_channel_or_not_for_spark_is_said_in_one_line(spark: Any, tmp_path: Path, folder: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(PenstockError) as failed:
        penstock("report", tmp_path / "a.parquet")
    assert "it is a Parquet file: read it with spark.read.parquet" in str(failed.value)
    assert "\n" not in str(failed.value)
    writer = spark.readStream.format("penstock").load(str(folder / "in")).writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(realTime="5 seconds")
    with pytest.raises(Exception, match="REAL_TIME_MODE"):  # Spark itself lets no Python source have it
        writer.start().awaitTermination(60)
