"""A power cut at any moment: what was synced is there, what is there is a prefix, nothing is invented."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from queue_use import lose_power

from penstock.disk import MemoryDisk
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.testing.faulty import FaultyDisk

# 56 bytes make frames of 64: a lost page is then a whole number of frames, the worst case for zeros.
payloads = st.one_of(st.binary(max_size=120), st.integers(0, 255).map(lambda n: bytes([n]) * 56), st.just(b""))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), payloads),
        st.tuples(st.just("many"), st.lists(payloads, max_size=150)),
        st.tuples(st.just("sync"), st.none()),
        st.tuples(st.just("ack"), st.integers(1, 60)),
        st.tuples(st.just("rotate"), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(steps, st.sampled_from([200, 3000, 1 << 20]), st.integers(0, 1 << 30), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_a_synced_message_survives_a_power_cut_and_nothing_is_invented(
    history: list[tuple[str, object]], segment_bytes: int, seed: int, keep: float
) -> None:
    disk = FaultyDisk(MemoryDisk())
    options = ChannelOptions(
        sync="interval", sync_seconds=1e9, segment_bytes=segment_bytes, compression="none", collect=False
    )
    channel = FileChannel.open("c", options, disk=disk)
    rx = channel.ack_rx("worker")
    sent: list[bytes] = []
    promised = received = acked = 0
    channel.sync()
    for step, value in history:
        if step == "send":
            channel.append(value)
            sent.append(value)  # type: ignore[arg-type]
        elif step == "many":
            channel.append_many(value)
            sent += value  # type: ignore[operator]
        elif step == "sync":
            channel.sync()
            promised = len(sent)
        elif step == "rotate":
            channel.rotate()
        else:
            got = rx.recv_many(value)  # type: ignore[arg-type]
            received += len(got)
            rx.ack()
            acked = received

    disk.cut_power(seed=seed, keep=keep)
    lose_power(channel, rx)
    with FileChannel.open("c", options, disk=disk) as again:
        found = [p for batch in again.rx().batches(timeout=0) for p in batch.to_payloads()]
        assert len(found) >= promised
        assert found == sent[: len(found)]  # a prefix: no hole, no invention
        resumed = again.ack_rx("worker")
        rest = [p for batch in resumed.batches(timeout=0) for p in batch.to_payloads()]
        first = len(found) - len(rest)
        assert rest == found[first:]
        assert first <= max(acked, 0)  # at least once
        position = again.append(b"and on")
        assert again.rx(position).recv(timeout=0) == b"and on"
    with FileChannel.open("c", options, disk=disk) as third:
        assert third.problems == []
