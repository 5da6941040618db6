"""What someone does who uses pipelines for the first time: a wrong word loses, spoils and hides nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import pipeline, pipeline_run
from penstock.errors import OptionsError, PenstockError
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.pipelines.report import gather

HOUR = 3600 * 10**9
SCHEMA = "device string, celsius int"
GOOD = [b'{"device": "a", "celsius": 1}', b'{"device": "b"}', b"{}", b'{"celsius": null, "more": 1}']
BAD = [
    b"", b" ", b"null", b"true", b"42", b'"text"', b"[]", b'[{"device": "x"}]', b'{"device": "t", "cel', b"not json",
    b'{"celsius": 99999999999}', b'{"celsius": 1e999}', b'{"celsius": "warm"}', b'{"celsius": {"deep": 1}}',
    b"\xff\xfe{}", b'{"device": "\xc3\x28"}', b'\xef\xbb\xbf{"device": "a mark"}',
]  # fmt: skip


def penstock(*words: object) -> list[dict[str, Any]]:
    """Run a command in this process; return the objects it printed."""
    app = typer.Typer()
    pipeline.register(app)
    pipeline_run.register(app)
    done = CliRunner().invoke(app, ["pipeline", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def readings(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readings") / "readings"
    with Writer.open(path) as writer:
        writer.append_many(GOOD + BAD, timestamp_ns=[n * HOUR for n in range(len(GOOD + BAD))])
    return path


@pytest.fixture(scope="module")
def typed(readings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = tmp_path_factory.mktemp("typed") / "typed"
    (summary,) = penstock("decode", readings, table, "--schema", SCHEMA, "--json")
    assert (summary["rows"], summary["bad"]) == (len(GOOD + BAD), len(BAD))
    return table


def test_every_payload_that_does_not_decode_is_kept_with_a_reason(spark: Any, typed: Path) -> None:
    errors = lake.read(spark, f"{typed}-errors").orderBy("position").collect()
    assert [bytes(row["payload"]) for row in errors] == BAD
    assert all(row["error"].startswith("the payload is not ") for row in errors)
    assert lake.read(spark, str(typed)).count() == len(GOOD)


def test_a_table_stays_readable_whatever_is_decoded_into_it(spark: Any, readings: Path, typed: Path) -> None:
    before = lake.read(spark, str(typed)).count()
    with pytest.raises(OptionsError, match=r"typed: the column celsius is int, not string: give another table"):
        penstock("decode", readings, typed, "--schema", "celsius string", "--checkpoint", typed.parent / "second")
    with pytest.raises(OptionsError, match=r"typed: column Device is called device there"):
        penstock("decode", readings, typed, "--schema", "Device string", "--checkpoint", typed.parent / "second")
    assert lake.read(spark, str(typed)).count() == before
    more = SCHEMA + ", more int"  # a column that comes later is null where it was not there
    penstock("decode", readings, typed, "--schema", more, "--checkpoint", typed.parent / "third")
    assert sorted((row["more"] or 0) for row in lake.read(spark, str(typed)).collect()) == [0] * 7 + [1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("decode {readings} {new} --schema 'device strng'", "schema='device strng': .*STRNG"),
        ("decode {readings} {new} --schema ''", "it has no field"),
        ("decode {readings} {new} --schema 'a int, a int'", "a is there twice"),
        ("decode {readings} {new} --schema 'error string'", "error is what says why"),
        ("decode {readings} {new} --schema 'a int, A int'", "a is there twice"),  # to Spark they are one
        ("decode {readings} {new} --schema 'Channel string'", "there is a column channel already"),
        ("decode {readings} {new} --schema 'a int' --rescue A", "a and A would be one column"),
        ("decode {readings} {new} --content text --option maxRecordPerTrigger=5", "is it maxRecordsPerTrigger"),
        ("ingest {readings} {new} --node edge-7", "node='edge-7' is for a table that is partitioned by node"),
        ("ingest {readings} {new} --option app=x", "option app is not known"),
        ("ingest {readings} {new} --option table=fold", "option table is not for a stream"),
        ("decode {readings} {new} --content text --schema 'a int'", "only JSON has one"),
        ("decode {readings} {new} --errors {new} --content text", "must be three places"),
        ("decode {typed} {typed} --content text", "must be three places"),
        ("decode {typed} {new} --content text --every 1", "once for each run"),
        ("ingest {typed} {new}", "this is a table of the lake, not channels"),
        ("aggregate {typed} {new} --watermark '1 hour'", "this is a table of the lake, not channels"),
        ("run own:same {typed} {new} --stream", "this is a table of the lake, not channels"),
        ("run own:same {typed} --option kinds=1", "a table of the lake has no option kinds"),
        ("audit {typed}", "this is a table of the lake, not channels"),
        ("audit {empty}", "there are no channels here"),
        ("aggregate {readings} {typed}", "a stream adds to this table"),
        ("run own:same {readings} {typed}", "a stream adds to this table"),
        ("ingest {readings} {readings}", "the table must be elsewhere"),
        ("replay {readings} {new} --app a --where 'nothing ='", "--where 'nothing =': .*Syntax error"),
        ("replay {readings} {new} --app a --where 'nothing = 1'", "--where 'nothing = 1': .*cannot be resolved"),
        ("report {typed} {new} --check", "this is a table of the lake"),
        ("report {readings} {new} --table {empty}", "there is no table here"),
        ("report {readings} {empty}", "this is a folder, not a page"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    readings: Path, typed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    import shlex

    (tmp_path / "empty").mkdir()
    (tmp_path / "own.py").write_text("def same(frame): return frame\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    paths = {"readings": readings, "typed": typed, "empty": tmp_path / "empty", "new": tmp_path / "new"}
    with pytest.raises(OptionsError, match=says):
        penstock(*shlex.split(words.format(**paths)))
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_one_line(readings: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PenstockError, match=r"^Parent path is not a directory: file:[^\n]*/file$"):
        penstock("ingest", readings, tmp_path / "file")


def test_a_channel_without_a_record_is_a_table_without_a_row(spark: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "quiet"):
        pass
    assert penstock("aggregate", tmp_path / "quiet", "--json") == []
    assert penstock("report", tmp_path / "quiet", tmp_path / "page.html", "--json")[0]["records"] == 0
    assert penstock("aggregate", tmp_path / "quiet", tmp_path / "t", "--json")[0]["rows"] == 0
    assert penstock("audit", tmp_path / "quiet", "--json")[0]["ok"] is True


def test_times_are_utc_wherever_the_machine_is(readings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        found = penstock("aggregate", readings, "--by", "", "--json")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [row["window_start"] for row in found[:2]] == ["1970-01-01T00:00:00.000000Z", "1970-01-01T01:00:00.000000Z"]
    assert [row["records"] for row in found] == [1] * len(GOOD + BAD)


def test_a_thousand_records_at_once_are_no_billion_a_second(spark: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "burst") as writer:
        writer.append_many([b"x"] * 1000, timestamp_ns=[HOUR] * 1000)
    found = gather(spark.read.format("penstock").load(str(tmp_path / "burst")))
    assert (found.slot_seconds, found.channels[0].slot_records) == (1.0, [1000])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_spark_and_java_and_the_next_run_goes_on(
    spark: Any, tmp_path: Path, number: int, code: int
) -> None:
    """SIGTERM comes while Java starts, SIGINT when the first records are in the lake; the next run has the rest.

    The folder for temporary files has a name too long for a socket in it, which is nothing to fail for either.
    """
    room = tmp_path / "a-folder-for-temporary-files"
    room.mkdir()
    with Writer.open(tmp_path / "in") as writer:
        writer.append_many([b"x"] * 100)
    words = ["ingest", str(tmp_path / "in"), str(tmp_path / "t"), "--every", "1", "--memory", "1g"]
    words += ["--ui"] if number == signal.SIGINT else []
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "pipeline", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(room)},
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    begun = tmp_path / "t" / "_delta_log" / f"{0:020d}.json"
    while not (children.read_text() if number == signal.SIGTERM else begun.exists()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    started = children.read_text().split()
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    said = rb"ended by SIGTERM; what was done is done, and the next run goes on\n"
    if number == signal.SIGINT:  # nothing is said of that, only where Spark's pages were
        said = rb"Spark's pages: http://127\.0\.0\.1:\d+\n"
    assert (process.returncode, out) == (code, b"")
    assert re.fullmatch(said, err), err
    assert started
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)
    assert not list(room.iterdir())
    if number == signal.SIGINT:
        assert penstock("ingest", *words[1:3], "--json")[0]["rows"] in (0, 100)
        assert penstock("audit", *words[1:3], "--json")[1]["in_table"] == 100
