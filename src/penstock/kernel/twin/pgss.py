"""The twin of pgss.pyx and of the records it reads."""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of

PUT, DELETE, CURSOR = 1, 2, 3
TOKEN_MAX, VALUE_MAX, KEY_MAX, SMALLEST = 10, 1 << 24, 65535, 6
CLEAN, TRUNCATED, TORN, BAD_CRC, HOLE, BAD_TYPE, BAD_VERSION, BAD_CURSOR, BAD_KEY = range(9)
SEARCH_BYTES = 256 << 20

Int64 = NDArray[np.int64]
WORD = (1 << 64) - 1


class Rec(NamedTuple):
    """A record that was read, or why it was not."""

    status: int
    kind: int = 0
    key: int = 0
    key_len: int = 0
    value: int = 0
    value_len: int = 0
    version: int = 0
    version_len: int = 0
    total: int = 0
    detail: int = 0


def parse(view: memoryview, size: int, at: int, check: bool) -> Rec:
    """Read the record at ``at``; the order of the checks is that of the original."""
    rest = size - at
    if rest < 5:
        return Rec(TRUNCATED)
    kind = view[at + 4]
    if kind not in (PUT, DELETE, CURSOR):
        if kind == 0 and not any(view[at : at + 4]):
            return Rec(HOLE if any(view[at:size]) else TRUNCATED)
        return Rec(BAD_TYPE, detail=kind)
    if kind == CURSOR:
        return _parse_cursor(view, rest, at, check)
    if rest < 7:
        return Rec(TRUNCATED)
    key_len = int.from_bytes(view[at + 5 : at + 7], "little")
    n, value, value_len = 7 + key_len, 0, 0
    if kind == PUT:
        if rest < n + 4:
            return Rec(TRUNCATED)
        value_len = int.from_bytes(view[at + n : at + n + 4], "little")
        n += 4
        if value_len > VALUE_MAX:
            return Rec(_mismatch(rest, n))
        value = at + n
        n += value_len
    if rest < n + 1:
        return Rec(TRUNCATED)
    version_len = view[at + n]
    if version_len > TOKEN_MAX:
        return Rec(BAD_VERSION, detail=version_len)
    total = n + 1 + version_len
    if rest < total:
        return Rec(TRUNCATED)
    if check:
        if not _checked(view, at, total):
            return Rec(_mismatch(rest, total))
        if not _utf8(view[at + 7 : at + 7 + key_len]):
            return Rec(BAD_KEY)
    return Rec(CLEAN, kind, at + 7, key_len, value, value_len, at + n + 1, version_len, total)


def _parse_cursor(view: memoryview, rest: int, at: int, check: bool) -> Rec:
    if rest < 6:
        return Rec(TRUNCATED)
    length = view[at + 5]
    if length > TOKEN_MAX:
        return Rec(BAD_CURSOR, detail=length)
    if rest < 6 + length:
        return Rec(TRUNCATED)
    if check and not _checked(view, at, 6 + length):
        return Rec(_mismatch(rest, 6 + length))
    return Rec(CLEAN, CURSOR, version=at + 6, version_len=length, total=6 + length)


def _checked(view: memoryview, at: int, total: int) -> bool:
    return zlib.crc32(view[at + 4 : at + total]) == int.from_bytes(view[at : at + 4], "little")


def _mismatch(rest: int, consumed: int) -> int:
    return TORN if rest - min(rest, consumed) < SMALLEST else BAD_CRC


