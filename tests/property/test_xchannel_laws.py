"""Laws of a channel: what goes in comes out, and a power cut leaves a prefix that holds all that was durable."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from penstock.batch import Batch
from penstock.disk import PosixDisk
from penstock.log.xchannel import Reader, Writer, XChannelLog, ahead
from penstock.testing.faulty import FaultyDisk

LAW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

payloads = st.one_of(
    st.binary(max_size=50),
    st.integers(0, 3900).map(lambda n: bytes([n % 251]) * n),
)
steps = st.one_of(
    st.tuples(st.just("append"), payloads),
    st.tuples(st.just("list"), st.lists(payloads, max_size=20)),
    st.tuples(st.just("columns"), st.lists(payloads, max_size=20)),
    st.tuples(st.just("reserve"), payloads),
    st.tuples(st.just("roll"), st.just(b"")),
    st.tuples(st.just("sync"), st.just(b"")),
)
layouts = st.tuples(st.sampled_from([4096, 8192]), st.sampled_from([0, 8192, 10_000, 20_480]))


@pytest.fixture(autouse=True, params=[False, True], ids=["", "files made ready"])
def made_ready(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold every law for files this small with and without their being made ready."""
    before = ahead.SMALLEST
    ahead.SMALLEST = 1 if request.param else before  # type: ignore[misc]
    yield
    ahead.SMALLEST = before  # type: ignore[misc]


@contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield name


def perform(writer: Writer, step: tuple[str, Any]) -> list[tuple[int, bytes]]:
    """Do one step and return (position, payload) of what it appended."""
    what, value = step
    match what:
        case "append":
            return [(writer.append(value), value)]
        case "list":
            return list(zip(writer.append_many(value).tolist(), value, strict=True))
        case "columns":
            return list(zip(writer.append_many(Batch.of(value)).tolist(), value, strict=True))
        case "reserve":
            view = writer.reserve(min(len(value) + 5, writer.largest_message))
            view[: len(value)] = value
            return [(writer.commit(len(value)), value)]
        case "roll":
            writer.roll()
        case "sync":
            writer.sync()
    return []


def contents(path: str, **options: Any) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    with Reader.open(path, **options) as reader:
        while len(batch := reader.read_batch(13)):
            found += zip(batch.positions.tolist(), batch.to_payloads(), strict=True)
    return found


@LAW
@given(layouts, st.lists(steps, max_size=12))
def test_what_goes_in_comes_out(layout: tuple[int, int], history: list[tuple[str, Any]]) -> None:
    with folder() as name:
        path = name + "/chan"
        written: list[tuple[int, bytes]] = []
        with Writer.open(path, region_bytes=layout[0], roll_bytes=layout[1]) as writer:
            for step in history:
                written += perform(writer, step)
        assert contents(path) == written
        with XChannelLog(path) as log:
            assert list(log.verify()) == []
        with Reader.open(path) as reader:
            assert [(r.position, bytes(r.payload)) for r in reader.records(timeout=0)] == written
            for position, payload in written[:: max(1, len(written) // 5)]:
                reader.seek(position)
                record = reader.try_read()
                assert record is not None
                assert bytes(record.payload) == payload


@LAW
@given(
    st.lists(payloads, min_size=1, max_size=30),
    st.integers(0, 65535),
    st.integers(0, 2**64 - 1),
    layouts,
)
def test_many_at_once_write_the_bytes_of_one_by_one(
    values: list[bytes], kind: int, time: int, layout: tuple[int, int]
) -> None:
    with folder() as name:
        written = []
        for how in ("one", "list", "columns"):
            path = f"{name}/{how}"
            with Writer.open(path, region_bytes=layout[0]) as writer:
                if how == "one":
                    for value in values:
                        writer.append(value, kind=kind, timestamp_ns=time)
                elif how == "list":
                    writer.append_many(values, kind=kind, timestamp_ns=time)
                else:
                    times = np.full(len(values), time, np.uint64)
                    writer.append_many(Batch.of(values), kind=kind, timestamp_ns=times)
            written.append(Path(path).read_bytes())
        assert written[0] == written[1] == written[2]


def durable_after_a_cut(
    name: str, sync: Any, layout: tuple[int, int], history: list[tuple[str, Any]], seed: int, keep: float
) -> None:
    disk = FaultyDisk(PosixDisk())
    path = name + "/chan"
    writer = Writer.open(path, region_bytes=layout[0], roll_bytes=layout[1], sync=sync, disk=disk)
    writer.sync()
    written: list[tuple[int, bytes]] = []
    for step in history:
        written += perform(writer, step)
    promised = writer.durable_position
    assert promised is not None
    if sync == "always":
        assert not written or written[-1][0] < promised
    expected = [record for record in written if record[0] < promised]

    disk.cut_power(seed=seed, keep=keep)
    writer.forked()  # what a process that lost its machine leaves: nothing is written any more

    assert contents(path, disk=disk) == expected  # a reader trusts the mark, with no writer to clean up
    again = Writer.open(path, sync=sync, disk=disk)
    found = contents(path, disk=disk)
    assert found == expected
    after = (again.append(b"after the cut"), b"after the cut")
    assert contents(path, disk=disk) == [*expected, after]
    with XChannelLog(path, disk) as log:
        assert list(log.verify()) == []
    again.sync()
    again.close()

    disk.cut_power(seed=seed + 1, keep=keep)  # twice in a row
    Writer.open(path, sync=sync, disk=disk).close()
    assert contents(path, disk=disk) == [*expected, after]


@LAW
@given(layouts, st.lists(steps, max_size=8), st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_what_was_synced_by_hand_survives_a_power_cut(
    layout: tuple[int, int], history: list[tuple[str, Any]], seed: int, keep: float
) -> None:
    with folder() as name:
        durable_after_a_cut(name, "none", layout, history, seed, keep)


@LAW
@given(layouts, st.lists(steps, max_size=5), st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]))
def test_what_an_append_returned_survives_a_power_cut(
    layout: tuple[int, int], history: list[tuple[str, Any]], seed: int, keep: float
) -> None:
    with folder() as name:
        durable_after_a_cut(name, "always", layout, history, seed, keep)


def test_what_was_not_durable_is_set_aside_and_not_lost(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    path = str(tmp_path / "chan")
    writer = Writer.open(path, region_bytes=4096, roll_bytes=8192, disk=disk)
    writer.append(b"kept")
    bound = writer.sync()
    writer.append(b"not yet durable")
    for _ in range(3):
        writer.append(b"x" * 3000)
    disk.cut_power(keep=1.0)
    writer.forked()
    Writer.open(path, disk=disk).close()
    aside = sorted(name.name for name in tmp_path.glob("*.bad"))
    assert aside == ["chan.penstock-cut-0-104.bad", "chan.penstock-cut-1-80.bad"]
    assert bound == 104
    assert b"not yet durable" in (tmp_path / aside[0]).read_bytes()
    assert b"x" * 3000 in (tmp_path / aside[1]).read_bytes()
    assert contents(path, disk=disk) == [(80, b"kept")]
