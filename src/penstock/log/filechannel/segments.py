"""The segments of a channel: which there are, what their headers say, and their frames as batches.

Folder   lists the segments and keeps what their headers say
Walk     goes over the frames of a channel, from segment to segment
"""

from __future__ import annotations

import bisect
import itertools
import time
from typing import Any, Final

import msgspec
import numpy as np

from penstock import kernel
from penstock.batch import Batch, Spans
from penstock.disk import PosixDisk, ReadDisk, ReadFile
from penstock.errors import CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.filechannel.format import (
    FRAME_HEAD,
    HEADER_BYTES,
    LAST_POSITION,
    FrameStop,
    Header,
    segment_index,
    segment_path,
)
from penstock.log.filechannel.lengths import proven_ends
from penstock.log.filechannel.sources import BELIEVED_BYTES, READ_BYTES, Live, Mapped, OpenSegment, Packed
from penstock.types import Problem

__all__ = ["Folder", "Walk", "Files"]

SEGMENT: Final = "segment."
SPAN_BYTES: Final = 1 << 30  # a batch stays within what Arrow can address
SECOND_LOOK_SECONDS: Final = 0.001
LARGEST_UNPACKED: Final = 256 << 20
"""The longest message that is unpacked: a small file can claim, and unpack to, a thousand times its size."""
PROVEN_BYTES: Final = 64 << 20
"""How far the end of a message whose length is wrong is looked for."""
GLANCE_BYTES: Final = 1 << 20
"""The same, where it may only be a message that is being written."""
LISTING_SHARE: Final = 20
LISTING_SECONDS: Final = 1.0
"""How long a listing will do: so many times as long as it took, and no longer than this."""


class Files(msgspec.Struct):
    """Which files an index has."""

    index: int
    plain: bool = False
    packed: bool = False
    packing: bool = False


