"""A log as its readers find it: which segments there are, and in which of them an entry is."""

from __future__ import annotations

import bisect
import logging
from typing import Final

from penstock.disk import ReadDisk
from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.log.messagelog.format import Stop, segment_number
from penstock.log.messagelog.segment import Found, Segment
from penstock.log.sidecar import Sidecar
from penstock.metrics import REGISTRY
from penstock.types import Problem

__all__ = ["Folder"]

logger = logging.getLogger(__name__)

CRC_FAILURES: Final = REGISTRY.counter("message_log_crc_failures", "damaged entries met in sealed segments")
KEPT_SEGMENTS: Final = 64
"""How many segments a reader keeps open."""


class Folder:
    """The segments of a log that somebody else may be writing, dropping or making anew.

    Used under the lock of its reader.
    """

    def __init__(self, disk: ReadDisk, path: str, sidecar: Sidecar) -> None:
        self._disk, self.path, self._sidecar = disk, path, sidecar
        self._open: dict[int, Segment] = {}
        self._alone: set[int] = set()  # segments that repeat nothing of the one before
        self.damage: dict[tuple[str, int], Problem] = {}
        """What reading has stepped over so far, by file and byte."""
        self.numbers = self._list()
        """The numbers of the segments, growing, as of the last refresh."""
        self._log_id = self._identity()

    # --- Which segments there are

    def refresh(self) -> bool:
        """Look which segments there are now; return whether that changed."""
        try:
            numbers = self._list()
        except OptionsError:
            raise ReplacedError(self.path, "its folder is gone") from None
        changed = numbers != self.numbers
        identity = self._identity()
        if self._log_id is not None and identity is not None and identity != self._log_id:
            raise ReplacedError(self.path, "its log id changed")
        self._log_id = self._log_id or identity
        for number in [n for n in self._open if n not in numbers or not self._open[n].look()]:
            self._open.pop(number).close()
            changed = True
        self.numbers = numbers
        if changed:
            self._alone.clear()
        return changed

    def first(self) -> int:
        """Return the number in the name of the oldest segment; of an empty log, the number its first entry will get."""
        if self.numbers:
            return max(self.numbers[0], 1)
        return self._sidecar.durable_position() or 1

    def last_seq(self) -> int:
        """Return the number of the newest entry, 0 when there is none."""
        while True:
            self.refresh()
            last = 0
            for number in reversed(self.numbers):  # a fresh segment is empty
                segment, above = self.segment(number), last
                last = max(last, segment.last_seq() if segment else 0)
                if above:  # and the one before may not be below it, if somebody tampered with the log
                    break
            if last or not self.refresh():
                return last

    def check_expired(self, position: int) -> None:
        """Raise ExpiredError for a position before the first."""
        first = self.first()
        if position < first:
            raise ExpiredError(self.path, position, first)

    def segment(self, number: int) -> Segment | None:
        """Return a segment, open; None when it is gone or cannot be read."""
        segment = self._open.pop(number, None)
        sealed = number != self.numbers[-1]
        if segment is not None and segment.sealed != sealed:
            segment.close()
            segment = None
        if segment is None:
            try:
                segment = Segment(self._disk, self.path, number, sealed=sealed)
            except FileNotFoundError:  # retention was faster, or it is about to be
                return None
            except OSError as exc:
                logger.warning("%s: passed over: %s", Segment.log_path(self.path, number), exc)
                return None
        self._open[number] = segment
        if len(self._open) > KEPT_SEGMENTS:
            self._open.pop(next(iter(self._open))).close()
        return segment

    def close(self) -> None:
        """Let go of the files."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()

    def forget(self) -> None:
        """Leave the files to the parent, in the child of a fork."""
        self._open = {}

    def _list(self) -> list[int]:
        try:
            names = self._disk.list(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise OptionsError(f"{self.path}: there is no message log here") from None
        return sorted(number for number in map(segment_number, names) if number is not None)

    def _identity(self) -> str | None:
        identity = self._sidecar.identity()
        return None if identity is None else identity.log_id

    # --- Finding entries

    def near(self, want: int, limit: int) -> Found | None:
        """Return entries from ``want`` on if it is known in which segment they must be; None says nothing.

        The short way of most reads: one look at the segment's name, which tells whether it still has that file.
        """
        numbers = self.numbers
        index = bisect.bisect_right(numbers, want) - 1
        if index < 0 or limit <= 0 or numbers[index] not in self._alone:
            return None
        segment = self._open.get(numbers[index])
        if segment is None or segment.sealed != (index + 1 < len(numbers)) or not segment.look():
            return None
        found = segment.find(want, limit)
        return found if found.count and found.damage is None else None

    def find(self, want: int, limit: int, *, expires: bool = False) -> Found | None:
        """Return the first entries from ``want`` on, of one segment, or None when there are none yet."""
        while True:
            for number in self._from(want):
                segment = self.segment(number)
                if segment is None or not segment.look():
                    if self.refresh():  # retention was faster: what was asked for may be gone
                        break
                    continue
                found = segment.find(want, limit)
                if found.damage is not None:
                    self._warn(segment.path, found.damage)
                if found.count:
                    return found
            else:
                if not self.refresh():
                    return None
            if expires:
                self.check_expired(want)

    def _from(self, want: int) -> list[int]:
        """Return the numbers of the segments that ``want`` or later entries can be in, in order."""
        index = max(bisect.bisect_right(self.numbers, want) - 1, 0)
        self._alone.update(self.numbers[:1])
        while index > 0:  # a segment may repeat what the one before has: that one is read first
            before = self.segment(self.numbers[index - 1])
            last = None if before is None else before.last_seq(fresh=False)
            if last is not None and last < self.numbers[index]:
                self._alone.add(self.numbers[index])
            if last is None or last < want:
                break
            index -= 1
        return self.numbers[index:]

    def _warn(self, path: str, damage: tuple[int, Stop]) -> None:
        byte, stop = damage
        if (path, byte) in self.damage:
            return
        problem = self.damage[path, byte] = Problem(path, byte, f"a sealed segment is damaged here ({stop.name})")
        CRC_FAILURES.add()
        logger.warning("%s", problem)
