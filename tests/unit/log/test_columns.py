"""Promise: whatever a caller has many of becomes the same columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.batch import Batch
from penstock.errors import OptionsError
from penstock.log import open_log
from penstock.log.columns import columns_of
from penstock.log.detect import open_writer
from penstock.log.xchannel import Writer

VALUES = [b"one", b"", b"three", b"x" * 100]


def payloads(columns: Any) -> list[bytes]:
    data = bytes(columns.data)
    return [data[o : o + n] for o, n in zip(columns.offsets.tolist(), columns.lengths.tolist(), strict=True)]


@pytest.mark.parametrize(
    "many",
    [
        VALUES,
        tuple(VALUES),
        [bytearray(value) for value in VALUES],
        [memoryview(value) for value in VALUES],
        Batch.of(VALUES),
        Batch.of([b"before", *VALUES])[1:],
        pa.array(VALUES, pa.binary()),
        pa.array(VALUES, pa.large_binary()),
        pa.array(VALUES, pa.binary_view()),
        pa.array([value.decode() for value in VALUES]),
        pa.array([value.decode() for value in VALUES], pa.large_string()),
        pa.array([value.decode() for value in VALUES], pa.string_view()),
        pa.array([b"before", *VALUES, b"after"], pa.binary())[1:5],
        pa.chunked_array([pa.array(VALUES[:2], pa.binary()), pa.array(VALUES[2:], pa.binary())]),
        pa.chunked_array([pa.array(VALUES, pa.binary())]),
    ],
    ids=lambda many: type(many).__name__,
)
def test_every_form_gives_the_same_payloads(many: Any) -> None:
    assert payloads(columns_of(many)) == VALUES


def test_a_generator_is_read_once() -> None:
    assert payloads(columns_of(value for value in VALUES)) == VALUES


def test_fixed_size_binary_is_bytes_too() -> None:
    assert payloads(columns_of(pa.array([b"ab", b"cd"], pa.binary(2)))) == [b"ab", b"cd"]


@pytest.mark.parametrize(
    "many", [[], Batch.of([]), pa.array([], pa.binary()), pa.chunked_array([], pa.binary()), pa.array([], pa.string())]
)
def test_nothing_is_fine(many: Any) -> None:
    assert payloads(columns_of(many)) == []


@pytest.mark.parametrize(
    ("many", "reason"),
    [(pa.array([b"a", None]), "cannot be null"), (pa.array([1, 2]), "an Arrow array of int64 has no bytes")],
)
def test_what_has_no_bytes_is_refused(many: Any, reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        columns_of(many)


def test_one_kind_and_time_serve_all_or_there_is_one_for_each() -> None:
    columns = columns_of(VALUES, kind=7, timestamp_ns=2**64 - 1)
    assert (columns.kinds.tolist(), columns.timestamps.tolist()) == ([7], [2**64 - 1])
    columns = columns_of(VALUES, kind=[1, 2, 3, 4], timestamp_ns=np.arange(4))
    assert (columns.kinds.tolist(), columns.timestamps.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])
    assert columns_of(VALUES).timestamps[0] > 1_700_000_000_000_000_000  # now
    for arguments, reason in (
        ({"kind": [1, 2]}, "kind has 2 values for 4 records"),
        ({"timestamp_ns": [1] * 5}, "timestamp_ns has 5 values"),
        ({"kind": 65536}, "kind=65536: must be between 0 and 65535"),
        ({"kind": [0, 0, 0, -1]}, "kind=-1: must be between"),
        ({"timestamp_ns": -1}, "timestamp_ns=-1: must be between"),
    ):
        with pytest.raises(OptionsError, match=reason):
            columns_of(VALUES, **arguments)  # type: ignore[arg-type]


def test_a_batch_brings_its_own_unless_they_are_given() -> None:
    batch = Batch.of([b"a", b"b"], kinds=[3, 4], timestamps=[5, 6])
    columns = columns_of(batch)
    assert (columns.kinds.tolist(), columns.timestamps.tolist()) == ([3, 4], [5, 6])
    columns = columns_of(batch, kind=[9, 9], timestamp_ns=1)
    assert (columns.kinds.tolist(), columns.timestamps.tolist()) == ([9, 9], [1])


OBJECTS = np.array([1, 1.5], object)  # as a column of a DataFrame may be


@pytest.mark.parametrize("wrong", [1.5, [1.5, 2.0], np.array([1.0, 2.0]), float("nan"), ["5", "6"], "5", OBJECTS])
@pytest.mark.parametrize("name", ["kind", "timestamp_ns"])
def test_numbers_that_are_not_whole_are_refused(name: str, wrong: Any) -> None:
    """Seconds, as time.time() gives them, were taken for nanoseconds: the record was of 1970."""
    with pytest.raises(TypeError, match=f"{name}.*whole numbers"):
        columns_of([b"one", b"two"], **{name: wrong})


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_numpy_are_nanoseconds_whatever_their_unit_is(unit: str) -> None:
    times = np.array(["2026-01-02T03:04:05"], f"datetime64[{unit}]")
    assert columns_of([b"one"], timestamp_ns=times).timestamps.tolist() == [1_767_323_045_000_000_000]
    with pytest.raises(TypeError, match=r"kind.*whole numbers"):
        columns_of([b"one"], kind=times)


@pytest.mark.parametrize("wrong", ["2600-01-01", "NaT"])
def test_a_time_of_numpy_that_nanoseconds_cannot_hold_is_refused(wrong: str) -> None:
    with pytest.raises(OptionsError, match=r"timestamp_ns: .* nanoseconds"):
        columns_of([b"one"], timestamp_ns=np.array([wrong], "datetime64[s]"))


@pytest.mark.parametrize("format", ["xchannel", "messagelog"])
def test_a_time_that_is_not_whole_is_refused_one_at_a_time_and_in_batches(tmp_path: Path, format: str) -> None:
    with open_writer(tmp_path / "log", format=format) as writer:
        for wrong in (1795124686.5, "5"):
            with pytest.raises(TypeError):
                writer.append(b"x", timestamp_ns=wrong)
            with pytest.raises(TypeError):
                writer.append_many([b"x"], timestamp_ns=wrong)
        writer.append(b"whole", timestamp_ns=np.int64(7_000_000))
    with open_log(tmp_path / "log") as log:
        batch = log.read(log.first_position)
        assert (batch.to_payloads(), batch[0].timestamp_ns) == ([b"whole"], 7_000_000)


def test_a_kind_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "log") as writer:
        for append in (writer.append, lambda payload, kind: writer.append_many([payload], kind=kind)):
            with pytest.raises(TypeError):
                append(b"x", kind=1.9)
