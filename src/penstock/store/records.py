"""The value record of the on-disk engines, and how tokens and columns are made from it.

    data   key → ver_len:u8 version value
    meta   "cursor" → the cursor's bytes        "penstock-fold" → count:u64 digest:16 cursor

The first two are slipstream's.  ``penstock-fold`` keeps count and digest; the cursor in it says for which
state: an engine that another program wrote to has moved on, and both are computed anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.batch import Spans, UpdateBatch
from penstock.errors import CorruptionError
from penstock.types import TOKEN_MAX_BYTES, KvEntry, Op, VersionToken

__all__ = ["decode_entry", "decode_cursor", "batch_of_records", "pack_state", "unpack_state", "token_json"]

CURSOR_KEY: Final = b"cursor"
STATE_KEY: Final = b"penstock-fold"
STATE: Final = struct.Struct("<QQQ")
WORD: Final = (1 << 64) - 1


def decode_entry(path: str, key: bytes, record: bytes) -> KvEntry:
    r"""Return the entry of a key and its value record.

    >>> decode_entry("db", b"a", b"\x00on")
    KvEntry(key='a', value=b'on', version=VersionToken(unknown))
    """
    check_record(path, key, record)
    cut = 1 + record[0]
    try:
        return KvEntry(key.decode(), record[cut:], VersionToken(record[1:cut]))
    except UnicodeDecodeError:
        raise CorruptionError(path, 0, f"the key {key!r} is not UTF-8") from None


def check_record(path: str, key: bytes, record: bytes) -> None:
    """Refuse what is no value record.

    >>> check_record("db", b"a", b"")
    Traceback (most recent call last):
    penstock.errors.CorruptionError: db at byte 0: the value record of b'a' is empty
    """
    if not record:
        raise CorruptionError(path, 0, f"the value record of {key!r} is empty")
    if record[0] > TOKEN_MAX_BYTES:
        raise CorruptionError(path, 0, f"the value record of {key!r} has a version of {record[0]} bytes")
    if 1 + record[0] > len(record):
        raise CorruptionError(path, 0, f"the value record of {key!r} is cut within its version")


def decode_cursor(path: str, raw: bytes | None) -> VersionToken:
    """Return the stored cursor; none where nothing is stored.

    >>> decode_cursor("db", None)
    VersionToken(unknown)
    """
    if raw is not None and len(raw) > TOKEN_MAX_BYTES:
        raise CorruptionError(path, 0, f"the stored cursor has {len(raw)} bytes, where 10 is the most")
    return VersionToken(raw or b"")


def batch_of_records(path: str, keys: Sequence[bytes], records: Sequence[bytes]) -> UpdateBatch:
    r"""Return keys and value records as a batch of puts.

    >>> batch_of_records("db", [b"a"], [b"\x00on"])[0].value
    b'on'
    """
    for key, record in zip(keys, records, strict=True):
        check_record(path, key, record)
    count = len(keys)
    key_lens = np.fromiter(map(len, keys), np.int64, count)
    lens = np.fromiter(map(len, records), np.int64, count)
    version_lens = np.fromiter((record[0] for record in records), np.int64, count)
    data = b"".join(chunk for pair in zip(keys, records, strict=True) for chunk in pair)
    starts = np.cumsum(key_lens + lens) - key_lens - lens
    versions = starts + key_lens + 1
    return UpdateBatch(
        data,
        np.full(count, Op.PUT, np.uint8),
        Spans(starts, key_lens),
        Spans(versions + version_lens, lens - 1 - version_lens),
        Spans(versions, version_lens),
    )


def pack_state(count: int, digest: int, cursor: bytes) -> bytes:
    """Return the penstock-fold record.

    >>> unpack_state(pack_state(3, 7, b"c"), b"c"), unpack_state(pack_state(3, 7, b"c"), b"d")
    ((3, 7), None)
    """
    return STATE.pack(count, digest & WORD, digest >> 64) + cursor


def unpack_state(raw: bytes | None, cursor: bytes) -> tuple[int, int] | None:
    """Return (count, digest) if they were kept for this cursor."""
    if raw is None or len(raw) < STATE.size or raw[STATE.size :] != cursor:
        return None
    count, low, high = STATE.unpack_from(raw)
    return count, high << 64 | low


def token_json(raw: bytes) -> int | str | None:
    r"""Return a version or cursor as it is shown: an integer for 8 bytes, hex for others, None for none.

    >>> token_json((7).to_bytes(8, "big")), token_json(b"\x01"), token_json(b"")
    (7, '01', None)
    """
    if not raw:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 8 else raw.hex()
