"""What a reader of a channel promises: where it begins, what it knows, and that what it read stays.

Numbers in comments are those of the original's own suites (facts 6).
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from xchannels import payloads, taken

from penstock.disk import PosixDisk
from penstock.errors import (
    ClosedError,
    OptionsError,
)
from penstock.log.xchannel import Reader, Writer, XChannelLog, cleanup
from penstock.testing.faulty import FaultyDisk

# --- Where a reader begins


def test_late_join_begins_in_the_oldest_file_that_is_left(path: Path) -> None:  # 1, 23
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"gone")
        writer.roll()
        writer.append(b"one")
        writer.append(b"two")
        path.unlink()
        with Reader.open(path) as late, Reader.open(path, "latest") as live:
            assert late.file_sequence == 1
            assert payloads(late) == [b"one", b"two"]
            assert live.try_read() is None


def test_a_live_reader_reads_the_new_file_from_its_first_record(path: Path) -> None:  # 3
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"before")
        with Reader.open(path, "latest") as reader:
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


def test_region_size_and_message_limit_are_known_to_the_reader(path: Path) -> None:  # 21
    with Writer.open(path, region_bytes=16384, max_message_bytes=1000) as writer:
        writer.append(b"x")
        writer.roll()
    for start in ("earliest", "latest"):
        with Reader.open(path, start) as reader:  # type: ignore[arg-type]
            assert (reader.region_bytes, reader.max_message_bytes) == (16384, 1000)
    with pytest.raises(ClosedError):
        reader.region_bytes  # noqa: B018
    Writer.precreate(path.with_name("other"))
    with Reader.open(path.with_name("other")) as reader:
        assert (reader.region_bytes, reader.max_message_bytes) == (1 << 20, 0)


def test_a_channel_that_is_not_there_is_said_to_be_missing(path: Path) -> None:  # 25
    for start in ("earliest", "latest", 80):
        with pytest.raises(OptionsError, match="there is no channel here"):
            Reader.open(path, start)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="the folder does not exist"):
        Reader.open(path / "deeper")
    Writer.precreate(path)
    with pytest.raises(OptionsError, match="start='last'"):
        Reader.open(path, "last")  # type: ignore[arg-type]


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
    for use in (
        reader.try_read,
        reader.read_batch,
        lambda: reader.wait(0),
        lambda: reader.position,
        lambda: reader.seek(80),
        reader.seek_live,
        reader.skip_damage,
    ):
        with pytest.raises(ClosedError, match="the reader is closed"):
            use()
    assert "closed" in repr(reader)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_reader_that_nobody_closed_lets_go_at_once(path: Path) -> None:
    def descriptors() -> int:
        return sum(os.path.realpath(entry.path) == str(path) for entry in os.scandir("/proc/self/fd"))

    Writer.precreate(path)
    gc.disable()  # no garbage collector should have to find it
    try:
        reader = Reader.open(path)
        take = reader.try_read
        assert take() is None
        del reader
        assert take() is None  # as long as someone can read, it can be read
        assert descriptors() == 1
        del take
        assert descriptors() == 0
    finally:
        gc.enable()


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
