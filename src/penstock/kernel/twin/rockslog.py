"""The same as ``penstock.kernel.rockslog``, in plain Python."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["good", "walk"]

BLOCK: Final = 32 << 10
HEAD: Final = 7
NUMBERED: Final = frozenset({5, 6, 7, 8, 11})


def _row(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


TABLE: Final = [_row(value) for value in range(256)]


def _masked(data: bytes) -> int:
    """Return the CRC-32C of some bytes as RocksDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _sums(data: bytes, at: int, length: int) -> bool:
    return int.from_bytes(data[at : at + 4], "little") == _masked(data[at + HEAD - 1 : at + HEAD + length])


def _length(data: bytes, at: int) -> int:
    return data[at + 4] | data[at + 5] << 8


def walk(data: Any) -> tuple[int, int]:
    """Return where the first record with a number of its file begins, and the first place that has no good record."""
    data, bad = bytes(data), -1
    for block in range(0, len(data), BLOCK):
        at, end = block, min(block + BLOCK, len(data))
        while end - at >= HEAD:
            length, kind = _length(data, at), data[at + 6]
            if kind in NUMBERED:
                return at, at if bad < 0 else bad
            if length > end - at - HEAD or (not kind and not length) or (bad < 0 and not _sums(data, at, length)):
                break
            at += HEAD + length
        if bad < 0 and at < end and (end - at >= HEAD or end - block < BLOCK):
            bad = at
    return -1, bad


def good(data: Any, start: int) -> int:
    """Return where a good record begins in this block at or behind ``start``, or -1."""
    data = bytes(data)[:BLOCK]
    if start < 0:
        return -1
    for at in range(start, len(data) - HEAD + 1):
        length = _length(data, at)
        if data[at + 6] and length <= len(data) - at - HEAD and _sums(data, at, length):
            return at
    return -1
