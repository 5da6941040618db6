"""Promise: what durable_position names survives a power cut, and what is read afterwards is a prefix."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.testing.faulty import FaultyDisk

STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3000)),
    st.tuples(st.just("many"), st.integers(1, 6)),
    st.tuples(st.just("sync"), st.just(0)),
)


def entries(disk: Any) -> list[tuple[int, bytes]]:
    with MessageLogReader("log", disk) as log:
        return [(entry.seq, entry.payload) for entry in log.entries()]


@given(
    st.lists(STEP, min_size=1, max_size=14),
    st.sampled_from([600, 5000, 128 << 20]),
    st.sampled_from(["none", "always"]),
    st.integers(0, 1 << 30),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
@settings(deadline=None, max_examples=60)
def test_what_is_durable_survives_and_what_is_read_is_a_prefix(
    steps: list[tuple[str, int]], segment_bytes: int, sync: Any, seed: int, keep: float
) -> None:
    disk = FaultyDisk(MemoryDisk())
    options = MessageLogOptions(sync=sync, segment_bytes=segment_bytes)
    log = MessageLog.open("log", options, disk=disk)
    written: list[tuple[int, bytes]] = []
    durable = 0
    for action, size in steps:
        if action == "append":
            payload = b"%d" % len(written) * (size // 3)
            written.append((log.append(payload, sender="ann@localhost"), payload))
        elif action == "many":
            payloads = [b"many %d" % n * 40 for n in range(size)]
            written += zip(log.append_many(payloads).tolist(), payloads, strict=True)
        else:
            log.sync()
        durable = max(durable, (log.durable_position or 1) - 1)
    log.forked()  # the process is gone with the power: nothing more is written

    disk.cut_power(seed=seed, keep=keep)
    again = MessageLog.open("log", options, disk=disk)
    found = entries(disk)
    assert found == written[: len(found)]  # a prefix: no hole, no invention
    assert len(found) >= durable
    following = again.append(b"after")
    assert following > (found[-1][0] if found else 0)
    assert following >= durable
    again.close()
    assert entries(disk) == [*found, (following, b"after")]
    if durable and sync == "always":
        assert len(found) == len(written)
