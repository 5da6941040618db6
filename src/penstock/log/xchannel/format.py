"""The files of an xchannel, byte for byte those of xchannel 2.0.0: shared by writer, reader and kernel.

    channel := file+                    <base>, <base>.1, <base>.2, …    (decimal, no leading zeros)
    file    := region+                  every region has region_bytes, the same in every file
    region  := record* slot zero*       region 0 begins with the Channel record
    slot    := a record header that is not committed yet: kind User, everything else 0

    record, little-endian, starting on a multiple of 8, never crossing its region:

     0           1      2      4          8               16
     +-----------+------+------+----------+---------------+--- … ---+--- … ---+
     | committed | kind | type | length   | timestamp_ns  | payload | padding |
     |    u8     |  u8  | u16  |   u32    |      u64      |         | to 8    |
     +-----------+------+------+----------+---------------+--- … ---+--- … ---+

``committed`` is the only byte two processes meet at: 0 not yet, 1 yes, stored last and with release; whoever
sees 1 sees the whole record and a header behind it.  ``kind`` is the record's, ``type`` the application's (this
package calls it the kind of a message).  Values of kind are on disk for ever:

    0 Channel   the first record of a file; its payload is the channel header
    1 User      a message
    2 Skip      nothing more in this region; length = what is left of it, so the next record begins the next
    3 Roll      the last record of a file: go on in the next one; timestamp_ns is the wall clock

    channel header, 64 bytes at byte 16 of the file:

    16  write_position   u64   offset of the next slot + 16; after a Roll its slot + 32
    24  message_count    u64   1 for the Channel record, + 1 for each User and each Skip
    32  channel_sequence u64   the number in the file name
    40  region_size      u32
    44  mtu              u32   the largest message, 0 for no limit, low 32 bits
    48  channel_name     32 bytes, zero; newer formats keep their version there

A record fits at offset o of a region iff o + a8(16 + length) + 16 ≤ region_bytes: every record leaves room for
the header behind it, so a Skip and a Roll always fit.  A file is rolled before a record for which
slot + a8(16 + length) + 16 > roll_bytes.

Worked example and reasons: docs/formats/xchannel.md
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec

from penstock.errors import CorruptionError, OptionsError, UnsupportedError

__all__ = ["RecordKind", "RecordStop", "ChannelHeader", "position_of", "split_position", "file_path"]

RECORD: Final = struct.Struct("<BBHIQ")
HEADER: Final = struct.Struct("<QQQII32s")
SLOT_BYTES: Final = 16
FIRST_SLOT: Final = 80
PRISTINE: Final = RECORD.pack(0, 1, 0, 0, 0)
OFFSET_BITS: Final = 40
MAX_FILE_BYTES: Final = 1 << OFFSET_BITS  # a position has no room for more
MAX_SEQUENCE: Final = (1 << 63 - OFFSET_BITS) - 1
SMALLEST_PAGE: Final = 4096


class RecordKind(enum.IntEnum):
    """The kind of a record: on disk for ever, add and never renumber."""

    CHANNEL = 0
    USER = 1
    SKIP = 2
    ROLL = 3


class RecordStop(enum.IntEnum):
    """Why a walk over records stopped: the numbers of kernel/xchannel.pyx and its twin."""

    LIMIT = 0
    TAIL = 1
    END = 2
    ROLLED = 3
    TRUNCATED = 4
    BAD_COMMIT = 5
    BAD_KIND = 6
    PAST_REGION = 7
    NO_SLOT = 8
    SHORT_SKIP = 9
    STRAY_CHANNEL = 10


NEWER: Final = {1: "3.0", 2: "4.x", 3: "5.x and 6.x", 4: "7.x"}


class ChannelHeader(msgspec.Struct, frozen=True):
    """What the first 80 bytes of a file say."""

    write_position: int
    message_count: int
    sequence: int
    region_bytes: int
    max_message_bytes: int
    name: bytes = bytes(32)

    def encode(self) -> bytes:
        """Return the bytes of a fresh file up to and including its first slot."""
        channel = RECORD.pack(1, RecordKind.CHANNEL, 0, HEADER.size, 0)
        fields = HEADER.pack(
            self.write_position,
            self.message_count,
            self.sequence,
            self.region_bytes,
            self.max_message_bytes & 0xFFFFFFFF,
            self.name,
        )
        return channel + fields + PRISTINE

    @classmethod
    def fresh(cls, sequence: int, region_bytes: int, max_message_bytes: int) -> ChannelHeader:
        """Return the header of a file without a message."""
        return cls(FIRST_SLOT + SLOT_BYTES, 1, sequence, region_bytes, max_message_bytes)

    @classmethod
    def decode(cls, path: str, data: bytes) -> ChannelHeader:
        """Read the first bytes of a file; refuse what is not a channel of this format, by name."""
        if not data:
            raise CorruptionError(path, 0, "the file is empty: its writer never initialised it")
        if len(data) < FIRST_SLOT:
            raise CorruptionError(path, len(data), "the file ends inside the channel header")
        committed, kind, _, length, _ = RECORD.unpack_from(data)
        if not any(data[:FIRST_SLOT]):
            raise CorruptionError(path, 0, "all zeros: its writer never initialised it")
        if kind != RecordKind.CHANNEL:
            name = RecordKind(kind).name.capitalize() if kind <= RecordKind.ROLL else f"of kind {kind}"
            raise CorruptionError(path, 1, f"the first record is {name}, not Channel")
        if committed == 0:
            raise CorruptionError(path, 0, "the channel record is not committed: never initialised")
        if committed != 1:
            raise CorruptionError(path, 0, f"commit byte is {committed}")
        version = int.from_bytes(data[48:50] if length == HEADER.size else data[56:58], "little")
        newer = {64: (1,), 128: (2, 3), 192: (4,)}.get(length, ())
        if version in newer:
            raise UnsupportedError(
                f"{path}: xchannel format v{version} (written by release {NEWER[version]}) is not "
                "read by this release; it reads the format of xchannel 2.x and earlier"
            )
        if length != HEADER.size:
            raise CorruptionError(path, 4, f"the channel record has length {length}, not 64")
        header = cls(*HEADER.unpack_from(data, SLOT_BYTES))
        if header.region_bytes == 0 or header.region_bytes % SMALLEST_PAGE:
            raise CorruptionError(path, 40, f"region_size is {header.region_bytes}, not a multiple of the page size")
        return header


def footprint(length: int) -> int:
    """Return how many bytes a record of that length takes in its region."""
    return (SLOT_BYTES + length + 7) // 8 * 8


def position_of(sequence: int, offset: int) -> int:
    """Return the position of a record header.

    >>> position_of(1, 80) == (1 << 40) + 80
    True
    """
    return (sequence << OFFSET_BITS) + offset


def split_position(position: int) -> tuple[int, int]:
    """Return (sequence, offset) of a position.

    >>> split_position(position_of(3, 4096))
    (3, 4096)
    """
    if not 0 <= position < 1 << 63:
        raise OptionsError(f"position {position}: must be between 0 and 2^63")
    return position >> OFFSET_BITS, position & ((1 << OFFSET_BITS) - 1)


def file_path(base: str, sequence: int) -> str:
    """Return the path of a file of the channel.

    >>> file_path("data/ticks", 0), file_path("data/ticks", 7)
    ('data/ticks', 'data/ticks.7')
    """
    return base if sequence == 0 else f"{base}.{sequence}"


def file_sequence(base_name: str, name: str) -> int | None:
    """Return the number of a file of the channel, or None if the name is none of its.

    Only canonical names count, so that a stray ``ticks.007`` or ``ticks.old`` cannot join the channel.

    >>> [file_sequence("ticks", name) for name in ("ticks", "ticks.7", "ticks.007", "ticks.old")]
    [0, 7, None, None]
    """
    if name == base_name:
        return 0
    digits = name.removeprefix(base_name + ".")
    if digits == name or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
        return None
    return int(digits)
