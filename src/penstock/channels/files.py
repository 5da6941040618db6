"""What one channel has on disk, and how the steps of a decision are taken there.

Everything here is synchronous and runs for one command, or one run of commands, at a time: in a thread of the manager's
executor, or for a small message on the event loop.  The log is opened when it is first needed: a channel that only
keeps members costs no more than its metadata.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.channels import commands as c, counts, decisions as d
from penstock.channels.counts import timed
from penstock.channels.store import NEW_QUEUE, ChannelStore, channel_hash
from penstock.disk import Disk
from penstock.disk.commit import GROUP, Committer
from penstock.errors import ClosedError, CorruptionError, PenstockError
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.messagelog.fifo_cursor import load_cursor, save_cursor
from penstock.log.messagelog.format import BAD, ENTRY_OVERHEAD, MAX_SENDER_BYTES

__all__ = ["ChannelFiles", "LogState", "READ_BYTES"]

_log = logging.getLogger(__name__)

GAP: Final = "fifo log has a gap at the head cursor"
SMALL_BYTES: Final = 64 << 10
"""What is larger is not made durable on the event loop."""
READ_BYTES: Final = 320 << 10
"""What is larger is not even written to the page cache there: one read of a socket, and a payload that began before."""


class LogState(msgspec.Struct, frozen=True):
    """How far a log goes: the next number it takes, and the head of a queue (None: unusable)."""

    next_seq: int
    head: int | None


class ChannelFiles:
    """The folder of one channel: metadata through the store, its log, and the cursor of a queue.

    >>> from penstock.channels.store import FileChannelStore
    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> disk.make_folder("data")
    >>> files = ChannelFiles("ops", FileChannelStore("data", disk), disk, "data", MessageLogOptions(sync="none"))
    >>> files.open(fifo=False, flush_interval=0)
    LogState(next_seq=1, head=None)
    >>> files.close()
    """

    def __init__(self, handler: str, store: ChannelStore, disk: Disk, root: str, options: MessageLogOptions) -> None:
        self.handler, self.hash = handler, channel_hash(handler)
        self.folder = f"{root}/{self.hash}"
        self._root, self._store, self._disk = root, store, disk
        self._options = options
        self._log: MessageLog | None = None
        self._reader: MessageLogReader | None = None
        self._committer: Committer | None = None
        self._synced = 0  # the last number known to be durable; 0 after opening, so the first pop always flushes
        self._keep: int | None = None
        self.damage: dict[str, None] = {}
        """What was found wrong with the log, each thing once: what it says is missing from the history."""
        self.sync_seconds = 0.0
        """How long the last sync took that a message waited for."""

    @property
    def is_open(self) -> bool:
        """Whether the log is open."""
        return self._log is not None

    def open(self, *, fifo: bool, flush_interval: int) -> LogState:
        """Open the log, mending what a crash left, and say how far it goes."""
        if self._log is None:
            started = time.perf_counter()
            self._log = MessageLog.open(self.folder, self._options, disk=self._disk)
            counts.RECOVERY.observe(time.perf_counter() - started)
            self._synced, self._keep = 0, None
            self.damage.update(dict.fromkeys(map(str, self._log.repairs)))
            for name in self._disk.list(self.folder):
                if name.endswith(BAD):
                    self.damage[f"{self.folder}/{name}: damaged bytes of the log were set aside here"] = None
            self._reopen(d.Reopen(fifo, flush_interval))
        return self.state(fifo=fifo)

    def state(self, *, fifo: bool) -> LogState:
        """Say how far the open log goes."""
        log = self._need_log()
        head = None
        if fifo:
            try:
                head = self._head(log)
            except CorruptionError as exc:
                _log.warning("the queue %s needs to be cleared: %s", self.handler, exc)
        return LogState(log.next_position, head)

    def _head(self, log: MessageLog) -> int:
        """Return where the queue goes on; CorruptionError when its cursor does not fit the log."""
        given_out = log.next_position - 1
        try:
            return load_cursor(self._disk, self.folder, log.first_seq, log.last_seq or given_out)
        except CorruptionError:
            # Numbers above the last entry were given out and lost: behind all of them there is nothing to miss.
            head = load_cursor(self._disk, self.folder, log.first_seq, given_out)
            if head <= given_out:
                raise
            return head

    def close(self) -> None:
        """Let go of the log; what it holds is made durable first if that was still to come."""
        log, self._log = self._log, None
        reader, self._reader = self._reader, None
        committer, self._committer = self._committer, None
        if reader is not None:
            reader.close()
        if committer is not None:
            committer.close()
        if log is not None:
            try:
                if log.last_seq > self._synced:
                    timed(log.sync, counts.FLUSHES, counts.FLUSH_SECONDS)
            finally:
                log.close()

    def carry_out(self, decisions: Sequence[d.Decision]) -> list[Any]:
        """Take the steps of a run of decisions; return an answer, or an error, for each.

        What it raises stands for all of them: none may be applied then.
        """
        first = decisions[0].steps[0] if decisions[0].steps else None
        if isinstance(first, d.Append):
            self.append([step for decision in decisions for step in decision.steps if isinstance(step, d.Append)])
            answers: list[Any] = [decision.answer for decision in decisions]
        elif isinstance(first, d.Take):
            answers = self._take(first.seq, len(decisions))
            taken = sum(not isinstance(answer, Exception) for answer in answers)
            decisions = decisions[:taken]  # what was not handed out must not be evicted
        else:
            answers = [self._all_of(decision) for decision in decisions]
        for step in decisions[-1].after if decisions else ():
            try:
                self._step(step)
            except OSError as exc:
                _log.warning("channel %s: %s after the fact failed: %s", self.handler, type(step).__name__, exc)
        return answers

    def _all_of(self, decision: d.Decision) -> Any:
        answer = decision.answer
        for step in decision.steps:
            found = self._step(step)
            answer = found if found is not None else answer
        return answer

    def _step(self, step: d.Step) -> Any:
        match step:
            case d.Save(channel):
                self._store.save(channel)
            case d.Remove(first_time):
                self._remove(first_time=first_time)
            case d.Flush():
                self._flush()
            case d.WriteCursor(next_seq, first_time):
                self._write_cursor(next_seq, first_time=first_time)
            case d.NoteQueue():
                self._disk.remove(f"{self.folder}/{NEW_QUEUE}")
            case d.ReadLog(from_seq, limit):
                return self._read(from_seq, limit)
            case d.ReadRange(spent):
                log = self._need_log()
                found = (log.first_seq, log.last_seq) if log.last_seq else (0, 0)
                return found if spent is None else (*found, spent)
            case d.Evict(below):
                # The segment of the last durable entry stays: without it a restart could not tell how far the
                # numbers went, after a power cut that takes what came later.
                log = self._need_log()
                log.drop_before(min(below, self._synced, log.last_seq))
            case d.Reopen():
                self._reopen(step)
            case _:
                raise TypeError(f"no such step: {step}")
        return None

    # --- The log

    @property
    def flushes_later(self) -> bool:
        """Whether what is appended is made durable by the timer."""
        return self._committer is not None

    def has_room(self, payloads: Sequence[bytes], most: int = SMALL_BYTES) -> bool:
        """Whether these can be appended right away: they are small, and no file is made, sealed or dropped."""
        log, count, length = self._log, len(payloads), sum(map(len, payloads))
        if log is None or self._keep is None or length > most:
            return False
        return log.has_room(count, length + count * (ENTRY_OVERHEAD + MAX_SENDER_BYTES))

    def append(self, steps: Sequence[d.Append]) -> None:
        """Append what the steps say, and make it durable at once or within the flush interval."""
        log, last, started = self._need_log(), steps[-1], time.perf_counter()
        if last.keep != self._keep:
            log.set_retention("count" if last.keep else "fifo", last.keep)
            self._keep = last.keep
        if len(steps) == 1 and len(last.payloads) == 1:
            log.append(last.payloads[0], sender=last.sender, timestamp_ms=last.timestamp, seq=last.seq)
        else:
            self._append_many(log, steps)
        counts.APPEND_SECONDS.observe(time.perf_counter() - started)
        if last.sync:
            self._flush()
        elif self._committer is not None:
            self._committer.touch()

    @staticmethod
    def _append_many(log: MessageLog, steps: Sequence[d.Append]) -> None:
        payloads = [payload for step in steps for payload in step.payloads]
        first, last = steps[0], steps[-1]
        in_a_row = last.seq + len(last.payloads) - first.seq == len(payloads)
        if in_a_row and all(step.sender == first.sender and step.timestamp == first.timestamp for step in steps):
            log.append_many(payloads, sender=first.sender, timestamp_ns=first.timestamp * 1_000_000, seq=first.seq)
            return
        log.append_many(
            payloads,
            sender=[step.sender for step in steps for _ in step.payloads],
            timestamp_ns=[step.timestamp * 1_000_000 for step in steps for _ in step.payloads],
            seq=[step.seq + index for step in steps for index in range(len(step.payloads))],
        )

    def _flush(self) -> None:
        if self._log is not None:
            started = time.perf_counter()
            self._synced = timed(self._log.sync, counts.FLUSHES, counts.FLUSH_SECONDS) - 1
            self.sync_seconds = time.perf_counter() - started

    def _flush_later(self) -> int:
        """Flush for the timer; runs on a thread of the group commit."""
        log = self._log
        if log is None:
            return 0
        try:
            bound = timed(log.sync, counts.FLUSHES, counts.FLUSH_SECONDS)
        except (PenstockError, OSError) as exc:  # nobody waits for it, so nobody else would say so
            _log.warning("channel %s: a flush failed, and it takes no more messages: %s", self.handler, exc)
            raise
        self._synced = bound - 1
        return bound

    def _read(self, from_seq: int, limit: int) -> list[c.StoredMessage]:
        found = timed(lambda: self._read_entries(from_seq, limit), counts.READS, counts.READ_SECONDS)
        counts.ENTRIES_RETURNED.observe(len(found))
        return found

    def _read_entries(self, from_seq: int, limit: int) -> list[c.StoredMessage]:
        log = self._need_log()
        if limit <= 0 or not log.last_seq or from_seq > log.last_seq:
            return []
        if self._reader is None:
            self._reader = MessageLogReader(self.folder, self._disk)
        found = self._reader.entries(max(from_seq, log.first_seq), limit)
        self.damage.update(dict.fromkeys(map(str, self._reader.damage)))
        return [
            c.StoredMessage(entry.seq, entry.timestamp_ms, entry.sender.decode(errors="replace"), entry.payload)
            for entry in found
        ]

    def _reopen(self, step: d.Reopen) -> None:
        if self._committer is not None:
            self._committer.close()
            self._committer = None
        if self._log is None:
            return
        if step.fifo:
            self._log.set_retention("fifo")
            self._keep = 0
        if step.flush_interval:
            self._committer = GROUP.committer(self._flush_later, interval=step.flush_interval / 1000)

    def _need_log(self) -> MessageLog:
        if self._log is None:
            raise ClosedError(f"channel {self.handler}: its log is not open")
        return self._log

    # --- The queue

    def _take(self, seq: int, count: int) -> list[Any]:
        """Read ``count`` elements from ``seq`` on, then move the cursor behind those that are there."""
        if seq + count - 1 > self._synced:
            self._flush()  # a cursor must not run ahead of what a power cut leaves of the log
        entries = self._read(seq, count)
        good = 0
        while good < len(entries) and entries[good].seq == seq + good:
            good += 1
        answers: list[Any] = entries[:good]
        if good:
            self._write_cursor(seq + good)
        missing = [CorruptionError(self.folder, 0, f"{GAP}: {seq + good}") for _ in range(count - good)]
        return answers + missing

    def _write_cursor(self, next_seq: int, *, first_time: bool = False) -> None:
        started = time.perf_counter()
        if self._disk.stat(self.folder) is None:
            self._disk.make_folder(self.folder)
            self._disk.sync_folder(self._root)
        if (
            first_time and self._disk.stat(f"{self.folder}/{NEW_QUEUE}") is None
        ):  # a cursor beside metadata of a plain channel is damage, except where this note says otherwise
            self._disk.create(f"{self.folder}/{NEW_QUEUE}").close()
            self._disk.sync_folder(self.folder)
        save_cursor(self._disk, self.folder, next_seq)
        counts.CURSOR_SECONDS.observe(time.perf_counter() - started)

    # --- The end

    def _remove(self, *, first_time: bool) -> None:
        if first_time:
            # Nothing should be there.  If something is, a delete failed half way: its numbers are not ours.
            if self._disk.stat(self.folder) is not None:
                self._store.delete(self.hash)
            return
        gone = False

        def first() -> None:
            nonlocal gone
            gone = True
            timed(self._let_go, counts.LOG_DELETES)

        try:
            self._store.delete(self.hash, first)
        except OSError as exc:
            if not gone:
                raise
            # The deletion itself is durable: what could not be removed is swept at the next start, or before the
            # next channel of this name is first saved.
            _log.warning("channel %s is deleted, but not all of its files are: %s", self.handler, exc)

    def _let_go(self) -> None:
        """Close the log without another sync: its files are about to go."""
        reader, self._reader = self._reader, None
        committer, self._committer = self._committer, None
        log, self._log = self._log, None
        if committer is not None:
            committer.close()
        if reader is not None:
            reader.close()
        if log is not None:
            log.close()
