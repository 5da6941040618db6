"""Many small segments of many nodes as few files that Spark likes: Parquet, with a manifest of its own.

    <place>/compacted/<generation:16>-<hash:16>.parquet        node, channel, log, position, timestamp_ns, kind, from,
                                                               payload
    <place>/compacted.json                                     which file holds which span of which log: swapped

A file is up before the manifest names it.  The originals stay until the manifest is in place; then ``forget_compacted``
lets them go, by the rules of ``prune``.  A crash in between leaves a file that nothing names.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any, Final

import msgspec
import numpy as np

from penstock.batch import Batch, Spans
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import ObjectStore, object_store_for
from penstock.disk.failpoint import fail_point
from penstock.disk.objectstore import Tag, publish
from penstock.errors import (
    ConflictError,
    CorruptionError,
    ExpiredError,
    NotFoundError,
    OptionsError,
    PenstockError,
    ReplacedError,
    UnsupportedError,
)
from penstock.log.fingerprint import Fingerprint, check_fingerprint, fingerprint_of
from penstock.ship.manifest import MANIFEST_BYTES
from penstock.ship.prune import forget_before
from penstock.ship.remote import ShippedLog, find_shipped

__all__ = ["Compacted", "CompactedFile", "CompactedSpan", "compact_fleet", "forget_compacted", "read_compacted"]

_log = logging.getLogger("penstock.ship")

BAD_LOG: Final = (CorruptionError, ExpiredError, ReplacedError, UnsupportedError, NotFoundError)
"""What may be wrong with one log of many."""
MANIFEST: Final = "compacted.json"
FILE_BYTES: Final = 128 << 20
UNPACKED_BYTES: Final = 1 << 30
"""What a reader takes from a file at most, with ROW_BYTES and twice the payload for each of its records."""
ROW_BYTES: Final = 64
"""What a record counts beside its payload: of small ones that is most of what they take."""
ENTRY_BYTES: Final = 512
"""What a file takes in the manifest beside its spans, and more."""


class CompactedSpan(msgspec.Struct, frozen=True):
    """What a file holds of one log.

    >>> CompactedSpan("edge-1/ticks", "ab", "edge-1", "ticks", 80, 160).log
    'edge-1/ticks'
    """

    log: str
    log_id: str
    node: str
    channel: str
    first: int
    next: int
    seen: str = ""
    """The fingerprint of its last record (log/fingerprint.py): a backup that was shipped in its place has another."""


class CompactedFile(msgspec.Struct, frozen=True):
    """One Parquet file.

    >>> CompactedFile("compacted/x.parquet", 10, "ab", 2, ()).rows
    2
    """

    key: str
    bytes: int
    blake3: str
    rows: int
    spans: tuple[CompactedSpan, ...]
    min_time_ns: int | None = None
    max_time_ns: int | None = None


class Compacted(msgspec.Struct, frozen=True):
    """The manifest: every file, and how far each log is in them.

    >>> Compacted().last("edge-1/ticks", "ab") is None
    True
    """

    version: int = 1
    generation: int = 0
    files: tuple[CompactedFile, ...] = ()

    def files_of(self, log: str, log_id: str) -> list[CompactedFile]:
        """Return the files with spans of a log; one that had its name before is another log."""
        return [file for file in self.files if any((span.log, span.log_id) == (log, log_id) for span in file.spans)]

    def last(self, log: str, log_id: str) -> CompactedSpan | None:
        """Return the last span of a log that is compacted, None when nothing of it is."""
        spans = [span for file in self.files_of(log, log_id) for span in file.spans]
        mine = (span for span in spans if (span.log, span.log_id) == (log, log_id))
        return max(mine, key=lambda span: span.next, default=None)


def read_compacted(store: ObjectStore) -> tuple[Compacted, Tag | None]:
    """Return the manifest of a place with its tag; an empty one where there is none.

    >>> from penstock.disk import object_store_for
    >>> read_compacted(object_store_for("/nowhere"))[0].files
    ()
    """
    try:
        data, info = store.get(MANIFEST, most=MANIFEST_BYTES)
    except FileNotFoundError:
        return Compacted(), None
    try:
        found = msgspec.json.decode(data, type=Compacted)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptionError(f"{store.url}/{MANIFEST}", 0, f"not a manifest of compacted files: {exc}") from None
    if found.version != 1:
        raise UnsupportedError(f"{store.url}/{MANIFEST}: version {found.version} is not read by this release")
    return found, info.tag


def compact_fleet(place: str, *, file_bytes: int = FILE_BYTES) -> Compacted:
    """Write what was shipped below a place since the last time into files of about ``file_bytes`` of records.

    That much is held in memory, and more: a record counts its payload and 64 bytes.

    ConflictError when another one compacted the same place meanwhile: nothing is lost, call again.  What is wrong with
    one log is raised when all that can be read is compacted.

    >>> compact_fleet("/nowhere").files
    ()
    """
    if not 1 <= file_bytes <= UNPACKED_BYTES // 2:
        raise OptionsError(f"file_bytes={file_bytes}: from 1 to {UNPACKED_BYTES // 2}, which is what readers take")
    store = object_store_for(place)
    manifest, tag = read_compacted(store)
    made = _Making(store, manifest, file_bytes)
    problem: PenstockError | None = None
    for path in find_shipped(place):
        if made.full:
            break
        name = path[len(place.rstrip("/")) + 1 :]
        try:
            log = ShippedLog(path)
        except BAD_LOG as exc:
            problem = _say(exc, problem)
            continue
        with log:
            last = manifest.last(name, log.head.log_id)
            begin, end = log.first_position, log.next_position
            if last is not None and last.next == end:
                continue
            try:
                begin = max(begin, _reached(log, last))
            except BAD_LOG as exc:
                problem = _say(exc, problem)
                continue
            position, seen = begin, ""
            while position < end and not made.full:
                try:
                    batch = made.fitting(log.read(position))
                except BAD_LOG as exc:
                    problem = _say(exc, problem)
                    end = position  # what was read is whole, and the rest is left for the next time
                else:
                    position = batch.next_position if len(batch) else end
                    if len(batch):
                        made.add(log.node, log.channel, name, batch)
                        seen = str(fingerprint_of(batch))
                if (made.is_filled or position >= end) and begin < min(position, end):
                    upto = min(position, end)
                    made.spans.append(CompactedSpan(name, log.head.log_id, log.node, log.channel, begin, upto, seen))
                    begin = position
                if made.is_filled:
                    made.write()
    if made.tables:
        made.write()
    newer = _name(store, manifest, tag, made.files) if made.files else manifest
    if made.full:
        raise OptionsError(
            f"{store.url}/{MANIFEST}: it names every span of every log, and is as long as readers take it "
            f"({MANIFEST_BYTES:,} bytes): ship to another place from here on, and compact that less often"
        )
    if problem is not None:
        raise problem
    return newer


def _reached(log: ShippedLog, last: CompactedSpan | None) -> int:
    """Return up to where a log is compacted; ReplacedError where its last compacted record is another one there."""
    if last is None:
        return log.first_position
    if last.next > log.next_position:
        raise ReplacedError(log.path, f"it ends at {log.next_position}, and {last.next} was compacted")
    if last.seen:
        check_fingerprint(log, Fingerprint.parse(last.seen))
    return last.next


class _Making:
    """The files of one compaction: those that are written, and what the next one will hold."""

    def __init__(self, store: ObjectStore, manifest: Compacted, file_bytes: int) -> None:
        self._store, self._generation, self._file_bytes = store, manifest.generation + 1, file_bytes
        self._room = MANIFEST_BYTES - len(msgspec.json.encode(manifest))
        self.files: list[CompactedFile] = []
        self.spans: list[CompactedSpan] = []
        self.tables: list[Any] = []
        self._times: list[int] = []
        self._held = 0
        self.full = False
        """Whether a manifest with one more file would be longer than anybody reads."""

    @property
    def is_filled(self) -> bool:
        """Whether the next file holds what a file should."""
        return self._held >= self._file_bytes

    def fitting(self, batch: Batch) -> Batch:
        """Return as much of a batch as makes the next file full, but one record at least."""
        sizes = np.cumsum(batch.payloads.lengths.astype(np.int64) + ROW_BYTES)
        return batch[: int(sizes.searchsorted(self._file_bytes - self._held)) + 1]

    def add(self, node: str, channel: str, log: str, batch: Batch) -> None:
        """Let the next file hold a batch, as a copy: what it points into is a whole segment."""
        self.tables.append(_table(node, channel, log, batch))
        if batch.timestamps is not None:
            self._times += [int(batch.timestamps.min()), int(batch.timestamps.max())]
        self._held += int(batch.payloads.lengths.sum()) + ROW_BYTES * len(batch)

    def write(self) -> None:
        """Write a file of what is held, if there is room in the manifest to name it."""
        self._room -= len(msgspec.json.encode(self.spans)) + ENTRY_BYTES
        self.full = self.full or self._room < 0
        if not self.full:
            self.files.append(_write(self._store, self.tables, self.spans, self._times, self._generation))
        self.spans, self.tables, self._times, self._held = [], [], [], 0


def _say(exc: PenstockError, first: PenstockError | None) -> PenstockError:
    """Log what is wrong with one log, and return the first of these."""
    _log.warning("%s; the other logs are gone on with", exc)
    return first or exc


def _name(store: ObjectStore, manifest: Compacted, tag: Tag | None, files: list[CompactedFile]) -> Compacted:
    """Let the manifest name the files that are up."""
    fail_point("ship.compact.written")
    newer = Compacted(generation=manifest.generation + 1, files=(*manifest.files, *files))
    try:
        publish(store, MANIFEST, msgspec.json.encode(newer) + b"\n", tag)
    except ConflictError:
        _remove_outrun(store, newer.generation, files)
        raise
    fail_point("ship.compact.named")
    return newer


def _remove_outrun(store: ObjectStore, generation: int, files: list[CompactedFile]) -> None:
    """Remove the files of a compaction that another one outran: its generation is taken, so nobody will name them."""
    with contextlib.suppress(PenstockError, OSError):
        there, _ = read_compacted(store)
        if there.generation >= generation:
            store.delete({file.key for file in files} - {file.key for file in there.files})


def forget_compacted(place: str, *, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Let the originals go of everything that compacted files hold; return the logs that became shorter.

    CorruptionError when a file that has a log's records is not there as it was written: its originals stay.  It is
    raised when all others are done.

    >>> forget_compacted("/nowhere")
    []
    """
    store = object_store_for(place)
    manifest, _ = read_compacted(store)
    done: list[str] = []
    problem: PenstockError | None = None
    for path in find_shipped(place):
        try:
            if _forget(store, manifest, path, path[len(place.rstrip("/")) + 1 :], clock):
                done.append(path)
        except BAD_LOG as exc:
            problem = _say(exc, problem)
    if problem is not None:
        raise problem
    return done


