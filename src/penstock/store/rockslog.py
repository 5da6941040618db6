"""What RocksDB is not given to read, and what it would pass over without a word: damage in its logs.

A write-ahead log or a manifest is blocks of 32 KiB full of records:

    crc32c u32 | length u16 | kind u8 | payload         kinds 5 to 8 and 11 add the number of their file, u32

The kinds with a number are those of files that are used again, which is switched off here and never done to manifests.
A record of such a kind with another number, behind one that has none, makes RocksDB read it again and again: one
flipped bit, and a store never opens.

RocksDB ends a write-ahead log at its first record that is damaged, whatever follows, and removes it.  That is right for
a last record that a kill or a loss of power left unfinished.  Where more follows it is said, and what lies behind is
set aside.  That the log ends there is left to be seen only in the newest one: an older one whose rest is gone is not
opened, because what newer ones and the tables hold would be put on top of a hole.

A manifest that ends in the middle of a record is taken by RocksDB for one whose last change never came, which is right
after a loss of power.  It may also have been cut (of a store that was closed, rocksmark.py knows), and then RocksDB
removes tables that were in use: it is said, and what it removes is kept beside the others under a name in ``.bad``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.disk import Disk, ReadFile
from penstock.disk.aside import keep_bytes, keep_name
from penstock.disk.sparse import data_runs, is_empty
from penstock.errors import CorruptionError
from penstock.kernel import rockslog as kernel
from penstock.store.rocksmark import current_manifest
from penstock.types import Problem

__all__ = ["check_logs", "hold_tables", "let_go_of_tables"]

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 32 << 10
HEAD_BYTES: Final = 7
WINDOW_BYTES: Final = 64 * BLOCK_BYTES
WRITE_AHEAD: Final = re.compile(r"(\d+)\.log")
TABLE: Final = re.compile(r"\d+\.sst")
ONCE_OPEN: Final = re.compile(r"\d+\.sst|MANIFEST-(?!000001)\d+")
"""What is not there when the making of a store is cut short."""
TORN: Final = "its manifest ends in the middle of a record: what was written last may be missing, and is not looked for"
STRANGE: Final = "a record of a kind that does not belong in this file, which RocksDB would read for ever"
DAMAGED: Final = "a record is damaged: what follows is not read"
WIPED: Final = "nothing but zeros from here on: what was written last may be missing"
OLDER: Final = "newer ones follow, so the store is not opened: build it again, or put a copy of this file back"
NO_CURRENT: Final = "it is empty or missing beside files of a store: RocksDB would begin an empty one and remove them"


class LogDamage(NamedTuple):
    """Where a log is no longer what RocksDB writes; ``hangs`` when RocksDB would not come back from it."""

    at: int
    reason: str
    hangs: bool = False


def check_logs(disk: Disk, folder: str, *, mend: bool) -> list[Problem]:
    """Raise CorruptionError where RocksDB would not come back; return what it would pass over in silence.

    Who has the store for itself may ``mend`` the newest write-ahead log: it is cut before the damage, where RocksDB
    would end it, and what lies behind is set aside beside it in a file that ends in ``.bad``.
    """
    try:
        names = disk.list(folder)
    except FileNotFoundError:
        return []
    current = current_manifest(disk, folder)
    if not current and any(map(ONCE_OPEN.fullmatch, names)):
        raise CorruptionError(os.path.join(folder, "CURRENT"), 0, NO_CURRENT)
    if current and current not in names and current_manifest(disk, folder) == current:
        raise CorruptionError(os.path.join(folder, current), 0, "it is missing, and CURRENT names it")
    problems: list[Problem] = []
    logs = sorted((int(found[1]), name) for name in names if (found := WRITE_AHEAD.fullmatch(name)))
    for name in names:
        if name.startswith("MANIFEST-"):
            problems += _check_manifest(disk, os.path.join(folder, name), counts=name == current)
    for number, name in logs:
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            with disk.open(path) as file:
                place = _damage_of_log(file, number, newest=name == logs[-1][1])
            if place is None:
                continue
            if name != logs[-1][1] and disk.stat(path) is not None:
                raise CorruptionError(path, place.at, f"{place.reason}; {OLDER}")
            if place.hangs and not mend:
                raise CorruptionError(path, place.at, place.reason)
            problems.append(Problem(path, place.at, place.reason))
            aside = _cut(disk, path, place.at) if mend and place.reason != WIPED else ""
            logger.warning("%s%s", problems[-1], f"; it was set aside as {aside}" if aside else "")
    return problems


def hold_tables(disk: Disk, folder: str) -> list[str]:
    """Give every table a second name, before RocksDB opens a store that is damaged; return the tables."""
    tables = [os.path.join(folder, name) for name in disk.list(folder) if TABLE.fullmatch(name)]
    for path in tables:
        keep_name(disk, path)
    if tables:
        disk.sync_folder(folder)
    return tables


def let_go_of_tables(disk: Disk, folder: str, tables: list[str]) -> None:
    """Remove the second names of the tables that RocksDB has kept, also those of an opening that was killed.

    Say which are left.
    """
    names = {name: found.identity for name in disk.list(folder) if (found := disk.stat(os.path.join(folder, name)))}
    here = {identity for name, identity in names.items() if TABLE.fullmatch(name)}
    for name, identity in names.items():
        if name.endswith(".bad") and identity in here:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(os.path.join(folder, name))
    for path in tables:
        if os.path.basename(path) not in names:
            logger.warning("%s: no longer part of the store, which was damaged; kept beside it in .bad", path)


def _windows(file: ReadFile) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of a log that are no holes, each from the begin of a block."""
    size, done = file.stat().size, 0
    for first, last in data_runs(file):
        for start in range(max(done, first - first % BLOCK_BYTES), last, WINDOW_BYTES):
            done = start + WINDOW_BYTES
            yield start, file.read_at(start, min(WINDOW_BYTES, size - start))


