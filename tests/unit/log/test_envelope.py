"""Promise: envelopes come out as they went in, one by one and in batches, and what is none is said to be none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import Batch
from penstock.errors import CorruptionError, OptionsError
from penstock.log.envelope import CONTENT, Envelope, decode_envelope, encode_envelope, open_envelopes
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
