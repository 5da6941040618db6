"""A channel with the common face of logs, read-only: from any process, while its writer works."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.batch import Batch
from penstock.disk import ClosingHandle, Disk, FolderWait, LoopWait, ReadDisk, ReadFile, read_disk_for
from penstock.disk.doors import refuse_other
from penstock.errors import CorruptionError, ExpiredError, NotFoundError, OptionsError, ReplacedError
from penstock.log.damage import DamageMet, check_on_damage
from penstock.log.face import OnDamage
from penstock.log.filechannel.cut import cut
from penstock.log.filechannel.format import HEADER_BYTES, segment_index, segment_path
from penstock.log.filechannel.recover import walk_to_end
from penstock.log.filechannel.room import is_room
from penstock.log.filechannel.segments import Folder, Walk
from penstock.log.filechannel.verify import verify
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

if TYPE_CHECKING:
    from penstock.log.filechannel.channel import FileChannel

__all__ = ["FileChannelLog", "open_reader", "open_writer", "recognise", "end_of", "check_same", "gaps"]


class FileChannelLog(ClosingHandle):
    """A channel, read through the face that all logs have.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> channel = FileChannel.open(folder.name)
    >>> positions = channel.append_many([b"one", b"two"])
    >>> log = FileChannelLog(folder.name)
    >>> log.first_position, log.next_position, log.read(11).to_payloads()
    (0, 22, [b'two'])
    >>> list(log.verify())
    []
    >>> log.close(); channel.close(); folder.cleanup()
    """

    format = "filechannel"
    origin = 0
    has_kinds = False

    def __init__(
        self, path: str | os.PathLike[str], disk: ReadDisk | None = None, *, on_damage: OnDamage = "raise"
    ) -> None:
        super().__init__()
        check_on_damage(on_damage)
        self.path, self.on_damage = os.fspath(path), on_damage
        self._met = DamageMet()
        self._disk = disk or read_disk_for(path)
        self._sidecar = Sidecar(self._disk, self.path + "/penstock-")
        self._folder = Folder(self._disk, self.path)
        self._lock = threading.RLock()
        self._walk = Walk(self._folder)
        self._at = -1
        self._ends: dict[int, int] = {}
        found = self._disk.stat(self.path)
        if found is None or not found.is_folder:
            raise NotFoundError(f"{self.path}: there is no channel here")
        refuse_other(self._disk, self.path, "queue")
        identity = self._sidecar.identity()
        self._log_id = None if identity is None else identity.log_id

    @property
    def first_position(self) -> int:
        """Where the oldest message is, or will be."""
        return self._folder.first_position()

    @property
    def next_position(self) -> int:
        """Behind the newest message that is visible now."""
        return end_of(self._folder, self._ends)

    @property
    def durable_position(self) -> int | None:
        """The durable mark, if its writer keeps one."""
        return self._sidecar.durable_position()

    @property
    def content(self) -> str:
        """``raw``, or ``envelope/1`` if its writer said so."""
        identity = self._sidecar.identity()
        return "raw" if identity is None else identity.content

    @property
    def damage(self) -> list[Problem]:
        """What reading has stepped over so far."""
        return list(self._met.problems)

    @property
    def damage_count(self) -> int:
        """How many places reading has stepped over so far."""
        return self._met.count

    def keeps(self, position: int) -> bool:
        """Whether nothing at or behind ``position`` was removed."""
        return position >= self.first_position

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return whether messages are missing in front of a batch."""
        return gaps(expected, batch)

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return messages from ``position`` on; CorruptionError on damage, unless it is to be stepped over."""
        position = operator.index(position)
        while True:
            try:
                return self._read(position, limit)
            except CorruptionError as exc:
                following = self._step_over(self._walk, position, exc)
                if following is None:
                    return Batch.of([], positions=[], next_position=position)
                position = following

    def _step_over(self, walk: Walk, position: int, exc: CorruptionError) -> int | None:
        """Return where to read on behind damage, which is noted; None when nothing follows it yet."""
        if self.on_damage == "raise":
            raise exc
        with self._lock:
            found = walk.skip_damage(position)
            self._met.add(Problem(exc.file, exc.byte, exc.reason) if found is None else found[1])
            if found is not None:
                self._at = found[0]  # where the walk is to go on
        return None if found is None else found[0]

    def _read(self, position: int, limit: int) -> Batch:
        with self._lock:
            jumped = position != self._at  # reading on needs no look at the folder
            if jumped:
                first = self.first_position
                if position < first:
                    raise ExpiredError(self.path, position, first)
            batch = self._walk.read(position, limit)
            if jumped and not len(batch) and position < self.next_position:
                batch = self._walk.read(position, limit)  # it may have come just now
                if not len(batch):
                    raise OptionsError(f"{self.path}: no message begins at position {position}")
            self._at = batch.next_position
        if not len(batch):
            self._check_same()
        return batch

    def skip_damage(self, position: int) -> tuple[int, Problem] | None:
        """Return where reading goes on behind damage at ``position``, and what it is; None if there is none."""
        with self._lock:
            return self._walk.skip_damage(operator.index(position))

    def tail(
        self,
        position: int | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more."""
        at = self.next_position if position is None else position
        if at < self.first_position:
            raise ExpiredError(self.path, at, self.first_position)
        walk, waiting, since = Walk(self._folder), FolderWait(self._disk, self.path), time.monotonic()
        try:
            while True:
                try:
                    batch = walk.read(at, limit)
                except CorruptionError as exc:
                    following = self._step_over(walk, at, exc)
                    if following is None:
                        raise
                    at = following
                    continue
                at = batch.next_position
                if len(batch):
                    yield batch
                    waiting.reset()
                    since = time.monotonic()
                    continue
                self._check_same()
                remaining = None if timeout is None else since + timeout - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return
                waiting.pause(remaining)
        finally:
            waiting.close()
            walk.close()

    def waiter(self) -> LoopWait:
        """Return what waits for more messages on an event loop: the folder tells of them."""
        return LoopWait(self._disk, self.path)

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``: small segments together, long plain ones cut at messages."""
        return cut(self._folder, start, end, span_bytes)

    def _check_same(self) -> None:
        check_same(self._sidecar, self.path, self._log_id)

    def verify(self) -> Iterator[Problem]:
        """Yield every problem: damage, gaps, and what the next writer will trim."""
        return verify(Folder(self._disk, self.path))

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the channel: reads the newest segment, and headers."""
        files, total = [], 0
        for found in self._folder.files().values():
            suffix = "" if found.plain else ".z"
            path = segment_path(self.path, found.index, suffix)
            stat = self._disk.stat(path)
            size = 0 if stat is None else stat.size
            total += size
            entry: dict[str, Any] = {"file": path, "bytes": size, "begin": self._folder.begin(found.index)}
            if found.plain and found.packed:
                entry["problem"] = "a compressed file is beside it"
            elif entry["begin"] is None:
                entry["problem"] = "its header cannot be read"
            files.append(entry)
        identity, end = self._sidecar.identity(), self.next_position
        cursors = self._sidecar.cursors()
        return {
            "format": self.format,
            "path": self.path,
            "log_id": None if identity is None else identity.log_id,
            "content": self.content,
            "first_position": self.first_position,
            "next_position": end,
            "durable_position": self.durable_position,
            "bytes": total,
            "damage": self.damage,
            "cursors": cursors,
            "receivers": {
                name: {"position": position, "lag_bytes": max(0, end - position)} for name, position in cursors.items()
            },
            "set_aside": [name for name in self._disk.list(self.path) if name.endswith(".bad")],
            "files": files,
        }

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._walk.close()
            self._sidecar.close()

    def forked(self) -> None:
        """Forget the parent's files in the child of a fork; the next read opens its own."""
        self._lock = threading.RLock()
        self._walk = Walk(self._folder)


