"""A channel with the common face of logs."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from penstock import kernel
from penstock.batch import Batch
from penstock.disk import Disk, Handle, PosixDisk, ReadDisk
from penstock.errors import CorruptionError, ExpiredError, OptionsError, PenstockError
from penstock.kernel import Cursor
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.files import LOOKS, ChannelFile, discover, problem_at, sidecar_prefix
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    SLOT_BYTES,
    ChannelHeader,
    Stop,
    file_path,
    position_of,
    split_position,
)
from penstock.log.xchannel.reader import Reader
from penstock.log.xchannel.writer import Writer
from penstock.types import Problem

__all__ = ["XChannelLog", "logs_in", "open_reader", "open_writer", "recognise"]

PGSS: Final = b"PGSS"
ROLLED: Final = re.compile(r".+\.[1-9][0-9]*", re.ASCII | re.DOTALL)


class XChannelLog(Handle):
    """A channel, read through the face that all logs have.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = Writer.open(folder.name + "/ticks")
    >>> positions = writer.append_many([b"one", b"two"])
    >>> log = XChannelLog(folder.name + "/ticks")
    >>> log.first_position, log.next_position, log.read(104).to_payloads()
    (80, 128, [b'two'])
    >>> list(log.verify())
    []
    >>> log.close(); writer.close(); folder.cleanup()
    """

    format = "xchannel"
    origin = FIRST_SLOT

    def __init__(self, path: str | os.PathLike[str], disk: ReadDisk | None = None) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self._disk = disk or PosixDisk()
        self._sidecar = Sidecar(self._disk, sidecar_prefix(self.path))
        self._lock = threading.RLock()
        self._reader: Reader | None = None
        self._sequences()

    @property
    def first_position(self) -> int:
        """Where the oldest record is, or will be."""
        return position_of(self._sequences()[0], FIRST_SLOT)

    @property
    def next_position(self) -> int:
        """Behind the newest record that is visible now."""
        with Reader.open(self.path, "live", disk=self._disk) as reader:
            return reader.position

    @property
    def durable_position(self) -> int | None:
        """The durable mark, if its writer keeps one."""
        return self._sidecar.durable_position()

    @property
    def content(self) -> str:
        """``raw``, or ``envelope/1`` if its writer said so."""
        identity = self._sidecar.identity()
        return "raw" if identity is None else identity.content

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return records from ``position`` on."""
        first = self.first_position
        if position < first:
            raise ExpiredError(self.path, position, first)
        with self._lock:
            if self._reader is None:
                self._reader = Reader.open(self.path, position, disk=self._disk)
            elif self._reader.position != position:
                self._reader.seek(position)
            return self._reader.read_batch(limit)

    def tail(
        self,
        position: int | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more."""
        start = "live" if position is None else position
        with Reader.open(self.path, start, disk=self._disk) as reader:  # type: ignore[arg-type]
            yield from reader.batches(limit, timeout)

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``, which begin at ``start`` and at regions: those begin with a record."""
        (first, low), (last, high) = split_position(start), split_position(end)
        begin, held, region = start, 0, 0
        spans: list[tuple[int, int]] = []
        for sequence in (number for number in self._sequences() if first <= number <= last):
            if not region:
                try:
                    file = ChannelFile.open(self._disk, self.path, sequence)
                except FileNotFoundError:
                    continue  # retention took it: whoever reads it says so
                region = file.region_bytes
                file.close()
            found = self._disk.stat(file_path(self.path, sequence))
            at = low if sequence == first else FIRST_SLOT
            bound = high if sequence == last else 0 if found is None else found.size
            if held >= span_bytes and at < bound:
                spans.append((begin, held))
                begin, held = position_of(sequence, at), 0
            while at < bound:
                following = -(-(at + max(span_bytes - held, 1)) // region) * region
                if following >= bound:
                    held += bound - at
                    break
                spans.append((begin, held + following - at))
                begin, at, held = position_of(sequence, following), following, 0
        return [*spans, (begin, held)] if begin < end else spans

    def verify(self) -> Iterator[Problem]:
        """Yield every problem: damage, file by file and region by region, then what the headers get wrong."""
        sequences = self._sequences()
        region = None
        for index, sequence in enumerate(sequences):
            last = index == len(sequences) - 1
            try:
                file = ChannelFile.open(self._disk, self.path, sequence)
            except FileNotFoundError:
                continue  # retention took it
            except CorruptionError as exc:
                yield Problem(exc.file, exc.byte, exc.reason)
                continue
            except PenstockError as exc:
                yield Problem(file_path(self.path, sequence), 0, str(exc))
                continue
            if region not in (None, file.region_bytes):
                yield Problem(file.path, 40, f"region_size is {file.region_bytes}, but the file before has {region}")
            region = file.region_bytes
            try:
                yield from _verify_file(file, last=last)
                following = file_path(self.path, sequence + 1)
                if last and file.is_sealed() and self._disk.stat(following) is None:
                    yield Problem(following, 0, f"missing, though {file.path} ends with a Roll to it")
            finally:
                file.close()
            if not last and sequences[index + 1] != sequence + 1:
                missing = file_path(self.path, sequence + 1)
                yield Problem(
                    missing,
                    0,
                    f"missing, though {file_path(self.path, sequences[index + 1])} is there",
                )

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the channel, without walking it."""
        sequences = self._sequences()
        files, total, region = [], 0, None
        for sequence in sequences:
            path = file_path(self.path, sequence)
            found = self._disk.stat(path)
            size = 0 if found is None else found.size
            total += size
            entry: dict[str, Any] = {"file": path, "bytes": size}
            try:
                file = ChannelFile.open(self._disk, self.path, sequence)
            except (PenstockError, OSError) as exc:
                entry["problem"] = str(exc)
            else:
                region = file.region_bytes
                entry["messages"] = max(0, file.header.message_count - 1)
                file.close()
            files.append(entry)
        identity = self._sidecar.identity()
        return {
            "format": self.format,
            "path": self.path,
            "log_id": None if identity is None else identity.log_id,
            "content": self.content,
            "first_position": self.first_position,
            "next_position": self._try(lambda: self.next_position),
            "durable_position": self.durable_position,
            "bytes": total,
            "region_bytes": region,
            "cursors": self._sidecar.cursors(),
            "files": files,
        }

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None
            self._sidecar.close()

    def forked(self) -> None:
        """Forget the parent's reader in the child of a fork; the next read opens its own."""
        self._lock = threading.RLock()
        self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _sequences(self) -> list[int]:
        sequences = discover(self._disk, self.path)
        if not sequences:
            raise OptionsError(f"{self.path}: there is no channel here")
        return sequences

    @staticmethod
    def _try(what: Any) -> Any:
        try:
            return what()
        except PenstockError:
            return None  # verify says more


def _verify_file(file: ChannelFile, *, last: bool) -> Iterator[Problem]:
    """Walk a file to its end, stepping over damage to the next region."""
    if not kernel.native and not file.is_sealed():
        yield Problem(file.path, 0, f"not checked: it may still be written to, and {kernel.reason}")
        return
    cursor, offset, count, damaged = Cursor(), 0, 0, False
    while True:
        file.attach(cursor, offset)
        count += sum(file.walk(cursor))
        offset, stop = cursor.position - file.position(0), Stop(cursor.status)
        if cursor.stray >= 0:
            stray = cursor.window_position + cursor.stray - file.position(0)
            yield Problem(
                file.path,
                stray + 1,
                "a Channel record in the middle of a file; readers step over it",
            )
        if stop in (Stop.TAIL, Stop.ROLLED):
            break
        damaged = True
        exc = problem_at(file, offset, stop)
        yield Problem(exc.file, exc.byte, exc.reason)
        offset = (offset // file.region_bytes + 1) * file.region_bytes
        if stop is Stop.END or offset + SLOT_BYTES > file.size:
            break
    if file.size % file.region_bytes:
        yield Problem(file.path, file.size, "the file is cut: its size is not a whole number of regions")
    elif not damaged:
        yield from _verify_header(file, offset, count, stop, last=last)


def _verify_header(file: ChannelFile, end: int, count: int, stop: Stop, *, last: bool) -> Iterator[Problem]:
    """Compare what the header says with what a walk found."""
    then, now = file.header, ChannelHeader.decode(file.path, file.file.read_at(0, FIRST_SLOT))
    if now.sequence != file.sequence:
        reason = f"channel_sequence is {now.sequence}, but the name of the file says {file.sequence}"
        yield Problem(file.path, 32, reason)
    if any(now.name):
        yield Problem(file.path, 48, "the name field is not zero")
    if stop is Stop.TAIL and not last:
        yield Problem(file.path, end, "no Roll, though the channel goes on in a later file")
    if then != now:
        return  # a writer is at work: its counters are between two records
    at_rest = end + SLOT_BYTES * (2 if stop is Stop.ROLLED else 1)
    if now.write_position != at_rest:
        reason = f"write_position is {now.write_position}, but the records end at {at_rest}"
        yield Problem(file.path, SLOT_BYTES, reason + "; the next writer mends it")
    elif now.message_count != count:
        reason = f"message_count is {now.message_count}, but {count} records are there"
        yield Problem(file.path, SLOT_BYTES + 8, reason)


def recognise(disk: ReadDisk, path: str) -> bool:
    """Whether ``path`` is a channel: the only log that is a file, or the first of a row of files."""
    found = disk.stat(path)
    if found is None:
        try:
            return bool(discover(disk, path))
        except OptionsError:
            return False
    if found.is_folder:
        return False
    with disk.open(path) as file:
        return file.read_at(0, len(PGSS)) != PGSS


def open_reader(disk: ReadDisk, path: str) -> XChannelLog:
    """Open a channel with the common face."""
    return XChannelLog(path, disk)


def open_writer(disk: Disk, path: str, content: str = "raw") -> Writer:
    """Open a channel for writing with default options, created if it is not there."""
    return Writer.open(path, content=content, disk=disk)


def logs_in(disk: ReadDisk, folder: str) -> list[str]:
    """Return the names of the channels in a folder; a file counts if it begins with a channel header.

    ``ticks.7`` belongs to ``ticks`` when its header says that it is number 7, also after ``ticks`` itself expired; and
    whatever its header says while ``ticks`` is there, because readers of ``ticks`` go on in it.
    """
    found: set[str] = set()
    for _ in range(LOOKS):
        found, vanished = _named_by_headers(disk, folder)
        if vanished <= found:
            break  # else retention took every file of a channel that was listed, so there may be newer ones
    rolled = {name for name in found if ROLLED.fullmatch(name) and name.rpartition(".")[0] in found}
    return sorted(found - rolled)


def _named_by_headers(disk: ReadDisk, folder: str) -> tuple[set[str], set[str]]:
    """Return the names that headers give, and those of files that were listed and gone at the second look."""
    found, vanished = set(), set()
    for name in disk.list(folder):
        if ".penstock-" in name:
            continue
        path = os.path.join(folder, name)
        stat = disk.stat(path)
        if stat is not None and (stat.is_folder or stat.size < FIRST_SLOT):
            continue
        try:
            with disk.open(path) as file:
                sequence = ChannelHeader.decode(path, file.read_at(0, FIRST_SLOT)).sequence
        except PenstockError:
            continue
        except FileNotFoundError:
            vanished.add(name.rpartition(".")[0] if ROLLED.fullmatch(name) else name)
            continue
        found.add(name.removesuffix(f".{sequence}") if sequence else name)
    return found, vanished
