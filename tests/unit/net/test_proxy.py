"""Promises of the PROXY header: read whole or byte by byte, bounded, and nothing behind it is touched."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given, strategies as st

from penstock.errors import ProtocolError
from penstock.net.proxy import SIGNATURE, ProxyHeader


def version_2(command: int, family: int, body: bytes) -> bytes:
    return SIGNATURE + bytes([0x20 | command, family]) + struct.pack(">H", len(body)) + body


IPV4 = socket.inet_aton("192.0.2.7") + socket.inet_aton("192.0.2.1") + struct.pack(">HH", 56010, 1883)
IPV6 = (
    socket.inet_pton(socket.AF_INET6, "2001:db8::7")
    + socket.inet_pton(socket.AF_INET6, "::1")
    + struct.pack(">HH", 1, 2)
)
HEADERS = [
    (b"PROXY TCP4 192.0.2.7 192.0.2.1 56010 1883\r\n", "192.0.2.7:56010"),
    (b"PROXY TCP6 2001:db8::7 ::1 1 2\r\n", "[2001:db8::7]:1"),
    (b"PROXY UNKNOWN\r\n", None),
    (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", None),
    (version_2(1, 0x11, IPV4), "192.0.2.7:56010"),
    (version_2(1, 0x11, IPV4 + b"\x04\x00\x03abc"), "192.0.2.7:56010"),
    (version_2(1, 0x21, IPV6), "[2001:db8::7]:1"),
    (version_2(0, 0x00, b""), None),
    (version_2(0, 0x11, IPV4), None),
    (version_2(1, 0x31, bytes(216)), None),
    (version_2(1, 0x00, b"whatever"), None),
]


@pytest.mark.parametrize(("header", "address"), HEADERS)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_header_is_read_however_it_is_cut(header: bytes, address: str | None, step: int) -> None:
    found = ProxyHeader("10.0.0.1:5")
    data = header + b"\x10rest"
    at, rest = 0, None
    while rest is None:
        rest = found.feed(data[at : at + step])
        at += step
    assert rest + data[at:] == b"\x10rest"
    assert found.address == address


BAD = [
    b"\x10\x0c\x00\x04MQTT",
    b"PROXY TCP4 192.0.2.7 192.0.2.1 56010\r\n",
    b"PROXY TCP4 192.0.2.777 192.0.2.1 1 2\r\n",
    b"PROXY TCP4 2001:db8::7 192.0.2.1 1 2\r\n",
    b"PROXY TCP4 192.0.2.7 192.0.2.1 99999 2\r\n",
    b"PROXY TCP4 192.0.2.7 192.0.2.1 -1 2\r\n",
    b"PROXY TCP4 " + b"1" * 200,
    b"PROXY \xff\r\n",
    b"PROXY UDP4 192.0.2.7 192.0.2.1 1 2\r\n",
    SIGNATURE + b"\x11\x11\x00\x0c" + IPV4,
    SIGNATURE + b"\x22\x11\x00\x0c" + IPV4,
    SIGNATURE + b"\x21\x11\xff\xff",
    version_2(1, 0x11, IPV4[:8]),
]


@pytest.mark.parametrize("data", BAD)
def test_what_is_no_header_drops_the_peer(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"10\.0\.0\.1:5 in PROXY header"):
        ProxyHeader("10.0.0.1:5").feed(data)


@given(st.binary(max_size=300), st.sampled_from([b"", SIGNATURE, b"PROXY ", b"PROXY TCP4 1.2.3.4 "]))
def test_no_bytes_do_more_than_raise(data: bytes, start: bytes) -> None:
    header = ProxyHeader("peer")
    try:
        rest = header.feed(start + data)
    except ProtocolError:
        return
    assert rest is None or data.endswith(rest)
