"""Sidecars: what the formats have no room for, in small files beside a log.

    <prefix>id             JSON: the random id of this log, its content type, when it was created, a checksum
    <prefix>lock           the writer's lock; of a log that is a row of files also a register: boot id and where the
                           last file was ended
    <prefix>mark           a register: boot id and durable position
    <prefix>dropped        of a log that is a row of files, a register: log id and where the newest file ended that
                           retention has taken: who had read so far has missed nothing
    <prefix>cursor-<name>  a register: log id and a consumer's position
    <prefix>cursors        16 random bytes, others whenever a cursor may have come: who knows all names looks here
                           instead of at the whole folder

The prefix is ``penstock-`` inside a log that is a folder and ``<base>.penstock-`` beside one that is a
file.  The original implementations ignore these names.  Everything works without sidecars, which is
what a foreign log looks like.

A register holds one position that is overwritten often and must survive a crash in the middle of that:

    register := slot:64 zero:448 slot:64 zero:448               (1024 bytes, two sectors)

     0          8            16         24         40         56     60      64
     +----------+------------+----------+----------+---------+------+-------+
     | PNSTKRG1 | generation | position | owner:16 | seen:16 | zero | crc32 |
     +----------+------------+----------+----------+---------+------+-------+

little-endian; crc32 (zlib) covers bytes 0..60.  A write goes to the slot with the lower generation, so
a torn one leaves the other whole; the valid slot with the higher generation counts.  ``owner`` is the boot
id in a mark (a power cut lies between two boots) and the log id in a cursor (it belongs to that log).  ``seen`` is
the fingerprint of the last record before the position (fingerprint.py), zero where nobody gave one.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import sys
import threading
import time
import uuid
import zlib
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock import kernel
from penstock.disk import Disk, File, Lock, ReadDisk, save_atomically
from penstock.disk.plain import boot_id_of
from penstock.disk.posix import PosixFile, folder_of
from penstock.errors import CorruptionError, LockedError, OptionsError, UnsupportedError
from penstock.log.fingerprint import Fingerprint

if TYPE_CHECKING:
    from penstock.kernel.tail import Slots

__all__ = ["Sidecar", "Identity", "Register", "decode_json", "sidecar_of", "identity_of"]

MAGIC: Final = b"PNSTKRG1"
SLOT: Final = struct.Struct("<8sQQ16s16s4xI")
SECTOR: Final = 512
STAMP_BYTES: Final = 16
SHIP: Final = "ship-"
CURSOR_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOG_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
MOST_JSON_BYTES: Final = 1 << 16
T = TypeVar("T")


def decode_json(path: str, data: bytes, kind: type[T], what: str) -> T:
    r"""Return the JSON of a small file as ``kind``; CorruptionError with file and byte, whatever is wrong with it.

    >>> decode_json("ticks.penstock-id", b'{"log_id": "\xff"}', Identity, "the identity of a log")
    Traceback (most recent call last):
    penstock.errors.CorruptionError: ticks.penstock-id at byte 12: not the identity of a log: no UTF-8
    """
    try:
        data.decode()  # msgspec would tell the byte within the string
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as exc:
        raise CorruptionError(path, exc.start, f"not {what}: no UTF-8") from None
    except RecursionError:
        raise CorruptionError(path, 0, f"not {what}: it is nested too deep") from None
    except (msgspec.MsgspecError, ValueError) as exc:
        found = re.search(r"\(byte (\d+)\)", str(exc))
        raise CorruptionError(path, int(found[1]) if found else 0, f"not {what}: {exc}") from None


class Identity(msgspec.Struct, frozen=True):
    """Which log this is: a random id, and whether its records are raw or in envelopes.

    ``check`` is the CRC-32 of the other fields; a file of an earlier release has none.

    >>> Identity("00" * 16, "raw", 0).content
    'raw'
    """

    log_id: str
    content: str
    created_ns: int
    version: int = 1
    check: int | None = None

    def checksum(self) -> int:
        """Return what ``check`` should be.

        >>> Identity("00" * 16, "raw", 0).checksum()
        2043528358
        """
        return zlib.crc32(f"{self.log_id} {self.content} {self.created_ns} {self.version}".encode())

    def __post_init__(self) -> None:
        if not LOG_ID.fullmatch(self.log_id):
            raise ValueError(f"log_id {self.log_id!r} is not 32 hexadecimal digits")
        if self.check is not None and self.check != self.checksum():
            raise ValueError("its checksum is another")


class Register:
    r"""One position in a file of two slots; see the head of this module.

    >>> from penstock.disk import MemoryDisk
    >>> register = Register(MemoryDisk(), "cursor")
    >>> register.read() is None
    True
    >>> register.write(bytes(16), 77); register.read() == (bytes(16), 77)
    True
    """

    def __init__(self, disk: ReadDisk, path: str) -> None:
        self._disk, self.path = disk, path
        self._file: File | None = None
        self._generation: int | None = None
        self._mutex = threading.Lock()

    def read(self) -> tuple[bytes, int] | None:
        """Return (owner, position), or None when it was never written."""
        found = self._read()
        return None if found is None else (found[1], found[2])

    def seen(self) -> Fingerprint | None:
        """Return the fingerprint of the last record before the position, if one was given."""
        found = self._read()
        return None if found is None else Fingerprint.unpack(found[3])

    def _read(self) -> tuple[int, bytes, int, bytes] | None:
        try:
            with self._disk.open(self.path) as file:
                data = file.read_at(0, 2 * SECTOR)
        except FileNotFoundError:
            return None
        slots = self._slots(data)
        if not slots:
            if not data.strip(b"\0"):
                return None  # created, never written
            raise CorruptionError(self.path, 0, "neither slot of the register is whole")
        return max(slots)

    def write(
        self,
        owner: bytes,
        position: int,
        *,
        sync: bool = True,
        seen: Fingerprint | None = None,
        fresh: bool = False,
    ) -> None:
        """Overwrite the position; with ``sync`` it survives a power cut when this returns.

        ``fresh`` where other processes write it too, each under a lock they share: it is looked at again first.
        """
        with self._mutex:
            file = self._file
            if file is None:
                file = self._open()
            elif fresh:
                self._generation = self._newest(file)
            assert self._generation is not None
            generation = self._generation + 1
            last = bytes(16) if seen is None else seen.pack()
            slot = SLOT.pack(MAGIC, generation, position, owner, last, 0)[:-4]
            file.write_at(generation % 2 * SECTOR, slot + struct.pack("<I", zlib.crc32(slot)))
            self._generation = generation
            if sync:
                file.sync()

    def map_slots(self, owner: bytes) -> Slots | None:
        """Return the register in memory, for who moves it often and alone; None where that cannot be done safely."""
        with self._mutex:
            file = self._file or self._open()
            if not kernel.native or sys.byteorder != "little" or not isinstance(file, PosixFile):
                return None
            if self._generation == 0 or not kernel.tail.overwrites(file.fd):  # never written: its room is not sure
                return None
            return kernel.tail.Slots(file.map(0, 2 * SECTOR, writable=True), self._generation or 0, owner)

    def close(self) -> None:
        """Let go of the file."""
        with self._mutex:
            if self._file is not None:
                self._file.close()
            self._file = self._generation = None

    def _open(self) -> File:
        disk: Disk = self._disk  # type: ignore[assignment]  # written only by owners of a whole disk
        try:
            file = disk.modify(self.path)
        except FileNotFoundError:
            file = disk.create(self.path)
            file.truncate(2 * SECTOR)
            file.sync()
            disk.sync_folder(folder_of(self.path))
        self._file, self._generation = file, self._newest(file)
        return file

    def _newest(self, file: File) -> int:
        slots = self._slots(file.read_at(0, 2 * SECTOR))
        return max(slots)[0] if slots else 0

    @staticmethod
    def _slots(data: bytes) -> list[tuple[int, bytes, int, bytes]]:
        slots = []
        for start in (0, SECTOR):
            raw = data[start : start + SLOT.size]
            if len(raw) < SLOT.size:
                continue
            magic, generation, position, owner, seen, crc = SLOT.unpack(raw)
            if magic == MAGIC and crc == zlib.crc32(raw[:-4]):
                slots.append((generation, owner, position, seen))
        return slots


class Sidecar:
    """The sidecars of one log.

    >>> from penstock.disk import MemoryDisk
    >>> sidecar = Sidecar(MemoryDisk(), "orders.penstock-")
    >>> sidecar.identity() is None
    True
    >>> identity = sidecar.create_identity()
    >>> sidecar.identity() == identity
    True
    >>> sidecar.write_cursor("billing", 4096); sidecar.cursors()
    {'billing': 4096}
    """

    def __init__(self, disk: ReadDisk, prefix: str) -> None:
        self._disk = disk
        self.prefix = prefix
        self.mark = Register(disk, prefix + "mark")
        self.rolls = Register(disk, prefix + "lock")
        self._dropped = Register(disk, prefix + "dropped")
        self._cursors: dict[str, Register] = {}
        self._announced: set[str] = set()
        self._names: tuple[bytes, list[str]] | None = None  # and what was in ``cursors`` before they were listed

    # --- Identity

    def identity(self) -> Identity | None:
        """Return which log this is, or None for a foreign one."""
        path = self.prefix + "id"
        try:
            with self._disk.open(path) as file:
                data = file.read_at(0, MOST_JSON_BYTES)
        except FileNotFoundError:
            return None
        identity = decode_json(path, data, Identity, "the identity of a log")
        if identity.version != 1:
            raise UnsupportedError(
                f"{path}: version {identity.version} of a log's identity is not read by this release"
            )
        return identity

    def create_identity(self, content: str = "raw") -> Identity:
        """Give the log a new random id; cursors of the old one stop counting."""
        identity = Identity(uuid.uuid4().hex, content, time.time_ns())
        identity = msgspec.structs.replace(identity, check=identity.checksum())
        save_atomically(self._owned, self.prefix + "id", msgspec.json.encode(identity) + b"\n")
        return identity

    # --- The writer's lock

    def lock(self, of: str | None = None) -> Lock:
        """Take the writer's lock, which the original implementations do not know of, and ``of``, the data it is for."""
        try:
            return self._owned.lock(self.prefix + "lock", of)
        except LockedError:
            name = self.prefix.removesuffix(".penstock-").removesuffix("/penstock-")
            raise LockedError(f"{name}: another writer has it open") from None

    # --- The durable mark

    def durable_position(self) -> int | None:
        """Return the position of the mark, or None when there is none."""
        found = self.mark.read()
        return None if found is None else found[1]

    def write_mark(self, position: int) -> None:
        """Note that everything below ``position`` has been synced in this boot."""
        self.mark.write(self._owned.boot_id(), position)

    def lost_power_at(self) -> int | None:
        """Return the mark of an earlier boot: what lies behind it is not to be trusted."""
        found = self.mark.read()
        if found is None or found[0] == self._owned.boot_id():
            return None
        return found[1]

    def kept_power(self) -> bool:
        """Whether the mark is of this boot: nothing that was visible since can have been lost to a power cut."""
        try:
            found = self.mark.read()
        except CorruptionError:
            return False
        return found is not None and found[0] == boot_id_of(self._disk)

    def note_roll(self, position: int) -> None:
        """Note where a file was ended in this boot, for whoever looks for damage; a failure does no harm."""
        with contextlib.suppress(OSError):
            self.rolls.write(self._owned.boot_id(), position, sync=False)

    def last_roll(self) -> int | None:
        """Return where the last file was ended, if that was in this boot: no power cut can have taken a Roll since."""
        try:
            found = self.rolls.read()
        except (OSError, CorruptionError):
            return None  # only its owner may read it, or it is damaged: nobody knows
        return found[1] if found is not None and found[0] == boot_id_of(self._disk) else None

    def note_dropped(self, position: int) -> None:
        """Note where a file ends that is about to be removed; who stood there is told of a loss if this fails."""
        with contextlib.suppress(OSError):
            self._dropped.write(self._log_id(), position, sync=False)
            self._dropped.close()  # it is rare, and others write it too: the next one looks again

    def dropped_end(self) -> int | None:
        """Return where the newest file ended that was removed, if that is known."""
        try:
            found = self._dropped.read()
        except (OSError, CorruptionError):
            return None
        return found[1] if found is not None and found[0] == self._log_id() else None

    def remove_mark(self) -> None:
        """Forget the mark."""
        self.mark.close()
        with contextlib.suppress(FileNotFoundError):
            self._owned.remove(self.mark.path)

    # --- Named cursors

    def cursor_names(self) -> list[str]:
        """Return the names of all cursors, readable or not."""
        start = self.prefix.rpartition("/")[2] + "cursor-"
        names = [name.removeprefix(start) for name in self._disk.list(folder_of(self.prefix)) if name.startswith(start)]
        return [name for name in names if CURSOR_NAME.fullmatch(name)]

    def cursors(self) -> dict[str, int]:
        """Return every cursor of this log by name; CorruptionError if one cannot be read."""
        found = {name: self.read_cursor(name) for name in self.cursor_names()}
        return {name: position for name, position in found.items() if position is not None}

    def read_cursor(self, name: str) -> int | None:
        """Return the position of a cursor, or None: never written, or written for an earlier log."""
        found = self._cursor(name).read()
        if found is None or found[0] != self._log_id():
            return None
        return found[1]

    def write_cursor(self, name: str, position: int, *, sync: bool = True, seen: Fingerprint | None = None) -> None:
        """Move a cursor, after the work up to ``position`` is done; ``seen`` is the last record before it."""
        self._cursor(name).write(self._log_id(), position, sync=sync, seen=seen)
        if name not in self._announced:  # behind the write: who looks in between looks again
            path = self.prefix + "cursors"
            with contextlib.closing(self._open_or_create(path)) as file:
                file.write_at(0, os.urandom(STAMP_BYTES))
            self._announced.add(name)

    def cursor_seen(self, name: str) -> Fingerprint | None:
        """Return the fingerprint that was given with the position of a cursor: check it before reading on."""
        return self._cursor(name).seen()

    def shipped_floor(self) -> int | None:
        """Return up to where retention may take a log that is being shipped; None for one that is not.

        A log that is shipped has a cursor ``ship-…``; then every named cursor holds what is behind it.  A roll asks
        this, so the folder is listed only when a cursor has come or gone.
        """
        stamp = self._stamp()
        if self._names is None or self._names[0] != stamp or not self._all_there(self._names[1]):
            self._names = stamp, self.cursor_names()
        names = self._names[1]
        if not any(name.startswith(SHIP) for name in names):
            return None
        try:
            found = [self.read_cursor(name) for name in names]
        except CorruptionError:
            return 0  # one that cannot be read holds everything
        return min((position for position in found if position is not None), default=0)

    def _stamp(self) -> bytes:
        try:
            with self._disk.open(self.prefix + "cursors") as file:
                return file.read_at(0, STAMP_BYTES)
        except FileNotFoundError:
            return b""

    def _all_there(self, names: list[str]) -> bool:
        return all(self._disk.stat(f"{self.prefix}cursor-{name}") is not None for name in names)

    def _open_or_create(self, path: str) -> File:
        try:
            return self._owned.modify(path)
        except FileNotFoundError:
            pass
        except PermissionError:  # another user's; who may make a cursor here may make this anew
            self._owned.remove(path)
        try:
            return self._owned.create(path)
        except FileExistsError:  # another process was first
            return self._owned.modify(path)

    def remove_cursor(self, name: str) -> None:
        """Forget a cursor."""
        register = self._cursor(name)
        register.close()
        del self._cursors[name]
        self._announced.discard(name)
        with contextlib.suppress(FileNotFoundError):
            self._owned.remove(register.path)

    def close(self) -> None:
        """Let go of the files."""
        self.mark.close()
        self.rolls.close()
        for register in self._cursors.values():
            register.close()

    def _cursor(self, name: str) -> Register:
        if not CURSOR_NAME.fullmatch(name):
            raise OptionsError(
                f"cursor name {name!r}: use 1 to 64 of letters, digits, dot, dash and underscore, "
                "beginning with a letter or digit"
            )
        register = self._cursors.get(name)
        if register is None:
            register = self._cursors[name] = Register(self._disk, f"{self.prefix}cursor-{name}")
        return register

    def _log_id(self) -> bytes:
        identity = self.identity()
        return bytes(16) if identity is None else bytes.fromhex(identity.log_id)

    @property
    def _owned(self) -> Disk:
        """The disk, as its writer has it."""
        return self._disk  # type: ignore[return-value]


def sidecar_of(disk: ReadDisk, path: str) -> Sidecar:
    """Return the sidecars of the log at ``path``: inside it where that is a folder, beside it where it is a file.

    >>> from penstock.disk import MemoryDisk
    >>> sidecar_of(MemoryDisk(), "data/ticks").prefix
    'data/ticks.penstock-'
    """
    found = disk.stat(path)
    return Sidecar(disk, f"{path}/penstock-" if found is not None and found.is_folder else f"{path}.penstock-")


def identity_of(disk: ReadDisk, path: str) -> str:
    """Return what tells a log from another one that has its name later; empty where nothing can.

    It is the random id of the sidecar.  A foreign log that is a folder goes by the folder's identity; a foreign
    channel has none, because retention takes its first file away.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> created = sidecar_of(disk, "ticks").create_identity()
    >>> identity_of(disk, "ticks") == created.log_id, identity_of(disk, "other")
    (True, '')
    """
    identity = sidecar_of(disk, path).identity()
    if identity is not None:
        return identity.log_id
    found = disk.stat(path)
    if found is None or not found.is_folder:
        return ""
    return f"folder-{found.identity[0]:x}-{found.identity[1]:x}"
