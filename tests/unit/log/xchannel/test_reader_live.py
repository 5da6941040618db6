"""A live reader is never stranded, and notices when the channel is not the one it was.

Numbers in comments are those of the original's own suites (facts 6).
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from pathlib import Path

import pytest
from xchannels import payloads, put, taken

from penstock.errors import (
    CorruptionError,
    ExpiredError,
    ReplacedError,
)
from penstock.log.xchannel import Reader, Writer, cleanup
from penstock.types import Record

# --- Live is never stranded (75 to 81)


def test_live_on_a_channel_whose_newest_file_was_rolled_joins_the_newest(path: Path) -> None:  # 75
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        writer.roll()
        with Reader.open(path, "latest") as reader:
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
    with Reader.open(path, "latest") as reader:
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
    for start in ("earliest", "latest"):
        with Reader.open(path, start) as reader:  # type: ignore[arg-type]
            assert len(payloads(reader)) == (start == "earliest")


@pytest.mark.parametrize("length", [4096 - 112, 4096 - 120])
def test_live_when_the_roll_took_the_last_slot(length: int, path: Path) -> None:  # 79
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x" * length)
        before = Reader.open(path, "latest")
        writer.roll()
        write_position = struct.unpack("<Q", path.read_bytes()[16:24])[0]
        assert write_position > path.stat().st_size
        after = Reader.open(path, "latest")
        writer.append(b"y")
        for reader in (before, after):
            assert payloads(reader) == [b"y"]
            reader.close()


def test_live_on_a_file_whose_writer_died_starts_behind_the_last_record(path: Path) -> None:  # 74
    with Writer.open(path, region_bytes=4096) as writer:
        positions = [writer.append(b"%d" % n) for n in range(4)]
    put(path, 16, struct.pack("<QQ", positions[2] + 16, 3))
    with Reader.open(path, "latest") as reader:
        assert reader.position == positions[3] + 24


def test_no_live_open_is_ever_stranded(path: Path) -> None:  # 78, 80, 81
    total = 20_000
    Writer.precreate(path, region_bytes=4096)
    done, joined = threading.Event(), threading.Event()
    ends: list[int] = []

    def write() -> None:
        with Writer.open(path, roll_bytes=4096, keep_files=3) as writer:
            for number in itertools.count():
                writer.append(struct.pack("<Q", number) * 4)
                if number >= total and joined.is_set():
                    break
            ends.append(writer.next_position)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        try:
            with Reader.open(path, "latest") as reader:
                found: Record | None = None
                while found is None:
                    over, named = done.is_set(), reader.position
                    found = reader.try_read()
                    if found is None and over:
                        assert reader.position == ends[0], "stranded: it waits, and the channel went on elsewhere"
                        break
                if found is not None and found.position >> 40 == named >> 40:
                    assert found.position == named or found.position % 4096 == 0
                if found is not None:
                    joined.set()
        except ExpiredError:
            continue  # retention was faster
    thread.join()


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
        assert bytes(reader.read(timeout=60).payload) == b"b"
