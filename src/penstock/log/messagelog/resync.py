"""Finding the way back behind a damaged place: where the next intact entry of a segment begins.

Bytes that look like an entry may lie inside a payload, so an entry that is found by searching is believed only if what
follows it fits: its chain of entries leads to where the index has one, to the end, or to another damaged entry whose
head still makes sense.  In this order:

    the length    of the damaged entry itself, if its head survived
    a search      byte by byte, up to the next entry of the index
    the index     which knows an entry at least every 4 KiB and a bit

The answer depends on the file alone, not on where reading began.  The work is bounded whatever the bytes say.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
import numpy as np

from penstock import kernel
from penstock.log.messagelog.format import ENTRY_OVERHEAD, HEAD, MAX_SENDER_BYTES, MAX_SEQ, EntryStop
from penstock.types import Problem

__all__ = ["Damage", "Finder", "Bytes", "Anchor", "describe", "mark_ahead", "numbers_missing"]

NEAR: Final = 1 << 20
"""How far ahead of the last number an entry behind damage may be to be believed."""
SEARCH_BYTES: Final = 256 << 20
"""How many bytes of one segment are searched."""
SUM_BYTES: Final = 1 << 30
"""How many bytes of one segment are summed up on the way, right or wrong."""
MOST_PLACES: Final = 10_000
"""How many damaged places of one segment are stepped over; behind the last the rest of the segment is lost."""
WINDOW_BYTES: Final = 8 << 20
NO_INDEX: Final = np.empty(0, np.uint8)

Anchor = tuple[int, int]
"""An entry that the index has: where it begins, and its number."""


class Damage(msgspec.Struct, frozen=True):
    """A damaged place: from ``start`` to ``resume``, between the entries numbered ``low`` and ``high``."""

    start: int
    stop: EntryStop
    resume: int
    low: int
    """The last number before it, or the one below that of the segment."""
    high: int | None
    """The next number behind it; None when no entry follows in the segment."""


class Bytes(Protocol):
    """The bytes of a segment, in windows."""

    def window(self, offset: int, length: int) -> tuple[Any, int]:
        """Return (buffer, where ``offset`` is in it); up to ``length`` bytes are good from there, more maybe too."""


class Finder:
    """Finds the way back in one segment of ``size`` bytes; what it has spent counts for all places together."""

    def __init__(self, data: Bytes, size: int, number: int) -> None:
        self._data, self._size, self._number = data, size, number
        self._search, self._sums, self._places = SEARCH_BYTES, SUM_BYTES, MOST_PLACES

    def damage(self, start: int, low: int, anchors: list[Anchor]) -> Damage:
        """Return the damage at ``start``, behind an entry numbered ``low``; ``anchors`` are behind it, in order."""
        stop, length = self._entry(start)[2:]
        low = max(low, self._number - 1, 0)
        bound, known = next((anchor for anchor in anchors if self._is(*anchor)), (self._size, None))
        after, found = start + length, None
        self._places -= 1
        if self._places < 0:  # whoever made this wanted us to be busy
            return Damage(start, stop, self._size, low, None)
        if length > 0 and after <= bound and self._follows(after, low, bound):
            found = after
        if found is None:
            found = self._searched(start + 1, low, bound)
        if found is None and known is not None:
            found = bound
        if found is None or found >= self._size:
            return Damage(start, stop, self._size, low, None)
        return Damage(start, stop, found, low, self._entry(found)[0])

    # --- One entry

    def _entry(self, at: int) -> tuple[int, int, EntryStop, int]:
        """Return (number, length, why it is none, the length its head names or 0) of what is at ``at``."""
        view, offset = self._data.window(at, WINDOW_BYTES)
        rest = self._size - at
        if rest < ENTRY_OVERHEAD or len(view) - offset < HEAD.size:
            return 0, 0, EntryStop.SHORT, 0
        seq, _, sender, payload = HEAD.unpack_from(view, offset)
        length = ENTRY_OVERHEAD + sender + payload
        if length > rest:
            return seq, 0, EntryStop.SHORT, 0
        if length > self._sums:
            return seq, 0, EntryStop.BAD_CRC, length
        self._sums -= length
        if length > len(view) - offset:
            view, offset = self._data.window(at, length)
        count, _, reason, _ = kernel.messagelog.scan(view, offset, 0, False, np.empty((6, 1), np.int64))
        return (seq, length, EntryStop.LIMIT, length) if count else (seq, 0, EntryStop(reason), length)

    def _is(self, offset: int, seq: int) -> bool:
        if not 0 <= offset <= self._size - ENTRY_OVERHEAD:
            return False
        found, length, _, _ = self._entry(offset)
        return length > 0 and found == seq

    # --- The next one

    def _searched(self, at: int, low: int, bound: int) -> int | None:
        """Return the first offset before ``bound`` where an entry begins that fits, or None."""
        while at < bound and self._search > 0 and self._sums > 0:
            view, offset = self._data.window(at, WINDOW_BYTES)
            # a window of a sealed segment is all of it, and may be a hole of a terabyte
            end = min(len(view), offset + min(bound - at, self._search + WINDOW_BYTES))
            found, spent = kernel.messagelog.find_entry(
                memoryview(view)[:end], offset, low, min(low + NEAR, MAX_SEQ), self._sums
            )
            self._sums -= spent
            if found == -2:
                return None
            if found == -1:
                self._search -= end - offset
                if at + end - offset >= bound:
                    return None
                at = max(at + end - offset - ENTRY_OVERHEAD - 65_536, at + 1)  # one may begin in here and reach on
                continue
            self._search -= found - offset + 1
            candidate = at + found - offset
            stopped = self._chain(candidate, low, bound)
            if stopped is None:
                return candidate
            at = max(stopped, candidate + 1)
        return None

    def _follows(self, at: int, low: int, bound: int) -> bool:
        """Whether the next entry begins at ``at``, where the length of a damaged one leads."""
        if at == bound:
            return True
        seq, length, _, _ = self._entry(at)
        return length > 0 and low < seq <= low + NEAR and self._chain(at, low, bound) is None

    def _chain(self, at: int, low: int, bound: int) -> int | None:
        """Return None if the entries from ``at`` on lead to ``bound`` or to a damaged one, else where they stop."""
        last = low
        while at < bound:
            view, offset = self._data.window(at, WINDOW_BYTES)
            part = memoryview(view)[offset : min(len(view), offset + bound - at)]
            end, _, count, _, seq, highest, unordered, *_ = kernel.messagelog.walk(part, 0, NO_INDEX)
            self._sums -= end
            if unordered or (count and seq <= last):
                return at + end
            if count:
                last = highest
            at += end
            if at >= bound:
                return None
            if end and end < len(part) and at + WINDOW_BYTES < self._size and count:
                continue  # it may only reach past the window: looked at once more, from its own beginning
            found, length, stop, named = self._entry(at)
            if length:  # longer than a window, and whole
                if found <= last:
                    return at
                last, at = found, at + length
                continue
            return None if self._is_damaged_entry(at, found, last, stop, named) else at
        return None

    def _is_damaged_entry(self, at: int, seq: int, last: int, stop: EntryStop, named: int) -> bool:
        if self._size - at < ENTRY_OVERHEAD or not last < seq <= last + NEAR:
            return False
        view, offset = self._data.window(at, HEAD.size)
        return HEAD.unpack_from(view, offset)[2] <= MAX_SENDER_BYTES and (named > 0 or stop is EntryStop.SHORT)


def describe(path: str, damage: Damage, following: int | None) -> Problem:
    """Say what is damaged, and what is missing for it; ``following`` is the number of the next segment, if any.

    >>> describe("1.log", Damage(126, EntryStop.BAD_CRC, 378, 1, 4), None).reason
    'damaged: the checksum of an entry does not match; 2 to 3 are missing; the next intact entry is at byte 378'
    """
    what = "the checksum of an entry does not match" if damage.stop is EntryStop.BAD_CRC else "an entry is cut short"
    bound = following if damage.high is None else damage.high
    missing = f"what follows {damage.low} is missing" if bound is None else numbers_missing(damage.low + 1, bound - 1)
    goes_on = "" if damage.high is None else f"; the next intact entry is at byte {damage.resume}"
    return Problem(path, damage.start, f"damaged: {what}; {missing}{goes_on}")


def numbers_missing(first: int, last: int) -> str:
    """Say which numbers are missing.

    >>> numbers_missing(2, 3), numbers_missing(2, 2), numbers_missing(2, 1)
    ('2 to 3 are missing', '2 is missing', 'no number is missing')
    """
    if last < first:
        return "no number is missing"
    return f"{first} is missing" if last == first else f"{first} to {last} are missing"


def mark_ahead(path: str, mark: int, last: int) -> Problem:
    """Say that a log lost entries which its durable mark at ``path`` knows of.

    >>> mark_ahead("penstock-mark", 43, 40).reason
    'everything below 43 was synced, but the log ends with 40: it was cut, or its files are older than the mark'
    """
    reason = f"everything below {mark} was synced, but the log ends with {last}"
    return Problem(path, 16, f"{reason}: it was cut, or its files are older than the mark")
