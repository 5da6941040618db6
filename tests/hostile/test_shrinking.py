"""Promise: a file that is cut, or whose lengths change, while it is mapped is an error: no signal, no foreign byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, ReadOnlyError, ReplacedError
from penstock.log.detect import open_log, open_writer
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.log.xchannel import Reader, Writer
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.types import KvUpdate, WatchCursor


def fill(path: Path, count: int = 200, size: int = 200) -> None:
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"%d" % number * 2 + bytes(size) for number in range(count)])


@pytest.mark.parametrize("way", ["one", "batches", "views"])
@pytest.mark.parametrize("size", [0, 80, 4096, 8192, 9000])
def test_a_reader_of_a_channel_that_is_cut_is_told(way: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "chan"
    fill(path)
    with Reader.open(path) as reader:
        first = reader.read(0)
        held = reader.read_batch(150)
        os.truncate(path, size)
        with pytest.raises(CorruptionError, match="chan"):  # noqa: PT012 - it may take a look or two
            for _ in range(1000):
                if way == "one":
                    while reader.try_read() is not None:
                        pass
                elif way == "batches":
                    while len(reader.read_batch()):
                        pass
                else:
                    held.to_payloads()
                    bytes(first.payload)
                    while len(reader.read_batch()):
                        pass
                reader.wait(0.02)


def test_a_writer_of_a_channel_that_is_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    writer = Writer.open(path, region_bytes=1 << 20)
    writer.append(b"x" * 100_000)
    os.truncate(path, 4096)
    with pytest.raises(CorruptionError, match="cut while its writer had it open"):  # noqa: PT012
        for _ in range(10):
            writer.append(b"y" * 1000)
    with pytest.raises(CorruptionError):
        writer.append(b"z")
    with pytest.raises(CorruptionError):
        writer.append_many([b"z"])
    writer.close()


def test_a_cut_within_the_last_page_is_told_too(tmp_path: Path) -> None:
    """It tears no mapping: what is stored there since is nowhere, without a signal."""
    path = tmp_path / "chan"
    for finish in (Writer.sync, Writer.close, Writer.roll):
        writer = Writer.open(path, region_bytes=4096)
        writer.append_many([b"x" * 100] * 10)
        os.truncate(path, 1000)
        writer.append(b"y")
        with pytest.raises(CorruptionError, match="cut while its writer had it open"):
            finish(writer)
        writer.close()
        path.unlink()


@pytest.mark.parametrize("sync", ["none", "interval", "always"])
def test_the_owner_of_a_queue_whose_segment_is_cut_is_told(sync: str, tmp_path: Path) -> None:
    """Nothing is written behind a hole, which would be read as empty messages."""
    channel = FileChannel.open(tmp_path / "jobs", ChannelOptions(sync=sync, compression="none"))  # type: ignore[arg-type]
    for number in range(60):
        channel.append(b"%02d" % number + bytes(30))
    channel.sync()
    os.truncate(tmp_path / "jobs/segment.0", 64 + 40 * 20)
    told = (CorruptionError, ReadOnlyError)  # the latter where the sync in the background was the first to see it
    with pytest.raises(told, match=r"segment\.0 at byte 864: it was cut while the channel was open"):  # noqa: PT012
        channel.append(b"new")
        channel.sync()
    with pytest.raises(ReadOnlyError):
        channel.append_many([b"newer"])
    channel.close()
    with FileChannelLog(tmp_path / "jobs") as log:
        assert len(log.read(0)) == 20


@pytest.mark.parametrize("back", [True, False], ids=["a backup in its place", "nothing in its place"])
@pytest.mark.parametrize("format", ["filechannel", "messagelog", "xchannel"])
def test_the_owner_of_a_log_that_was_moved_away_calls_nothing_durable(format: str, back: bool, tmp_path: Path) -> None:
    """Nor does it leave anything in what was put there: a mark, or a segment behind a hole."""
    here, path = tmp_path / "here", str(tmp_path / "here/log")
    here.mkdir()
    with open_writer(path, format=format) as writer:
        writer.append_many([b"kept"] * 5)
        writer.sync()
    shutil.copytree(here, tmp_path / "backup")
    writer = open_writer(path, format=format)
    writer.append_many([b"more"] * 5)
    here.rename(tmp_path / "moved")
    if back:
        shutil.copytree(tmp_path / "backup", here)
    told = (ReplacedError, ReadOnlyError)  # the latter where the sync in the background was the first to see it
    with pytest.raises(told, match="moved"):
        writer.sync()
    with contextlib.suppress(*told, FileNotFoundError):
        writer.close()
    if back:
        with open_log(path) as log:
            assert list(log.verify()) == []
            assert len(log.read(log.first_position)) == 5
        with open_writer(path, format=format) as writer:
            writer.append_many([b"new"])
        with open_log(path) as log:
            assert list(log.verify()) == []
            assert len(log.read(log.first_position)) == 6


def test_a_store_whose_file_is_cut_is_told(tmp_path: Path) -> None:
    store = AppendLogStore.open(tmp_path / "fold.snap", AppendLogOptions(compact_threshold_bytes=1 << 40))
    for number in range(100):
        store.apply([KvUpdate.put(f"k{number}", bytes(1000), number)], WatchCursor.of(number))
    os.truncate(tmp_path / "fold.snap", 4096)
    for use in (
        lambda: [store.get(f"k{number}") for number in range(100)],
        store.range,
        lambda: list(store.keys()),
        lambda: store.multi_get([f"k{number}" for number in range(100)]),
        lambda: store.apply([KvUpdate.put("k99", b"new", 200)], WatchCursor.of(200)),
    ):
        with pytest.raises(CorruptionError, match="cut"):
            use()
    store.close()


@pytest.mark.parametrize("kind", ["channel", "store"])
def test_a_writer_that_flips_lengths_while_others_read_leads_nowhere(kind: str, tmp_path: Path) -> None:
    """Under a guard page: what is behind the file's last page is not mapped, so a step too far ends the process."""
    script = textwrap.dedent(
        """
        import mmap, os, struct, sys, threading, time
        from penstock.errors import PenstockError
        kind, path = sys.argv[1], sys.argv[2]
        stop = threading.Event()
        def flip(places, values):
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                while not stop.is_set():
                    for at, size in places:
                        for value in values:
                            data[at : at + size] = value.to_bytes(4, "little")[:size]
        answers = 0
        if kind == "channel":
            from penstock.log.xchannel import Reader
            places = [(80 + 24 * n + 4, 4) for n in range(150)]
            size = os.path.getsize(path)
            thread = threading.Thread(target=flip, args=(places, (8, 3900, 1 << 27, 0xFFFFFFFF, 8)), daemon=True)
            thread.start()
            end = time.monotonic() + float(sys.argv[3])
            while time.monotonic() < end:
                try:
                    with Reader.open(path) as reader:
                        while (record := reader.try_read()) is not None:
                            assert len(record.payload) <= 4096, len(record.payload)
                            bytes(record.payload)
                            answers += 1
                    with Reader.open(path) as reader:
                        while len(batch := reader.read_batch(64)):
                            assert int(batch.payloads.lengths.max()) <= 4096
                            batch.to_payloads()
                            answers += 1
                except PenstockError:
                    answers += 1
        else:
            from penstock.store import AppendLogStore, AppendLogOptions
            from penstock.types import KvUpdate, WatchCursor
            store = AppendLogStore.open(path, AppendLogOptions(compact_threshold_bytes=1 << 40))
            for n in range(300):
                store.apply([KvUpdate.put(f"key{n:03}", b"v" * 5, n)], WatchCursor.of(n))
            # record: crc 4, kind 1, key length 2 …; a put of 7 + 6 + 4 + 5 + 1 + 8 bytes and a cursor of 6 + 8
            places = [(8 + 45 * n + 5, 2) for n in range(300)] + [(8 + 45 * n + 13, 4) for n in range(300)]
            thread = threading.Thread(target=flip, args=(places, (6, 0xFFFF, 5, 0xFFFFFFFF, 6)), daemon=True)
            thread.start()
            end = time.monotonic() + float(sys.argv[3])
            number = 1000
            while time.monotonic() < end:
                for use in (
                    lambda: store.get("key001"), store.range, lambda: list(store.keys("key1")), store.compact,
                    lambda: store.apply([KvUpdate.put(f"key{number % 300:03}", b"w" * 5)], WatchCursor.of(number)),
                    lambda: store.apply([KvUpdate.delete("key002", number)], WatchCursor.of(number)),
                ):
                    number += 1
                    try:
                        use()
                    except (PenstockError, ValueError, UnicodeDecodeError, OSError):
                        pass
                    answers += 1
        stop.set()
        thread.join()
        print(answers)
        os._exit(0)
        """
    )
    path = tmp_path / "data"
    if kind == "channel":
        with Writer.open(path, region_bytes=4096) as writer:
            writer.append_many([bytes(8)] * 160)
    run = subprocess.run(
        [sys.executable, "-c", script, kind, str(path), "1.0"], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 10


CUT_LMDB = """
import os, sys, threading
from penstock.errors import CorruptionError
from penstock.store import LmdbStore
from penstock.types import KvUpdate, WatchCursor
folder, file, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = LmdbStore.open(folder)
value = {f"k{n:03}": b"%03d" % n * (1 if n % 2 else 3000) for n in range(200)}
for n, (key, data) in enumerate(value.items()):
    store.apply([KvUpdate.put(key, data, n)], WatchCursor.of(n))
reading = threading.Event()
def cut():
    reading.wait()
    os.truncate(f"{folder}/{file}", size)
thread = threading.Thread(target=cut, daemon=True)
thread.start()
told = 0
for round in range(400):
    try:
        reading.set()
        for entry in store.range():
            assert entry.value == value[entry.key], "foreign bytes"
        for key in ("k001", "k150", "k199"):
            assert store.get(key).value == value[key], "foreign bytes"
        store.apply([KvUpdate.put("k001", value["k001"], round)], WatchCursor.of(round))
    except CorruptionError as exc:
        assert "cut while it was open" in str(exc), exc
        told += 1
        if told > 3:
            break
thread.join()
for use in (lambda: store.get("k001"), store.range, store.settle, lambda: store.apply([], WatchCursor.of(1))):
    try:
        use()
    except CorruptionError:
        told += 1
store.close()
print(told)
"""


@pytest.mark.parametrize("file", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("size", [0, 5000, 20_480, 500_001])
def test_an_lmdb_store_whose_file_is_cut_is_told(file: str, size: int, tmp_path: Path) -> None:
    """LMDB maps its files by itself; a touch of what is gone would end the process."""
    if file == "lock.mdb" and size > 8192:
        pytest.skip("it is not that long")
    run = subprocess.run(
        [sys.executable, "-c", CUT_LMDB, str(tmp_path / "fold"), file, str(size)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) >= 4
