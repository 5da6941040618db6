"""Shipped logs as a source of Spark, without Spark: found by URL, planned from manifests, read by segments, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructType
from ship_use import FORMATS, fill, open_writer

from penstock.disk import object_store_for
from penstock.disk.objectstore import Obstore
from penstock.errors import CorruptionError, ExpiredError, OptionsError
from penstock.log.xchannel import Writer
from penstock.ship import Shipper, compact_fleet, empty_trash, forget_before, forget_compacted
from penstock.spark.source.plan import find_channels
from penstock.spark.source.stream import LogStreamReader
from penstock.spark.source.table import LogSourceReader, PenstockSource
from penstock.testing.s3 import S3Server

SCHEMA = (
    StructType()
    .add("node", StringType())
    .add("channel", StringType())
    .add("position", LongType())
    .add("payload", BinaryType())
)
ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server("spark-shipped") as server:  # stores are kept by name for the life of a process
        yield server


@pytest.fixture
def fleet(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a place of this test's own on the server, which this process finds by its environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/{tmp_path.name}"


def ship(path: Path, place: str, node: str) -> None:
    with Shipper(path, object_store_for(f"{place}/{node}"), node=node) as shipper:
        while shipper.step():
            pass


def grow(
    folder: Path, place: str, node: str, start: int, count: int, format: str = "xchannel", segments: int = 1
) -> None:
    """Append numbered records to the log ``ticks`` of a node, in so many segments, and ship it."""
    path = folder / node / "ticks"
    path.parent.mkdir(exist_ok=True)
    with open_writer(format, path) as writer:
        for index in range(segments):
            fill(format, writer, start + index * (count // segments), count // segments)
    ship(path, place, node)


def batch(path: str, **options: Any) -> LogSourceReader:
    source = PenstockSource({"path": path, **{name: str(value) for name, value in options.items()}})
    reader = source.reader(SCHEMA)
    assert isinstance(reader, LogSourceReader)
    return reader


def stream(path: str, **options: Any) -> LogStreamReader:
    source = PenstockSource({"path": path, **{name: str(value) for name, value in options.items()}})
    reader = source.streamReader(SCHEMA)
    assert isinstance(reader, LogStreamReader)
    return reader


def rows(reader: Any, *offsets: Any) -> list[tuple[str, str, bytes]]:
    """Return what the tasks of a batch read, each from a copy as Spark makes it."""
    offsets = json.loads(json.dumps(offsets))
    worker = cloudpickle.loads(cloudpickle.dumps(reader))
    found = []
    for task in cloudpickle.loads(cloudpickle.dumps(reader.partitions(*offsets))):
        for some in worker.read(task):
            found += [(row["node"], row["channel"], row["payload"]) for row in some.to_pylist()]
    return found


def numbered(node: str, start: int, count: int) -> list[tuple[str, str, bytes]]:
    return [(node, "ticks", b"record %06d" % number) for number in range(start, start + count)]


class Asked:
    """Which objects are asked for, whole or in part, and which places are listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gets: list[str] = []
        self.lists: list[str] = []

        def watch(name: str, notes: list[str]) -> None:
            real = getattr(Obstore, name)

            def watched(store: Obstore, key: str = "", *args: Any, **options: Any) -> Any:
                notes.append(f"{store.url}/{key}")
                return real(store, key, *args, **options)

            monkeypatch.setattr(Obstore, name, watched)

        for name in ("get", "get_range"):
            watch(name, self.gets)
        for name in ("folder", "objects"):
            watch(name, self.lists)

    def segments(self) -> list[str]:
        return [key for key in self.gets + self.lists if ".segments" in key]


@pytest.mark.parametrize("format", FORMATS)
def test_a_fleet_is_read_by_its_pattern_and_each_record_says_its_node(fleet: str, tmp_path: Path, format: str) -> None:
    for number in (1, 2):
        grow(tmp_path, fleet, f"edge-{number}", 100 * number, 100, format, segments=2)
    wanted = numbered("edge-1", 100, 100) + numbered("edge-2", 200, 100)
    for pattern in ("/*/ticks", "/edge-*/t*", ""):
        assert sorted(rows(batch(fleet + pattern))) == wanted
    assert rows(batch(f"{fleet}/edge-2/ticks")) == numbered("edge-2", 200, 100)
    schema = PenstockSource({"path": fleet}).schema()
    assert "`node` string" in str(schema)
    assert ("`seq` bigint" in str(schema)) == (format == "messagelog")


