"""Streams over queues and message logs: the same promises as over channels, and retention that follows Spark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructType

from penstock.errors import CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.spark.source.stream import LogStreamReader
from penstock.spark.source.table import PenstockSource

SCHEMA = StructType().add("channel", StringType()).add("position", LongType()).add("payload", BinaryType())
ALL = ReadAllAvailable()


def queue(path: Path) -> Any:
    options = ChannelOptions(segment_bytes=2000, keep_bytes=10_000, policy="drop_oldest", compression="none")
    return FileChannel.open(path, options)


def numbered(path: Path) -> Any:
    return MessageLog.open(path, MessageLogOptions(segment_bytes=2000, max_messages=300))


OPENERS: dict[str, Callable[[Path], Any]] = {"filechannel": queue, "messagelog": numbered}
formats = pytest.mark.parametrize("kind", OPENERS)


def fill(kind: str, path: Path, count: int, first: int = 0) -> None:
    with OPENERS[kind](path) as writer:
        for number in range(first, first + count):
            writer.append(b"%06d" % number)


def stream(path: Path, **options: Any) -> LogStreamReader:
    chosen = {name: str(value) for name, value in options.items()}
    reader = PenstockSource({"path": str(path), **chosen}).streamReader(SCHEMA)
    assert isinstance(reader, LogStreamReader)
    return reader


def rows(reader: LogStreamReader, start: Any, end: Any) -> list[bytes]:
    worker = cloudpickle.loads(cloudpickle.dumps(reader))
    tasks = cloudpickle.loads(cloudpickle.dumps(reader.partitions(start, end)))
    return [row["payload"] for task in tasks for batch in worker.read(task) for row in batch.to_pylist()]


@formats
def test_batches_follow_one_another_and_replay_alike(tmp_path: Path, kind: str) -> None:
    fill(kind, tmp_path / "a", 100)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ReadMaxRows(60))
    first = rows(reader, start, middle)
    assert first == [b"%06d" % number for number in range(60)]
    fill(kind, tmp_path / "a", 100, 100)
    fill(kind, tmp_path / "b", 10)
    assert rows(reader, start, middle) == first
    end = reader.latestOffset(middle, ALL)
    expected = [b"%06d" % number for number in [*range(60, 200), *range(10)]]  # and the channel that appeared
    assert rows(reader, middle, end) == expected
    assert rows(reader, end, reader.latestOffset(end, ALL)) == []
    reader.stop()
    assert rows(reader, middle, end) == expected  # stopped means only that nothing stays open


@formats
def test_retention_that_overtakes_fails_or_is_counted(tmp_path: Path, kind: str) -> None:
    fill(kind, tmp_path / "a", 100)
    strict, lenient = stream(tmp_path), stream(tmp_path, failOnDataLoss="false")
    start = strict.initialOffset()
    at = start["channels"]["a"]["at"]
    fill(kind, tmp_path / "a", 2000, 100)
    first = stream(tmp_path).initialOffset()["channels"]["a"]["at"]
    assert first > at
    with pytest.raises(ExpiredError) as failed:
        strict.latestOffset(start, ALL)
    assert (failed.value.position, failed.value.first) == (at, first)
    end = lenient.latestOffset(start, ALL)
    counted = "lost" if kind == "messagelog" else "lost_bytes"  # numbers are records, positions of a queue are bytes
    assert end["channels"]["a"][counted] == first - at
    found = rows(lenient, start, end)
    assert found == [b"%06d" % number for number in range(2100 - len(found), 2100)]
    assert 0 < len(found) < 2000


@formats
def test_a_log_that_was_made_again_is_noticed(tmp_path: Path, kind: str) -> None:
    fill(kind, tmp_path / "a", 10)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    task = reader.partitions(start, end)[0]
    shutil.rmtree(tmp_path / "a")
    fill(kind, tmp_path / "a", 20)
    for ask in (
        lambda: reader.latestOffset(end, ALL),
        lambda: reader.partitions(start, end),
        lambda: list(reader.read(task)),
    ):
        with pytest.raises(ReplacedError):
            ask()


@formats
def test_a_log_made_again_while_a_task_reads_it_is_noticed(tmp_path: Path, kind: str) -> None:
    fill(kind, tmp_path / "a", 250)
    reader = stream(tmp_path, batchBytes=500)
    start = reader.initialOffset()
    batches = reader.read(reader.partitions(start, reader.latestOffset(start, ALL))[0])
    next(batches)
    shutil.rmtree(tmp_path / "a")
    fill(kind, tmp_path / "a", 250)  # the same sizes, and the same bytes
    with pytest.raises(ReplacedError):
        list(batches)


def test_damage_that_a_message_log_steps_over_fails_unless_loss_is_allowed(tmp_path: Path) -> None:
    fill("messagelog", tmp_path / "a", 200)
    damaged = sorted((tmp_path / "a").glob("*.log"))[1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    strict, lenient = stream(tmp_path), stream(tmp_path, failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, ALL)
    with pytest.raises(CorruptionError) as failed:
        rows(strict, start, end)
    assert failed.value.file == str(damaged)
    found = rows(lenient, start, end)
    assert (found[0], found[-1]) == (b"000000", b"000199")
    assert len(found) < 200


def test_a_place_in_the_middle_of_a_message_is_refused(tmp_path: Path) -> None:
    fill("filechannel", tmp_path / "a", 100)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    start["channels"]["a"]["at"] = end["channels"]["a"]["at"] - 20  # a log that was cut and went on otherwise
    with pytest.raises(OptionsError, match="no message begins at position"):
        rows(reader, start, end)
    with pytest.raises(OptionsError, match="no message begins at position"):
        stream(tmp_path, start=json.dumps({"a": start["channels"]["a"]["at"]})).initialOffset()


@formats
def test_available_now_stops_where_the_log_ended(tmp_path: Path, kind: str) -> None:
    fill(kind, tmp_path / "a", 10)
    reader = stream(tmp_path)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    fill(kind, tmp_path / "a", 10, 10)
    end = reader.latestOffset(start, ReadMaxRows(100))
    assert rows(reader, start, end) == [b"%06d" % number for number in range(10)]
    assert reader.latestOffset(end, ReadMaxRows(100)) == end


def test_a_queue_keeps_what_spark_has_not_made_durable(tmp_path: Path) -> None:
    def write(count: int, first: int) -> None:
        with FileChannel.open(tmp_path / "a", ChannelOptions(segment_bytes=2000, compression="none")) as channel:
            for number in range(first, first + count):
                channel.append(b"%06d" % number)
            channel.gc()

    write(1000, 0)
    reader = stream(tmp_path, cursor="lake")
    start = reader.initialOffset()
    assert start["channels"]["a"]["at"] == 0
    middle = reader.latestOffset(start, ReadMaxRows(600))
    reader.commit(start)  # from now on the cursor holds
    write(1000, 1000)
    assert len(rows(reader, start, middle)) == 600  # nothing was collected
    reader.commit(middle)
    write(1000, 2000)
    first = stream(tmp_path).initialOffset()["channels"]["a"]["at"]
    assert 0 < first <= middle["channels"]["a"]["at"]
    end = reader.latestOffset(middle, ALL)
    assert rows(reader, middle, end) == [b"%06d" % number for number in range(600, 3000)]


def test_a_kind_that_a_format_does_not_have_plans_nothing(tmp_path: Path) -> None:
    for kind in OPENERS:
        fill(kind, tmp_path / kind, 10)
    reader = PenstockSource({"path": str(tmp_path), "kinds": "3"}).reader(SCHEMA)
    assert reader.partitions() == []


def damage(folder: Path, *places: tuple[int, float]) -> None:
    """Flip a byte in some segments: which, and how far into it."""
    files = sorted(folder.glob("*.log"))
    for index, part in places:
        data = bytearray(files[index].read_bytes())
        data[int(len(data) * part)] ^= 0xFF
        files[index].write_bytes(data)


def test_a_damaged_message_log_gives_the_same_rows_for_any_number_of_tasks(tmp_path: Path) -> None:
    fill("messagelog", tmp_path / "a", 300)
    damage(tmp_path / "a", (0, 0.3), (2, 0.5), (2, 0.9), (4, 0.02))
    seen = set()
    for size in ("1", "700", "2000", "5000", "1m"):
        reader = stream(tmp_path, failOnDataLoss="false", partitionBytes=size, partitions=1)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        found = rows(reader, start, end)
        seen.add((len(reader.partitions(start, end)) > 1, tuple(found), json.dumps(end)))
        assert end["channels"]["a"]["lost"] == 300 - len(found) > 3  # counted in records
        assert reader.reportLatestOffset()["metrics"]["lost_records"] == 300 - len(found)
        batch = PenstockSource(
            {"path": str(tmp_path), "failOnDataLoss": "false", "partitionBytes": size, "partitions": "3"}
        ).reader(SCHEMA)
        again = [row["payload"] for task in batch.partitions() for item in batch.read(task) for row in item.to_pylist()]
        assert again == found
    assert {many for many, _, _ in seen} == {True, False}
    assert len({found for _, found, _ in seen}) == 1
    assert len({end for _, _, end in seen}) == 1


def test_what_a_limited_stream_loses_to_damage_is_counted_batch_by_batch(tmp_path: Path) -> None:
    fill("messagelog", tmp_path / "a", 300)
    damage(tmp_path / "a", (1, 0.5), (3, 0.2))
    reader = stream(tmp_path, failOnDataLoss="false", maxRecordsPerTrigger=50)
    at, found = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        found += rows(reader, at, end)
        at = end
    assert at["channels"]["a"]["lost"] == 300 - len(found) > 0
    assert len(set(found)) == len(found)


def test_damage_in_a_queue_is_counted_in_bytes_at_most(tmp_path: Path) -> None:
    fill("filechannel", tmp_path / "a", 300)
    damaged = min(file for file in (tmp_path / "a").iterdir() if file.name.startswith("segment"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    reader = stream(tmp_path, failOnDataLoss="false")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    found = rows(reader, start, end)
    assert 0 < len(found) < 300
    lost = end["channels"]["a"]["lost_bytes"]
    assert lost >= (300 - len(found)) * 6
    assert lost <= len(data)
