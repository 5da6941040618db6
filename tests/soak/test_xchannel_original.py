"""Promise: a process of xchannel 2.0.0 and one of ours share a live channel, in both directions.

The original is built once by cargo, so these run with --long (`make soak`).
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.log.xchannel import Reader, Writer, XChannelLog

SOURCE = Path(__file__).parents[1] / "support" / "original"
WORDS = struct.Struct("<QQ")
REGION, ROLL = 64 << 10, 300_000


def payload(number: int) -> bytes:
    return WORDS.pack(number, number * 0x9E3779B97F4A7C15 & (1 << 64) - 1) + bytes(number * 37 % 2000)


@pytest.fixture(scope="session")
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the program in tests/support/original."""
    if not request.config.getoption("--long"):
        pytest.skip("builds the original with cargo: runs with --long")
    cargo = shutil.which("cargo")
    assert cargo is not None, "the original is built by cargo, and there is none on PATH"
    folder = tmp_path_factory.mktemp("original")
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    built = subprocess.run(
        [cargo, "build", "--release", "--quiet"], check=False, cwd=folder, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return str(folder / "target" / "release" / "original")


@contextmanager
def reading(original: str, path: Path, start: str, first: int, last: int) -> Iterator[subprocess.Popen[str]]:
    """A reader of the original that is attached when the block begins, and has read everything when it ends."""
    command = [original, "read", str(path), start, str(first), str(last)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        yield process
        output, errors = process.communicate(timeout=120)
        assert (output, errors, process.returncode) == ("read\n", "", 0)
    finally:
        process.kill()
        process.wait()


def append(writer: Writer, first: int, count: int) -> None:
    for number in range(first, first + count):
        writer.append(payload(number), kind=number & 0xFFFF, timestamp_ns=number)


def test_the_original_follows_our_writer_through_regions_and_files(original: str, tmp_path: Path) -> None:
    path, count = tmp_path / "chan", 40_000
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        with reading(original, path, "first", 0, count - 1), reading(original, path, "live", 0, count - 1):
            append(writer, 0, count // 2)
            with reading(original, path, "live", 0, count - 1):  # in the middle, wherever that is
                append(writer, count // 2, count // 2)
        assert writer.file_sequence > 100
    with reading(original, path, "first", 0, count - 1):
        pass


def test_we_follow_a_writer_of_the_original(original: str, tmp_path: Path) -> None:
    path, count = tmp_path / "chan", 40_000
    Writer.precreate(path, region_bytes=REGION)
    with Reader.open(path) as late, Reader.open(path, "latest") as live:
        command = [original, "write", str(path), str(REGION), str(ROLL), "0", str(count)]
        with subprocess.Popen(command) as process:
            for reader in (late, live):
                for number in range(count):
                    record = reader.read(timeout=60)
                    assert (record.kind, record.timestamp_ns) == (number & 0xFFFF, number)
                    assert record.payload == payload(number)
                assert reader.try_read() is None
        assert process.returncode == 0
        assert late.file_sequence > 100
    with XChannelLog(path) as log:
        assert [str(problem) for problem in log.verify()] == []


def test_readers_that_come_while_the_original_makes_its_files_find_a_channel(original: str, tmp_path: Path) -> None:
    """2.0.0 names a file before it has filled it: who looks in between must not take that for damage."""
    path, count = tmp_path / "chan", 40_000
    Writer.precreate(path, region_bytes=REGION)
    command = [original, "write", str(path), str(REGION), str(ROLL), "0", str(count)]
    opened = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            with Reader.open(path, "latest") as reader:
                found = reader.try_read()
                assert found is None or found.payload == payload(found.timestamp_ns or 0)
                opened += 1
    assert process.returncode == 0
    assert opened


def test_writers_take_turns(original: str, tmp_path: Path) -> None:
    path, count = tmp_path / "chan", 500
    with Reader.open(precreated(path)) as reader, reading(original, path, "first", 0, 4 * count - 1):
        for turn in range(4):
            if turn % 2:
                with Writer.open(path, roll_bytes=ROLL) as writer:
                    append(writer, turn * count, count)
            else:
                command = [original, "write", str(path), str(REGION), str(ROLL), str(turn * count), str(count)]
                subprocess.run(command, check=True)
        assert [record.payload for record in reader.records(timeout=0)] == [payload(n) for n in range(4 * count)]


def test_a_writer_of_the_original_goes_on_after_ours_was_killed_with_a_draft(original: str, tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=REGION, roll_bytes=ROLL) as writer:
        append(writer, 0, 270)
        deadline = time.monotonic() + 30
        while not (tmp_path / "chan.penstock-new").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        killed = tmp_path / "killed"
        killed.mkdir()
        for file in tmp_path.glob("chan*"):
            shutil.copy(file, killed)
    assert (killed / "chan.penstock-new").exists()
    subprocess.run([original, "write", str(killed / "chan"), str(REGION), str(ROLL), "270", "500"], check=True)
    with Writer.open(killed / "chan", roll_bytes=ROLL) as writer:
        append(writer, 770, 10)
        with Reader.open(killed / "chan") as reader:
            assert [record.payload for record in reader.records(timeout=0)] == [payload(n) for n in range(780)]


def precreated(path: Path) -> Path:
    Writer.precreate(path, region_bytes=REGION)
    return path
