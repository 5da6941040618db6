"""What the last record somebody read looked like, so that another log at the same positions is noticed.

A position and a log id are not enough to resume by: a backup that is put back has the id of the log it was taken from,
and what is appended to it afterwards takes positions that somebody has already read.  Whoever resumes by position (a
fold, a named cursor, a Spark offset, a shipped head, a bridge) keeps the fingerprint of the last record it saw beside
its position, and asks ``check_fingerprint`` before it reads on:

    batch = log.read(position)
    …                                          the work
    save(batch.next_position, str(fingerprint_of(batch)))

    check_fingerprint(log, Fingerprint.parse(saved))       ReplacedError if that record is another one now

As text it is ``<position>-<digest in hex>``; as bytes, for registers, position u64 and digest, little-endian, 16 bytes.
The digest is blake2b of 8 bytes over time, kind, length and payload of the record.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Final, Self

import msgspec

from penstock.batch import Batch
from penstock.errors import CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.envelope import CONTENT, is_erased
from penstock.log.face import Cuttable, LogReader
from penstock.types import Record

__all__ = ["Fingerprint", "fingerprint_of", "fingerprint_of_record", "last_fingerprint", "check_fingerprint"]

DIGEST_BYTES: Final = 8
PIECE_BYTES: Final = 1 << 20
PACKED: Final = struct.Struct("<Q8s")
TEXT: Final = re.compile(r"([0-9]{1,19})-([0-9a-f]{16})", re.ASCII)


class Fingerprint(msgspec.Struct, frozen=True):
    """Where the last record was that somebody saw, and a digest of it.

    >>> seen = fingerprint_of(Batch.of([b"one", b"two"], timestamps=[10, 20]))
    >>> Fingerprint.parse(str(seen)) == seen == Fingerprint.unpack(seen.pack())
    True
    """

    position: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.position}-{self.digest.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the fingerprint that ``str`` made this text of.

        >>> Fingerprint.parse("80-0011223344556677").position
        80
        """
        found = TEXT.fullmatch(text)
        if found is None:
            raise OptionsError(f"{text!r}: not the fingerprint of a record")
        return cls(int(found[1]), bytes.fromhex(found[2]))

    def pack(self) -> bytes:
        """Return it as 16 bytes.

        >>> len(Fingerprint(80, bytes(8)).pack())
        16
        """
        return PACKED.pack(self.position, self.digest)

    @classmethod
    def unpack(cls, raw: bytes) -> Self | None:
        """Return the fingerprint that ``pack`` made these bytes of, None for zeros.

        >>> Fingerprint.unpack(bytes(16)) is None
        True
        """
        return cls(*PACKED.unpack(raw)) if raw.strip(b"\0") else None


def fingerprint_of(batch: Batch, index: int = -1) -> Fingerprint | None:
    """Return the fingerprint of one record of a batch, the last unless told otherwise; None for an empty batch.

    >>> fingerprint_of(Batch.of([])) is None
    True
    """
    return fingerprint_of_record(batch[index]) if len(batch) else None


def fingerprint_of_record(record: Record) -> Fingerprint:
    """Return the fingerprint of one record.

    >>> batch = Batch.of([b"one"], timestamps=[10])
    >>> fingerprint_of_record(batch[0]) == fingerprint_of(batch)
    True
    """
    head = struct.pack("<QHxxIQ", record.timestamp_ns or 0, record.kind or 0, 0, len(record.payload))
    digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    digest.update(record.payload)
    return Fingerprint(record.position, digest.digest())


def last_fingerprint(log: LogReader, start: int, end: int) -> Fingerprint | None:
    """Return the fingerprint of the last record from ``start`` on and before ``end``; None when there is none.

    Of a long span only the last piece is read, where the log can be cut.

    >>> import tempfile
    >>> from penstock.log.detect import open_log, open_writer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open_writer(folder + "/ops", format="messagelog") as writer:
    ...         numbers = writer.append_many([b"one", b"two", b"three"])
    ...     with open_log(folder + "/ops") as log:
    ...         last_fingerprint(log, 1, 3).position, last_fingerprint(log, 4, 4)
    (2, None)
    """
    at, found = start, None
    if isinstance(log, Cuttable) and start < end:
        at = log.cut(start, end, PIECE_BYTES)[-1][0]
    while at < end:
        batch = log.read(at)
        count = int(batch.positions.searchsorted(end))
        if count:
            found = batch, count - 1
        if count < len(batch) or batch.next_position <= at:
            break
        at = batch.next_position
    return None if found is None else fingerprint_of(*found)


def check_fingerprint(log: LogReader, seen: Fingerprint | None) -> bool:
    """Raise ReplacedError if the record of a fingerprint is another one now, or is not there.

    True when it is the same.  False when nobody can know: there is no fingerprint, retention has taken the record, it
    was erased, or it is damaged in a log that numbers its records.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> from penstock.log.detect import open_log
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks") as writer, open_log(folder.name + "/ticks") as log:
    ...     position = writer.append(b"one", timestamp_ns=7)
    ...     seen = fingerprint_of(log.read(position))
    ...     check_fingerprint(log, seen)
    True
    >>> with open_log(folder.name + "/ticks") as log:
    ...     check_fingerprint(log, Fingerprint(position, bytes(8)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.ReplacedError: ...ticks was replaced: the record at 80 is not the one that was read from it
    >>> folder.cleanup()
    """
    if seen is None or seen.position < log.first_position:
        return False
    end = log.next_position
    if seen.position >= end:
        raise ReplacedError(log.path, f"it ends at {end}, before the record at {seen.position} that was read from it")
    try:
        batch = log.read(seen.position, 1)
    except ExpiredError:
        return False  # retention was faster
    except (CorruptionError, OptionsError) as exc:  # a position by bytes may lie anywhere in another log
        reason = f"no record can be read at {seen.position}, where one was read from it ({exc})"
        raise ReplacedError(log.path, reason) from None
    if not len(batch) or int(batch.positions[0]) != seen.position:
        return False
    if fingerprint_of(batch, 0) != seen:
        if log.content == CONTENT and is_erased(bytes(batch[0].payload)):
            return False
        raise ReplacedError(log.path, f"the record at {seen.position} is not the one that was read from it")
    return True
