"""The files of an embedded bucket, and the bytes of its records.

    <folder>/<bucket>/
        bucket.json        how the bucket was made; written once, by whoever is first
        log/               a message log of envelopes; the number of an entry is the revision of the change
            penstock-lock      held for one turn of writing
            penstock-first     a register: the first revision that may be resumed from
        state.snap         PGSS: the live keys at one revision, which is its cursor; replaced whole, never changed
        expiry.json        the keys of that state that expire, with revision and time
        head               u64: the newest revision, as a hint for who waits

The log is the truth.  state.snap is where a process begins to read, and what lets old segments go:

    first segment ≤ cursor of state.snap + 1 ≤ next revision

A record with a time to live has bit 0 of the envelope's flags set and a header ``expires-ns``, u64 little-endian.
Worked example and reasons: docs/formats/bucket.md
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from penstock.errors import CorruptionError, OptionsError
from penstock.kv.nats_wire import check_key
from penstock.kv.roles import StoreConfig
from penstock.log.envelope import HEAD, NAME, VALUE
from penstock.types import Op

__all__ = ["BucketFile", "Expiry", "EXPIRES", "decode_config", "encode_config", "encode_record", "check_prefixes"]

EXPIRES: Final = 1
"""Bit of the flags: the record has a header that says when it expires."""
EXPIRES_NAME: Final = b"expires-ns"
EXPIRES_HEAD: Final = NAME.pack(len(EXPIRES_NAME)) + EXPIRES_NAME + VALUE.pack(8)
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


class Expiry(msgspec.Struct, frozen=True, array_like=True):
    """That a key expires: the revision it has to have still, and the time.

    >>> Expiry(7, 10).revision
    7
    """

    revision: int
    expires_ns: int


def encode_config(config: StoreConfig) -> bytes:
    """Return bucket.json.

    >>> encode_config(StoreConfig(name="b"))[:10]
    b'{"name":"b'
    """
    made = BucketFile(config.name, config.history, config.max_age_seconds, config.max_bytes, config.discard)
    return msgspec.json.encode(made) + b"\n"


def decode_config(path: str, data: bytes) -> StoreConfig:
    """Return how a bucket was made; CorruptionError when bucket.json does not say.

    >>> decode_config("bucket.json", encode_config(StoreConfig(name="b", history=3))).history
    3
    """
    try:
        made = msgspec.json.decode(data, type=BucketFile)
        if made.version != 1:
            raise CorruptionError(path, 0, f"version {made.version} of a bucket is not known")
        return StoreConfig(
            name=made.name,
            history=made.history,
            max_age_seconds=made.max_age_seconds,
            max_bytes=made.max_bytes,
            discard=made.discard,
        )
    except (msgspec.DecodeError, OptionsError) as exc:
        raise CorruptionError(path, 0, f"not the description of a bucket: {exc}") from None


def encode_record(op: Op, key: str, value: bytes, now_ns: int, expires_ns: int = 0) -> bytes:
    """Return the envelope of one change.

    >>> encode_record(Op.PUT, "k", b"v", 1, 2).hex(" ")[:11]
    '01 00 01 00'
    """
    raw = key.encode()
    if not expires_ns:
        return HEAD.pack(1, op, 0, now_ns, len(raw), 0) + raw + value
    header = EXPIRES_HEAD + expires_ns.to_bytes(8, "little")
    return HEAD.pack(1, op, EXPIRES, now_ns, len(raw), len(header)) + raw + header + value


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
        if prefix:
            if not prefix.endswith("."):
                raise OptionsError(f"prefix {prefix!r}: must be empty or end in a dot")
            check_key(prefix[:-1])
    wide = [one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes)]
    return [prefix.encode() for prefix in dict.fromkeys(wide)]
