"""What the one writer of a channel promises.  Numbers in comments are those of the original's own suites (facts 6)."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.batch import Batch
from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import ClosedError, CorruptionError, LockedError, OptionsError
from penstock.log.xchannel import Reader, Writer, XChannelLog
from penstock.testing.faulty import FaultyDisk


def contents(path: Any, **options: Any) -> list[bytes]:
    with Reader.open(path, **options) as reader:
        return [bytes(record.payload) for record in reader.records(timeout=0)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "penstock-" not in path.name)


# --- Reserve and commit (54, 55, 56)


def test_a_second_writer_is_refused_in_this_process_and_after_close_it_is_not(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan") as writer:
        with pytest.raises(LockedError, match="chan: another writer has it open"):
            Writer.open(tmp_path / "chan")
        writer.append(b"mine")
    Writer.open(tmp_path / "chan").close()


def test_a_commit_longer_than_reserved_or_without_a_reservation_is_refused(tmp_path: Path) -> None:  # 55
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        before = (tmp_path / "chan").read_bytes()
        with pytest.raises(OptionsError, match="without a reservation"):
            writer.commit()
        writer.reserve(10)
        for wrong in (11, -1):
            with pytest.raises(OptionsError, match=f"cannot commit {wrong} of 10"):
                writer.commit(wrong)
        assert (tmp_path / "chan").read_bytes() == before
        assert writer.commit(10) == 80
        with pytest.raises(OptionsError, match="without a reservation"):
            writer.commit(10)


def test_a_shorter_commit_leaves_a_header_where_the_reader_goes_on(tmp_path: Path) -> None:  # 55
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer, Reader.open(tmp_path / "chan") as reader:
        writer.reserve(300)[:] = b"\xff" * 300  # would read as a corrupt header
        writer.commit(5)
        record = reader.try_read()
        assert record is not None
        assert bytes(record.payload) == b"\xff" * 5
        assert reader.try_read() is None
        assert len(reader.read_batch()) == 0
        writer.append(b"next")
        assert bytes(reader.read(timeout=1).payload) == b"next"


def test_the_view_of_a_reservation_is_closed_by_whatever_follows(tmp_path: Path) -> None:  # 56
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        for follow in (
            writer.commit,
            lambda: writer.append(b"x"),
            lambda: writer.append_many([b"x"]),
            lambda: writer.append_many(Batch.of([b"x"])),
            lambda: writer.reserve(5),
            writer.roll,
        ):
            view = writer.reserve(10)
            view[:] = b"0123456789"
            follow()
            with pytest.raises(ValueError, match="released"):
                view[0] = 1


def test_a_reservation_does_not_survive_a_roll(tmp_path: Path) -> None:  # 56
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        writer.reserve(10)
        writer.roll()
        with pytest.raises(OptionsError, match="without a reservation"):
            writer.commit(10)


def fail_while_filling(buffer: memoryview) -> None:
    buffer[:] = b"0123456789"
    raise RuntimeError("oops")


def test_an_exception_while_filling_commits_nothing(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        with pytest.raises(RuntimeError, match="oops"), writer.reserving(10) as record:
            fail_while_filling(record.buffer)
        assert record.position is None
        with pytest.raises(ValueError, match="released"):
            record.buffer[0] = 1
        with writer.reserving(20, kind=3, timestamp_ns=9) as record:
            record.buffer[:4] = b"good"
            record.length = 4
        assert record.position == 80
    with Reader.open(tmp_path / "chan") as reader:
        found = reader.read(timeout=1)
    assert (found.position, found.kind, found.timestamp_ns, bytes(found.payload)) == (80, 3, 9, b"good")


def test_reserving_nothing_and_less_than_nothing(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        assert len(writer.reserve(0)) == 0
        writer.commit()
        with pytest.raises(OptionsError, match="-1 bytes"):
            writer.reserve(-1)
    assert contents(tmp_path / "chan") == [b""]


# --- What is appended


def test_anything_with_bytes_can_be_appended(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan") as writer:
        values = [b"bytes", bytearray(b"array"), memoryview(b"view"), np.frombuffer(b"numpy", np.uint8)]
        for value in values:
            writer.append(value)
        writer.append_many([b"a", bytearray(b"b"), memoryview(b"c")])
        for wrong in ("text", 5, None):
            with pytest.raises(TypeError):
                writer.append(wrong)
        with pytest.raises(TypeError):
            writer.append_many([b"good", "text"])
    assert contents(tmp_path / "chan") == [b"bytes", b"array", b"view", b"numpy", b"a", b"b", b"c", b"good"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kind": -1}, "kind"),
        ({"kind": 65536}, "kind"),
        ({"timestamp_ns": -1}, "timestamp_ns"),
        ({"timestamp_ns": 1 << 64}, "timestamp_ns"),
    ],
)
def test_a_kind_or_time_out_of_range_is_refused(arguments: dict[str, int], reason: str, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        before = (tmp_path / "chan").read_bytes()
        with pytest.raises(OptionsError, match=reason):
            writer.append(b"x", **arguments)
        with pytest.raises(OptionsError, match=reason):
            writer.append_many([b"x"], **arguments)
        with pytest.raises(OptionsError, match=reason):
            writer.append_many(Batch.of([b"x"]), **arguments)
        writer.reserve(1)
        with pytest.raises(OptionsError, match=reason):
            writer.commit(**arguments)
        assert (tmp_path / "chan").read_bytes() == before


def test_a_batch_brings_its_kinds_and_times(tmp_path: Path) -> None:
    batch = Batch.of([b"a", b"b"], kinds=[7, 65535], timestamps=[0, 2**64 - 1])
    with Writer.open(tmp_path / "chan") as writer:
        writer.append_many(batch)
        writer.append_many(batch, kind=1, timestamp_ns=[5, 6])
        with pytest.raises(OptionsError, match="kind has 3 values for 2 records"):
            writer.append_many(batch, kind=[1, 2, 3])
    with Reader.open(tmp_path / "chan") as reader:
        found = reader.read_batch()
    assert found.kinds is not None
    assert found.timestamps is not None
    assert found.kinds.tolist() == [7, 65535, 1, 1]
    assert found.timestamps.tolist() == [0, 2**64 - 1, 5, 6]


@pytest.mark.parametrize("region", [4096, 8192, 16384, 1 << 20])
def test_a_full_region_is_followed_by_a_skip_into_the_next(region: int, tmp_path: Path) -> None:  # 4
    with Writer.open(tmp_path / "chan", region_bytes=region) as writer:
        assert writer.append(b"a" * (region - 112)) == 80  # leaves exactly one slot
        assert writer.next_position == region - 16
        assert writer.append(b"b" * (region - 32)) == region
        assert writer.append(b"c") == 2 * region
        assert writer.region_bytes == region
    data = (tmp_path / "chan").read_bytes()
    assert len(data) == 3 * region
    for slot in (region - 16, 2 * region - 16):
        assert data[slot : slot + 8] == struct.pack("<BBHI", 1, 2, 0, 0)
    assert [len(payload) for payload in contents(tmp_path / "chan")] == [region - 112, region - 32, 1]


# --- Opening again


def test_a_new_channel_is_complete_before_it_has_its_name(tmp_path: Path) -> None:
    calls = []
    disk = FaultyDisk(PosixDisk())
    disk.on_call = lambda operation, path: calls.append((operation, os.path.basename(path)))
    Writer.open(tmp_path / "chan", region_bytes=4096, sync="always", disk=disk).close()
    named = calls.index(("link", "chan.penstock-new"))
    assert ("write_at", "chan.penstock-new") in calls[:named]
    assert ("sync", "chan.penstock-new") in calls[:named]
    assert calls[named + 1 : named + 3] == [("remove", "chan.penstock-new"), ("sync_folder", tmp_path.name)]


def test_a_leftover_of_a_half_made_file_is_swept(tmp_path: Path) -> None:  # 44, 51, 52
    (tmp_path / "chan.penstock-new").write_bytes(b"half")
    (tmp_path / "chan.partial").write_bytes(b"someone else's")
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        writer.append(b"x")
    assert not (tmp_path / "chan.penstock-new").exists()
    assert (tmp_path / "chan.partial").read_bytes() == b"someone else's"
    assert contents(tmp_path / "chan") == [b"x"]


def test_another_region_size_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        writer.append(b"x")
    before = (tmp_path / "chan").read_bytes()
    with pytest.raises(OptionsError, match="its region size is 4096, not 8192; nothing was changed"):
        Writer.open(tmp_path / "chan", region_bytes=8192)
    assert (tmp_path / "chan").read_bytes() == before
    with Writer.open(tmp_path / "chan") as writer:
        assert writer.region_bytes == 4096


def test_what_cannot_be_a_channel_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for wrong in ("folder", "folder/"):
        with pytest.raises(OptionsError, match="this is a folder"):
            Writer.open(f"{tmp_path}/{wrong}")
    with pytest.raises(OptionsError, match="missing/chan: the folder does not exist"):
        Writer.open(tmp_path / "missing" / "chan")
    with pytest.raises(OptionsError, match="a channel needs a file name"):
        Writer.open("")
    assert [found for found in tmp_path.rglob("*") if found.name != "folder"] == []  # not even a lock


def test_a_name_that_is_no_text_is_a_name_all_the_same(tmp_path: Path) -> None:
    path = os.path.join(tmp_path, os.fsdecode(b"ch\xffn"))
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
    assert contents(path) == [b"a", b"b"]


@pytest.mark.parametrize(("disk", "mode"), [(PosixDisk(), 0o600), (PosixDisk(shared=True), 0o640)])
def test_files_belong_to_their_owner_alone_unless_they_are_to_be_shared(
    disk: PosixDisk, mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        with Writer.open(tmp_path / "chan", region_bytes=4096, sync="always", disk=disk) as writer:
            writer.append(b"x")
            writer.roll()
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert found.pop("chan.penstock-lock") == 0o600
    assert set(found.values()) == {mode}
    assert {"chan", "chan.1", "chan.penstock-id", "chan.penstock-mark"} <= found.keys()


def test_an_envelope_writer_does_not_open_a_raw_channel_and_the_reverse(tmp_path: Path) -> None:
    Writer.precreate(tmp_path / "raw")
    Writer.precreate(tmp_path / "envelopes", content="envelope/1")
    with pytest.raises(OptionsError, match="its content is raw, not envelope/1"):
        Writer.open(tmp_path / "raw", content="envelope/1")
    with pytest.raises(OptionsError, match="its content is envelope/1, not raw"):
        Writer.open(tmp_path / "envelopes", content="raw")
    for name in ("raw", "envelopes"):
        Writer.open(tmp_path / name).close()
    (tmp_path / "raw.penstock-id").unlink()  # a foreign channel
    with pytest.raises(OptionsError, match="its content is raw"):
        Writer.open(tmp_path / "raw", content="envelope/1")


def stale(path: Path, write_position: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<QQ", write_position, count))


@pytest.mark.parametrize("orphans", [1, 2, 5])
@pytest.mark.parametrize("counted", [False, True])
def test_records_behind_write_position_are_kept(orphans: int, counted: bool, tmp_path: Path) -> None:  # 38, 40-42
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        positions = [writer.append(b"%d" % number) for number in range(10)]
    stale(path, positions[10 - orphans] + 16, 11 if counted else 11 - orphans)
    with Writer.open(path) as writer:
        assert writer.append(b"new") > positions[-1]
    assert contents(path) == [*(b"%d" % number for number in range(10)), b"new"]
    with XChannelLog(path) as log:
        assert list(log.verify()) == []


def test_an_orphaned_skip_is_followed_and_the_count_mended(tmp_path: Path) -> None:  # 39
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a" * 3000)
        slot = writer.next_position
        writer.append(b"b" * 3000)
    stale(path, slot + 16, 2)
    with Writer.open(path) as writer:
        writer.append(b"c")
    assert [payload[:1] for payload in contents(path)] == [b"a", b"b", b"c"]
    assert struct.unpack("<Q", path.read_bytes()[24:32]) == (5,)  # Channel, a, Skip, b, c


def test_a_recovery_that_fails_writes_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:  # 43
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        positions = [writer.append(b"%d" % number) for number in range(3)]
    stale(path, positions[1] + 16, 2)
    before = path.read_bytes()
    disk = FaultyDisk(PosixDisk())
    disk.fail("allocate", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        Writer.open(path, disk=disk)
    assert path.read_bytes() == before
    with Writer.open(path, disk=disk) as writer:
        writer.append(b"new")
    assert contents(path) == [b"0", b"1", b"2", b"new"]


def test_a_missing_roll_is_completed_by_the_next_writer(tmp_path: Path) -> None:  # 82
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        slot = writer.append(b"a") + 24
        writer.roll()
        writer.append(b"b")
    with path.open("r+b") as file:  # as if its writer had died before the Roll
        file.seek(slot)
        file.write(struct.pack("<BBHIQ", 0, 1, 0, 0, 0))
    stale(path, slot + 16, 2)
    Writer.open(path).close()
    assert contents(path) == [b"a", b"b"]
    data = path.read_bytes()
    assert data[slot : slot + 2] == b"\1\3"
    assert struct.unpack("<Q", data[16:24]) == (slot + 32,)
    with XChannelLog(path) as log:
        assert list(log.verify()) == []
    Writer.open(path).close()
    assert path.read_bytes() == data  # 84: a completed roll is left alone


def test_a_completed_roll_is_left_as_it_is(tmp_path: Path) -> None:  # 84
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"one")
        writer.roll()
    before = path.read_bytes()
    for _ in range(2):
        with Writer.open(path) as writer:
            writer.append(b"two")
    assert path.read_bytes() == before


def test_a_successor_of_another_region_size_refuses_the_open(tmp_path: Path) -> None:  # 83
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        writer.append(b"a")
    Writer.precreate(tmp_path / "other", region_bytes=8192)
    (tmp_path / "other").rename(tmp_path / "chan.1")
    before = (tmp_path / "chan").read_bytes()
    with pytest.raises(CorruptionError, match=r"chan\.1 at byte 40: region_size is 8192, but .*chan has 4096"):
        Writer.open(tmp_path / "chan")
    assert (tmp_path / "chan").read_bytes() == before


def test_a_stub_in_the_place_of_the_file_before_is_left_alone(tmp_path: Path) -> None:  # 83
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
    os.truncate(path, 64)
    before = path.read_bytes()
    with Writer.open(path) as writer:
        writer.append(b"c")
    assert path.read_bytes() == before
    with Reader.open(path, 1 << 40) as reader:
        assert [bytes(record.payload) for record in reader.records(timeout=0)] == [b"b", b"c"]


def test_an_empty_newest_file_is_refused_and_not_replaced(tmp_path: Path) -> None:  # 119
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        writer.append(b"a")
    (tmp_path / "chan.1").touch()
    with pytest.raises(CorruptionError, match="empty"):
        Writer.open(tmp_path / "chan")
    assert (tmp_path / "chan.1").stat().st_size == 0


# --- Rolling and retention


def test_a_roll_by_hand_begins_the_next_file(tmp_path: Path) -> None:  # 2, 27
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        for payload in (b"one", b"two", b"three"):
            writer.append(payload)
            writer.roll()
        assert writer.file_sequence == 3
    assert names(tmp_path) == ["chan", "chan.1", "chan.2", "chan.3"]
    assert contents(path) == [b"one", b"two", b"three"]


def test_a_roll_that_cannot_be_done_leaves_the_writer_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        before = path.read_bytes()
        (tmp_path / "chan.1").mkdir()
        with pytest.raises(OptionsError, match="a folder has the name"):
            writer.roll()
        assert path.read_bytes() == before
        writer.append(b"b")
        (tmp_path / "chan.1").rmdir()
        writer.roll()
        writer.append(b"c")
    assert contents(path) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("operation", ["create", "allocate", "link", "map"])
def test_a_full_disk_fails_the_append_and_not_the_channel(operation: str, tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096, roll_bytes=8192, disk=disk) as writer:
        written = [b"x" * 1000]
        writer.append(written[0])
        failures = 0
        for number in range(40):
            disk.fail(operation, OSError(errno.ENOSPC, "No space left on device"))
            payload = b"%d" % number * 500
            try:
                writer.append(payload)
            except OSError:
                failures += 1
                writer.append(payload)  # room was made
            disk._faults.clear()
            written.append(payload)
        assert failures > 2
    assert contents(path) == written
    with XChannelLog(path) as log:
        assert list(log.verify()) == []


def test_precreate_leaves_a_channel_for_its_writer_and_readers(tmp_path: Path) -> None:
    Writer.precreate(tmp_path / "chan", region_bytes=8192)
    with Reader.open(tmp_path / "chan") as reader, Writer.open(tmp_path / "chan") as writer:
        assert reader.try_read() is None
        writer.append(b"x")
        assert bytes(reader.read(timeout=1).payload) == b"x"


# --- Durability


def test_it_works_on_a_disk_in_memory() -> None:
    disk = MemoryDisk()
    with Writer.open("chan", region_bytes=4096, roll_bytes=8192, disk=disk) as writer:
        writer.append_many([b"x" * 1000] * 20)
        assert contents("chan", disk=disk) == [b"x" * 1000] * 20


# --- Threads, close, fork, pickle


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_threads_append_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096, roll_bytes=50_000) as writer:

        def work(number: int) -> None:
            for turn in range(0, 600, 3):
                writer.append(struct.pack("<II", number, turn) + bytes(number * 10))
                writer.append_many([struct.pack("<II", number, turn + 1)])
                writer.append_many(Batch.of([struct.pack("<II", number, turn + 2)]))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    turns: dict[int, list[int]] = {}
    for payload in contents(path):
        number, turn = struct.unpack_from("<II", payload)
        turns.setdefault(number, []).append(turn)
    assert turns == {number: list(range(600)) for number in range(6)}


def test_a_closed_writer_says_so_in_every_way(tmp_path: Path) -> None:
    writer = Writer.open(tmp_path / "chan")
    writer.close()
    writer.close()
    for use in (
        lambda: writer.append(b"x"),
        lambda: writer.append_many([b"x"]),
        lambda: writer.append_many(Batch.of([b"x"])),
        lambda: writer.reserve(1),
        writer.commit,
        writer.roll,
        writer.sync,
        lambda: writer.next_position,
    ):
        with pytest.raises(ClosedError, match="the writer is closed"):
            use()
    assert "the writer is closed" in repr(writer)
    with pytest.raises(TypeError, match="open it again"):
        pickle.dumps(writer)


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("sync", ["none", "always"])
def test_the_child_of_a_fork_cannot_write(sync: Any, tmp_path: Path) -> None:
    path = tmp_path / "chan"
    writer = Writer.open(path, region_bytes=4096, sync=sync)
    writer.append(b"parent")
    view = writer.reserve(5)
    child = os.fork()
    if child == 0:  # pragma: no cover - the child reports by its exit code
        code = 1
        try:
            writer.append(b"child")
        except ClosedError as exc:
            code = 0 if "before a fork" in str(exc) else 2
        try:
            Writer.open(path)
            code = 3
        except LockedError:
            pass
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    view[:] = b"still"
    writer.commit()
    with pytest.raises(LockedError):
        Writer.open(path)
    writer.close()
    assert contents(path) == [b"parent", b"still"]
