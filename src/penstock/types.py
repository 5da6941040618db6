"""The small values that travel between the floors: records, tokens, entries, updates, problems."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from penstock.errors import OptionsError

__all__ = ["Record", "Problem", "Op", "VersionToken", "WatchCursor", "KvEntry", "KvUpdate"]


TOKEN_MAX_BYTES: Final = 10


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message of a log: where it is, when it was written, its kind, and its bytes.

    ``payload`` is a view into the batch or the mapped file it was read from and keeps that
    alive; ``bytes(record.payload)`` makes a copy.  ``timestamp_ns`` and ``kind`` are None in
    formats that have none; what a format adds (sender, key, …) is in ``extra``.

    >>> record = Record(80, 10, 1, memoryview(b"hello"))
    >>> record.position, bytes(record.payload)
    (80, b'hello')
    """

    position: int
    timestamp_ns: int | None
    kind: int | None
    payload: memoryview
    extra: dict[str, object] | None = None


class Problem(msgspec.Struct, frozen=True):
    """Something ``verify`` found: where, and what is wrong there.

    >>> str(Problem("chan.1", 112, "commit byte is 2"))
    'chan.1 at byte 112: commit byte is 2'
    """

    file: str
    byte: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} at byte {self.byte}: {self.reason}"


class Op(enum.IntEnum):
    """What an update does to its key.  The numbers are on disk: add, never renumber.

    >>> Op.DELETE
    <Op.DELETE: 1>
    """

    PUT = 0
    DELETE = 1
    PURGE = 2


class VersionToken(msgspec.Struct, frozen=True):
    """The version of one entry: up to ten raw bytes, none of them meaning "unknown".

    Eight bytes are a revision, big-endian; ten are a versionstamp.  Tokens of other backends are
    kept as they are.

    >>> VersionToken.of(7)
    VersionToken(u64: 7)
    >>> VersionToken.of(7).as_int(), VersionToken().known
    (7, False)
    """

    raw: bytes = b""

    def __post_init__(self) -> None:
        if len(self.raw) > TOKEN_MAX_BYTES:
            raise OptionsError(f"a version token has at most 10 bytes, not {len(self.raw)}")

    @classmethod
    def of(cls, revision: int) -> VersionToken:
        """Return the token of a 64-bit revision."""
        if not 0 <= revision < 1 << 64:
            raise OptionsError(f"revision {revision} does not fit 64 bits")
        return cls(revision.to_bytes(8, "big"))

    @property
    def known(self) -> bool:
        """Whether there is a version at all."""
        return bool(self.raw)

    def as_int(self) -> int | None:
        """Return the revision, or None for an unknown or a foreign token."""
        return int.from_bytes(self.raw, "big") if len(self.raw) == 8 else None

    def __repr__(self) -> str:
        if not self.raw:
            return "VersionToken(unknown)"
        number = self.as_int()
        return f"VersionToken({list(self.raw)})" if number is None else f"VersionToken(u64: {number})"


class WatchCursor(msgspec.Struct, frozen=True):
    """How far a watcher has come: one version token, unknown at the very start.

    >>> WatchCursor().at_start, WatchCursor.of(9).token.as_int()
    (True, 9)
    """

    token: VersionToken = VersionToken()

    @classmethod
    def of(cls, revision: int) -> WatchCursor:
        """Return the cursor at a 64-bit revision."""
        return cls(VersionToken.of(revision))

    @property
    def at_start(self) -> bool:
        """Whether nothing has been seen yet."""
        return not self.token.known


class KvEntry(msgspec.Struct, frozen=True):
    """One live key with its value and version.

    >>> KvEntry("devices/7", b"on", VersionToken.of(3)).value
    b'on'
    """

    key: str
    value: bytes
    version: VersionToken = VersionToken()


class KvUpdate(msgspec.Struct, frozen=True):
    """One change of one key; ``value`` is empty unless ``op`` is PUT.

    >>> KvUpdate.put("devices/7", b"on", 3).op is Op.PUT
    True
    >>> KvUpdate.delete("devices/7", 4).version
    VersionToken(u64: 4)
    """

    op: Op
    key: str
    value: bytes = b""
    version: VersionToken = VersionToken()

    @classmethod
    def put(cls, key: str, value: bytes, revision: int | None = None) -> KvUpdate:
        """Return the update that sets ``key``."""
        return cls(Op.PUT, key, value, _token(revision))

    @classmethod
    def delete(cls, key: str, revision: int | None = None) -> KvUpdate:
        """Return the update that removes ``key``."""
        return cls(Op.DELETE, key, b"", _token(revision))

    @classmethod
    def purge(cls, key: str, revision: int | None = None) -> KvUpdate:
        """Return the update that removes ``key`` and its history."""
        return cls(Op.PURGE, key, b"", _token(revision))


def _token(revision: int | None) -> VersionToken:
    return VersionToken() if revision is None else VersionToken.of(revision)
