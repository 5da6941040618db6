"""Promise: the compiled MQTT codec and its plain twin give the same answer on any bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock import kernel
from penstock.kernel import mqtt
from penstock.kernel.twin import mqtt as twin

TOPICS = st.sampled_from(
    [b"a", b"a/b", b"", b"\xc3\xa9", b"+", b"a/#", b"\xed\xa0\x80", b"a\0b", b"\xef\xbb\xbfx", b"\xff"]
)
PROPERTIES = st.lists(
    st.sampled_from(
        [
            b"\x01\x01", b"\x01\x02", b"\x02\0\0\0\x05", b"\x03\0\x01t", b"\x08\0\x01r", b"\x08\0\x01#",
            b"\x09\0\x02\0\1", b"\x0b\x05", b"\x23\0\x07", b"\x23\0\0", b"\x26\0\x01k\0\x01v", b"\x26\0\x02k",
            b"\x11\0\0\0\1", b"\x7f", b"\xc8",
        ]
    ),
    max_size=3,
).map(b"".join)  # fmt: skip


@st.composite
def packets(draw: Any) -> bytes:
    first = draw(st.sampled_from([0x30, 0x30, 0x31, 0x32, 0x34, 0x3A, 0x36, 0x38, 0x40, 0x50, 0x62, 0x70, 0x82, 0xC0]))
    if first >> 4 == 3:
        topic = draw(TOPICS)
        body = len(topic).to_bytes(2, "big") + topic
        if first & 6:
            body += draw(st.sampled_from([0, 1, 1, 2, 3, 65535])).to_bytes(2, "big")
        if draw(st.booleans()):
            props = draw(PROPERTIES)
            body += bytes([len(props)]) + props
        body += draw(st.binary(max_size=5))
    elif first == 0xC0:
        body = b""
    else:
        body = draw(st.sampled_from([1, 2, 3, 0])).to_bytes(2, "big") + draw(
            st.sampled_from([b"", b"", b"\x10", b"\0\0"])
        )
    return bytes([first]) + twin.encode_varint(len(body)) + body


STREAMS = st.lists(st.one_of(packets(), packets(), st.binary(max_size=6)), max_size=6).map(b"".join)


def shown(item: Any) -> Any:
    if isinstance(item, tuple):
        return item
    names = ("topic", "forward", "start", "end", "count", "longest", "payload_bytes", "qos", "first_id", "alias",
             "plain", "expiry", "retain", "dup", "version5", "deadline")  # fmt: skip
    return {name: getattr(item, name) for name in names}, item.payloads(), bytes(item.packets())


@given(STREAMS, st.booleans(), st.sampled_from([10, 268435455]), st.integers(0, 3), st.booleans())
@settings(max_examples=1500)
def test_both_cut_any_bytes_alike(data: bytes, version5: bool, limit: int, most: int, from_server: bool) -> None:
    ours, theirs = (kind.cut(data, 0, version5, limit, most, from_server) for kind in (mqtt, twin))
    assert ours[1:] == theirs[1:]
    assert [shown(item) for item in ours[0]] == [shown(item) for item in theirs[0]]
    for one, other in zip(ours[0], theirs[0], strict=True):
        if isinstance(one, tuple):
            continue
        for version in (False, True):
            assert bytes(one.wire(version) or b"none") == bytes(other.wire(version) or b"none")
            for flags in (0, 1, 2, 0xD):
                assert one.frames(version, flags, b"t/x", b"\x01\1", 9) == other.frames(
                    version, flags, b"t/x", b"\x01\1", 9
                )
        assert shown(one.detached())[1:] == shown(other.detached())[1:]
        for hands in (1, 2, 3):
            assert [shown(part) for part in one.deal(hands)] == [shown(part) for part in other.deal(hands)]
        for count in range(1, one.count):
            assert [shown(part) for part in one.split(count)] == [shown(part) for part in other.split(count)]


@given(STREAMS, st.integers(0, 20), st.integers(0, 20))
def test_where_a_read_ends_does_not_matter(data: bytes, first: int, second: int) -> None:
    """Cut in three reads, the same packets come out: nothing depends on where the network cuts."""

    def flat(items: list[Any], base: int) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if not isinstance(item, tuple):
                found += [
                    (item.topic, item.first_id + (n if item.qos else 0), item.forward, p)
                    for n, p in enumerate(item.payloads())
                ]
            elif item[1] < 0:
                found += [(item[0], item[2] + n) for n in range(item[3])]
            else:
                found.append((item[0], item[1], item[2] + base, item[3] + base))
        return found

    whole, _, _, problem = mqtt.cut(data, 0, True, 1000)
    pieces: list[Any] = []
    at, last = 0, None
    for end in sorted({min(first, len(data)), min(second, len(data)), len(data)}):
        items, stop, _, last = mqtt.cut(data[at:end], 0, True, 1000)
        pieces += flat(items, at)
        at += stop
        if last is not None:
            break
    assert pieces == flat(whole, 0)
    assert last == problem


@given(st.binary(max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_both_read_properties_alike(data: bytes, start: int, end: int) -> None:
    results = []
    for kind in (mqtt, twin):
        try:
            results.append(kind.properties(data, start, end))
        except ValueError as exc:
            results.append(str(exc))
    assert results[0] == results[1]


@given(PROPERTIES)
def test_both_read_well_formed_properties_alike(data: bytes) -> None:
    assert mqtt.properties(data, 0, len(data)) == twin.properties(data, 0, len(data))


@given(st.lists(st.binary(max_size=200), max_size=4), st.integers(-1, 3), st.booleans())
def test_both_make_the_same_runs(payloads: list[bytes], qos: int, retain: bool) -> None:
    results = []
    for kind in (mqtt, twin):
        try:
            results.append(shown(kind.make_run(b"a/b", payloads, qos, retain, b"\x01\1", 7)))
        except ValueError as exc:
            results.append(str(exc))
    assert results[0] == results[1]


@given(st.integers(0, 65536), st.integers(-1, 4), st.sampled_from([0, 0x10, 0x97]))
def test_both_make_the_same_acknowledgements(first_id: int, count: int, reason: int) -> None:
    results = []
    for kind in (mqtt, twin):
        try:
            results.append(kind.ack_run(0x40, first_id, count, reason))
        except ValueError as exc:
            results.append(str(exc))
    assert results[0] == results[1]


def test_the_compiled_kernel_is_the_one_in_use() -> None:
    if not kernel.native:
        pytest.fail(kernel.reason)
    assert kernel.mqtt is mqtt
