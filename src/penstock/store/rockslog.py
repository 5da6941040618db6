"""What RocksDB is not given to read: records of its logs on which it would go round for ever.

A write-ahead log or a manifest is blocks of 32 KiB full of records:

    crc32c u32 | length u16 | kind u8 | payload         kinds 5 to 8 and 11 add the number of their file, u32

The kinds with a number are those of files that are used again, which is switched off here and never done to manifests.
A record of such a kind with another number, behind one that has none, makes RocksDB read it again and again: one
flipped bit, and a store never opens.  So the heads of the records are looked at first.

A manifest that ends in the middle of a record is taken by RocksDB for one whose last change never came, which is right
after a loss of power.  It may also have been cut (of a store that was closed, rocksmark.py knows), and then RocksDB
removes tables that were in use: it is said, and what it removes is kept beside the others under a name in ``.bad``.
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
from penstock.store.rocksmark import current_manifest
from penstock.types import Problem

__all__ = ["check_logs", "hold_tables", "let_go_of_tables"]

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 32 << 10
HEAD_BYTES: Final = 7
WINDOW_BYTES: Final = 64 * BLOCK_BYTES
NUMBERED: Final = frozenset({5, 6, 7, 8, 11})
WRITE_AHEAD: Final = re.compile(r"(\d+)\.log")
TORN: Final = "its manifest ends in the middle of a record: what was written last may be missing, and is not looked for"
REASON: Final = "a record of a kind that does not belong in this file, which RocksDB would read for ever"


def check_logs(disk: Disk, folder: str, *, mend: bool) -> list[Problem]:
    """Raise CorruptionError where RocksDB would not come back; return what it would pass over in silence.

    Who has the store for itself may ``mend`` a write-ahead log: it is cut before that record, where RocksDB would end
    it if it noticed, and what lies behind is set aside beside it in a file that ends in ``.bad``.
    """
    try:
        names = disk.list(folder)
    except FileNotFoundError:
        return []
    problems: list[Problem] = []
    current = current_manifest(disk, folder)
    for name in names:
        found = WRITE_AHEAD.fullmatch(name)
        if found is None and not name.startswith("MANIFEST-"):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            with disk.open(path) as file:
                at, torn = _walk(file, None if found is None else int(found[1]))
            if name == current and torn is not None:
                problems.append(Problem(path, torn, TORN))
                logger.warning("%s", problems[-1])
            if at is None:
                continue
            if found is None or not mend:
                raise CorruptionError(path, at, REASON)
            aside = _cut(disk, path, at)
            logger.warning("%s at byte %d: %s; what follows was set aside as %s", path, at, REASON, aside)
    return problems


def hold_tables(disk: Disk, folder: str) -> list[str]:
    """Give every table a second name, before RocksDB opens a store whose manifest is torn; return the tables."""
    tables = [name for name in disk.list(folder) if name.endswith(".sst")]
    for name in tables:
        path = os.path.join(folder, name)
        with contextlib.suppress(FileExistsError):
            disk.link(path, path + ".bad")
    return tables


def let_go_of_tables(disk: Disk, folder: str, tables: list[str]) -> None:
    """Remove the second names of the tables that RocksDB has kept; say which are left."""
    for name in tables:
        path = os.path.join(folder, name)
        if disk.stat(path) is not None:
            disk.remove(path + ".bad")
        else:
            logger.warning("%s: no longer part of the store, whose manifest was torn; kept as %s.bad", path, name)


def _walk(file: ReadFile, number: int | None) -> tuple[int | None, int | None]:
    """Return where the first record begins whose kind does not belong, and the first that is cut or nothing but zeros.

    ``number`` is that of a write-ahead log.
    """
    size, torn = file.stat().size, None
    windows = (at for first, last in data_runs(file) for at in range(first - first % WINDOW_BYTES, last, WINDOW_BYTES))
    for start in windows:
        data = file.read_at(start, min(WINDOW_BYTES, size - start))
        for block in range(0, len(data), BLOCK_BYTES):
            record = at = block
            end = min(block + BLOCK_BYTES, len(data))
            while at + HEAD_BYTES <= end:
                length, kind = data[at + 4] | data[at + 5] << 8, data[at + 6]
                if kind in NUMBERED:
                    own = int.from_bytes(data[at + HEAD_BYTES : at + HEAD_BYTES + 4], "little")
                    if start + at == 0 and number is not None and own == number & 0xFFFFFFFF:
                        return None, None  # its files are used again: RocksDB expects these kinds here
                    return start + at, torn
                if not kind and not length:
                    break  # room that was made and not used, or was wiped
                record, at = at, at + HEAD_BYTES + length
            padded = end - block == BLOCK_BYTES and 0 <= end - at < HEAD_BYTES
            if torn is None and at != end and not padded:
                torn = start + (record if at > end else at)
    return None, torn


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
