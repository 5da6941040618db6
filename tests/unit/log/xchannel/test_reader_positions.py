"""Positions and seeking.  Numbers in comments are those of the original's own suites (facts 6)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from xchannels import payloads, taken

from penstock.errors import (
    ExpiredError,
    OptionsError,
)
from penstock.log.xchannel import Reader, Writer


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
    with Reader.open(path, "latest") as live, Reader.open(path, live.position) as reader:
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
    with Writer.open(path, region_bytes=4096, roll_bytes=1 << 30, keep_files=1) as writer, Reader.open(path) as reader:
        first = writer.append(b"a")
        writer.roll()
        writer.roll()
        with pytest.raises(ExpiredError) as caught:
            reader.seek(first)
        assert (caught.value.position, caught.value.first) == (first, (2 << 40) + 80)


def test_a_reader_that_retention_overtakes_learns_where_to_go_on(path: Path) -> None:
    with Writer.open(path, region_bytes=4096, roll_bytes=1 << 30, keep_files=1) as writer:
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
                writer.append(b"%d " % number * 50)
        stop.set()

    Writer.precreate(path, region_bytes=4096)
    thread = threading.Thread(target=write)
    thread.start()
    read = expired = 0
    while not stop.is_set() or not read:
        try:
            with Reader.open(path) as reader:
                due = -1
                while (record := reader.try_read()) is not None:
                    numbers = bytes(record.payload).split()
                    assert numbers == [b"%d" % (int(numbers[0]) if due < 0 else due)] * 50
                    due = int(numbers[0]) + 1
                    read += 1
        except ExpiredError:
            expired += 1
    thread.join()
    assert read
