"""The segments of a log in the hands of its writer: which there are, and the one being written."""

from __future__ import annotations

import contextlib
import os

from penstock.disk import Disk, File, Owned
from penstock.disk.aside import bad_path
from penstock.log.messagelog.active import ActiveSegment
from penstock.log.messagelog.format import INDEX, LOG, index_capacity, segment_name, segment_number
from penstock.log.messagelog.recover import Recovery, SegmentState

__all__ = ["SegmentFiles"]


class SegmentFiles:
    """What a writer knows of its segments.  Used under its lock; ``active`` changes under its lock for syncing too.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> files = SegmentFiles(disk, ".", 128 << 20)
    >>> files.begin(7).state.number, disk.list("."), files.new_names
    (7, ['00000000000000000007.idx', '00000000000000000007.log'], True)
    """

    def __init__(self, disk: Disk, folder: str, segment_bytes: int) -> None:
        self._disk, self._folder = disk, folder
        self._capacity = index_capacity(segment_bytes)
        self.states: list[SegmentState] = []
        """Every segment, oldest first."""
        self.active: ActiveSegment | None = None
        """The one being written, the last of them; None until the next append begins one."""
        self.new_names = False
        """Whether a segment was made since the folder was synced."""
        self.owned: Owned | None = None
        """What holds the active segment for its one owner; None where many write in turns."""

    @property
    def last_seq(self) -> int:
        """The number of the newest entry, 0 when there is none."""
        return max((state.last_seq for state in self.states), default=0)

    def adopt(self, found: Recovery) -> None:
        """Go on with what recovery found."""
        self.states = found.segments
        if found.active:
            log = self._disk.modify(self.path(self.states[-1].number, LOG))
            self._own(self.states[-1].number)
            self.go_on(self.states[-1], log, found.index_used, found.since_index)

    def go_on(self, state: SegmentState, log: File, used: int, since: int) -> None:
        """Write on in a segment whose index has ``used`` bytes, the last of them ``since`` bytes ago."""
        index = self._index(state.number)
        self.active = ActiveSegment(state, log, index, used, since, max(self._capacity, used))

    def begin(self, number: int) -> ActiveSegment:
        """Make the segment for ``number`` and write there from now on."""
        number = max(number, self.states[-1].number + 1) if self.states else number
        path = self.path(number, LOG)
        left = self._disk.stat(path)
        if left is not None and left.size:  # not there when the log was opened: somebody else's
            self._disk.rename(path, bad_path(self._disk, path))
        self.remove(number)
        with contextlib.ExitStack() as failed:
            log = failed.enter_context(self._disk.create(path))
            index = failed.enter_context(self._disk.create(self.path(number, INDEX)))
            index.truncate(self._capacity)
            self._own(number)
            failed.pop_all()
        self.new_names = True
        state = SegmentState(number, 0, 0)
        self.states.append(state)
        self.active = ActiveSegment(state, log, index, 0, 0, self._capacity)
        return self.active

    def own_newest(self) -> None:
        """Take the newest segment before recovery looks at it; LockedError if someone has it, by whatever name."""
        numbers = [number for name in self._disk.list(self._folder) if (number := segment_number(name)) is not None]
        if numbers and self._disk.stat(self.path(max(numbers), LOG)) is not None:
            self._own(max(numbers))

    def _own(self, number: int) -> None:
        if self.owned is not None:
            self.owned.take(self.path(number, LOG))

    def let_go(self) -> None:
        """Close the active segment without sealing it; a sync that has it in hand leaves it alone."""
        if self.active is not None:
            self.active.sealed = True
            self.active.close()
        self.active = None

    def sync_names(self) -> None:
        """Return when the names of the segments survive a power cut."""
        self._disk.sync_folder(self._folder)
        self.new_names = False

    def remove(self, number: int) -> None:
        """Remove the files of a segment; fine if they are gone."""
        for ending in (LOG, INDEX):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self.path(number, ending))

    def path(self, number: int, ending: str) -> str:
        """Return the path of one file of a segment."""
        return os.path.join(self._folder, segment_name(number) + ending)

    def _index(self, number: int) -> File:
        try:
            return self._disk.modify(self.path(number, INDEX))
        except FileNotFoundError:
            return self._disk.create(self.path(number, INDEX))
