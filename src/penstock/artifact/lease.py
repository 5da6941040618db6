"""The export lease: of a fleet, one node at a time exports.  It saves work and guards nothing.

    {"holder_id":"node-42","acquired_at_unix":1718000000,"expires_at_unix":1718000300}
        and, once an export is done, "completed_cursor_hex" and "completed_at_unix" behind them

The record says when it ends, so that any bucket with compare-and-set will do; where the bucket keeps a time to live,
the key vanishes by itself when its holder is gone, by the bucket's clock.  A record that nobody can read is stolen like
one that has ended: one bad write must not stop a fleet for ever.  Two nodes at once cost a second export and nothing
else: the pointer goes forward only.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import AlreadyExists, ConflictError, CorruptionError, OptionsError, PenstockError, UnsupportedError
from penstock.kv.roles import KvStore, KvWriter
from penstock.types import VersionToken, WatchCursor

__all__ = ["ExportLease", "LeaseGuard", "LeaseRecord", "decode_lease", "encode_lease"]

_log = logging.getLogger("penstock.artifact")

MAX_NUMBER: Final = (1 << 64) - 1


class LeaseRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who has the lease, until when, and what was exported with it.

    >>> encode_lease(LeaseRecord("node-42", 1718000000, 1718000300))
    b'{"holder_id":"node-42","acquired_at_unix":1718000000,"expires_at_unix":1718000300}'
    """

    holder_id: str
    acquired_at_unix: int
    expires_at_unix: int
    completed_cursor_hex: str | None = None
    completed_at_unix: int | None = None


