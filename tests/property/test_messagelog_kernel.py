"""The compiled kernel and its twin agree on any bytes and on any entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock import kernel
from penstock.kernel.twin import messagelog as twin

assert kernel.native, kernel.reason

compiled = kernel.messagelog
U64 = st.one_of(st.integers(0, 40), st.integers(0, (1 << 64) - 1))
ENTRY = st.tuples(U64, U64, st.binary(max_size=30), st.binary(max_size=300))
LARGE = st.tuples(U64, U64, st.binary(max_size=3), st.integers(3000, 5000).map(bytes))


@st.composite
def segments(draw: Any) -> bytes:
    """Entries, cut, flipped or followed by rubbish, or none of that."""
    data = bytearray(
        b"".join(twin.encode_one(*entry) for entry in draw(st.lists(st.one_of(ENTRY, LARGE), max_size=12)))
    )
    if data and draw(st.booleans()):
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    return bytes(data + draw(st.binary(max_size=60)))


def scanned(module: Any, data: bytes, at: int, want: int, ordered: bool, limit: int) -> Any:
    columns = np.zeros((6, limit), np.int64)
    found = module.scan(data, at, want, ordered, columns)
    return found, columns[0].view(np.uint64).tolist(), columns[1:].tolist()


@given(segments(), U64, st.booleans(), st.integers(0, 20), st.integers(0, 100))
@settings(deadline=None, max_examples=200)
def test_both_scan_alike(data: bytes, want: int, ordered: bool, limit: int, at: int) -> None:
    assert scanned(compiled, data, at, want, ordered, limit) == scanned(twin, data, at, want, ordered, limit)


@given(segments(), U64, st.integers(0, 4))
@settings(deadline=None, max_examples=200)
def test_both_walk_alike(data: bytes, name: int, room: int) -> None:
    one, two = np.zeros(12 * room, np.uint8), np.zeros(12 * room, np.uint8)
    assert compiled.walk(data, name, one) == twin.walk(data, name, two)
    assert one.tolist() == two.tolist()


@given(segments(), st.integers(-1, 100), U64, U64, st.sampled_from((0, 40, 1 << 30)))
@settings(deadline=None, max_examples=200)
def test_both_find_the_next_entry_alike(data: bytes, at: int, low: int, high: int, budget: int) -> None:
    assert compiled.find_entry(data, at, low, high, budget) == twin.find_entry(data, at, low, high, budget)


TARGET = st.tuples(
    st.integers(0, 6000),  # largest
    st.integers(1, 20_000),  # chunk
    st.sampled_from([0, 1, 5000]),  # offset
    st.sampled_from([0, 1, 4095, 4096]),  # since
    st.integers(0, 12_000),  # limit
    st.integers(0, 50),  # name
)


@given(st.lists(st.one_of(ENTRY, LARGE), max_size=8), TARGET, st.integers(0, 3), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_both_encode_alike(entries: Any, target: Any, room: int, one_sender: bool, one_time: bool) -> None:
    payloads = [entry[3] for entry in entries]
    senders = [entry[2] for entry in entries][: 1 if one_sender else None] or [b"x"]
    lengths = np.array([len(p) for p in payloads], np.int64)
    sender_lengths = np.array([len(s) for s in senders], np.int64)
    arguments = (
        b"".join(payloads) or b"\0", np.cumsum(lengths) - lengths, lengths,
        b"".join(senders) or b"\0", np.cumsum(sender_lengths) - sender_lengths, sender_lengths,
        np.array([entry[0] for entry in entries], np.uint64),
        np.array([entry[1] for entry in entries][: 1 if one_time else None] or [0], np.uint64),
    )  # fmt: skip
    results = []
    for module in (compiled, twin):
        index = np.zeros(12 * room, np.uint8)
        if len(senders) not in (1, len(payloads)):
            return
        results.append((module.encode_spans(*arguments, 0, *target, index), index.tolist()))
        index = np.zeros(12 * room, np.uint8)
        results[-1] += (module.encode_list(payloads, 0, senders[0], 5, 9, *target, index), index.tolist())
    assert results[0] == results[1]
    encoded, count, _, _ = results[0][0]
    found = scanned(compiled, encoded, 0, 0, False, len(entries) + 1)
    assert found[0][0] == count  # what was encoded is what is scanned
    assert found[1][:count] == [entry[0] for entry in entries[:count]]


@pytest.mark.parametrize("module", [compiled, twin], ids=["compiled", "twin"])
def test_columns_that_do_not_fit_are_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="six columns"):
        module.scan(b"x", 0, 0, True, np.zeros((5, 2), np.int64))
    with pytest.raises(ValueError, match="before the data"):
        module.scan(b"x", -1, 0, True, np.zeros((6, 0), np.int64))
    with pytest.raises(ValueError, match="outside"):
        module.encode_list([b"x"], 2, b"", 1, 0, 9, 9, 0, 0, 9, 1, np.zeros(0, np.uint8))
    with pytest.raises(ValueError, match="too long"):
        module.encode_one(1, 0, b"x" * 65536, b"")
