"""Promise: envelopes come out as they went in, one by one and in batches, and what is none is said to be none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.batch import Batch, Spans
from penstock.errors import CorruptionError, OptionsError
from penstock.log.envelope import (
    CONTENT,
    Envelope,
    decode_envelope,
    encode_envelope,
    encode_envelopes,
    headers_of,
    open_envelopes,
)
from penstock.types import Op

envelopes = st.builds(
    Envelope,
    st.binary(max_size=30),
    st.binary(max_size=30),
    st.sampled_from(Op),
    st.integers(0, 2**64 - 1),
    st.dictionaries(st.text(max_size=8), st.binary(max_size=8), max_size=4),
    st.integers(0, 65535),
)


def test_an_envelope_on_disk_is_the_one_drawn() -> None:
    envelope = Envelope(b"key", b"pay", Op.PURGE, 0x0102, {"h": b"v"}, 5)
    assert encode_envelope(envelope).hex(" ") == (
        "01 02 05 00 02 01 00 00 00 00 00 00 03 00 00 00 08 00 00 00 6b 65 79 01 00 68 01 00 00 00 76 70 61 79"
    )
    assert CONTENT == "envelope/1"


@given(envelopes)
def test_an_envelope_comes_out_as_it_went_in(envelope: Envelope) -> None:
    assert decode_envelope(encode_envelope(envelope)) == envelope
    assert decode_envelope(memoryview(encode_envelope(envelope))) == envelope


@given(st.lists(envelopes, max_size=8))
def test_a_batch_of_envelopes_opens_without_a_copy(many: list[Envelope]) -> None:
    closed = Batch.of([encode_envelope(envelope) for envelope in many], positions=range(5, 5 + len(many)))
    opened = open_envelopes(closed)
    assert opened.buffer is closed.buffer
    assert opened.to_payloads() == [envelope.payload for envelope in many]
    rows = opened.to_pylist()
    assert [row["key"] for row in rows] == [envelope.key for envelope in many]
    assert [row["op"] for row in rows] == [envelope.op for envelope in many]
    assert [row["event_time_ns"] for row in rows] == [envelope.event_time_ns for envelope in many]
    assert [row["flags"] for row in rows] == [envelope.flags for envelope in many]
    assert opened.next_position == closed.next_position


@given(envelopes, st.integers(0, 200))
def test_a_cut_envelope_is_refused_or_only_its_payload_is_shorter(envelope: Envelope, length: int) -> None:
    raw = encode_envelope(envelope)
    cut = raw[: min(length, len(raw))]
    try:
        found = decode_envelope(cut)
    except CorruptionError:
        assert len(cut) < len(raw) - len(envelope.payload)
    else:
        assert found.key == envelope.key
        assert envelope.payload.startswith(found.payload)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_envelope_or_corrupt(data: bytes) -> None:
    try:
        decode_envelope(data)
    except CorruptionError:
        pass


def test_the_record_that_is_no_envelope_is_named() -> None:
    good = encode_envelope(Envelope(b"k", b"v"))
    batch = Batch.of([good, b"raw", good], positions=[80, 120, 160])
    with pytest.raises(CorruptionError, match="orders at byte 120: the record at this position is no envelope"):
        open_envelopes(batch, "orders")
    assert len(open_envelopes(batch.filter(np.array([True, False, True])))) == 2


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (Envelope(b"k", flags=65536), Envelope(b"k", event_time_ns=-1)):
        with pytest.raises(OptionsError, match="out of range"):
            encode_envelope(wrong)


def test_a_header_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionsError, match="header"):
        encode_envelope(Envelope(b"k", headers={"n" * 65536: b""}))


@given(st.lists(envelopes, max_size=8))
def test_many_envelopes_are_encoded_as_each_by_itself(many: list[Envelope]) -> None:
    batch = encode_envelopes(
        [one.key for one in many],
        [one.payload for one in many],
        ops=np.array([one.op for one in many], np.uint8),
        event_times_ns=np.array([one.event_time_ns for one in many], np.uint64),
        flags=np.array([one.flags for one in many], np.uint16),
        headers=[dict(one.headers) for one in many],
    )
    assert batch.to_payloads() == [encode_envelope(one) for one in many]


@given(st.lists(envelopes, max_size=8))
def test_headers_come_out_in_columns_and_go_back_in(many: list[Envelope]) -> None:
    opened = open_envelopes(Batch.of([encode_envelope(one) for one in many]))
    found = headers_of(opened)
    maps = [dict(row) for row in found.to_arrow().to_pylist()]
    assert maps == [dict(one.headers) for one in many]
    for headers in (found, found.to_arrow()):
        again = encode_envelopes((opened.buffer, opened.extra["key"]), opened, headers=headers)
        assert [dict(decode_envelope(record.payload).headers) for record in again] == maps


def test_one_value_serves_all_envelopes() -> None:
    batch = encode_envelopes([b"a", b"b", b"c"], b"gone", ops=Op.DELETE, event_times_ns=7, headers={"who": b"me"})
    expected = [Envelope(key, b"gone", Op.DELETE, 7, {"who": b"me"}) for key in (b"a", b"b", b"c")]
    assert [decode_envelope(record.payload) for record in batch] == expected


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(OptionsError, match="differ in length: 1, 2"):
        encode_envelopes([b"a", b"b"], [b"one"])
    with pytest.raises(OptionsError, match="op must be between 0 and 2"):
        encode_envelopes([b"a"], [b"one"], ops=3)
    with pytest.raises(OptionsError, match="event_time_ns must be between"):
        encode_envelopes([b"a"], [b"one"], event_times_ns=[-1])
    with pytest.raises(OptionsError, match="whole numbers"):
        encode_envelopes([b"a"], [b"one"], flags=[0.5])
    outside = (b"abc", Spans(np.array([2]), np.array([2])))
    with pytest.raises(OptionsError, match="lies outside its buffer of 3 bytes"):
        encode_envelopes(outside, [b"one"])
    assert len(encode_envelopes([], [])) == 0


def test_malformed_headers_are_named_with_their_position() -> None:
    good, bad = Envelope(b"k", b"v", headers={"a": b"1"}), Envelope(b"k", b"v", headers={"é": b"1"})
    records = [encode_envelope(good), encode_envelope(bad).replace("é".encode(), b"\xff\xff")]
    with pytest.raises(CorruptionError, match="log at byte 8: the name of a header is no UTF-8"):
        headers_of(open_envelopes(Batch.of(records, positions=[7, 8])))
    cut = bytearray(encode_envelope(good))
    cut[25] = 200  # the length of the value
    with pytest.raises(CorruptionError, match="log at byte 9: the headers"):
        headers_of(open_envelopes(Batch.of([bytes(cut)], positions=[9])))


def test_both_kernels_split_and_join_headers_alike() -> None:
    from penstock.kernel import envelope as native
    from penstock.kernel.twin import envelope as twin

    raw = encode_envelope(Envelope(b"", b"", headers={"a": b"12", "bc": b""}))[20:]
    data = raw + raw[:-1] + raw
    spans = Spans(np.array([0, 0, len(raw), 2 * len(raw) - 1]), np.array([len(raw), 0, len(raw) - 1, len(raw)]))
    results = []
    for kernel in (native, twin):
        starts, found = np.zeros(5, np.int64), np.zeros((9, 4), np.int64)
        answer = kernel.split_headers(data, spans.offsets, spans.lengths, starts, found)
        results.append((answer, starts[:3].tolist(), found[:3].tolist()))
        room = np.zeros(2, np.int64), np.zeros(2, np.int64)
        two = np.ascontiguousarray(found[:2].T)
        joined = kernel.join_headers(np.array([0, 1, 2]), data, two[0], two[1], data, two[2], two[3], *room)
        results[-1] += (joined, room[0].tolist(), room[1].tolist())  # type: ignore[assignment]
    assert results[0] == results[1]
    assert results[0][0][0] == 2  # type: ignore[comparison-overlap]