class Folder:
    """The segments of one channel, by index.  Safe to use from several threads."""

    def __init__(self, disk: ReadDisk, path: str) -> None:
        self.disk, self.path = disk, path
        self._begins: dict[int, int] = {}
        self._false: dict[int, str] = {}  # oldest segments whose begin cannot be, and why
        self._listed: tuple[list[int], object] = ([], None)  # what was listed last, and what the folder was before that
        self._until = 0.0  # until when that will do, where nothing tells otherwise
        self._oldest = -1  # where first_position found nothing odd

    def files(self) -> dict[int, Files]:
        """Return what is there by index, lowest first; leftovers of a compression do not count."""
        found: dict[int, Files] = {}
        before, began = self._state(), time.monotonic()
        try:
            names = self.disk.list(self.path)
        except FileNotFoundError:
            raise ReplacedError(self.path, "its folder is gone") from None
        for name in itertools.islice(names, bisect.bisect_left(names, SEGMENT), None):  # cursors may be thousands
            if not name.startswith(SEGMENT):
                break
            parsed = segment_index(name)
            if parsed is None:
                continue
            index, suffix = parsed
            files = found.setdefault(index, Files(index))
            files.plain |= suffix == ""
            files.packed |= suffix == ".z"
            files.packing |= suffix == ".z.ing"
        there = {index: found[index] for index in sorted(found) if found[index].plain or found[index].packed}
        now = time.monotonic()
        self._listed, self._until = (list(there), before), now + min(LISTING_SHARE * (now - began), LISTING_SECONDS)
        return there

    def indexes(self) -> list[int]:
        """Return which segments there are, lowest first; the newest may be missing.

        A folder of many segments or cursors is not listed again while its time says that it is as it was; nor for
        twenty times as long as that took, while its newest segment is there and the one behind it is not: cursors,
        locks and journals come and go.
        """
        indexes, state = self._listed
        if state is not None and (state == self._state() or self._was_listed_just_now()):
            return indexes
        return list(self.files())

    def _was_listed_just_now(self) -> bool:
        newest = self._listed[0][-1] if self._listed[0] else -1
        return time.monotonic() < self._until and self._is_there(newest) and not self._is_there(newest + 1)

    def holding(self, position: int) -> int | None:
        """Return the segment that holds a position, or the newest when that is behind its end; None below the first.

        Two neighbours that were there tell that the first holds what lies between them, without another listing.
        """
        known = self._listed[0]
        place = self.locate(known, position)
        if place is None or place + 1 >= len(known) or known[place + 1] != known[place] + 1 or self._false:
            known = self.indexes()
            place = self.locate(known, position)
        return None if place is None else known[place]

    def open(self, index: int) -> tuple[ReadFile, Header]:
        """Open a segment, plain first: a compression renames before it unlinks, so one of the two is there."""
        for suffix in ("", ".z", ""):
            path = segment_path(self.path, index, suffix)
            try:
                file = self.disk.open(path)
            except FileNotFoundError:
                continue
            try:
                header = Header.decode(path, file.read_at(0, HEADER_BYTES), packed=suffix == ".z")
                if header.index != index:
                    if not suffix and self.disk.stat(path + ".z") is not None:
                        file.close()
                        continue  # a leftover of something else: the compressed one counts
                    raise header.misplaced(path)
            except BaseException:
                file.close()
                raise
            if not suffix:
                file, header = self._choose(index, file, header)
            self._begins[index] = header.begin
            return file, header
        raise FileNotFoundError(segment_path(self.path, index))

    def _choose(self, index: int, plain: ReadFile, header: Header) -> tuple[ReadFile, Header]:
        """Return the plain file, unless a .z beside it says that it is a leftover of something else."""
        path = segment_path(self.path, index, ".z")
        if self.disk.stat(path) is None:
            return plain, header
        try:
            packed = self.disk.open(path)
            found = Header.decode(path, packed.read_at(0, HEADER_BYTES), packed=True)
        except (FileNotFoundError, CorruptionError):
            return plain, header
        if (found.begin, found.end) == (header.begin, header.begin + plain.stat().size - HEADER_BYTES):
            packed.close()
            return plain, header
        plain.close()
        return packed, found

    def begin(self, index: int) -> int | None:
        """Return where a segment begins; None when its header cannot be read or it is gone."""
        known = self._begins.get(index)
        if index in self._false:
            return None
        if known is None:
            try:
                file, header = self.open(index)
            except (CorruptionError, FileNotFoundError):
                return None
            file.close()
            known = header.begin
        return known

    def forget(self, index: int | None = None) -> None:
        """Forget what the header of a segment, or of all, said."""
        self._false.clear()
        self._oldest = -1
        if index is None:
            self._begins.clear()
            self._listed = [], None
        else:
            self._begins.pop(index, None)

    def look_again(self) -> None:
        """Find out which segments there are, and forget the others: one that was known is gone."""
        self._oldest, files = -1, self.files()
        self._begins = {index: begin for index, begin in list(self._begins.items()) if index in files}

    def first_position(self) -> int:
        """Return where the oldest segment begins; 0 for a channel without any.

        Of one whose header cannot be read this is a guess, below where the next one begins: reading there says so.
        """
        oldest = self._oldest
        if oldest >= 0 and self._is_there(oldest) and not self._is_there(oldest - 1):
            begin = self._begins.get(oldest)
            if begin is not None:
                return begin
        self._oldest, lost, indexes = -1, 0, list(self.files())
        for place, index in enumerate(indexes):
            begin = self.begin(index)
            following = self.begin(indexes[place + 1]) if place + 1 < len(indexes) else None
            if begin is not None and following is not None and begin > following:
                self._false[index] = f"the segment begins at {begin}, but the next one at {following}"
                begin = None
            if begin is not None:
                if not place and isinstance(self.disk, PosixDisk):
                    self._oldest = index
                return max(0, begin - lost)
            if self.header_problem(index) is not None:
                found = self.disk.stat(segment_path(self.path, index))
                lost += max(1, 0 if found is None else found.size - HEADER_BYTES)
                lost = 1 << 63 if index == 0 else lost  # a channel begins with position 0
        return 0

    def _state(self) -> object:
        """Return what changes with the names in the folder; None where nothing tells."""
        found = self.disk.stat(self.path) if isinstance(self.disk, PosixDisk) else None
        return None if found is None else (found.identity, found.modified_ns)

    def _is_there(self, index: int) -> bool:
        return any(self.disk.stat(segment_path(self.path, index, suffix)) is not None for suffix in ("", ".z"))

    def header_problem(self, index: int) -> CorruptionError | None:
        """Return what is wrong with the header of a segment; None where it is sound, or gone."""
        if index in self._false:
            return CorruptionError(segment_path(self.path, index), 4, self._false[index])
        try:
            self.open(index)[0].close()
        except CorruptionError as exc:
            return exc
        except FileNotFoundError:
            pass  # collected, since it was listed
        return None

    def damaged_first(self) -> CorruptionError | None:
        """Return what is wrong with the oldest segment, where a later one shows that it had messages."""
        found: CorruptionError | None = None
        for index in self.files():
            if self.begin(index) is not None:
                return found
            found = found or self.header_problem(index)
        return None

    def newest_bound(self) -> tuple[int, int] | None:
        """Return where the newest readable segment begins and its file ends; None when it is compressed."""
        for index in reversed(list(self.files())):
            try:
                file, header = self.open(index)
            except (CorruptionError, FileNotFoundError):
                continue
            with file:
                size = file.stat().size - HEADER_BYTES
            return None if header.end is not None else (header.begin, header.begin + size)
        return None

    def locate(self, indexes: list[int], position: int) -> int | None:
        """Return the place in ``indexes`` of the segment that holds a position; None below the first."""
        low, high = 0, len(indexes)  # everything before low begins at or below position
        while low < high:
            middle = probe = (low + high) // 2
            while probe < high and self.begin(indexes[probe]) is None:
                probe += 1
            if probe == high:
                high = middle
            elif (self.begin(indexes[probe]) or 0) <= position:
                low = probe + 1
            else:
                high = middle
        place = low - 1
        while place >= 0 and self.begin(indexes[place]) is None:
            place -= 1
        return place if place >= 0 else None


