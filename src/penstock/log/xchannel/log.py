"""A channel with the common face of logs."""

from __future__ import annotations

import operator
import os
import re
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from penstock import kernel
from penstock.batch import Batch
from penstock.disk import Disk, Handle, LoopWait, ReadDisk, read_disk_for
from penstock.disk.posix import followed
from penstock.errors import (
    CorruptionError,
    ExpiredError,
    NotFoundError,
    OptionsError,
    PenstockError,
    UnsupportedError,
)
from penstock.kernel import Cursor
from penstock.log.damage import DamageMet, check_on_damage
from penstock.log.face import OnDamage
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.arrival import ChannelWait
from penstock.log.xchannel.files import (
    LOOKS,
    ChannelFile,
    discover,
    is_there,
    problem_at,
    sidecar_prefix,
    written_behind,
)
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    SLOT_BYTES,
    ChannelHeader,
    RecordStop,
    file_path,
    footprint,
    position_of,
    split_position,
)
from penstock.log.xchannel.options import DEFAULT_REGION_BYTES
from penstock.log.xchannel.place import was_at_end
from penstock.log.xchannel.reader import Reader
from penstock.log.xchannel.writer import Writer
from penstock.types import Problem

__all__ = ["XChannelLog", "gaps", "logs_in", "open_reader", "open_writer", "recognise"]

