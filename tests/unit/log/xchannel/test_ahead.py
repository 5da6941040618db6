"""Room made ahead of a writer changes when a file grows, and nothing else."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.log.xchannel import Reader, Writer, XChannelLog, ahead as module, files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="room is made ahead on Linux only")

REGION = 256 << 10
PAYLOADS = [bytes([number % 251]) * (number * 37 % 3000) for number in range(3000)]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-ahead"]


def gone(before: list[threading.Thread]) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all(thread in before for thread in threads()):
            return True
        time.sleep(0.01)
    return False


def fill(path: Path, roll_bytes: int) -> dict[str, bytes]:
    """Write a channel in pieces, with a roll by hand; return the bytes of its files, the time of each Roll left out."""
    with Writer.open(path, region_bytes=REGION, roll_bytes=roll_bytes) as writer:
        for start in range(0, len(PAYLOADS), 250):
            writer.append_many(PAYLOADS[start : start + 250], kind=1, timestamp_ns=start)
            time.sleep(0.001)  # so that the thread gets to make room
        writer.roll()
        for payload in PAYLOADS[:700]:
            writer.append(payload, 2, 5)
    found = {}
    for file in path.parent.iterdir():
        data = bytearray(file.read_bytes())
        if "penstock" in file.name:
            continue
        end = int.from_bytes(data[16:24], "little") - 32
        if end + 16 <= len(data) and data[end : end + 2] == b"\1\3":
            data[end + 8 : end + 16] = bytes(8)
        found[file.name] = bytes(data)
    return found


@pytest.mark.parametrize("regions_mapped", [256, 2])
@pytest.mark.parametrize("roll_bytes", [0, 3 * REGION, 5 * REGION + 1000])
def test_files_are_the_same_with_and_without(
    roll_bytes: int, regions_mapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WINDOW_BYTES", regions_mapped * REGION)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = threads()
    ahead = fill(tmp_path / "a" / "chan", roll_bytes)
    monkeypatch.setattr(module, "SMALLEST", 1 << 40)
    plain = fill(tmp_path / "b" / "chan", roll_bytes)
    assert {name: len(data) for name, data in ahead.items()} == {name: len(data) for name, data in plain.items()}
    assert ahead == plain
    assert gone(before)


@pytest.mark.parametrize("regions_mapped", [256, 3])
def test_a_region_is_ready_before_it_is_needed(
    regions_mapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WINDOW_BYTES", regions_mapped * REGION)  # the fourth may begin another window
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=REGION) as writer:
        for _ in range(3):
            writer.append(bytes(REGION - 200))
        deadline = time.monotonic() + 20
        while path.stat().st_size < 4 * REGION and time.monotonic() < deadline:
            time.sleep(0.001)
        assert path.stat().st_size == 4 * REGION
        assert threads()
        with XChannelLog(path) as log:
            assert list(log.verify()) == []
            assert len(log.read(log.first_position, 10)) == 3
        with Reader.open(path, "latest") as live:
            writer.append(bytes(REGION - 200))
            assert live.try_read() is not None
    assert path.stat().st_size == 4 * REGION


def test_a_limit_that_the_thread_meets_first_fails_the_append_and_not_the_channel(tmp_path: Path) -> None:  # 96, 99
    path = tmp_path / "chan"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Writer.open(path, region_bytes=REGION) as writer, Reader.open(path) as reader:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 * REGION, hard))
            for _ in range(4):
                writer.append(bytes(REGION - 200))
            for _ in range(3):
                time.sleep(0.005)
                with pytest.raises(OSError, match="too large"):
                    writer.append(bytes(REGION - 200))
                assert path.stat().st_size == 4 * REGION
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for _ in range(3):
            writer.append(bytes(REGION - 200))
        assert sum(1 for _ in reader.records(timeout=0)) == 7
    assert path.stat().st_size == 7 * REGION


def test_small_regions_and_short_writers_start_no_thread(tmp_path: Path) -> None:
    before = threads()
    with Writer.open(tmp_path / "small", region_bytes=4096) as small, Writer.open(tmp_path / "short") as short:
        small.append_many([bytes(3000)] * 50)
        short.append(b"x")
        assert all(thread in before for thread in threads())


def test_a_writer_that_can_have_no_thread_does_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # 97
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=REGION, roll_bytes=3 * REGION, keep_files=2) as writer:
        for _ in range(12):
            writer.append(bytes(REGION - 200))
    with Reader.open(path) as reader:
        assert sum(1 for _ in reader.records(timeout=0)) == 6
    assert sorted(file.name for file in tmp_path.iterdir() if "penstock-" not in file.name) == ["chan.2", "chan.3"]


def test_a_writer_that_nobody_closed_leaves_no_thread(tmp_path: Path) -> None:
    before = threads()
    writer = Writer.open(tmp_path / "chan", region_bytes=REGION)
    writer.append_many([bytes(3000)] * 500)
    assert threads() != before
    del writer
    gc.collect()
    assert gone(before)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_of_a_fork_ends_though_the_thread_is_not_there(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=REGION) as writer:
        writer.append_many([bytes(3000)] * 500)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer.close()
                del writer
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        writer.append_many([bytes(3000)] * 500)
    with Reader.open(tmp_path / "chan") as reader:
        assert sum(1 for _ in reader.records(timeout=0)) == 1000


SCRIPT = """
import sys, time
from penstock.log.xchannel import Writer
writer = Writer.open(sys.argv[1], region_bytes=256 << 10)
for number in range(3):
    writer.append(b"%d" % number + bytes((256 << 10) - 300))
print("written", flush=True)
time.sleep(60)
"""


def test_a_killed_writer_leaves_a_region_that_the_next_one_uses(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        deadline = time.monotonic() + 20
        while path.stat().st_size < 4 * REGION and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert path.stat().st_size == 4 * REGION
    with Reader.open(path, "latest") as live, Reader.open(path) as late:
        assert live.try_read() is None
        with Writer.open(path) as writer:
            writer.append(b"3" + bytes(REGION - 300))
            writer.append(b"4")
            assert [bytes(record.payload[:1]) for record in late.records(timeout=0)] == [b"0", b"1", b"2", b"3", b"4"]
            assert [bytes(record.payload[:1]) for record in live.records(timeout=0)] == [b"3", b"4"]
    with XChannelLog(path) as log:
        assert list(log.verify()) == []
