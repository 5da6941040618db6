"""The log sink as a Python object: tasks stage, the driver appends once, whatever dies in between."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

from penstock.disk import PosixDisk
from penstock.errors import ConflictError, LockedError, NotFoundError, OptionsError, ReplacedError, UnsupportedError
from penstock.log.detect import FORMATS, open_log, open_writer
from penstock.log.envelope import CONTENT, decode_envelope, open_envelopes
from penstock.log.filechannel import FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Writer
from penstock.spark.pipelines.run import error_of
from penstock.spark.sink import log as logsink
from penstock.spark.sink.log import SinkOptions, append_staged, read_intent, stage
from penstock.spark.sink.records import records_of
from penstock.spark.source.table import PenstockSource
from penstock.testing.log_conformance import contents

SCHEMA = StructType().add("payload", BinaryType()).add("kind", IntegerType()).add("timestamp_ns", LongType())


def batches(first: int, count: int) -> Iterator[pa.RecordBatch]:
    for at in range(first, first + count, 4):
        numbers = range(at, min(at + 4, first + count))
        yield pa.RecordBatch.from_pydict(
            {"payload": [b"%d" % n for n in numbers], "kind": [n % 7 for n in numbers], "timestamp_ns": list(numbers)}
        )


def payloads(path: Path) -> list[bytes]:
    with open_log(str(path)) as log:
        return contents(log)


with_kinds = batches


class Killed(BaseException):
    """Stands for kill -9: no handler runs."""


@pytest.fixture
def options(tmp_path: Path) -> SinkOptions:
    return SinkOptions(path=str(tmp_path / "out"), app="test")


def test_batches_are_appended_in_task_order_and_once(tmp_path: Path, options: SinkOptions) -> None:
    writer = PenstockSource({"path": str(tmp_path / "out"), "appId": "test"}).streamWriter(SCHEMA, False)
    worker = cloudpickle.loads(cloudpickle.dumps(writer))
    messages = [worker.write(batches(0, 10)), worker.write(iter(())), worker.write(batches(10, 5))]
    writer.commit(messages, 0)
    writer.commit(messages, 0)  # Spark repeats a commit it is not sure of
    later = [worker.write(batches(15, 5))]
    writer.commit(later, 1)
    writer.commit([worker.write(batches(0, 10))], 0)
    assert payloads(tmp_path / "out") == [b"%d" % n for n in range(20)]
    with open_log(options.path) as log:
        rows = log.read(log.first_position).to_pylist()
    assert [(row["kind"], row["timestamp_ns"]) for row in rows] == [(n % 7, n) for n in range(20)]
    assert not [name for name in os.listdir(tmp_path) if "staged" in name]


@pytest.mark.parametrize("moment", range(9))
@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_driver_that_dies_at_any_moment_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, meanwhile: bool, format: str
) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test", format=format)

    def batches(first: int, count: int) -> Iterator[pa.RecordBatch]:  # not every format has kinds
        for batch in with_kinds(first, count):
            yield batch if format == "xchannel" else batch.drop_columns(["kind"])

    append_staged(options, 0, [stage(options, batches(0, 6))])
    steps = itertools.count()

    def dying(function: Any) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            if next(steps) == moment:
                raise Killed
            return function(*args, **words)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(logsink, "write_intent", dying(logsink.write_intent))
        patch.setattr(logsink, "_end_of", dying(logsink._end_of))
        patch.setattr(logsink, "clear_staged", dying(logsink.clear_staged))
        for writer in (Writer, FileChannel, MessageLog):
            patch.setattr(writer, "append_many", dying(writer.append_many))
        staged = [stage(options, batches(6, 9)), stage(options, batches(15, 5))]
        try:
            append_staged(options, 1, staged)
            died = False
        except Killed:
            died = True
    assert died
    own = [b"%d" % n for n in range(20)]
    if meanwhile:
        with contextlib.closing(open_writer(options.path, format=format)) as other:
            other.append(b"from another writer")
    # The replay stages the same rows again, cut in another way.
    append_staged(options, 1, [stage(options, batches(6, 14))])
    found = payloads(tmp_path / "out")
    assert [payload for payload in found if payload != b"from another writer"] == own
    append_staged(options, 2, [stage(options, batches(20, 2))])
    append_staged(options, 2, [stage(options, batches(20, 2))])
    assert [p for p in payloads(tmp_path / "out") if p != b"from another writer"] == [b"%d" % n for n in range(22)]


def test_a_batch_that_was_never_finished_is_not_stepped_over(
    options: SinkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(logsink, "_append", die)
        with pytest.raises(Killed):
            append_staged(options, 3, [stage(options, batches(0, 3))])
    with pytest.raises(ConflictError, match="batch 3 of test was never finished"):
        append_staged(options, 4, [stage(options, batches(3, 3))])
    assert read_intent(sidecar_of(PosixDisk(), options.path), "test").done is False  # type: ignore[union-attr]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("last", [0, 3])
def test_a_log_whose_backup_came_back_and_went_on_is_refused(tmp_path: Path, format: str, last: int) -> None:
    here, kept = tmp_path / "here", tmp_path / "kept"
    options = SinkOptions(path=str(here / "out"), app="test", format=format)
    here.mkdir()
    rows = [batch.drop_columns(["kind"]) for batch in batches(0, 28)]
    append_staged(options, 0, [stage(options, iter(rows[:1]))])
    shutil.copytree(here, kept)
    append_staged(options, 1, [stage(options, iter(rows[1:4]))])
    append_staged(options, 2, [stage(options, iter(rows[4 : 4 + last]))])  # a batch may have no record
    with contextlib.closing(open_writer(str(kept / "out"), format=format)) as other:
        other.append_many([b"%030d" % n for n in range(100)])
    for file in kept.rglob("*"):  # only the data comes back: which batches are done is not forgotten
        if file.is_file() and "spark-test" not in file.name:
            shutil.copy2(file, here / file.relative_to(kept))
    with pytest.raises(ReplacedError, match="use another appId"):
        append_staged(options, 3, [stage(options, iter(rows[:1]))])
    assert len(payloads(here / "out")) == 104


def test_two_applications_write_to_one_log_without_disturbing_each_other(tmp_path: Path) -> None:
    one, two = (SinkOptions(path=str(tmp_path / "out"), app=name) for name in ("one", "two"))
    append_staged(one, 0, [stage(one, batches(0, 3))])
    append_staged(two, 0, [stage(two, batches(3, 3))])
    append_staged(one, 0, [stage(one, batches(0, 3))])
    assert payloads(tmp_path / "out") == [b"%d" % n for n in range(6)]


def test_a_log_that_has_a_writer_is_waited_for(options: SinkOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logsink, "LOCK_SECONDS", 0.1)
    with Writer.open(options.path), pytest.raises(LockedError):
        append_staged(options, 0, [stage(options, batches(0, 3))])
    append_staged(options, 0, [stage(options, batches(0, 3))])
    assert len(payloads(Path(options.path))) == 3


def test_a_batch_write_is_repeated_unless_it_has_an_id(tmp_path: Path) -> None:
    for _ in range(2):
        writer = PenstockSource({"path": str(tmp_path / "out")}).writer(SCHEMA, False)
        writer.commit([writer.write(batches(0, 3))])
    for _ in range(2):
        writer = PenstockSource({"path": str(tmp_path / "out"), "appId": "a", "batchId": "7"}).writer(SCHEMA, False)
        writer.commit([writer.write(batches(3, 3))])
    assert payloads(tmp_path / "out") == [b"0", b"1", b"2", b"0", b"1", b"2", b"3", b"4", b"5"]
    assert not [name for name in os.listdir(tmp_path) if "once" in name]


def test_rows_that_cannot_be_records_are_refused(tmp_path: Path) -> None:
    source = PenstockSource({"path": str(tmp_path / "out"), "appId": "a"})
    with pytest.raises(OptionsError, match="payload"):
        source.streamWriter(StructType().add("text", StringType()), False)
    with pytest.raises(OptionsError, match="no column colour"):
        source.streamWriter(StructType().add("payload", StringType()).add("colour", StringType()), False)
    with pytest.raises(OptionsError, match="never overwritten"):
        source.writer(SCHEMA, True)
    with pytest.raises(OptionsError, match="null"):
        records_of(pa.RecordBatch.from_pydict({"payload": pa.array([None], pa.binary())}), 0)
    with pytest.raises(OptionsError, match="kind"):
        records_of(pa.RecordBatch.from_pydict({"payload": [b"x"], "kind": [70_000]}), 0)
    with pytest.raises(UnsupportedError, match="1 tasks"):
        source.streamWriter(SCHEMA, False).commit([None], 0)


def test_a_log_in_a_folder_that_is_not_there_is_refused_as_by_its_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "out")
    writer = PenstockSource({"path": path, "appId": "a"}).streamWriter(SCHEMA, False)
    with pytest.raises(NotFoundError) as refused:
        writer.write(batches(0, 3))
    with pytest.raises(NotFoundError) as said, Writer.open(path):
        pass
    assert str(refused.value) == str(said.value) == f"{path}: the folder does not exist"
    assert str(error_of(f"Traceback (most recent call last):\npenstock.errors.NotFoundError: {said.value}")) == str(
        said.value
    )


def test_a_stream_is_known_by_its_checkpoint_unless_it_has_a_name() -> None:
    one = SinkOptions.of({"path": "x", "checkpointLocation": "/c/1"})
    assert one.app == SinkOptions.of({"PATH": "x", "CHECKPOINTLOCATION": "/c/1"}).app
    assert one.app != SinkOptions.of({"path": "x", "checkpointLocation": "/c/2"}).app
    with pytest.raises(OptionsError, match="appId"):
        SinkOptions.of({"path": "x", "appId": "a/b"})
    with pytest.raises(OptionsError, match="needs an appId"):
        PenstockSource({"path": "x"}).streamWriter(SCHEMA, False)


@pytest.mark.parametrize(("kind", "timestamp_ns"), [(6, 2), (2, 5_000_000)])
def test_a_record_of_another_writer_is_not_taken_for_an_own_one(
    tmp_path: Path, options: SinkOptions, monkeypatch: pytest.MonkeyPatch, kind: int, timestamp_ns: int
) -> None:
    def append_two(_: SinkOptions, writer: Any, intent: Any) -> int:
        writer.append_many([b"0", b"1"], kind=[0, 1], timestamp_ns=[0, 1])
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(logsink, "_append", append_two)
        with pytest.raises(Killed):
            append_staged(options, 0, [stage(options, batches(0, 4))])
    with Writer.open(options.path) as other:  # the payload is that of the next staged record
        other.append(b"2", kind=kind, timestamp_ns=timestamp_ns)
    assert append_staged(options, 0, [stage(options, batches(0, 4))]) == 2
    assert payloads(tmp_path / "out") == [b"0", b"1", b"2", b"2", b"3"]


def test_envelopes_go_through_the_sink_and_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        {"key": b"devices/7", "op": 0, "event_time_ns": 5, "flags": 3, "headers": b"", "payload": b"on"},
        {"key": b"devices/8", "op": 1, "event_time_ns": 0, "flags": 0, "headers": b"\1\0a\2\0\0\0hi", "payload": b""},
        {"key": None, "op": None, "event_time_ns": None, "flags": None, "headers": None, "payload": b"x"},
    ]
    types = [pa.binary(), pa.int32(), pa.int64(), pa.int32(), pa.binary(), pa.binary()]
    schema = pa.schema(list(zip(rows[0], types, strict=True)))
    batch = pa.RecordBatch.from_pylist(rows, schema)
    options = SinkOptions(path=str(tmp_path / "out"), app="test", content=CONTENT)
    append_staged(options, 0, [stage(options, iter([batch]))])
    with open_log(options.path) as log:
        opened = open_envelopes(log.read(log.first_position))
    assert [bytes(record.extra["key"]) for record in opened] == [b"devices/7", b"devices/8", b""]  # type: ignore[index]
    assert opened.to_payloads() == [b"on", b"", b"x"]
    assert [opened.extra[name].tolist() for name in ("op", "flags", "event_time_ns")] == [
        [0, 1, 0],
        [3, 0, 0],
        [5, 0, 0],
    ]  # type: ignore[union-attr]
    assert decode_envelope(log_record(options.path, 1)).headers == {"a": b"hi"}
    with pytest.raises(OptionsError, match="its content is envelope/1, not raw"):
        append_staged(SinkOptions(path=options.path, app="other"), 0, [])
    maps = pa.array([[("a", b"hi"), ("b", b"")], [], None], pa.map_(pa.string(), pa.binary()))
    batch = batch.set_column(4, "headers", maps)
    append_staged(options, 1, [stage(options, iter([batch]))])
    assert [decode_envelope(log_record(options.path, n)).headers for n in (3, 4, 5)] == [{"a": b"hi", "b": b""}, {}, {}]
    nulls = pa.array([[("a", None)], [], []], pa.map_(pa.string(), pa.binary()))
    with pytest.raises(OptionsError, match="a header is null"):
        stage(options, iter([batch.set_column(4, "headers", nulls)]))


@pytest.mark.parametrize("format", ["filechannel", "messagelog"])
def test_a_new_log_of_any_format_takes_a_batch_once_and_refuses_kinds_before_it_begins(
    tmp_path: Path, format: str
) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test", format=format)
    with pytest.raises(OptionsError, match="no room for kinds"):
        append_staged(options, 0, [stage(options, batches(0, 5))])
    plain = [batch.drop_columns(["kind"]) for batch in batches(0, 5)]
    for _ in range(3):
        append_staged(options, 0, [stage(options, iter(plain))])
    assert payloads(tmp_path / "out") == [b"%d" % n for n in range(5)]
    assert [name for name in os.listdir(tmp_path) if name != "out"] == []


def test_a_key_is_never_dropped_in_silence() -> None:
    batch = pa.RecordBatch.from_pydict({"payload": [b"a", b"b"], "key": pa.array([None, b"k"], pa.binary())})
    with pytest.raises(OptionsError, match="a raw record has no key"):
        records_of(batch, 0)
    assert len(records_of(batch[:1], 0)) == 1


@pytest.mark.parametrize("said", ["2600-01-01", "9999-12-31", "1969-12-31"])
def test_a_time_that_no_record_can_have_is_refused_by_name(said: str) -> None:
    when = datetime.fromisoformat(said)
    times = pa.array([None, datetime(2262, 4, 11, tzinfo=UTC), when.replace(tzinfo=UTC)], pa.timestamp("us", "UTC"))
    batch = pa.RecordBatch.from_pydict({"payload": [b"a", b"b", b"c"], "timestamp": times})
    with pytest.raises(OptionsError, match=f"timestamp {said}.*from 1970-01-01 to 2262-04-11"):
        records_of(batch, 7)
    kept = records_of(batch[:2], 7).column("timestamp_ns").to_pylist()
    assert kept == [7, 9_223_286_400 * 10**9]
    numbers = pa.RecordBatch.from_pydict({"payload": [b"a"], "timestamp_ns": pa.array([-1], pa.int64())})
    with pytest.raises(OptionsError, match="timestamp_ns 1969-12-31"):
        records_of(numbers, 7)


def log_record(path: str, index: int) -> bytes:
    with open_log(path) as log:
        return log.read(log.first_position).to_payloads()[index]


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
def test_payloads_of_eight_megabytes_go_into_a_log_of_each_format(tmp_path: Path, format: str) -> None:
    values = [b"x" * (8 << 20), b"small"]
    large = pa.RecordBatch.from_pydict({"payload": pa.array(values, pa.binary())})
    given = {"path": str(tmp_path / "out"), "appId": "test", "logFormat": format}
    options = SinkOptions.of({**given, "maxMessageBytes": "8m"})
    append_staged(options, 0, [stage(options, iter([large]))])
    assert [len(payload) for payload in payloads(tmp_path / "out")] == [8 << 20, 5]
    keyed = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "payload": pa.array(values, pa.binary())})
    enveloped = {**given, "path": str(tmp_path / "keyed"), "content": "envelope/1", "maxMessageBytes": "8m"}
    options = SinkOptions.of(enveloped)
    append_staged(options, 0, [stage(options, iter([keyed]))])
    assert [len(decode_envelope(record).payload) for record in payloads(tmp_path / "keyed")] == [8 << 20, 5]
    if format == "filechannel":
        return  # whose frames take it anyway
    options = SinkOptions.of({**given, "path": str(tmp_path / "default")})
    with pytest.raises(OptionsError, match="set maxMessageBytes for"):  # before anything is appended
        append_staged(options, 0, [stage(options, iter([large]))])
    assert payloads(tmp_path / "default") == []