def _forget(store: ObjectStore, manifest: Compacted, path: str, name: str, clock: Clock) -> bool:
    """Let the originals of one log go; return whether it became shorter."""
    with ShippedLog(path) as log:
        log_id, before = log.head.log_id, log.first_position
        last = manifest.last(name, log_id)
        if last is None or last.next <= before:
            return False
        reached = _reached(log, last)
    for file in manifest.files_of(name, log_id):
        _check_there(store, file)
    above, _, channel = path.rpartition("/")
    return forget_before(object_store_for(above), channel, reached, clock=clock).first > before


def _check_there(store: ObjectStore, file: CompactedFile) -> None:
    found = store.head(file.key)
    if found is None or found.size != file.bytes:
        is_there = "nothing is there" if found is None else f"{found.size} bytes are there"
        reason = f"{is_there}, where the manifest says {file.bytes}: the originals stay"
        raise CorruptionError(f"{store.url}/{file.key}", 0, reason)


def _table(node: str, channel: str, log: str, batch: Batch) -> Any:
    pa, _ = _arrow()
    count = len(batch)
    stamps = None if batch.timestamps is None else pa.array(batch.timestamps.astype("int64"), pa.int64())
    kinds = None if batch.kinds is None else pa.array(batch.kinds.astype("int32"), pa.int32())
    spans_of_sender = batch.extra.get("from")
    sender = None if not isinstance(spans_of_sender, Spans) else spans_of_sender.to_list(batch.buffer)
    columns = {
        "node": pa.repeat(pa.scalar(node), count),
        "channel": pa.repeat(pa.scalar(channel), count),
        "log": pa.repeat(pa.scalar(log), count),
        "position": pa.array(batch.positions, pa.int64()),
        "timestamp_ns": stamps if stamps is not None else pa.nulls(count, pa.int64()),
        "kind": kinds if kinds is not None else pa.nulls(count, pa.int32()),
        "from": pa.nulls(count, pa.binary()) if sender is None else pa.array(sender, pa.binary()),
        "payload": pa.array(batch.to_payloads(), pa.binary()),
    }
    return pa.table(columns)


def _write(
    store: ObjectStore, tables: list[Any], spans: list[CompactedSpan], times: list[int], generation: int
) -> CompactedFile:
    from blake3 import blake3

    pa, parquet = _arrow()
    buffer = io.BytesIO()
    table = pa.concat_tables(tables)
    parquet.write_table(table, buffer, compression="zstd")
    data = buffer.getvalue()
    digest = blake3(data).hexdigest()
    key = f"compacted/{generation:016x}-{digest[:16]}.parquet"
    store.put(key, data)
    low, high = min(times, default=None), max(times, default=None)
    return CompactedFile(key, len(data), digest, table.num_rows, tuple(spans), low, high)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError("compacting needs pyarrow: pip install 'penstock[arrow]'") from None
    return pa, parquet
