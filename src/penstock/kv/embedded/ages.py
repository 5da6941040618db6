"""How old the history of a bucket is, by a reckoning that no clock that is set forward or back can disturb.

    ages.json := {"boot", "monotonic_ns", "wall_ns", "reckoned_ns", "marks": [[revision, reckoned_ns], …]}

Reckoned time is the time that went by, added up from one look to the next: by the monotonic clock while the machine
runs (it is the same for all processes of a boot), by the calendar over a restart of the machine, where nothing else is
known, and never backwards.  A mark says that at that time the newest revision was this one; so everything up to it is
at least as old as the mark.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.clock import Moment, elapsed_ns
from penstock.disk import Disk, save_atomically
from penstock.errors import CorruptionError
from penstock.log.sidecar import decode_json

__all__ = ["HistoryAges", "HistoryAgesFile", "add_mark", "advance"]

MARKS: Final = 64
"""About how many marks there are for the age of a bucket; so its history goes at most a 64th later than it could."""


class HistoryAges(msgspec.Struct, frozen=True):
    """What ages.json says.

    >>> HistoryAges(7, 1_000, 2_000).marks
    []
    """

    boot: int
    monotonic_ns: int
    wall_ns: int
    reckoned_ns: int = 0
    marks: list[tuple[int, int]] = []  # msgspec copies it
    version: int = 1
    check: int = 0

    def checksum(self) -> int:
        """Return what ``check`` should be."""
        fields = (self.boot, self.monotonic_ns, self.wall_ns, self.reckoned_ns, self.marks, self.version)
        return zlib.crc32(msgspec.json.encode(fields))


def advance(
    ages: HistoryAges | None, now: Moment, age_ns: int, newest: int, seen: Iterable[tuple[int, int]] = ()
) -> tuple[HistoryAges, int]:
    """Return the reckoning at this moment, and the first revision that is not older than ``age_ns`` (0: nothing is).

    ``newest`` is the newest revision now, ``seen`` are (revision, monotonic_ns) that this process knows of since.

    >>> ages, first = advance(None, Moment(1, 0, 0), 100, newest=5)
    >>> ages, first = advance(ages, Moment(1, 60, -999), 100, newest=8)  # the calendar was set back
    >>> first
    0
    >>> advance(ages, Moment(1, 110, 10**12), 100, newest=9)[1]  # or ahead: 110 ns went by
    6
    """
    if ages is None:
        ages = HistoryAges(now.boot, now.monotonic_ns, now.wall_ns)
    reckoned = ages.reckoned_ns + elapsed_ns(Moment(ages.boot, ages.monotonic_ns, ages.wall_ns), now)
    marks = list(ages.marks)
    for revision, monotonic_ns in (*seen, (newest, now.monotonic_ns)):
        at = min(reckoned, max(marks[-1][1] if marks else 0, reckoned - max(0, now.monotonic_ns - monotonic_ns)))
        add_mark(marks, revision, at, age_ns)
    old = 0
    while old < len(marks) and reckoned - marks[old][1] >= age_ns:
        old += 1
    first = marks[old - 1][0] + 1 if old else 0
    return HistoryAges(now.boot, now.monotonic_ns, now.wall_ns, reckoned, marks[old:]), first


def add_mark(marks: list[tuple[int, int]], revision: int, at_ns: int, age_ns: int) -> None:
    """Add a mark; the last one moves until it is far enough from the one before, so that there are never many.

    >>> marks = [(1, 0)]
    >>> add_mark(marks, 2, 10, 6400); add_mark(marks, 3, 20, 6400); add_mark(marks, 4, 130, 6400)
    >>> marks
    [(1, 0), (3, 20), (4, 130)]
    """
    if marks and revision <= marks[-1][0]:
        return
    if len(marks) > 1 and at_ns - marks[-2][1] < age_ns // MARKS:
        marks.pop()
    marks.append((revision, at_ns))


class HistoryAgesFile:
    """The reckoning of one bucket on disk; written inside of a turn.

    >>> from penstock.disk import MemoryDisk
    >>> file = HistoryAgesFile(MemoryDisk(), "ages.json")
    >>> file.read() is None
    True
    >>> file.write(HistoryAges(1, 2, 3)); file.read().wall_ns
    3
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self.path = disk, path

    def read(self) -> HistoryAges | None:
        """Return what was written last, None when nothing was."""
        try:
            with self._disk.open(self.path) as file:
                data = file.read_at(0, 1 << 16)
        except FileNotFoundError:
            return None
        found = decode_json(self.path, data, HistoryAges, "the ages of a bucket")
        if found.version != 1 or found.check != found.checksum():
            raise CorruptionError(self.path, 0, "not the ages of a bucket: its version or checksum is another")
        return found

    def write(self, ages: HistoryAges) -> None:
        """Replace what was written."""
        checked = msgspec.structs.replace(ages, check=ages.checksum())
        save_atomically(self._disk, self.path, msgspec.json.encode(checked) + b"\n")
