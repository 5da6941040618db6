"""Promise: the compiled kernel and its plain twin make the same records of the same runs, as ``log/envelope`` does."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock import kernel
from penstock.errors import CorruptionError, OptionsError
from penstock.kernel import mqtt, mqttcarry
from penstock.kernel.twin import mqtt as twin_mqtt, mqttcarry as twin
from penstock.log import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.xchannel import Writer

RUNS = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"a/b", b"\xc3\xa9/" + b"x" * 200]),
        st.lists(st.binary(max_size=200), min_size=1, max_size=5),
        st.integers(0, 2),
        st.sampled_from([b"", b"\x03\0qos\x01\0\0\x000"]),
        st.sampled_from([0, 1, (1 << 64) - 1]),
    ),
    max_size=5,
)


def carried(module: Any, makes: Any, runs: list[Any], lack: int = 0) -> Any:
    made = [makes.make_run(topic, payloads, qos, False) for topic, payloads, qos, _, _ in runs]
    count = sum(run.count for run in made) - lack
    if count < 0:
        return None
    offsets, lengths = np.zeros(count, np.int64), np.zeros(count, np.int64)
    heads, times = [run[3] for run in runs], [run[4] for run in runs]
    try:
        data = module.carry(made, heads, times, b"\x02\0id\x02\0\0\0", offsets, lengths)
    except ValueError as exc:
        return str(exc)
    return data, offsets.tolist(), lengths.tolist()


@given(RUNS, st.sampled_from([0, 0, 0, 1, -1]))
def test_both_make_the_same_records(runs: list[Any], lack: int) -> None:
    assert carried(mqttcarry, mqtt, runs, lack) == carried(twin, twin_mqtt, runs, lack)


@given(RUNS)
def test_a_record_is_the_envelope_that_the_log_knows(runs: list[Any]) -> None:
    data, offsets, lengths = carried(mqttcarry, mqtt, runs)
    wanted = []
    for topic, payloads, qos, heads, when in runs:
        for index, payload in enumerate(payloads):
            headers = {"qos": b"0"} if heads else {}
            if qos == 2:
                headers["id"] = (index + 1).to_bytes(2, "big")
            wanted.append(encode_envelope(Envelope(topic, payload, event_time_ns=when, headers=headers)))
    assert [data[at : at + size] for at, size in zip(offsets, lengths, strict=True)] == wanted


def in_place(module: Any, makes: Any, runs: list[Any], times: int) -> Any:
    """Return the records and positions of a log with small regions into which runs were carried so many times."""
    made = [makes.make_run(topic, payloads, qos, False) for topic, payloads, qos, _, _ in runs]
    heads, whens = [run[3] for run in runs], [run[4] for run in runs]
    carrier: Any = None
    with tempfile.TemporaryDirectory() as folder:
        with Writer.open(f"{folder}/log", region_bytes=4096, roll_bytes=16384) as writer:
            for _ in range(times):
                carrier = module.Carrier(made, heads, whens, b"\x02\0id\x02\0\0\0")
                writer.append_in_place(carrier)
        with open_log(f"{folder}/log") as log:
            assert list(log.verify()) == []
            records, positions, at = [], [], log.first_position
            while len(batch := log.read(at)):
                records += batch.to_payloads()
                positions += batch.positions.tolist()
                at = batch.next_position
    assert (positions[-1] if made else -1) == carrier.last
    return records, positions


@settings(deadline=None)
@given(RUNS, st.sampled_from([1, 2, 30]))
def test_what_is_made_in_the_file_is_the_same_through_regions_and_files(runs: list[Any], times: int) -> None:
    data, offsets, lengths = carried(mqttcarry, mqtt, runs)
    records, positions = in_place(mqttcarry, mqtt, runs, times)
    assert records == [data[at : at + size] for at, size in zip(offsets, lengths, strict=True)] * times
    assert (records, positions) == in_place(twin, twin_mqtt, runs, times)


def test_what_is_larger_than_the_log_takes_is_refused_behind_what_fits(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "log", region_bytes=4096) as writer:
        made = [mqtt.make_run(b"a", [b"1", bytes(5000), b"2"], 1, False)]
        with pytest.raises(OptionsError, match="too large"):
            writer.append_in_place(mqttcarry.Carrier(made, [b""], [7], b""))
        writer.append(b"and on")
    with open_log(str(tmp_path / "log")) as log:
        assert [payload[-2:] for payload in log.read(log.first_position).to_payloads()] == [b"a1", b"on"]


def test_a_reservation_is_given_up_for_what_comes_in_place(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "log", region_bytes=4096) as writer:
        view = writer.reserve(100)
        writer.append_in_place(mqttcarry.Carrier([mqtt.make_run(b"a", [b"1"], 1, False)], [b""], [7], b""))
        with pytest.raises(ValueError, match="released"):
            view[0]
        with pytest.raises(OptionsError, match="without a reservation"):
            writer.commit()


def test_a_log_that_was_cut_under_its_writer_says_so(tmp_path: Path) -> None:
    made = [mqtt.make_run(b"a", [b"1"] * 100, 1, False)]
    with Writer.open(tmp_path / "log", region_bytes=4096) as writer:
        writer.append_in_place(mqttcarry.Carrier(made, [b""], [7], b""))
        os.truncate(tmp_path / "log", 0)
        with pytest.raises(CorruptionError, match="cut while its writer had it open"):
            writer.append_in_place(mqttcarry.Carrier(made, [b""], [7], b""))


@pytest.mark.parametrize("broken", [([1], [b""], [0]), ([], [b""], [0]), ([], [], [0])])
def test_what_is_no_run_is_refused(broken: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        mqttcarry.carry(*broken, b"", np.zeros(0, np.int64), np.zeros(0, np.int64))
    with Writer.open(tmp_path / "log") as writer, pytest.raises((TypeError, ValueError)):
        writer.append_in_place(mqttcarry.Carrier(*broken, b""))


def test_the_compiled_kernel_is_the_one_in_use() -> None:
    if not kernel.native:
        pytest.fail(kernel.reason)
    assert kernel.mqttcarry is mqttcarry
