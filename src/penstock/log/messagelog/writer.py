"""The writing side of a message log: one writer, entries numbered without end, old segments dropped whole.

Order of what is written (docs/formats/messagelog.md):

    append   entry → index entry, if it is its turn → roll, if the segment is full → retention
    roll     sync .log → sync .idx → cut .idx → sync .idx → files of the next segment → sync the folder
    sync     .log → the folder, if it has new names → the durable mark

A crash between any two of these steps leaves a log that readers read on and the next writer continues.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.disk import ClosingHandle, Disk, Owned, disk_for
from penstock.disk.commit import GROUP, Committer
from penstock.disk.doors import in_a_folder, refuse_foreign
from penstock.disk.posix import folder_of
from penstock.errors import ClosedError, OptionsError, ReadOnlyError, ReplacedError
from penstock.log.messagelog.active import ActiveSegment
from penstock.log.messagelog.columns import EntryColumns, entry_columns, sender_bytes
from penstock.log.messagelog.files import SegmentFiles
from penstock.log.messagelog.format import INDEX_ENTRY, MAX_SENDER_BYTES, MAX_SEQ
from penstock.log.messagelog.numbers import first_of, milliseconds, next_number, number_column
from penstock.log.messagelog.options import MessageLogOptions, RetainBy, check_retention
from penstock.log.messagelog.recover import recover
from penstock.log.messagelog.resync import mark_ahead
from penstock.log.sidecar import Sidecar
from penstock.log.writers import note_writer
from penstock.metrics import REGISTRY
from penstock.options import options_from, shows_options
from penstock.types import Problem

__all__ = ["MessageLog"]

logger = logging.getLogger(__name__)

ROLLED: Final = REGISTRY.counter(
    "message_log_segments_rolled", "segments of message logs sealed because they were full"
)
EVICTED: Final = REGISTRY.counter("message_log_segments_evicted", "segments of message logs dropped by retention")
EVICTED_BYTES: Final = REGISTRY.counter("message_log_evicted_bytes", "bytes of message logs dropped by retention")

CHUNK_BYTES: Final = 4 << 20
"""How much of an append_many is encoded and written at a time."""


class MessageLog(ClosingHandle):
    """The one writer of a message log; a second one is refused.  Safe to use from several threads.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MessageLog.open(folder.name + "/ops") as log:
    ...     log.append(b"hello", sender="ann@localhost")
    ...     log.append_many([b"one", b"two"], sender="bob@localhost").tolist()
    ...     log.first_seq, log.last_seq
    1
    [2, 3]
    (1, 3)
    >>> folder.cleanup()
    """

    has_times = True
    SOLE_OWNER: ClassVar = True

    def __init__(self, path: str, disk: Disk, options: MessageLogOptions) -> None:
        super().__init__()
        self.path, self.options = path, options
        self._disk = disk
        self._mutex = threading.RLock()
        self._syncing = threading.Lock()  # taken after _mutex, never before it
        self._sidecar = Sidecar(disk, os.path.join(path, "penstock-"))
        self._files = SegmentFiles(disk, path, options.segment_bytes)
        self._retention: RetainBy = options.retention
        self._max_messages = options.max_messages
        self._dead = self._broken = ""
        self._floor = 1  # the number the next entry gets, unless it brings a higher one
        self._unsealed: ActiveSegment | None = None  # full, and its roll failed
        self._marked = 0  # what the durable mark says
        self._committer: Committer | None = None
        self.repairs: list[Problem] = []
        """What opening found damaged, and what was done about it."""
        self._make_folder()
        self._held = self._sidecar.lock(of=path)
        if self.SOLE_OWNER:
            self._files.owned = Owned(disk, path)
        try:
            self._open()
        except BaseException:
            self._sidecar.close()
            self._let_go()
            raise
        if options.sync != "none":
            interval = options.sync_seconds if options.sync == "interval" else None
            self._committer = GROUP.committer(self._sync_now, interval=interval)
        note_writer(disk, path, self)

    @classmethod
    @shows_options(MessageLogOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: MessageLogOptions | None = None,
        *,
        disk: Disk | None = None,
        **given: Any,
    ) -> MessageLog:
        """Open a log for writing, created if it is not there.

        Options as keywords or as one object; MessageLogOptions says what each means.
        """
        return cls(os.fspath(path), disk or disk_for(path), options_from(MessageLogOptions, options, given))

    # --- Writing

    @property
    def largest_message(self) -> int:
        """The largest payload it takes."""
        return self.options.max_payload_bytes

    def append(
        self,
        payload: Any,
        *,
        sender: str | bytes = b"",
        timestamp_ns: int | None = None,
        timestamp_ms: int | None = None,
        seq: int | None = None,
        kind: int = 0,
    ) -> int:
        """Append one entry and return its number, the next one unless ``seq`` gives a higher one.

        ``payload`` is anything that has bytes.  The time is now unless it is given; the format keeps milliseconds.
        The entry is visible to every reader when this returns, and durable according to ``sync``.
        """
        if kind:
            raise OptionsError(f"{self.path}: a message log keeps no kinds, so kind={kind} cannot be kept")
        who = sender_bytes(sender)
        ms = milliseconds(timestamp_ns, timestamp_ms)
        length = len(payload) if type(payload) is bytes else memoryview(payload).nbytes
        if length > self.options.max_payload_bytes:
            raise OptionsError(self._too_large(length))
        if len(who) > MAX_SENDER_BYTES:
            raise OptionsError(f"{self.path}: a sender of {len(who)} bytes is longer than {MAX_SENDER_BYTES}")
        self._tell_failures()
        with self._mutex:
            self._check_writable()
            number = next_number(self.path, self._floor, seq)
            active = self._active(number)
            data = kernel.messagelog.encode_one(number, ms, who, payload)
            indexed = active.index_entry(number)
            since = 0 if active.due else active.since
            self._write(active, data, indexed, number, since + len(data))
        self._written()
        return number

    def append_many(
        self,
        payloads: Any,
        *,
        sender: Any = None,
        timestamp_ns: Any = None,
        seq: Any = None,
        kind: Any = 0,
    ) -> NDArray[np.int64]:
        """Append a list of bytes, an Arrow array or a Batch, and return the numbers.

        ``sender`` and ``timestamp_ns`` are one value for all or one for each; a Batch brings its own unless they are
        given.  ``seq`` is the first number, or all of them, growing.  Readers may see the first entries before the
        last are written.
        """
        if np.any(kind):
            raise OptionsError(f"{self.path}: a message log keeps no kinds, so kind={kind} cannot be kept")
        plain = isinstance(payloads, list) and isinstance(timestamp_ns, int | None) and isinstance(seq, int | None)
        plain = plain and isinstance(sender, str | bytes | None)
        longest = kernel.messagelog.longest(payloads) if plain else -1
        if longest > self.options.max_payload_bytes:
            raise OptionsError(self._too_large(longest))
        self._tell_failures()
        if longest >= 0:
            who = sender_bytes(sender or b"")
            if len(who) > MAX_SENDER_BYTES:
                raise OptionsError(f"{self.path}: a sender of {len(who)} bytes is longer than {MAX_SENDER_BYTES}")
            with self._mutex:
                numbers = self._append_list(payloads, who, milliseconds(timestamp_ns, None), seq)
        else:
            columns = entry_columns(payloads, sender, timestamp_ns)
            with self._mutex:
                numbers = self._append_columns(columns, seq)
        if len(numbers):
            self._written()
        return numbers

    def sync(self) -> int:
        """Return when everything appended so far survives a power cut, with the bound of it."""
        with self._mutex:
            self._check_writable()
        if self._committer is not None:
            return self._committer.wait()
        return self._sync_now()

    # --- Old segments

    def roll(self) -> None:
        """Seal the segment being written, if it has an entry, and go on in a new one: it can be shipped then."""
        with self._mutex:
            self._check_writable()
            active = self._files.active
            if active is not None and active.state.size:
                self._roll(active)

    def set_retention(self, retention: RetainBy, max_messages: int = 0) -> None:
        """Change how old segments go, from the next append on."""
        check_retention(retention, max_messages)
        with self._mutex:
            self._retention, self._max_messages = retention, max_messages

    def drop_before(self, next_seq: int) -> int:
        """Drop sealed segments that end below ``next_seq``, never the last one; return how many."""
        with self._mutex:
            self._check_writable()
            return self._drop(next_seq)

    def delete(self) -> None:
        """Remove every segment.  The log stays open and empty; its numbers go on where they were."""
        with self._mutex:
            self._check_writable()
            with self._syncing:
                self._keep_numbers()
                self._files.let_go()
                for segment in self._files.states:
                    self._files.remove(segment.number)
                self._files.states.clear()
                self._files.sync_names()

    # --- What it knows

    @property
    def first_seq(self) -> int:
        """The number in the name of the oldest segment, 0 when the log is empty."""
        with self._mutex:
            return self._files.states[0].number if self._files.states else 0

    @property
    def last_seq(self) -> int:
        """The number of the newest entry, 0 when the log is empty."""
        with self._mutex:
            return self._files.last_seq

    def has_room(self, count: int, length: int) -> bool:
        """Whether ``count`` entries of ``length`` bytes in all fit without a file being made, sealed or dropped."""
        with self._mutex:
            active, states = self._files.active, self._files.states
            oldest = states[0] if len(states) > 1 else None
            if active is None or self._dead or self._broken:
                return False
            keeps = self._max_messages if self._retention == "count" else 0
            if keeps and oldest is not None and oldest.last_seq < self._floor + count - keeps:
                return False
            return active.state.size + length <= self.options.segment_bytes

    @property
    def next_position(self) -> int:
        """The number the next entry gets."""
        with self._mutex:
            return self._floor

    @property
    def durable_position(self) -> int | None:
        """The exclusive bound of what survives a power cut, None before the first sync."""
        return min(self._marked, MAX_SEQ) or None

    # --- Open and closed

    def close(self) -> None:
        """Let go of the log and of its lock; with a sync mode, sync once more; a failure nobody heard of is told."""
        with self._mutex:
            if self._dead:
                return
        try:
            if self._committer is not None:
                try:
                    if not self._broken or self._committer.untold:
                        self._committer.request().result()
                finally:
                    self._committer.close()
        finally:
            with self._mutex, self._syncing:
                self._dead = "the log is closed"
                if self._files.active is not None:
                    self._files.active.close()
                self._sidecar.close()
                self._let_go()

    def forked(self) -> None:
        """Close in the child of a fork; the log and its lock stay the parent's."""
        self._mutex, self._syncing = threading.RLock(), threading.Lock()
        self._dead = "the log was opened before a fork: open its own log in the child"
        self._committer = None
        if self._files.active is not None:
            self._files.active.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._files.owned is not None:
            self._files.owned.release()
        self._held.release()

    def __repr__(self) -> str:
        return f"<MessageLog {self.path} {self._dead or self._broken or f'at {self._floor}'}>"

    # --- Opening

    def _make_folder(self) -> None:
        found = self._disk.stat(self.path)
        if found is None:
            with in_a_folder(self.path):
                self._disk.make_folder(self.path)
            self._disk.sync_folder(folder_of(self.path))
        else:
            refuse_foreign(self._disk, self.path, "message log")

    def _open(self) -> None:
        identity = self._sidecar.identity()
        if identity is None:
            self._sidecar.create_identity(self.options.content)
        elif self.options.content not in ("raw", identity.content):
            raise OptionsError(f"{self.path}: its records are {identity.content}, not {self.options.content}")
        self._unsealed = None
        self._files.own_newest()
        self._marked = self._sidecar.durable_position() or 0
        found = recover(self._disk, self.path, self.options, self._marked)
        self.repairs = found.repairs
        self._floor = max(found.last_seq + 1, self._marked, 0 if found.segments else found.emptied)
        newest = found.emptied or (found.segments[-1].number if found.segments else self._marked + 1)
        reached = max(found.last_seq, newest - 1)
        if self._marked - 1 > reached:
            self.repairs.append(mark_ahead(self._sidecar.mark.path, self._marked, reached))
            logger.warning("%s", self.repairs[-1])
        self._files.adopt(found)

    # --- Moving on

    def _active(self, number: int) -> ActiveSegment:
        """Return the segment that ``number`` goes to; one whose roll failed is sealed first.

        One that is merely larger than ``segment_bytes``, as after an open with a smaller limit, takes its entry and is
        rolled behind it, as the original does.
        """
        if self._unsealed is not None:
            self._roll(self._unsealed)
        return self._files.active or self._files.begin(number)

    def _write(self, active: ActiveSegment, data: bytes, indexed: bytes, last: int, since: int) -> None:
        """Write encoded entries, the last of them ``last``, and what follows from that."""
        state = active.state
        try:
            active.log.write_at(state.size, data)
        except BaseException as exc:
            self._undo(active, exc)
            raise
        active.account(len(data), indexed, last, since)
        self._floor = last + 1
        try:  # the entries are there: what fails from here on is tried again, and told, by the next append
            if state.size > self.options.segment_bytes:
                self._unsealed = active
                self._roll(active)
            if self._retention == "count" and self._max_messages:
                self._drop(self._floor - self._max_messages)
        except OSError as exc:
            logger.warning("%s: after an append: %s", self.path, exc)

    def _undo(self, active: ActiveSegment, exc: BaseException) -> None:
        """After a failed write cut off what part of it is there; if even that fails, stop writing."""
        try:
            active.log.truncate(active.state.size)
        except OSError:
            self._broken = f"an earlier write failed: {exc}"

    def _roll(self, active: ActiveSegment) -> None:
        """Seal a full segment and begin the next one; what fails, but for the flush of entries, is tried again."""
        with self._syncing:
            self._flush(active)
            active.seal()
        self._files.active = self._unsealed = None
        ROLLED.add()
        if self._floor <= MAX_SEQ:
            self._files.begin(self._floor)
        self._files.sync_names()

    def _flush(self, active: ActiveSegment) -> None:
        """Sync entries.  When that fails nobody knows what the device has, and the next sync may succeed without it."""
        try:
            active.log.sync()
        except OSError as exc:
            self._broken = f"a sync failed, so what it was to save may be lost: {exc}"
            raise

    def _drop(self, next_seq: int) -> int:
        dropped, states = 0, self._files.states
        if len(states) > 1 and states[0].last_seq < next_seq and (held := self._sidecar.shipped_floor()) is not None:
            next_seq = min(next_seq, held)  # what is not shipped yet stays
        if len(states) > 1 and states[-2].last_seq < next_seq:
            # All but the newest go.  After a power cut something must still tell which numbers were given out.
            newest = states[-1]
            if not newest.last_seq:
                with self._syncing:  # a sync under way would put the mark back
                    self._keep_numbers()
            elif self._marked <= newest.number:  # none of its entries is durable yet
                self._sync_now()
        while dropped < len(states) - 1 and states[dropped].last_seq < next_seq:
            segment = states[dropped]
            self._files.remove(segment.number)
            EVICTED_BYTES.add(segment.size)
            dropped += 1
        del states[:dropped]
        if dropped:
            EVICTED.add(dropped)
        return dropped

    def _keep_numbers(self) -> None:
        """Let the mark tell which numbers were given out, before the entries go that tell the same."""
        self._sidecar.write_mark(min(self._floor, MAX_SEQ))  # synced, unlike after a sync of the log
        self._marked = self._floor

    # --- Many at once

    def _append_list(self, payloads: list[Any], sender: bytes, ms: int, seq: int | None) -> NDArray[np.int64]:
        self._check_writable()
        first = first_of(self.path, self._floor, seq, len(payloads))
        index = 0
        while index < len(payloads):
            active = self._active(first + index)
            room = active.index_room(CHUNK_BYTES)
            data, after, since, indexed = kernel.messagelog.encode_list(
                payloads, index, sender, first + index, ms, self.options.max_payload_bytes, CHUNK_BYTES,
                active.state.size, active.since, self.options.segment_bytes, active.state.number, room,
            )  # fmt: skip
            self._write(active, data, room[: indexed * INDEX_ENTRY.itemsize].tobytes(), first + after - 1, since)
            index = after
        return np.arange(first, first + len(payloads), dtype=np.int64)

    def _append_columns(self, columns: EntryColumns, seq: Any) -> NDArray[np.int64]:
        self._check_writable()
        count = len(columns.offsets)
        if count and int(columns.lengths.max()) > self.options.max_payload_bytes:
            raise OptionsError(self._too_large(int(columns.lengths.max())))
        numbers = number_column(self.path, self._floor, seq, count)
        index = 0
        while index < count:
            active = self._active(int(numbers[index]))
            room = active.index_room(CHUNK_BYTES)
            data, after, since, indexed = kernel.messagelog.encode_spans(
                columns.data, columns.offsets, columns.lengths, columns.sender_data, columns.sender_offsets,
                columns.sender_lengths, numbers, columns.times, index, self.options.max_payload_bytes, CHUNK_BYTES,
                active.state.size, active.since, self.options.segment_bytes, active.state.number, room,
            )  # fmt: skip
            used = room[: indexed * INDEX_ENTRY.itemsize].tobytes()
            self._write(active, data, used, int(numbers[after - 1]), since)
            index = after
        return numbers.view(np.int64)

    # --- Durability

    def _tell_failures(self) -> None:
        """Raise what the last sync failed with, unless one succeeds now: before anything more is written."""
        if self._committer is not None and self._committer.error is not None and not self._dead:
            self._committer.check()

    def _written(self) -> None:
        if self._committer is None:
            return
        if self.options.sync == "always":
            self._committer.wait()
        else:
            self._committer.touch()

    def _sync_now(self) -> int:
        """Sync what was written, then move the mark; runs once at a time."""
        with self._mutex:
            self._check_writable()
            bound, active, new_names = self._floor, self._files.active, self._files.new_names
            self._files.new_names = False
            size = 0 if active is None else active.state.size
        try:
            there = True
            with self._syncing:
                written = active is not None and not active.sealed  # a roll in between has synced it
                if active is not None and written:
                    self._flush(active)
                if new_names:
                    self._disk.sync_folder(self.path)
                if active is not None and written:  # just before the mark: others may drop it, and move that further
                    there = self._is_there(active, size)
                # Not synced itself: recovery does not need it, so one that lags behind does no harm.
                if self._marked < bound and there:
                    self._sidecar.mark.write(self._disk.boot_id(), min(bound, MAX_SEQ), sync=False)
                    self._marked = bound
        except BaseException:
            self._files.new_names = self._files.new_names or new_names
            raise
        return bound

    def _is_there(self, active: ActiveSegment, size: int) -> bool:
        """Whether a segment has its name and its length: a backup may have been put over it, or in its place."""
        found = self._disk.stat(active.log.path)
        if found is not None and found.identity == active.identity and found.size >= size:
            return True
        if self.SOLE_OWNER:
            self._broken = "its newest segment was moved, removed or cut while its writer had it open"
            raise ReplacedError(self.path, self._broken)
        return False  # the next turn says so, unless others have sealed and dropped it

    # --- Small things

    def _check_writable(self) -> None:
        if self._dead:
            raise ClosedError(f"{self.path}: {self._dead}")
        if self._broken:
            raise ReadOnlyError(f"{self.path}: {self._broken}")

    def _too_large(self, length: int) -> str:
        most = self.options.max_payload_bytes
        return f"{self.path}: a payload of {length} bytes is larger than max_payload_bytes={most}"
