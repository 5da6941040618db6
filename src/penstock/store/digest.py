"""The digest of a fold: the same for every backend, in any order, and cheap to keep up to date.

    digest := sum of hash(entry) over all live entries, modulo 2^128, as 32 hex digits
    hash   := MurmurHash3_x64_128, seed 0, first word lower, over the entry's PGSS put record
              without checksum and type:  key_len:u16 key value_len:u32 value ver_len:u8 version

A sum forgets the order and lets a put of a live key take the old entry out and the new one in.  It finds
accidents, not forgers: the hash has no key.  An empty fold has the digest 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.kernel import pgss
from penstock.types import KvEntry

__all__ = ["digest_text", "digest_entries", "MODULUS"]

MODULUS = 1 << 128


def digest_text(digest: int) -> str:
    """Return a digest as it is shown.

    >>> digest_text(0)
    '00000000000000000000000000000000'
    """
    return f"{digest % MODULUS:032x}"


def digest_entries(entries: Iterable[KvEntry]) -> str:
    """Compute the digest of entries from nothing.

    >>> from penstock.types import VersionToken
    >>> a, b = KvEntry("a", b"1", VersionToken.of(1)), KvEntry("b", b"2")
    >>> digest_entries([a, b]) == digest_entries([b, a]) != digest_entries([a])
    True
    """
    rows = list(entries)
    records: list[bytes | None] = [bytes((len(row.version.raw),)) + row.version.raw + row.value for row in rows]
    return digest_text(pgss.digest_values([row.key.encode() for row in rows], records)[1])
