"""Promise: a register holds the old position or the new one, whenever the power goes; an id names a log."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import CorruptionError, LockedError, OptionsError, UnsupportedError
from penstock.log.sidecar import MAGIC, SECTOR, Register, Sidecar
from penstock.testing.faulty import FaultyDisk

OWNER = bytes(range(16))


class PowerCut(BaseException):
    pass


def test_a_register_on_disk_is_the_one_drawn() -> None:
    disk = MemoryDisk()
    Register(disk, "r").write(OWNER, 0x1122)
    data = disk.open("r").read_at(0, 4096)
    assert len(data) == 1024
    slot = data[512:576]
    assert slot[:8] == MAGIC == b"PNSTKRG1"
    assert struct.unpack("<QQ", slot[8:24]) == (1, 0x1122)
    assert slot[24:40] == OWNER
    assert struct.unpack("<I", slot[60:]) == (zlib.crc32(slot[:60]),)
    assert not any(data[:512] + data[576:])


def test_a_register_remembers_the_last_of_many() -> None:
    disk = MemoryDisk()
    register = Register(disk, "r")
    for position in range(20):
        register.write(OWNER, position)
        assert register.read() == (OWNER, position)
        assert Register(disk, "r").read() == (OWNER, position)
    register.close()
    register.write(OWNER, 99)
    again = Register(disk, "r")
    again.write(OWNER, 100)
    assert register.read() == (OWNER, 100)


@pytest.mark.parametrize("operation", ["write_at", "sync", ""])
@pytest.mark.parametrize("writes", [1, 2, 5])
def test_a_power_cut_leaves_the_old_position_or_the_new(operation: str, writes: int) -> None:
    for seed in range(40):
        disk = FaultyDisk(MemoryDisk())
        register = Register(disk, "r")
        for position in range(writes):
            register.write(OWNER, position)
        if operation:
            disk.fail(operation, PowerCut())
        try:
            register.write(OWNER, 1000)
            allowed = {1000}
        except PowerCut:
            allowed = {writes - 1, 1000}
        disk.cut_power(seed=seed, keep=(seed % 4) / 3)
        found = Register(disk, "r").read()
        assert found is not None
        assert found[1] in allowed


def test_a_torn_slot_leaves_the_other_whole() -> None:
    disk = MemoryDisk()
    register = Register(disk, "r")
    register.write(OWNER, 1)
    before = disk.open("r").read_at(0, 1024)
    register.write(OWNER, 2)
    register.close()
    after = disk.open("r").read_at(0, 1024)
    for cut in range(64):  # the write reached the device up to any byte
        disk.modify("r").write_at(0, after[:cut] + before[cut:])
        found = Register(disk, "r").read()
        assert found in ((OWNER, 1), (OWNER, 2))
        fresh = Register(disk, "r")
        fresh.write(OWNER, 3)
        assert fresh.read() == (OWNER, 3)
        fresh.close()


def test_rubbish_is_named_and_zeros_were_never_written() -> None:
    disk = MemoryDisk()
    disk.create("r").write_at(0, b"x" * 1024)
    with pytest.raises(CorruptionError, match="r at byte 0: neither slot"):
        Register(disk, "r").read()
    disk.create("z").truncate(2 * SECTOR)
    assert Register(disk, "z").read() is None
    disk.create("empty").close()
    assert Register(disk, "empty").read() is None


def test_a_new_register_survives_from_its_first_write() -> None:
    for seed in range(20):
        disk = FaultyDisk(MemoryDisk())
        Register(disk, "r").write(OWNER, 7)
        disk.cut_power(seed=seed, keep=0.5)
        assert Register(disk, "r").read() == (OWNER, 7)


# --- Identity, mark, cursors, lock


def test_an_identity_is_new_each_time_and_read_back() -> None:
    disk = MemoryDisk()
    sidecar = Sidecar(disk, "orders.penstock-")
    assert sidecar.identity() is None
    first = sidecar.create_identity("envelope/1")
    assert sidecar.identity() == first
    assert first.content == "envelope/1"
    assert len(bytes.fromhex(first.log_id)) == 16
    assert sidecar.create_identity().log_id != first.log_id
    disk.modify("orders.penstock-id").write_at(0, b"{not json")
    with pytest.raises(CorruptionError, match=r"orders\.penstock-id at byte 1: not the identity"):
        sidecar.identity()


def test_a_mark_of_an_earlier_boot_says_where_trust_ends() -> None:
    disk = FaultyDisk(MemoryDisk())
    sidecar = Sidecar(disk, "orders.penstock-")
    assert sidecar.durable_position() is None
    assert sidecar.lost_power_at() is None
    sidecar.write_mark(4096)
    assert (sidecar.durable_position(), sidecar.lost_power_at()) == (4096, None)
    disk.cut_power()
    after = Sidecar(disk, "orders.penstock-")
    assert (after.durable_position(), after.lost_power_at()) == (4096, 4096)
    after.write_mark(4096)
    assert after.lost_power_at() is None
    after.remove_mark()
    after.remove_mark()
    assert after.durable_position() is None


def test_a_cursor_belongs_to_the_log_it_was_written_for() -> None:
    disk = MemoryDisk()
    sidecar = Sidecar(disk, "orders.penstock-")
    sidecar.create_identity()
    sidecar.write_cursor("billing", 80)
    sidecar.write_cursor("audit.v2", 104, sync=False)
    assert sidecar.cursors() == {"audit.v2": 104, "billing": 80}
    sidecar.create_identity()  # the log was made anew
    assert sidecar.cursors() == {}
    assert sidecar.read_cursor("billing") is None
    sidecar.write_cursor("billing", 81)
    assert sidecar.cursors() == {"billing": 81}
    sidecar.remove_cursor("billing")
    assert sidecar.read_cursor("billing") is None
    sidecar.close()


def test_a_foreign_log_has_cursors_too() -> None:
    sidecar = Sidecar(MemoryDisk(), "orders.penstock-")
    sidecar.write_cursor("billing", 80)
    assert sidecar.read_cursor("billing") == 80


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "a" * 65, "a b", "ü"])
def test_a_cursor_name_cannot_leave_its_place(name: str) -> None:
    sidecar = Sidecar(MemoryDisk(), "orders.penstock-")
    with pytest.raises(OptionsError, match="cursor name"):
        sidecar.write_cursor(name, 1)


def test_the_lock_names_the_log(tmp_path: Path) -> None:
    for prefix, name in (("orders.penstock-", "orders"), ("orders/penstock-", "orders")):
        disk = MemoryDisk()
        disk.make_folder("orders")
        held = Sidecar(disk, prefix).lock()
        with pytest.raises(LockedError, match=f"^{name}: another writer has it open$"):
            Sidecar(disk, prefix).lock()
        held.release()
    Sidecar(PosixDisk(), f"{tmp_path}/x.penstock-").lock().release()


def flips(data: bytes) -> list[bytes]:
    return [data[:at] + bytes((data[at] ^ bit,)) + data[at + 1 :] for at in range(len(data)) for bit in (1, 0x20, 0x80)]


def test_a_damaged_identity_is_named_with_its_byte_or_changes_nothing() -> None:
    disk = MemoryDisk()
    sidecar = Sidecar(disk, "log.penstock-")
    identity = sidecar.create_identity()
    path = "log.penstock-id"
    good = disk.open(path).read_at(0, 4096)
    damaged = [*flips(good), *(good[:size] for size in range(len(good))), b"[" * 60_000, bytes(len(good))]
    refused = 0
    for data in damaged:
        disk.remove(path)
        disk.create(path).write_at(0, data)
        try:
            found = sidecar.identity()
        except (CorruptionError, UnsupportedError) as exc:
            assert path in str(exc)
            refused += 1
        else:
            assert found is not None
            assert (found.log_id, found.content) == (identity.log_id, identity.content)
    assert refused > len(good)


def test_an_identity_without_a_checksum_is_read() -> None:
    disk = MemoryDisk()
    disk.create("log.penstock-id").write_at(
        0, b'{"log_id":"000102030405060708090a0b0c0d0e0f","content":"raw","created_ns":1,"version":1}\n'
    )
    found = Sidecar(disk, "log.penstock-").identity()
    assert found is not None
    assert found.log_id == "000102030405060708090a0b0c0d0e0f"


def test_a_damaged_register_is_refused_or_has_a_position_that_was_written() -> None:
    disk = MemoryDisk()
    register = Register(disk, "r")
    register.write(OWNER, 100)
    register.write(OWNER, 200)
    good = disk.open("r").read_at(0, 4096)
    for data in [*flips(good), *(good[:size] for size in range(0, len(good), 7))]:
        disk.remove("r")
        disk.create("r").write_at(0, data)
        try:
            assert Register(disk, "r").read() in ((OWNER, 100), (OWNER, 200), None)
        except CorruptionError as exc:
            assert exc.file == "r"
    disk.remove("r")
    disk.create("r").write_at(0, b"x" * 1024)
    with pytest.raises(CorruptionError, match="r at byte 0"):
        Register(disk, "r").read()


class ListingDisk(MemoryDisk):
    """A disk that counts how often a folder was listed."""

    listings = 0

    def list(self, folder: str) -> list[str]:
        self.listings += 1
        return super().list(folder)


def test_the_floor_of_retention_is_known_without_a_look_at_the_folder_until_a_cursor_comes_or_goes() -> None:
    disk = ListingDisk()
    writer, shipper, reader = (Sidecar(disk, "ticks.penstock-") for _ in range(3))

    def floor() -> tuple[int | None, bool]:
        before = disk.listings
        return writer.shipped_floor(), disk.listings > before

    assert [floor(), floor()] == [(None, True), (None, False)]
    shipper.write_cursor("ship-there", 300)
    assert [floor(), floor()] == [(300, True), (300, False)]
    shipper.write_cursor("ship-there", 400)
    assert floor() == (400, False)
    reader.write_cursor("billing", 200)
    assert [floor(), floor()] == [(200, True), (200, False)]
    reader.remove_cursor("billing")
    assert floor() == (400, True)
    reader.write_cursor("billing", 250)
    assert floor() == (250, True)
    shipper.remove_cursor("ship-there")
    assert [floor(), floor()] == [(None, True), (None, False)]


def test_a_cursor_that_was_made_by_a_process_that_died_is_seen_after_the_next_write() -> None:
    disk = MemoryDisk()
    writer, shipper = Sidecar(disk, "ticks.penstock-"), Sidecar(disk, "ticks.penstock-")
    assert writer.shipped_floor() is None
    Register(disk, "ticks.penstock-cursor-ship-there").write(bytes(16), 100)  # and nobody was told
    shipper.write_cursor("ship-there", 200)
    assert writer.shipped_floor() == 200
