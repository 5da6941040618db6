"""A message log that several processes write to, one turn at a time.

A MessageLog holds the lock as long as it is open.  Here the lock is held for a turn, and a turn begins by looking at
what others have appended meanwhile:

    nothing                     the active segment is as long as it was: one stat
    entries, maybe segments     walk over the new bytes only
    anything else               recover, as opening does: somebody died in the middle of a write

A segment is only ever sealed when it is full, so one stat of the active segment notices every change: whoever finds it
full looks for the next one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from penstock import kernel
from penstock.disk import Disk, Stat, Turns, disk_for
from penstock.disk.doors import in_a_folder
from penstock.disk.posix import folder_of
from penstock.disk.turns import wait_until_taken
from penstock.errors import LockedError, ReplacedError
from penstock.log.messagelog.active import ActiveSegment
from penstock.log.messagelog.format import COLUMNS, ENTRY_OVERHEAD, INDEX_ENTRY, LOG, MAX_SEQ, EntryStop, segment_number
from penstock.log.messagelog.options import MessageLogOptions
from penstock.log.messagelog.recover import SegmentState, map_whole, set_aside_behind, walk_segment
from penstock.log.messagelog.writer import MessageLog
from penstock.log.sidecar import Sidecar
from penstock.options import options_from, shows_options

__all__ = ["SharedLog"]

LOCK: Final = "penstock-lock"
QUEUE: Final = "penstock-queue"


class SharedLog(MessageLog):
    """A message log written in turns.  Append only inside of ``turn``.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> one, two = SharedLog.open(folder.name + "/log"), SharedLog.open(folder.name + "/log")
    >>> with one.turn():
    ...     one.append(b"from one")
    1
    >>> with two.turn():
    ...     two.append(b"from two")
    2
    >>> one.close(); two.close(); folder.cleanup()
    """

    LOCK_SECONDS = 10.0
    SOLE_OWNER = False

    def __init__(self, path: str, disk: Disk, options: MessageLogOptions) -> None:
        if disk.stat(path) is None:
            with in_a_folder(path):
                disk.make_folder(path)
            disk.sync_folder(folder_of(path))
        self._lock = Turns(disk, os.path.join(path, LOCK), os.path.join(path, QUEUE), path, of=path)
        self._turns = threading.RLock()
        self._depth = 0
        self.replaced = ""
        """Why this is not the log any more that was opened, or nothing."""
        self.reloads = 0
        """How often a turn found something else than what was there and entries behind it."""
        with self._lock.line(self.LOCK_SECONDS) as deadline:
            wait_until_taken(lambda: self._try_open(path, disk, options), deadline, path)
        self._held.release()
        identity = self._sidecar.identity()
        self.log_id = "" if identity is None else identity.log_id
        """The random id of this log; a turn on another one is refused."""

    @classmethod
    @shows_options(MessageLogOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: MessageLogOptions | None = None,
        *,
        disk: Disk | None = None,
        **given: Any,
    ) -> SharedLog:
        """Open a log for writing in turns, created if it is not there.

        Options as keywords or as one object; MessageLogOptions says what each means.
        """
        return cls(os.fspath(path), disk or disk_for(path), options_from(MessageLogOptions, options, given))

    @contextmanager
    def turn(self, timeout: float = LOCK_SECONDS) -> Iterator[None]:
        """Wait for the lock, catch up with what others wrote, and hold it for the block; Timeout if it is not free."""
        self.begin_turn(timeout)
        try:
            yield
        finally:
            self.end_turn()

    def begin_turn(self, timeout: float = LOCK_SECONDS) -> None:
        """Begin what ``end_turn`` must end, on the same thread; for who cannot wait for a ``with`` to be set up."""
        self._turns.acquire()
        try:
            if self.replaced and not self._dead:
                raise ReplacedError(self.path, self.replaced)
            self._check_writable()
            if not self._depth:
                self._take(timeout)
            self._depth += 1
        except BaseException:
            self._turns.release()
            raise
        if self._depth == 1:
            try:
                self._catch_up()
            except BaseException:
                self.end_turn()
                raise

    def end_turn(self) -> None:
        """End a turn; the outermost one lets others have the lock."""
        if not self._depth:  # the child of a fork: the turn it was made in is its parent's
            return
        try:
            self._depth -= 1
            if self._depth:
                return
            try:
                if self._files.new_names and not self._dead:  # who syncs next may not be the one who made them
                    self._files.sync_names()
            finally:
                self._lock.release()
        finally:
            self._turns.release()

    def close(self) -> None:
        """Let go of the log; with a sync mode, sync once more."""
        try:
            super().close()
        finally:
            with self._turns:
                self._lock.close()

    def forked(self) -> None:
        """Close in the child of a fork; a turn under way stays the parent's."""
        super().forked()
        self._turns, self._depth = threading.RLock(), 0
        self._lock.close()

    @property
    def total_bytes(self) -> int:
        """The bytes of all segments, as of the last turn."""
        return sum(segment.size for segment in self._files.states)

    @property
    def room_bytes(self) -> int:
        """How much can be appended without making or syncing a file, as of the last turn."""
        active = self._files.active
        if active is None or self._files.new_names:
            return 0
        return max(0, self.options.segment_bytes - active.state.size)

    @property
    def sealed_ends(self) -> list[tuple[int, int]]:
        """The (last number, bytes) of each sealed segment, oldest first, as of the last turn."""
        return [(segment.last_seq, segment.size) for segment in self._files.states[:-1]]

    def set_aside_behind(self, missing: int) -> None:
        """Set aside what lies behind a hole that begins with the number ``missing``, inside of a turn.

        For who knows that a power cut made the hole, and wants the log as some append left it.
        """
        with self._mutex:
            with self._syncing:
                self._files.let_go()
            set_aside_behind(self._disk, self.path, missing)
            self._open()

    # --- The lock

    def _try_open(self, path: str, disk: Disk, options: MessageLogOptions) -> bool:
        try:
            MessageLog.__init__(self, path, disk, options)
        except LockedError:
            return False
        return True

    def _take(self, timeout: float) -> None:
        try:
            self._lock.take(timeout)
        except FileNotFoundError:
            raise ReplacedError(self.path, "its folder is gone") from None

    # --- Catching up

    def _catch_up(self) -> None:
        with self._mutex:
            active = self._files.active
            found = None if active is None else self._disk.stat(active.log.path)
            if active is None or found is None or not self._same(active, found):
                self._reload()

    def _same(self, active: ActiveSegment, found: Stat) -> bool:
        """Whether the log is as it was, or was only appended to, which is then taken note of."""
        if found.identity != active.identity:
            return False
        return (found.size == active.state.size or self._follow(active, found)) and self._rolled(active)

    def _follow(self, active: ActiveSegment, found: Stat) -> bool:
        """Walk over what others appended to the segment; False when that is not plain entries."""
        state = active.state
        if found.size < state.size:
            return False
        data = active.log.read_at(state.size, found.size - state.size)
        most = len(data) // ENTRY_OVERHEAD + 1
        columns = np.empty((COLUMNS, most), np.int64)
        count, end, stop, _ = kernel.messagelog.scan(data, 0, state.last_seq + 1, True, columns)
        if stop not in (EntryStop.END, EntryStop.LIMIT) or end != len(data) or not count:
            return False
        last_indexed, before = state.size - active.since, state.size
        entries = np.frombuffer(
            active.index.read_at(active.used, (len(data) // 4096 + 2) * INDEX_ENTRY.itemsize)
            .ljust(INDEX_ENTRY.itemsize, b"\0"),
            np.uint8,
        )  # fmt: skip
        entries = entries[: len(entries) // INDEX_ENTRY.itemsize * INDEX_ENTRY.itemsize]
        offsets = entries.view(INDEX_ENTRY)["offset"].astype(np.int64)
        good = (offsets >= before) & (offsets < found.size) & np.concatenate(([True], np.diff(offsets) > 0))
        if before == 0:  # of an empty segment the first entry is (0, 0)
            good[0] = True
        used = len(good) if good.all() else int(np.argmin(good))
        if used:
            last_indexed = int(offsets[used - 1])
            active.used += used * INDEX_ENTRY.itemsize
        state.size, state.last_seq = found.size, int(columns[0, count - 1]) & MAX_SEQ
        active.since = state.size - last_indexed
        self._floor = max(self._floor, state.last_seq + 1)
        return True

    def _rolled(self, active: ActiveSegment) -> bool:
        """If the segment is full, go on with those that others began after it; False when one is not plain."""
        if active.state.size <= self.options.segment_bytes:
            return True
        names = self._disk.list(self.path)
        numbers = {number for number in map(segment_number, names) if number is not None}
        later = sorted(number for number in numbers if number > active.state.number)
        files = self._files
        files.states = [segment for segment in files.states if segment.number in numbers]
        if not later:
            return True  # who filled it died before it began the next one: this turn's append does
        with self._syncing:
            files.let_go()
        for number in later:
            log = self._disk.modify(files.path(number, LOG))
            size = log.stat().size
            walk = walk_segment(map_whole(log, size), number)
            if walk.end != size or walk.unordered:
                log.close()
                return False
            state = SegmentState(number, size, walk.highest_seq)
            files.states.append(state)
            self._floor = max(self._floor, walk.highest_seq + 1)
            if number == later[-1]:
                files.go_on(state, log, len(walk.index) * INDEX_ENTRY.itemsize if size else 0, walk.since_index)
            else:
                log.close()
        return True

    def _reload(self) -> None:
        """Recover, as opening does, unless this is another log by now."""
        identity = Sidecar(self._disk, os.path.join(self.path, "penstock-")).identity()
        if identity is None or identity.log_id != self.log_id:
            raise ReplacedError(self.path, "its log id changed" if identity else "its folder is gone")
        with self._syncing:
            self._files.let_go()
        known = self._floor
        self._open()
        self.reloads += 1
        if self._floor < known:  # its numbers are given out again, or a hole is left: not by this writer
            self._broken = self.replaced = (
                f"it ends at {self._floor - 1}, before entry {known - 1}: a backup was put back, or it was cut"
            )
            with self._syncing:
                self._files.let_go()
            raise ReplacedError(self.path, self.replaced)
