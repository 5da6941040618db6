"""The roles of an embedded bucket: reader, watcher and writer, on a bucket that may not be there yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from penstock.batch import UpdateBatch
from penstock.disk import in_disk_thread
from penstock.errors import OptionsError, PenstockError, ReplacedError
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.format import check_change, check_prefixes
from penstock.kv.embedded.plan import Change
from penstock.kv.embedded.state import give_way
from penstock.kv.embedded.turns import CHANGES_A_TURN, ChangeTurns
from penstock.kv.embedded.watch import EmbeddedWatch, below
from penstock.kv.keys import check_key, check_ttl
from penstock.kv.nats.watch import EndedWatch
from penstock.kv.roles import KvReader, KvStore, KvWatcher, KvWriter, StoreConfig, Watch
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.updates import envelope_updates
from penstock.types import KvEntry, KvUpdate, Op, VersionToken, WatchCursor

__all__ = ["Door", "EmbeddedKvStore", "EmbeddedKvReader", "EmbeddedKvWatcher", "EmbeddedKvWriter"]

PUT_MANY_BYTES: Final = 4 << 20
KEYS_AT_ONCE: Final = 512
"""How many keys become strings before another thread gets its turn: a listing must not hold up the event loop."""


class Door:
    """A bucket by name: open, or not there yet; then only who puts or creates makes it.

    ``opener`` opens the bucket, and with True makes it if need be; ReplacedError if it is not there.
    """

    def __init__(self, opener: Callable[[bool], Awaitable[Bucket]], bucket: Bucket | None = None) -> None:
        self._opener = opener
        self.bucket = bucket

    async def look(self) -> Bucket:
        """Return the bucket, which must be there."""
        if self.bucket is None:
            self.bucket = await self._opener(False)
        return self.bucket

    async def make(self) -> Bucket:
        """Return the bucket, made if it is not there."""
        if self.bucket is None:
            self.bucket = await self._opener(True)
        return self.bucket


class EmbeddedKvReader(KvReader):
    """Reads of an embedded bucket: from this process's memory, after a look whether others have written.

    >>> issubclass(EmbeddedKvReader, KvReader)
    True
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def get(self, key: str) -> KvEntry | None:
        """Return the live entry, or None; a tombstone is None."""
        found = await self.entry(key)
        return found if found is not None and found.value else None

    async def entry(self, key: str) -> KvEntry | None:
        """Return the entry even if it is a tombstone; None after a delete, a purge or its time to live."""
        check_key(key)
        bucket = self._door.bucket or await self._door.look()
        if not bucket.fresh():
            await in_disk_thread(bucket.catch_up)
        return bucket.entry(key)

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the live keys below a prefix, in order of revision."""
        check_prefixes([prefix])
        return await in_disk_thread(_keys, await self._door.look(), prefix)

    async def scan(self, prefix: str = "") -> UpdateBatch:
        """Return the live entries below a prefix as one batch of puts, in order of revision."""
        check_prefixes([prefix])
        return await in_disk_thread(_scan, await self._door.look(), prefix)

    async def history(self, key: str) -> list[KvUpdate]:
        """Return the changes of a key that are still kept, oldest first: at most ``history`` of its StoreConfig.

        A purge hides what came before it.  This walks over the log.
        """
        check_key(key)
        return await in_disk_thread(_history, await self._door.look(), key)

    async def identity(self) -> str:
        """Return the random id of the bucket's log."""
        return (await self._door.look()).log_id

    async def change(self, revision: int) -> KvUpdate | None:
        """Return the change that has this revision, None when it is not kept any more."""
        return await in_disk_thread((await self._door.look()).change, revision)


