"""PGSS, version 2: the bytes of an append log, shared with slipstream.

    log    := header record*
    header := "PGSS" version:u16=2                                        (6 bytes)
    record := crc32:u32 type:u8 payload                                   little-endian

    put    (1)  key_len:u16 key value_len:u32 value ver_len:u8 version
    delete (2)  key_len:u16 key ver_len:u8 version
    cursor (3)  cur_len:u8 cursor

     0       4      5         7              …
     +-------+------+---------+---- … ----+-----------+---- … ----+---------+---- … ----+
     | crc32 | type | key_len | key       | value_len | value     | ver_len | version   |
     +-------+------+---------+---- … ----+-----------+---- … ----+---------+---- … ----+

crc32 is zlib's, over everything behind it.  Keys are UTF-8, values at most 16 MiB, versions and cursors at
most 10 bytes; a cursor of no bytes is "none" and takes back the one before.  A purge is written as a
delete.  A compacted log has the puts in byte order of the key, each once, and one cursor unless it is none.

Worked example and reasons: docs/formats/pgss.md.  The kernel reads and writes the records.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterable
from typing import Final

from penstock.batch import UpdateBatch
from penstock.errors import CorruptionError, OptionsError, UnsupportedError
from penstock.kernel import pgss
from penstock.types import KvUpdate

__all__ = ["HEADER", "Status", "check_header", "cursor_record", "encode_updates", "refusal"]

MAGIC: Final = b"PGSS"
VERSION: Final = 2
HEADER: Final = MAGIC + struct.pack("<H", VERSION)


class Status(enum.IntEnum):
    """How a replay ended; the kernel returns these numbers.

    >>> Status(0).name
    'CLEAN'
    """

    CLEAN = 0
    TRUNCATED = 1
    TORN = 2
    BAD_CRC = 3
    HOLE = 4
    BAD_TYPE = 5
    BAD_VERSION = 6
    BAD_CURSOR = 7
    BAD_KEY = 8


REASONS: Final = {
    Status.BAD_CRC: "the checksum of the record is wrong, and more follows",
    Status.HOLE: "a hole of zeros in front of data",
    Status.BAD_TYPE: "unknown record type: {detail:#x}",
    Status.BAD_VERSION: "a version of {detail} bytes, where 10 is the most",
    Status.BAD_CURSOR: "a cursor of {detail} bytes, where 10 is the most",
    Status.BAD_KEY: "the key is not UTF-8",
}


def check_header(path: str, data: bytes) -> None:
    r"""Refuse what does not begin like a log of this version.

    >>> check_header("a.snap", b"PGSS\x01\x00")
    Traceback (most recent call last):
    penstock.errors.UnsupportedError: a.snap: PGSS version 1 is not read by this release
    """
    if len(data) < len(HEADER):
        raise CorruptionError(path, 0, "file too short")
    if data[:4] != MAGIC:
        raise CorruptionError(path, 0, "bad magic")
    version = int.from_bytes(data[4:6], "little")
    if version != VERSION:
        raise UnsupportedError(f"{path}: PGSS version {version} is not read by this release")


def refusal(path: str, byte: int, status: int, detail: int) -> CorruptionError:
    """Return the error for a replay that ended badly.

    >>> str(refusal("a.snap", 6, 5, 4))
    'a.snap at byte 6: unknown record type: 0x4'
    """
    return CorruptionError(path, byte, REASONS[Status(status)].format(detail=detail))


def cursor_record(token: bytes) -> bytes:
    """Return the cursor record of a token.

    >>> cursor_record(b"").hex(" ")
    '3c 41 f4 6a 03 00'
    """
    body = bytes((3, len(token))) + token
    return struct.pack("<I", zlib.crc32(body)) + body


def encode_updates(path: str, updates: UpdateBatch | Iterable[KvUpdate]) -> bytearray:
    """Return the records of updates; OptionsError for what no reader would take.

    >>> encode_updates("a.snap", [KvUpdate.delete("a")]).hex(" ")
    'fe 99 b8 78 02 01 00 61 00'
    """
    try:
        if isinstance(updates, list):
            return pgss.encode_list(updates)
        if not isinstance(updates, UpdateBatch):
            return pgss.encode_list(list(updates))
        batch, keys, values, versions = updates, updates.keys, updates.values, updates.versions
        return pgss.encode(
            memoryview(batch.buffer).cast("B"), batch.ops, keys.offsets, keys.lengths, values.offsets, values.lengths,
            versions.offsets, versions.lengths,
        )  # fmt: skip
    except ValueError as exc:
        raise OptionsError(f"{path}: {exc}") from None
