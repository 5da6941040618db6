"""The PROXY protocol, versions 1 and 2: the header with which a load balancer says who connects.

    v1 := "PROXY " ("TCP4" | "TCP6") " " source " " destination " " port " " port CRLF        at most 107 bytes
        | "PROXY UNKNOWN" anything CRLF
    v2 := signature:12  version_and_command:u8  family:u8  length:u16  addresses  TLVs       big-endian

Where a listener expects it, it has to be there: whoever may leave it out could also make one up.  It comes before TLS,
in whole or byte by byte, and nothing behind it is touched.  The caller bounds the time.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from penstock.errors import ProtocolError

__all__ = ["ProxyHeader"]

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
MAX_V1: Final = 107
MAX_V2_BODY: Final = 4096
"""Addresses and TLVs; a header with a client certificate's name and an ALPN stays far below."""

_ADDRESS_BYTES: Final = {1: 12, 2: 36, 3: 216}  # family (high half of its byte) → bytes that hold the addresses


class ProxyHeader:
    r"""Collects bytes until the header is whole.

    >>> header = ProxyHeader("10.0.0.1:5000")
    >>> header.feed(b"PROXY TCP4 192.0.2.7 192.0.2.1 5601"), header.feed(b"0 1883\r\nrest")
    (None, b'rest')
    >>> header.host, header.address
    ('192.0.2.7', '192.0.2.7:56010')
    """

    __slots__ = ("_unread", "address", "host", "peer")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.host: str | None = None
        """The client's address, None where the header does not tell (a health check of the balancer itself)."""
        self.address: str | None = None
        """The same with its port, as a peer is called."""
        self._unread = b""

    def feed(self, data: bytes) -> bytes | None:
        """Return what follows the header, or None while it is not whole."""
        self._unread += data
        unread = self._unread
        if unread.startswith(SIGNATURE[: len(unread)]):
            return self._version_2(unread)
        if unread.startswith(b"PROXY "[: len(unread)]):
            return self._version_1(unread)
        raise self._error("no PROXY header")

    def _version_1(self, unread: bytes) -> bytes | None:
        end = unread.find(b"\r\n", 0, MAX_V1)
        if end < 0:
            if len(unread) >= MAX_V1:
                raise self._error(f"a line longer than {MAX_V1} bytes")
            return None
        try:
            words = unread[:end].decode("ascii").split(" ")
        except UnicodeDecodeError as exc:
            raise self._error("a line that is not ASCII") from exc
        if words[1] != "UNKNOWN":
            if words[1] not in ("TCP4", "TCP6") or len(words) != 6:
                raise self._error(f"the line {' '.join(words)!r}")
            self._known(words[2], words[4], 4 if words[1] == "TCP4" else 6)
        return unread[end + 2 :]

    def _version_2(self, unread: bytes) -> bytes | None:
        if len(unread) < 16:
            return None
        version, command = unread[12] >> 4, unread[12] & 15
        family, length = unread[13] >> 4, int.from_bytes(unread[14:16], "big")
        if version != 2 or command > 1:
            raise self._error(f"version and command 0x{unread[12]:02x}")
        if length > MAX_V2_BODY:
            raise self._error(f"{length} bytes of addresses, at most {MAX_V2_BODY} are read")
        if len(unread) < 16 + length:
            return None
        body = unread[16 : 16 + length]
        if command == 1 and family in _ADDRESS_BYTES:  # PROXY; LOCAL and unknown families tell nothing
            if length < _ADDRESS_BYTES[family]:
                raise self._error(f"{length} bytes of addresses for family {family}")
            if family == 1:
                self._known(str(ipaddress.IPv4Address(body[:4])), str(int.from_bytes(body[8:10], "big")), 4)
            elif family == 2:
                self._known(str(ipaddress.IPv6Address(body[:16])), str(int.from_bytes(body[32:34], "big")), 6)
        return unread[16 + length :]

    def _known(self, host: str, port: str, version: int) -> None:
        try:
            ip = ipaddress.ip_address(host)
        except ValueError as exc:
            raise self._error(f"the address {host!r}") from exc
        if ip.version != version or not port.isdecimal() or not port.isascii() or int(port) > 65_535:
            raise self._error(f"the address {host!r} with port {port!r}")
        self.host = str(ip)
        self.address = f"[{ip}]:{int(port)}" if version == 6 else f"{ip}:{int(port)}"

    def _error(self, reason: str) -> ProtocolError:
        return ProtocolError(self.peer, "PROXY header", reason)
