"""DataFrames into a log, exactly once.

Tasks only stage: each writes its rows to a file of its own beside the log, synced.  The driver appends them to the
log, in the order of the tasks, holding the writer's lock.  Before the first append it notes an intent: which batch,
which files, and the position the log ends at.  After the last one, and a sync, it notes that the batch is done.

    intent := {"batch": 7, "files": […], "start": 4096, "skip": 0, "done": false, …}         <prefix>spark-<app>

A driver that dies in between is followed by one that replays the batch.  It finds the intent, compares what the log has
from ``start`` on with the files the intent names, notes how far those have come and where the log ends now, appends
what is missing, and forgets the files staged by the replay.  A batch that is done is not appended again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat as stat_bits
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.disk import disk_for, save_atomically
from penstock.disk.plain import clear_folder, create_private, refuse_link
from penstock.disk.posix import folder_of
from penstock.errors import (
    ConflictError,
    CorruptionError,
    LockedError,
    NotFoundError,
    OptionsError,
    ReplacedError,
    UnsupportedError,
)
from penstock.log.detect import FORMATS, detect, open_log, open_writer
from penstock.log.envelope import CONTENT
from penstock.log.face import LogWriter
from penstock.log.fingerprint import Fingerprint, check_fingerprint, last_fingerprint
from penstock.log.sidecar import CURSOR_NAME, Sidecar, identity_of, sidecar_of
from penstock.spark.lake.checkpoint import digest_of_place, query_of
from penstock.spark.sink.records import RAW, STAGED, check_schema, records_of
from penstock.spark.source.names import check_use
from penstock.spark.source.options import absolute_path, size_of

__all__ = ["SinkOptions", "Staged", "Intent", "LogBatchWriter", "LogStreamWriter", "append_staged", "stage"]

BIRTH_SECONDS: Final = 1.0
LOCK_SECONDS: Final = 30.0
ENVELOPE_BYTES: Final = 64 << 10
"""Room for the key and the headers of an envelope, beside a payload of ``maxMessageBytes``."""
ONCE: Final = "once-"
"""How the names of batch writes begin that have no batchId."""
STAGED_NAME: Final = re.compile(r"[0-9a-f]{32}\.arrow")
MOST_INTENT_BYTES: Final = 64 << 20
ABANDONED_SECONDS: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """How rows become records of a log.

    >>> SinkOptions.of({"path": "out", "appId": "billing"}).app
    'billing'
    """

    path: str
    """The log; created if it is not there."""

    app: str
    """``appId``: whose batches these are.  It must stay the same for a query over restarts; a stream that has a
    checkpointLocation and no appId is known by that location."""

    format: str = "xchannel"
    """``logFormat`` of a log that is created."""

    content: str = RAW
    """``content``: ``raw``, or ``envelope/1``, which keeps the columns key, op, event_time_ns, flags and headers."""

    largest_bytes: int | None = None
    """``maxMessageBytes``: the largest payload that a log takes which is created, where that is more than the format's
    default: 1 MiB for ``xchannel``, 64 KiB for ``messagelog``, which takes it from any log.  Keys and headers of
    envelopes have room beside it, 64 KiB."""

    batch: int | None = None
    """``batchId`` of a batch write: written once however often it is repeated.  A stream has its own."""

    checkpoint: str = ""
    """``checkpointLocation`` of a stream, where it was given as an option: it tells one query from another."""

    def __post_init__(self) -> None:
        if not CURSOR_NAME.fullmatch(self.app):
            raise OptionsError(f"appId={self.app!r}: use 1 to 64 of letters, digits, dot, dash and underscore")
        if self.content not in (RAW, CONTENT):
            raise OptionsError(f"content={self.content!r}: must be {RAW} or {CONTENT}")
        if self.format not in FORMATS:
            raise OptionsError(f"logFormat={self.format!r}: must be one of {', '.join(FORMATS)}")

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SinkOptions:
        """Read Spark's options, whose names have no case."""
        found = {name.lower(): value for name, value in options.items()}
        if "path" not in found:
            raise OptionsError(
                "no path: give the log to start() or save(), or INSERT INTO … WITH (path = …): "
                "Spark does not say which table is written to"
            )
        app = found.get("appid")
        if app is None and "checkpointlocation" in found:
            app = "spark-" + digest_of_place(found["checkpointlocation"])
        if app is None:
            app = "batch-" + uuid.uuid4().hex[:16]
        batch = found.get("batchid")
        if batch is not None and not batch.isdecimal():
            raise OptionsError(f"batchId={batch!r}: must be a number")
        return cls(
            path=absolute_path(found["path"]),
            app=app,
            format=found.get("logformat", "xchannel"),
            content=found.get("content", RAW),
            batch=None if batch is None else int(batch),
            largest_bytes=size_of("maxMessageBytes", found["maxmessagebytes"]) if "maxmessagebytes" in found else None,
            checkpoint=found.get("checkpointlocation", ""),
        )


