"""What RocksDB is not given to read: records of its logs on which it would go round for ever.

A write-ahead log or a manifest is blocks of 32 KiB full of records:

    crc32c u32 | length u16 | kind u8 | payload         kinds 5 to 8 and 11 add the number of their file, u32

The kinds with a number are those of files that are used again, which is switched off here and never done to manifests.
A record of such a kind with another number, behind one that has none, makes RocksDB read it again and again: one
flipped bit, and a store never opens.  So the heads of the records are looked at first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Final

from penstock.disk import Disk, ReadFile
from penstock.disk.sparse import copy_data, data_runs
from penstock.errors import CorruptionError

__all__ = ["check_logs"]

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 32 << 10
HEAD_BYTES: Final = 7
WINDOW_BYTES: Final = 64 * BLOCK_BYTES
NUMBERED: Final = frozenset({5, 6, 7, 8, 11})
WRITE_AHEAD: Final = re.compile(r"(\d+)\.log")
REASON: Final = "a record of a kind that does not belong in this file, which RocksDB would read for ever"


def check_logs(disk: Disk, folder: str, *, mend: bool) -> None:
    """Raise CorruptionError where RocksDB would not come back.

    Who has the store for itself may ``mend`` a write-ahead log: it is cut before that record, where RocksDB would end
    it if it noticed, and what lies behind is set aside beside it in a file that ends in ``.bad``.
    """
    try:
        names = disk.list(folder)
    except FileNotFoundError:
        return
    for name in names:
        found = WRITE_AHEAD.fullmatch(name)
        if found is None and not name.startswith("MANIFEST-"):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            with disk.open(path) as file:
                at = _stray(file, None if found is None else int(found[1]))
            if at is None:
                continue
            if found is None or not mend:
                raise CorruptionError(path, at, REASON)
            aside = _cut(disk, path, at)
            logger.warning("%s at byte %d: %s; what follows was set aside as %s", path, at, REASON, aside)


def _stray(file: ReadFile, number: int | None) -> int | None:
    """Return where the first record begins whose kind does not belong; ``number`` is that of a write-ahead log."""
    size = file.stat().size
    windows = (at for first, last in data_runs(file) for at in range(first - first % WINDOW_BYTES, last, WINDOW_BYTES))
    for start in windows:
        data = file.read_at(start, min(WINDOW_BYTES, size - start))
        for block in range(0, len(data), BLOCK_BYTES):
            at, end = block, min(block + BLOCK_BYTES, len(data))
            while at + HEAD_BYTES <= end:
                length, kind = data[at + 4] | data[at + 5] << 8, data[at + 6]
                if kind in NUMBERED:
                    own = int.from_bytes(data[at + HEAD_BYTES : at + HEAD_BYTES + 4], "little")
                    if start + at == 0 and number is not None and own == number & 0xFFFFFFFF:
                        return None  # its files are used again: RocksDB expects these kinds here
                    return start + at
                if not kind and not length:
                    break  # room that was made and not used
                at += HEAD_BYTES + length
    return None


def _cut(disk: Disk, path: str, at: int) -> str:
    aside = f"{path}.{at}.bad"
    with disk.modify(path) as file:
        if disk.stat(aside) is None:
            with disk.create(aside) as copy:
                copy_data(file, at, file.stat().size, copy)
                copy.sync()
        file.truncate(at)
        file.sync()
    disk.sync_folder(os.path.dirname(path))
    return os.path.basename(aside)
