"""Promise: the compiled kernel and its plain twin find the same damage in a log of RocksDB."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from penstock.kernel import native, rockslog
from penstock.kernel.twin import rockslog as twin

pytestmark = pytest.mark.skipif(not native, reason="there is no compiled kernel here")

BLOCK = 32 << 10
LONG = st.sampled_from([BLOCK - 20, BLOCK - 14, BLOCK - 10, BLOCK - 7, BLOCK + 5]).map(lambda size: b"x" * size)
PAYLOADS = st.lists(st.one_of(st.binary(max_size=40), st.binary(max_size=40), LONG), max_size=4)


def log(payloads: list[bytes]) -> bytes:
    """Return these payloads as RocksDB writes them: in pieces that cross no block."""
    data = bytearray()
    for payload in payloads:
        rest, first = payload, True
        while first or rest:
            left = BLOCK - len(data) % BLOCK
            if left < 7:
                data += bytes(left)
                continue
            piece, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            covered = bytes([kind]) + piece
            data += twin._masked(covered).to_bytes(4, "little") + len(piece).to_bytes(2, "little") + covered
            first = False
    return bytes(data)


def test_the_sum_is_that_of_rocksdb() -> None:
    assert twin._masked(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


@settings(max_examples=30)
@given(PAYLOADS)
def test_what_is_whole_is_whole(payloads: list[bytes]) -> None:
    data = log(payloads)
    assert rockslog.walk(data) == twin.walk(data) == (-1, -1)


@settings(max_examples=30)
@given(PAYLOADS, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3), st.integers(0, 1 << 16))
def test_both_find_the_same(payloads: list[bytes], flips: list[tuple[int, int]], end: int) -> None:
    data = bytearray(log(payloads))
    for at, value in flips:
        if data:
            data[at % len(data)] = value
    for part in (bytes(data), bytes(data[: end % (len(data) + 1)])):
        assert rockslog.walk(part) == twin.walk(part)


@given(st.binary(max_size=300), st.integers(-3, 400))
def test_both_find_the_same_in_anything(data: bytes, start: int) -> None:
    assert rockslog.walk(data) == twin.walk(data)
    assert rockslog.good(data, start) == twin.good(data, start)