def _walk(file: ReadFile) -> tuple[int, int]:
    """Return where the first record with a number begins, and the first place without a good record, or -1."""
    bad, end = -1, 0
    for start, data in _windows(file):
        if bad < 0 and start > end:
            bad = end
        strange, broken = kernel.walk(data)
        if bad < 0 <= broken:
            bad = start + broken
        if strange >= 0:
            return start + strange, bad
        end = start + len(data)
    if bad < 0 and end < file.stat().size:
        bad = end
    return -1, bad


def _check_manifest(disk: Disk, path: str, *, counts: bool) -> list[Problem]:
    with contextlib.suppress(FileNotFoundError):
        with disk.open(path) as file:
            strange, bad = _walk(file)
            torn = bad < 0 or _ends(file, bad)
        if strange >= 0:
            raise CorruptionError(path, strange, STRANGE)
        if counts and not torn:
            raise CorruptionError(path, bad, "a record of the manifest is damaged")
        if counts and bad >= 0:
            problem = Problem(path, bad, TORN)
            logger.warning("%s", problem)
            return [problem]
    return []


def _damage_of_log(file: ReadFile, number: int, *, newest: bool) -> LogDamage | None:
    """Return where a write-ahead log is damaged; the newest may have an unfinished record at its end."""
    strange, bad = _walk(file)
    if strange == 0 and int.from_bytes(file.read_at(HEAD_BYTES, 4), "little") == number & 0xFFFFFFFF:
        return None  # its files are used again: RocksDB expects these kinds here
    if strange >= 0:
        return LogDamage(bad, STRANGE if bad == strange else DAMAGED, hangs=True)
    if bad < 0:
        return None
    if is_empty(file, bad, file.stat().size):
        return LogDamage(bad, WIPED)
    return None if newest and _ends(file, bad) else LogDamage(bad, DAMAGED)


def _ends(file: ReadFile, bad: int) -> bool:
    """Whether a log ends with what has no good record: a record that was cut short, or zeros."""
    size = file.stat().size
    if is_empty(file, bad, size):
        return True
    block = bad - bad % BLOCK_BYTES
    data, at = file.read_at(block, BLOCK_BYTES), bad - block
    if block + len(data) < size or kernel.good(data, at + 1) >= 0:
        return False
    length = int.from_bytes(data[at + 4 : at + 6], "little")
    return len(data) - at < HEAD_BYTES or len(data) < at + HEAD_BYTES + length <= BLOCK_BYTES


def _cut(disk: Disk, path: str, at: int) -> str:
    with disk.modify(path) as file:
        aside = keep_bytes(disk, f"{path}.{at}", file, at)
        file.truncate(at)
        file.sync()
    disk.sync_folder(os.path.dirname(path))
    return os.path.basename(aside)
