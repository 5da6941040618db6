"""Promise: the compiled kernel and its plain twin make the same records of the same runs, as ``log/envelope`` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock import kernel
from penstock.kernel import mqtt, mqttcarry
from penstock.kernel.twin import mqtt as twin_mqtt, mqttcarry as twin
from penstock.log.envelope import Envelope, encode_envelope

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


@pytest.mark.parametrize("broken", [([1], [b""], [0]), ([], [b""], [0]), ([], [], [0])])
def test_what_is_no_run_is_refused(broken: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        mqttcarry.carry(*broken, b"", np.zeros(0, np.int64), np.zeros(0, np.int64))


def test_the_compiled_kernel_is_the_one_in_use() -> None:
    if not kernel.native:
        pytest.fail(kernel.reason)
    assert kernel.mqttcarry is mqttcarry