PGSS: Final = b"PGSS"
HEADER_LENGTH: Final = (64).to_bytes(4, "little")  # of the Channel record
FEW_FILES: Final = 64
FILE_BITS: Final = 40
"""A position is the number of its file × 2^40, and a byte."""
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
    has_kinds = True

    def __init__(
        self, path: str | os.PathLike[str], disk: ReadDisk | None = None, *, on_damage: OnDamage = "raise"
    ) -> None:
        super().__init__()
        check_on_damage(on_damage)
        self.path, self.on_damage = followed(os.fspath(path)), on_damage
        self._met = DamageMet()
        self._disk = disk or read_disk_for(path)
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
        """Behind the newest record that is visible now; at damage in the newest region if that is to be passed over."""
        try:
            with Reader.open(self.path, "latest", disk=self._disk) as reader:
                return reader.position
        except CorruptionError as exc:
            if self.on_damage == "raise":
                raise
            self._met.add(Problem(exc.file, exc.byte, exc.reason))
        file = ChannelFile.open(self._disk, self.path, self._sequences()[-1])
        try:
            return file.position(file.find_tail(Cursor()))
        finally:
            file.close()

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

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return records from ``position`` on."""
        position = operator.index(position)
        if not self.keeps(position):
            raise ExpiredError(self.path, position, self.first_position)
        with self._lock:
            while True:
                try:
                    if self._reader is None:
                        self._reader = Reader.open(self.path, position, disk=self._disk)
                    elif self._reader.position != position:
                        self._reader.seek(position)
                    batch = self._reader.read_batch(limit)
                    if len(batch) and split_position(int(batch.positions[0]))[0] > split_position(position)[0]:
                        self._check_left(position)
                    return batch
                except CorruptionError as exc:
                    following = self._step_over(position, exc)
                    if following is None:
                        return Batch.of([], positions=[], kinds=[], timestamps=[], next_position=position)
                    position = following

    def skip_damage(self, position: int) -> tuple[int, Problem] | None:
        """Return where reading goes on behind damage at ``position``: at the next region or file."""
        position = operator.index(position)
        sequence, offset = split_position(position)
        file = file_path(self.path, sequence)
        found = self._disk.stat(file)
        try:
            if found is not None and found.size == offset:
                raise CorruptionError(file, offset, "the file ends where its next region should begin")
            with Reader.open(self.path, position, disk=self._disk) as reader:
                problem = reader.skip_damage()
                return None if problem is None else (reader.position, problem)
        except CorruptionError as exc:  # a header, or nothing lies behind it
            following = next((number for number in self._sequences() if number > sequence), None)
            if following is None:
                return None
            return position_of(following, FIRST_SLOT), Problem(exc.file, exc.byte, exc.reason)

    def _check_left(self, position: int) -> None:
        """Note that a file ends at ``position`` without a Roll, though its header counts more than was read there."""
        sequence, offset = split_position(position)
        try:
            file = ChannelFile.open(self._disk, self.path, sequence)
        except (OSError, PenstockError):
            return
        try:
            wrote = file.header.write_position
            if not file.is_sealed() and wrote > offset + 2 * SLOT_BYTES:  # more than the Roll, which may be lost
                reason = f"the records end here, though {wrote} bytes were written and a later file follows"
                if self.on_damage == "raise" and self._met.add(Problem(file.path, offset, reason)):
                    raise CorruptionError(file.path, offset, reason)
                self._met.add(Problem(file.path, offset, reason))
        finally:
            file.close()

    def keeps(self, position: int) -> bool:
        """Whether nothing at or behind ``position`` was removed."""
        sequence, offset = split_position(position)
        if offset >= FIRST_SLOT and is_there(self._disk, self.path, sequence):
            return True  # the oldest file goes first
        first = self.first_position
        return position >= first or was_at_end(self._sidecar, position, first)

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return at how many places whole files are missing in a batch and in front of it."""
        return gaps(expected, batch)

    def _step_over(self, position: int, exc: CorruptionError) -> int | None:
        """Return where to read on behind damage, which is noted; None when nothing follows it yet."""
        if self.on_damage == "raise":
            raise exc
        found = self.skip_damage(position)
        if found is None or found[0] <= position:
            self._met.add(Problem(exc.file, exc.byte, exc.reason))
            return None
        self._met.add(found[1])
        return found[0]

    def tail(
        self,
        position: int | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more."""
        at = position
        while True:
            try:
                with Reader.open(self.path, "latest" if at is None else at, disk=self._disk) as reader:
                    at = reader.position
                    for batch in reader.batches(limit, timeout):
                        yield batch
                        at = batch.next_position
                return
            except CorruptionError as exc:
                following = None if at is None else self._step_over(at, exc)
                if following is None:
                    raise
                at = following

    def waiter(self) -> LoopWait:
        """Return what waits for more records on an event loop, with the help of a thread."""
        return ChannelWait(lambda: Reader.open(self.path, "latest", disk=self._disk))

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``, which begin at ``start`` and at regions: those begin with a record."""
        (first, low), (last, high) = split_position(start), split_position(end)
        begin, held, region = start, 0, 0
        spans: list[tuple[int, int]] = []
        for sequence in self._between(first, last):
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
            "damage": self.damage,
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
            raise NotFoundError(f"{self.path}: there is no channel here")
        return sequences

    def _between(self, first: int, last: int) -> list[int]:
        """Return the numbers of the files from one to another; a few are not worth a look at all of them."""
        if last - first < FEW_FILES:
            return [number for number in range(first, last + 1) if is_there(self._disk, self.path, number)]
        return [number for number in self._sequences() if first <= number <= last]

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
        offset, stop = cursor.position - file.position(0), RecordStop(cursor.status)
        at_end = stop in (RecordStop.TAIL, RecordStop.ROLLED)
        hidden = written_behind(file, cursor, 1 if last and stop is RecordStop.TAIL else 2) if at_end else None
        if at_end and hidden is None:
            break
        damaged = True
        exc = hidden or problem_at(file, offset, stop)
        yield Problem(exc.file, exc.byte, exc.reason)
        offset = (offset // file.region_bytes + 1) * file.region_bytes
        if stop is RecordStop.END or offset + SLOT_BYTES > file.size:
            break
        if hidden is not None and file.file.read_at(offset, 1) != b"\1":
            break
    if file.size % file.region_bytes:
        yield Problem(file.path, file.size, "the file is cut: its size is not a whole number of regions")
    elif not damaged:
        yield from _verify_header(file, offset, count, stop, last=last)


def _verify_header(file: ChannelFile, end: int, count: int, stop: RecordStop, *, last: bool) -> Iterator[Problem]:
    """Compare what the header says with what a walk found."""
    then, now = file.header, ChannelHeader.decode(file.path, file.file.read_at(0, FIRST_SLOT))
    if now.sequence != file.sequence:
        reason = f"channel_sequence is {now.sequence}, but the name of the file says {file.sequence}"
        yield Problem(file.path, 32, reason)
    if any(now.name):
        yield Problem(file.path, 48, "the name field is not zero")
    if stop is RecordStop.TAIL and not last:
        yield Problem(file.path, end, "no Roll, though the channel goes on in a later file")
    if then != now:
        return  # a writer is at work: its counters are between two records
    at_rest = end + SLOT_BYTES * (2 if stop is RecordStop.ROLLED else 1)
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
    path = followed(path)
    with disk.open(path) as file:
        start = file.read_at(0, FIRST_SLOT)
    try:
        ChannelHeader.decode(path, start)
    except UnsupportedError:
        return True  # by name, whoever opens it
    except PenstockError:
        # Damaged: a channel still if it is known as one, or its first record is that of one.
        known = disk.stat(sidecar_prefix(path) + "id") is not None
        return start[: len(PGSS)] != PGSS and (known or start[4:8] == HEADER_LENGTH)
    return True


def open_reader(disk: ReadDisk, path: str, on_damage: OnDamage | None = None) -> XChannelLog:
    """Open a channel with the common face."""
    return XChannelLog(path, disk, on_damage=on_damage or "raise")


def gaps(expected: int | None, batch: Batch) -> int:
    """Return at how many places whole files are missing in a batch and in front of it."""
    if not len(batch):
        return 0
    numbers = batch.positions >> FILE_BITS
    if expected is not None:  # the file of the record that would be next
        numbers = np.concatenate(([expected >> FILE_BITS], numbers))
    return int((np.diff(numbers) > 1).sum())


def open_writer(disk: Disk, path: str, content: str = "raw", largest_bytes: int | None = None) -> Writer:
    """Open a channel for writing with default options, created if it is not there, with regions that are large enough.

    The regions of a channel that is there stay as they are.
    """
    region = None
    if largest_bytes is not None and not discover(disk, path, making=True):
        needed = footprint(largest_bytes) + FIRST_SLOT + SLOT_BYTES
        region = max(DEFAULT_REGION_BYTES, -(-needed // DEFAULT_REGION_BYTES) * DEFAULT_REGION_BYTES)
    return Writer.open(path, content=content, region_bytes=region, disk=disk)


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
