"""Plans: the same bounds give the same spans, and the spans hold every record once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.log.xchannel import Writer
from penstock.spark.source.filters import Filters
from penstock.spark.source.plan import (
    OPENING_BYTES,
    Advance,
    SourceChannel,
    Span,
    advance,
    find_channels,
    pack,
    plan_channel,
    plan_tasks,
)
from penstock.spark.source.reading import read_batches


@pytest.fixture
def ticks(tmp_path: Path) -> tuple[SourceChannel, list[int]]:
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=20_000) as writer:
        positions = [writer.append(b"x" * (number % 200), kind=number % 5) for number in range(900)]
    return find_channels([str(tmp_path)])[0], positions


def read(spans: object) -> list[int]:
    return [position for span in spans for batch in read_batches(span) for position in batch.positions.tolist()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("span_bytes", [1, 10_000, 1 << 30])
def test_spans_hold_every_record_once(ticks: tuple[SourceChannel, list[int]], span_bytes: int) -> None:
    channel, positions = ticks
    with channel.open() as log:
        spans = plan_channel(log, channel, log.first_position, log.next_position, span_bytes)
    assert read(spans) == positions


def test_a_position_filter_reads_little(ticks: tuple[SourceChannel, list[int]]) -> None:
    channel, positions = ticks
    wanted = positions[450:455]
    filters = Filters(low=wanted[0], high=wanted[-1])
    with channel.open() as log:
        spans = plan_channel(log, channel, log.first_position, log.next_position, 1 << 30, filters)
    assert set(wanted) <= set(read(spans))
    assert sum(span.bytes for span in spans) <= 3 * 4096


def test_filters_at_both_ends_of_the_log_leave_nothing_out(ticks: tuple[SourceChannel, list[int]]) -> None:
    channel, positions = ticks
    for low in (0, positions[0], positions[1], positions[-1], positions[-1] + 1):
        for high in (positions[0], positions[-2], positions[-1], 1 << 62):
            filters = Filters(low=low, high=high)
            with channel.open() as log:
                spans = plan_channel(log, channel, log.first_position, log.next_position, 9000, filters)
            found = [
                position
                for span in spans
                for batch in read_batches(span)
                for position in filters.apply(batch).positions.tolist()
            ]
            assert found == [position for position in positions if low <= position <= high]


def test_small_channels_share_a_task_and_large_ones_are_cut(tmp_path: Path) -> None:
    for number in range(50):
        with Writer.open(tmp_path / f"small{number:02}", region_bytes=4096) as writer:
            writer.append(b"x")
    with Writer.open(tmp_path / "large") as writer:
        writer.append_many([bytes(1 << 19)] * 100)
    bounds = []
    for channel in find_channels([str(tmp_path)]):
        with channel.open() as log:
            bounds.append((channel, log.first_position, log.next_position))
    tasks = plan_tasks(bounds, 16 << 20, 2)
    assert len(tasks) == 8  # 100 MB, and what opening 50 logs costs: four for each of two cores
    sizes = [sum(max(span.bytes, OPENING_BYTES) for span in task) for task in tasks]
    assert max(sizes) < 1.3 * (16 << 20)
    assert max(len(task) for task in tasks) >= 25
    assert len(read(span for task in tasks for span in task)) == 150


def test_many_tiny_channels_are_spread_over_the_tasks(tmp_path: Path) -> None:
    for number in range(60):
        with Writer.open(tmp_path / f"tiny{number:02}", region_bytes=4096) as writer:
            writer.append(b"x")
    bounds = []
    for channel in find_channels([str(tmp_path)]):
        with channel.open() as log:
            bounds.append((channel, log.first_position, log.next_position))
    sizes = [len(task) for task in plan_tasks(bounds, 128 << 20, 2)]
    assert len(sizes) == 2
    assert min(sizes) >= 25
    assert [len(task) for task in plan_tasks(bounds[:8], 128 << 20, 2)] == [8]  # a task costs more than so few


def test_two_channels_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Writer.precreate(tmp_path / folder / "ticks")
    with pytest.raises(OptionsError, match="two channels are called ticks"):
        find_channels([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [channel.name for channel in find_channels([str(tmp_path)])] == ["a/ticks", "b/ticks"]


def test_a_log_that_is_reached_twice_is_refused_or_read_once(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    Writer.precreate(tmp_path / "site" / "ticks")
    with pytest.raises(OptionsError, match="read twice, as site/ticks and as ticks"):
        find_channels([str(tmp_path), str(tmp_path / "site")])
    spelt = [str(tmp_path / "site" / "ticks"), f"{tmp_path}/site/../site/ticks"]
    assert [channel.name for channel in find_channels(spelt)] == ["ticks"]
    (tmp_path / "zlink").symlink_to("site")
    assert [channel.name for channel in find_channels([str(tmp_path)])] == ["site/ticks"]  # a folder is entered once


def test_a_name_that_spark_cannot_hold_is_named(tmp_path: Path) -> None:
    Writer.precreate(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(OptionsError, match="not UTF-8"):
        find_channels([str(tmp_path)])


def test_odd_names_are_names_like_others(tmp_path: Path) -> None:
    names = ["'q'", "-dash", "100%", "`b`", "a b", "a\nb", "st*r", "ticks.5", "x,y", "é"]
    for name in names:
        Writer.precreate(tmp_path / name)
    assert [channel.name for channel in find_channels([str(tmp_path)])] == sorted(names)


def test_a_log_recreated_after_planning_is_noticed(ticks: tuple[SourceChannel, list[int]], tmp_path: Path) -> None:
    channel, _ = ticks
    with channel.open() as log:
        spans = plan_channel(log, channel, log.first_position, log.next_position, 1 << 30)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(ReplacedError, match="gone"):
        read(spans)
    Writer.precreate(tmp_path / "ticks")
    with pytest.raises(ReplacedError, match="log id changed"):
        read(spans)


def test_advance_stops_at_its_limits_and_always_moves(ticks: tuple[SourceChannel, list[int]]) -> None:
    channel, positions = ticks
    with channel.open() as log:
        start, end = log.first_position, log.next_position

        def walk(*limits: Any) -> tuple[int, int]:
            done = advance(log, *limits)
            return done.position, done.records

        assert walk(start, end, 100, None) == (positions[100], 100)
        assert walk(start, end, None, None) == (end, 900)
        done = advance(log, start, end, None, 5000)
        assert done.bytes <= 5000
        assert done.position == positions[done.records]
        assert done.bytes + done.records % 200 > 5000  # one more would have been too many
        assert walk(positions[150], end, None, 1) == (positions[151], 1)
        assert advance(log, end, end, 10, 10) == Advance(end)
        assert walk(start, positions[7], 100, None) == (positions[7], 7)


def test_an_empty_plan_has_no_task() -> None:
    assert pack([], 100) == []


def test_a_file_that_retention_takes_while_it_is_read_is_an_expired_position(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=8192) as writer:
        writer.append_many([b"x" * 100] * 200)
    channel = find_channels([str(tmp_path)])[0]
    with channel.open() as log:
        spans = plan_channel(log, channel, log.first_position, log.next_position, 1)
    last = read(spans[-1:])
    (tmp_path / "ticks").unlink()  # the names were listed a moment ago
    with pytest.raises(ExpiredError):
        read(spans)
    left = [
        position
        for span in spans
        for batch in read_batches(span, fail_on_data_loss=False)
        for position in batch.positions.tolist()
    ]
    assert left[-len(last) :] == last
    assert len(left) < 200


def test_a_folder_with_a_table_in_it_and_no_channel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    assert find_channels([str(tmp_path / "later")]) == []  # channels may come
    for name, reason in (("_delta_log/0.json", "a table of the lake"), ("a.parquet", r"spark\.read\.parquet")):
        file = tmp_path / reason[:3] / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
        with pytest.raises(OptionsError, match=reason):
            find_channels([str(tmp_path / reason[:3])])
        with Writer.open(tmp_path / reason[:3] / "ticks") as writer:
            writer.append(b"x")
        assert [channel.name for channel in find_channels([str(tmp_path / reason[:3])])] == ["ticks"]


def test_tasks_of_less_than_a_record_are_planned_without_counting_them() -> None:
    channel = SourceChannel("ticks", "ticks", "xchannel", "")
    spans = [Span(channel, number, number + 1, 1 << 40) for number in range(3)]
    assert pack(spans, 1) == pack(spans, 1 << 40) == [(span,) for span in spans]
