"""The files of a message log, byte for byte those of narwhal 0.7.0: shared by writer, reader and kernel.

    log     := segment+                <20 digits>.log and its <20 digits>.idx, in one folder
    segment := entry*                  back to back, no header, no padding

    entry, little-endian:

     0      8              16           18            22
     +------+--------------+------------+-------------+--- … ---+--- … ---+-------+
     | seq  | timestamp_ms | sender_len | payload_len | sender  | payload | crc32 |
     | u64  |     u64      |    u16     |     u32     |         |         |  u32  |
     +------+--------------+------------+-------------+--- … ---+--- … ---+-------+

``crc32`` is zlib's, over everything before it.  ``seq`` begins with 1 and grows from entry to entry; gaps are
allowed.  The number in a file name is the seq for which the segment was made: that of its first entry, or after a
roll the last one plus 1, whether that is ever written or not.  A segment is full when it is longer than
``segment_bytes``; only the last one is written to.

    index := (relative_seq:u32 offset:u64)*       12 bytes each; relative_seq = seq - number in the name, 32 bits of it

An entry goes into the index if its offset is 0, or if 4096 bytes or more lie between it and the one indexed before.
The index of the active segment is as long as it can get, (segment_bytes / 4096 + 1) × 12, and zero behind its last
entry; it is cut when the segment is sealed.

Worked example and reasons: docs/formats/messagelog.md
"""

from __future__ import annotations

import enum
import re
import struct
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["LogEntry", "EntryStop", "index_capacity", "segment_name", "segment_number"]

HEAD: Final = struct.Struct("<QQHI")
CRC_BYTES: Final = 4
ENTRY_OVERHEAD: Final = HEAD.size + CRC_BYTES
COLUMNS: Final = 6
"""What the kernel says of an entry: seq, time in ns, sender offset and length, payload offset and length."""
MAX_SENDER_BYTES: Final = 510
MAX_SEQ: Final = (1 << 64) - 1
MAX_POSITION: Final = (1 << 63) - 1
INDEX_EVERY: Final = 4096
INDEX_ENTRY: Final = np.dtype([("relative", "<u4"), ("offset", "<u8")])
LOG: Final = ".log"
INDEX: Final = ".idx"
BAD: Final = ".bad"
NAME: Final = re.compile(r"\d{20}\.log", re.ASCII)
NUMBER: Final = re.compile(r"\+?(\d+)\.log", re.ASCII)

Index = NDArray[Any]


class EntryStop(enum.IntEnum):
    """Why a walk over entries stopped: the numbers of kernel/messagelog.pyx and its twin."""

    LIMIT = 0
    END = 1
    SHORT = 2
    BAD_CRC = 3


class LogEntry(msgspec.Struct, frozen=True):
    """One entry with its numbers as they are on disk, also those that no position can express.

    >>> LogEntry(7, 1767225600000, b"ann@localhost", b"hi!").seq
    7
    """

    seq: int
    timestamp_ms: int
    sender: bytes
    payload: bytes


def segment_name(seq: int) -> str:
    """Return the name of the segment made for ``seq``, without an ending.

    >>> segment_name(7)
    '00000000000000000007'
    """
    return f"{seq:020d}"


def segment_number(name: str) -> int | None:
    """Return the number of a segment file, or None for any other name.

    >>> segment_number("00000000000000000007.log"), segment_number("7.log"), segment_number("abc.log")
    (7, None, None)
    """
    if not NAME.fullmatch(name):
        return None
    number = int(name[:20])
    return number if number <= MAX_SEQ else None


def stray_number(name: str) -> int | None:
    """Return the number of a file that looks like a segment but is not named like one.

    The original passes over such files, yet lets them decide which segment is the last.

    >>> stray_number("50.log"), stray_number("+60.log"), stray_number("00000000000000000007.log")
    (50, 60, None)
    """
    found = NUMBER.fullmatch(name)
    if found is None or NAME.fullmatch(name):
        return None
    number = int(found[1])
    return number if number <= MAX_SEQ else None


def index_capacity(segment_bytes: int) -> int:
    """Return the size of an active segment's index file.

    >>> index_capacity(128 << 20)
    393228
    """
    return (segment_bytes // INDEX_EVERY + 1) * INDEX_ENTRY.itemsize


def used_index(data: bytes) -> Index:
    """Return the entries of an index that can be: from offset 0 on, both columns growing.

    The first relative_seq is 0 unless a gap in the numbers lies between the name of the segment and its first entry.

    >>> len(used_index(bytes(12 * 5)))
    1
    """
    index = np.frombuffer(data[: len(data) // INDEX_ENTRY.itemsize * INDEX_ENTRY.itemsize], INDEX_ENTRY)
    if not len(index) or index[0]["offset"]:
        return index[:0]
    grows = (index["relative"][1:] > index["relative"][:-1]) & (index["offset"][1:] > index["offset"][:-1])
    stop = np.flatnonzero(~grows)
    return index[: int(stop[0]) + 1] if len(stop) else index


def index_problem(data: bytes, true_index: Index, size: int, capacity: int) -> tuple[int, str] | None:
    """Return (byte, reason) of the first thing wrong with a sealed index, or None.

    ``true_index`` is the one rebuilt from the ``size`` bytes of intact entries; a stored index may have fewer entries.
    """
    if not 0 < len(data) <= capacity or len(data) % INDEX_ENTRY.itemsize:
        return 0, f"{len(data)} bytes are not the size of an index of at most {capacity}"
    index = used_index(data)
    if len(index) * INDEX_ENTRY.itemsize < len(data):
        return len(index) * INDEX_ENTRY.itemsize, "the entries do not grow from offset 0 on"
    if int(index["offset"][-1]) + HEAD.size > size:
        return len(data) - INDEX_ENTRY.itemsize, f"offset {int(index['offset'][-1])} is behind the intact entries"
    if not len(true_index):  # the segment was changed between two looks at it
        return 0, "there are no entries it could point to"
    where = np.searchsorted(true_index["offset"], index["offset"])
    where[where == len(true_index)] = 0
    wrong = np.flatnonzero(true_index[where] != index)
    if len(wrong):
        return int(wrong[0]) * INDEX_ENTRY.itemsize, "an entry points to where no entry of that number begins"
    return None
