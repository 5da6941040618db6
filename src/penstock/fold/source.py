"""Which log a store was folded from: a small note beside the store.

A cursor is a number; it says nothing about which log it counts in.  A log that was deleted and made again may have
grown past the cursor, and then a fold would go on in the middle of another history without noticing.

    <store>.penstock-source        JSON: log_id, format, path

The note is written before the first update of its log is applied.  A log without an id (a foreign one) is only
checked for its end: one that ends before the cursor cannot be the log the cursor is of.
"""

from __future__ import annotations

import zlib

import msgspec

from penstock.disk import Disk, save_atomically
from penstock.errors import ReplacedError
from penstock.log.face import LogReader
from penstock.log.sidecar import decode_json
from penstock.shown import as_utf8

__all__ = ["Source", "SourceNote", "source_of"]


class Source(msgspec.Struct, frozen=True):
    """Which log: its random id, if it has one, its format and where it was.

    >>> Source("ab", "messagelog", "orders").log_id
    'ab'
    """

    log_id: str | None
    format: str
    path: str
    version: int = 1
    check: int | None = None
    """CRC-32 of the other fields; a note of the first release has none."""

    def checksum(self) -> int:
        """Return what ``check`` should be."""
        return zlib.crc32(msgspec.json.encode((self.log_id, self.format, self.path, self.version)))

    def __post_init__(self) -> None:
        if self.check is not None and self.check != self.checksum():
            raise ValueError("its checksum is another")


def source_of(log: LogReader) -> Source:
    """Return which log this is."""
    return Source(log.stat().get("log_id"), log.format, as_utf8(log.path))


class SourceNote:
    """The note beside one store.

    >>> from penstock.disk import MemoryDisk
    >>> note = SourceNote(MemoryDisk(), "fold.snap")
    >>> note.write(Source("ab", "messagelog", "orders")); note.read().path
    'orders'
    """

    def __init__(self, disk: Disk, store_path: str) -> None:
        self._disk, self.path = disk, store_path + ".penstock-source"

    def read(self) -> Source | None:
        """Return what the note says, None when there is none."""
        try:
            with self._disk.open(self.path) as file:
                data = file.read_at(0, 1 << 16)
        except FileNotFoundError:
            return None
        return decode_json(self.path, data, Source, "a note about a log")

    def write(self, source: Source) -> None:
        """Note that the store is folded from this log."""
        checked = msgspec.structs.replace(source, check=source.checksum())
        save_atomically(self._disk, self.path, msgspec.json.encode(checked) + b"\n")

    def check(self, source: Source) -> None:
        """Raise ReplacedError if the store was folded from another log."""
        known = self.read()
        if known is None:
            self.write(source)
        elif known.log_id != source.log_id:
            raise ReplacedError(
                source.path, f"the fold is of the log with id {known.log_id}, this one has {source.log_id}"
            )
