"""How long the manifest of a RocksDB store was when it was closed, in a small file beside it.

RocksDB takes a manifest that ends early for one whose last changes never came, which is right after a kill or a loss
of power, and removes the tables that are no longer named.  An orderly close writes everything into tables and syncs
the manifest, so after it nothing can be missing:

    penstock-closed := JSON {manifest, size, crc32}

Who opens the store to write removes the note.  It says nothing of a store whose ``CURRENT`` names another manifest:
somebody else has had it open since.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from typing import Final

import msgspec

from penstock.disk import Disk, ReadDisk, save_atomically
from penstock.errors import CorruptionError
from penstock.log.sidecar import decode_json

__all__ = ["check_closed", "current_manifest", "forget_closed", "note_closed"]

NAME: Final = "penstock-closed"
MANIFEST: Final = re.compile(r"MANIFEST-\d+", re.ASCII)
MOST_BYTES: Final = 1 << 10
SUMMED_BYTES: Final = 2 << 30
"""RocksDB begins another manifest at half of that; of a file that claims more only the length is looked at."""
PIECE_BYTES: Final = 1 << 20


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The note; see the head of this module."""

    manifest: str
    size: int
    crc32: int


def current_manifest(disk: ReadDisk, folder: str) -> str:
    """Return the name of the manifest that counts, or nothing where there is no store."""
    path = os.path.join(folder, "CURRENT")
    try:
        with disk.open(path) as file:
            name = file.read_at(0, 64).decode("ascii", "replace")
    except FileNotFoundError:
        return ""
    if name and not (name.endswith("\n") and MANIFEST.fullmatch(name[:-1])):
        raise CorruptionError(path, 0, "it does not name a manifest")
    return name[:-1]


def note_closed(disk: Disk, folder: str) -> None:
    """Note the manifest of a store that was just closed."""
    name = current_manifest(disk, folder)
    note = Closed(name, *_measure(disk, os.path.join(folder, name), None))
    save_atomically(disk, os.path.join(folder, NAME), msgspec.json.encode(note))


def forget_closed(disk: Disk, folder: str) -> None:
    """Remove the note: from here on the store changes."""
    with contextlib.suppress(FileNotFoundError):
        disk.remove(os.path.join(folder, NAME))


def check_closed(disk: Disk, folder: str) -> None:
    """Raise CorruptionError for a store whose manifest is shorter or another than when it was closed."""
    note = _closed(disk, folder)
    if note is None:
        return
    path = os.path.join(folder, note.manifest)
    try:
        size, crc32 = _measure(disk, path, note.size)
    except FileNotFoundError:
        return  # RocksDB says so, or its owner has just opened it
    if (size, crc32) == (note.size, note.crc32) or _closed(disk, folder) != note:
        return
    was = f"it had {note.size} bytes when" if size < note.size else "it was changed since"
    hint = f"if that was done on purpose, remove {os.path.join(folder, NAME)}"
    raise CorruptionError(path, size, f"{was} the store was closed; {hint}")


def _closed(disk: ReadDisk, folder: str) -> Closed | None:
    """Return the note, if the store is as the one who wrote it left it."""
    path = os.path.join(folder, NAME)
    try:
        with disk.open(path) as file:
            data = file.read_at(0, MOST_BYTES)
    except FileNotFoundError:
        return None
    note = decode_json(path, data, Closed, "the note of a closed store")
    return note if note.manifest == current_manifest(disk, folder) else None


def _measure(disk: ReadDisk, path: str, most: int | None) -> tuple[int, int]:
    """Return the size and the checksum of a file, or of its first ``most`` bytes; no checksum if it has less."""
    at, crc32 = 0, 0
    with disk.open(path) as file:
        size = file.stat().size
        end = size if most is None else most
        if size < end or end > SUMMED_BYTES:
            return min(size, end), 0
        while at < end and (piece := file.read_at(at, min(PIECE_BYTES, end - at))):
            at, crc32 = at + len(piece), zlib.crc32(piece, crc32)
    return at, crc32