@dataclass
class Staged(WriterCommitMessage):
    """What a task tells the driver: the file it staged and how many records are in it."""

    file: str
    records: int


class Intent(msgspec.Struct, frozen=True):
    """What the driver was about to append, or has appended."""

    batch: int
    files: list[str]
    start: int
    skip: int = 0
    """How many records of the files lie before ``start``: appended by drivers that died."""
    done: bool = False
    log: str = ""
    """The identity of the log: of one that was made again nothing is known."""
    query: str = ""
    """The id of the query, where it is known: batches of two queries have the same numbers."""
    seen: str = ""
    """The fingerprint of the last record of a batch that was done: a backup that comes back has another."""


class LogBatchWriter(DataSourceArrowWriter):
    """Appends the rows of a DataFrame to a log, all or, until it is repeated, some of them."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_schema(schema, options.content)
        self.once = options.batch is None
        self.options = replace(options, app=ONCE + uuid.uuid4().hex) if self.once else options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        return stage(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append what was staged."""
        append_staged(self.options, self.options.batch or 0, _staged(messages))
        if self.once:
            self._forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Remove what was staged, unless a batch that was begun needs it."""
        if self.once:
            self._forget()
        drop_staged(self.options)

    def _forget(self) -> None:
        """Remove the intent of a batch that nobody will ask for again."""
        disk = disk_for(self.options.path)
        with contextlib.suppress(FileNotFoundError):
            disk.remove(_intent_path(sidecar_of(disk, self.options.path), self.options.app))


class LogStreamWriter(DataSourceStreamArrowWriter):
    """Appends the batches of a stream to a log, each exactly once."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self.options = options
        check_schema(schema, options.content)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        return stage(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Append what was staged, unless this batch was appended before."""
        query = query_of(self.options.checkpoint)
        append_staged(self.options, batchId, _staged(messages), query=query)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        """Remove what was staged, unless a batch that was begun needs it."""
        drop_staged(self.options)


def batch_writer(options: Mapping[str, str], schema: StructType) -> LogBatchWriter:
    """Return the writer of a batch query; see choice.py."""
    check_use(options, "a batch into a log")
    given = {name.lower() for name in options} & {"appid", "batchid"}
    if len(given) == 1:
        raise OptionsError("appId and batchId go together: with both, a batch is written once, however often")
    return LogBatchWriter(SinkOptions.of(options), schema)


def stream_writer(options: Mapping[str, str], schema: StructType) -> LogStreamWriter:
    """Return the writer of a stream, which must be known over restarts; see choice.py."""
    check_use(options, "a stream into a log")
    if not {"appid", "checkpointlocation"} & {name.lower() for name in options}:
        raise OptionsError("a stream into a log needs an appId, or its checkpointLocation given as an option")
    return LogStreamWriter(SinkOptions.of(options), schema)


# --- Tasks


def stage(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Staged:
    """Write rows to a file that nobody reads before a commit names it; it survives a power cut when this returns."""
    disk, folder = disk_for(options.path), _staging(options)
    refuse_link(disk, folder)
    try:
        disk.make_folder(folder)
    except FileNotFoundError:
        raise NotFoundError(f"{options.path}: the folder does not exist") from None
    name = uuid.uuid4().hex + ".arrow"
    records = 0
    now = time.time_ns()
    with create_private(os.path.join(folder, name)) as sink:
        with pa.ipc.new_file(sink, STAGED) as writer:
            for batch in batches:
                writer.write_batch(records_of(batch, now, options.content))
                records += len(batch)
        sink.flush()
        os.fsync(sink.fileno())
    disk.sync_folder(folder)
    disk.sync_folder(folder_of(folder))
    return Staged(name, records)


# --- The driver


def append_staged(options: SinkOptions, batch: int, staged: Sequence[Staged], *, query: str | None = None) -> int:
    """Append a batch to the log, or what a driver that died left out of it; return how many records were appended.

    ``query`` is the id of the stream whose batch this is, empty where that is not known.  The batches of a stream are
    numbered from 0 on without a hole.
    """
    with contextlib.closing(_open(options)) as writer:
        disk = disk_for(options.path)
        sidecar = sidecar_of(disk, options.path)  # of a log that is there: where it is depends on the format
        identity = identity_of(disk, options.path)
        before = read_intent(sidecar, options.app)
        if before is not None and (before.log != identity or before.start > _end_of(options.path)):
            before = None  # it was noted for a log that had this name earlier; a foreign one has no identity
        _check_seen(options, before)
        _check_turn(options, before, batch, query)
        if before is not None and (before.batch > batch or (before.batch == batch and before.done)):
            clear_staged(options)
            return 0
        if before is not None and before.batch == batch:
            intent = msgspec.structs.replace(before, skip=count_present(options, before))
        else:
            files = [message.file for message in staged if message.records]
            seen = "" if before is None else before.seen
            intent = Intent(batch, files, 0, log=identity, query=query or "", seen=seen)
            _check_staged(options, staged, writer.largest_message)
        writer.sync()  # where the log ends must be where it still ends after a power cut
        intent = msgspec.structs.replace(intent, start=_end_of(options.path))
        write_intent(sidecar, options.app, intent)
        appended = _append(options, writer, intent)
        writer.sync()
        seen = _last_seen(options.path, intent.start) or intent.seen
        write_intent(sidecar, options.app, msgspec.structs.replace(intent, done=True, seen=seen))
        clear_staged(options)
        if options.app.startswith(ONCE):
            remove_abandoned(options, sidecar)
    return appended


def _check_turn(options: SinkOptions, before: Intent | None, batch: int, query: str | None) -> None:
    """Refuse a batch that cannot be the one after, or the same as, the last one of its application."""
    if before is not None and before.query and query and before.query != query:
        raise ConflictError(
            f"{options.path}: batches of {options.app} are those of another query, or its checkpoint was made again: "
            "what it would write may be there already; use another appId if it is not"
        )
    last = -1 if before is None else before.batch
    if before is not None and not before.done and last < batch:
        raise ConflictError(
            f"{options.path}: batch {last} of {options.app} was never finished, but batch {batch} is here"
        )
    if query is not None and batch > last + 1:
        raise ConflictError(
            f"{options.path}: batch {batch} of {options.app} is here, but not batch {last + 1}: the log was made "
            "again, or the query had another appId; start it with a new checkpoint"
        )


def _check_seen(options: SinkOptions, before: Intent | None) -> None:
    """Refuse a log that lost batches: its backup was put back, and others have written to it since."""
    if before is None or not before.seen:
        return
    with open_log(options.path) as log:
        try:
            check_fingerprint(log, Fingerprint.parse(before.seen))
        except ReplacedError as exc:
            reason = f"{exc.reason} when batch {before.batch} of {options.app} was done; to go on, use another appId"
            raise ReplacedError(options.path, reason) from None


def _last_seen(path: str, start: int) -> str:
    """Return the fingerprint of the last record from ``start`` on, empty when there is none."""
    with open_log(path) as log:
        seen = last_fingerprint(log, max(start, log.first_position), log.next_position)
    return "" if seen is None else str(seen)


def read_intent(sidecar: Sidecar, app: str) -> Intent | None:
    """Return the last intent of an application, or None."""
    path = _intent_path(sidecar, app)
    try:
        with disk_for(path).open(path) as file:
            data = file.read_at(0, min(file.stat().size, MOST_INTENT_BYTES))
    except FileNotFoundError:
        return None
    try:
        intent = msgspec.json.decode(data, type=Intent)
    except msgspec.DecodeError as exc:
        raise CorruptionError(path, 0, f"not an intent: {exc}") from None
    strange = next((name for name in intent.files if not STAGED_NAME.fullmatch(name)), None)
    if strange is not None:
        raise CorruptionError(path, 0, f"it names {strange!r}, which is no file that a task has staged")
    return intent


def write_intent(sidecar: Sidecar, app: str, intent: Intent) -> None:
    """Note an intent so that it survives a power cut."""
    save_atomically(disk_for(sidecar.prefix), _intent_path(sidecar, app), msgspec.json.encode(intent) + b"\n")


def count_present(options: SinkOptions, intent: Intent) -> int:
    """Return how many of the staged records the log has: those before the intent's start, and in one row behind it."""
    present = intent.skip
    with open_log(options.path) as log:
        at = intent.start
        for batch in _staged_batches(options, intent.files, intent.skip):
            payloads = batch.column("payload")
            kinds, times = batch.column("kind").to_numpy(), batch.column("timestamp_ns").to_numpy()
            done = 0
            while done < len(batch):
                found = log.read(at, len(batch) - done)
                count = len(found)
                if not count:
                    return present
                part = slice(done, done + count)
                same = np.asarray(
                    pc.equal(found.payloads.to_arrow(found.buffer, view=False), payloads[part]), dtype=np.bool_
                )
                if found.kinds is not None:
                    same &= found.kinds == kinds[part]
                if found.timestamps is not None:  # some formats keep milliseconds only
                    same &= found.timestamps.view(np.int64) // 1_000_000 == times[part] // 1_000_000
                run = count if same.all() else int(same.argmin())
                present, done, at = present + run, done + run, found.next_position
                if run < count:
                    return present
    return present


def drop_staged(options: SinkOptions) -> None:
    """Remove what was staged for a batch that will not be committed, except what one that was begun still needs."""
    intent = read_intent(sidecar_of(disk_for(options.path), options.path), options.app)
    clear_staged(options, () if intent is None or intent.done else intent.files)


def clear_staged(options: SinkOptions, keep: Sequence[str] = ()) -> None:
    """Remove what this application has staged: none of it is needed once a batch is done."""
    disk, folder = disk_for(options.path), _staging(options)
    clear_folder(disk, folder, keep=keep, remove=False)
    with contextlib.suppress(OSError):  # not empty: a task that nobody waits for any more may still be writing
        disk.remove_folder(folder)


def remove_abandoned(options: SinkOptions, sidecar: Sidecar) -> None:
    """Remove what batch writes without a batchId have left that were killed: nobody can go on with them.

    Nothing tells one that was killed from one that runs, except that it has staged nothing for a week.
    """
    disk, staged = disk_for(options.path), _staging(replace(options, app=ONCE))
    for name in disk.list(folder_of(staged)):
        if name.startswith(os.path.basename(staged)):
            path = os.path.join(folder_of(staged), name)
            found = os.lstat(path)
            if stat_bits.S_ISDIR(found.st_mode) and time.time() - found.st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    disk.remove(_intent_path(sidecar, ONCE + path.removeprefix(staged)))


def _append(options: SinkOptions, writer: LogWriter, intent: Intent) -> int:
    appended = 0
    for batch in _staged_batches(options, intent.files, intent.skip):
        writer.append_many(
            batch.column("payload"),
            kind=batch.column("kind").to_numpy(),
            timestamp_ns=batch.column("timestamp_ns").to_numpy() if writer.has_times else None,
        )
        appended += len(batch)
    return appended


def _staged_batches(options: SinkOptions, files: Sequence[str], skip: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield what these files hold behind the first ``skip`` records."""
    for name in files:
        path = os.path.join(_staging(options), name)
        try:
            refuse_link(disk_for(options.path), _staging(options))
            disk_for(path).open(path).close()  # a file, and no link out of here
            source = pa.memory_map(path)
            reader = pa.ipc.open_file(source)
        except (OSError, pa.ArrowInvalid) as exc:
            raise CorruptionError(path, 0, f"not the file that a task has staged: {exc}") from None
        with source, reader:
            if reader.schema != STAGED:
                raise CorruptionError(path, 0, "not the file that a task has staged: it has other columns")
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                if skip < len(batch):
                    yield batch.slice(skip)
                skip = max(0, skip - len(batch))


def _open(options: SinkOptions) -> LogWriter:
    """Open the writer, waiting a while for whoever has the lock."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            kind = _format_of(options)
            largest = options.largest_bytes
            if largest is not None and options.content == CONTENT:
                largest += ENVELOPE_BYTES
            writer = open_writer(options.path, format=kind, content=options.content, largest_bytes=largest)
            break
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with contextlib.ExitStack() as undo:
        undo.callback(writer.close)
        with open_log(options.path, format=kind) as log:
            found = log.content
        if found != options.content:
            raise OptionsError(f"{options.path}: its content is {found}, not {options.content}")
        undo.pop_all()
    return writer


def _format_of(options: SinkOptions) -> str:
    """Return the format of the log that is there, or the one to create; one that another query makes is waited for."""
    disk, deadline = disk_for(options.path), time.monotonic() + BIRTH_SECONDS
    while True:
        there = disk.stat(options.path) is not None  # asked first: it may come while it is looked at
        try:
            return detect(options.path)
        except OptionsError:
            if not there:
                return options.format
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _check_staged(options: SinkOptions, staged: Sequence[Staged], largest: int) -> None:
    """Refuse what cannot be appended whole before anything is noted: lost rows, and what the log cannot keep."""
    with open_log(options.path) as log:
        has_kinds = log.has_kinds
    for message in staged:
        records = 0
        for batch in _staged_batches(options, [message.file]):
            records += len(batch)
            if not has_kinds and batch.column("kind").to_numpy().any():
                raise OptionsError(f"{options.path}: this format has no room for kinds: drop the column kind")
            longest = pc.max(pc.binary_length(batch.column("payload"))).as_py() or 0
            if longest > largest:
                raise OptionsError(
                    f"{options.path}: a record of {longest} bytes is too large, it takes {largest}: set "
                    "maxMessageBytes for a log that is made"
                )
        if records != message.records:
            path = os.path.join(_staging(options), message.file)
            raise CorruptionError(path, 0, f"it has {records} records, but its task has staged {message.records}")


def _end_of(path: str) -> int:
    with open_log(path) as log:
        return log.next_position


def _intent_path(sidecar: Sidecar, app: str) -> str:
    return f"{sidecar.prefix}spark-{app}"


def _staging(options: SinkOptions) -> str:
    return f"{options.path}.penstock-staged-{options.app}"


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    lost = sum(message is None for message in messages)
    if lost:
        raise UnsupportedError(f"{lost} tasks reported nothing: the batch cannot be committed")
    return [message for message in messages if isinstance(message, Staged)]
