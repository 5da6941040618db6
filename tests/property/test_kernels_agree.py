"""Law: the compiled kernel and its Python twin say the same about any bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.kernel import envelope, gather, xchannel
from penstock.kernel.twin import envelope as twin_envelope, gather as twin_gather, xchannel as twin_xchannel
from penstock.log.envelope import Envelope, encode_envelope
from penstock.types import Op

RECORD = struct.Struct("<BBHIQ")
REGION = 4096
LIMIT = 64

KERNELS = settings(deadline=None, max_examples=150)

lengths = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 7, 8, 3968, 4000, 4064]))
ends = st.sampled_from(["tail", "roll", "nothing"])
places = st.integers(0, 200)
mutations = st.one_of(
    st.tuples(st.just("commit"), places, st.sampled_from([0, 1, 2, 255])),
    st.tuples(st.just("kind"), places, st.integers(0, 5)),
    st.tuples(
        st.just("length"), places, st.one_of(st.integers(0, 5000), st.sampled_from([2**31, 2**32 - 1, 2**32 - 16]))
    ),
    st.tuples(st.just("any"), st.integers(0, 3 * REGION - 1), st.integers(0, 255)),
)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, int]:
    """A channel file built as a writer builds it, then changed in a few places, cut, and entered somewhere."""
    data, slots, at = bytearray(REGION), [0], 80
    RECORD.pack_into(data, 0, 1, 0, 0, 64, 0)
    for length in draw(st.lists(lengths, max_size=30)):
        end = len(data)
        if at + (16 + length + 7) // 8 * 8 + 16 > end:
            if end >= 3 * REGION:
                break
            RECORD.pack_into(data, at, 1, 2, 0, end - at - 16, 0)
            slots.append(at)
            data += bytes(REGION)
            at = end
        RECORD.pack_into(data, at, 1, 1, length % 65536, length, at * 2**50 % 2**64)
        slots.append(at)
        at += (16 + length + 7) // 8 * 8
    slots.append(at)
    match draw(ends):
        case "tail":
            RECORD.pack_into(data, at, 0, 1, 0, 0, 0)
        case "roll":
            RECORD.pack_into(data, at, 1, 3, 0, 0, 5)
    for what, place, value in draw(st.lists(mutations, max_size=4)):
        slot = slots[place % len(slots)]
        if what == "commit":
            data[slot] = value
        elif what == "kind":
            data[slot + 1] = value
        elif what == "length":
            struct.pack_into("<I", data, slot + 4, value)
        else:
            data[place % len(data)] = value
    stop = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    start = draw(st.one_of(st.just(0), st.sampled_from(slots), st.integers(0, len(data) // 8).map(lambda n: n * 8)))
    return bytes(data[:stop]), start


def pair(data: bytes, start: int, position: int = 0) -> tuple[Any, Any]:
    cursors = xchannel.Cursor(), twin_xchannel.Cursor()
    for cursor in cursors:
        cursor.attach(data, start, len(data), REGION, position)
    return cursors


def state(cursor: Any) -> tuple[int, int, int]:
    return cursor.at, cursor.status, cursor.position


def looks(view: memoryview) -> tuple[Any, ...]:
    """Everything a view says about itself, and what it gives to those who look through it."""
    return (
        (view.format, view.itemsize, view.ndim, view.shape, view.strides, view.nbytes, view.readonly, view.contiguous),
        (view.c_contiguous, view.obj, view.tolist(), view[1:-1].tobytes(), np.frombuffer(view, np.uint8).tobytes()),
    )


@KERNELS
@given(files())
def test_taking_agrees_and_asks_whenever_it_does_not_rest(file: tuple[bytes, int]) -> None:
    found = []
    for kernel, cursor in zip((xchannel, twin_xchannel), pair(*file), strict=True):
        asked: list[int] = []

        def move_on(asked: list[int] = asked, cursor: Any = cursor) -> bool:
            asked.append(cursor.status)
            return len(asked) % 2 == 1

        taker, taken = kernel.Taker(cursor, move_on), []
        while (record := taker.take()) is not None:
            taken.append(record)
        assert len(asked) == 2  # told to walk on once, and then not
        assert not cursor.resting()
        cursor.rest(60_000_000_000)
        assert cursor.resting() is (cursor.status == twin_xchannel.TAIL)
        taker.take()
        assert len(asked) == (2 if cursor.resting() else 4)
        cursor.attach(file[0], file[1], len(file[0]), REGION, 0)
        cursor.walk()
        assert not cursor.resting()  # in a new place it looks around first
        found.append((taken, asked))
    assert found[0] == found[1]


@pytest.mark.parametrize("kernel", [xchannel, twin_xchannel], ids=["native", "twin"])
def test_a_detached_cursor_has_nothing_to_read(kernel: Any) -> None:
    data = bytes(4096)
    cursor = kernel.Cursor()
    for attach in (False, True):
        if attach:
            cursor.attach(data, 0, 4096, REGION, 0)
            cursor.walk()
            cursor.rest(60_000_000_000)
            assert cursor.resting()
            cursor.detach()
        assert cursor.next() is None
        assert not cursor.ready()
        assert not cursor.resting()
        assert cursor.status == twin_xchannel.LIMIT
        assert cursor.window is None


@KERNELS
@given(files())
def test_next_agrees(file: tuple[bytes, int]) -> None:
    a, b = pair(*file, position=3 << 40)
    while True:
        one, other = a.next(), b.next()
        assert one == other
        assert a.at == b.at
        if one is None:
            assert state(a) == state(b)
            return
        assert looks(one.payload) == looks(other.payload)


@KERNELS
@given(files(), st.integers(1, LIMIT), st.integers(1, 2 * REGION))
def test_scan_agrees(file: tuple[bytes, int], limit: int, span: int) -> None:
    a, b = pair(*file)
    for _ in range(100):
        filled = []
        for cursor in (a, b):
            columns = [np.zeros(LIMIT, kind) for kind in (np.int64, np.uint64, np.uint16, np.int64, np.int64)]
            count = cursor.scan(limit, span, *columns)
            filled.append((count, [column[:count].tolist() for column in columns]))
        assert filled[0] == filled[1]
        assert state(a) == state(b)
        if not filled[0][0] and a.status:
            return


@KERNELS
@given(files(), st.one_of(st.just(-1), st.integers(0, 3 * REGION)))
def test_walk_agrees(file: tuple[bytes, int], until: int) -> None:
    a, b = pair(*file)
    assert a.walk(until) == b.walk(until)
    assert state(a) == state(b)


@KERNELS
@given(files())
def test_ready_agrees_and_takes_nothing(file: tuple[bytes, int]) -> None:
    a, b = pair(*file)
    assert a.ready() == b.ready()
    assert a.at == b.at
    if a.ready():
        assert a.next() == b.next() != None  # noqa: E711
    else:
        assert state(a) == state(b)
        assert a.next() is b.next() is None


@KERNELS
@given(files(), st.integers(0, 3 * REGION))
def test_a_walk_that_is_extended_agrees(file: tuple[bytes, int], stop: int) -> None:
    data, start = file
    cursors = xchannel.Cursor(), twin_xchannel.Cursor()
    for cursor in cursors:
        cursor.attach(data, start, min(stop, len(data)), REGION, 0)
    assert cursors[0].walk() == cursors[1].walk()
    for cursor in cursors:
        cursor.extend(len(data))
    assert cursors[0].walk() == cursors[1].walk()
    assert state(cursors[0]) == state(cursors[1])


def test_both_refuse_windows_they_cannot_walk() -> None:
    for cursor in (xchannel.Cursor(), twin_xchannel.Cursor()):
        for at, stop, region in ((0, 9, 4096), (4, 8, 4096), (-8, 8, 4096), (0, 8, 0), (0, 8, 4097)):
            with pytest.raises(ValueError, match="cannot walk"):
                cursor.attach(b"12345678", at, stop, region, 0)
        cursor.attach(b"12345678", 0, 4, 4096, 0)
        for stop in (3, 9):
            with pytest.raises(ValueError, match="cannot extend"):
                cursor.extend(stop)
    with pytest.raises(ValueError, match="one run of bytes"):
        xchannel.Cursor().attach(memoryview(b"12345678")[::2], 0, 4, 8, 0)


# --- Spans

spans = st.lists(st.tuples(st.integers(-3, 120), st.integers(-3, 60)), max_size=12)


def outcome(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as exc:
        return str(exc)


@KERNELS
@given(st.binary(max_size=120), spans)
def test_gather_and_views_agree(data: bytes, pairs: list[tuple[int, int]]) -> None:
    offsets = np.array([a for a, _ in pairs], np.int64)
    sizes = np.array([b for _, b in pairs], np.int64)
    total = outcome(gather.total_bytes, len(data), offsets, sizes)
    assert total == outcome(twin_gather.total_bytes, len(data), offsets, sizes)
    one = outcome(gather.to_bytes_list, data, offsets, sizes)
    assert one == outcome(twin_gather.to_bytes_list, data, offsets, sizes)
    results: list[Any] = []
    for module in (gather, twin_gather):
        out = np.zeros(total if isinstance(total, int) else 8, np.uint8)
        starts = np.zeros(len(pairs) + 1, np.int64)
        views = np.zeros(16 * len(pairs), np.uint8)
        said = outcome(module.gather, data, offsets, sizes, out, starts)
        also = outcome(module.binary_views, data, offsets, sizes, 0, views)
        results.append((said, also, out.tolist(), starts.tolist(), views.tolist()))
    assert results[0] == results[1]
    if isinstance(total, int):
        assert bytes(results[0][2]) == b"".join(one)


# --- Envelopes

envelopes = st.builds(
    Envelope,
    st.binary(max_size=20),
    st.binary(max_size=20),
    st.sampled_from(Op),
    st.integers(0, 2**64 - 1),
    st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3),
    st.integers(0, 65535),
)


@KERNELS
@given(
    st.lists(st.one_of(envelopes.map(encode_envelope), st.binary(max_size=30)), max_size=6),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    st.integers(-2, 2),
)
def test_envelopes_agree(records: list[bytes], changes: list[tuple[int, int]], shift: int) -> None:
    data = bytearray(b"".join(records))
    for place, value in changes:
        if data:
            data[place % len(data)] = value
    sizes = np.array([len(record) for record in records], np.int64)
    offsets = np.cumsum(sizes) - sizes
    if len(sizes):
        sizes[-1] += shift  # a span may be wrong as well
    results = []
    for module in (envelope, twin_envelope):
        count = len(records)
        ops, flags = np.zeros(count, np.uint8), np.zeros(count, np.uint16)
        times, places = np.zeros(count, np.uint64), np.zeros((count, 6), np.int64)
        good = module.decode(bytes(data), offsets, sizes, ops, flags, times, places)
        results.append((good, ops.tolist(), flags.tolist(), times.tolist(), places.tolist()))
    assert results[0] == results[1]
