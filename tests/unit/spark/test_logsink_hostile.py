"""The log sink when everything goes wrong: drivers that die twice, lost files, logs made again, names used twice."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

from penstock.disk import PosixDisk
from penstock.errors import ConflictError, CorruptionError, OptionsError
from penstock.log.detect import FORMATS, open_log, open_writer
from penstock.log.envelope import CONTENT, decode_envelope
from penstock.log.filechannel import FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Writer
from penstock.spark.sink import log as logsink
from penstock.spark.sink.log import SinkOptions, append_staged, read_intent, stage
from penstock.spark.sink.records import check_schema, records_of
from penstock.spark.source.table import PenstockSource
from penstock.testing.log_conformance import contents

SCHEMA = StructType().add("key", BinaryType()).add("payload", BinaryType()).add("timestamp_ns", LongType())
OTHER = b"from another writer"


class Killed(BaseException):
    """Stands for kill -9: no handler runs."""


def batches(first: int, count: int, content: str = "raw") -> Iterator[pa.RecordBatch]:
    for at in range(first, first + count, 4):
        numbers = range(at, min(at + 4, first + count))
        columns = {"payload": [b"%d" % n for n in numbers], "timestamp_ns": list(numbers)}
        if content == CONTENT:
            columns["key"] = [b"k%d" % (n % 3) for n in numbers]
        yield pa.RecordBatch.from_pydict(columns)


def own(options: SinkOptions) -> list[bytes]:
    """Return the payloads that came through the sink."""
    with open_log(options.path) as log:
        found = [payload for payload in contents(log) if not payload.endswith(OTHER)]
    return [decode_envelope(payload).payload for payload in found] if options.content == CONTENT else found


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


def dying_at(patch: pytest.MonkeyPatch, moment: int, error: type[BaseException] = Killed) -> None:
    """Let the driver die at one of its steps."""
    steps = itertools.count()

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            if next(steps) == moment:
                raise error
            return function(*args, **words)

        return call

    for name in ("write_intent", "_end_of", "clear_staged"):
        patch.setattr(logsink, name, dying(getattr(logsink, name)))
    for writer in (Writer, FileChannel, MessageLog):
        patch.setattr(writer, "append_many", dying(writer.append_many))


def someone_else_writes(options: SinkOptions) -> None:
    record = OTHER
    if options.content == CONTENT:
        record = bytes(records_of(next(batches(0, 1, CONTENT)), 0, CONTENT).column("payload")[0].as_py()) + OTHER
    with contextlib.closing(open_writer(options.path, format=options.format, content=options.content)) as other:
        other.append(record)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("content", ["raw", CONTENT])
def test_a_driver_that_dies_again_and_again_beside_another_writer_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, content: str
) -> None:
    for first, second in itertools.product(range(2, 5), repeat=2):
        options = SinkOptions(path=str(tmp_path / f"{first}-{second}"), app="test", format=format, content=content)
        for moment in (first, second):
            with monkeypatch.context() as patch:
                dying_at(patch, moment)
                staged = [stage(options, batches(0, 6, content)), stage(options, batches(6, 6, content))]
                with contextlib.suppress(Killed):
                    append_staged(options, 0, staged)
            someone_else_writes(options)
        append_staged(options, 0, [stage(options, batches(0, 12, content))])
        assert own(options) == numbers(12), (first, second)
    assert not [name for name in os.listdir(tmp_path) if "staged" in name]


@pytest.mark.parametrize("moment", range(1, 6))
def test_a_commit_that_fails_and_is_aborted_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    options = {"path": str(tmp_path / "out"), "appId": "test", "batchId": "7"}
    with monkeypatch.context() as patch:
        writer = PenstockSource(options).writer(SCHEMA, False)
        staged = [writer.write(batches(0, 6)), writer.write(batches(6, 6))]
        dying_at(patch, moment, OSError)  # the disk is full
        with contextlib.suppress(OSError):
            writer.commit(staged)
    writer.abort([None, None])  # Spark does so, and tells nothing of what was staged
    again = PenstockSource(options).writer(SCHEMA, False)
    again.write(batches(0, 12))
    again.abort([None])  # a task of the second attempt failed
    last = PenstockSource(options).writer(SCHEMA, False)
    last.commit([last.write(batches(0, 12))])
    assert own(SinkOptions(path=options["path"], app="test")) == numbers(12)
    assert not [name for name in os.listdir(tmp_path) if "staged" in name]


def test_an_abort_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = PenstockSource({"path": str(tmp_path / "out"), "appId": "test"}).streamWriter(SCHEMA, False)
    stream.write(batches(0, 6))
    stream.abort([None], 0)
    once = PenstockSource({"path": str(tmp_path / "out")}).writer(SCHEMA, False)
    staged = [once.write(batches(0, 6))]
    with monkeypatch.context() as patch:
        dying_at(patch, 2, OSError)
        with pytest.raises(OSError):
            once.commit(staged)
    once.abort([None])
    assert not [name for name in os.listdir(tmp_path) if "staged" in name or "once" in name]


@pytest.mark.parametrize("format", FORMATS)
def test_what_killed_batch_writes_have_left_is_removed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    options = {"path": str(tmp_path / "out"), "logFormat": format}
    killed = PenstockSource(options).writer(SCHEMA, False)
    staged = [killed.write(batches(0, 6))]
    with monkeypatch.context() as patch:
        dying_at(patch, 2)
        with pytest.raises(Killed):
            killed.commit(staged)
    running = PenstockSource(options).writer(SCHEMA, False)
    staged = [running.write(batches(0, 6))]
    old = tmp_path / f"out.penstock-staged-{killed.options.app}"
    os.utime(old, (0, 0))
    other = PenstockSource(options).writer(SCHEMA, False)
    other.commit([other.write(batches(0, 3))])
    left = [path.name for path in tmp_path.rglob("*") if "once-" in path.name and path.name[-6:] != ".arrow"]
    assert left == [f"out.penstock-staged-{running.options.app}"]  # it may still be running
    running.commit(staged)
    assert not [path.name for path in tmp_path.rglob("*") if "once-" in path.name]


def test_queries_that_write_to_one_log_at_once_lose_and_repeat_nothing(tmp_path: Path) -> None:
    def write(app: str) -> None:
        options = SinkOptions(path=str(tmp_path / "out"), app=app)
        for batch in range(5):
            for _ in range(2):
                rows = pa.RecordBatch.from_pydict({"payload": [f"{app}.{batch}.{n}" for n in range(50)]})
                append_staged(options, batch, [stage(options, iter([rows]))], query=app)

    apps = ("a", "b", "c")
    with ThreadPoolExecutor(len(apps)) as pool:
        for done in [pool.submit(write, app) for app in apps]:
            done.result()
    found = own(SinkOptions(path=str(tmp_path / "out"), app="a"))
    for app in apps:
        mine = [payload for payload in found if payload.startswith(app.encode())]
        assert mine == [b"%s.%d.%d" % (app.encode(), batch, n) for batch in range(5) for n in range(50)]


def test_a_log_that_another_query_makes_while_it_is_looked_for_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test")

    def too_early(path: str) -> str:
        Writer.open(path).close()
        monkeypatch.undo()
        raise OptionsError(f"{path}: not a log yet")

    monkeypatch.setattr("penstock.spark.sink.log.detect", too_early)
    append_staged(options, 0, [stage(options, batches(0, 3))])
    assert own(options) == numbers(3)


@pytest.mark.parametrize("format", FORMATS)
def test_a_log_that_was_made_again_takes_its_batches_again(tmp_path: Path, format: str) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test", format=format)
    append_staged(options, 5, [stage(options, batches(0, 9))])
    if format == "xchannel":
        os.remove(options.path)  # what lies beside it is easily forgotten
    else:
        shutil.rmtree(options.path)
    for _ in range(2):
        append_staged(options, 0, [stage(options, batches(0, 3))])
    assert own(options) == numbers(3)


def test_a_foreign_log_that_was_made_again_is_told_by_its_end(tmp_path: Path) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test")
    for batch, count in ((5, 9), (0, 3)):
        with Writer.open(options.path) as writer:
            writer.append_many([OTHER] * count)
        os.remove(tmp_path / "out.penstock-id")  # as the original implementation leaves it
        for _ in range(2):
            append_staged(options, batch, [stage(options, batches(0, count))])
        assert own(options) == numbers(count)
        os.remove(options.path)


def stream_at(folder: Path, checkpoint: str, query: str) -> Any:
    """Return the writer of a stream whose checkpoint is there, as Spark makes it before the first batch."""
    (folder / checkpoint).mkdir(exist_ok=True)
    (folder / checkpoint / "metadata").write_text(f'{{"id":"{query}"}}')
    options = {"path": str(folder / "out"), "appId": "test", "checkpointLocation": str(folder / checkpoint)}
    return PenstockSource(options).streamWriter(SCHEMA, False)


def test_two_queries_of_one_name_do_not_swallow_each_others_batches(tmp_path: Path) -> None:
    one = stream_at(tmp_path, "one", "0a")
    one.commit([one.write(batches(0, 3))], 0)
    two = stream_at(tmp_path, "two", "0b")
    with pytest.raises(ConflictError, match="of another query"):
        two.commit([two.write(batches(3, 3))], 0)
    again = stream_at(tmp_path, "one", "0c")  # the checkpoint of the first was removed
    with pytest.raises(ConflictError, match="its checkpoint was made again"):
        again.commit([again.write(batches(0, 6))], 0)
    one = stream_at(tmp_path, "one", "0a")
    one.commit([one.write(batches(0, 3))], 0)
    one.commit([one.write(batches(3, 3))], 1)
    assert own(SinkOptions(path=str(tmp_path / "out"), app="test")) == numbers(6)


def test_a_stream_whose_log_is_gone_does_not_go_on_in_the_middle(tmp_path: Path) -> None:
    writer = stream_at(tmp_path, "one", "0a")
    for batch in range(3):
        writer.commit([writer.write(batches(3 * batch, 3))], batch)
    os.remove(tmp_path / "out")
    with pytest.raises(ConflictError, match="batch 3 of test is here, but not batch 0"):
        writer.commit([writer.write(batches(9, 3))], 3)


@pytest.mark.parametrize(
    ("harm", "begun"), [*itertools.product(("missing", "short", "foreign"), (False, True)), ("fewer", False)]
)
def test_a_staged_file_that_is_not_what_was_staged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str, begun: bool
) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test")
    staged = [stage(options, batches(0, 8)), stage(options, batches(8, 8))]
    if begun:
        with monkeypatch.context() as patch:
            dying_at(patch, 3)
            with pytest.raises(Killed):
                append_staged(options, 0, staged)
    path = tmp_path / "out.penstock-staged-test" / staged[1].file
    match harm:
        case "missing":
            path.unlink()
        case "short":
            os.truncate(path, path.stat().st_size // 2)
        case "fewer":
            shutil.copy(path.with_name(stage(options, batches(8, 4)).file), path)
        case "foreign":
            with pa.ipc.new_file(str(path), pa.schema([("n", pa.int64())])):
                pass
    with pytest.raises(CorruptionError, match=staged[1].file):
        append_staged(options, 0, staged)
    if not begun:  # nothing was noted: the batch can be staged again
        append_staged(options, 0, [stage(options, batches(0, 16))])
        assert own(options) == numbers(16)


def test_the_position_an_intent_names_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SinkOptions(path=str(tmp_path / "out"), app="test")
    someone_else_writes(options)
    with monkeypatch.context() as patch:
        dying_at(patch, 2)
        with pytest.raises(Killed):
            append_staged(options, 0, [stage(options, batches(0, 8))])
    intent = read_intent(sidecar_of(PosixDisk(), options.path), "test")
    assert intent is not None
    assert sidecar_of(PosixDisk(), options.path).durable_position() == intent.start


def test_a_stream_is_known_by_its_checkpoint_however_that_is_written(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoint")
    known = {
        SinkOptions.of({"path": "x", "checkpointLocation": written}).app
        for written in (place, place + "/", "file:" + place, "file://" + place, os.path.relpath(place))
    }
    assert len(known) == 1


def test_numbers_that_an_envelope_has_no_room_for_are_refused() -> None:
    for column, value in (("op", 256), ("op", -1), ("op", 3), ("flags", 65_536), ("flags", -1)):
        batch = pa.RecordBatch.from_pydict({"key": [b"k"], "payload": [b"v"], column: [value]})
        with pytest.raises(OptionsError, match=f"{column} must be between"):
            records_of(batch, 0, CONTENT)
    late = pa.RecordBatch.from_pydict({"key": [b"k"], "payload": [b"v"], "event_time_ns": [-1]})  # the bits as read
    (record,) = records_of(late, 0, CONTENT).column("payload").to_pylist()
    assert decode_envelope(record).event_time_ns == 2**64 - 1


@pytest.mark.parametrize(
    ("column", "kind"), [("key", IntegerType()), ("op", StringType()), ("headers", LongType()), ("flags", BinaryType())]
)
def test_columns_of_another_type_than_an_envelope_has_are_refused_before_anything_is_written(
    column: str, kind: Any
) -> None:
    types = {"key": BinaryType(), "payload": BinaryType(), column: kind}
    schema = StructType()
    for name, found in types.items():
        schema = schema.add(name, found)
    with pytest.raises(OptionsError, match=f"column {column} must be"):
        check_schema(schema, CONTENT)
