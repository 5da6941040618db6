"""The same as ``penstock.kernel.wsframes``, in plain Python."""

from __future__ import annotations

__all__ = ["cut_frames"]


def cut_frames(data: bytes, start: int, masked: bool, most: int, whole: bool = True) -> tuple[bytes, int, int]:
    """Return (payloads of the binary frames from start, where these end, size of the frame that follows)."""
    if not 0 <= start <= len(data) or most < 0:
        raise ValueError(f"start {start} of {len(data)} bytes, at most {most}")
    found: list[bytes] = []
    at, size = start, 0
    while at < len(data):
        size, key = _measure(data[at : at + 14], masked, most)
        if not whole or size <= 0 or data[at] != 0x82 or at + size > len(data):
            return b"".join(found), at, size
        payload = data[at + size - _length(data[at + 1 : at + 10]) : at + size]
        found.append(bytes(byte ^ key[i & 3] for i, byte in enumerate(payload)) if masked else payload)
        at += size
    return b"".join(found), at, 0


def _length(head: bytes) -> int:
    """Return the length of a payload, from the second byte of its frame on."""
    short = head[0] & 127
    return short if short < 126 else int.from_bytes(head[1 : 3 if short == 126 else 9], "big")


def _measure(head: bytes, masked: bool, most: int) -> tuple[int, bytes]:
    """Return the size of a frame and its key."""
    if len(head) < 2:
        return 0, b""
    if (head[1] >= 128) != masked:
        return -1, b""
    before = {126: 4, 127: 10}.get(head[1] & 127, 2)
    if len(head) < before:
        return 0, b""
    length = _length(head[1:])
    if length > most:
        return -1, b""
    return before + (4 if masked else 0) + length, head[before : before + 4]