def encode_lease(record: LeaseRecord) -> bytes:
    """Return a record as it is stored."""
    fields = {name: value for name, value in msgspec.structs.asdict(record).items() if value is not None}
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def decode_lease(data: bytes) -> LeaseRecord:
    """Read a record; CorruptionError for what is none.

    >>> decode_lease(b"{}")
    Traceback (most recent call last):
    penstock.errors.CorruptionError: lease at byte 0: not a lease: the field 'holder_id' is missing
    """
    try:
        found = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_refuse)
        if isinstance(found, list):
            names = LeaseRecord.__struct_fields__
            if not 3 <= len(found) <= len(names):
                raise ValueError(f"{len(found)} fields in an array")
            found = dict(zip(names, found, strict=False))
        if not isinstance(found, dict):
            raise ValueError("not an object")  # noqa: TRY004
        holder = found.get("holder_id")
        if not isinstance(holder, str):
            raise ValueError("the field 'holder_id' is missing")  # noqa: TRY004
        holder.encode()
        cursor = found.get("completed_cursor_hex")
        if cursor is not None and not isinstance(cursor, str):
            raise ValueError("completed_cursor_hex is not a string")
        completed = found.get("completed_at_unix")
        acquired, expires = _number(found, "acquired_at_unix"), _number(found, "expires_at_unix")
        done = None if completed is None else _number(found, "completed_at_unix")
        return LeaseRecord(holder, acquired, expires, cursor, done)
    except (ValueError, RecursionError) as exc:
        raise CorruptionError("lease", 0, f"not a lease: {exc}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs if name in LeaseRecord.__struct_fields__]
    if len(names) != len(set(names)):
        raise ValueError("a field is there twice")
    return dict(pairs)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _number(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"the field {name!r} is missing or no unsigned number")
    return value


class LeaseGuard:
    """A lease that was won; end it with ``complete`` or ``abandon``.  Dropped, it runs out by itself.

    >>> async def example(lease):
    ...     guard = await lease.try_acquire(300)
    ...     if guard is not None:
    ...         await guard.abandon()
    """

    def __init__(self, lease: ExportLease, record: LeaseRecord, version: VersionToken) -> None:
        self._lease, self.record, self._version = lease, record, version
        self._resolved = False

    async def complete(self, cursor: WatchCursor) -> bool:
        """Note in the record what was exported; False if the lease was taken over meanwhile, which does not matter."""
        self._resolved = True
        record = msgspec.structs.replace(
            self.record, completed_cursor_hex=cursor.token.raw.hex(), completed_at_unix=self._lease.now()
        )
        try:
            self._version = await self._lease.writer.update(self._lease.key, encode_lease(record), self._version)
        except ConflictError as exc:
            _log.warning("%s: the lease was taken over before its export was noted: %s", self._lease.key, exc)
            return False
        self.record = record
        return True

    async def abandon(self) -> None:
        """Free the lease at once, so that the next node need not wait; failing that does not matter either."""
        self._resolved = True
        try:
            await self._lease.writer.delete_with_version(self._lease.key, self._version)
        except PenstockError as exc:
            _log.warning("%s: the lease could not be freed, it runs out by itself: %s", self._lease.key, exc)

    def __del__(self) -> None:
        if not self._resolved:
            _log.warning("%s: a lease was dropped; others wait until it runs out", self._lease.key)


class ExportLease:
    """The lease at one key of a bucket, for one holder.

    >>> import asyncio, tempfile
    >>> from penstock.kv import EmbeddedConnection
    >>> async def example(folder):
    ...     async with EmbeddedConnection(folder) as connection:
    ...         store = await connection.store("leases")
    ...         mine, theirs = ExportLease(store, "export", "a"), ExportLease(store, "export", "b")
    ...         guard = await mine.try_acquire(300)
    ...         second = await theirs.try_acquire(300)
    ...         await guard.complete(WatchCursor.of(42))
    ...         return second, (await theirs.current()).completed_cursor_hex
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(example(folder))
    (None, '000000000000002a')
    """

    def __init__(self, store: KvStore, key: str, holder_id: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if store.writer is None:
            raise UnsupportedError(f"{store.name}: this bucket cannot be written, so it can hold no lease")
        self._store, self.key, self.holder_id, self._clock = store, key, holder_id, clock
        self._ttl_works = True

    @property
    def writer(self) -> KvWriter:
        """The role that writes the record."""
        assert self._store.writer is not None
        return self._store.writer

    def now(self) -> int:
        """Return the time as the record has it."""
        return max(0, self._clock.now_ns() // 1_000_000_000)

    async def current(self) -> LeaseRecord | None:
        """Return the record, None when there is none; CorruptionError when it cannot be read."""
        found = await self._store.reader.get(self.key)
        return None if found is None else decode_lease(found.value)

    async def try_acquire(self, ttl_seconds: float) -> LeaseGuard | None:
        """Take the lease if it is free, has ended or cannot be read; None when another holder has it."""
        if ttl_seconds < 0:
            raise OptionsError(f"ttl_seconds={ttl_seconds}: must not be negative")
        now = self.now()
        record = LeaseRecord(self.holder_id, now, min(now + int(ttl_seconds), MAX_NUMBER))
        data = encode_lease(record)
        try:
            version = await self._with_ttl(lambda ttl: self.writer.create(self.key, data, ttl_seconds=ttl), ttl_seconds)
            return LeaseGuard(self, record, version)
        except AlreadyExists:
            pass
        found = await self._store.reader.entry(self.key)
        if found is None:
            return None  # gone between the two: the next try finds it free
        try:
            if decode_lease(found.value).expires_at_unix > now:
                return None
        except CorruptionError:
            _log.warning("%s: the lease cannot be read and is taken over", self.key)
        seen = found.version
        try:
            version = await self._with_ttl(
                lambda ttl: self.writer.update(self.key, data, seen, ttl_seconds=ttl), ttl_seconds
            )
            return LeaseGuard(self, record, version)
        except ConflictError:
            return None

    async def _with_ttl(self, write: Any, ttl_seconds: float) -> VersionToken:
        """Write with a time to live where the bucket has one, otherwise without."""
        if self._ttl_works and 1 <= ttl_seconds < 1e9:
            try:
                return await write(ttl_seconds)  # type: ignore[no-any-return]
            except UnsupportedError:
                self._ttl_works = False
        return await write(None)  # type: ignore[no-any-return]
