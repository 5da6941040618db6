"""What a reader does about damage.  Numbers in comments are those of the original's own suites (facts 6)."""

from __future__ import annotations

import errno
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from xchannels import payloads, put, taken

from penstock.disk import PosixDisk
from penstock.errors import (
    CorruptionError,
)
from penstock.log.xchannel import Reader, Writer, XChannelLog, files
from penstock.testing.faulty import FaultyDisk


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


@pytest.mark.parametrize("operation", ["open", "map"])
def test_a_file_or_window_that_cannot_be_had_is_an_error_once_and_nothing_is_lost(  # 144
    operation: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WINDOW_BYTES", 8192)
    values = [b"%d " % number * 200 for number in range(100)]
    with Writer.open(path, region_bytes=4096, roll_bytes=12_000) as writer:
        writer.append_many(values)
    disk: Any = FaultyDisk(PosixDisk())
    found, failures = [], 0
    with Reader.open(path, disk=disk) as reader:
        while len(found) < len(values):
            disk.fail(operation, OSError(errno.ENOMEM, "Cannot allocate memory"))
            try:
                record = reader.try_read()
            except OSError:
                failures += 1
                record = reader.try_read()
            disk._faults.clear()
            assert record is not None
            found.append(bytes(record.payload))
        assert reader.try_read() is None
    assert found == values
    assert failures > 2


@pytest.mark.parametrize("made", [b"", bytes(4096), b"\1" + bytes(4095)])
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_file_that_is_just_being_made_is_no_damage(
    made: bytes, start: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2.0.0 names a file before it fills it: for a moment an empty one, or one without a header, is the newest.
    Writer.precreate(path, region_bytes=4096)
    whole = path.read_bytes()
    path.write_bytes(made)
    looks = []

    def the_writer_goes_on(seconds: float) -> None:
        looks.append(seconds)
        path.write_bytes(whole)

    monkeypatch.setattr(time, "sleep", the_writer_goes_on)
    with Reader.open(path, start) as reader:
        assert reader.position == 80
    assert len(looks) == 1


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


def lose_commit(path: Path, region_bytes: int, number: int = 20) -> list[int]:
    """Fill a channel, and lose one bit: the commit byte of one record is zero."""
    with Writer.open(path, region_bytes=region_bytes) as writer:
        positions = [writer.append(b"%03d" % n + bytes(60)) for n in range(100)]
    put(path, positions[number], b"\0")
    return positions


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_record_that_lost_its_commit_byte_is_no_end(path: Path, start: Any) -> None:
    positions = lose_commit(path, 1 << 16)
    reason = "is not committed, though the channel was written up to byte"
    with pytest.raises(CorruptionError, match=reason) as caught, Reader.open(path, start) as reader:
        payloads(reader)
    assert (caught.value.file, caught.value.byte) == (str(path), positions[20])
    with XChannelLog(path) as log, pytest.raises(CorruptionError, match="not committed"):
        _ = log.next_position
    with XChannelLog(path) as log:
        assert [(p.byte, p.reason[:31]) for p in log.verify()] == [(positions[20], "the record here is not committe")]


def test_a_record_that_became_a_roll_is_no_end_of_its_file(path: Path) -> None:
    with Writer.open(path, region_bytes=4096, roll_bytes=4096) as writer:
        positions = [writer.append(b"%03d" % n + bytes(60)) for n in range(100)]
    put(path, positions[20] + 1, b"\3")
    with Reader.open(path) as reader, pytest.raises(CorruptionError, match="there is a Roll here, though") as caught:
        payloads(reader)
    assert caught.value.byte == positions[20]
    with XChannelLog(path, on_damage="skip") as log:
        assert [problem.byte for problem in log.verify()] == [positions[20]]
        assert log.read(log.first_position, 1000).positions.tolist() == positions[:20]
        found = log.read(positions[20]).positions.tolist()
        assert found[0] == next(position for position in positions if position > 1 << 40)
        assert log.damage_count == 1


def test_reading_goes_on_in_the_next_region_behind_a_lost_commit_byte(path: Path) -> None:
    positions = lose_commit(path, 4096)
    with XChannelLog(path, on_damage="skip") as log:
        at, found = log.first_position, []
        while len(batch := log.read(at)):
            found += batch.positions.tolist()
            at = batch.next_position
        assert found == positions[:20] + [position for position in positions if position >= 4096]
        assert log.damage_count == 1
        assert log.next_position > positions[-1]


def test_a_writer_sets_aside_what_lies_behind_a_lost_commit_byte(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    positions = lose_commit(path, 1 << 16)
    lost = path.read_bytes()[positions[20] : positions[-1] + 80]
    with Writer.open(path) as writer:
        assert writer.append(b"new") == positions[20]
    aside = path.with_name(f"chan.penstock-cut-0-{positions[20]}.bad")
    assert lost.rstrip(b"\0") in aside.read_bytes()
    assert str(aside) in caplog.text
    with Reader.open(path) as reader:
        assert payloads(reader)[19:] == [b"%03d" % 19 + bytes(60), b"new"]


def test_what_is_set_aside_at_one_place_twice_is_kept_twice(path: Path) -> None:
    positions = lose_commit(path, 1 << 16)
    with Writer.open(path) as writer:
        for number in range(9):
            writer.append(b"later %d" % number)
    with path.open("r+b") as file:
        file.seek(positions[20])
        file.write(b"\0")
    with Writer.open(path) as writer:
        assert writer.append(b"new") == positions[20]
    first, second = sorted(path.parent.glob("*.bad"))
    assert b"later 8" in first.read_bytes() + second.read_bytes()
    assert b"039" in first.read_bytes() + second.read_bytes()


def test_a_channel_that_is_written_to_is_never_taken_for_damaged(path: Path) -> None:
    with Writer.open(path, region_bytes=4096, roll_bytes=1 << 14) as writer, Reader.open(path) as reader:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                writer.append(b"%d" % number)
                number += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            seen = 0
            for record in reader.records(timeout=5):
                assert bytes(record.payload) == b"%d" % seen
                seen += 1
                if seen % 100 == 0:
                    with Reader.open(path, "latest") as live:
                        live.try_read()
                if seen == 2_000:
                    break
        finally:
            stop.set()
            thread.join()
    assert seen == 2_000
