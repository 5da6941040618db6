"""What a fold saw last: a fingerprint beside its store, so that a backup put back is noticed.

A cursor and an id are not enough: a log or bucket that was restored from a backup has its id, and what was written to
it afterwards has revisions that the fold has already passed.

    <store>.penstock-seen          a register (log/sidecar.py): owner, cursor, fingerprint of the last record

It is written before each apply, with the cursor that apply is about to store.  A fold that dies in between finds the
fingerprint of a record it has read and not stored: that record has to be there all the same.
"""

from __future__ import annotations

import hashlib

from penstock.disk import Disk, disk_for
from penstock.errors import ReplacedError
from penstock.fold.face import FoldStore
from penstock.kv.roles import KvReader
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, check_fingerprint
from penstock.log.sidecar import Register
from penstock.types import KvUpdate, Op

__all__ = ["SeenNote", "seen_note_of", "fingerprint_of_change", "owner_of"]


def owner_of(identity: str | None) -> bytes:
    """Return 16 bytes for what identifies a log or a bucket; zeros where nothing does.

    >>> owner_of(None) == bytes(16), owner_of("2026-01-01T00:00:00Z") == bytes(16)
    (True, False)
    """
    if not identity:
        return bytes(16)
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


def fingerprint_of_change(update: KvUpdate) -> Fingerprint | None:
    """Return the fingerprint of one change of a bucket, None for one of unknown revision.

    >>> fingerprint_of_change(KvUpdate.put("a", b"1", 7)) == fingerprint_of_change(KvUpdate.put("a", b"2", 7))
    False
    """
    revision = update.version.as_int()
    if revision is None:
        return None
    key = update.key.encode()
    digest = hashlib.blake2b(len(key).to_bytes(4, "little") + key, digest_size=8)
    digest.update(update.value)
    return Fingerprint(revision, digest.digest())


def seen_note_of(store: FoldStore | None) -> SeenNote | None:
    """Return the note beside a store; None for one that is not a file or folder of this machine."""
    path = getattr(store, "path", None)
    if not isinstance(path, str):
        return None
    disk = disk_for(path)
    return None if disk.stat(path) is None else SeenNote(disk, path)


class SeenNote:
    """The note beside one store.

    >>> from penstock.disk import MemoryDisk
    >>> note = SeenNote(MemoryDisk(), "fold.snap")
    >>> note.write(owner_of("log"), 8, Fingerprint(7, bytes(range(8)))); note.register.seen().position
    7
    """

    def __init__(self, disk: Disk, store_path: str) -> None:
        self.register = Register(disk, store_path + ".penstock-seen")

    def write(self, owner: bytes, position: int, seen: Fingerprint | None) -> None:
        """Note the last record before ``position``; without one, that of earlier stays."""
        self.register.write(owner, position, sync=False, seen=seen or self.register.seen())

    def forget(self, owner: bytes) -> None:
        """Note that nothing was seen of this source yet."""
        self.register.write(owner, 0, sync=False)

    def check_log(self, log: LogReader) -> None:
        """Raise ReplacedError if the last record is another one by now."""
        check_fingerprint(log, self.register.seen())

    async def check_bucket(self, reader: KvReader, name: str) -> bytes:
        """Raise ReplacedError if this is another bucket, or the last change is another one by now; return its owner."""
        owner = owner_of(await reader.identity())
        found = self.register.read()
        if found is not None and found[0] != owner:
            raise ReplacedError(name, "the fold is of another bucket of that name: it was deleted and made again")
        seen = self.register.seen()
        if seen is not None:
            change = await reader.change(seen.position)
            erased = change is not None and change.op is Op.PURGE  # or purged: what was there is gone on purpose
            if change is not None and not erased and fingerprint_of_change(change) != seen:
                raise ReplacedError(
                    name, f"revision {seen.position} is not the change that was folded: it was restored"
                )
        return owner

    def close(self) -> None:
        """Let go of the file."""
        self.register.close()
