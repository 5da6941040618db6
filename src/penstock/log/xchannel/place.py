"""Where a reader stands: a cursor in a window of one file, and the ways to the start, the end and a position.

Every way ends in ``enter``, which changes nothing if it fails.  What happens from there on is in follow.py.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from penstock import kernel
from penstock.disk import ReadDisk
from penstock.disk.plain import boot_id_of
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    ReplacedError,
    UnsupportedError,
)
from penstock.kernel import Cursor
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import ChannelFile, discover, is_there, problem_at, sidecar_prefix, written_behind
from penstock.log.xchannel.format import FIRST_SLOT, RecordStop, file_path, position_of, split_position

__all__ = ["Place", "was_at_end"]

HALF_MADE_SECONDS: Final = 0.05
"""How long a file may take from its name to its header: xchannel 2.0.0 names it first and then maps a whole region."""


def was_at_end(sidecar: Sidecar, position: int, first: int) -> bool:
    """Whether a position before ``first`` is where the newest of the files ended that retention has taken."""
    end = sidecar.dropped_end()
    if end is None or position < end:
        return False
    gone = split_position(end)[0]
    return split_position(position)[0] == gone == split_position(first)[0] - 1


class Place:
    """Belongs to one reader, which moves it under ``lock``."""

    def __init__(self, base: str, disk: ReadDisk) -> None:
        self.path, self.disk = base, disk
        self.lock = threading.RLock()
        self.cursor = Cursor()
        self.sidecar = Sidecar(disk, sidecar_prefix(base))
        identity = self.sidecar.identity()
        self.log_id = None if identity is None else identity.log_id
        self.checked = False  # whether the end was compared with the mark
        self.bound: int | None = None  # the durable mark of an earlier boot: what lies behind it will be cut
        self.dead = ""
        self._file: ChannelFile | None = None

    @property
    def file(self) -> ChannelFile:
        """The file it stands in."""
        self.check_open()
        assert self._file is not None
        return self._file

    @property
    def offset(self) -> int:
        """The byte of the file it stands on."""
        return split_position(self.cursor.position)[1]

    # --- The ways to a place

    def go_first(self) -> None:
        """Stand on the first record of the oldest file, whichever that is by now."""
        while True:
            try:
                file = self._open(self._sequences()[0])
            except FileNotFoundError:
                continue  # retention took it: there is a newer one
            self.enter(file, FIRST_SLOT)
            return

    def go_live(self) -> None:
        """Stand on the tail of the newest file, wherever its writer has come meanwhile."""
        while True:
            newest = self._sequences()[-1]
            bounded = self.bound is not None and split_position(self.bound)[0] < newest
            if bounded:
                newest = split_position(self.bound or 0)[0]
            try:
                file = self._open(newest)
            except FileNotFoundError:
                continue  # retention took it: there is a newer one
            cursor = Cursor()
            offset = file.find_tail(cursor)
            if cursor.status == RecordStop.ROLLED and not bounded:
                if self.disk.stat(file_path(self.path, newest + 1)) is not None:
                    file.close()
                    continue  # it has just been rolled
            elif cursor.status not in (RecordStop.TAIL, RecordStop.ROLLED):
                raise problem_at(file, offset, cursor.status)
            hidden = None if self.bound is not None else written_behind(file, cursor)
            if hidden is not None and cursor.status == RecordStop.TAIL:
                file.close()
                raise hidden
            if self.bound is not None:
                offset = min(offset, split_position(self.bound)[1])
            self.enter(file, offset)
            return

    def go_to(self, position: int) -> None:
        """Stand on the record at ``position``."""
        if not is_there(self.disk, self.path, split_position(position)[0]):
            position = self._replace_removed(position)
        sequence, offset = split_position(position)
        offset = max(offset, FIRST_SLOT)
        try:
            file = ChannelFile.open(self.disk, self.path, sequence)
        except FileNotFoundError:  # retention took it since
            first = position_of(next(iter(discover(self.disk, self.path)), sequence + 1), FIRST_SLOT)
            raise ExpiredError(self.path, position, first) from None
        try:
            self._check_boundary(file, offset, position)
            self.enter(file, offset)
        except BaseException:
            file.close()
            raise

    def _replace_removed(self, position: int) -> int:
        """Return where one goes on whose file was removed after all of it was read; an error for anyone else."""
        sequences = self._sequences()
        first = position_of(sequences[0], FIRST_SLOT)
        if was_at_end(self.sidecar, position, first):
            return first
        sequence, _ = split_position(position)
        if sequence < sequences[0]:
            raise ExpiredError(self.path, position, first)
        if sequence not in sequences:
            raise OptionsError(f"{self.path}: position {position} is past the end of the channel")
        return position

    def enter(self, file: ChannelFile, offset: int) -> None:
        """Stand on ``offset`` of ``file``; nothing changes if that fails."""
        self.check_open()
        if not kernel.native and not file.is_sealed():
            raise UnsupportedError(
                f"{file.path} may still be written to, and reading it live needs memory order between "
                f"processes: {kernel.reason}. Install penstock with a C compiler at hand; files that "
                "have been rolled can be read without one"
            )
        bound = None
        if self.bound is not None and split_position(self.bound)[0] == file.sequence:
            bound = split_position(self.bound)[1]
        file.attach(self.cursor, offset, bound)
        if self._file is not None and self._file is not file:
            self._file.close()
        self._file = file

    def check_whole(self) -> None:
        """Raise if the file no longer has what was just walked over: it was cut, and the walk saw zeros."""
        size = self.file.size
        if size < self.offset or getattr(self.cursor.window, "torn", False):
            raise CorruptionError(self.file.path, size, "the file was cut while it was read")

    def _open(self, sequence: int) -> ChannelFile:
        """Open a file that may have been named a moment ago."""
        deadline = time.monotonic() + HALF_MADE_SECONDS
        while True:
            try:
                return ChannelFile.open(self.disk, self.path, sequence)
            except CorruptionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(HALF_MADE_SECONDS / 20)

    def _sequences(self) -> list[int]:
        sequences = discover(self.disk, self.path)
        if not sequences:
            raise ReplacedError(self.path, "its files are gone")
        return sequences

    def _check_boundary(self, file: ChannelFile, offset: int, position: int) -> None:
        """Refuse a position where no record begins; every region begins with one."""
        region = offset // file.region_bytes * file.region_bytes
        if offset >= file.size:
            raise OptionsError(f"{self.path}: position {position} is past the end of the channel")
        cursor = Cursor()
        file.attach(cursor, region)
        file.walk(cursor, until=offset)
        end = cursor.position - file.position(0)
        if end < offset and cursor.status not in (RecordStop.LIMIT, RecordStop.TAIL, RecordStop.ROLLED):
            raise problem_at(file, end, cursor.status)
        if end < offset:
            raise OptionsError(f"{self.path}: position {position} is past the end of the channel")
        if end > offset:
            raise OptionsError(f"{self.path}: no record begins at position {position}")

    # --- How far it may go

    def load_power_loss_bound(self) -> None:
        """Find the durable mark of an earlier boot: a reader stops there until a writer has cleaned up behind it."""
        found = self.sidecar.mark.read()
        boot_id = boot_id_of(self.disk)
        self.bound = None
        if found is not None and boot_id is not None and found[0] != boot_id:
            self.bound = found[1]

    # --- Open and closed

    def check_open(self) -> None:
        """Raise ClosedError once the reader is closed."""
        if self.dead:
            raise ClosedError(f"{self.path}: {self.dead}")

    def close(self, why: str) -> None:
        """Let go of the file and the window; views of it stay."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self.cursor.detach()
        self.dead = self.dead or why

    def forked(self, why: str) -> None:
        """Close in the child of a fork, where the lock may be held for ever."""
        self.lock = threading.RLock()
        self.close(why)
