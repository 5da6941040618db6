"""The stream reader as a Python object: offsets are positions, and a batch follows from the two around it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructType

from penstock.disk import PosixDisk
from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.log.messagelog import MessageLog
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Writer
from penstock.spark.source import openlogs
from penstock.spark.source.plan import SourceChannel
from penstock.spark.source.stream import LogStreamReader
from penstock.spark.source.table import ExportSource, PenstockSource

SCHEMA = StructType().add("channel", StringType()).add("position", LongType()).add("payload", BinaryType())
ALL = ReadAllAvailable()


def stream(path: Path, **options: Any) -> LogStreamReader:
    reader = PenstockSource({"path": str(path), **{name: str(value) for name, value in options.items()}}).streamReader(
        SCHEMA
    )
    assert isinstance(reader, LogStreamReader)
    return reader


def rows(reader: LogStreamReader, start: Any, end: Any) -> list[tuple[str, bytes]]:
    start, end = json.loads(json.dumps(start)), json.loads(json.dumps(end))  # as Spark keeps them
    worker = cloudpickle.loads(cloudpickle.dumps(reader))
    found = []
    for task in cloudpickle.loads(cloudpickle.dumps(reader.partitions(start, end))):
        for batch in worker.read(task):
            found += [(row["channel"], row["payload"]) for row in batch.to_pylist()]
    return found


def fill(path: Path, count: int, first: int = 0, **options: Any) -> None:
    with Writer.open(path, region_bytes=4096, **options) as writer:
        writer.append_many([b"%06d" % number for number in range(first, first + count)])


def test_batches_follow_one_another_and_replay_alike(tmp_path: Path) -> None:
    fill(tmp_path / "a", 100)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ALL)
    first = rows(reader, start, middle)
    fill(tmp_path / "a", 50, 100)
    end = reader.latestOffset(middle, ALL)
    assert first == rows(reader, start, middle)  # also after the log has grown
    assert [payload for _, payload in first + rows(reader, middle, end)] == [b"%06d" % n for n in range(150)]
    assert reader.latestOffset(end, ALL) == end
    assert rows(reader, end, end) == []


def test_a_channel_that_appears_is_read_from_its_first_record_whatever_grows_meanwhile(tmp_path: Path) -> None:
    fill(tmp_path / "a", 3)
    reader = stream(tmp_path, start="latest")
    start = reader.initialOffset()
    (tmp_path / "deep").mkdir()
    fill(tmp_path / "deep" / "b", 4)
    end = reader.latestOffset(start, ALL)
    fill(tmp_path / "deep" / "b", 4, 4)
    assert rows(reader, start, end) == [("deep/b", b"%06d" % n) for n in range(4)]
    later = reader.latestOffset(end, ALL)
    assert rows(reader, end, later) == [("deep/b", b"%06d" % n) for n in range(4, 8)]


def test_limits_are_kept_and_shared_between_channels(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        fill(tmp_path / name, 100 if name != "b" else 5)
    reader = stream(tmp_path, maxRecordsPerTrigger=60)
    assert reader.getDefaultReadLimit() == ReadMaxRows(60)
    at, sizes = reader.initialOffset(), []
    seen: list[tuple[str, bytes]] = []
    while True:
        end = reader.latestOffset(at, reader.getDefaultReadLimit())
        if end == at:
            break
        found = rows(reader, at, end)
        sizes.append(len(found))
        assert {"a", "c"} <= {name for name, _ in found} or len(sizes) > 3
        seen, at = seen + found, end
    assert max(sizes) <= 60
    assert sum(sizes) == 205
    assert len(set(seen)) == 205


def test_a_limit_of_bytes_is_kept_but_lets_one_record_through(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    reader = stream(tmp_path, maxBytesPerTrigger=20)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert len(rows(reader, start, end)) == 3
    assert len(rows(reader, start, reader.latestOffset(start, ReadMaxBytes(1)))) == 1


def test_available_now_stops_where_the_channels_ended_when_it_began(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    reader = stream(tmp_path, maxRecordsPerTrigger=6)
    reader.prepareForTriggerAvailableNow()
    fill(tmp_path / "a", 10, 10)
    fill(tmp_path / "b", 10)
    start = reader.initialOffset()
    start["channels"].pop("b")
    middle = reader.latestOffset(start, ReadMaxRows(6))
    end = reader.latestOffset(middle, ReadMaxRows(6))
    assert len(rows(reader, start, middle)) == 6
    assert len(rows(reader, middle, end)) == 4
    assert reader.latestOffset(end, ReadMaxRows(6)) == end


def test_a_run_that_ends_says_which_channels_are_there_when_others_are_named(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    fill(tmp_path / "b", 10)
    reader = stream(tmp_path, channels="a,nope")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    with pytest.raises(OptionsError, match="channels names what is not there: nope; there is a, b"):
        reader.latestOffset(start, ALL)
    later = stream(tmp_path, channels="c,a")  # one that goes on waits for what may come
    start = later.initialOffset()
    fill(tmp_path / "c", 3)
    end = later.latestOffset(start, ALL)
    assert len(rows(later, start, end)) == 13
    for file in tmp_path.glob("c*"):  # it was read, and is gone
        file.unlink()
    again = stream(tmp_path, channels="c,a")
    again.prepareForTriggerAvailableNow()
    assert rows(again, end, again.latestOffset(end, ALL)) == []


def test_a_stream_starts_earliest_latest_or_at_a_position(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    fill(tmp_path / "b", 10)
    reader = stream(tmp_path)
    position = reader.latestOffset(reader.initialOffset(), ReadMaxRows(8))["channels"]["a"]["at"]

    def count(start: str) -> int:
        chosen = stream(tmp_path, start=start)
        begin = chosen.initialOffset()
        return len(rows(chosen, begin, chosen.latestOffset(begin, ALL)))

    assert (count("earliest"), count("latest"), count(json.dumps({"a": position}))) == (20, 0, 16)
    with pytest.raises(OptionsError, match="not there: zebra"):
        count('{"zebra": 5}')


def test_retention_that_overtakes_the_reader_fails_and_names_the_span(tmp_path: Path) -> None:
    fill(tmp_path / "a", 300, roll_bytes=8192, keep_files=2)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    at = start["channels"]["a"]["at"]
    end = reader.latestOffset(start, ALL)
    fill(tmp_path / "a", 3000, 300, roll_bytes=8192, keep_files=2)
    first = stream(tmp_path).initialOffset()["channels"]["a"]["at"]
    with pytest.raises(ExpiredError) as failed:
        reader.latestOffset(start, ALL)
    assert (failed.value.position, failed.value.first) == (at, first)
    with pytest.raises(ExpiredError):
        reader.partitions(start, end)


def test_allowed_data_loss_goes_on_and_is_counted(tmp_path: Path) -> None:
    fill(tmp_path / "a", 300, roll_bytes=8192, keep_files=2)
    reader = stream(tmp_path, failOnDataLoss="false")
    start = reader.initialOffset()
    at = start["channels"]["a"]["at"]
    fill(tmp_path / "a", 3000, 300, roll_bytes=8192, keep_files=2)
    first = stream(tmp_path).initialOffset()["channels"]["a"]["at"]
    end = reader.latestOffset(start, ALL)
    found = rows(reader, start, end)
    assert found[-1] == ("a", b"003299")
    assert len(found) < 3000
    lost = end["channels"]["a"]["lost_bytes"]
    files = (first - at) >> 40
    assert (3300 - len(found)) * 24 <= lost <= files * 8192  # what the records took, and what the files could hold
    assert "lost" not in end["channels"]["a"]  # records of a file that is gone cannot be counted
    assert reader.reportLatestOffset()["metrics"]["lost_bytes"] == lost
    again = reader.latestOffset(end, ALL)
    assert again["channels"]["a"]["lost_bytes"] == lost
    assert rows(reader, end, again) == []


def test_a_recreated_channel_is_noticed(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    for file in tmp_path.iterdir():
        file.unlink()
    fill(tmp_path / "a", 10)
    with pytest.raises(ReplacedError):
        reader.latestOffset(end, ALL)
    with pytest.raises(ReplacedError):
        reader.partitions(start, end)


def test_the_cursor_follows_what_spark_committed_and_starts_the_next_query(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    reader = stream(tmp_path, cursor="billing", maxRecordsPerTrigger=4)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(4))
    sidecar = sidecar_of(PosixDisk(), str(tmp_path / "a"))
    assert sidecar.read_cursor("billing") is None
    reader.commit(end)
    assert sidecar.read_cursor("billing") == end["channels"]["a"]["at"]
    fresh = stream(tmp_path, cursor="billing")
    assert fresh.initialOffset() == end
    sidecar.close()


def remove(folder: Path, name: str) -> None:
    for file in folder.glob(f"{name}*"):
        file.unlink()


def test_no_channel_waits_for_ever_behind_those_before_it(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        fill(tmp_path / name, 3)
    reader = stream(tmp_path, maxRecordsPerTrigger=2)
    at, seen = reader.initialOffset(), []
    for _ in range(3):
        end = reader.latestOffset(at, reader.getDefaultReadLimit())
        seen += [name for name, _ in rows(reader, at, end)]
        at = end
        fill(tmp_path / "a", 2)  # it always has more than a batch may hold
    assert sorted(seen) == ["a", "a", "b", "b", "c", "c"]


def test_a_limit_of_bytes_is_exceeded_only_by_a_record_that_is_alone(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        with Writer.open(tmp_path / name) as writer:
            writer.append_many([b"x" * (5000 if name == "c" else 900)] * 2)
    reader = stream(tmp_path, maxBytesPerTrigger=2000)
    at, sizes = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        sizes.append([len(payload) for _, payload in rows(reader, at, end)])
        at = end
    assert sum(map(len, sizes)) == 8
    assert all(sum(batch) <= 2000 or batch == [5000] for batch in sizes)


def test_a_foreign_log_made_again_is_noticed_by_a_run_that_reads_what_is_available_now(tmp_path: Path) -> None:
    def make(count: int) -> None:
        remove(tmp_path, "a")
        fill(tmp_path / "a", count)
        remove(tmp_path, "a.penstock-")  # as another implementation leaves it: without an id

    make(100)
    reader = stream(tmp_path)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    make(3)
    fresh = stream(tmp_path)
    fresh.prepareForTriggerAvailableNow()
    with pytest.raises(ReplacedError, match="was read up to"):
        fresh.latestOffset(end, ALL)


def test_a_channel_that_is_gone_with_unread_records_fails_or_is_counted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name, 10)
    strict, lenient = stream(tmp_path), stream(tmp_path, failOnDataLoss="false")
    start = strict.initialOffset()
    middle = strict.latestOffset(start, ReadMaxRows(4))
    ends = strict.reportLatestOffset()["channels"]["b"]["at"]
    assert lenient.latestOffset(start, ReadMaxRows(4)) == middle
    at = middle["channels"]["b"]["at"]
    begin = start["channels"]["b"]["at"]
    remove(tmp_path, "b")
    with pytest.raises(ReplacedError, match=f"not read from {at} to {ends}"):
        strict.latestOffset(middle, ALL)
    with pytest.raises(ReplacedError, match=f"not read from {begin} to {at}"):
        strict.partitions(start, middle)
    assert {name for name, _ in rows(lenient, start, middle)} == {"a"}
    end = lenient.latestOffset(middle, ALL)
    assert end["channels"]["b"]["lost_bytes"] == ends - begin
    assert len(rows(lenient, middle, end)) == 8
    assert lenient.latestOffset(end, ALL)["channels"]["b"]["lost_bytes"] == ends - begin


def test_a_channel_that_is_gone_after_all_of_it_was_read_is_let_go(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name, 10)
    reader = stream(tmp_path)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    remove(tmp_path, "b")
    assert reader.latestOffset(end, ALL) == end


def test_what_is_lost_between_two_plans_of_a_batch_is_counted_once(tmp_path: Path) -> None:
    fill(tmp_path / "a", 300, roll_bytes=8192, keep_files=2)
    reader = stream(tmp_path, failOnDataLoss="false")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(250))
    fill(tmp_path / "a", 3000, 300, roll_bytes=8192, keep_files=2)
    first = stream(tmp_path).initialOffset()["channels"]["a"]["at"]
    for _ in range(2):  # a replay
        assert rows(reader, start, end) == []
    later = reader.latestOffset(end, ALL)
    assert later["channels"]["a"]["lost_bytes"] <= (first >> 40) * 8192
    assert reader.latestOffset(later, ALL)["channels"]["a"]["lost_bytes"] == later["channels"]["a"]["lost_bytes"]


def test_retention_between_the_bounds_and_the_limit_fails_or_is_counted(tmp_path: Path) -> None:
    fill(tmp_path / "a", 3000, roll_bytes=8192)

    class Overtaken(LogStreamReader):
        def _bounds(self, channel: SourceChannel) -> tuple[int, int]:
            bounds = super()._bounds(channel)
            (tmp_path / "a").unlink(missing_ok=True)  # retention, just after the log was asked
            return bounds

    for lenient in (False, True):
        template = stream(tmp_path, failOnDataLoss=not lenient)
        start = template.initialOffset()
        saved = (tmp_path / "a").read_bytes()
        reader = Overtaken(template.options, template.columns)
        if not lenient:
            with pytest.raises(ExpiredError):
                reader.latestOffset(start, ReadMaxRows(10))
            (tmp_path / "a").write_bytes(saved)
            continue
        end = reader.latestOffset(start, ReadMaxRows(10))
        first = stream(tmp_path).initialOffset()["channels"]["a"]["at"]
        assert 0 < end["channels"]["a"]["lost_bytes"] <= (first >> 40) * 8192
        assert rows(reader, start, end) == []
        assert len(rows(reader, end, reader.latestOffset(end, ReadMaxRows(10)))) == 10


def test_an_export_goes_on_behind_what_retention_took_since_it_was_planned(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    fill(tmp_path / "in" / "a", 3000, roll_bytes=8192)
    source = {"path": str(tmp_path / "in"), "table": str(tmp_path / "lake"), "whole": "true"}
    for strict in ("false", "true"):
        reader = ExportSource({**source, "failOnDataLoss": strict}).streamReader(SCHEMA)
        start = reader.initialOffset()
        (task,) = reader.partitions(start, reader.latestOffset(start, ALL))
        (tmp_path / "in" / "a").rename(tmp_path / "taken")
        if strict == "true":
            with pytest.raises(ExpiredError):
                list(reader.read(task))
        else:
            assert 0 < next(iter(reader.read(task))).to_pylist()[0]["records"] < 3000
        (tmp_path / "taken").rename(tmp_path / "in" / "a")


def test_a_start_at_which_nothing_begins_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    for position, reason in ((81, "no record begins"), (1 << 40, "it begins at 80 and ends at"), (-3, "begins at 80")):
        with pytest.raises(OptionsError, match=reason):
            stream(tmp_path, start=json.dumps({"a": position})).initialOffset()


def test_thousands_of_logs_do_not_take_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openlogs, "MOST_OPEN", 3)
    for number in range(8):
        with MessageLog.open(tmp_path / f"log{number}") as writer:
            writer.append(b"x")
    reader = stream(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    start = reader.initialOffset()
    assert len(rows(reader, start, reader.latestOffset(start, ALL))) == 8
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    reader.stop()


def test_a_cursor_that_did_not_move_is_not_written_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name, 4)
    reader = stream(tmp_path, cursor="lake")
    end = reader.latestOffset(reader.initialOffset(), ALL)
    reader.commit(end)
    fill(tmp_path / "b", 4)
    before = {name: (tmp_path / f"{name}.penstock-cursor-lake").read_bytes() for name in ("a", "b")}
    reader.commit(reader.latestOffset(end, ALL))
    after = {name: (tmp_path / f"{name}.penstock-cursor-lake").read_bytes() for name in ("a", "b")}
    assert [name for name in ("a", "b") if before[name] != after[name]] == ["b"]


def restore(path: Path, kept: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(kept, path)


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(90)])
def test_a_backup_that_came_back_is_noticed(tmp_path: Path, limit: Any) -> None:
    logs, kept = tmp_path / "logs", tmp_path / "kept"
    logs.mkdir()
    fill(logs / "a", 50)
    shutil.copytree(logs, kept)
    fill(logs / "a", 50, 50)
    start = stream(logs).initialOffset()
    end = json.loads(json.dumps(stream(logs).latestOffset(start, limit)))
    assert len(rows(stream(logs), start, end)) == (100 if limit is ALL else 90)
    stream(logs, cursor="billing").commit(end)
    assert stream(logs).latestOffset(end, limit)["channels"]["a"]["at"] >= end["channels"]["a"]["at"]
    restore(logs, kept)
    with pytest.raises(ReplacedError, match="was read"):
        stream(logs).latestOffset(end, limit)
    fill(logs / "a", 100, 1000)
    for again in (stream(logs), stream(logs)):
        with pytest.raises(ReplacedError, match="is not the one that was read"):
            again.latestOffset(end, limit)
    with pytest.raises(ReplacedError, match="is not the one that was read"):  # a batch that Spark replays
        rows(stream(logs), start, end)
    shutil.copy(tmp_path / "kept" / "a.penstock-id", logs)
    assert len(rows(stream(logs), start, stream(logs).latestOffset(start, ALL))) == 150


def test_a_named_cursor_of_a_stream_notices_a_backup_that_came_back(tmp_path: Path) -> None:
    logs, kept = tmp_path / "logs", tmp_path / "kept"
    logs.mkdir()
    fill(logs / "a", 50)
    shutil.copytree(logs, kept)
    fill(logs / "a", 50, 50)
    reader = stream(logs, cursor="billing")
    reader.commit(reader.latestOffset(reader.initialOffset(), ALL))
    cursor = (logs / "a.penstock-cursor-billing").read_bytes()
    restore(logs, kept)
    (logs / "a.penstock-cursor-billing").write_bytes(cursor)
    with pytest.raises(ReplacedError):
        stream(logs, cursor="billing").initialOffset()
    fill(logs / "a", 100, 1000)
    with pytest.raises(ReplacedError, match="is not the one that was read"):
        stream(logs, cursor="billing").initialOffset()


def test_offsets_of_earlier_releases_have_no_fingerprint_and_are_read(tmp_path: Path) -> None:
    fill(tmp_path / "a", 100)
    end = stream(tmp_path).latestOffset(stream(tmp_path).initialOffset(), ReadMaxRows(30))
    del end["channels"]["a"]["seen"]
    later = stream(tmp_path).latestOffset(end, ALL)
    assert len(rows(stream(tmp_path), end, later)) == 70
