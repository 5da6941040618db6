"""Promise: the compiled NATS decoder and its plain twin give the same answer on any bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock import kernel
from penstock.kernel import natswire
from penstock.kernel.twin import natswire as twin

ACKS = st.one_of(
    st.builds(
        lambda head, seq, tail: ".".join(["$JS.ACK", *head, str(seq), *tail]).encode(),
        st.sampled_from([["s", "c", "1"], ["d", "a", "s", "c", "1"], ["a", "s", "c", "1"]]),
        st.one_of(st.integers(0, (1 << 64) + 5), st.sampled_from(["+7", "007", "", "-1", "4_2", "x"])),
        st.sampled_from([["7", "1700", "0"], ["7", "1700", "3", "tok"], ["7", "1700"], ["x", "9", "y"]]),
    ),
    st.binary(max_size=40).map(lambda raw: raw.translate(None, b" \t\r\n")),
)
HEADERS = st.sampled_from(
    [
        b"",
        b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n",
        b"NATS/1.0\r\nkv-operation:PURGE \r\n\r\n",
        b"NATS/1.0\r\nKV-Operation: WHAT\r\n\r\n",
        b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n",
        b"NATS/1.0\r\nNats-Marker-Reason: Remove\r\nKV-Operation: PURGE\r\n\r\n",
        b"NATS/1.0\r\nNats-Msg-Size: 12\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 9\r\n\r\n",
        b"NATS/1.0\nno colon\r\n",
    ]
)


@st.composite
def frames(draw: Any) -> bytes:
    subject = draw(st.sampled_from([b"$KV.b.key", b"$KV.b.", b"$KV.other.k", b"x", b"$KV.b.a.b.c"]))
    sid, reply = draw(st.sampled_from([b"1", b"1", b"7", b"0", b"z"])), draw(ACKS)
    headers, payload = draw(HEADERS), draw(st.binary(max_size=30))
    words = [subject, sid, *([reply] if reply else [])]
    if headers:
        words.append(b"%d" % len(headers))
    words.append(b"%d" % (len(headers) + len(payload)))
    name = b"HMSG " if headers else b"MSG "
    return name + b" ".join(words) + b"\r\n" + headers + payload + b"\r\n"


STREAMS = st.lists(
    st.one_of(frames(), frames(), frames(), st.sampled_from([b"PING\r\n", b"+OK\r\n", b"MSG\r\n", b"-ERR 'x'\r\n"])),
    max_size=8,
).map(b"".join)


@st.composite
def damaged(draw: Any) -> bytes:
    data = bytearray(draw(STREAMS))
    if data and draw(st.booleans()):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def decoded(side: Any, data: bytes) -> tuple[Any, ...]:
    ops = np.zeros(64, np.uint8)
    spans, sequences = np.zeros((64, 4), np.int64), np.zeros((64, 2), np.uint64)
    counts = np.zeros((64, 3), np.int64)
    rows = side.decode(data, b"$KV.b.", ops, spans, sequences, counts)
    return rows, ops.tolist(), spans.tolist(), sequences.tolist(), counts.tolist()


def test_the_compiled_decoder_is_the_one_tested() -> None:
    assert kernel.native, kernel.reason


@settings(deadline=None)
@given(damaged())
def test_both_cut_the_same_runs(data: bytes) -> None:
    at = 0
    while True:
        mine, other = natswire.cut_run(data, at), twin.cut_run(data, at)
        assert mine == other
        if mine[0] == at:
            break
        at = mine[0]
    assert natswire.count_frames(data, 3) == twin.count_frames(data, 3)


@settings(deadline=None)
@given(damaged())
def test_both_decode_the_same_rows(data: bytes) -> None:
    assert decoded(natswire, data) == decoded(twin, data)


@settings(deadline=None)
@given(st.lists(ACKS, max_size=6))
def test_both_read_the_same_sequences(subjects: list[bytes]) -> None:
    lengths = np.fromiter(map(len, subjects), np.int64, len(subjects))
    offsets = np.cumsum(lengths) - lengths
    answers = []
    for side in (natswire, twin):
        sequences, known = np.zeros(len(subjects), np.uint64), np.zeros(len(subjects), np.uint8)
        side.parse_acks(b"".join(subjects), offsets, lengths, sequences, known)
        answers.append((sequences.tolist(), known.tolist()))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("side", [natswire, twin])
def test_a_span_outside_of_the_buffer_is_refused(side: Any) -> None:
    one = np.array([1], np.int64)
    with pytest.raises(ValueError, match="outside"):
        side.parse_acks(b"", one, one, np.zeros(1, np.uint64), np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="outside"):
        side.cut_run(b"", 1)


@pytest.mark.parametrize("side", [natswire, twin])
def test_a_line_or_a_length_without_end_is_refused(side: Any) -> None:
    assert side.cut_run(b"x" * 70_000, 0)[2] == -1
    assert side.cut_run(b"MSG a 1 999999999999\r\n", 0)[2] == -1
    assert side.cut_run(b"MSG a 1 20\r\nshort", 0) == (0, 0, 0)
