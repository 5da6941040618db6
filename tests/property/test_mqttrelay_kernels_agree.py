"""Promise: the compiled short way and its plain twin pass on the same reads to the same receivers, or neither."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock import kernel
from penstock.kernel import mqttrelay
from penstock.kernel.twin import mqttrelay as twin
from penstock.kernel.twin.mqtt import encode_varint

TOPICS = [b"a", b"a/b", b"$SYS/x", b"+", b"\xff", b"\xc3\xa9", b""]
RECEIVERS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 3, 1000])), max_size=3
)  # has a connection, takes messages, version 5, plain payload


def publish(first: int, topic: bytes, properties: bytes | None, payload: bytes, lack: int) -> bytes:
    body = len(topic).to_bytes(2, "big") + topic + (properties or b"") + payload
    return (bytes([first]) + encode_varint(len(body)) + body)[: -lack or None]


READS = st.one_of(
    st.builds(
        publish,
        st.sampled_from([0x30, 0x30, 0x30, 0x30, 0x31, 0x38, 0x32, 0x40]),
        st.sampled_from(TOPICS),
        st.sampled_from([None, b"\0", b"\0", b"\x02\x01\x01", b"\x03\x23\0\x01", b"\x7f"]),
        st.binary(max_size=6),
        st.sampled_from([0, 0, 0, 1, 3]),
    ),
    st.binary(max_size=8),
)


def passed(module: Any, reads: list[bytes], version5: bool, limit: int, receivers: Any, version: int) -> Any:
    """Return what each receiver was given, and what was counted."""
    written: list[tuple[int, bytes]] = []
    outlets = []
    for number, (linked, ready, speaks5, most) in enumerate(receivers):
        outlet = module.Outlet()
        if linked:
            outlet.link = module.Sink()
            outlet.link.write = lambda data, number=number: written.append((number, data))
            outlet.link.version5, outlet.link.plain_payload = speaks5, most
        outlet.ready = ready
        outlets.append(outlet)
    routes, counts, way, closed = module.WayCache(), module.Traffic(), module.Way(), module.Way()
    way.outlets, closed.outlets = tuple(outlets), None
    routes._version = 1
    routes._young = {topic: module.CachedWay(way, version) for topic in TOPICS if topic != b"a/b"}
    routes._young[b"a/b"] = module.CachedWay(closed, 1)
    answers = [module.relay(data, version5, limit, routes, counts) for data in reads]
    names = [name + end for name in ("bytes", "messages", "publish", "publish_bytes") for end in ("_received", "_sent")]
    return answers, written, [getattr(counts, name) for name in names], [each.delivered for each in outlets]


@pytest.mark.skipif(not kernel.native, reason="there is no compiled kernel to compare")
@settings(deadline=None, max_examples=600)
@given(
    st.lists(st.one_of(READS, st.lists(READS, min_size=2, max_size=2).map(b"".join)), max_size=5),
    st.booleans(), st.sampled_from([1 << 20, 9]), RECEIVERS, st.sampled_from([1, 1, 1, 2]),
)  # fmt: skip
def test_both_kernels_pass_on_the_same(
    reads: list[bytes], version5: bool, limit: int, receivers: Any, version: int
) -> None:
    found = passed(mqttrelay, reads, version5, limit, receivers, version)
    assert found == passed(twin, reads, version5, limit, receivers, version)


@pytest.mark.parametrize("module", [mqttrelay, twin])
@pytest.mark.parametrize(
    ("data", "receivers"),
    [
        (b"\x30\x04\0\1a!" * 2, [(True, True, False, 1000)]),  # two packets
        (b"\x32\x06\0\1a\0\1!", [(True, True, False, 1000)]),  # QoS 1
        (b"\x31\x04\0\1a!", [(True, True, False, 1000)]),  # retained
        (b"\x30\x04\0\1a", [(True, True, False, 1000)]),  # not all there
        (b"\x30\x06\0\3$a/!", [(True, True, False, 1000)]),
        (b"\x30\x05\0\2zz!", [(True, True, False, 1000)]),  # not seen yet
        (b"\x30\x04\0\1a!", [(True, True, False, 1000), (True, False, False, 1000)]),  # one is slow
        (b"\x30\x04\0\1a!", [(True, True, True, 1000)]),  # another version
        (b"\x30\x04\0\1a!", [(True, True, False, 1)]),  # its packets may be too large
    ],
)
def test_what_needs_a_look_is_not_passed_on(module: Any, data: bytes, receivers: Any) -> None:
    answers, written, counts, _ = passed(module, [data], False, 1 << 20, receivers, 1)
    assert (answers, written, set(counts)) == ([False], [], {0})


@pytest.mark.parametrize("module", [mqttrelay, twin])
def test_a_plain_publish_goes_to_everyone_as_it_came(module: Any) -> None:
    data = b"\x30\x04\0\1a!"
    answers, written, counts, given_ = passed(module, [data], False, 1 << 20, [(True, True, False, 2)] * 2, 1)
    assert answers == [True]
    assert written == [(0, data), (1, data)]
    assert counts == [6, 12, 1, 2, 1, 2, 1, 2]
    assert given_ == [1, 1]


@pytest.mark.parametrize("module", [mqttrelay, twin])
def test_a_receiver_that_goes_while_another_is_written_to_is_passed_over(module: Any) -> None:
    first, second, written = module.Outlet(), module.Outlet(), []
    for outlet in (first, second):
        outlet.link, outlet.ready = module.Sink(), True
        outlet.link.version5, outlet.link.plain_payload = False, 1000
    second.link.write = written.append

    def goes(data: bytes) -> None:
        second.link = None

    first.link.write = goes
    routes, way = module.WayCache(), module.Way()
    way.outlets, routes._version = (first, second), 1
    routes._young = {b"a": module.CachedWay(way, 1)}
    assert module.relay(b"\x30\x04\0\1a!", False, 1 << 20, routes, module.Traffic())
    assert (first.delivered, second.delivered, written) == (1, 0, [])
