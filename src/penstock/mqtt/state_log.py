"""The journal of a broker on disk: turns in segments, each a frame, each frame one write.

    journal/<20 digits>.turns      generations; the start of a later one is the end of those before it

    segment := header frame*
    header  := "PMQT" version:u16=1 zero:u16 start:u64 own_ns:i64 monotonic_ns:i64 boot:16 zero:12 crc32:u32  (64 bytes)
    frame   := "TURN" changes_len:u32 data_len:u64 position:u64 own_ns:i64 crc32:u32 changes data             (36 + …)

little-endian.  A position counts bytes of frames since the journal was made; ``start`` is that of the first frame.
crc32 (zlib's) covers the 32 bytes before it and the changes; each message among the changes has one for its data.
``own_ns`` is the broker's own clock (state_time.py).  What stands in changes is said in state_changes.py.

No segment is ever cut or written to by a later process: each start of the broker begins a new one where the good frames
end.  So a torn tail needs no repair, and whoever holds a file open reads what was there.  What stands behind the start
of a later segment was never taken, and is never read: that later segment stays as long as the file with such a tail.
A sync that failed is not trusted again: what it was to make durable is written anew into a new segment that takes the
place of its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

from penstock.disk import Disk, save_atomically, view_of
from penstock.disk.aside import keep_bytes, move_aside
from penstock.disk.doors import refuse_foreign
from penstock.disk.face import File, ReadFile
from penstock.disk.failpoint import fail_point
from penstock.errors import CorruptionError, UnsupportedError
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

__all__ = ["TurnFrame", "TurnFile", "StateLog"]

_log = logging.getLogger(__name__)

MAGIC: Final = b"PMQT"
VERSION: Final = 1
HEAD: Final = struct.Struct("<4sHHQqq16s8xI")
HEAD_BYTES: Final = HEAD.size + 4
TURN: Final = b"TURN"
FRAME: Final = struct.Struct("<4sIQQq")
FRAME_BYTES: Final = FRAME.size + 4
NAME: Final = re.compile(r"(\d{20})\.turns", re.ASCII)
BLOCK_BYTES: Final = 256 << 10
"""How much of a segment is read at once when messages are loaded one after the other."""


class TurnFrame:
    """One turn in a segment."""

    __slots__ = ("changes", "data_at", "data_len", "end", "own_ns", "position", "segment")

    def __init__(
        self, segment: TurnFile, position: int, own_ns: int, changes: bytes, data_at: int, data_len: int
    ) -> None:
        self.segment, self.position, self.own_ns, self.changes = segment, position, own_ns, changes
        self.data_at, self.data_len = data_at, data_len
        self.end = position + FRAME_BYTES + len(changes) + data_len

    def data(self) -> bytes:
        """Return the data of its messages.  The segment is not told of it: it may turn out not to end with this one."""
        return self.segment.file.read_at(self.data_at - self.segment.start + HEAD_BYTES, self.data_len)


class TurnFile:
    """One file of turns.  It is there as long as something refers to it; then its file may go."""

    __slots__ = ("__weakref__", "_block", "_block_at", "boot", "end", "file", "generation", "instead", "monotonic_ns",
                 "needs", "own_ns", "path", "start")  # fmt: skip

    def __init__(
        self, path: str, generation: int, file: ReadFile, start: int, own_ns: int, monotonic_ns: int, boot: bytes
    ) -> None:
        self.path, self.generation, self.file = path, generation, file
        self.start = self.end = start
        self.own_ns, self.monotonic_ns, self.boot = own_ns, monotonic_ns, boot
        self.instead: TurnFile | None = None
        """What has the bytes from its start on, after a sync of this one failed."""
        self.needs: list[TurnFile] = []
        """Those that say what lists in its first frames mean: it took over in the middle of them."""
        self._block, self._block_at = b"", 0

    def read(self, position: int, length: int) -> bytes:
        """Return bytes by their position; a block is kept for who asks for the next ones."""
        if self.instead is not None and position >= self.instead.start:
            return self.instead.read(position, length)
        at = position - self._block_at
        if at >= 0 and at + length <= len(self._block):
            return self._block[at : at + length]
        offset = position - self.start + HEAD_BYTES
        if length >= BLOCK_BYTES // 2:
            return self.file.read_at(offset, length)
        self._block, self._block_at = self.file.read_at(offset, min(BLOCK_BYTES, self.end - position)), position
        return self._block[:length]

    def bytes_until(self, position: int) -> int:
        """Return how much of the file holds frames before a position."""
        return HEAD_BYTES + max(0, min(self.end, position) - self.start)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.file.close()


class StateLog:
    """The segments of one broker; appended to by the loop, synced by the group commit.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> log = StateLog(disk, "journal")
    >>> log.begin(0, own_ns=0, monotonic_ns=0)
    >>> log.append([b"one"], [], 5); log.append([b"two"], [b"payload"], 6); log.close()
    0
    39
    >>> [(frame.position, frame.changes) for frame in StateLog(disk, "journal").frames()]
    [(0, b'one'), (39, b'two')]
    """

    def __init__(self, disk: Disk, folder: str, *, device: bool = True) -> None:
        """Open what is there; without ``device`` nothing is ever synced."""
        self.disk, self.folder, self._device = disk, folder, device
        refuse_foreign(disk, folder, "journal of a broker")
        disk.make_folder(folder)
        self._sidecar = Sidecar(disk, os.path.join(folder, "penstock-"))
        self._held = self._sidecar.lock(of=folder)
        self._mutex = threading.Lock()
        self._active: TurnFile | None = None
        self._file: File
        self._dirty: list[TurnFile] = []
        self._names = self._synced_names = 0  # how many files were made, and how many of them the folder is sure of
        self._generation = 0
        self._old: list[tuple[int, str, weakref.ref[TurnFile]]] = []
        self._free: list[tuple[str, int]] = []
        self._found: list[tuple[int, int, int]] = []  # generation, start and end of each file, its tail included
        self._bounds: dict[int, int] = {}  # which segment, by generation, says where another one ends
        self.segments: list[TurnFile] = []
        """Those whose changes are not all in the store yet, oldest first."""
        self.end = self.synced = 0
        self.written = 0
        """Bytes of frames written by this process."""
        self.failed: BaseException | None = None
        self.problems: list[Problem] = []
        """What opening found damaged, and what was done about it."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # --- Opening

    def _open(self) -> None:
        for name in self.disk.list(self.folder):
            match = NAME.fullmatch(name)
            if match is None:
                continue
            path = os.path.join(self.folder, name)
            self._generation = max(self._generation, int(match[1]))
            segment = self._segment(path, int(match[1]))
            if segment is not None:
                self.segments.append(segment)
                size = segment.file.stat().size
                self._found.append((segment.generation, segment.start, segment.start + size - HEAD_BYTES))

    def _segment(self, path: str, generation: int) -> TurnFile | None:
        file = self.disk.open(path)
        data = file.read_at(0, HEAD_BYTES)
        good = len(data) == HEAD_BYTES and zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
        if not good:
            file.close()
            if any(data) and file_size(self.disk, path) > HEAD_BYTES:
                self._set_aside(path, 0, "the header of a segment is damaged")
            else:
                self.disk.remove(path)  # its making was cut short: nothing was in it
            return None
        magic, version, _, start, own_ns, monotonic_ns, boot, _ = HEAD.unpack(data[: HEAD.size])
        if magic != MAGIC or version != VERSION:
            file.close()
            raise UnsupportedError(f"{path}: a journal of version {version} is not read by this release")
        return TurnFile(path, generation, file, start, own_ns, monotonic_ns, boot)

    def last_time(self) -> tuple[int, TurnFile] | None:
        """Return the own time of the last frame and the segment that was begun last, None where there is none."""
        if not self.segments:
            return None
        newest = self.segments[-1]
        for segment in reversed(self.segments):
            last = segment.own_ns
            for frame in self._frames(segment, None, None, None, aside=False):
                last = frame.own_ns
            if last > segment.own_ns:
                return last, newest
        return newest.own_ns, newest

    def frames(self, check: Callable[[TurnFrame], bool] | None = None) -> Iterator[TurnFrame]:
        """Yield the good frames in order; ``check`` looks at the data of those that a power cut may have torn."""
        lost_at = self._sidecar.lost_power_at()
        previous, last, joined, broken = None, 0, True, False
        for number, segment in enumerate(self.segments):
            limit = min((later.start for later in self.segments[number + 1 :]), default=None)
            joined, last = joined and last == segment.generation - 1, segment.generation
            if limit is not None and segment.start >= limit:
                continue  # a later one begins before it: nothing here was taken when that was made
            if previous is not None and joined and previous.end < segment.start:  # else what lacks was removed
                if lost_at is not None and lost_at <= previous.end:
                    broken = True  # power was lost with what was before it
                else:
                    lacks = segment.start - previous.end
                    self._set_aside_rest(previous, f"{lacks} bytes from here on are damaged or missing")
            if broken:
                continue
            if previous is not None and previous.start + previous.file.stat().size - HEAD_BYTES > segment.start:
                segment.needs = [previous, *previous.needs]
            yield from self._frames(segment, limit, lost_at, check)
            self.end, previous, joined = max(self.end, segment.end), segment, True
        found = self._sidecar.mark.read()
        if found is not None and found[1] > self.end and self.segments:
            segment = self.segments[-1]
            self._set_aside_rest(segment, f"it ends here, but {found[1] - self.end} more bytes had been synced")

    def _frames(
        self,
        segment: TurnFile,
        limit: int | None,
        lost_at: int | None,
        check: Callable[[TurnFrame], bool] | None,
        *,
        aside: bool = True,
    ) -> Iterator[TurnFrame]:
        size = segment.file.stat().size
        view = memoryview(view_of(segment.file, 0, size))
        at = HEAD_BYTES
        while at < size:
            position = segment.start + at - HEAD_BYTES
            if limit is not None and position >= limit:
                return
            frame = _frame_at(segment, view, at, size)
            torn = lost_at is not None and position >= lost_at
            if frame is not None and (not torn or check is None or check(frame)):
                yield frame
                at += frame.end - frame.position
                segment.end = frame.end
                continue
            found = -1 if torn or not aside else _next_frame(segment, view, at + 1, size)
            if found < 0:
                if limit is None and not torn and aside and not _begun(segment, view, at, size):
                    self._set_aside_rest(segment, f"{size - at} bytes are damaged")
                return  # else a torn tail: what was not finished was not acknowledged
            self._set_aside_bytes(segment, at, found)
            at = found

    def _set_aside(self, path: str, byte: int, reason: str) -> None:
        aside = move_aside(self.disk, path)
        self._note(Problem(path, byte, f"{reason}; it is kept as {aside}"))

    def _set_aside_bytes(self, segment: TurnFile, byte: int, end: int) -> None:
        aside = keep_bytes(self.disk, f"{segment.path}.{byte}", segment.file, byte, end)
        self._note(Problem(segment.path, byte, f"{end - byte} bytes are damaged; they are kept as {aside}"))

    def _set_aside_rest(self, segment: TurnFile, reason: str) -> None:
        """Keep what stands behind the last good frame of a segment: nobody will read it there."""
        byte = segment.end - segment.start + HEAD_BYTES
        names = set(self.disk.list(self.folder))
        aside = keep_bytes(self.disk, f"{segment.path}.{byte}", segment.file, byte)
        if os.path.basename(aside) in names:
            return  # it is said already
        self._note(Problem(segment.path, byte, f"{reason}; what is there is kept as {aside}"))

    def set_aside_messages(self, segment: TurnFile, position: int, length: int, reason: str) -> None:
        """Keep the bytes of messages that turned out to be damaged: their segment will go."""
        byte = position - segment.start + HEAD_BYTES
        with contextlib.suppress(OSError):
            save_atomically(self.disk, f"{segment.path}.{byte}.bad", segment.read(position, length))
        self._note(Problem(segment.path, byte, reason))

    def _note(self, problem: Problem) -> None:
        _log.error("%s", problem)
        self.problems.append(problem)

    # --- Writing

    def begin(self, start: int, *, own_ns: int, monotonic_ns: int) -> None:
        """Begin a segment that takes the next frames, at ``start`` or behind everything there is."""
        if self._active is None:
            self._settle()
        segment, file = self._create(max(start, self.end), own_ns, monotonic_ns)
        if self._active is None:
            self._bounds, self._found = _bounds([*self._found, (segment.generation, segment.start, segment.start)]), []
        with self._mutex:
            first, self._active, self._file = self._active is None, segment, file
            if self._device:
                self._dirty.append(segment)
            self._names += 1
            if first:
                self.synced = segment.start
            self.segments.append(segment)
            self.end = segment.start

    def _settle(self) -> None:
        """Sync what a process of this boot wrote and did not come to sync: from here on it counts as durable."""
        if not self._device or self._sidecar.lost_power_at() is not None:
            return  # what a power cut has left is on the device
        mark = self._sidecar.durable_position() or 0
        for segment in self.alive():
            if segment.end > max(mark, segment.start):
                with self.disk.modify(segment.path) as file:
                    file.sync()

    def _create(self, start: int, own_ns: int, monotonic_ns: int, data: bytes = b"") -> tuple[TurnFile, File]:
        """Make a segment.  One with ``data`` takes the place of others: it counts when all of that is on disk."""
        generation = self._generation + 1
        path = os.path.join(self.folder, f"{generation:020}.turns")
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(path)  # of an attempt that failed
        file = self.disk.create(path)
        fail_point("mqtt.segment.created")
        boot = self.disk.boot_id()
        head = HEAD.pack(MAGIC, VERSION, 0, start, own_ns, monotonic_ns, boot, 0)
        try:
            if data:
                file.write_at(HEAD_BYTES, data)
                file.sync()
                fail_point("mqtt.renew.copied")
            file.write_at(0, head + zlib.crc32(head).to_bytes(4, "little"))
            if data:
                fail_point("mqtt.renew.headed")
                file.sync()
                self.disk.sync_folder(self.folder)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                self.disk.remove(path)
            raise
        fail_point("mqtt.segment.headed")
        self._generation = generation
        return TurnFile(path, generation, file, start, own_ns, monotonic_ns, boot), file

    def append(self, changes: Sequence[bytes], data: Sequence[bytes | memoryview], own_ns: int) -> int:
        """Write one turn in one call; return its position.  What fails may be tried again."""
        if self.failed is not None:
            raise OSError(str(self.failed))
        segment = self._active
        assert segment is not None
        joined = b"".join(changes)
        size = sum(map(len, data))
        head = FRAME.pack(TURN, len(joined), size, self.end, own_ns)
        crc = zlib.crc32(joined, zlib.crc32(head)).to_bytes(4, "little")
        offset = self.end - segment.start + HEAD_BYTES
        fail_point("mqtt.turn.before")
        self._file.write_many_at(offset, [head + crc + joined, *data])
        fail_point("mqtt.turn.after")
        position = self.end
        with self._mutex:
            self.end = segment.end = position + FRAME_BYTES + len(joined) + size
        self.written += FRAME_BYTES + len(joined) + size
        return position

    @staticmethod
    def changes_position(position: int) -> int:
        """Return where the changes of a frame begin."""
        return position + FRAME_BYTES

    def sync(self) -> int:
        """Have everything appended so far survive a power cut; return up to where.  For the group commit."""
        with self._mutex:
            if self.failed is not None:
                raise OSError(str(self.failed))
            dirty, end, names = list(self._dirty), self.end, self._names
        try:
            fail_point("mqtt.sync.before")
            for segment in dirty:
                segment.file.sync()  # type: ignore[attr-defined]
            fail_point("mqtt.sync.between")
            if names != self._synced_names:
                self.disk.sync_folder(self.folder)
        except OSError as exc:
            self.failed = exc
            raise
        fail_point("mqtt.sync.after")
        with self._mutex:
            self._dirty = [each for each in self._dirty if each not in dirty or each is self._active or each.end > end]
            self._synced_names = names
            self.synced = end
        with contextlib.suppress(OSError):
            self._sidecar.mark.write(self.disk.boot_id(), end, sync=False)
        return end

    def renew(self, own_ns: int, monotonic_ns: int) -> None:
        """After a sync that failed: write again what it was to make durable, into a new segment, and sync that."""
        if self.failed is None:
            return
        start, end = self.synced, self.end
        pieces = []
        for segment in self._dirty:
            low, high = max(start, segment.start), segment.end
            if low < high:
                pieces.append(segment.read(low, high - low))
        data = b"".join(pieces)
        if len(data) != end - start or not _whole(data, start):
            raise CorruptionError(self.folder, start, "what a failed sync left behind cannot be read back")
        new, file = self._create(start, own_ns, monotonic_ns, data)
        new.end = end
        new.needs = [each for segment in self._dirty for each in (segment, *segment.needs)]
        with self._mutex:
            for segment in self._dirty:
                segment.instead, segment._block = new, b""
            self._dirty, self._active, self._file = [new], new, file
            self.segments.append(new)
            self.synced, self.failed = end, None

    def mark(self) -> None:
        """Note that this boot begins here: what a power cut of it takes lies behind."""
        self._sidecar.write_mark(self.synced)

    # --- Room

    def forget_before(self, position: int) -> None:
        """Take note that the store has every change before this position: segments go when nobody refers to them."""
        keep = []
        for segment in self.segments:
            if segment is not self._active and segment.end <= position and segment not in self._dirty:
                self._old.append((segment.generation, segment.path, weakref.ref(segment)))
            else:
                keep.append(segment)
        self.segments = keep

    def sweep(self) -> None:
        """Look for segments that nobody refers to; called when all that was told is written.

        What freed a segment may not survive a power cut yet, so its file goes with the sweep after that is synced.
        """
        for path, position in list(self._free):
            if position <= self.synced or not self._device:
                fail_point("mqtt.segment.remove")
                with contextlib.suppress(FileNotFoundError):
                    self.disk.remove(path)
                self._free.remove((path, position))
        needed = {self._bounds.get(segment.generation) for segment in self.alive()}
        for each in sorted((each for each in self._old if each[2]() is None), key=itemgetter(0)):
            if each[0] in needed:
                needed.add(self._bounds.get(each[0]))
                continue
            self._old.remove(each)
            self._bounds.pop(each[0], None)
            self._free.append((each[1], self.end))

    def alive(self) -> list[TurnFile]:
        """Return all segments that something refers to, oldest first; while they are held their files stay."""
        old = [segment for each in self._old if (segment := each[2]()) is not None]
        return [*old, *self.segments]

    @property
    def has_old(self) -> bool:
        """Whether there are segments that are needed only as long as something refers to them."""
        return bool(self._old or self._free)

    @property
    def awaits_sync(self) -> bool:
        """Whether files could go if only what freed them were durable."""
        return self._device and any(position > self.synced for _, position in self._free)

    @property
    def files(self) -> int:
        """How many segments there are."""
        return len(self.segments) + len(self._old) + len(self._free)

    def close(self) -> None:
        """Let go of the files and of the lock."""
        self.segments, self._dirty = [], []
        self._active = None
        self._sidecar.close()
        self._held.release()