def _utf8(key: memoryview) -> bool:
    try:
        str(key, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def key_at(view: memoryview, at: int) -> bytes:
    """Return the key of the put or delete record at an offset."""
    return bytes(view[at + 7 : at + 7 + int.from_bytes(view[at + 5 : at + 7], "little")])


def murmur(data: bytes) -> int:
    """Return MurmurHash3_x64_128 with seed 0; the first word is the lower half."""
    c1, c2, a, b = 0x87C37B91114253D5, 0x4CF5AD432745937F, 0, 0
    whole = len(data) & ~15
    for one, two in struct.iter_unpack("<QQ", data[:whole]):
        a ^= _turn(one * c1, 31) * c2 & WORD
        a = ((_turn(a, 27) + b) * 5 + 0x52DCE729) & WORD
        b ^= _turn(two * c2, 33) * c1 & WORD
        b = ((_turn(b, 31) + a) * 5 + 0x38495AB5) & WORD
    one, two = struct.unpack("<QQ", data[whole:].ljust(16, b"\0"))
    b = (b ^ _turn(two * c2, 33) * c1 & WORD) ^ len(data)
    a = (a ^ _turn(one * c1, 31) * c2 & WORD) ^ len(data)
    a = (a + b) & WORD
    b = (b + a) & WORD
    a, b = _mix(a), _mix(b)
    a = (a + b) & WORD
    return ((b + a) & WORD) << 64 | a


def _turn(word: int, bits: int) -> int:
    word &= WORD
    return (word << bits | word >> (64 - bits)) & WORD


def _mix(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return word ^ word >> 33


def sort_records(data: Any, slots: NDArray[np.uint32], offsets: Int64, ordered: int) -> None:  # noqa: ARG001 - it sorts all
    """Sort slots and the offsets of their records by key."""
    view = view_of(data)
    if len(slots) != len(offsets):
        raise ValueError("slots and offsets differ in length")
    order = sorted(range(len(offsets)), key=lambda i: key_at(view, int(offsets[i])))
    slots[:], offsets[:] = slots[order], offsets[order]


def columns(data: Any, offsets: Int64) -> Int64:
    """Return (key, key_len, value, value_len, version, version_len) of the put records at these offsets."""
    view = view_of(data)
    result = np.empty((6, len(offsets)), np.int64)
    for i, at in enumerate(offsets.tolist()):
        record = _put(view, at)
        result[:, i] = record[2:8]
    return result


def copy_records(data: Any, offsets: Int64, start: int, out: NDArray[np.uint8], lengths: Int64) -> tuple[int, int]:
    """Copy whole records from number ``start`` on while they fit; return (next number, bytes)."""
    view, target, at = view_of(data), out.data, 0
    for i in range(start, len(offsets)):
        record, offset = _put(view, int(offsets[i])), int(offsets[i])
        if at + record.total > len(out):
            return i, at
        target[at : at + record.total] = view[offset : offset + record.total]
        lengths[i] = record.total
        at += record.total
    return len(offsets), at


def _put(view: memoryview, at: int) -> Rec:
    record = parse(view, len(view), at, False) if 0 <= at < len(view) else Rec(TRUNCATED)
    if record.status != CLEAN or record.kind != PUT:
        raise ValueError(f"no put record at {at}")
    return record


def find_record(data: Any, start: int, stop: int) -> int:
    """Return where a whole, valid record lies in start..stop, -1 for nowhere, -2 for too long a search."""
    view, work = view_of(data), 0
    if not 0 <= start <= stop <= len(view):
        raise ValueError("the search lies outside the log")
    for at in range(start, stop - SMALLEST + 1):
        if 1 <= view[at + 4] <= 3:
            record = parse(view, stop, at, False)
            if record.status == CLEAN:
                work += record.total
                if _checked(view, at, record.total):
                    return at
                if work > SEARCH_BYTES:
                    return -2
    return -1


def last_cursor(data: Any, start: int) -> int:
    """Return where the last cursor record of a log's readable part ends, or ``start``."""
    view, at, end = view_of(data), start, start
    while at < len(view) and (record := parse(view, len(view), at, True)).status == CLEAN:
        at += record.total
        if record.kind == CURSOR:
            end = at
    return end


def encode(
    data: Any, ops: NDArray[np.uint8], keys: Int64, key_lens: Int64, values: Int64, value_lens: Int64,
    versions: Int64, version_lens: Int64,
) -> bytearray:  # fmt: skip
    """Return the records of a batch of updates, one after another; ValueError names the one refused."""
    view = view_of(data)
    columns = (ops, keys, key_lens, values, value_lens, versions, version_lens)
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the columns of the batch differ in length")
    result = bytearray()
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (op, key, key_len, value, value_len, version, version_len) in enumerate(rows):
        why = ""
        spans = ((key, key_len), (value, value_len), (version, version_len))
        if not all(at >= 0 and 0 <= length <= len(view) and at <= len(view) - length for at, length in spans):
            why = "lies outside its buffer"
        elif op > 2:
            why = "has an unknown op"
        elif key_len > KEY_MAX:
            why = "has a key of more than 65535 bytes"
        elif op == 0 and value_len > VALUE_MAX:
            why = "has a value of more than 16 MiB"
        elif version_len > TOKEN_MAX:
            why = "has a version of more than 10 bytes"
        elif not _utf8(view[key : key + key_len]):
            why = "has a key that is not UTF-8"
        if why:
            raise ValueError(f"update {i} {why}")
        body = bytearray((DELETE if op else PUT,)) + key_len.to_bytes(2, "little") + view[key : key + key_len]
        if op == 0:
            body += value_len.to_bytes(4, "little") + view[value : value + value_len]
        body += bytes((version_len,)) + view[version : version + version_len]
        result += zlib.crc32(body).to_bytes(4, "little") + body
    return result


def encode_list(updates: list[Any]) -> bytearray:
    """Return the records of a list of KvUpdate, as encode does for columns."""
    result = bytearray()
    for i, update in enumerate(updates):
        try:
            key = update.key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"update {i} has a key that is not UTF-8") from None
        data, spans, at = key + update.value + update.version.raw, [], 0
        for length in (len(key), len(update.value), len(update.version.raw)):
            spans += [np.array([at]), np.array([length])]
            at += length
        try:
            result += encode(data, np.array([update.op], np.uint8), *spans)
        except ValueError as exc:
            raise ValueError(str(exc).replace("update 0", f"update {i}")) from None
    return result


def pack_values(data: Any, values: Int64, value_lens: Int64, versions: Int64, version_lens: Int64) -> list[bytes]:
    """Return the engines' value records: ver_len:u8 version value, as a list of bytes."""
    view = view_of(data)
    rows = zip(values.tolist(), value_lens.tolist(), versions.tolist(), version_lens.tolist(), strict=True)
    result = []
    for i, (value, value_len, version, version_len) in enumerate(rows):
        if (
            min(value, value_len, version, version_len) < 0
            or version_len > TOKEN_MAX
            or max(value + value_len, version + version_len) > len(view)
        ):
            raise ValueError(f"update {i} lies outside its buffer")
        result.append(bytes((version_len,)) + view[version : version + version_len] + view[value : value + value_len])
    return result


def digest_values(keys: list[bytes], records: list[bytes | None]) -> tuple[int, int]:
    """Return (how many, sum of hashes) of the entries whose value record is not None."""
    count = total = 0
    for key, record in zip(keys, records, strict=True):
        if record is None:
            continue
        if not record or record[0] > TOKEN_MAX or 1 + record[0] > len(record) or len(key) > KEY_MAX:
            raise ValueError(f"{key!r} has no value record")
        cut = 1 + record[0]
        body = struct.pack("<H", len(key)) + key + struct.pack("<I", len(record) - cut)
        total += murmur(body + record[cut:] + record[:cut])
        count += 1
    return count, total % (1 << 128)
