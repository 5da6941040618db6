"""A copy of a whole node while it runs, compared with what it was copied from.

    1  every file gets a second name in a staging folder, so that retention and compaction take nothing away meanwhile
    2  state is copied: stores, cursors, marks, what ingest remembers
    3  logs are copied, with the files they got meanwhile: they are at least as far as any state that points into them
    4  the copy is read: every log record by record against its original, every store by its digest

A copy holds what was acknowledged before it began.  What came while it was made may be in it or not, never in halves:
logs and stores trim a torn end when they are opened, as after a kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat as stat_bits
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from penstock.disk.plain import create_private, is_below, make_folders, open_below, read_small, stays_below
from penstock.disk.posix import folder_of
from penstock.disk.tree import check_vacant, put_in_place, remove_tree, staged, sync_tree
from penstock.errors import CorruptionError, ExpiredError, OptionsError, PenstockError, RetryError
from penstock.log.detect import open_log
from penstock.log.find import find_logs
from penstock.node.ledger.seams import FoldSeam, read_seams
from penstock.node.version import check_version
from penstock.store import AppendLogStore

__all__ = ["BackupReport", "back_up", "restore"]

MANIFEST: Final = "penstock-backup.json"
MANIFEST_BYTES: Final = 128 << 20
"""No manifest is as long as that, with a line a file."""
STAGE: Final = "penstock-backup-stage"
LEFT_OUT: Final = ("penstock-node-lock", "penstock-node-probe", "penstock-reserve")
CHUNK: Final = 1 << 20
RETENTION_TRIES: Final = 10
"""How often a log whose retention was faster than the comparison is compared again, each time less of it."""
MOST_ROLLS: Final = 1000
NUMBERED: Final = re.compile(r"(?P<log>.+?)(?:\.(?P<file>\d+)(?:\.[a-z]+)?|/(?P<segment>\d+)\.[a-z]+)", re.DOTALL)
"""A file of a log that has several: ``readings.3``, ``segment.3.gz``, ``00003.log``."""
Tell = Callable[[str], None]
Numbered = tuple[int, str]
"""A file of a log with its number."""


class CopiedLog(msgspec.Struct, frozen=True):
    """A log of a backup: how far it goes, and what its records are.

    >>> CopiedLog("logs/readings", 1, 11, 10, "ab").records
    10
    """

    path: str
    first: int
    next: int
    records: int
    digest: str
    """BLAKE2 of positions and payloads."""


class BackupReport(msgspec.Struct, frozen=True):
    """What a backup holds; the manifest beside it.

    >>> BackupReport("2026-01-01T00:00:00Z", {}, [], {}).logs
    []
    """

    created: str
    files: dict[str, str]
    """Path → BLAKE2 of its bytes."""
    logs: list[CopiedLog]
    stores: dict[str, str]
    """Path → digest of its entries."""
    left_out: list[str] = []
    """Stores of other engines: a fold is made again from its log, or carried as an artifact."""
    version: int = 1


def back_up(data: str, target: str, tell: Tell = lambda _: None) -> BackupReport:
    """Copy the data directory of a node, running or not, to a new folder, and compare.

    >>> import tempfile
    >>> from penstock.log.messagelog import MessageLog
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.makedirs(folder + "/data/logs")
    ...     with MessageLog.open(folder + "/data/logs/readings") as log:
    ...         position = log.append(b"21.5")
    ...         report = back_up(folder + "/data", folder + "/copy")
    ...     restored = restore(folder + "/copy", folder + "/again")
    ...     [(log.path, log.records) for log in restored.logs]
    [('logs/readings', 1)]
    """
    if not os.path.isdir(data):
        raise OptionsError(f"{data}: there is no such data directory")
    if is_below(data, target):
        raise OptionsError(f"{target}: this is inside of what is copied")
    check_version(data, note=False)  # a look, which makes nothing
    make_folders(folder_of(target))
    check_vacant(target)
    stage = os.path.join(data, STAGE)
    remove_tree(stage)
    with staged(target, "backup") as partial, contextlib.ExitStack() as held_files:
        held_files.callback(remove_tree, stage)
        tell("holding files")
        left_out = _engine_stores(data)
        before = _hold_logs(data, stage, left_out)
        state = [name for name in _files_of(data, left_out) if not _is_log_data(data, name)]
        state = [name for name in state if _hold(data, stage, name)]
        files: dict[str, str] = {}
        tell("copying state")
        for name in state:
            _copy(data, stage, partial, name, files)
        tell("copying logs")
        now = _hold_logs(data, stage, left_out)
        for log in sorted({*before, *now}):
            held = _joined(before.get(log, []), now.get(log, []))
            _copy_log(data, stage, partial, log, held, files)
        tell("comparing")
        report = msgspec.structs.replace(_compared(data, partial, files), left_out=left_out)
        _write_manifest(partial, report)
        sync_tree(partial)
        put_in_place(partial, target)
        return report


def restore(backup: str, data: str, tell: Tell = lambda _: None) -> BackupReport:
    """Bring a backup back as a data directory that is not there yet, and compare it with the manifest."""
    path = os.path.join(backup, MANIFEST)
    try:
        report = msgspec.json.decode(read_small(path, MANIFEST_BYTES), type=BackupReport)
    except FileNotFoundError:
        raise OptionsError(f"{backup}: not a backup of a node: there is no {MANIFEST}") from None
    except msgspec.MsgspecError as exc:
        raise CorruptionError(path, 0, f"not the manifest of a backup: {exc}") from None
    for name in (*report.files, *(log.path for log in report.logs), *report.stores):
        if not stays_below(name):
            raise CorruptionError(path, 0, f"{name!r} is not in the backup")
    make_folders(folder_of(data))
    check_vacant(data)
    with staged(data, "restore") as partial:
        tell("copying")
        for name, digest in report.files.items():
            found: dict[str, str] = {}
            _copy(backup, backup, partial, name, found)
            if found.get(name) != digest:
                raise CorruptionError(os.path.join(backup, name), 0, "its bytes are not those that were backed up")
        tell("comparing")
        for log in report.logs:
            _, now = _digest_of(os.path.join(partial, log.path), log.path, log.first, log.next)
            if now != log:
                raise CorruptionError(os.path.join(backup, log.path), 0, f"{now} was restored, {log} was backed up")
        for name, digest in report.stores.items():
            if _store_digest(os.path.join(partial, name)) != digest:
                raise CorruptionError(os.path.join(backup, name), 0, "its entries are not those that were backed up")
        sync_tree(partial)
        put_in_place(partial, data)
        return report


# --- Files


def _engine_stores(data: str) -> list[str]:
    """Return the folds in the data directory that are kept by RocksDB or LMDB: only their engine can copy them."""
    folds = [seam for seam in read_seams(data) if isinstance(seam, FoldSeam) and seam.backend != "append-log"]
    names = [os.path.relpath(seam.store, data) for seam in folds]
    return [name for name in names if not name.startswith("..")]


def _below(name: str, folders: list[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _files_of(root: str, left_out: list[str]) -> Iterator[str]:
    """Yield the regular files below a folder, sockets, locks and staging folders apart; by path."""
    folders = [""]
    while folders:
        below = folders.pop()
        with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(root, below)) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.name == STAGE or entry.name in LEFT_OUT or _below(name, left_out):
                    continue
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:
                    continue
                if stat_bits.S_ISDIR(mode):
                    folders.append(name)
                elif stat_bits.S_ISREG(mode):
                    yield name


def _hold(data: str, stage: str, name: str) -> bool:
    """Give a file a second name, so that nothing takes it away; return whether it was still there."""
    held = os.path.join(stage, name)
    make_folders(os.path.dirname(held))
    try:
        os.link(os.path.join(data, name), held)
    except FileNotFoundError:
        return False
    except FileExistsError:
        return True  # held already
    return True


def _numbered(name: str) -> tuple[str, int]:
    """Return which log a file belongs to and the how-manieth it is; the first one of a channel has no number.

    >>> [_numbered(name) for name in ("a/b", "a/b.1", "q/segment.10.gz", "m/0007.idx")]
    [('a/b', 0), ('a/b', 1), ('q/segment', 10), ('m', 7)]
    """
    found = NUMBERED.fullmatch(name)
    return (found["log"], int(found["file"] or found["segment"])) if found else (name, 0)


def _hold_logs(data: str, stage: str, left_out: list[str]) -> dict[str, list[Numbered]]:
    """Hold the files of all logs there are, and return them by log."""
    logs: dict[str, list[Numbered]] = {}
    for name in _files_of(data, left_out):
        if _is_log_data(data, name):
            log, number = _numbered(name)
            logs.setdefault(log, []).append((number, name))
    return {log: _hold_log(data, stage, log, files) for log, files in logs.items()}


def _joined(before: list[Numbered], now: list[Numbered]) -> list[Numbered]:
    """Return the files a log had before and has now, without a gap between them.

    Where retention has taken the newest of those before, it may have taken later ones as well, which nobody held: then
    the log begins with what it has now.  The journal of a broker keeps no order of age: all of it counts.

    >>> _joined([(1, "b.1"), (2, "b.2")], [(2, "b.2"), (3, "b.3")])
    [(1, 'b.1'), (2, 'b.2'), (3, 'b.3')]
    >>> _joined([(1, "b.1"), (2, "b.2")], [(4, "b.4"), (5, "b.5")])
    [(4, 'b.4'), (5, 'b.5')]
    """
    is_journal = all(name.endswith(".turns") for _, name in before)
    if before and now and not is_journal and before[-1][0] not in {number for number, _ in now}:
        return now
    return sorted({*before, *now})


def _hold_log(data: str, stage: str, log: str, files: list[Numbered]) -> list[Numbered]:
    """Hold the files of a log, newest first: when retention has taken one, the older ones are gone as well.

    A file that has only changed its name, because it was compressed, is held by the name it has now.
    """
    held: list[Numbered] = []
    for number, name in sorted(files, reverse=True):
        if _hold(data, stage, name):
            held.append((number, name))
        else:
            now = (one for one in _beside(data, name) if one != name and _numbered(one) == (log, number))
            held += [(number, one) for one in now if _hold(data, stage, one)]
    return sorted(held)


def _beside(data: str, name: str) -> list[str]:
    folder = os.path.dirname(name)
    with contextlib.suppress(FileNotFoundError):
        return [os.path.join(folder, base) for base in os.listdir(os.path.join(data, folder))]
    return []


def _copy_log(data: str, stage: str, target: str, log: str, held: list[Numbered], files: dict[str, str]) -> None:
    """Copy the files of a log, and of a channel those it has rolled to meanwhile: its last file may say so.

    What was copied before it rolled is copied again with its successor.
    """
    for _, name in held:
        _copy(data, stage, target, name, files)
    for _ in range(MOST_ROLLS):
        number, newest = held[-1] if held else (0, "")
        successor = f"{log}.{number + 1}"
        if not held or newest not in (log, f"{log}.{number}") or not os.path.exists(os.path.join(data, successor)):
            return
        if not _hold(data, stage, successor):
            return
        for name in (newest, successor):
            _copy(data, stage, target, name, files)
        held = [(number + 1, successor)]
    raise RetryError(f"{os.path.join(data, log)}: it gets new files faster than they can be copied")


def _is_log_data(data: str, name: str) -> bool:
    """Whether a file holds records: it is copied after everything that points into it."""
    base = os.path.basename(name)
    if "penstock-" in base or base.endswith((".snap", ".json", ".toml", ".pem", ".key")):
        return False
    if base.endswith((".log", ".idx", ".turns")):
        return True
    stem = os.path.join(data, name)
    return any(
        os.path.exists(f"{one}.penstock-id") for one in (stem, stem.rpartition(".")[0])
    ) or os.path.exists(os.path.join(os.path.dirname(stem), "penstock-id"))  # fmt: skip


def _copy(data: str, stage: str, target: str, name: str, files: dict[str, str]) -> None:
    """Copy a file as it is now, or as it was held when it is gone; one that is in neither place was never kept."""
    for root in (data, stage):
        try:
            source = open_below(root, name)
        except FileNotFoundError:
            continue
        with source:
            where = os.path.join(target, name)
            make_folders(os.path.dirname(where))
            digest = hashlib.blake2b(digest_size=32)
            left = os.fstat(source.fileno()).st_size
            with open(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as copy:
                while left > 0 and (piece := source.read(min(CHUNK, left))):
                    copy.write(piece)
                    digest.update(piece)
                    left -= len(piece)
            files[name] = digest.hexdigest()
        return


# --- Comparing


def _compared(data: str, copy: str, files: dict[str, str]) -> BackupReport:
    logs, stores = [], {}
    for channel in find_logs(copy):
        relative = os.path.relpath(channel.path, copy)
        original = os.path.join(data, relative)
        known, found = _digest_of(channel.path, relative)
        first, theirs = _digest_of_original(original, relative, found)
        _, ours = _digest_of(channel.path, relative, first, found.next) if first > found.first else (known, found)
        if msgspec.structs.replace(theirs, first=first) != msgspec.structs.replace(ours, first=first):
            raise CorruptionError(channel.path, 0, f"the copy has {ours}, the original {theirs}")
        logs.append(found)
    for name in files:
        if name.endswith(".snap"):
            with contextlib.suppress(PenstockError):
                stores[name] = _store_digest(os.path.join(copy, name))
    return BackupReport(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), files, logs, stores)


def _digest_of_original(path: str, name: str, found: CopiedLog) -> tuple[int, CopiedLog]:
    """Return from where on an original can be compared, and what it has there: retention goes on taking its oldest."""
    for attempt in range(RETENTION_TRIES + 1):
        with open_log(path) as log:
            first = max(found.first, log.first_position)
        if attempt and found.next > first:  # less each time, until retention cannot be faster
            first = _next_record(path, first + (found.next - first) * attempt // RETENTION_TRIES)
        if first >= found.next:
            break
        _, theirs = _digest_of(path, name, first, found.next)
        with open_log(path) as log:
            if log.first_position <= first:
                return first, theirs
    return found.next, CopiedLog(name, found.next, found.next, 0, hashlib.blake2b(digest_size=16).hexdigest())


def _next_record(path: str, position: int) -> int:
    """Return the position of the first record that is not before a position."""
    with open_log(path) as log:
        if log.format == "messagelog":
            return position
        at = log.first_position
        while at < position and len(batch := log.read(at)):
            at = batch.next_position
        return at


def _digest_of(path: str, name: str, first: int | None = None, end: int | None = None) -> tuple[int, CopiedLog]:
    """Return how many records a log has in a span, and what they are."""
    digest, count = hashlib.blake2b(digest_size=16), 0
    with open_log(path) as log:
        begin = log.first_position if first is None else first
        end = log.next_position if end is None else end
        at = begin
        while at < end:
            try:
                batch = log.read(at)
            except ExpiredError:
                break
            if not len(batch):
                break
            for record in batch:
                if record.position >= end:
                    break
                digest.update(record.position.to_bytes(8, "little") + len(record.payload).to_bytes(8, "little"))
                digest.update(record.payload)
                count += 1
            at = batch.next_position
    return count, CopiedLog(name, begin, end, count, digest.hexdigest())


def _store_digest(path: str) -> str:
    with AppendLogStore.open(path, read_only=True) as store:
        return store.digest()


def _write_manifest(folder: str, report: BackupReport) -> None:
    with create_private(os.path.join(folder, MANIFEST)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
