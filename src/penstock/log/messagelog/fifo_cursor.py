"""cursor.bin: where the head of a FIFO channel is, next to its message log.

     0          8       12     16
     +----------+-------+------+
     | next_seq | crc32 | zero |        little-endian; crc32 is zlib's over bytes 0..8; the zeros are not checked
     +----------+-------+------+

``next_seq`` is the number of the entry that is popped next: last seq + 1 when the queue is empty.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Final

from penstock.disk import Disk, ReadDisk, save_atomically
from penstock.errors import CorruptionError, OptionsError

__all__ = ["CURSOR_FILE", "encode_cursor", "decode_cursor", "check_cursor", "load_cursor", "save_cursor"]

CURSOR_FILE: Final = "cursor.bin"
CURSOR: Final = struct.Struct("<QI4x")


def encode_cursor(next_seq: int) -> bytes:
    """Return the 16 bytes of a cursor.

    >>> encode_cursor(8).hex(" ")
    '08 00 00 00 00 00 00 00 dc c4 c7 b6 00 00 00 00'
    """
    if not 1 <= next_seq < 1 << 64:
        raise OptionsError(f"next_seq={next_seq}: must be between 1 and 2^64")
    return CURSOR.pack(next_seq, zlib.crc32(struct.pack("<Q", next_seq)))


def decode_cursor(data: bytes, file: str = CURSOR_FILE) -> int:
    """Return next_seq; CorruptionError when the bytes are no cursor.

    >>> decode_cursor(encode_cursor(8))
    8
    """
    if len(data) != CURSOR.size:
        raise CorruptionError(file, 0, f"a cursor has 16 bytes, not {len(data)}")
    next_seq, stored = CURSOR.unpack(data)
    computed = zlib.crc32(data[:8])
    if stored != computed:
        raise CorruptionError(file, 8, f"crc32 is {stored:08x}, the bytes say {computed:08x}")
    if next_seq == 0:
        raise CorruptionError(file, 0, "next_seq is 0, numbers begin with 1")
    return int(next_seq)


def check_cursor(next_seq: int, first_seq: int, last_seq: int, file: str = CURSOR_FILE) -> None:
    """Refuse a cursor that does not fit the log beside it.

    >>> check_cursor(8, 1, 7)
    >>> check_cursor(10, 1, 8)
    Traceback (most recent call last):
    penstock.errors.CorruptionError: cursor.bin at byte 0: next_seq is 10, but the log ends with 8
    """
    if next_seq > last_seq + 1:
        raise CorruptionError(file, 0, f"next_seq is {next_seq}, but the log ends with {last_seq}")
    if next_seq <= last_seq and first_seq > next_seq:
        raise CorruptionError(file, 0, f"next_seq is {next_seq}, but the log begins with {first_seq}")


def load_cursor(disk: ReadDisk, folder: str, first_seq: int, last_seq: int) -> int:
    """Return next_seq of the cursor in ``folder``; CorruptionError when it is missing, broken or does not fit."""
    path = os.path.join(folder, CURSOR_FILE)
    try:
        with disk.open(path) as file:
            data = file.read_at(0, CURSOR.size + 1)
    except FileNotFoundError:
        raise CorruptionError(path, 0, "there is no cursor") from None
    next_seq = decode_cursor(data, path)
    check_cursor(next_seq, first_seq, last_seq, path)
    return next_seq


def save_cursor(disk: Disk, folder: str, next_seq: int) -> None:
    """Replace the cursor in ``folder``; it survives a power cut when this returns.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk(); save_cursor(disk, ".", 8); load_cursor(disk, ".", 1, 7)
    8
    """
    save_atomically(disk, os.path.join(folder, CURSOR_FILE), encode_cursor(next_seq))
