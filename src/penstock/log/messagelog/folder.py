"""A log as its readers find it: which segments there are, and in which of them an entry is."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final

from penstock.disk import ReadDisk
from penstock.errors import ExpiredError, NotFoundError, OptionsError, ReplacedError
from penstock.log.damage import SHORTAGES, DamageMet
from penstock.log.messagelog.format import MAX_SEQ, segment_number
from penstock.log.messagelog.resync import describe, numbers_missing
from penstock.log.messagelog.segment import FoundEntries, Segment
from penstock.log.sidecar import Sidecar
from penstock.metrics import REGISTRY
from penstock.types import Problem

__all__ = ["LogFolder"]

CRC_FAILURES: Final = REGISTRY.counter("message_log_crc_failures", "damaged places met in message logs")
KEPT_SEGMENTS: Final = 8
"""How many segments a reader keeps open."""


class LogFolder:
    """The segments of a log that somebody else may be writing, dropping or making anew.

    Used under the lock of its reader.
    """

    def __init__(self, disk: ReadDisk, path: str, sidecar: Sidecar, *, raises: bool = False) -> None:
        self._disk, self.path, self._sidecar = disk, path, sidecar
        self.raises = raises
        """Whether a segment that cannot be opened is an error, and not passed over."""
        self._open: dict[int, Segment] = {}
        self._alone: set[int] = set()  # segments that repeat nothing of the one before
        self._barred: dict[int, Problem] = {}  # segments that could not be opened
        self.damage = DamageMet()
        """What reading has stepped over so far."""
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

    def segment(self, number: int, *, may_skip: bool = False) -> Segment | None:
        """Return a segment, open; None when it is gone, or cannot be read and may be passed over."""
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
                if exc.errno in SHORTAGES or (self.raises and not may_skip):  # of which the first is no damage
                    raise
                self.note(self._unreadable(number, exc))
                return None
        self._open[number] = segment
        if len(self._open) > KEPT_SEGMENTS:
            self._open.pop(next(iter(self._open))).close()
        return segment

    def _unreadable(self, number: int, exc: OSError) -> Problem:
        reason = f"cannot be read, passed over: {exc.strerror or exc}"
        problem = self._barred[number] = Problem(Segment.log_path(self.path, number), 0, reason)
        return problem

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
            raise NotFoundError(f"{self.path}: there is no message log here") from None
        return sorted(number for number in map(segment_number, names) if number is not None)

    def _identity(self) -> str | None:
        identity = self._sidecar.identity()
        return None if identity is None else identity.log_id

    def note(self, problem: Problem) -> None:
        """Count what reading has stepped over."""
        if self.damage.add(problem):
            CRC_FAILURES.add()

    # --- Finding entries

    def near(self, want: int, limit: int) -> FoundEntries | None:
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
        return found if found.count and not found.passed else None

    def find(
        self, want: int, limit: int, *, expires: bool = False, may_skip: bool = False
    ) -> tuple[FoundEntries | None, list[Problem], int]:
        """Return the first entries from ``want`` on, of one segment, or None when there are none yet.

        With them what is damaged on the way and hides numbers that were asked for, and where reading goes on behind
        that.
        """
        while True:
            way = _Way(want)
            for number, following in self._from(want):
                segment = self.segment(number, may_skip=may_skip)
                if segment is None or not segment.look():
                    if self.refresh():  # retention was faster: what was asked for may be gone
                        break
                    way.miss(self._barred.get(number), following)
                    continue
                found = segment.find(want, limit)
                way.enter(segment, found, following)
                if found.count:
                    return found, way.problems, int(found.columns[0, 0]) & MAX_SEQ
            else:
                if not self.refresh():
                    return None, way.problems, way.onwards
            if expires:
                self.check_expired(want)

    def _from(self, want: int) -> Iterator[tuple[int, int | None]]:
        """Yield the numbers of the segments that ``want`` or later entries can be in, in order, each with the next."""
        index = max(bisect.bisect_right(self.numbers, want) - 1, 0)
        self._alone.update(self.numbers[:1])
        while index > 0:  # a segment may repeat what the one before has: that one is read first
            before = self.segment(self.numbers[index - 1], may_skip=True)
            last = None if before is None else before.last_seq(fresh=False)
            if last is not None and last < self.numbers[index]:
                self._alone.add(self.numbers[index])
            if last is None or last < want:
                break
            index -= 1
        numbers = self.numbers  # by their index: to step over those before would take longer with each segment
        return ((numbers[at], numbers[at + 1] if at + 1 < len(numbers) else None) for at in range(index, len(numbers)))


class _Way:
    """What lies between a number that was asked for and the entries that were found."""

    def __init__(self, want: int) -> None:
        self.want = self.onwards = want
        self.problems: list[Problem] = []
        self.before: Segment | None = None  # the segment before, if its end is not told of already

    def enter(self, segment: Segment, found: FoundEntries, following: int | None) -> None:
        """Note what is missing before a segment and in it, up to what was found there."""
        number, path = segment.number, segment.path
        last = 0 if self.before is None else self.before.last_seq(fresh=False)
        if last and last + 1 < number and self.want < number:
            reason = f"{numbers_missing(last + 1, number - 1)}: the segment before ends with {last}"
            self._add(Problem(path, 0, reason), number)
        first = segment.first_seq()
        if first is not None and (first < number or (following is not None and first >= following)):
            reason = f"its first entry has number {first}, which does not fit its name: is it another segment's file?"
            self._add(Problem(path, 0, reason), following)
        if following is not None and not segment.size:
            reason = f"the segment is empty, but one for {following} follows; {numbers_missing(number, following - 1)}"
            self._add(Problem(path, 0, reason), following)
        for damage in found.passed:
            self._add(describe(path, damage, following), following if damage.high is None else damage.high)
        told = not segment.size or any(damage.high is None for damage in found.passed)
        self.before = None if told else segment

    def miss(self, problem: Problem | None, following: int | None) -> None:
        """Note a segment that could not be opened."""
        self.before = None
        if problem is not None:
            self._add(problem, following)

    def _add(self, problem: Problem, bound: int | None) -> None:
        """Note a problem that hides numbers below ``bound``, if some of them were asked for."""
        if bound is None or bound > self.want:
            self.problems.append(problem)
            self.onwards = max(self.onwards, bound or self.want)