def end_of(folder: Folder, known: dict[int, int] | None = None) -> int:
    """Return the position behind the last whole message, and behind damage: the newest segment is walked for it.

    ``known`` remembers how far, so that the next walk begins there.
    """
    known = {} if known is None else known
    for index in reversed(list(folder.files())):
        try:
            file, header = folder.open(index)
        except (CorruptionError, FileNotFoundError):
            continue
        with file:
            if header.end is not None:
                return header.end
            size = max(HEADER_BYTES, file.stat().size)
            start = known.get(index, header.begin)
            if not header.begin <= start <= header.begin + size - HEADER_BYTES:
                start = header.begin
            end = walk_to_end(file, header.begin, size, None, start)[0]
            known.clear()
            known[index] = end
            return _behind_damage(folder, file, header.begin, size, end)
    return 0


def _behind_damage(folder: Folder, file: ReadFile, begin: int, size: int, end: int) -> int:
    """Return where a newest segment ends whose messages are whole up to ``end``: damage is no end of it.

    What is being written, or was torn, is one: nothing whole lies behind it.
    """
    reach = begin + size - HEADER_BYTES
    if end >= reach or is_room(file, HEADER_BYTES + end - begin, size):
        return end
    walk = Walk(folder)
    try:
        while end < reach and (found := walk.skip_damage(end)) is not None:
            end = walk_to_end(file, begin, size, None, found[0])[0]
    finally:
        walk.close()
    return min(end, reach)


def check_same(sidecar: Sidecar, path: str, log_id: str | None) -> None:
    """Raise ReplacedError when the channel is no longer the one that had ``log_id``."""
    if log_id is None:
        return
    identity = sidecar.identity()
    if identity is None or identity.log_id != log_id:
        raise ReplacedError(path, "its files are gone" if identity is None else "its log id changed")


def recognise(disk: ReadDisk, path: str) -> bool:
    """Whether ``path`` is a channel: a folder with segments, or one in which only ``lock`` was made so far."""
    found = disk.stat(path)
    if found is None or not found.is_folder:
        return False
    names = disk.list(path)
    own = [name for name in names if not name.startswith("penstock-")]
    return any(segment_index(name) is not None for name in names) or own == ["lock"]


def open_reader(disk: ReadDisk, path: str, on_damage: OnDamage | None = None) -> FileChannelLog:
    """Open a channel with the common face."""
    return FileChannelLog(path, disk, on_damage=on_damage or "raise")


def gaps(expected: int | None, batch: Batch) -> int:
    """Return whether messages are missing in front of a batch: within one, messages touch each other."""
    return int(len(batch) > 0 and expected is not None and int(batch.positions[0]) != expected)


def open_writer(
    disk: Disk,
    path: str,
    content: str = "raw",
    largest_bytes: int | None = None,  # noqa: ARG001
) -> FileChannel:
    """Open a channel for writing with default options, created if it is not there; a frame takes almost 4 GiB."""
    from penstock.log.filechannel.channel import FileChannel
    from penstock.log.filechannel.options import ChannelOptions

    return FileChannel.open(path, ChannelOptions(content=content), disk=disk)
