"""Promise: the spans of a cut hold every record once, for every format, however the log goes on meanwhile."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import OptionsError
from penstock.log import open_log
from penstock.log.detect import FORMATS, detect, open_writer
from penstock.log.face import Cuttable, LogReader
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer

SIZES = [number * 37 % 3000 for number in range(2000)]  # about 3 MB
PAYLOADS = [bytes([number % 251]) * size for number, size in enumerate(SIZES)]

OPENERS: dict[str, Callable[[Path], Any]] = {
    "xchannel": lambda path: Writer.open(path, region_bytes=16384, roll_bytes=700_000),
    "xchannel one file": lambda path: Writer.open(path, region_bytes=16384),
    "filechannel": lambda path: FileChannel.open(
        path, ChannelOptions(segment_bytes=400_000, compression="none", collect=False)
    ),
    "filechannel compressed": lambda path: FileChannel.open(path, ChannelOptions(segment_bytes=400_000)),
    "filechannel one segment": FileChannel.open,
    "messagelog": lambda path: MessageLog.open(path, MessageLogOptions(segment_bytes=400_000)),
    "messagelog one segment": MessageLog.open,
}


def positions_between(path: str, low: int, high: int) -> list[int]:
    found: list[int] = []
    with open_log(path) as log:
        while low < high:
            batch = log.read(low, 7)
            found += [position for position in batch.positions.tolist() if position < high]
            low = batch.next_position
    return found


def cuts_of(log: LogReader, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
    assert isinstance(log, Cuttable)
    return log.cut(start, end, span_bytes)


@pytest.mark.parametrize("kind", OPENERS)
@pytest.mark.parametrize("span_bytes", [1, 100_000, 1_000_000, 1 << 30])
def test_the_spans_hold_every_record_once(tmp_path: Path, kind: str, span_bytes: int) -> None:
    path = str(tmp_path / "log")
    with OPENERS[kind](Path(path)) as writer:
        positions = writer.append_many(PAYLOADS).tolist()
        with open_log(path) as log:
            start, end = positions[3], log.next_position
            spans = cuts_of(log, start, end, span_bytes)
            writer.append_many([b"later" * 100] * 3000)
            if hasattr(writer, "compact"):
                writer.compact()
            again = cuts_of(log, start, end, span_bytes)
            assert cuts_of(log, end, end, span_bytes) == []
    if kind != "filechannel compressed":  # compressed meanwhile: cut elsewhere
        assert [begin for begin, _ in spans] == [begin for begin, _ in again]
    for found in (spans, again):
        begins = [begin for begin, _ in found]
        assert begins[0] == start
        assert begins == sorted(set(begins))
        assert begins[-1] < end
        read = [positions_between(path, low, high) for low, high in zip(begins, [*begins[1:], end], strict=True)]
        assert functools.reduce(operator.iadd, read, []) == positions[3:]
        assert 2_500_000 < sum(size for _, size in found) < 3_600_000
    if span_bytes == 1 << 30:
        assert len(spans) == 1


@pytest.mark.parametrize("kind", OPENERS)
def test_spans_are_about_as_long_as_asked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    with OPENERS[kind](path) as writer:
        writer.append_many(PAYLOADS)
    with open_log(str(path)) as log:
        spans = cuts_of(log, log.first_position, log.next_position, 600_000)
        assert 4 <= len(spans) <= 11
        assert all(250_000 < size < 1_000_000 for _, size in spans[:-1])


def test_a_long_message_is_hopped_over(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with FileChannel.open(path) as channel:
        positions = channel.append_many([b"a" * 10, b"b" * (9 << 20), b"c" * (1 << 20), b"d" * 10]).tolist()
    with open_log(path) as log:
        spans = cuts_of(log, 0, log.next_position, 1 << 20)
    assert [begin for begin, _ in spans] == [0, positions[2]]


def test_a_segment_that_ends_in_the_middle_of_a_frame_is_cut_no_further(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with FileChannel.open(path) as channel:
        channel.append_many([b"x" * 10_000] * 100)
    with open_log(str(path)) as log:
        end = log.next_position
        with open(path / "segment.0", "r+b") as file:
            file.truncate(500_000)
        spans = cuts_of(log, 0, end, 100_000)
    assert len(spans) == 6
    assert spans[-1] == (500_400, end - 500_400)


def test_an_index_that_lies_leaves_no_entry_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with MessageLog.open(path, MessageLogOptions(segment_bytes=1_500_000)) as writer:
        positions = writer.append_many(PAYLOADS).tolist()
    for index in path.glob("*.idx"):
        lies = np.zeros(300, np.dtype([("relative", "<u4"), ("offset", "<u8")]))
        lies["relative"], lies["offset"] = np.arange(300) * 5, np.arange(300) * 70_000
        index.write_bytes(lies.tobytes())
    with open_log(str(path)) as log:
        begins = [begin for begin, _ in cuts_of(log, 1, log.next_position, 100_000)]
        end = log.next_position
    read = [positions_between(str(path), low, high) for low, high in zip(begins, [*begins[1:], end], strict=True)]
    assert functools.reduce(operator.iadd, read, []) == positions


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("content", ["raw", "envelope/1"])
def test_every_format_is_written_through_one_door(tmp_path: Path, format: str, content: str) -> None:
    path = str(tmp_path / "log")
    open_writer(path, format=format, content=content).close()
    assert detect(path) == format  # also before it has a record
    writer = open_writer(path, format=format, content=content)
    times = np.full(2, 7_000_000) if writer.has_times else None
    writer.append_many([b"one", b"two"], kind=np.zeros(2, np.int64), timestamp_ns=times)
    writer.sync()
    writer.close()
    with open_log(path) as log:
        assert log.read(log.first_position).to_payloads() == [b"one", b"two"]
        assert log.content == content  # type: ignore[attr-defined]
        assert log.format == format


@pytest.mark.parametrize("format", ["filechannel", "messagelog"])
def test_a_kind_that_a_format_cannot_keep_is_refused(tmp_path: Path, format: str) -> None:
    writer = open_writer(str(tmp_path / "log"), format=format)
    with pytest.raises(OptionsError, match="kind"):
        writer.append_many([b"one", b"two"], kind=np.array([0, 3]))
    writer.close()
