"""Promise: frames are cut by the compiled kernel as by its plain twin, and as the library cuts them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from websockets.frames import Frame, Opcode

from penstock import kernel
from penstock.errors import ProtocolError
from penstock.kernel import wsframes
from penstock.kernel.twin import wsframes as twin
from penstock.net.websocket import WebSocketFilter, WebSocketOptions

MOST = 300
REQUEST = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
FRAMES = st.builds(
    lambda opcode, data, fin, masked: Frame(opcode, data, fin).serialize(mask=masked),
    st.sampled_from([Opcode.BINARY] * 6 + [Opcode.PING, Opcode.PONG, Opcode.CONT]),
    st.one_of(st.binary(max_size=20), st.binary(min_size=120, max_size=125)),
    st.just(True),
    st.booleans(),
)
STREAMS = st.lists(
    st.one_of(FRAMES, FRAMES, st.binary(max_size=6), st.just(b"\x82\xff" + b"\xff" * 8), st.just(b"\x82\xfe\x01\x2d")),
    max_size=6,
).map(b"".join)


@pytest.mark.skipif(not kernel.native, reason="there is no compiled kernel to compare")
@settings(deadline=None, max_examples=400)
@given(STREAMS, st.integers(0, 8), st.booleans(), st.sampled_from([0, 5, MOST, 17 << 20]), st.booleans())
def test_both_kernels_cut_the_same_frames(data: bytes, start: int, masked: bool, most: int, whole: bool) -> None:
    start = min(start, len(data))
    assert wsframes.cut_frames(data, start, masked, most, whole) == twin.cut_frames(data, start, masked, most, whole)


@pytest.mark.parametrize("cut", [wsframes.cut_frames, twin.cut_frames])
def test_a_start_outside_of_the_bytes_is_refused(cut: Any) -> None:
    for start, most in ((4, 1), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="bytes, at most"):
            cut(b"abc", start, True, most)


MESSAGES = st.lists(
    st.one_of(
        st.binary(max_size=140).map(lambda data: [Frame(Opcode.BINARY, data)]),
        st.lists(st.binary(max_size=60), min_size=2, max_size=4).map(
            lambda parts: [
                Frame(Opcode.CONT if at else Opcode.BINARY, part, at == len(parts) - 1) for at, part in enumerate(parts)
            ]
        ),
        st.binary(max_size=125).map(lambda data: [Frame(Opcode.PING, data)]),
        st.just([Frame(Opcode.PONG, b"")]),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=300)
@given(MESSAGES, st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_a_filter_finds_every_payload_in_any_cut(messages: list[list[Frame]], sizes: list[int]) -> None:
    frames = [frame for message in messages for frame in message]
    stream = REQUEST + b"".join(frame.serialize(mask=True) for frame in frames)
    ws = WebSocketFilter(WebSocketOptions(max_frame_bytes=MOST), "peer")
    found, said, at, turn = b"", b"", 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        found += b"".join(ws.receive(stream[at : at + size]))
        said += ws.answers()
        at, turn = at + size, turn + 1
    assert found == b"".join(frame.data for frame in frames if frame.opcode in (Opcode.BINARY, Opcode.CONT))
    pongs = b"".join(
        Frame(Opcode.PONG, frame.data).serialize(mask=False) for frame in frames if frame.opcode is Opcode.PING
    )
    assert said.partition(b"\r\n\r\n")[2] == pongs


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60), st.integers(1, 60))
def test_a_filter_takes_any_bytes_or_says_why_not(data: bytes, size: int) -> None:
    ws = WebSocketFilter(WebSocketOptions(max_frame_bytes=MOST), "peer")
    ws.receive(REQUEST)
    try:
        for at in range(0, len(data), size):
            ws.receive(data[at : at + size])
    except ProtocolError as exc:
        assert "WebSocket frame" in str(exc)