def test_planning_gets_heads_and_neither_lists_nor_fetches_segments(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        grow(tmp_path, fleet, f"edge-{number}", 0, 60, segments=6)
    asked = Asked(monkeypatch)
    reader = batch(f"{fleet}/*/ticks", partitionBytes=8192, partitions=4)
    tasks = reader.partitions()
    assert len(tasks) >= 4
    assert asked.segments() == []
    assert all(key.endswith(".shipped.json") for key in asked.gets)
    assert sum(len(list(reader.read(task))) for task in tasks) > 0
    assert len(set(asked.segments())) == len(asked.segments()) == 12  # each segment once, by one task


def test_filters_on_node_channel_position_and_time_skip_whole_segments(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        grow(tmp_path, fleet, f"edge-{number}", 0, 60, segments=6)
    (channel, other) = find_channels([fleet])
    with channel.open() as log:
        third = log.entries(log.first_position, log.next_position)[2]  # type: ignore[attr-defined]
        count = len(log.read(log.first_position, 20))
    assert (channel.name, other.label, count) == ("edge-1/ticks", "ticks", 10)
    asked = Asked(monkeypatch)
    for options in (
        {"nodes": "edge-1", "fromPosition": third.first, "toPosition": third.next},
        {"nodes": "edge-1", "channels": "ticks", "fromTime": third.min_time_ns, "toTime": third.max_time_ns + 1},
        {"channels": "edge-1/*", "fromPosition": third.first, "toPosition": third.next},
    ):
        assert rows(batch(fleet, **options)) == numbered("edge-1", 20, 10)
        assert [key for key in asked.segments() if third.key in key] == asked.segments()
    assert rows(batch(fleet, nodes="edge-3*")) == rows(batch(fleet, channels="orders*")) == []
    assert rows(batch(fleet, toTime="1999-12-31T23:59:59Z")) == []


def test_a_stream_follows_the_manifests_and_a_batch_is_the_same_when_it_is_repeated(fleet: str, tmp_path: Path) -> None:
    grow(tmp_path, fleet, "edge-1", 0, 30, segments=3)
    reader = stream(f"{fleet}/*/ticks")
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ALL)
    first = rows(reader, start, middle)
    assert first == numbered("edge-1", 0, 30)
    grow(tmp_path, fleet, "edge-1", 30, 10)
    grow(tmp_path, fleet, "edge-2", 0, 10)
    end = middle
    while len(end["channels"]) < 2:  # a new log is found by a listing, which is not made with every batch
        end = reader.latestOffset(middle, ALL)
    assert rows(reader, start, middle) == first
    assert sorted(rows(reader, middle, end)) == numbered("edge-1", 30, 10) + numbered("edge-2", 0, 10)
    assert rows(reader, end, reader.latestOffset(end, ALL)) == []
    again = stream(f"{fleet}/*/ticks")  # after a crash: from the checkpoint, in another process
    assert sorted(rows(again, middle, end)) == sorted(rows(reader, middle, end))
    assert "test" not in json.dumps([start, end]).replace(tmp_path.name, "")  # no key of the environment


def test_limits_of_a_stream_are_kept_by_whole_segments_without_fetching_any(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        grow(tmp_path, fleet, f"edge-{number}", 0, 40, segments=4)
    reader = stream(fleet, maxRecordsPerTrigger=40)
    at = reader.initialOffset()
    asked = Asked(monkeypatch)
    found, sizes = [], []
    while (following := reader.latestOffset(at, ReadMaxRows(40))) != at:
        assert asked.segments() == []
        some = rows(reader, at, following)
        found, sizes, at = found + some, [*sizes, len(some)], following
        asked.gets.clear()
    assert sizes == [40, 40]
    assert sorted(found) == numbered("edge-1", 0, 40) + numbered("edge-2", 0, 40)
    one = reader.latestOffset(reader.initialOffset(), ReadMaxBytes(1))  # a segment each is the least there is
    assert len(rows(reader, reader.initialOffset(), one)) == 10


def test_what_was_forgotten_is_read_while_its_grace_lasts_and_then_expired(fleet: str, tmp_path: Path) -> None:
    grow(tmp_path, fleet, "edge-1", 0, 30, segments=3)
    reader = batch(fleet)
    tasks = reader.partitions()
    (channel,) = find_channels([fleet])
    store = object_store_for(f"{fleet}/edge-1")
    with channel.open() as log:
        last = log.entries(0, log.next_position)[-1]  # type: ignore[attr-defined]
    forget_before(store, "ticks", last.first)
    assert sum(some.num_rows for task in tasks for some in reader.read(task)) == 30
    assert rows(batch(fleet)) == numbered("edge-1", 20, 10)
    empty_trash(store, "ticks", 0)
    with pytest.raises(ExpiredError):
        [list(reader.read(task)) for task in tasks]
    lenient = batch(fleet, failOnDataLoss="false")
    assert sum(some.num_rows for task in tasks for some in lenient.read(task)) == 10
    stale = {"channels": {"edge-1/ticks": {"id": channel.identity, "at": 80}}}
    with pytest.raises(ExpiredError):
        stream(fleet).latestOffset(stale, ALL)
    lost = stream(fleet, failOnDataLoss="false").latestOffset(stale, ALL)["channels"]["edge-1/ticks"]
    assert lost["from"] == last.first
    assert 20 * 24 <= lost["lost_bytes"] <= 2 * last.bytes  # of two segments that are gone


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_compacted_and_forgotten_is_read_from_the_compacted_files(
    fleet: str, tmp_path: Path, format: str
) -> None:
    for number in (1, 2):
        grow(tmp_path, fleet, f"edge-{number}", 0, 40, format, segments=4)
    start = stream(fleet).initialOffset()
    whole = rows(batch(fleet))
    compact_fleet(fleet)
    grow(tmp_path, fleet, "edge-1", 40, 20, format, segments=2)
    forget_compacted(fleet)
    for node in ("edge-1", "edge-2"):
        empty_trash(object_store_for(f"{fleet}/{node}"), "ticks", 0)
    again = batch(fleet)
    assert sorted(rows(again)) == sorted([*whole, *numbered("edge-1", 40, 20)])
    assert rows(batch(fleet, nodes="edge-2")) == numbered("edge-2", 0, 40)
    reader = stream(fleet)  # a query that has read nothing yet goes on from there
    end = reader.latestOffset(start, ALL)
    assert sorted(rows(reader, start, end)) == sorted(rows(again))


def test_a_changed_object_never_becomes_a_row(fleet: str, tmp_path: Path) -> None:
    grow(tmp_path, fleet, "edge-1", 0, 30)
    store = object_store_for(fleet)
    (key,) = [info.key for info in store.objects() if ".segments" in info.key]
    data = bytearray(store.get(key)[0])
    data[100] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(CorruptionError, match="BLAKE3"):
        rows(batch(fleet))


def test_a_folder_to_which_logs_were_shipped_is_read_alike(tmp_path: Path) -> None:
    grow(tmp_path, str(tmp_path / "up"), "edge-1", 0, 30)
    for path in ("up", "up/*/ticks", "up/edge-1/ticks"):
        assert rows(batch(str(tmp_path / path))) == numbered("edge-1", 0, 30)
    assert rows(batch(str(tmp_path / "edge-1" / "ticks"))) == [
        (None, "ticks", payload) for _, _, payload in numbered("", 0, 30)
    ]


def test_two_logs_of_one_name_and_node_are_refused_and_so_are_credentials_in_a_url(fleet: str, tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        with Writer.open(tmp_path / place / "ticks") as writer:
            writer.append(b"x")
            writer.roll()
        with Shipper(tmp_path / place / "ticks", object_store_for(f"{fleet}/{place}"), node="same") as shipper:
            shipper.step()
    with pytest.raises(OptionsError, match="two logs are called ticks of node same"):
        batch(fleet).partitions()
    with pytest.raises(OptionsError, match="credentials come from the environment") as told:
        batch("s3://me:secret@bucket/fleet")
    assert "secret" not in str(told.value)
    with pytest.raises(OptionsError, match="shipped logs have none"):
        stream(fleet, cursor="mine")


@pytest.mark.parametrize("format", FORMATS)
def test_a_log_whose_files_were_copied_to_a_url_is_read_there(fleet: str, tmp_path: Path, format: str) -> None:
    path = tmp_path / "copied"
    with open_writer(format, path) as writer:
        fill(format, writer, 0, 40)
        writer.append(b"the last")
    objects = object_store_for(fleet)
    for file in tmp_path.rglob("copied*"):
        for part in [file] if file.is_file() else file.iterdir():
            objects.put(str(part.relative_to(tmp_path)), part.read_bytes())
    wanted = [*(payload for _, _, payload in numbered("", 0, 40)), b"the last"]
    found = rows(batch(f"{fleet}/copied"))
    assert [(node, channel) for node, channel, _ in found] == [(None, "copied")] * 41
    assert [payload for _, _, payload in found] == wanted