class EmbeddedKvWatcher(KvWatcher):
    """Watches of an embedded bucket.  A cursor that is unknown, foreign or 0 means the beginning.

    >>> issubclass(EmbeddedKvWatcher, KvWatcher)
    True
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def watch_all(self) -> Watch:
        """Watch every key, beginning with the re-list."""
        return await self._watch([""], None)

    async def watch_prefix(self, prefix: str) -> Watch:
        """Watch the keys below one prefix, beginning with the re-list."""
        return await self._watch([prefix], None)

    async def watch_prefixes(self, prefixes: Sequence[str]) -> Watch:
        """Watch the keys below any of these prefixes."""
        return await self._watch(prefixes, None)

    async def watch_all_from(self, cursor: WatchCursor) -> Watch:
        """Watch every key from behind a cursor on."""
        return await self._watch([""], cursor)

    async def watch_prefix_from(self, prefix: str, cursor: WatchCursor) -> Watch:
        """Watch the keys below one prefix from behind a cursor on."""
        return await self._watch([prefix], cursor)

    async def watch_prefixes_from(self, prefixes: Sequence[str], cursor: WatchCursor) -> Watch:
        """Watch the keys below any of these prefixes from behind a cursor on."""
        return await self._watch(prefixes, cursor)

    async def _watch(self, prefixes: Sequence[str], cursor: WatchCursor | None) -> Watch:
        if not prefixes:
            return EndedWatch()
        revision = cursor.token.as_int() if cursor is not None else None
        watch = EmbeddedWatch(await self._door.look(), check_prefixes(list(prefixes)), revision or None)
        await in_disk_thread(watch.attach)
        return watch


class EmbeddedKvWriter(KvWriter):
    """Writes to an embedded bucket.

    >>> issubclass(EmbeddedKvWriter, KvWriter)
    True
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._turns: ChangeTurns | None = None

    async def put(self, key: str, value: bytes) -> VersionToken:
        """Set a key, whatever it was."""
        return await self._write("put", key, value)

    async def put_many(self, entries: Iterable[tuple[str, bytes]]) -> list[VersionToken]:
        """Set many keys in order, thousands in one turn."""
        tokens: list[VersionToken] = []
        rest = iter(entries)
        while part := _some(rest):
            turns = self._turns or await self._open("put")
            for outcome in await turns.commit(part):
                if isinstance(outcome, PenstockError):
                    raise outcome
                tokens.append(VersionToken(outcome.to_bytes(8, "big")))
        return tokens

    async def put_with_ttl(self, key: str, value: bytes, ttl_seconds: float) -> VersionToken:
        """Set a key that vanishes after a time, with a purge in the log that watches see."""
        return await self._write("put", key, value, ttl_seconds=ttl_seconds)

    async def delete(self, key: str) -> bool:
        """Remove a key, whatever it was; always True."""
        await self._write("delete", key)
        return True

    async def purge(self, key: str) -> bool:
        """Remove a key and hide its history; always True.  Its bytes go with the segments they are in."""
        await self._write("purge", key)
        return True

    async def create(self, key: str, value: bytes, *, ttl_seconds: float | None = None) -> VersionToken:
        """Set a key that is absent or deleted; AlreadyExists if it is live or a tombstone."""
        return await self._write("create", key, value, ttl_seconds=ttl_seconds)

    async def update(
        self, key: str, value: bytes, version: VersionToken, *, ttl_seconds: float | None = None
    ) -> VersionToken:
        """Set a key whose version is still this one; RevisionMismatch otherwise."""
        revision = version.as_int()
        if revision is None:
            raise OptionsError(f"key {key!r}: {version!r} is no revision of this bucket")
        return await self._write("update", key, value, revision, ttl_seconds)

    async def delete_with_version(self, key: str, version: VersionToken) -> bool:
        """Replace a key whose version is still this one by a tombstone; RevisionMismatch otherwise."""
        await self.update(key, b"", version)
        return True

    async def _write(
        self, what: str, key: str, value: bytes = b"", revision: int = 0, ttl_seconds: float | None = None
    ) -> VersionToken:
        value = bytes(memoryview(value))
        ttl_ns = 0 if ttl_seconds is None else max(1, int(check_ttl(ttl_seconds) * 1e9))
        check_change(key, value)
        change = Change(what, key, value, revision, ttl_ns)  # type: ignore[arg-type]
        turns = self._turns or await self._open(what)
        (outcome,) = await turns.commit([change])
        if isinstance(outcome, PenstockError):
            raise outcome
        return VersionToken.of(outcome)

    async def _open(self, what: str) -> ChangeTurns:
        bucket = await (self._door.make() if what in ("put", "create") else self._door.look())
        self._turns = self._turns or ChangeTurns(bucket)
        return self._turns


class EmbeddedKvStore(KvStore):
    """One embedded bucket.

    >>> issubclass(EmbeddedKvStore, KvStore)
    True
    """

    def __init__(self, name: str, door: Door) -> None:
        self._name, self._door = name, door
        self._reader, self._watcher, self._writer = (
            EmbeddedKvReader(door),
            EmbeddedKvWatcher(door),
            EmbeddedKvWriter(door),
        )

    @property
    def bucket(self) -> Bucket:
        """The synchronous bucket behind the roles; ReplacedError while there is none."""
        if self._door.bucket is None:
            raise ReplacedError(self._name, "the bucket does not exist")
        return self._door.bucket

    @property
    def name(self) -> str:
        """The name of the bucket."""
        return self._name

    @property
    def config(self) -> StoreConfig:
        """How the bucket was made."""
        return self.bucket.config

    @property
    def reader(self) -> EmbeddedKvReader:
        """The role that reads."""
        return self._reader

    @property
    def watcher(self) -> EmbeddedKvWatcher:
        """The role that watches."""
        return self._watcher

    @property
    def writer(self) -> EmbeddedKvWriter:
        """The role that writes."""
        return self._writer

    async def compact(self, revision: int) -> None:
        """Forget the history up to and including this revision; live keys stay, cursors before it expire."""
        await in_disk_thread((await self._door.look()).compact, revision)


def _scan(bucket: Bucket, prefix: str) -> UpdateBatch:
    bucket.catch_up()
    return bucket.scan(prefix)[0]


def _keys(bucket: Bucket, prefix: str) -> list[str]:
    found = _scan(bucket, prefix)
    keys: list[str] = []
    for start in range(0, len(found), KEYS_AT_ONCE):
        part = found.keys[start : start + KEYS_AT_ONCE]
        keys += [key.decode() for key in part.to_list(found.buffer)]
        give_way()
    return keys


def _history(bucket: Bucket, key: str) -> list[KvUpdate]:
    found = list[KvUpdate]()
    position, raw = bucket.first_revision(), key.encode()
    while len(batch := bucket.reader.read(position, DEFAULT_LIMIT)):
        updates = below(envelope_updates(batch, bucket.reader.path), [raw])
        found += [updates[int(index)] for index in (updates.keys.lengths == len(raw)).nonzero()[0]]
        position = batch.next_position
    purges = [index for index, update in enumerate(found) if update.op is Op.PURGE]
    return found[purges[-1] if purges else 0 :][-bucket.config.history :]


def _some(entries: Iterable[tuple[str, bytes]]) -> list[Change]:
    """Take the next changes of a put_many: thousands of them, or a few megabytes."""
    taken: list[Change] = []
    size = 0
    for key, value in islice(entries, CHANGES_A_TURN):
        taken.append(Change("put", check_change(key, value), bytes(memoryview(value))))
        size += len(value)
        if size >= PUT_MANY_BYTES:
            break
    return taken
