"""Sidecars: what the formats have no room for, in small files beside a log.

    <prefix>id             JSON: the random id of this log, its content type, when it was created
    <prefix>lock           the writer's lock
    <prefix>mark           a register: boot id and durable position
    <prefix>cursor-<name>  a register: log id and a consumer's position

The prefix is ``penstock-`` inside a log that is a folder and ``<base>.penstock-`` beside one that is a
file.  The original implementations ignore these names.  Everything works without sidecars, which is
what a foreign log looks like.

A register holds one position that is overwritten often and must survive a crash in the middle of that:

    register := slot:64 zero:448 slot:64 zero:448               (1024 bytes, two sectors)

     0          8            16         24         40              60      64
     +----------+------------+----------+----------+------ … ------+-------+
     | PNSTKRG1 | generation | position | owner:16 | zero          | crc32 |
     +----------+------------+----------+----------+------ … ------+-------+

little-endian; crc32 (zlib) covers bytes 0..60.  A write goes to the slot with the lower generation, so
a torn one leaves the other whole; the valid slot with the higher generation counts.  ``owner`` is the boot
id in a mark (a power cut lies between two boots) and the log id in a cursor (it belongs to that log).
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import time
import uuid
import zlib
from typing import Final

import msgspec

from penstock.disk import Disk, File, Lock, ReadDisk, save_atomically
from penstock.disk.posix import folder_of
from penstock.errors import CorruptionError, LockedError, OptionsError

__all__ = ["Sidecar", "Identity", "Register", "sidecar_of", "identity_of"]

MAGIC: Final = b"PNSTKRG1"
SLOT: Final = struct.Struct("<8sQQ16s20xI")
SECTOR: Final = 512
CURSOR_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Identity(msgspec.Struct, frozen=True):
    """Which log this is: a random id, and whether its records are raw or in envelopes.

    >>> Identity("00" * 16, "raw", 0).content
    'raw'
    """

    log_id: str
    content: str
    created_ns: int
    version: int = 1


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
        _, owner, position = max(slots)
        return owner, position

    def write(self, owner: bytes, position: int, *, sync: bool = True) -> None:
        """Overwrite the position; with ``sync`` it survives a power cut when this returns."""
        with self._mutex:
            file = self._file or self._open()
            assert self._generation is not None
            generation = self._generation + 1
            slot = SLOT.pack(MAGIC, generation, position, owner, 0)[:-4]
            file.write_at(generation % 2 * SECTOR, slot + struct.pack("<I", zlib.crc32(slot)))
            self._generation = generation
            if sync:
                file.sync()

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
        slots = self._slots(file.read_at(0, 2 * SECTOR))
        self._file, self._generation = file, max(slots)[0] if slots else 0
        return file

    @staticmethod
    def _slots(data: bytes) -> list[tuple[int, bytes, int]]:
        slots = []
        for start in (0, SECTOR):
            raw = data[start : start + SLOT.size]
            if len(raw) < SLOT.size:
                continue
            magic, generation, position, owner, crc = SLOT.unpack(raw)
            if magic == MAGIC and crc == zlib.crc32(raw[:-4]):
                slots.append((generation, owner, position))
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
        self._cursors: dict[str, Register] = {}

    # --- Identity

    def identity(self) -> Identity | None:
        """Return which log this is, or None for a foreign one."""
        path = self.prefix + "id"
        try:
            with self._disk.open(path) as file:
                data = file.read_at(0, 1 << 16)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=Identity)
        except msgspec.DecodeError as exc:
            raise CorruptionError(path, 0, f"not the identity of a log: {exc}") from None

    def create_identity(self, content: str = "raw") -> Identity:
        """Give the log a new random id; cursors of the old one stop counting."""
        identity = Identity(uuid.uuid4().hex, content, time.time_ns())
        save_atomically(self._owned, self.prefix + "id", msgspec.json.encode(identity) + b"\n")
        return identity

    # --- The writer's lock

    def lock(self) -> Lock:
        """Take the writer's lock, which the original implementations do not know of."""
        try:
            return self._owned.lock(self.prefix + "lock")
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

    def write_cursor(self, name: str, position: int, *, sync: bool = True) -> None:
        """Move a cursor, after the work up to ``position`` is done."""
        self._cursor(name).write(self._log_id(), position, sync=sync)

    def remove_cursor(self, name: str) -> None:
        """Forget a cursor."""
        register = self._cursor(name)
        register.close()
        del self._cursors[name]
        with contextlib.suppress(FileNotFoundError):
            self._owned.remove(register.path)

    def close(self) -> None:
        """Let go of the files."""
        self.mark.close()
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
