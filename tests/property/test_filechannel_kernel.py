"""Both kernels of the filechannel agree on any input, and with zlib."""

from __future__ import annotations

import struct
import zlib
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock import kernel
from penstock.errors import OptionsError
from penstock.kernel.twin import filechannel as twin

pytestmark = pytest.mark.skipif(not kernel.native, reason="the compiled kernel is not installed")


def compiled() -> ModuleType:
    from penstock.kernel import filechannel

    return filechannel  # type: ignore[return-value]


def scanned(module: ModuleType, data: bytes, start: int, stop: int, limit: int) -> tuple[object, ...]:
    columns = tuple(np.full(limit, -1, np.int64) for _ in range(3))
    result = module.scan(data, start, stop, 1000, *columns)
    return (tuple(int(value) for value in result), *(column.tolist() for column in columns))


def frame(payload: bytes) -> bytes:
    return struct.pack(">II", len(payload), zlib.crc32(payload)) + payload


# Bytes that look like frames much of the time, and like damage the rest of it.
pieces = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=60).map(frame),
    st.just(bytes(8)),
    st.tuples(st.integers(0, 1 << 32), st.binary(max_size=20)).map(
        lambda pair: struct.pack(">I", pair[0] & 0xFFFFFFFF) + pair[1]
    ),
)


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_frames_are_the_ones_drawn_in_format(payloads: list[bytes]) -> None:
    expected = b"".join(map(frame, payloads))
    for module in (compiled(), twin):
        ends = np.empty(len(payloads), np.int64)
        assert module.encode_list(payloads, ends) == expected
        assert ends.tolist() == np.cumsum([8 + len(payload) for payload in payloads], dtype=np.int64).tolist()
        assert [module.encode_frame(payload) for payload in payloads] == [frame(payload) for payload in payloads]
        lengths = np.array([len(payload) for payload in payloads], np.int64)
        offsets = np.cumsum(lengths) - lengths
        again = np.empty(len(payloads), np.int64)
        assert module.encode_spans(b"".join(payloads), offsets, lengths, again) == expected
        assert again.tolist() == ends.tolist()


@given(st.lists(pieces, max_size=12), st.integers(0, 30), st.integers(0, 30), st.integers(1, 20))
def test_both_kernels_scan_any_bytes_alike(parts: list[bytes], start: int, less: int, limit: int) -> None:
    data = b"".join(parts)
    start = min(start, len(data))
    stop = max(start, len(data) - less)
    assert scanned(compiled(), data, start, stop, limit) == scanned(twin, data, start, stop, limit)


@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(0, 3000))
def test_a_scan_of_a_cut_run_finds_exactly_the_whole_frames(payloads: list[bytes], cut: int) -> None:
    run = b"".join(map(frame, payloads))
    data = run[: min(cut, len(run))]
    (count, at, status), _, offsets, lengths = scanned(compiled(), data, 0, len(data), 100)  # type: ignore[misc]
    ends = np.cumsum([0, *(8 + len(payload) for payload in payloads)])
    whole = int(np.searchsorted(ends, len(data), "right")) - 1
    assert count == whole
    assert at == ends[whole]
    assert status == (twin.END if at == len(data) else twin.SHORT)
    found = [data[o : o + n] for o, n in zip(offsets[:count], lengths[:count], strict=True)]
    assert found == payloads[:whole]


@given(st.lists(pieces, max_size=12), st.integers(0, 30), st.integers(0, 30), st.integers(-5, 500))
def test_both_kernels_hop_over_any_bytes_alike(parts: list[bytes], start: int, less: int, target: int) -> None:
    data = b"".join(parts)
    start = min(start, len(data))
    stop = max(start, len(data) - less)
    assert compiled().hop(data, start, stop, target) == twin.hop(data, start, stop, target) <= stop


@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(0, 2500))
def test_a_hop_ends_at_the_first_frame_behind_its_target(payloads: list[bytes], target: int) -> None:
    run = b"".join(map(frame, payloads))
    ends = np.cumsum([0, *(8 + len(payload) for payload in payloads)])
    expected = ends[min(int(np.searchsorted(ends, target)), len(ends) - 1)]
    assert compiled().hop(run, 0, len(run), target) == expected


@pytest.mark.parametrize("module", [twin, compiled()] if kernel.native else [twin])
def test_bad_arguments_are_refused(module: ModuleType) -> None:
    one = np.empty(1, np.int64)
    two = np.empty(2, np.int64)
    with pytest.raises(ValueError, match="cannot scan"):
        module.scan(b"1234", 0, 5, 0, one, one.copy(), one.copy())
    with pytest.raises(ValueError, match="cannot scan"):
        module.hop(b"1234", 3, 2, 4)
    with pytest.raises(ValueError, match="differ in length"):
        module.scan(b"1234", 0, 4, 0, one, two, one.copy())
    with pytest.raises(ValueError, match="one place for each"):
        module.encode_list([b""], two)
    with pytest.raises(ValueError, match="outside its buffer"):
        module.encode_spans(b"123", np.array([2]), np.array([2]), one)
    assert issubclass(OptionsError, ValueError)
