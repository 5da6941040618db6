"""The files of an embedded bucket, and the bytes of its records.

    <folder>/<bucket>/
        bucket.json        how the bucket was made; written once, by whoever is first
        log/               a message log of envelopes; the number of an entry is the revision of the change
            penstock-lock      held for one turn of writing
            penstock-first     a register: the first revision that may be resumed from
        state.snap         PGSS: the live keys at one revision, which is its cursor; replaced whole, never changed
        expiry.json        the keys of that state that expire, with revision and time
        ages.json          how old the history is, where the bucket has an age: ages.py
        head               u64: the newest revision, as a hint for who waits

The log is the truth.  state.snap is where a process begins to read, and what lets old segments go:

    first segment ≤ cursor of state.snap + 1 ≤ next revision

A record with a time to live has bit 0 of the envelope's flags set, a header ``expires-ns``, u64 little-endian, and a
header ``written-at``: which boot of the machine, u64, and its monotonic clock in ns, u64.  The first is the time of the
calendar; within one boot the second counts, because a calendar may be set.
Worked example and reasons: docs/formats/bucket.md
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, Literal

import msgspec

from penstock.errors import CorruptionError, OptionsError
from penstock.kv.keys import check_key, check_prefix
from penstock.kv.roles import StoreConfig
from penstock.log.envelope import HEAD, NAME, VALUE
from penstock.log.sidecar import decode_json
from penstock.types import Op

__all__ = [
    "BucketFile",
    "Expiry",
    "ExpiryFile",
    "Lease",
    "EXPIRES",
    "decode_config",
    "encode_config",
    "encode_record",
    "lease_of",
    "check_prefixes",
]

EXPIRES: Final = 1
"""Bit of the flags: the record has a header that says when it expires."""
EXPIRES_NAME: Final = b"expires-ns"
EXPIRES_HEAD: Final = NAME.pack(len(EXPIRES_NAME)) + EXPIRES_NAME + VALUE.pack(8)
WRITTEN_NAME: Final = b"written-at"
WRITTEN_HEAD: Final = NAME.pack(len(WRITTEN_NAME)) + WRITTEN_NAME + VALUE.pack(16)
WRITTEN: Final = struct.Struct("<QQ")
MAX_VALUE_BYTES: Final = 8 << 20
MAX_RECORD_BYTES: Final = MAX_VALUE_BYTES + (1 << 16)
MAX_KEY_BYTES: Final = 1024


class BucketFile(msgspec.Struct, frozen=True):
    """What bucket.json says.

    >>> BucketFile("routes").version
    1
    """

    name: str
    history: int = 1
    max_age_seconds: float = 0.0
    max_bytes: int = -1
    discard: Literal["new", "old"] = "new"
    version: int = 1
    check: int | None = None
    """CRC-32 of the other fields; a file of the first release has none."""

    def checksum(self) -> int:
        """Return what ``check`` should be.

        >>> BucketFile("routes").checksum()
        2835813907
        """
        fields = (self.name, self.history, float(self.max_age_seconds), self.max_bytes, self.discard, self.version)
        return zlib.crc32(msgspec.json.encode(fields))

    def __post_init__(self) -> None:
        if self.version == 1 and self.check is not None and self.check != self.checksum():
            raise ValueError("its checksum is another")


class Expiry(msgspec.Struct, frozen=True, array_like=True):
    """That a key expires: the revision it has to have still, and the time.

    >>> Expiry(7, 10).revision
    7
    """

    revision: int
    expires_ns: int
    """By the calendar."""
    ttl_ns: int = 0
    """How long it lives altogether."""
    deadline_ns: int = 0
    """By the monotonic clock of ``boot``."""
    boot: int = 0


class ExpiryFile(msgspec.Struct, frozen=True):
    """What expiry.json says; that of the first release was the keys alone.

    >>> ExpiryFile({}).version
    2
    """

    keys: dict[str, Expiry]
    version: int = 2
    check: int = 0
    """CRC-32 of the keys as they are encoded."""

    def encode(self) -> bytes:
        """Return the file."""
        return msgspec.json.encode(msgspec.structs.replace(self, check=self.checksum())) + b"\n"

    def checksum(self) -> int:
        """Return what ``check`` should be."""
        return zlib.crc32(msgspec.json.encode(self.keys))

    @classmethod
    def decode(cls, path: str, data: bytes) -> dict[str, Expiry]:
        """Return the keys that expire; CorruptionError when the file does not say.

        >>> ExpiryFile.decode("expiry.json", b'{"lease":[1,2]}')["lease"].expires_ns
        2
        """
        if b'"keys"' not in data[:16]:
            return decode_json(path, data, dict[str, Expiry], "a list of expiries")
        found = decode_json(path, data, cls, "a list of expiries")
        if found.version != 2 or found.check != found.checksum():
            raise CorruptionError(path, 0, "not a list of expiries: its checksum is another")
        return found.keys


class Lease(msgspec.Struct, frozen=True):
    """What a record says about time: when it was written, until when it lives, and the monotonic clock of which boot.

    >>> Lease(10, 30).expires_ns
    30
    """

    written_ns: int
    expires_ns: int
    boot: int = 0
    monotonic_ns: int = 0


def encode_config(config: StoreConfig) -> bytes:
    """Return bucket.json.

    >>> encode_config(StoreConfig(name="b"))[:10]
    b'{"name":"b'
    """
    made = BucketFile(config.name, config.history, config.max_age_seconds, config.max_bytes, config.discard)
    return msgspec.json.encode(msgspec.structs.replace(made, check=made.checksum())) + b"\n"


def decode_config(path: str, data: bytes) -> StoreConfig:
    """Return how a bucket was made; CorruptionError when bucket.json does not say.

    >>> decode_config("bucket.json", encode_config(StoreConfig(name="b", history=3))).history
    3
    """
    made = decode_json(path, data, BucketFile, "the description of a bucket")
    if made.version != 1:
        raise CorruptionError(path, 0, f"version {made.version} of a bucket is not known")
    try:
        return StoreConfig(
            name=made.name,
            history=made.history,
            max_age_seconds=made.max_age_seconds,
            max_bytes=made.max_bytes,
            discard=made.discard,
        )
    except OptionsError as exc:
        raise CorruptionError(path, 0, f"not the description of a bucket: {exc}") from None


def encode_record(op: Op, key: str, value: bytes, now_ns: int, lease: Lease | None = None) -> bytes:
    """Return the envelope of one change.

    >>> encode_record(Op.PUT, "k", b"v", 1, Lease(1, 2)).hex(" ")[:11]
    '01 00 01 00'
    """
    raw = key.encode()
    if lease is None:
        return HEAD.pack(1, op, 0, now_ns, len(raw), 0) + raw + value
    header = EXPIRES_HEAD + lease.expires_ns.to_bytes(8, "little")
    header += WRITTEN_HEAD + WRITTEN.pack(lease.boot, lease.monotonic_ns)
    return HEAD.pack(1, op, EXPIRES, now_ns, len(raw), len(header)) + raw + header + value


def lease_of(headers: dict[str, bytes], written_ns: int) -> Lease:
    """Return what the headers of a record that expires say.

    >>> lease_of({"expires-ns": (30).to_bytes(8, "little")}, 10)
    Lease(written_ns=10, expires_ns=30, boot=0, monotonic_ns=0)
    """
    expires_ns = int.from_bytes(headers.get("expires-ns", b""), "little")
    written = headers.get("written-at", b"")
    boot, monotonic_ns = WRITTEN.unpack(written) if len(written) == WRITTEN.size else (0, 0)
    return Lease(written_ns, expires_ns, boot, monotonic_ns)


def check_change(key: str, value: bytes) -> str:
    """Return the key, or raise OptionsError for a key or a value that no bucket takes.

    >>> check_change("node.a", b"1")
    'node.a'
    """
    check_key(key)
    if len(key) > MAX_KEY_BYTES:
        raise OptionsError(f"key {key[:40]!r}…: {len(key)} bytes are more than {MAX_KEY_BYTES}")
    if len(value) > MAX_VALUE_BYTES:
        raise OptionsError(f"key {key!r}: a value of {len(value)} bytes is longer than {MAX_VALUE_BYTES}")
    return key


def check_prefixes(prefixes: list[str]) -> list[bytes]:
    """Return prefixes as bytes, those that others cover left out; OptionsError for one that would match nothing.

    >>> check_prefixes(["node.", "node.deep.", "svc."])
    [b'node.', b'svc.']
    """
    for prefix in prefixes:
        check_prefix(prefix)
    wide = [one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes)]
    return [prefix.encode() for prefix in dict.fromkeys(wide)]
