"""Pipelines that look at what is there: audits of logs and folds, the report as a page, windows as they close."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import pipeline
from penstock.errors import OptionsError, PenstockError, ReplacedError
from penstock.fold import follow
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.spark import lake
from penstock.spark.pipelines.audit import audit_fold
from penstock.spark.pipelines.compact import compact
from penstock.spark.pipelines.decode import decode_added
from penstock.spark.pipelines.report import write_report
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, Op, WatchCursor

SECOND = 10**9


def run(*words: str, code: int = 0) -> list[dict]:
    app = typer.Typer()
    pipeline.register(app)
    done = CliRunner().invoke(app, ["pipeline", *words])
    if isinstance(done.exception, PenstockError):
        raise done.exception
    assert done.exit_code == code, (done.output, done.exception)
    return [json.loads(line) for line in done.stdout.splitlines()] if "--json" in words else []


def test_an_audit_computes_the_fold_again_and_finds_a_store_that_differs(spark: Any, tmp_path: Path) -> None:
    path, snap = str(tmp_path / "log"), tmp_path / "one.snap"
    with Writer.open(path, content=CONTENT) as writer:
        for n in range(500):
            op = Op.DELETE if n % 7 == 0 else Op.PUT
            writer.append(encode_envelope(Envelope(b"k%d" % (n % 60), b"" if op else b"v%d" % n, op)))
        with open_log(path) as log, AppendLogStore.open(snap) as store:
            asyncio.run(follow(log, store, once=True))
        writer.append(encode_envelope(Envelope(b"k1", b"behind the cursor")))
    log_row, fold_row = run("audit", path, "--store", str(snap), "--json")
    assert (log_row["check"], log_row["records"], log_row["ok"]) == ("log", 501, True)
    assert (fold_row["check"], fold_row["ok"]) == ("fold", True)
    assert fold_row["entries"] == fold_row["recomputed_entries"] > 0
    with AppendLogStore.open(snap) as store:
        store.apply([KvUpdate.put("k2", b"another value", 1)], store.cursor())
    assert run("audit", path, "--store", str(snap), "--json", code=1)[1]["ok"] is False
    with AppendLogStore.open(tmp_path / "new.snap") as store:
        store.apply([], WatchCursor())
    with pytest.raises(OptionsError, match="no position of a log"):
        audit_fold(spark, path, str(tmp_path / "new.snap"))


def test_the_report_is_a_page_with_what_spark_counted(spark: Any, tmp_path: Path) -> None:
    folder, page = tmp_path / "in", tmp_path / "out" / "report.html"
    folder.mkdir()
    start = 1_700_000_000 * SECOND
    with Writer.open(folder / "ticks", content=CONTENT) as writer:
        times = [start + n * SECOND for n in range(600) if not 200 <= n < 300]
        writer.append_many(
            [
                encode_envelope(
                    Envelope(b"device/%d" % (n % 5 == 0), b"x" * (n % 50), event_time_ns=time - SECOND // 4)
                )
                for n, time in enumerate(times)
            ],
            kind=[n % 3 for n in range(500)],
            timestamp_ns=times,
        )
    with MessageLog.open(str(folder / "orders")) as log:
        log.append_many([b"order"] * 50, timestamp_ns=[start + n * SECOND for n in range(50)])
    with open_log(str(folder / "ticks")) as reader:
        from penstock.disk import PosixDisk
        from penstock.log.sidecar import sidecar_of

        positions = reader.read(reader.first_position).positions
        sidecar = sidecar_of(PosixDisk(), str(folder / "ticks"))
        sidecar.write_cursor("billing", int(positions[450]))
        sidecar.close()
    (said,) = run("report", str(folder), str(page), "--check", "--title", "Two <channels>", "--json")
    assert (said["channels"], said["records"]) == (2, 550)
    text = page.read_text()
    for shown in ("Two &lt;channels&gt;", "billing · ticks", "device/0", "orders", "Delay", "whole"):
        assert shown in text, shown
    found = write_report(spark, str(folder), str(page))
    orders, ticks = found.channels
    assert (orders.records, orders.bytes, ticks.records, ticks.kinds) == (50, 250, 500, 3)
    assert sum(ticks.slot_records) == ticks.records
    assert sum(ticks.sizes.values()) == ticks.records
    ((begin, end),) = ticks.silences
    assert (begin, end) == (1_700_000_199.0, 1_700_000_300.0)
    assert [(item.key, item.count) for item in found.keys] == [("device/0", 400), ("device/1", 100)]
    assert [(lag.who, lag.records, lag.seconds) for lag in found.lags] == [("billing", 50, 49.0)]
    assert found.delays[0] == (0.25, 0.25)
    Writer.precreate(str(folder / "silent"))
    found = write_report(spark, str(folder), str(page))
    assert [(part.name, part.records) for part in found.channels] == [("orders", 50), ("silent", 0), ("ticks", 500)]
    found = write_report(spark, str(folder), str(page), options={"channels": "orders"}, check=True)
    assert [part.name for part in found.channels] == ["orders"]
    assert [check["channel"] for check in found.checks] == ["orders"]
    assert found.lags == []  # of a channel that was left out nobody says that a reader has caught up


def test_windows_are_added_once_when_they_are_closed_and_late_records_are_noticed(spark: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "minutes")

    def count() -> dict:
        words = ("--every", "1 minute", "--by", "channel", "--watermark", "30 seconds", "--json")
        (said,) = run("aggregate", str(tmp_path / "in"), table, *words)
        return said

    def windows() -> list[tuple[int, int]]:
        rows = lake.read(spark, table).collect()
        return sorted((row["window_start"].minute, row["records"]) for row in rows)

    with Writer.open(tmp_path / "in") as writer:
        writer.append_many([b"x"] * 200, timestamp_ns=[(n + 1) * SECOND for n in range(200)])
        done = count()
        assert (done["rows"], done["read"]) == (2, 200)  # what was added to the table, not what waits in open windows
        first = windows()
        assert first == [(0, 59), (1, 60)]  # the third minute is not over for long enough
        writer.append_many([b"late", b"new"], timestamp_ns=[30 * SECOND, 600 * SECOND])
        writer.append(b"without a time", timestamp_ns=2**64 - 1)
        assert count()["late"] == 1  # both are of the first minute, and one task counts them as one
        assert windows()[:2] == first
        assert (2, 60) in windows()
        done = count()
        assert (done["rows"], done["read"]) == (0, 0)
        assert len(windows()) == len(set(windows()))
    with pytest.raises(OptionsError, match="needs a TABLE"):
        run("aggregate", str(tmp_path / "in"), "--watermark", "1 minute")


def test_the_lake_keeps_what_envelopes_say_and_takes_columns_that_come_later(spark: Any, tmp_path: Path) -> None:
    folder, table = tmp_path / "in", str(tmp_path / "lake")
    folder.mkdir()
    with Writer.open(folder / "raw") as writer:
        writer.append_many([b"1", b"2"])
    run("ingest", str(folder), table)
    assert "op" not in lake.read(spark, table).columns
    with Writer.open(folder / "keyed", content=CONTENT) as writer:
        writer.append(encode_envelope(Envelope(b"k", b"v")))
        writer.append(encode_envelope(Envelope(b"k", b"", Op.DELETE)))
    run("ingest", str(folder), table)
    rows = lake.read(spark, table).orderBy("channel", "position").collect()
    assert [(row["channel"], row["op"]) for row in rows] == [("keyed", 0), ("keyed", 1), ("raw", None), ("raw", None)]


def test_decode_goes_on_with_what_came_to_a_table(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, bronze, silver = tmp_path / "in", str(tmp_path / "bronze"), str(tmp_path / "silver")
    folder.mkdir()

    def decoded() -> int:
        (said,) = run("decode", bronze, silver, "--schema", "celsius int", "--json")
        return int(said["rows"])

    def counts() -> tuple[int, int]:
        return lake.read(spark, silver).count(), lake.read(spark, silver + "-errors").count()

    now = time.time_ns()
    with Writer.open(folder / "readings") as writer:
        for turn in range(2):
            writer.append_many([b'{"celsius": %d}' % n for n in range(10)] + [b"bad"], timestamp_ns=now)
            run("ingest", str(folder), bronze)
            assert decoded() == 11
            assert counts() == (10 * (turn + 1), turn + 1)
        run("compact", bronze, "--keep-days", "7")  # joins files: none of their rows is new
        assert decoded() == 0
        writer.append(b'{"celsius": 99}', timestamp_ns=now - 30 * 86400 * SECOND)
        run("ingest", str(folder), bronze)
        append = lake.append

        def dies_at_the_errors(frame: Any, table: str, **words: Any) -> bool:
            if table.endswith("-errors"):
                raise KeyboardInterrupt
            return append(frame, table, **words)

        with monkeypatch.context() as patch:
            patch.setattr(lake, "append", dies_at_the_errors)
            with pytest.raises(KeyboardInterrupt):
                decode_added(spark, bronze, silver, silver + "-errors", schema="celsius int")
        run("compact", bronze, "--keep-days", "7")  # deletes a row, and what is left of its file is not new
        assert decoded() == 1  # the row that the table of errors has not been asked about
        assert decoded() == 0
        assert counts() == (21, 2)
    lake.replace(spark.range(3), bronze)
    with pytest.raises(ReplacedError, match="were changed"):
        decoded()


def test_old_rows_leave_a_table(spark: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "t")
    frame = spark.sql(
        "select id, case when id = 9 then null when id < 5 then current_timestamp() - interval 10 days "
        "else current_timestamp() end timestamp from range(10)"
    )
    lake.append(frame, table, app="a", batch=0)
    (done,) = run("compact", table, "--keep-days", "7", "--json")
    assert done["deleted_rows"] == 5
    assert sorted(row["id"] for row in lake.read(spark, table).collect()) == [5, 6, 7, 8, 9]
    assert not lake.append(frame, table, app="a", batch=0)  # the table still knows its batches
    with pytest.raises(OptionsError, match="no column when"):
        compact(table, keep_days=1, time_column="when")


def test_the_time_of_the_event_stands_in_where_a_queue_keeps_none(spark: Any, tmp_path: Path) -> None:
    start = 1_700_000_000 * SECOND
    (tmp_path / "in").mkdir()
    with FileChannel.open(tmp_path / "in" / "east", ChannelOptions(content=CONTENT)) as channel:
        envelopes = [Envelope(b"a", b"x", event_time_ns=start + n * SECOND) for n in range(10)]
        channel.append_many([encode_envelope(envelope) for envelope in [*envelopes, Envelope(b"a", b"x")]])
    (east,) = write_report(spark, str(tmp_path / "in"), str(tmp_path / "report.html")).channels
    assert (east.first_time, east.last_time, east.timeless) == (1_700_000_000.0, 1_700_000_009.0, 1)
    assert sum(east.slot_records) == 10