def _bounds(files: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Return of each file that goes on behind the start of a later one which of those begins first.

    >>> _bounds([(1, 0, 50), (2, 50, 90), (3, 70, 80), (4, 80, 80)])
    {2: 3}
    """
    found, first = {}, (1 << 63, 0)
    for generation, start, end in reversed(files):
        if end > first[0]:
            found[generation] = first[1]
        if start < first[0]:
            first = (start, generation)
    return found


def file_size(disk: Disk, path: str) -> int:
    """Return the size of a file, 0 when there is none."""
    found = disk.stat(path)
    return 0 if found is None else found.size


def _frame_at(segment: TurnFile, view: Any, at: int, size: int) -> TurnFrame | None:
    if at + FRAME_BYTES > size:
        return None
    magic, changes_len, data_len, position, own_ns = FRAME.unpack_from(view, at)
    start = at + FRAME_BYTES
    if magic != TURN or position != segment.start + at - HEAD_BYTES or start + changes_len + data_len > size:
        return None
    changes = bytes(view[start : start + changes_len])
    crc = zlib.crc32(changes, zlib.crc32(view[at : at + FRAME.size]))
    if crc != int.from_bytes(view[at + FRAME.size : start], "little"):
        return None
    return TurnFrame(segment, position, own_ns, changes, position + FRAME_BYTES + changes_len, data_len)


def _begun(segment: TurnFile, view: Any, at: int, size: int) -> bool:
    """Whether these bytes are the first ones of a frame, as a process that is killed while it writes leaves them."""
    if size - at < FRAME_BYTES:
        return TURN.startswith(bytes(view[at : min(size, at + len(TURN))]))
    magic, changes_len, data_len, position, _ = FRAME.unpack_from(view, at)
    whole = at + FRAME_BYTES + changes_len + data_len
    return bool(magic == TURN and position == segment.start + at - HEAD_BYTES and whole > size)


def _next_frame(segment: TurnFile, view: Any, at: int, size: int) -> int:
    """Return where the next good frame begins, or -1."""
    while at < size:
        block = bytes(view[at : at + (1 << 20) + 3])
        found = block.find(TURN)
        while found >= 0:
            if _frame_at(segment, view, at + found, size) is not None:
                return at + found
            found = block.find(TURN, found + 1)
        at += 1 << 20
    return -1


def _whole(data: bytes, start: int) -> bool:
    """Whether these bytes are frames, one after the other, that begin at a position."""
    at = 0
    while at < len(data):
        if at + FRAME_BYTES > len(data):
            return False
        magic, changes_len, data_len, position, _ = FRAME.unpack_from(data, at)
        body = at + FRAME_BYTES
        crc = zlib.crc32(data[body : body + changes_len], zlib.crc32(data[at : at + FRAME.size]))
        stored = int.from_bytes(data[at + FRAME.size : body], "little")
        if magic != TURN or position != start + at or crc != stored:
            return False
        at = body + changes_len + data_len
    return at == len(data)
