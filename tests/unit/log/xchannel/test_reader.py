"""What a reader of a channel promises.  Numbers in comments are those of the original's own suites (facts 6)."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import FaultyDisk, PosixDisk
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    ReplacedError,
    Timeout,
)
from penstock.log.xchannel import Reader, Writer, XChannelLog, cleanup
from penstock.types import Record

pytestmark = pytest.mark.timeout(60)


def payloads(reader: Reader) -> list[bytes]:
    return [bytes(record.payload) for record in reader.records(timeout=0)]


def taken(reader: Reader) -> bytes:
    record = reader.try_read()
    assert record is not None
    return bytes(record.payload)


def put(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chan"


# --- Where a reader begins


def test_late_join_begins_in_the_oldest_file_that_is_left(path: Path) -> None:  # 1, 23
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"gone")
        writer.roll()
        writer.append(b"one")
        writer.append(b"two")
        path.unlink()
        with Reader.open(path) as late, Reader.open(path, "live") as live:
            assert late.file_sequence == 1
            assert payloads(late) == [b"one", b"two"]
            assert live.try_read() is None


def test_a_live_reader_reads_the_new_file_from_its_first_record(path: Path) -> None:  # 3
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"before")
        with Reader.open(path, "live") as reader:
            writer.roll()
            writer.append(b"one")
            writer.append(b"two")
            assert payloads(reader) == [b"one", b"two"]


def test_file_sequence_changes_on_the_first_record_of_each_file(path: Path) -> None:  # 23
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        for number in range(3):
            writer.append(b"a")
            writer.append(b"b")
            assert (taken(reader), reader.file_sequence) == (b"a", number)
            assert (taken(reader), reader.file_sequence) == (b"b", number)
            writer.roll()


def test_a_channel_that_is_not_there_is_said_to_be_missing(path: Path) -> None:  # 25
    for start in ("first", "live", 80):
        with pytest.raises(OptionsError, match="there is no channel here"):
            Reader.open(path, start)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="the folder does not exist"):
        Reader.open(path / "deeper")
    Writer.precreate(path)
    with pytest.raises(OptionsError, match="start='last'"):
        Reader.open(path, "last")  # type: ignore[arg-type]


# --- Batches


def test_a_batch_holds_user_records_only_and_the_next_is_empty(path: Path) -> None:  # 5
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        writer.append_many([b"one", b"two"])
        assert reader.read_batch().to_payloads() == [b"one", b"two"]
        assert len(reader.read_batch()) == 0


def test_a_batch_spans_regions(path: Path) -> None:  # 6
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"x" * 3000, b"y" * 3000, b"z" * 3000])
    with Reader.open(path) as reader:
        batch = reader.read_batch()
        assert [payload[:1] for payload in batch.to_payloads()] == [b"x", b"y", b"z"]
        assert batch.positions.tolist() == [80, 4096, 8192]


def test_batches_follow_files(path: Path) -> None:  # 7, 87
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        for number in range(3):
            writer.append_many([b"%d" % number] * 2)
            writer.roll()
        found = []
        while len(batch := reader.read_batch()):
            found += list(zip(batch.positions.tolist(), batch.to_payloads(), strict=True))
        assert found == [((n << 40) + 80 + 24 * k, b"%d" % n) for n in range(3) for k in range(2)]


def test_an_empty_batch_leaves_a_live_reader_where_it_was(path: Path) -> None:  # 8
    with Writer.open(path) as writer, Reader.open(path, "live") as reader:
        before = reader.position
        assert len(reader.read_batch()) == 0
        assert reader.position == before
        writer.append(b"x")
        assert reader.read_batch().positions.tolist() == [before]


def test_a_late_joiner_of_an_empty_channel_stands_on_the_first_slot(path: Path) -> None:  # 9
    Writer.precreate(path)
    with Reader.open(path) as reader:
        assert len(reader.read_batch()) == 0
        assert reader.position == 80


def test_a_batch_obeys_its_limit_and_goes_on(path: Path) -> None:  # 60, 61
    with Writer.open(path) as writer, Reader.open(path) as reader:
        writer.append_many([b"%d" % n for n in range(10)])
        assert reader.read_batch(4).to_payloads() == [b"0", b"1", b"2", b"3"]
        assert taken(reader) == b"4"  # 65: one cursor for both ways of reading
        assert len(reader.read_batch(100)) == 5
        writer.append(b"more")
        assert reader.read_batch().to_payloads() == [b"more"]
        with pytest.raises(OptionsError, match="limit=0"):
            reader.read_batch(0)


def test_records_come_before_the_roll_that_cannot_be_followed(path: Path) -> None:  # 20, 85
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"one", b"two"])
        writer.roll()
        writer.append(b"three")
    away = path.with_name("away")
    path.with_name("chan.1").rename(away)
    for read in ("batch", "single"):
        with Reader.open(path) as reader:
            if read == "batch":
                assert reader.read_batch().to_payloads() == [b"one", b"two"]
            else:
                assert [taken(reader), taken(reader)] == [b"one", b"two"]
            for _ in range(3):
                with pytest.raises(CorruptionError, match=r"chan\.1 at byte 0: missing"):
                    reader.read_batch() if read == "batch" else reader.try_read()
            away.rename(path.with_name("chan.1"))
            assert taken(reader) == b"three"
            path.with_name("chan.1").rename(away)


# --- Damage


@pytest.mark.parametrize(
    ("offset", "value", "byte"),
    [(80, b"\2", 80), (80, b"\1\x63", 81)],  # 10, 11
)
def test_a_bad_header_is_named_by_every_way_of_reading(offset: int, value: bytes, byte: int, path: Path) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x")
    put(path, offset, value)
    with Reader.open(path) as reader:
        for read in (reader.try_read, reader.read_batch, reader.try_read, lambda: reader.wait(0.01)):
            with pytest.raises(CorruptionError) as caught:
                read()
            assert (caught.value.file, caught.value.byte) == (str(path), byte)


def test_damage_that_is_mended_is_read_on(path: Path) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"one", b"two"])
    put(path, 104, b"\7")
    with Reader.open(path) as reader:
        assert taken(reader) == b"one"
        with pytest.raises(CorruptionError):
            reader.try_read()
        put(path, 104, b"\1")
        assert taken(reader) == b"two"


def test_skip_damage_goes_on_in_the_next_region_and_says_what_it_left(path: Path) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"a" * 1000, b"b" * 1000, b"c" * 1500, b"d" * 2000, b"e" * 2000])
    put(path, 80 + 1016, b"\5")
    with Reader.open(path) as reader:
        assert reader.skip_damage() is None
        assert taken(reader)[:1] == b"a"
        with pytest.raises(CorruptionError):
            reader.try_read()
        problem = reader.skip_damage()
        assert problem is not None
        assert (problem.byte, problem.file) == (1096, str(path))
        assert [payload[:1] for payload in payloads(reader)] == [b"d", b"e"]
        assert reader.skip_damage() is None


def test_skip_damage_in_the_last_region_goes_on_in_the_next_file(path: Path) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"a", b"b"])
        writer.roll()
        writer.append(b"c")
    put(path, 104, b"\5")
    with Reader.open(path) as reader:
        assert taken(reader) == b"a"
        assert reader.skip_damage() is not None
        assert payloads(reader) == [b"c"]


def test_a_moment_between_a_commit_and_the_next_header_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2.0.0 lays the next header after the commit: for a moment the bytes of a longer reservation are there.
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x")
    put(path, 104, b"\xff" * 16)
    looks = []

    def the_writer_goes_on(seconds: float) -> None:
        looks.append(seconds)
        put(path, 104, struct.pack("<BBHIQ", 0, 1, 0, 0, 0))

    with Reader.open(path) as reader:
        assert taken(reader) == b"x"
        monkeypatch.setattr(time, "sleep", the_writer_goes_on)
        assert reader.try_read() is None
        monkeypatch.undo()
    assert len(looks) == 1


# --- Waiting


def test_a_read_with_a_timeout_gives_up(path: Path) -> None:  # 28, 31
    Writer.precreate(path)
    with Reader.open(path) as reader:
        began = time.monotonic()
        with pytest.raises(Timeout, match=r"no record within 0\.05 s"):
            reader.read(timeout=0.05)
        assert time.monotonic() - began >= 0.045
        assert reader.wait(0) is False
        assert reader.wait(0.01) is False
        assert list(reader.records(timeout=0.01)) == []
        assert list(reader.batches(timeout=0.01)) == []


def test_a_read_returns_what_is_written_meanwhile(path: Path) -> None:  # 29, 90
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:

        def write() -> None:
            writer.roll()
            writer.append(b"later")

        thread = threading.Timer(0.025, write)
        thread.start()
        assert bytes(reader.read(timeout=30).payload) == b"later"
        thread.join()


def test_wait_takes_nothing(path: Path) -> None:  # 18, 19, 30
    with Writer.open(path) as writer, Reader.open(path) as reader:
        assert reader.wait(0) is False
        writer.append(b"x")
        assert reader.wait(0)
        assert reader.wait(0)
        assert taken(reader) == b"x"


def test_wait_steps_over_a_skip(path: Path) -> None:  # 32
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        writer.append(b"x" * 3000)
        taken(reader)
        writer.append(b"y" * 3000)
        assert reader.wait(0)
        assert reader.position == 4096


def test_records_are_awaited_without_blocking_the_loop(path: Path) -> None:
    async def follow(reader: Reader) -> list[bytes]:
        found = []
        async for record in reader:
            found.append(bytes(record.payload))
            if len(found) == 3:
                return found
        return found

    async def both() -> list[bytes]:
        with Writer.open(path) as writer, Reader.open(path) as reader:
            task = asyncio.ensure_future(follow(reader))
            for payload in (b"one", b"two", b"three"):
                await asyncio.sleep(0.002)
                writer.append(payload)
            return await asyncio.wait_for(task, 30)

    assert asyncio.run(both()) == [b"one", b"two", b"three"]


# --- Positions (68 to 73)


@pytest.fixture
def rolled(path: Path) -> list[tuple[int, bytes]]:
    """A channel of 300 records in several files, and where each of them is."""
    values = [b"%d" % number * (number % 40) for number in range(300)]
    with Writer.open(path, region_bytes=4096, roll_bytes=9000) as writer:
        return list(zip(writer.append_many(values).tolist(), values, strict=True))


def test_every_way_of_reading_names_the_position(path: Path, rolled: list[tuple[int, bytes]]) -> None:  # 68
    with Reader.open(path) as reader:
        assert [(record.position, bytes(record.payload)) for record in reader.records(timeout=0)] == rolled
    with Reader.open(path) as reader:
        found = []
        while len(batch := reader.read_batch(7)):
            found += [(record.position, bytes(record.payload)) for record in batch]
        assert found == rolled


def test_a_reader_opens_at_any_record(path: Path, rolled: list[tuple[int, bytes]]) -> None:  # 69
    for position, payload in rolled:
        with Reader.open(path, position) as reader:
            assert (reader.position, taken(reader)) == (position, payload)
    with Reader.open(path, "live") as live, Reader.open(path, live.position) as reader:
        assert reader.try_read() is None


def test_seek_goes_back_and_forth_and_a_refused_one_changes_nothing(  # 70, 71
    path: Path, rolled: list[tuple[int, bytes]]
) -> None:
    with Reader.open(path) as reader:
        for index in (200, 3, 299, 0, 150):
            reader.seek(rolled[index][0])
            assert taken(reader) == rolled[index][1]
        before = reader.position
        last = rolled[-1][0]
        for wrong, reason in (
            (rolled[10][0] + 8, "no record begins at position"),
            (last + 100_000, "past the end of the channel"),
            (50 << 40, "past the end of the channel"),
            (-1, "must be between"),
            (1 << 63, "must be between"),
        ):
            with pytest.raises(OptionsError, match=reason):
                reader.seek(wrong)
            assert reader.position == before
        assert taken(reader) == rolled[151][1]
        reader.seek_live()
        assert reader.try_read() is None
        reader.seek(1 << 40)  # the start of a file is the first record in it
        assert reader.position == (1 << 40) + 80


def test_a_position_that_retention_took_has_expired(path: Path) -> None:  # 70
    with Writer.open(path, region_bytes=4096, keep_files=1) as writer, Reader.open(path) as reader:
        first = writer.append(b"a")
        writer.roll()
        writer.roll()
        with pytest.raises(ExpiredError) as caught:
            reader.seek(first)
        assert (caught.value.position, caught.value.first) == (first, (2 << 40) + 80)


def test_a_reader_that_retention_overtakes_learns_where_to_go_on(path: Path) -> None:
    with Writer.open(path, region_bytes=4096, keep_files=1) as writer:
        writer.append(b"a")
        reader = Reader.open(path)
        for _ in range(3):
            writer.roll()
        writer.append(b"z")
        assert taken(reader) == b"a"  # its own file is mapped: that stays
        with pytest.raises(ExpiredError) as caught:
            reader.try_read()
        reader.seek(caught.value.first)
        assert payloads(reader) == [b"z"]
        reader.close()


def test_a_late_reader_beside_retention_never_crashes(path: Path) -> None:  # 57
    stop = threading.Event()

    def write() -> None:
        with Writer.open(path, region_bytes=4096, roll_bytes=4096, keep_files=2) as writer:
            for number in range(4000):
                writer.append(b"%d" % number * 50)
        stop.set()

    Writer.precreate(path, region_bytes=4096)
    thread = threading.Thread(target=write)
    thread.start()
    read = expired = 0
    while not stop.is_set() or not read:
        try:
            with Reader.open(path) as reader:
                while (record := reader.try_read()) is not None:
                    assert bytes(record.payload).startswith(bytes(record.payload)[:1])
                    read += 1
        except ExpiredError:
            expired += 1
    thread.join()
    assert read


# --- Live is never stranded (75 to 81)


def test_live_on_a_channel_whose_newest_file_was_rolled_joins_the_newest(path: Path) -> None:  # 75
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        writer.roll()
        with Reader.open(path, "live") as reader:
            assert reader.file_sequence == 1
            writer.append(b"b")
            assert payloads(reader) == [b"b"]


def test_live_that_meets_a_roll_before_the_new_file_waits_for_it(path: Path) -> None:  # 76
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
    away = path.with_name("away")
    path.with_name("chan.1").rename(away)
    with Reader.open(path, "live") as reader:
        with pytest.raises(CorruptionError, match="missing"):
            reader.try_read()
        away.rename(path.with_name("chan.1"))
        assert payloads(reader) == [b"b"]


def test_bytes_behind_a_roll_are_never_read(path: Path) -> None:  # 77
    with Writer.open(path, region_bytes=4096) as writer:
        writer.reserve(400)[:] = b"\1" * 400
        writer.commit(8)
        writer.roll()
    assert path.read_bytes()[120:136] == b"\1" * 16  # right behind the Roll
    for start in ("first", "live"):
        with Reader.open(path, start) as reader:  # type: ignore[arg-type]
            assert len(payloads(reader)) == (start == "first")


@pytest.mark.parametrize("length", [4096 - 112, 4096 - 120])
def test_live_when_the_roll_took_the_last_slot(length: int, path: Path) -> None:  # 79
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x" * length)
        before = Reader.open(path, "live")
        writer.roll()
        write_position = struct.unpack("<Q", path.read_bytes()[16:24])[0]
        assert write_position > path.stat().st_size
        after = Reader.open(path, "live")
        writer.append(b"y")
        for reader in (before, after):
            assert payloads(reader) == [b"y"]
            reader.close()


def test_live_on_a_file_whose_writer_died_starts_behind_the_last_record(path: Path) -> None:  # 74
    with Writer.open(path, region_bytes=4096) as writer:
        positions = [writer.append(b"%d" % n) for n in range(4)]
    put(path, 16, struct.pack("<QQ", positions[2] + 16, 3))
    with Reader.open(path, "live") as reader:
        assert reader.position == positions[3] + 24


def test_no_live_open_is_ever_stranded(path: Path) -> None:  # 78, 80, 81
    total = 20_000
    Writer.precreate(path, region_bytes=4096)
    done = threading.Event()

    def write() -> None:
        with Writer.open(path, roll_bytes=4096, keep_files=3) as writer:
            for number in range(total):
                writer.append(struct.pack("<Q", number) * 4)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    opened = 0
    while not done.is_set():
        try:
            with Reader.open(path, "live") as reader:
                opened += 1
                found: Record | None = None
                while found is None:
                    named = reader.position
                    found = reader.try_read()
                    if found is None and done.is_set():
                        found = reader.try_read()
                        break
                if found is not None and found.position >> 40 == named >> 40:
                    assert found.position == named or found.position % 4096 == 0
        except ExpiredError:
            continue  # retention was faster
    thread.join()
    assert opened


# --- A channel that is not the one it was


def test_a_recreated_channel_is_noticed(path: Path) -> None:  # 34, 72
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"old")
    reader = Reader.open(path)
    assert taken(reader) == b"old"
    cleanup(path)
    time.sleep(0.01)
    with pytest.raises(ReplacedError, match="its files are gone"):
        reader.try_read()
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"new")
        time.sleep(0.01)
        with pytest.raises(ReplacedError, match="another file has taken the place"):
            reader.try_read()
    reader.close()


def test_a_recreated_channel_is_noticed_at_a_roll(path: Path) -> None:  # 24, 86
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"old")
        writer.roll()
    reader = Reader.open(path)
    cleanup(path)
    with Writer.open(path, region_bytes=4096) as writer:
        writer.roll()
        writer.append(b"new")
        assert taken(reader) == b"old"
        with pytest.raises(ReplacedError, match="its log id changed"):
            reader.try_read()
    reader.close()


def test_a_foreign_channel_without_sidecars_is_read_all_the_same(path: Path) -> None:
    with Writer.open(path, region_bytes=4096, sync="always") as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
    for sidecar in path.parent.glob("chan.penstock-*"):
        sidecar.unlink()
    with Reader.open(path) as reader:
        assert payloads(reader) == [b"a", b"b"]


def test_a_writer_that_died_between_using_the_next_file_and_the_roll_strands_nobody(path: Path) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        slot = writer.append(b"a") + 24
        writer.roll()
        writer.append(b"b")
    put(path, slot, struct.pack("<BBHIQ", 0, 1, 0, 0, 0))
    with Reader.open(path) as reader:
        assert taken(reader) == b"a"
        time.sleep(0.01)
        assert bytes(reader.read(timeout=5).payload) == b"b"


# --- What was read stays


def test_records_and_batches_outlive_reader_files_and_retention(path: Path) -> None:  # 58, 59, 64, 67
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"one", b"two"])
    reader = Reader.open(path)
    record = reader.try_read()
    batch = reader.read_batch()
    promoted = batch[0]
    assert record is not None
    reader.close()
    del reader, batch
    cleanup(path)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend([bytes(record.payload), bytes(promoted.payload)]))
    thread.start()
    thread.join()
    assert found == [b"one", b"two"]


def test_threads_share_a_reader_and_each_record_goes_to_one(path: Path) -> None:  # 66
    with Writer.open(path, region_bytes=4096, roll_bytes=20_000) as writer:
        writer.append_many([struct.pack("<I", number) for number in range(5000)])
    found: list[list[int]] = [[], [], [], []]
    with Reader.open(path) as reader:

        def work(mine: list[int], batches: bool) -> None:
            while True:
                if batches:
                    batch = reader.read_batch(10)
                    if not len(batch):
                        return
                    mine.extend(int.from_bytes(payload, "little") for payload in batch.to_payloads())
                else:
                    record = reader.try_read()
                    if record is None:
                        return
                    mine.append(int.from_bytes(record.payload, "little"))

        threads = [threading.Thread(target=work, args=(mine, n % 2 == 0)) for n, mine in enumerate(found)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(number for mine in found for number in mine) == list(range(5000))
    assert all(mine == sorted(mine) for mine in found)


def test_a_closed_reader_says_so(path: Path) -> None:
    Writer.precreate(path)
    reader = Reader.open(path)
    with pytest.raises(TypeError, match="open it again"):
        pickle.dumps(reader)
    reader.close()
    reader.close()
    for use in (reader.try_read, reader.read_batch, lambda: reader.wait(0), lambda: reader.position):
        with pytest.raises(ClosedError, match="the reader is closed"):
            use()
    assert "closed" in repr(reader)


@pytest.mark.filterwarnings("ignore:This process")
def test_the_child_of_a_fork_opens_its_own_reader(path: Path) -> None:
    with Writer.open(path) as writer:
        writer.append(b"x")
        with Reader.open(path) as reader:
            child = os.fork()
            if child == 0:  # pragma: no cover - the child reports by its exit code
                code = 1
                try:
                    reader.try_read()
                except ClosedError:
                    with Reader.open(path) as own:
                        code = 0 if taken(own) == b"x" else 2
                os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert taken(reader) == b"x"


def test_a_reader_needs_no_more_than_read_permission_and_opens_no_file_for_writing(path: Path) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x")
        writer.roll()
        writer.append(b"y")
    calls: list[tuple[str, str]] = []
    disk: Any = FaultyDisk(PosixDisk())
    disk.on_call = lambda operation, name: calls.append((operation, name))
    with XChannelLog(path, disk) as log:
        assert log.read(80).to_payloads() == [b"x"]
        list(log.verify())
        log.stat()
    assert {operation for operation, _ in calls} <= {"open", "list", "read_at", "read_into", "map"}


def test_a_copy_of_the_files_is_a_channel(path: Path) -> None:
    with Writer.open(path, region_bytes=4096, roll_bytes=8192) as writer:
        writer.append_many([b"x" * 1000] * 20)
        copy = path.parent / "copy"
        copy.mkdir()
        for file in path.parent.glob("chan*"):
            shutil.copy(file, copy)
    with Reader.open(copy / "chan") as reader:
        assert payloads(reader) == [b"x" * 1000] * 20
