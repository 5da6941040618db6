"""Offsets as Spark keeps them, and where reading begins and ends as Kafka's source would have it."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructType

from penstock.errors import ExpiredError, NotFoundError, OptionsError, ReplacedError
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.fingerprint import Fingerprint
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.spark.source import bounds, offsets
from penstock.spark.source.bounds import position_at
from penstock.spark.source.offsets import pack_offset, unpack_offset
from penstock.spark.source.plan import find_channels
from penstock.spark.source.stream import LogStreamReader
from penstock.spark.source.table import PenstockSource

SCHEMA = StructType().add("channel", StringType()).add("position", LongType()).add("payload", BinaryType())
ALL = ReadAllAvailable()
SECOND = 1_000_000_000


def stream(path: Path, **options: Any) -> LogStreamReader:
    chosen = {"path": str(path), **{name: str(value) for name, value in options.items()}}
    reader = PenstockSource(chosen).streamReader(SCHEMA)
    assert isinstance(reader, LogStreamReader)
    return reader


def batch(path: Path | str, **options: Any) -> list[tuple[str, int]]:
    reader = PenstockSource({"path": str(path), **{k: str(v) for k, v in options.items()}}).reader(SCHEMA)
    found = [row for task in reader.partitions() for item in reader.read(task) for row in item.to_pylist()]
    return [(row["channel"], int(row["payload"])) for row in found]


def fill(path: Path, count: int, first: int = 0, **options: Any) -> list[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with Writer.open(path, region_bytes=4096, **options) as writer:
        numbers = range(first, first + count)
        made = writer.append_many([b"%d" % n for n in numbers], timestamp_ns=[(n + 1) * SECOND for n in numbers])
    return made.tolist()  # type: ignore[no-any-return]


def test_offsets_of_many_channels_are_compact_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {f"site/{n % 50:02}/device-{n:05}": {"id": f"{n:032x}", "at": 80 + 1024 * n} for n in range(10_000)}
    places["site/00/device-00000"] |= {"from": 80, "lost": 7, "lost_bytes": 9}
    packed = json.dumps(pack_offset(places))
    assert len(packed) < 16 * 10_000 < len(json.dumps({"channels": places})) / 5
    for number, place in enumerate(places.values()):
        place["seen"] = str(Fingerprint(int(str(place["at"])) - 24, hashlib.sha256(b"%d" % number).digest()[:8]))
    packed = json.dumps(pack_offset(places))
    assert len(packed) < 28 * 10_000 < len(json.dumps({"channels": places})) / 4
    found = unpack_offset(json.loads(packed))
    assert {name: place["at"] for name, place in found.items()} == {n: p["at"] for n, p in places.items()}
    assert {key: found["site/00/device-00000"][key] for key in ("from", "lost", "lost_bytes")} == {
        "from": 80, "lost": 7, "lost_bytes": 9,
    }  # fmt: skip
    assert {name: place["seen"] for name, place in found.items()} == {n: p["seen"] for n, p in places.items()}
    assert json.dumps(pack_offset(found)) == packed  # what was packed once is packed alike again
    with pytest.raises(OptionsError, match="not one of a stream of channels"):
        unpack_offset({"count": 3, "packed": "nonsense"})


def test_a_stream_goes_on_from_offsets_of_either_form_and_notices_a_log_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        fill(tmp_path / name, 10)
    start = stream(tmp_path).initialOffset()
    monkeypatch.setattr(offsets, "READABLE", 1)
    reader = stream(tmp_path)
    end = reader.latestOffset(start, ALL)
    assert set(end) == {"count", "packed"}
    assert sum(len(b) for task in reader.partitions(start, end) for b in reader.read(task)) == 30
    assert reader.latestOffset(end, ALL) == end
    fill(tmp_path / "b", 5, 10)
    later = stream(tmp_path).latestOffset(end, ALL)
    assert sum(len(b) for task in reader.partitions(end, later) for b in reader.read(task)) == 5
    for file in tmp_path.glob("a*"):
        file.unlink()
    fill(tmp_path / "a", 10)
    with pytest.raises(ReplacedError):
        stream(tmp_path).latestOffset(later, ALL)


def test_a_batch_begins_and_ends_where_it_is_told(tmp_path: Path) -> None:
    at = fill(tmp_path / "in" / "a", 10)
    fill(tmp_path / "in" / "b", 3)
    both = batch(tmp_path / "in", startingOffsets=json.dumps({"a": at[4], "b": "latest"}))
    assert both == [("a", n) for n in range(4, 10)]
    assert batch(tmp_path / "in", startingOffsets=json.dumps({"a": -1}), endingOffsets=json.dumps({"b": at[2]})) == [
        ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert batch(tmp_path / "in", startingOffsets="latest") == []
    for wrong, reason in (
        ({"startingOffsets": '{"x": 1}'}, "startingOffsets names channels that are not there: x"),
        ({"channels": "a,nope"}, "channels names what is not there: nope; there is a, b"),
        ({"nodes": "edge-1"}, "nodes names what is not there: edge-1; there is none"),
        ({"endingOffsets": '{"a": "soon"}'}, "must be a position, earliest or latest"),
        ({"endingOffsets": "earliest"}, "nothing would be read"),
        ({"startingOffsets": '{"a": 81}'}, "no record begins"),
        ({"startingOffsets": "earliest", "startingTimestamp": "5"}, "say the same"),
        ({"startingTimestamp": "yesterday"}, "not understood"),
    ):
        with pytest.raises(OptionsError, match=reason):
            batch(tmp_path / "in", **wrong)


def test_a_stream_begins_where_it_is_told_and_stays_where_it_should_end(tmp_path: Path) -> None:
    at = fill(tmp_path / "a", 10)
    reader = stream(tmp_path, startingOffsets=json.dumps({"a": at[3]}), endingOffsets=json.dumps({"a": at[7]}))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    assert (start["channels"]["a"]["at"], end["channels"]["a"]["at"]) == (at[3], at[7])
    assert reader.latestOffset(end, ALL) == end
    assert stream(tmp_path, startingTimestamp=5000).initialOffset()["channels"]["a"]["at"] == at[4]


def test_a_start_that_retention_took_fails_a_batch_unless_loss_is_allowed(tmp_path: Path) -> None:
    fill(tmp_path / "a", 2000, roll_bytes=8192, keep_files=2)
    with pytest.raises(ExpiredError):
        batch(tmp_path, startingOffsets='{"a": 80}')
    assert batch(tmp_path, startingOffsets='{"a": 80}', failOnDataLoss="false")[-1] == ("a", 1999)


def test_a_stream_that_has_ended_is_not_overtaken_by_retention(tmp_path: Path) -> None:
    at = fill(tmp_path / "a", 1600, roll_bytes=8192)
    bound = json.dumps({"a": at[40]})
    ended = stream(tmp_path, endingOffsets=bound)
    start = ended.initialOffset()
    end = ended.latestOffset(start, ALL)
    begun = stream(tmp_path, maxRecordsPerTrigger=10).latestOffset(start, ReadMaxRows(10))
    for name in ("a", "a.1"):
        (tmp_path / name).unlink()
    assert ended.latestOffset(end, ALL) == end
    with pytest.raises(ExpiredError):
        stream(tmp_path, endingOffsets=bound).latestOffset(begun, ALL)
    lenient = stream(tmp_path, endingOffsets=bound, failOnDataLoss="false")
    assert lenient.latestOffset(end, ALL) == end
    later = lenient.latestOffset(begun, ALL)["channels"]["a"]
    assert (later["at"], later["lost_bytes"]) == (at[40], at[40] - at[10])  # and not what lies behind the end
    assert lenient.latestOffset({"channels": {"a": later}}, ALL)["channels"]["a"]["lost_bytes"] == at[40] - at[10]
    none = stream(tmp_path, endingOffsets='{"a": -2}')
    nothing = none.latestOffset(none.initialOffset(), ALL)
    for file in tmp_path.glob("a.*[0-9]"):
        file.unlink()
        assert none.latestOffset(nothing, ALL)["channels"]["a"]["at"] == nothing["channels"]["a"]["at"]
        assert ended.latestOffset(end, ALL) == end  # nor does it matter that the channel is gone


def test_bounds_that_no_record_reaches_are_bounds_all_the_same(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    for far in ("2999-01-01", "9999-12-31T23:59:59Z", "99999999999999999999"):
        assert batch(tmp_path, startingTimestamp=far) == []
        assert len(batch(tmp_path, endingTimestamp=far)) == 10
        assert batch(tmp_path, fromTime=far) == []
        assert len(batch(tmp_path, toTime=far)) == 10
        assert stream(tmp_path, startingTimestamp=far).initialOffset()["channels"]["a"]["at"] > 80
    assert len(batch(tmp_path, startingTimestamp="1900-01-01", fromTime="1900-01-01")) == 10


def test_times_are_found_by_bisection_where_they_grow_and_by_reading_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SPAN_BYTES", 4096)
    at = fill(tmp_path / "x", 20_000)
    with open_log(str(tmp_path / "x")) as log:
        first, end, reads = log.first_position, log.next_position, []
        read = log.read
        monkeypatch.setattr(log, "read", lambda position, *rest: reads.append(position) or read(position, *rest))
        for number in (0, 1, 9_999, 19_999):
            assert position_at(log, first, end, (number + 1) * SECOND) == at[number]
            assert position_at(log, first, end, (number + 1) * SECOND - 1) == at[number]
        assert position_at(log, first, end, 10**18) == end
        assert len(reads) < 9 * 40  # not a hundred and twenty regions each time
    with Writer.open(tmp_path / "back", region_bytes=4096) as writer:  # a clock that was set back in the middle
        times = [*range(1000, 2000), *range(500, 1500)]
        found = writer.append_many([b"%d" % n for n in range(2000)], timestamp_ns=[t * SECOND for t in times])
    with open_log(str(tmp_path / "back")) as log:
        assert position_at(log, log.first_position, log.next_position, 1200 * SECOND) == found[200]


def test_the_time_of_a_message_log_and_of_envelopes_in_a_queue_is_found(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "m", MessageLogOptions(segment_bytes=2000)) as messages:
        for number in range(200):
            messages.append(b"%d" % number, timestamp_ns=(number + 1) * SECOND)
    options = ChannelOptions(segment_bytes=2000, content=CONTENT, compression="none")
    with FileChannel.open(tmp_path / "q", options) as queue:
        for number in range(200):
            queue.append(encode_envelope(Envelope(b"k", b"%d" % number, event_time_ns=(number + 1) * SECOND)))
    for name in ("m", "q"):
        found = batch(tmp_path / name, startingTimestamp=150_000, endingTimestamp="1970-01-01T00:02:35")
        assert found == [(name, n) for n in range(149, 154)]
    with FileChannel.open(tmp_path / "plain") as queue:
        queue.append(b"1")
    with pytest.raises(OptionsError, match="its records have no time"):
        batch(tmp_path / "plain", startingTimestamp=1)


def test_a_stream_waits_for_enough_records_but_not_for_ever(tmp_path: Path) -> None:
    fill(tmp_path / "a", 10)
    reader = stream(tmp_path, minOffsetsPerTrigger=5, maxTriggerDelay="1h")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)  # the first batch waits for nothing
    assert end != start
    fill(tmp_path / "a", 4, 10)
    assert reader.latestOffset(end, ALL) == end
    fill(tmp_path / "a", 1, 14)
    full = reader.latestOffset(end, ALL)
    assert sum(len(b) for task in reader.partitions(end, full) for b in reader.read(task)) == 5
    fill(tmp_path / "a", 1, 15)
    assert reader.latestOffset(full, ALL) == full
    hasty = stream(tmp_path, minOffsetsPerTrigger=5, maxTriggerDelay="20ms")
    hasty.latestOffset(full, ALL)
    deadline = time.monotonic() + 30
    while hasty.latestOffset(full, ALL) == full:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    now = stream(tmp_path, minOffsetsPerTrigger=50, maxTriggerDelay="1h")
    now.prepareForTriggerAvailableNow()  # what is available now may be less than that
    now.latestOffset(full, ALL)
    assert now.latestOffset(full, ALL) != full


def test_channels_are_chosen_by_a_pattern_and_paths_by_globs(tmp_path: Path) -> None:
    for name in ("lab/a", "lab/b", "site/a", "site/deep/a"):
        fill(tmp_path / name, 1)
    assert {name for name, _ in batch(tmp_path, channelPattern=r"(lab|site)/a")} == {"lab/a", "site/a"}
    assert {name for name, _ in batch(f"{tmp_path}/*/a")} == {"lab/a", "site/a"}
    assert {name for name, _ in batch(f"{tmp_path}/s?te")} == {"site/a", "site/deep/a"}
    assert batch(f"{tmp_path}/x*") == []
    with pytest.raises(NotFoundError, match="there is no folder"):
        batch(f"{tmp_path}/nowhere/*")
    with pytest.raises(OptionsError, match="channelPattern"):
        batch(tmp_path, channelPattern="(")
    reader = stream(Path(f"{tmp_path}/*/a"))
    start = reader.initialOffset()
    fill(tmp_path / "yard" / "a", 1)
    assert "yard/a" in reader.latestOffset(start, ALL)["channels"]


def test_a_relative_path_is_made_whole_where_the_query_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "data" / "a", 2)
    monkeypatch.chdir(tmp_path / "data")
    reader = PenstockSource({"path": "."}).reader(SCHEMA)
    tasks = reader.partitions()
    monkeypatch.chdir("/")  # where a worker runs
    assert sum(len(item) for task in tasks for item in reader.read(task)) == 2
    (tmp_path / "data").rename(tmp_path / "elsewhere")  # a worker that has its own disk only
    with pytest.raises(NotFoundError, match=r"the machine of this task .* does not see it"):
        list(reader.read(tasks[0]))


def test_small_channels_are_spread_over_the_tasks_that_were_asked_for(tmp_path: Path) -> None:
    for number in range(60):
        fill(tmp_path / f"c{number}", 1)
    assert len(find_channels([str(tmp_path)])) == 60
    for wanted in (1, 2, 8):
        reader = PenstockSource({"path": str(tmp_path), "partitions": str(wanted)}).reader(SCHEMA)
        sizes = [len(task.spans) for task in reader.partitions()]  # type: ignore[attr-defined]
        assert sum(sizes) == 60
        assert len(sizes) % wanted == 0
        assert max(sizes) <= 1.5 * min(sizes)


def test_progress_says_how_far_a_stream_is_behind(tmp_path: Path) -> None:
    fill(tmp_path / "a", 100)
    reader = stream(tmp_path, maxRecordsPerTrigger=40)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    metrics = reader.reportLatestOffset()["metrics"]
    assert (metrics["channels"], metrics["batch_records"], metrics["lag_records"], metrics["lag_exact"]) == (
        1, 40, 60, True,
    )  # fmt: skip
    assert metrics["lag_seconds"] > 10**9  # its records are of 1970
    assert metrics["lag_bytes"] >= 60 * 24
    assert (metrics["lost_records"], metrics["lost_bytes"]) == (0, 0)
    assert metrics["read_bytes"] == 0
    reader.partitions(start, end)
    reader.latestOffset(reader.latestOffset(end, reader.getDefaultReadLimit()), ALL)
    metrics = reader.reportLatestOffset()["metrics"]
    assert (metrics["lag_records"], metrics["lag_channels"]) == (0, 0)
    assert metrics["read_bytes"] >= 40 * 24