class Walk:
    """A walk over the frames of a channel.  One thread at a time.

    It stands in one open segment.  ``read`` meets four kinds of ends: more is not there yet, the segment is done
    (go on in the next), the position has expired, or the bytes are damaged: CorruptionError, and the walk
    stays where it is until ``skip_damage``.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._index = -1
        self._source: OpenSegment | None = None
        self._next: tuple[int, int] | None = None  # index and begin of the segment behind this one
        self._scratch: tuple[np.ndarray, ...] = ()
        self._judged = (-1, -1, False)  # position, size of the newest segment, whether the length there is wrong

    def read(self, position: int, limit: int, bound: int | None = None, want: int = READ_BYTES) -> Batch:
        """Return records from ``position`` on, at most ``limit``, none at or past ``bound`` (when it is known)."""
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        if position >= LAST_POSITION:
            if position > LAST_POSITION:
                raise OptionsError(f"{self.folder.path}: position {position}: must be below 2^63")
            return _nothing(position)  # no message can begin there
        if bound is not None and position >= bound:
            return _nothing(position)
        try:
            return self._read(position, limit, bound, want)
        except FileNotFoundError:  # collected while it was being opened
            self.close()
            self.folder.look_again()
            first = self.folder.first_position()
            if position < first:
                raise ExpiredError(self.folder.path, position, first) from None
            return self._read(position, limit, bound, want)

    def _read(self, position: int, limit: int, bound: int | None, want: int) -> Batch:
        self._stand(position)
        while self._source is not None:
            batch = self._scan(position, limit, bound, want)
            if len(batch):
                return batch
            moved = self._move_on(position, bound)
            if moved is None:
                break
            position = moved
        return _nothing(position)

    def skip_damage(self, position: int, bound: int | None = None) -> tuple[int, Problem] | None:
        """Return where to read on behind damage at ``position``, and what it is; None where there is none.

        A frame that fails its check is stepped over by its length if a whole, non-empty message follows there, else by
        the length that its own checksum proves; otherwise the rest of the segment is.  A search byte by byte might find
        a message inside a message.
        """
        try:
            self.read(position, 1, bound)
        except CorruptionError as exc:
            problem = Problem(exc.file, exc.byte, exc.reason)
        else:
            return None
        after = self._step_over(position, bound)
        if after is None:
            later = (index for index in self.folder.files() if index > self._index)
            begins = (self.folder.begin(index) for index in later if not self._false_begin(index, position))
            after = next((begin for begin in begins if begin is not None and begin > position), bound)
            if after is None and isinstance(self._source, Live):  # the rest of the newest segment
                after = self._source.begin + self._source.size() - HEADER_BYTES
        if after is None or after <= position:
            return None
        return after, problem

    def close(self) -> None:
        """Let go of the open segment."""
        if self._source is not None:
            self._source.close()
        self._source, self._next, self._index = None, None, -1

    # --- How it moves

    def _stand(self, position: int) -> None:
        """Stand in the segment that holds ``position``."""
        if self._source is not None and self._source.begin <= position:
            if self._next is None or position < self._next[1]:
                return
            if position == self._next[1]:
                self._enter(self._next[0])
                return
        self.close()
        index = self.folder.holding(position)
        if index is None:
            if not self.folder.files():
                return
            first = self.folder.first_position()
            if position < first:
                raise ExpiredError(self.folder.path, position, first)
            damaged = self.folder.damaged_first()
            if damaged is not None:
                raise damaged
            return  # no header can be read: there is nothing yet, and verify says why
        self._enter(index)

    def _enter(self, index: int) -> None:
        """Open a segment; it is sealed if a later one is there."""
        self.close()
        following = self._following(index)
        file, header = self.folder.open(index)
        if header.method is not None:
            self._source = Packed(file, header)
        elif following is None:
            self._source = Live(file, header)
        else:
            self._source = Mapped(file, header)
        self._index, self._next = index, following

    def _following(self, index: int) -> tuple[int, int] | None:
        """Return (index, begin) of the next segment whose header can be read."""
        begin = self.folder.begin(index + 1)
        if begin is not None:
            return index + 1, begin
        known = self.folder.indexes()
        for place in range(bisect.bisect_right(known, index), len(known)):
            if (begin := self.folder.begin(known[place])) is not None:
                return known[place], begin
        return None

    def _scan(self, position: int, limit: int, bound: int | None, want: int) -> Batch:
        source = self._source
        assert source is not None
        end = self._end(bound)
        if end is not None and position >= end:
            return _nothing(position)
        buffer, start, size = source.window(position, want, end)
        needed = 0
        if size >= FRAME_HEAD:
            needed = FRAME_HEAD + int.from_bytes(memoryview(buffer)[start : start + 4], "big")
            if needed > size:  # the length is believed only as far as the segment reaches
                buffer, start, size = self._whole(position, needed, end)
        if not size:
            return _nothing(position)
        size = min(size, max(SPAN_BYTES, needed))
        limit = min(limit, size // FRAME_HEAD + 1)  # as many as there can be
        if len(self._scratch) == 0 or len(self._scratch[0]) < limit:
            self._scratch = tuple(np.empty(limit, np.int64) for _ in range(3))
        columns = tuple(column[:limit] for column in self._scratch)
        base = position - start
        count, at, status = kernel.scan_frames(buffer, start, start + size, base, *columns)
        if isinstance(source, Mapped):
            source.check(at)
        if not count:
            self._stuck(position, FrameStop(status), bound)
            return _nothing(position)
        positions, offsets, lengths = (column[:count].copy() for column in columns)
        return Batch(buffer, positions, Spans(offsets, lengths), next_position=base + at)

    def _end(self, bound: int | None) -> int | None:
        """Return where this segment ends, as far as that is known."""
        assert self._source is not None
        following = None if self._next is None else self._next[1]
        return min((end for end in (following, bound, self._source.end) if end is not None), default=None)

    def _whole(self, position: int, needed: int, end: int | None) -> tuple[Any, int, int]:
        """Return a window for a frame larger than the usual one, if the segment can hold it at all."""
        source = self._source
        assert source is not None
        if isinstance(source, Packed) and needed > LARGEST_UNPACKED:
            reason = f"a message of {needed - FRAME_HEAD} bytes; of a compressed segment {LARGEST_UNPACKED} are read"
            raise CorruptionError(source.path, HEADER_BYTES, reason)
        past = end is not None and position + needed > end
        if past or (isinstance(source, Live) and _is_short(source, position, needed)):
            needed = FRAME_HEAD
        return source.window(position, needed, end)

    def _stuck(self, position: int, status: FrameStop, bound: int | None) -> None:
        """Say what is wrong at ``position``, unless it is only not there yet."""
        assert self._source is not None
        live = self._next is None and bound is None and isinstance(self._source, Live)
        if live and status is FrameStop.SHORT and not self._length_is_wrong(position):
            return  # being written, or torn: its writer finishes it or trims it
        if live and status is FrameStop.BAD_CRC:
            time.sleep(SECOND_LOOK_SECONDS)
            buffer, start, size = self._source.window(position, READ_BYTES, None)
            again = tuple(np.empty(1, np.int64) for _ in range(3))
            if kernel.scan_frames(buffer, start, start + size, 0, *again)[2] != FrameStop.BAD_CRC:
                return
        if status is FrameStop.BAD_CRC:
            reason = f"the message at position {position} fails its checksum"
        else:
            reason = f"the message at position {position} is cut short, or its length is wrong"
        raise CorruptionError(self._source.path, self._source.byte_of(position), reason)

    def _move_on(self, position: int, bound: int | None) -> int | None:
        """Go to the next segment: the position to read on at, or None when there is nothing more yet."""
        assert self._source is not None
        if self._next is None:
            self._next = self._following(self._index)
            if self._next is None:
                if bound is not None and position < bound:
                    self._missing(position, bound)
                return None
            if position < self._next[1]:
                return position  # it may have grown between the two looks
        following, begin = self._next
        if position > begin:  # it was entered behind its end
            self._enter(following)
            return position
        if position < begin:
            self._missing(position, begin)
        if following != self._index + 1:
            self._hole(position, following)
        self._enter(following)
        return begin

    def _missing(self, position: int, end: int) -> None:
        """Report that the segment ends before its successor begins."""
        assert self._source is not None
        indexes = list(self.folder.files())
        if indexes and indexes[0] > self._index + 1:
            raise ExpiredError(self.folder.path, position, self.folder.first_position())
        if self._next is not None and self._next[0] != self._index + 1:
            self._hole(position, self._next[0])
        raise CorruptionError(
            self._source.path,
            self._source.byte_of(position),
            f"the segment ends at position {position}, the next one begins at {end}: what was between is lost",
        )

    def _hole(self, position: int, following: int) -> None:
        """Report that segments between this one and ``following`` cannot be read or are not there."""
        files = self.folder.files()
        if files and next(iter(files)) > self._index + 1:
            raise ExpiredError(self.folder.path, position, self.folder.first_position())
        for index in range(self._index + 1, min(following, self._index + 1000)):
            if index not in files:
                path = segment_path(self.folder.path, index)
                raise CorruptionError(path, 0, f"the segment is missing, though segment.{following} is there")
            self.folder.open(index)[0].close()  # raises what is wrong with its header

    def _false_begin(self, index: int, position: int) -> bool:
        """Whether a header contradicts both neighbours: then its messages have no position to be read at."""
        begin, following = self.folder.begin(index), self.folder.begin(index + 1)
        found = self.folder.disk.stat(segment_path(self.folder.path, index))
        if begin is None or following is None or found is None:
            return False
        size = found.size - HEADER_BYTES
        return begin + size != following == position + size

    def _step_over(self, position: int, bound: int | None) -> int | None:
        source = self._source
        if source is None or position < source.begin:
            return None
        end = self._end(bound)
        if end is None and isinstance(source, Live):
            end = source.begin + source.size() - HEADER_BYTES
        try:
            buffer, start, size = source.window(position, FRAME_HEAD, end)
            if size < FRAME_HEAD or end is None:
                return None
            after = position + FRAME_HEAD + int.from_bytes(memoryview(buffer)[start : start + 4], "big")
            if after == end:
                return after
            if after < end and self._message_at(after, bound):
                return after
            for after in proven_ends(source, position, end, PROVEN_BYTES):
                if after == end or self._message_at(after, bound):
                    return after
        except CorruptionError:
            pass
        return None

    def _message_at(self, position: int, bound: int | None) -> bool:
        """Whether a whole, non-empty message begins there."""
        try:
            found = self._scan(position, 1, bound, READ_BYTES)
        except CorruptionError:
            return False
        return len(found) > 0 and int(found.payloads.lengths[0]) > 0

    def _length_is_wrong(self, position: int) -> bool:
        """Whether a message that seems to reach past the newest segment is whole, but for its length."""
        assert isinstance(self._source, Live)
        size = self._source.size()
        if self._judged[:2] != (position, size):
            end = self._source.begin + size - HEADER_BYTES
            proven = any(True for _ in proven_ends(self._source, position, end, GLANCE_BYTES))
            # One that was being written at the first look is proven as well, and by now its length says the same.
            self._judged = position, size, proven and self._is_still_short(position)
        return self._judged[2]

    def _is_still_short(self, position: int) -> bool:
        assert isinstance(self._source, Live)
        buffer, start, size = self._source.window(position, FRAME_HEAD, None)
        if size < FRAME_HEAD:
            return False  # its writer has trimmed it
        length = int.from_bytes(memoryview(buffer)[start : start + 4], "big")
        return _is_short(self._source, position, FRAME_HEAD + length)


def _is_short(source: Live, position: int, needed: int) -> bool:
    """Whether the newest segment has less than the message at ``position`` seems to take."""
    if source.byte_of(position) + needed > source.size():
        return True
    return needed > BELIEVED_BYTES and not source.sums_up(position, needed)


def _nothing(position: int) -> Batch:
    none = np.empty(0, np.int64)
    return Batch(b"", none, Spans(none, none), next_position=position)
